"""Manages jobs and batches in tenants' databases, and their dispatches in the central queue.

Internal: may change without notice.
"""
