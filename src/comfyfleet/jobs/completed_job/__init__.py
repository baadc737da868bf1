"""One completed job, with all that follows from it."""
