"""The central database and the tenant pools, which are either SQLite or PostgreSQL databases.

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
