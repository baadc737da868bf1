"""Pipelines: steps generate candidates, people judge them, and the best ones get children.

Internal: may change without notice.
"""
