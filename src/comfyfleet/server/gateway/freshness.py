"""Queries workers for current facts about their backends when clients list node types or models.

Each backend is queried at most once every few seconds, regardless of the number of clients.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

from comfyfleet.errors import Unavailable
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet

# Lists use the results of an earlier query if it is at most this many seconds old.
FRESH_SECONDS = 5.0
# Maximum seconds that a list waits for fresh data.
LIST_WAIT_SECONDS = 2.0
# Maximum seconds that a query waits for the workers. A worker queries its backend at most once
# every 5 seconds.
QUERY_SECONDS = 10.0
# Minimum seconds between the starts of two queries of the same fleet. Each query ends the pending
# polls of the fleet's workers.
QUERY_SECONDS_APART = 0.5
# Maximum number of workers per fleet that are queried.
WORKERS_QUERIED_MAX = 100
KEY = "freshness"


@dataclass
class _Query:
    """A query to the workers of a fleet. `began_at` is measured with the monotonic clock."""

    began_at: float
    work: "asyncio.Task[None]"


class FleetQueries:
    """The queries to a fleet's workers. Only urgent queries run concurrently with others. All
    waiting callers share the next query.
    """

    def __init__(
        self,
        ask: Callable[[bool], Coroutine[Any, Any, None]],
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._sleep = sleep
        self._latest: _Query | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    async def wait(self, *, began_after: float, is_urgent: bool = False) -> None:
        """Waits for the result of a query that began after `began_after`. An urgent query starts
        immediately, even if another query is running.
        """
        while True:
            latest = self._latest
            if latest is not None and latest.began_at >= began_after:
                await asyncio.shield(latest.work)
                return
            if latest is None or is_urgent:
                await self._start_next(latest, is_urgent=is_urgent)
                continue
            async with self._turn:
                if self._latest is latest:
                    await asyncio.shield(latest.work)
                await self._start_next(latest, is_urgent=False)

    async def _start_next(self, latest: _Query | None, *, is_urgent: bool) -> None:
        """Waits until a new query may start, and starts it unless another task has already started
        one."""
        pause = 0.0 if latest is None else latest.began_at + QUERY_SECONDS_APART - self._clock()
        if pause > 0:
            await self._sleep(pause)
        if self._latest is latest:
            self._start(is_urgent=is_urgent)

    def _start(self, *, is_urgent: bool) -> None:
        query = _Query(self._clock(), asyncio.create_task(self._ask(is_urgent)))
        self._latest = query
        self._running.add(query.work)
        query.work.add_done_callback(self._running.discard)


class Freshness:
    """The queries to all fleets, which the requests in this process share."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._queries: dict[int, FleetQueries] = {}
        self._worker_ids: dict[int, Sequence[str]] = {}  # workers in the last query, by fleet id

    async def refresh(self, of_fleets: Sequence[Fleet]) -> None:
        """Waits up to `LIST_WAIT_SECONDS` for data that is at most a few seconds old.

        After a request that may have changed a backend, the first list waits until the backends
        have responded, even if they are slow. Its client probably looks for a file that it has just
        uploaded.
        """
        oldest = monotonic() - FRESH_SECONDS
        facts = self._plane.queue.facts
        after_changes = [
            self._of(fleet).wait(began_after=changed_at, is_urgent=True)
            for fleet in of_fleets
            if (changed_at := facts.changed_at(fleet.id)) is not None
        ]
        await _wait_for_all(after_changes, None)
        waits = [
            self._of(fleet).wait(began_after=oldest)
            for fleet in of_fleets
            if not self._has_fresh_data(fleet, oldest)
        ]
        await _wait_for_all(waits, LIST_WAIT_SECONDS)

    def _has_fresh_data(self, fleet: Fleet, oldest: float) -> bool:
        """Checks whether all workers have reported facts in the last few seconds, for example
        because another process has queried them.

        A worker that has just been queried wouldn't respond to a new query for `FRESH_SECONDS`.
        """
        worker_ids = self._worker_ids.get(fleet.id)
        facts = self._plane.queue.facts
        return bool(worker_ids) and facts.have_reported(worker_ids or (), since=oldest)

    async def query(self, of_fleets: Sequence[Fleet]) -> None:
        """Queries these fleets and waits for the results. Ignores queries that began earlier."""
        now = monotonic()
        await _wait_for_all([self._of(fleet).wait(began_after=now) for fleet in of_fleets], None)

    def _of(self, fleet: Fleet) -> FleetQueries:
        queries = self._queries.get(fleet.id)
        if queries is None:
            queries = self._queries[fleet.id] = FleetQueries(
                lambda is_urgent: self._ask(fleet, is_urgent=is_urgent)
            )
        return queries

    async def _ask(self, fleet: Fleet, *, is_urgent: bool) -> None:
        """Queries the workers. Does nothing if the database is unavailable, so that callers use the
        stored facts.
        """
        with contextlib.suppress(Unavailable):
            await self._ask_workers(fleet, is_urgent=is_urgent)

    async def _ask_workers(self, fleet: Fleet, *, is_urgent: bool) -> None:
        plane = self._plane
        seen_since = plane.clock() - timedelta(seconds=plane.settings.offline_after_seconds)
        async with plane.central.read() as tx:
            workers = await fleets.workers_of(
                tx, fleet, seen_since=seen_since, limit=WORKERS_QUERIED_MAX
            )
        ids = [worker.worker_id for worker in workers if worker.takes_jobs]
        self._worker_ids[fleet.id] = ids
        if ids:
            await plane.queue.facts.ask(ids, is_urgent=is_urgent, seconds=QUERY_SECONDS)


async def _wait_for_all(waits: Iterable[Coroutine[Any, Any, None]], seconds: float | None) -> None:
    waiting = [asyncio.create_task(wait) for wait in waits]
    if not waiting:
        return
    try:
        await asyncio.wait(waiting, timeout=seconds)
    finally:
        # This cancels only the waits. The queries continue.
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def freshness_of(plane: ControlPlane) -> Freshness:
    freshness: Freshness = plane.context.caches.gateway.setdefault(KEY, Freshness(plane))
    return freshness
