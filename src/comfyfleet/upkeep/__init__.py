"""What is kept and for how long: retention, erasing, leftovers, and whether the books add up."""
