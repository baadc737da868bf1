"""Registered workflows and the effects made from them: versions, properties, and the prompt that a job runs.

Internal: may change without notice.
"""
