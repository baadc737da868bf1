"""Handles a worker's long poll for a job: reads its permissions and leases, and waits for a job."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import NamedTuple

from comfyfleet.api.values import OutputSlot
from comfyfleet.api.worker import BackendFacts, FactsReport, FactsReported, Job, Poll, Polled
from comfyfleet.errors import FleetError, TooManyCalls
from comfyfleet.server.db import Tx
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.fleets import model as fleet_model
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import (
    BackendOffer,
    FleetLane,
    FleetWorker,
    Sighting,
    apply_sighting,
    is_worth_writing,
    sighting_interval,
    why_no_lanes,
)
from comfyfleet.server.fleets.object_info import upload_slot
from comfyfleet.server.jobs import context as job_context
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.finish import requeue
from comfyfleet.server.jobs.lease import build_payload, lease_next
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch, DispatchLease, QueueLane, RequeueReason, Waiter

# Maximum number of seconds that a poll waits if it can't get a job or must deliver a new key.
HELD_BACK_SECONDS = 2.0
MAINTENANCE_REASON = "maintenance mode is on, so no new jobs are leased"
# Each wait is shortened by a random fraction up to this value, so that workers that connected at
# the same moment don't poll again at the same moment.
WAIT_SPREAD = 0.1
_dice = Random()  # noqa: S311 - not for secrets
# Maximum number of waiting polls per worker. Normally there is one, and a few more until lost
# connections are detected.
WAITING_PER_WORKER_MAX = 8
# Maximum size in bytes of a poll's message that is kept in memory during the wait. A poll with a
# larger message returns immediately.
KEPT_BYTES_MAX = 1024**2


@dataclass(frozen=True)
class WorkerSnapshot:
    """The state of a worker when it polls."""

    worker: FleetWorker
    lanes: frozenset[QueueLane]
    offer: BackendOffer | None
    held: tuple[int, ...]  # dispatch ids
    load: int  # number of jobs that the worker still has to run
    is_alone: bool  # whether no other live worker could run its jobs
    maintenance: bool
    no_lanes: str  # the reason why the worker may not run any job, or an empty string
    # The queue's count of `dismissals` before the state was read. If the count has increased since
    # then, the state may be outdated.
    as_of: int


class ReadWithKey(NamedTuple):
    """The part of a worker's state that was read when its key was checked."""

    standing: fleet_model.WorkerStanding
    as_of: int  # see WorkerSnapshot


@dataclass(frozen=True, slots=True)
class PollWait:
    """A single wait during a poll. If `waiter` is set, the poll waits in the queue, where it may
    get a lease. Otherwise, the poll just sleeps.
    """

    seconds: float
    as_of: int
    waiter: Waiter | None = None


async def poll(
    context: JobContext, worker: FleetWorker, request: Poll, read: ReadWithKey | None = None
) -> Polled:
    """Waits for a job for the worker. Returns the job, or the reason why the worker gets none."""
    polling = PollSession(worker, request)
    try:
        result = await polling.begin(context, worker, request, read)
        while isinstance(result, PollWait):
            result = await polling.resume(context, await _wait_for_lease(context, result))
    finally:
        polling.end(context)
    return result


async def _wait_for_lease(context: JobContext, wait: PollWait) -> DispatchLease | None:
    if wait.waiter is None:
        await asyncio.sleep(wait.seconds)
        return None
    return await context.queue.lease(wait.waiter, wait_seconds=wait.seconds, as_of=wait.as_of)


