"""The only SQL about pipelines."""
