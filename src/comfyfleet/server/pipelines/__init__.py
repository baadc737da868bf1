"""Pipelines: steps generate candidates, people judge them, the best get children.

Internal: may change without notice.
"""
