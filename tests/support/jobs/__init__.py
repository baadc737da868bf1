"""Jobs, graphs and pipelines on real databases, and a fuse that ends a process between any two statements."""
