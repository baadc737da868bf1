"""Graphs of workflows: their model, their validation, and the runs that execute them.

Internal: may change without notice.
"""
