"""Alembic's migration scripts, with one folder for each kind of database.

Internal: may change without notice.
"""
