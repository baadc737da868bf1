"""What jobs cost: reserved at submit, consumed on success, refunded otherwise, exactly once."""
