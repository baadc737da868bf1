"""Fleets, their workers, and which workflows they may run.

Internal: may change without notice.
"""
