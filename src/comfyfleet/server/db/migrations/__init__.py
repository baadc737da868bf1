"""Scripts of Alembic, one folder for each kind of database.

Internal: may change without notice.
"""
