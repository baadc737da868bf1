"""A database by its URL: transactions, read-only looks, and one writer at a time on SQLite."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeAlias

from sqlalchemy import Connection, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from comfyfleet.db import sqlite
from comfyfleet.db.grouping import Grouped
from comfyfleet.db.losses import is_loss_within, is_misfit_within
from comfyfleet.db.outages import Outages
from comfyfleet.kernel.errors import InvalidInput, Unavailable
from comfyfleet.kernel.extras import missing_extra

Tx: TypeAlias = AsyncConnection

# More than about eight connections make the queue slower, not faster.
POSTGRES_CONNECTIONS = 8
WRITES = "comfyfleet_writes"
MISFIT = "a number is larger, or a text holds other characters, than a database can keep"
LOST = "the connection to the database was lost"
DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}


class Database:
    """One database. `begin` is a transaction that writes, `look` one that only reads."""

    def __init__(self, url: str, engine: AsyncEngine) -> None:
        self.url = url
        self.engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        # SQLite lets one transaction write; those that wait do so in line, not by polling the file.
        self.turn = asyncio.Lock()
        self.outages = Outages(engine.url.render_as_string(hide_password=True))
        self._writing = Grouped(engine.execution_options(**{WRITES: True}), self.turn)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Tx]:
        if self.is_sqlite:
            with self.outages.watched(), _telling_loss():
                async with self._writing.begin() as tx:
                    yield tx
        else:
            async with self._connected() as tx, _transaction(driver_of(tx)):
                yield tx

    @asynccontextmanager
    async def look(self) -> AsyncIterator[Tx]:
        """On PostgreSQL each statement sees what is committed by then, as in any transaction of ours:
        so none is begun, which saves two of three round trips."""
        async with self._connected() as tx:
            yield tx

    @asynccontextmanager
    async def say(self) -> AsyncIterator[Tx]:
        """For one statement that writes: on PostgreSQL it is a transaction by itself."""
        async with self.begin() if self.is_sqlite else self._connected() as tx:
            yield tx

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Tx]:
        with self.outages.watched(), _telling_loss():
            tx = await _reached(self.engine)
            try:
                yield tx
            finally:
                if self.is_sqlite:
                    await asyncio.shield(asyncio.create_task(tx.close()))
                else:
                    # Nothing is said to the server, so that no cancelling can come in between.
                    await tx.close()

    async def close(self) -> None:
        await self.engine.dispose()


def driver_of(tx: Tx) -> Any:
    """The driver's own connection, inside of the same transaction."""
    connection = tx.sync_connection
    return None if connection is None else connection.connection.driver_connection


@asynccontextmanager
async def _transaction(driver: Any) -> AsyncIterator[None]:
    transaction = driver.transaction()
    try:
        await transaction.start()
        try:
            yield
        except BaseException:
            # Who was cancelled in a statement has no connection any more: that is no loss to tell.
            if not driver.is_closed():
                await transaction.rollback()
            raise
        await transaction.commit()
    finally:
        # Cut off in its last word: the connection must not go back with a transaction open.
        if not driver.is_closed() and driver.is_in_transaction():
            driver.terminate()


async def _reached(engine: AsyncEngine) -> Tx:
    """A database that is away is told apart from a statement that is wrong."""
    try:
        return await engine.connect()
    except OSError as error:  # its socket is gone, its host unknown
        raise Unavailable(f"the database can't be reached: {error}") from error
    except DBAPIError as error:  # it is there, and lets us not in
        raise Unavailable(f"the database can't be opened: {error.orig}") from error
    except PoolTimeout as error:
        raise Unavailable("all connections to the database are in use") from error
    except Exception as error:
        # Lost while the connection was being set up: the driver's own error, as nobody wrapped it.
        if not is_loss_within(error):
            raise
        raise Unavailable(f"the database can't be reached: {error}") from error


@contextmanager
def _telling_loss() -> Iterator[None]:
    try:
        yield
    except (ConnectionError, TimeoutError) as error:
        raise Unavailable(f"the database can't be reached: {error}") from error
    except OverflowError as error:
        if "SQLite INTEGER" in str(error):  # its driver, of a number beyond 64 bits
            raise InvalidInput(MISFIT) from error
        raise
    except Exception as error:
        if is_loss_within(error):
            raise Unavailable(LOST) from error
        if is_misfit_within(error):
            raise InvalidInput(MISFIT) from error
        raise


def open_database(url: str) -> Database:
    """`sqlite:///file` or `postgresql://user:password@host/name`; connects at first use."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidInput(
            "a database URL must look like sqlite:///file or postgresql://…"
        ) from None
    kind = parsed.get_backend_name()
    if kind == "postgres" or kind not in DRIVERS:
        raise InvalidInput(f"{kind} is no database we know; use sqlite:///file or postgresql://…")
    target = parsed.set(drivername=DRIVERS[kind])
    options: dict[str, Any] = {"pool_size": POSTGRES_CONNECTIONS, "max_overflow": 4}
    if kind == "sqlite":
        options["async_creator"] = partial(sqlite.connect, parsed.database or ":memory:")
    else:
        # Transactions are begun by us; SQLAlchemy must not begin its own around a look.
        options["isolation_level"] = "AUTOCOMMIT"
    try:
        engine = create_async_engine(target, **options)
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        raise missing_extra("PostgreSQL", error.name, "postgres") from error
    if kind == "postgresql":
        event.listen(engine.sync_engine, "checkout", _require_open)
    if kind == "sqlite":
        event.listen(engine.sync_engine, "connect", prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return Database(url, engine)


def _require_open(connection: Any, _record: Any, _proxy: Any) -> None:
    """The pool opens another. The driver knows that a server has gone without asking it each time."""
    if connection.driver_connection.is_closed():
        raise DisconnectionError("the server has closed the connection")


def prepare_sqlite(connection: Any, _record: Any) -> None:
    # Transactions are begun by us, with BEGIN IMMEDIATE; the driver must not begin its own.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        f"busy_timeout={sqlite.BUSY_MS}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """Nothing is begun for a look: each statement sees what is committed by then, as on PostgreSQL."""
    if connection.get_execution_options().get(WRITES):
        # At once: a transaction that reads first and writes later fails when another wrote.
        connection.exec_driver_sql(sqlite.BEGIN)
