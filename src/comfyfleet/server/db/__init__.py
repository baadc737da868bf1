"""Databases: one central, any number of tenant pools; SQLite or PostgreSQL, by URL.

Internal: may change without notice.
"""

from comfyfleet.server.db.database import (
    Database,
    Pools,
    Tx,
    count_failed_pools,
    for_each_pool,
    open_database,
)

__all__ = ["Database", "Pools", "Tx", "count_failed_pools", "for_each_pool", "open_database"]
