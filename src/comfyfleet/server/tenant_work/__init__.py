"""Control over the work of a tenant: its runs, pipelines and triggers.

Internal: may change without notice.
"""
