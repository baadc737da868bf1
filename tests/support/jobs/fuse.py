"""Simulates a process that dies between two steps, so that no further step is executed."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from comfyfleet.server.db import Database, Pools, Tx
from comfyfleet.server.db.database import driver_of
from comfyfleet.server.jobs.context import DeferredWrites, JobContext


class ProcessDied(Exception):
    """Raised when the simulated process dies."""


class Fuse:
    """Counts steps. At the chosen step, the process dies, or another process acts first."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def burn(self) -> None:
        if self.left is None:
            return
        if self.left > 0:
            self.left -= 1
            return
        if self.meanwhile is None:
            raise ProcessDied
        self.left, act = None, self.meanwhile
        await act()

    async def burn_inside(self) -> None:
        """A step inside a transaction, where no other process can act: it would wait for the end."""
        if self.meanwhile is None:
            await self.burn()


class FusedTx:
    """Wraps a transaction so that each of its statements is a step."""

    def __init__(self, tx: Tx, fuse: Fuse) -> None:
        self._tx, self._fuse = tx, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    async def execute(self, *given: Any, **more: Any) -> Any:
        return await self._after(self._tx.execute(*given, **more))

    async def scalar(self, *given: Any, **more: Any) -> Any:
        return await self._after(self._tx.scalar(*given, **more))

    async def scalars(self, *given: Any, **more: Any) -> Any:
        return await self._after(self._tx.scalars(*given, **more))

    @property
    def sync_connection(self) -> Any:
        """The connection that sends statements which SQLAlchemy only compiles."""
        return SimpleNamespace(connection=SimpleNamespace(driver_connection=self))

    async def fetch(self, *given: Any) -> Any:
        return await self._after(driver_of(self._tx).fetch(*given))

    async def _after(self, statement: Awaitable[Any]) -> Any:
        answer = await statement
        await self._fuse.burn_inside()
        return answer


class FusedDatabase(Database):
    """Wraps a database so that there is a step before each transaction, after each statement, and
    after each commit."""

    def __init__(self, database: Database, fuse: Fuse) -> None:
        self.__dict__.update(database.__dict__)
        self._inner, self._fuse = database, fuse

    @asynccontextmanager
    async def transaction(self, *, persists: bool = True) -> AsyncIterator[Tx]:
        await self._fuse.burn()
        async with self._inner.transaction(persists=persists) as tx:
            yield FusedTx(tx, self._fuse)  # type: ignore[misc]
        await self._fuse.burn()

    @asynccontextmanager
    async def execute_one(self, *, persists: bool = True) -> AsyncIterator[Tx]:
        await self._fuse.burn()
        async with self._inner.execute_one(persists=persists) as tx:
            yield FusedTx(tx, self._fuse)  # type: ignore[misc]
        await self._fuse.burn()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Tx]:
        await self._fuse.burn()
        async with self._inner.read() as tx:
            yield tx


class FusedQueue:
    """Wraps a queue so that there is a step before and after each operation."""

    def __init__(self, queue: Any, fuse: Fuse) -> None:
        self._queue, self._fuse = queue, fuse

    def arrived(self, *rows: Any) -> None:
        self._queue.arrived(*rows)

    def push(self, *dispatch_ids: Any) -> None:
        self._queue.push(*dispatch_ids)

    def __getattr__(self, name: str) -> Any:
        """Attributes that are no operations."""
        return getattr(self._queue, name)

    async def enqueue(self, *given: Any, **more: Any) -> Any:
        return await self._step_around(self._queue.enqueue, *given, **more)

    async def lease(self, *given: Any, **more: Any) -> Any:
        return await self._step_around(self._queue.lease, *given, **more)

    async def complete(self, *given: Any, **more: Any) -> Any:
        return await self._step_around(self._queue.complete, *given, **more)

    async def extend(self, *given: Any, **more: Any) -> Any:
        return await self._step_around(self._queue.extend, *given, **more)

    async def _step_around(self, act: Any, *given: Any, **more: Any) -> Any:
        await self._fuse.burn()
        answer = await act(*given, **more)
        await self._fuse.burn()
        return answer


class UnfusedDeferred(DeferredWrites):
    """Deferred writes without steps, because they don't belong to the operation that deferred
    them."""

    def delete_outbox(self, pool: Database, words: Sequence[int], central: Database) -> None:
        super().delete_outbox(_unfused(pool), words, _unfused(central))

    def note_duration(self, central: Database, effect_id: UUID, seconds: float) -> None:
        super().note_duration(_unfused(central), effect_id, seconds)


def _unfused(database: Database) -> Database:
    return database._inner if isinstance(database, FusedDatabase) else database


def fused(context: JobContext, fuse: Fuse) -> JobContext:
    pools = Pools({name: FusedDatabase(pool, fuse) for name, pool in context.pools.items()})
    return replace(
        context,
        central=FusedDatabase(context.central, fuse),
        pools=pools,
        deferred=UnfusedDeferred(),
        queue=FusedQueue(context.queue, fuse),  # type: ignore[arg-type]
    )
