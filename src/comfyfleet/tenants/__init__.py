"""Who owns jobs, and in which pool they live."""
