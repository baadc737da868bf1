"""Jobs, graphs and pipelines on real databases, and a fuse that burns between any two statements."""
