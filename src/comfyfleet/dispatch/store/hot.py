"""Lease, heartbeat and complete: what both databases offer to the queue, each in its own SQL."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol
from uuid import UUID

from comfyfleet.db import Database
from comfyfleet.dispatch.model import Candidate, Dispatch, Extended, Lane, Lease, NewDispatch
from comfyfleet.kernel.clock import Clock


class Probe(NamedTuple):
    """Where to look for candidates, and how far into each lane."""

    lanes: Sequence[Lane]
    affinities: Sequence[str]
    limit: int
    without: Sequence[str] = ()  # model sets that none of those who ask can run


class Claim(NamedTuple):
    candidate: Candidate
    token: UUID
    worker_id: str
    is_prefetched: bool
    key_hash: str | None = None  # None: no orders to a worker stand against it
    held_max: int | None = None  # refused if the worker holds more leases by now


class Claimed(NamedTuple):
    """What came of the claims. `refused`: by orders to the worker that asked, not by a race."""

    leases: list[Lease]
    refused: frozenset[int] = frozenset()  # dispatch ids


class Completion(NamedTuple):
    dispatch_id: int
    token: UUID
    duration: float | None


class Extension(NamedTuple):
    dispatch_id: int
    token: UUID
    started: bool
    worker_id: str | None = None  # None: whoever holds it


# A dispatch and the token that speaks for it.
Held = tuple[int, UUID]

# Called with what was found; what it answers is claimed, if it is still queued then.
Chooser = Callable[[list[Candidate]], list[Claim]]


class HotStore(Protocol):
    async def enqueue(self, new: Sequence[NewDispatch], *, now: datetime) -> list[Dispatch]:
        """Those that are new, committed."""

    async def lease(self, probe: Probe, choose: Chooser, *, seconds: int) -> Claimed: ...

    async def complete(self, said: Sequence[Completion]) -> list[Held]:
        """Those that were held with that token, and are completed now; each once."""

    async def extend(self, said: Sequence[Extension], *, seconds: int) -> dict[Held, Extended]: ...

    async def bound(self, *, limit: int) -> list[str]:
        """The affinities for which something waits."""

    async def close(self) -> None: ...


def open_hot(database: Database, clock: Clock) -> HotStore:
    if database.is_sqlite:
        from comfyfleet.dispatch.store.sqlite import SqliteHot

        return SqliteHot(database, clock)
    from comfyfleet.dispatch.store.postgres import PostgresHot

    return PostgresHot(database)
