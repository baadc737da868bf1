"""Supports PostgreSQL behind a transaction pooler such as PgBouncer, which may use a different
server connection for each transaction.

Named prepared statements and session settings belong to a server connection, so they aren't used
with a pooler. An unnamed statement is parsed and executed in two messages. Therefore, each
statement runs inside a transaction.
"""

from typing import Any

from comfyfleet.server.db.liveness import keep_alive

BEGIN_SECONDS_MAX = 10.0
# Maximum attempts to find out whether two connections share a server connection. An attempt may
# fail because other clients use the pooler at the same time.
TRIES_MAX = 5


def pooled_arguments() -> dict[str, Any]:
    """Returns the arguments for SQLAlchemy's asyncpg dialect to connect through a pooler."""
    return {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: "",
        "async_creator_fn": _connect_in_transaction,
    }


async def _connect_in_transaction(*arguments: Any, **options: Any) -> Any:
    """Connects and begins a transaction, in which SQLAlchemy queries some types. `end_setup` ends
    the transaction afterwards.
    """
    import asyncpg  # An optional dependency, which is only installed for PostgreSQL.

    connection = await asyncpg.connect(*arguments, **options)
    try:
        await connection.execute("BEGIN", timeout=BEGIN_SECONDS_MAX)
    except BaseException:
        connection.terminate()
        raise
    return connection


def end_setup(connection: Any, _record: Any) -> None:
    keep_alive(connection.driver_connection)
    connection.run_async(lambda driver: driver.execute("COMMIT", timeout=BEGIN_SECONDS_MAX))


DIRECT_SETTINGS = {
    "central": "COMFYFLEET_CENTRAL_DATABASE_DIRECT_URL",
    "tenant": "COMFYFLEET_TENANT_DATABASE_DIRECT_URLS",
}


async def shares_connections(dsn: str) -> bool:
    """Checks whether the database is behind a pooler that assigns server connections to
    transactions and not to sessions.

    A pooler reports its own process number to its clients. If it assigns connections to
    transactions, a second client connection gets the server connection that the first one has just
    used.
    """
    import asyncpg  # An optional dependency, which is only installed for PostgreSQL.

    first = await asyncpg.connect(dsn, timeout=BEGIN_SECONDS_MAX, statement_cache_size=0)
    try:
        if await _server_process(first) == first.get_server_pid():
            return False
        second = await asyncpg.connect(dsn, timeout=BEGIN_SECONDS_MAX, statement_cache_size=0)
        try:
            for _ in range(TRIES_MAX):
                if await _server_process(first) == await _server_process(second):
                    return True
            return False
        finally:
            second.terminate()
    finally:
        first.terminate()


async def _server_process(connection: Any) -> int:
    """Returns the process number of the server connection. The query runs in a transaction, so that
    the same process parses and executes it.
    """
    async with connection.transaction():
        return int(await connection.fetchval("SELECT pg_backend_pid()", timeout=BEGIN_SECONDS_MAX))
