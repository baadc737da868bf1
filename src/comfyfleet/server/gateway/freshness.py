"""Requests current facts about backends from workers when clients list node types or models.

Each backend is queried every few seconds at most, regardless of the number of clients.
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

# A query that began this long ago is still fresh enough for a list.
FRESH_SECONDS = 5.0
# How long a list waits for fresh data.
LIST_WAIT_SECONDS = 2.0
# Seconds that a query waits for the workers. A worker that has just queried its backend does it
# again after 5 s.
QUERY_SECONDS = 10.0
# Minimum seconds between the starts of two queries of one fleet, because each one ends the polls of
# its workers.
QUERY_SECONDS_APART = 0.5
# Workers per fleet that are queried.
WORKERS_ASKED_MAX = 100
KEY = "freshness"


@dataclass
class _Query:
    """A request to the workers of a fleet. `began_at` uses the monotonic clock."""

    began_at: float
    work: "asyncio.Task[None]"


class FleetQueries:
    """The queries of one fleet. One runs at a time, and all waiting callers share the next one."""

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
        """Waits for a query that began after this moment. An urgent query doesn't wait for a
        running one.
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
        """Starts a query a moment after the latest one, unless another task has started one by
        then.
        """
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
    """The queries that all requests of one process share."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._queries: dict[int, FleetQueries] = {}
        self._worker_ids: dict[int, Sequence[str]] = {}  # by fleet, as of this process's last query

    async def refresh(self, of_fleets: Sequence[Fleet]) -> None:
        """Waits a moment for data that is a few seconds old at most.

        After a request that may have changed a backend, the first list waits until the backends
        have responded, even if they are slow, because its client looks for what it has just
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
        """Checks whether other processes have queried all workers in the last seconds.

        A worker that was just queried would answer this process only after `FRESH_SECONDS`.
        """
        worker_ids = self._worker_ids.get(fleet.id)
        facts = self._plane.queue.facts
        return bool(worker_ids) and facts.have_reported(worker_ids or (), since=oldest)

    async def query(self, of_fleets: Sequence[Fleet]) -> None:
        """Waits for queries that begin after this moment, as long as the workers respond."""
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
        """Queries the workers. If the database is unavailable, stored facts are used as they are."""
        with contextlib.suppress(Unavailable):
            await self._ask_workers(fleet, is_urgent=is_urgent)

    async def _ask_workers(self, fleet: Fleet, *, is_urgent: bool) -> None:
        plane = self._plane
        seen_since = plane.clock() - timedelta(seconds=plane.settings.offline_after_seconds)
        async with plane.central.read() as tx:
            workers = await fleets.workers_of(
                tx, fleet, seen_since=seen_since, limit=WORKERS_ASKED_MAX
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
        # Only the waits end. The queries continue.
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def freshness_of(plane: ControlPlane) -> Freshness:
    kept: Freshness = plane.context.caches.gateway.setdefault(KEY, Freshness(plane))
    return kept
