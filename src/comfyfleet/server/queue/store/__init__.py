"""All SQL for the queue. `reads` and `writes` use SQLAlchemy Core. The hot path is implemented
separately for each database.

Internal: may change without notice.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol
from uuid import UUID

from comfyfleet.clock import Clock
from comfyfleet.server.db import Database
from comfyfleet.server.queue.model import (
    Dispatch,
    DispatchCandidate,
    DispatchLease,
    ExtendedLease,
    NewDispatch,
    QueueLane,
)


class Probe(NamedTuple):
    """The lanes to search for candidates, and the number of rows to read from each."""

    lanes: Sequence[QueueLane]
    affinities: Sequence[str]
    limit: int
    without: Sequence[str] = ()  # model sets to skip, because none of the waiters can run them


class Claim(NamedTuple):
    candidate: DispatchCandidate
    token: UUID
    worker_id: str
    is_prefetched: bool
    key_hash: str | None = None  # None means that no permissions are checked
    held_max: int | None = None  # the claim is refused if the worker holds more leases


class ClaimResult(NamedTuple):
    """The result of claims. `refused` contains the dispatches that the worker may not lease now,
    for example because it is draining or the workflow is paused. Claims that lost a race are in
    neither field.
    """

    leases: list[DispatchLease]
    refused: frozenset[int] = frozenset()  # dispatch ids


class Completion(NamedTuple):
    dispatch_id: int
    token: UUID
    duration: float | None


class Extension(NamedTuple):
    dispatch_id: int
    token: UUID
    started: bool
    worker_id: str | None = None  # the required holder; None means any worker


# A dispatch id and the token of its lease.
HeldLease = tuple[int, UUID]

# A function that receives the candidates and returns claims. Only claims of rows that are still
# queued succeed.
Chooser = Callable[[list[DispatchCandidate]], list[Claim]]


class QueueStore(Protocol):
    async def enqueue(self, new: Sequence[NewDispatch], *, now: datetime) -> list[Dispatch]:
        """Adds dispatches, commits, and returns the new ones."""

    async def lease(self, probe: Probe, choose: Chooser, *, seconds: int) -> ClaimResult: ...

    async def complete(self, batch: Sequence[Completion]) -> list[HeldLease]:
        """Completes the dispatches that are held with the given tokens. Returns each completed
        dispatch once.
        """

    async def extend(
        self, batch: Sequence[Extension], *, seconds: int
    ) -> dict[HeldLease, ExtendedLease]: ...

    async def bound(self, *, limit: int) -> list[str]:
        """Returns the affinities that queued jobs are bound to."""

    async def close(self) -> None: ...


def open_queue_store(database: Database, clock: Clock) -> QueueStore:
    if database.is_sqlite:
        from comfyfleet.server.queue.store.sqlite import SqliteQueueStore

        return SqliteQueueStore(database, clock)
    from comfyfleet.server.queue.store.postgres import PostgresQueueStore

    return PostgresQueueStore(database)
