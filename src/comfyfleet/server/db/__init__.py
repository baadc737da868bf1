"""Databases: one central, any number of tenant pools; SQLite or PostgreSQL, by URL."""

from comfyfleet.server.db.database import Database, Pools, Tx, open_database

__all__ = ["Database", "Pools", "Tx", "open_database"]
