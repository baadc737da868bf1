"""Fleets, their workers, and the workflows that they may run.

This package is internal and may change without notice.
"""
