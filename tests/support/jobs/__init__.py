"""Jobs, graphs and pipelines on real databases, and a fuse that simulates the death of a process
between any two statements."""
