"""Jobs and batches: submit, lease, finish, cancel. Joins a tenant's database and the central one.

Internal: may change without notice.
"""
