"""The queue in the central database, from which workers lease jobs for a limited time.

Internal: may change without notice.
"""
