"""Both sides of jobs on real databases, with a fuse that burns between any two statements."""
