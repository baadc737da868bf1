"""Registered workflows: versions, properties, and the prompt that a job runs."""
