"""Fleets, their workers, and the workflows that they may run.

Internal: may change without notice.
"""
