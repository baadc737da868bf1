"""Workflows of workflows: what a graph is, what is wrong with it, and what happens next in a run."""