class PollSession:
    """A poll and its waits. The worker's permissions are read again whenever a wait ends. A change
    of permissions ends the wait, either when this process is notified of it or when
    `WaitingWorkerRefresher` finds it.

    Ten thousand sessions may wait at the same time, so each one uses as little memory as possible.
    """

    __slots__ = (
        "_is_counted",
        "_is_draining",
        "_key_hash",
        "_message",
        "_new_key",
        "_reason",
        "_until",
        "_wait",
        "_worker_id",
    )

    def __init__(self, worker: FleetWorker, request: Poll) -> None:
        self._worker_id, self._key_hash = worker.worker_id, worker.key_hash
        seconds = request.wait_seconds * (1 - WAIT_SPREAD * _dice.random())
        self._until = asyncio.get_running_loop().time() + seconds
        self._message = b""
        self._wait: PollWait | None = None
        self._reason: str | None = None
        self._new_key: str | None = None
        self._is_draining = False
        self._is_counted = False

    async def begin(
        self,
        context: JobContext,
        worker: FleetWorker,
        request: Poll,
        read: ReadWithKey | None = None,
    ) -> Polled | PollWait:
        """Starts the poll. `worker` and, if set, `read` were read when the key was checked."""
        result = await self._look(context, worker, request, read)
        if not isinstance(result, PollWait):
            return result
        # The request is kept as JSON during the wait, because this takes a third of the memory.
        message = request.model_dump_json(exclude_unset=True).encode()
        if len(message) > KEPT_BYTES_MAX:
            return await self._polled(context, request, None)
        self._count(context)
        self._message = message
        return result

    def _count(self, context: JobContext) -> None:
        waiting = context.polls.waiting
        if waiting[self._worker_id] >= WAITING_PER_WORKER_MAX:
            raise TooManyCalls(f"this worker already has {WAITING_PER_WORKER_MAX} waiting polls")
        waiting[self._worker_id] += 1
        self._is_counted = True

    def end(self, context: JobContext) -> None:
        """Ends the session, which then no longer counts as a waiting poll. Must be called after
        `begin`, even if the poll has failed.
        """
        if not self._is_counted:
            return
        self._is_counted = False
        context.polls.waiting[self._worker_id] -= 1
        if not context.polls.waiting[self._worker_id]:
            del context.polls.waiting[self._worker_id]

    async def resume(self, context: JobContext, lease: DispatchLease | None) -> Polled | PollWait:
        """Continues the poll after a wait."""
        request, wait = Poll.model_validate_json(self._message), self._wait
        if wait is None:
            raise ValueError("the poll can't be resumed, because it has not waited yet")
        job = None
        if lease is not None:
            tells_leases = wait.waiter is not None and wait.waiter.tells_leases
            job = await build_payload(context, lease, gives_back=not tells_leases)
        remaining = self._left()
        if job is None and lease is not None and remaining:
            # The leased job had already ended or can't be run now, so the poll waits for another
            # one.
            return self._waits(PollWait(remaining, wait.as_of, wait.waiter))
        if (
            job is None
            and self._reason is None
            and not remaining
            and await _in_maintenance(context)
        ):
            self._reason = MAINTENANCE_REASON  # maintenance began during the wait
        if job or self._new_key or not remaining:
            return await self._polled(context, request, job)
        async with context.polls.reads:
            return await self._look(context, await self._worker(context), request, is_old=True)

    async def _worker(self, context: JobContext) -> FleetWorker:
        async with context.central.read() as tx:
            return await fleets.reauthenticate(tx, self._worker_id, self._key_hash)

    def _left(self) -> float:
        return max(0.0, self._until - asyncio.get_running_loop().time())

    async def _look(
        self,
        context: JobContext,
        worker: FleetWorker,
        request: Poll,
        read: ReadWithKey | None = None,
        *,
        is_old: bool = False,
    ) -> Polled | PollWait:
        standing = await _snapshot(context, worker, request, read, is_old=is_old)
        worker, remaining = standing.worker, self._left()
        if worker.is_draining and self._wait and not self._is_draining:
            # A worker that begins to drain is notified immediately. One that is already draining
            # waits.
            remaining = 0.0
        if context.queue.facts.is_wanted(self._worker_id):
            remaining = 0.0
        self._reason, self._new_key = _why_nothing(standing, request), worker.next_key
        self._is_draining = worker.is_draining
        if self._new_key is not None:
            # The poll returns the new key after a short wait. Otherwise, a worker that ignores the
            # key would poll without a pause.
            remaining = min(remaining, HELD_BACK_SECONDS)
        job = await _resend_lost_lease(context, standing, request)
        waiter = None
        if job is None and self._reason is None:
            waiter = _waiter(standing, request)
            job = await _lease_at_once(context, waiter, standing.as_of, waits=remaining > 0)
        if job or not remaining:
            return await self._polled(context, request, job)
        if waiter is None and (standing.maintenance or not standing.lanes):
            waiter = _without_lanes(standing)
        seconds = remaining if waiter else min(remaining, HELD_BACK_SECONDS)
        return self._waits(PollWait(seconds, standing.as_of, waiter))

    def _waits(self, wait: PollWait) -> PollWait:
        self._wait = wait
        return wait

    async def _polled(self, context: JobContext, request: Poll, job: Job | None) -> Polled:
        slot = None
        if request.backend is not None:
            slot = await _upload_slot(context, await self._worker(context), request.backend)
        return Polled(
            job=job,
            reason=None if job else self._reason or "no job is queued for this worker",
            drain=self._is_draining,
            object_info_upload=slot,
            new_token=self._new_key,
            facts_wanted=context.queue.facts.take(self._worker_id),
        )


