"""Connections that are kept at hand: SQLAlchemy's pool takes longer than most of our statements.

The pool still opens and closes them. What was cancelled, failed, or is open while the database closes
goes back to it; only a connection that was used to its end is lent again as it is.
"""

import asyncio
from typing import Any, TypeAlias

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from comfyfleet.db.losses import is_loss_within
from comfyfleet.kernel.errors import Unavailable

Tx: TypeAlias = AsyncConnection
# More than about eight connections make the queue slower, not faster.
KEPT_MAX = 8
OVERFLOW_MAX = 4
# The rest is for those who hold one for long: turns, and the one that writes on SQLite.
LENT_MAX = KEPT_MAX + OVERFLOW_MAX - 2
WAIT_SECONDS_MAX = 30
ALL_IN_USE = "all connections to the database are in use"


class Connections:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._idle: list[Tx] = []
        self._room = asyncio.Semaphore(LENT_MAX)
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()

    async def take(self) -> Tx:
        await self._wait_for_room()
        try:
            while self._idle:
                tx = self._idle.pop()
                if is_usable(tx):
                    return tx
                await tx.close()
            return await reached(self._engine)
        except BaseException:
            self._room.release()
            raise

    async def give(self, tx: Tx, *, is_well: bool) -> None:
        try:
            if is_well and not self._is_closed and len(self._idle) < KEPT_MAX and is_usable(tx):
                await leave_transaction(tx)
                self._idle.append(tx)
            elif self._is_sqlite:
                await asyncio.shield(self._close_aside(tx))
            else:
                # Nothing is said to the server, so that no cancelling can come in between.
                await tx.close()
        finally:
            self._room.release()

    async def close(self) -> None:
        self._is_closed = True
        while self._idle:
            await self._idle.pop().close()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _wait_for_room(self) -> None:
        if not self._room.locked():
            await self._room.acquire()
            return
        try:
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                await self._room.acquire()
        except TimeoutError:
            raise Unavailable(ALL_IN_USE) from None

    def _close_aside(self, tx: Tx) -> "asyncio.Task[None]":
        closing = asyncio.get_running_loop().create_task(tx.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing


def driver_of(tx: Tx) -> Any:
    """The driver's own connection, inside of the same transaction."""
    connection = tx.sync_connection
    return None if connection is None else connection.connection.driver_connection


def is_usable(tx: Tx) -> bool:
    """Not lost, and in no transaction of the driver. It knows both without asking the server."""
    if tx.closed or tx.invalidated:
        return False
    driver = driver_of(tx)
    if tx.dialect.name == "sqlite":
        return not driver.in_transaction
    return not driver.is_closed() and not driver.is_in_transaction()


async def leave_transaction(tx: Tx) -> None:
    """SQLAlchemy begins one of its own for a statement in Core. There is none in the database, so
    nothing is sent, and nothing is waited for."""
    if tx.in_transaction():
        await tx.rollback()


async def reached(engine: AsyncEngine) -> Tx:
    """A database that is away is told apart from a statement that is wrong."""
    try:
        return await engine.connect()
    except OSError as error:  # its socket is gone, its host unknown
        raise Unavailable(f"the database can't be reached: {error}") from error
    except DBAPIError as error:  # it is there, and lets us not in
        raise Unavailable(f"the database can't be opened: {error.orig}") from error
    except PoolTimeout as error:
        raise Unavailable(ALL_IN_USE) from error
    except Exception as error:
        # Lost while the connection was being set up: the driver's own error, as nobody wrapped it.
        if not is_loss_within(error):
            raise
        raise Unavailable(f"the database can't be reached: {error}") from error
