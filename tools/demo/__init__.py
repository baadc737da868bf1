"""A local demo of all components with sample data on every page. `make demo` starts it."""
