"""Transactions that write on SQLite: one after another, and one commit for those that came meanwhile.

A commit waits for the disk, mostly longer than our transactions take. So whoever comes while another
writes joins its transaction, behind a savepoint, and each is done when all is committed: what was told
is on the disk, as ever, and what failed has left nothing.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from comfyfleet.db.connections import driver_of, is_usable, leave_transaction
from comfyfleet.db.losses import core_error
from comfyfleet.db.sqlite import BEGIN

COMMIT, ROLLBACK = "COMMIT", "ROLLBACK"


class _Group:
    def __init__(self, tx: AsyncConnection) -> None:
        self.tx = tx
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


@asynccontextmanager
async def _savepoint(tx: AsyncConnection) -> AsyncIterator[None]:
    await _said(tx, "SAVEPOINT mine")
    try:
        yield
    except BaseException:
        # SQLite may have given up all of the transaction, and then there is none to go back in.
        if driver_of(tx).in_transaction:
            await _said(tx, "ROLLBACK TO mine")
            await _said(tx, "RELEASE mine")
        raise
    await _said(tx, "RELEASE mine")


async def _said(tx: AsyncConnection, sql: str) -> None:
    driver = driver_of(tx)
    try:
        if sql == COMMIT:
            await driver.commit()
        elif sql == ROLLBACK:
            await driver.rollback()
        else:
            await driver.fetch(sql, ())
    except sqlite3.Error as error:
        raise core_error(error, sql) from error


class Grouped:
    """Holds `turn` for as long as something is written: others take it too."""

    def __init__(self, engine: AsyncEngine, turn: asyncio.Lock) -> None:
        self._engine = engine
        self._turn = turn
        self._line = asyncio.Lock()
        self._in_line = 0
        self._open: _Group | None = None
        self._aside: set[asyncio.Task[None]] = set()
        self._kept: AsyncConnection | None = None
        self._is_closed = False

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        async with self._my_turn():
            group = self._open
            if group is None:
                group = await self._begun()
                async with self._first_of(group) as tx:
                    yield tx
            else:
                async with _savepoint(group.tx):
                    yield group.tx
        await asyncio.shield(group.ended)

    @asynccontextmanager
    async def _my_turn(self) -> AsyncIterator[None]:
        self._in_line += 1
        try:
            await self._line.acquire()
        finally:
            self._in_line -= 1
        try:
            yield
        finally:
            self._line.release()

    @asynccontextmanager
    async def _first_of(self, group: _Group) -> AsyncIterator[AsyncConnection]:
        """Alone in it so far, and so without a savepoint."""
        try:
            yield group.tx
        except BaseException:
            await self._surely(self._end(group, keep=False))
            raise
        if self._in_line:
            self._open = group
            # Behind all who wait now, and before whoever comes later: a group does not grow forever.
            self._do_aside(self._close(group))
        else:
            await self._surely(self._end(group))

    async def _begun(self) -> _Group:
        await self._turn.acquire()
        try:
            tx, self._kept = self._kept or await self._engine.connect(), None
            try:
                await _said(tx, BEGIN)
            except BaseException:
                await self._surely(tx.close())
                raise
        except BaseException:
            self._turn.release()
            raise
        return _Group(tx)

    async def _close(self, group: _Group) -> None:
        async with self._line:
            self._open = None
            await self._end(group)

    async def _end(self, group: _Group, *, keep: bool = True) -> None:
        try:
            is_well = False
            try:
                await _said(group.tx, COMMIT if keep else ROLLBACK)
                is_well = True
            finally:
                await self._give(group.tx, is_well=is_well)
        except Exception as error:  # noqa: BLE001 — told to each who is in it
            group.ended.set_exception(error)
            group.ended.exception()  # who was cancelled does not ask
        else:
            group.ended.set_result(None)
        finally:
            self._turn.release()

    async def _give(self, tx: AsyncConnection, *, is_well: bool) -> None:
        """Kept for the next group, unless something has gone wrong with it."""
        if is_well and not self._is_closed and self._kept is None and is_usable(tx):
            await leave_transaction(tx)
            self._kept = tx
        else:
            await tx.close()

    async def close(self) -> None:
        self._is_closed = True
        if self._aside:
            await asyncio.wait(self._aside)
        tx, self._kept = self._kept, None
        if tx is not None:
            await tx.close()

    async def _surely(self, work: Coroutine[Any, Any, None]) -> None:
        """To its end, whatever happens to who waits for it."""
        await asyncio.shield(self._do_aside(work))

    def _do_aside(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        doing = asyncio.get_running_loop().create_task(work)
        self._aside.add(doing)
        doing.add_done_callback(self._aside.discard)
        return doing
