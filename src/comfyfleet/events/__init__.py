"""What happened to a job, in order, for whoever follows it."""
