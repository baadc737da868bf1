"""Pipelines on real databases, with a worker that is played by hand."""
