"""Databases: one central, any number of tenant pools; SQLite or PostgreSQL, by URL."""

from comfyfleet.db.engine import Database, Tx, open_database
from comfyfleet.db.pools import Pools

__all__ = ["Database", "Pools", "Tx", "open_database"]