async def note_facts(
    context: JobContext, worker: FleetWorker, report: FactsReport
) -> FactsReported:
    """Stores the facts that a worker reports about its backend. If the backend's object_info must
    still be uploaded, callers that wait for the facts continue after the upload.
    """
    slot = None
    if report.backend is not None:
        await note_sighting(context, worker, Sighting(backend=report.backend), context.clock())
        slot = await _upload_slot(context, worker, report.backend)
    if slot is None:
        context.queue.facts.reported(worker.worker_id, report.tokens)
    return FactsReported(object_info_upload=slot)


async def _in_maintenance(context: JobContext) -> bool:
    """Returns whether maintenance mode is on. The value is cached for a second, because many waits
    may end at the same moment.
    """

    async def read() -> bool:
        async with context.central.read() as tx:
            return await job_context.in_maintenance(tx)

    return await context.polls.maintenance.get("", read, now=context.clock())


async def _upload_slot(
    context: JobContext, worker: FleetWorker, backend: BackendFacts
) -> OutputSlot | None:
    """Returns an upload slot for the backend's object_info, or None if it is already stored."""
    if not worker.is_approved:
        return None
    async with context.central.read() as tx:
        fleet = await fleets.fleet_by_id(tx, worker.fleet_id)
    seconds = context.settings.url_seconds
    return await upload_slot(context.store, fleet, backend, seconds=seconds)


async def _lease_at_once(
    context: JobContext, waiter: Waiter, as_of: int, *, waits: bool
) -> Job | None:
    if waiter.is_prefetch and waits:
        return None  # no check is needed, because the wait in the queue starts with one
    job = await lease_next(context, waiter, wait_seconds=0, as_of=as_of)
    if job is None and waits:
        await _recall_for(context, waiter)
    return job


async def _snapshot(
    context: JobContext,
    worker: FleetWorker,
    request: Poll,
    read: ReadWithKey | None,
    *,
    is_old: bool,
) -> WorkerSnapshot:
    now, as_of = context.clock(), context.queue.dismissals
    known = await note_sighting(context, worker, _sighting(request), now)
    async with context.central.read() as tx:
        if read is None or read.as_of != as_of:
            current = await fleets.get_standing(tx, known)
        else:
            current = read.standing
        offer = await context.caches.eligibility.offer(tx, known, now=now)
        lanes = await fleets.lanes_of(
            tx,
            known,
            request.providers,
            assigned=current.assigned,
            abilities=context.caches.eligibility,
            offer=offer,
        )
        alone = await is_alone(context, tx, known, lanes)
    return WorkerSnapshot(
        worker=known,
        lanes=frozenset(QueueLane(*lane) for lane in lanes),
        offer=offer,
        held=current.held,
        load=load_of(current.held, request, is_old=is_old),
        is_alone=alone,
        maintenance=current.in_maintenance,
        no_lanes="" if lanes else why_no_lanes(known, current.assigned),
        as_of=as_of,
    )


async def is_alone(
    context: JobContext, tx: Tx, worker: FleetWorker, lanes: frozenset[tuple[int, str, str]]
) -> bool:
    """Whether no other live worker could run jobs in these lanes."""
    now = context.clock()
    seen_since = now - timedelta(seconds=context.settings.offline_after_seconds)
    live_workers = await context.polls.live_workers.get(
        lanes,
        lambda: fleets.find_two_workers(
            tx, lanes, seen_since=seen_since, abilities=context.caches.eligibility
        ),
        now=now,
    )
    return live_workers <= {worker.worker_id}


async def note_sighting(
    context: JobContext, worker: FleetWorker, sighting: Sighting, now: datetime
) -> FleetWorker:
    """Records that the worker was seen. Only writes to the database at intervals or when a value
    has changed, because idle workers poll all day.
    """
    every = sighting_interval(context.settings.unseen_seconds_max)
    if not is_worth_writing(worker, sighting, now, every):
        return apply_sighting(worker, sighting, now)
    central = context.central
    async with central.execute_one() if sighting.backend is None else central.transaction() as tx:
        return await fleets.record_sighting(tx, worker, sighting, now=now, every=every)


