"""A database by its URL: transactions, read-only looks, and one writer at a time on SQLite."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from comfyfleet.db import sqlite
from comfyfleet.db.connections import KEPT_MAX, OVERFLOW_MAX, Connections, Tx, driver_of
from comfyfleet.db.grouping import Grouped
from comfyfleet.db.losses import is_loss_within, is_misfit_within
from comfyfleet.db.outages import Outages
from comfyfleet.kernel.errors import InvalidInput, Unavailable
from comfyfleet.kernel.extras import missing_extra

__all__ = ["Database", "Tx", "driver_of", "open_database", "prepare_sqlite"]

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
        self._writing = Grouped(engine, self.turn)
        self._connections = Connections(engine)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Tx]:
        if self.is_sqlite:
            with self.outages.watched(), _telling_loss():
                async with self._writing.begin() as tx:
                    yield tx
        else:
            async with self.look() as tx, _transaction(driver_of(tx)):
                yield tx

    @asynccontextmanager
    async def look(self) -> AsyncIterator[Tx]:
        """On PostgreSQL each statement sees what is committed by then, as in any transaction of ours:
        so none is begun, which saves two of three round trips."""
        with self.outages.watched(), _telling_loss():
            tx = await self._connections.take()
            is_well = False
            try:
                yield tx
                is_well = True
            finally:
                await self._connections.give(tx, is_well=is_well)

    @asynccontextmanager
    async def say(self) -> AsyncIterator[Tx]:
        """For one statement that writes: on PostgreSQL it is a transaction by itself."""
        async with self.begin() if self.is_sqlite else self.look() as tx:
            yield tx

    async def close(self) -> None:
        await self._writing.close()
        await self._connections.close()
        await self.engine.dispose()


@asynccontextmanager
async def _transaction(driver: Any) -> AsyncIterator[None]:
    transaction = driver.transaction()
    try:
        await transaction.start()
    except BaseException:
        # Cut off in its first word: the driver would take the next transaction for one inside of it.
        driver.terminate()
        raise
    try:
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
    options: dict[str, Any] = {"pool_size": KEPT_MAX, "max_overflow": OVERFLOW_MAX}
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
