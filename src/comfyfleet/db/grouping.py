"""Transactions that write on SQLite: one after another, and one commit for those that came meanwhile.

A commit waits for the disk, mostly longer than our transactions take. So whoever comes while another
writes joins its transaction, behind a savepoint, and each is done when all is committed: what was told
is on the disk, as ever, and what failed has left nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine


class _Group:
    def __init__(self, tx: AsyncConnection) -> None:
        self.tx = tx
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Grouped:
    """Holds `turn` for as long as something is written: others take it too."""

    def __init__(self, engine: AsyncEngine, turn: asyncio.Lock) -> None:
        self._engine = engine
        self._turn = turn
        self._line = asyncio.Lock()
        self._in_line = 0
        self._open: _Group | None = None
        self._aside: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        async with self._my_turn():
            group = self._open
            if group is None:
                group = await self._begun()
                async with self._first_of(group) as tx:
                    yield tx
            else:
                async with group.tx.begin_nested():
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
            tx = await self._engine.connect()
            try:
                await tx.begin()
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
            try:
                await (group.tx.commit() if keep else group.tx.rollback())
            finally:
                await group.tx.close()
        except Exception as error:  # noqa: BLE001 — told to each who is in it
            group.ended.set_exception(error)
            group.ended.exception()  # who was cancelled does not ask
        else:
            group.ended.set_result(None)
        finally:
            self._turn.release()

    async def _surely(self, work: Coroutine[Any, Any, None]) -> None:
        """To its end, whatever happens to who waits for it."""
        await asyncio.shield(self._do_aside(work))

    def _do_aside(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        doing = asyncio.get_running_loop().create_task(work)
        self._aside.add(doing)
        doing.add_done_callback(self._aside.discard)
        return doing
