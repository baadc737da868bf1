"""The driver itself, for the few statements that run at every lease, heartbeat and complete.

SQLAlchemy takes more time for those than the database does. Connections here are never shared with
anything else, so that they need no reset, and may tell PostgreSQL how these statements are planned.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy.engine import make_url

from comfyfleet.db.engine import Database, prepare_sqlite
from comfyfleet.db.losses import is_loss
from comfyfleet.kernel.errors import Unavailable

T = TypeVar("T")
CONNECT_SECONDS_MAX = 10
STATEMENT_SECONDS_MAX = 60
# Every statement has its index. Statistics that are old (or none, after a bulk load) would make the
# planner believe that reading the table is cheaper, and with a million rows it never is.
PLANNING = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}


class PostgresDirect:
    """A few connections of asyncpg; a statement is a transaction."""

    def __init__(self, url: str) -> None:
        self._dsn = dsn(url)
        self._idle: list[Any] = []

    async def fetch(self, sql: str, *values: Any, locks: Sequence[int] = ()) -> list[Any]:
        """With locks, those are taken first, in one transaction with the statement."""
        connection = await self._take()
        try:
            if locks:
                await connection.execute(_begin_with(locks), timeout=STATEMENT_SECONDS_MAX)
            rows: list[Any] = await connection.fetch(sql, *values, timeout=STATEMENT_SECONDS_MAX)
            if locks:
                await connection.execute("COMMIT", timeout=STATEMENT_SECONDS_MAX)
        except BaseException as error:
            # Whatever happened, this connection is not trusted with the next statement.
            is_lost = connection.is_closed() or is_loss(error)
            connection.terminate()
            if is_lost and isinstance(error, Exception):
                raise Unavailable("the connection to the database was lost") from error
            raise
        self._idle.append(connection)
        return rows

    async def _take(self) -> Any:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await connect(self._dsn, PLANNING)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()


class SqliteDirect:
    """One connection in one thread: a whole batch is one hop to it, one transaction, one commit."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._path = make_url(database.url).database or ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="comfyfleet-queue")
        self._connection: sqlite3.Connection | None = None

    async def run(self, act: Callable[[sqlite3.Connection], T]) -> T:
        async with self._database.turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._in_transaction, act)

    def _in_transaction(self, act: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            self._connection = sqlite3.connect(self._path)
            prepare_sqlite(self._connection, None)
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = act(connection)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        return result

    async def close(self) -> None:
        def close() -> None:
            if self._connection is not None:
                self._connection.close()

        await asyncio.get_running_loop().run_in_executor(self._thread, close)
        self._thread.shutdown()


def _begin_with(locks: Sequence[int]) -> str:
    """Without parameters it is one round trip. A statement that itself waited for a lock would not
    see what was committed meanwhile; the next one does."""
    keys = ", ".join(map(str, map(int, locks)))
    return f"BEGIN; SELECT pg_advisory_xact_lock(key) FROM unnest(ARRAY[{keys}]::bigint[]) AS key"  # noqa: S608


def dsn(url: str) -> str:
    """A URL of SQLAlchemy as asyncpg reads it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


async def connect(dsn: str, server_settings: dict[str, str]) -> Any:
    import asyncpg  # optional: only whoever uses PostgreSQL has it

    try:
        return await asyncpg.connect(
            dsn, timeout=CONNECT_SECONDS_MAX, server_settings=server_settings
        )
    except Exception as error:
        if is_loss(error):
            raise Unavailable(f"the database can't be reached: {error}") from error
        raise
