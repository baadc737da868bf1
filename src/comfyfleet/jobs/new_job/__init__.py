"""One new job, with all that belongs to it."""
