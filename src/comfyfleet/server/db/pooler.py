"""PostgreSQL behind a pooler such as PgBouncer, which may give each transaction another server connection.

Named prepared statements and session settings belong to a server connection, so none are used there. An unnamed
statement is parsed and executed in two messages, so each statement runs inside a transaction.
"""

from typing import Any

from comfyfleet.server.db.liveness import keep_alive

BEGIN_SECONDS_MAX = 10.0
# Ways to find out that two of our connections share a server connection. Others may use the pooler meanwhile.
TRIES_MAX = 5


def pooled_arguments() -> dict[str, Any]:
    """Returns arguments of SQLAlchemy's asyncpg dialect for connections through a transaction pooler."""
    return {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: "",
        "async_creator_fn": _connect_in_transaction,
    }


async def _connect_in_transaction(*arguments: Any, **options: Any) -> Any:
    """SQLAlchemy asks for some types when it has connected: `end_setup` ends the transaction around that."""
    import asyncpg  # optional: only whoever uses PostgreSQL has it

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
    """Whether a pooler gives server connections to transactions instead of sessions.

    A pooler tells its clients a process number of its own. With two connections to it, the second one gets the
    server connection that the first one has just used, unless the first one keeps it for its session.
    """
    import asyncpg  # optional: only whoever uses PostgreSQL has it

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
    """Returns the server's process. In a transaction, so that it is one process that parses and executes."""
    async with connection.transaction():
        return int(await connection.fetchval("SELECT pg_backend_pid()", timeout=BEGIN_SECONDS_MAX))
