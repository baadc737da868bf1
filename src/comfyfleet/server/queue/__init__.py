"""The leased queue in the central database: enqueue, lease, extend, end, expire.

Internal: may change without notice.
"""
