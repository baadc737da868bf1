"""A control plane in memory, and workers beside it."""