def _sighting(request: Poll) -> Sighting:
    return Sighting(
        load=request.current_load,
        models_loaded=request.models_loaded,
        capabilities=None if request.capabilities is None else frozenset(request.capabilities),
        providers=request.providers,
        max_concurrency=request.max_concurrency,
        reading=request.reading,
        backend=request.backend,
        backend_problem=request.backend_problem or "",
    )


def _why_nothing(standing: WorkerSnapshot, request: Poll) -> str | None:
    if standing.maintenance:
        return MAINTENANCE_REASON
    if not standing.lanes:
        return standing.no_lanes
    if standing.load > request.max_concurrency:
        return f"this worker already holds {standing.load} jobs, which is its limit"
    return None


def load_of(held: Collection[int], request: Poll, *, is_old: bool = False) -> int:
    """Returns the number of jobs that the worker still has to run. `held` contains the dispatches
    that the worker has leased according to the database.

    A lease is held until its outputs are uploaded, but the backend must not wait for uploads. So a
    worker that lists its leases also reports how many of these jobs it still has to run. The
    other leases are uploads, of which at most `max_concurrency` + 1 are allowed. Leases that the
    worker doesn't list are still on their way to it. Leases that it listed in an old poll may have
    ended since, so only those that it still holds count.
    """
    if request.held is None:
        return max(request.current_load, len(held))
    named = {lease.dispatch_id for lease in request.held}
    delivering_max = request.max_concurrency + 1
    at_work = min(request.current_load, len(named & set(held))) if is_old else request.current_load
    return max(at_work + len(set(held) - named), len(held) - delivering_max)


def _waiter(standing: WorkerSnapshot, request: Poll) -> Waiter:
    reading, load = request.reading, standing.load
    free = 0
    if reading and reading.gpu_memory_total_bytes is not None:
        free = reading.gpu_memory_total_bytes - (reading.gpu_memory_used_bytes or 0)
    return Waiter(
        worker_id=standing.worker.worker_id,
        lanes=standing.lanes,
        affinities=standing.worker.affinities,
        load=load,
        models_loaded=request.models_loaded or standing.worker.models_loaded,
        model_set=request.model_set,
        free_gpu_memory_bytes=max(0, free),
        is_prefetch=load >= request.max_concurrency,
        is_alone=standing.is_alone,
        key_hash=standing.worker.key_hash,
        fleet_id=standing.worker.fleet_id,
        tells_leases=request.held is not None,
        offer=standing.offer,
        held_max=len(standing.held) + max(0, request.max_concurrency - load - 1),
    )


def _without_lanes(standing: WorkerSnapshot) -> Waiter:
    """Returns a waiter for a worker that currently may not run any job. The wait ends when its
    permissions change.
    """
    worker = standing.worker
    return Waiter(worker.worker_id, lanes=frozenset(), key_hash=worker.key_hash)


async def _resend_lost_lease(
    context: JobContext, standing: WorkerSnapshot, request: Poll
) -> Job | None:
    """Returns a job again if the response that contained it was lost: the worker doesn't list its
    lease and has never sent a heartbeat for it.
    """
    if request.held is None:
        return None
    listed = {lease.dispatch_id for lease in request.held}
    if listed.issuperset(standing.held):
        return None
    async with context.central.read() as tx:
        held = await dispatch.held_by(tx, standing.worker.worker_id)
    for row in held:
        if row.id in listed or row.heard_at is not None or row.lease_token is None:
            continue
        if not standing.worker.takes_jobs or row.lane not in standing.lanes:
            await requeue(context, row.id, row.lease_token, RequeueReason.REVOKED)
            continue
        job = await build_payload(context, _lease_from_row(row), gives_back=False)
        if job:
            return job
    return None


def _lease_from_row(row: Dispatch) -> DispatchLease:
    if row.lease_token is None or row.lease_expires_at is None or row.worker_id is None:
        raise ValueError(f"dispatch {row.id} is not leased")
    return DispatchLease(
        dispatch_id=row.id,
        tenant_id=row.tenant_id,
        job_id=row.job_id,
        lane=row.lane,
        worker_id=row.worker_id,
        token=row.lease_token,
        number=row.lease_number,
        attempt=row.attempts,
        expires_at=row.lease_expires_at,
        is_prefetched=row.is_prefetched,
        model_key=row.model_key,
        model_set=row.model_set,
    )


