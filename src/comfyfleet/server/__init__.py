"""The control plane: everything that `comfyfleet serve` runs."""
