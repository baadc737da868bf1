"""A control plane with every part at work, and something to look at on every page. `make demo` starts it."""