async def _recall_for(context: JobContext, waiter: Waiter) -> None:
    """Recalls jobs that other workers have prefetched but not started. Called when a worker finds
    no queued job.
    """
    async with context.central.read() as tx:
        if not await dispatch.has_prefetched(tx, not_of=waiter.worker_id):
            return
    async with context.central.read() as tx:
        if not await dispatch.is_any_prefetched(tx, waiter.lanes, not_of=waiter.worker_id):
            return
    async with context.central.transaction() as tx:
        recalled = await dispatch.recall(
            tx,
            waiter.lanes,
            not_of=waiter.worker_id,
            is_wanted=lambda row: _can_run(context, waiter, row),
        )
    context.queue.push(row.id for row in recalled)


def _can_run(context: JobContext, waiter: Waiter, row: Dispatch) -> bool:
    is_bound = row.backend_affinity and row.backend_affinity not in waiter.affinities
    return not is_bound and context.queue.model_sets.may_run(waiter, row.model_set)


logger = logging.getLogger(__name__)
# Maximum time in seconds until a change is noticed if the notification from another control plane
# was lost.
REFRESH_SECONDS = 30.0
WORKERS_PER_READ_MAX = 500
READS_PER_PASS_MAX = 10


class WaitingWorkerRefresher:
    """Checks the permissions of waiting workers at intervals, and records that the workers were
    seen.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        every = sighting_interval(context.settings.unseen_seconds_max)
        self._pass_seconds = min(REFRESH_SECONDS, every.total_seconds())

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(self._pass_seconds / READS_PER_PASS_MAX)
            await self.look()

    async def look(self) -> None:
        """Refreshes the workers that are due. No references to polls are kept between passes,
        because they would keep ended polls in memory.
        """
        now = asyncio.get_running_loop().time()
        due = self._context.queue.requests_not_seen_since(now - self._pass_seconds)
        for start in range(0, len(due), WORKERS_PER_READ_MAX):
            page = [
                request
                for request in due[start:][:WORKERS_PER_READ_MAX]
                if not request.future.done()
            ]
            await self._look([request.waiter for request in page])
            for request in page:
                request.looked_at = now

    async def close(self) -> None:
        """Does nothing, because no resource is held."""

    async def _look(self, waiters: Collection[Waiter]) -> None:
        try:
            await refresh_workers(self._context, waiters)
        except FleetError as error:
            logger.log(
                log_level_of(error), "waiting workers could not be refreshed: %s", error.message
            )


async def refresh_workers(context: JobContext, waiters: Iterable[Waiter]) -> None:
    """Records that these workers were seen, and wakes those whose permissions have changed."""
    by_key = {waiter.key_hash: waiter for waiter in waiters if waiter.key_hash is not None}
    if not by_key:
        return
    now = context.clock()
    async with context.central.read() as tx:
        known = {worker.key_hash: worker for worker in await fleets.with_keys(tx, by_key)}
        changed = await _changed_workers(context, tx, by_key, known)
    unseen_since = now - sighting_interval(context.settings.unseen_seconds_max) / 3
    unseen = [worker for worker in known.values() if worker.last_seen_at < unseen_since]
    if unseen:
        async with context.central.transaction() as tx:
            await fleets.note_seen(tx, unseen, now=now)
    if changed:
        context.queue.dismiss(changed)


async def _changed_workers(
    context: JobContext, tx: Tx, waiters: Mapping[str, Waiter], known: Mapping[str, FleetWorker]
) -> set[str]:
    """Returns the ids of workers that must poll again. A worker whose key was revoked has no row in
    `known`.
    """
    lanes: dict[str, frozenset[FleetLane]] = {}
    if not await job_context.in_maintenance(tx):
        lanes = await fleets.lanes_of_all(
            tx, known.values(), abilities=context.caches.eligibility, now=context.clock()
        )
    changed: set[str] = set()
    for key, waiter in waiters.items():
        worker: FleetWorker | None = known.get(key)
        now_has: frozenset[tuple[int, str, str]] = lanes.get(key, frozenset())
        if (
            worker is None
            or worker.next_key is not None
            or now_has != waiter.lanes
            or (now_has and waiter.is_alone != await is_alone(context, tx, worker, now_has))
        ):
            changed.add(waiter.worker_id)
    return changed
