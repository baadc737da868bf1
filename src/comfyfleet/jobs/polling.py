"""A worker asks for a job: who it is, what it may run, what it holds, and then the wait."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import NamedTuple

from comfyfleet.db import Tx
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Dispatch, Lane, Lease, Requeue, Waiter
from comfyfleet.fleets import model as fleet_model
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.decide import is_worth_writing, part_of, why_no_lanes
from comfyfleet.fleets.model import Sighting, Worker, after
from comfyfleet.fleets.objectinfo import upload_slot
from comfyfleet.fleets.offers import Offer
from comfyfleet.jobs.ending import requeue
from comfyfleet.jobs.handing import hand_out, next_job
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import TooManyCalls
from comfyfleet.wire.files import OutputSlot
from comfyfleet.wire.messages import BackendFacts, Job, Poll, Polled

HELD_BACK_SECONDS = 2.0
# A wait ends by up to so much of it earlier: workers that came at one moment don't come back at one.
WAIT_SPREAD = 0.1
_dice = Random()  # noqa: S311 - not for secrets
# A worker has one that waits, and a few more while lost connections are not noticed as such.
WAITING_PER_WORKER_MAX = 8
# What a poll has said is kept while it waits; one that said more, of a large backend, does not wait.
KEPT_BYTES_MAX = 1024**2


@dataclass(frozen=True)
class Standing:
    """What is known of a worker at the moment it asks."""

    worker: Worker
    lanes: frozenset[Lane]
    offer: Offer | None
    held: tuple[int, ...]  # ids of dispatches
    load: int  # how many jobs it has before it
    is_alone: bool
    maintenance: bool
    no_lanes: str  # why it may run nothing, if so
    as_of: int  # waits that were ended since then mean that this may have changed


class ReadWithKey(NamedTuple):
    """What decides whether a worker gets a job, as it was when its key was looked at."""

    standing: fleet_model.Standing
    as_of: int  # as in Standing


@dataclass(frozen=True, slots=True)
class Wait:
    """What a poll waits for: a lease, or only time where there is no waiter."""

    seconds: float
    as_of: int
    waiter: Waiter | None = None


async def poll(
    sides: Sides, worker: Worker, asked: Poll, read: ReadWithKey | None = None
) -> Polled:
    """A job, or none with the reason."""
    polling = Polling(worker, asked)
    try:
        found = await polling.begin(sides, worker, asked, read)
        while isinstance(found, Wait):
            found = await polling.go_on(sides, await _waited(sides, found))
    finally:
        polling.end(sides)
    return found


async def _waited(sides: Sides, wait: Wait) -> Lease | None:
    if wait.waiter is None:
        await asyncio.sleep(wait.seconds)
        return None
    return await sides.queue.lease(wait.waiter, wait_seconds=wait.seconds, as_of=wait.as_of)


class Polling:
    """A poll and its waits. What the worker may run is looked at anew when its wait is ended: at once
    when this process is told of a change, else by `waiting_workers`.

    Ten thousand are kept while nothing happens: each holds as little as it can.
    """

    __slots__ = (
        "_is_counted",
        "_is_draining",
        "_key_hash",
        "_new_key",
        "_reason",
        "_said",
        "_until",
        "_wait",
        "_worker_id",
    )

    def __init__(self, worker: Worker, asked: Poll) -> None:
        self._worker_id, self._key_hash = worker.worker_id, worker.key_hash
        seconds = asked.wait_seconds * (1 - WAIT_SPREAD * _dice.random())
        self._until = asyncio.get_running_loop().time() + seconds
        self._said = b""
        self._wait: Wait | None = None
        self._reason: str | None = None
        self._new_key: str | None = None
        self._is_draining = False
        self._is_counted = False

    async def begin(
        self, sides: Sides, worker: Worker, asked: Poll, read: ReadWithKey | None = None
    ) -> Polled | Wait:
        """The worker, and what was read with it, as they were just now for who let it in."""
        found = await self._look(sides, worker, asked, read)
        if not isinstance(found, Wait):
            return found
        # A third of what the message takes, and read again only when the wait is over.
        said = asked.model_dump_json(exclude_unset=True).encode()
        if len(said) > KEPT_BYTES_MAX:
            return await self._polled(sides, asked, None)
        self._count(sides)
        self._said = said
        return found

    def _count(self, sides: Sides) -> None:
        waiting = sides.waiting_polls
        if waiting[self._worker_id] >= WAITING_PER_WORKER_MAX:
            raise TooManyCalls(f"{WAITING_PER_WORKER_MAX} polls of this worker wait already")
        waiting[self._worker_id] += 1
        self._is_counted = True

    def end(self, sides: Sides) -> None:
        """It waits no more; to be called once it has begun, however it ends."""
        if not self._is_counted:
            return
        self._is_counted = False
        sides.waiting_polls[self._worker_id] -= 1
        if not sides.waiting_polls[self._worker_id]:
            del sides.waiting_polls[self._worker_id]

    async def go_on(self, sides: Sides, lease: Lease | None) -> Polled | Wait:
        """With what the wait has brought."""
        asked, wait = Poll.model_validate_json(self._said), self._wait
        if wait is None:
            raise ValueError("it did not wait")
        job = None
        if lease is not None:
            tells_leases = wait.waiter is not None and wait.waiter.tells_leases
            job = await hand_out(sides, lease, gives_back=not tells_leases)
        left = self._left()
        if job is None and lease is not None and left:
            # It had ended, or can't be run now; the next one may.
            return self._waits(Wait(left, wait.as_of, wait.waiter))
        if job or self._new_key or not left:
            return await self._polled(sides, asked, job)
        async with sides.looks:
            return await self._look(sides, await self._worker(sides), asked, is_old=True)

    async def _worker(self, sides: Sides) -> Worker:
        async with sides.central.look() as tx:
            return await fleets.still_known(tx, self._worker_id, self._key_hash)

    def _left(self) -> float:
        return max(0.0, self._until - asyncio.get_running_loop().time())

    async def _look(
        self,
        sides: Sides,
        worker: Worker,
        asked: Poll,
        read: ReadWithKey | None = None,
        *,
        is_old: bool = False,
    ) -> Polled | Wait:
        standing = await _standing(sides, worker, asked, read, is_old=is_old)
        worker, left = standing.worker, self._left()
        if worker.is_draining and self._wait and not self._is_draining:
            left = 0.0  # told at once; one that asks while it drains waits
        self._reason, self._new_key = _why_nothing(standing, asked), worker.next_key
        self._is_draining = worker.is_draining
        if self._new_key is not None:
            # Soon, but not at once: one that doesn't understand would ask without a pause.
            left = min(left, HELD_BACK_SECONDS)
        job = await _lost_on_its_way(sides, standing, asked)
        waiter = None
        if job is None and self._reason is None:
            waiter = _waiter(standing, asked)
            job = await _at_once(sides, waiter, standing.as_of, waits=left > 0)
        if job or not left:
            return await self._polled(sides, asked, job)
        if waiter is None and (standing.maintenance or not standing.lanes):
            waiter = _without_lanes(standing)
        seconds = left if waiter else min(left, HELD_BACK_SECONDS)
        return self._waits(Wait(seconds, standing.as_of, waiter))

    def _waits(self, wait: Wait) -> Wait:
        self._wait = wait
        return wait

    async def _polled(self, sides: Sides, asked: Poll, job: Job | None) -> Polled:
        slot = None
        if asked.backend is not None:
            slot = await _upload_slot(sides, await self._worker(sides), asked.backend)
        return Polled(
            job=job,
            reason=None if job else self._reason or "no job is queued for this worker",
            drain=self._is_draining,
            object_info_upload=slot,
            new_token=self._new_key,
        )


async def _upload_slot(sides: Sides, worker: Worker, told: BackendFacts) -> OutputSlot | None:
    """For what the backend has told anew."""
    if not worker.is_approved:
        return None
    async with sides.central.look() as tx:
        fleet = await fleets.by_id(tx, worker.fleet_id)
    seconds = sides.settings.url_seconds
    return await upload_slot(sides.store, fleet, told, seconds=seconds)


async def _at_once(sides: Sides, waiter: Waiter, as_of: int, *, waits: bool) -> Job | None:
    if waiter.is_prefetch and waits:
        return None  # it waits in the queue, which looks first
    job = await next_job(sides, waiter, wait_seconds=0, as_of=as_of)
    if job is None and waits:
        await _recall_for(sides, waiter)
    return job


async def _standing(
    sides: Sides, worker: Worker, asked: Poll, read: ReadWithKey | None, *, is_old: bool
) -> Standing:
    now, as_of = sides.clock(), sides.queue.dismissals
    known = await note_sighting(sides, worker, _sighting(asked), now)
    async with sides.central.look() as tx:
        if read is None or read.as_of != as_of:
            found = await fleets.standing_of(tx, known)
        else:
            found = read.standing
        offer = await sides.abilities.offer(tx, known, now=now)
        lanes = await fleets.lanes_of(
            tx,
            known,
            asked.providers,
            assigned=found.assigned,
            abilities=sides.abilities,
            offer=offer,
        )
        alone = await is_alone(sides, tx, known, lanes)
    return Standing(
        worker=known,
        lanes=frozenset(Lane(*lane) for lane in lanes),
        offer=offer,
        held=found.held,
        load=load_of(found.held, asked, is_old=is_old),
        is_alone=alone,
        maintenance=found.in_maintenance,
        no_lanes="" if lanes else why_no_lanes(known, found.assigned),
        as_of=as_of,
    )


async def is_alone(
    sides: Sides, tx: Tx, worker: Worker, lanes: frozenset[tuple[int, str, str]]
) -> bool:
    """Nobody else lives who could run any of these lanes."""
    now = sides.clock()
    seen_since = now - timedelta(seconds=sides.settings.offline_after_seconds)
    two = await sides.live_workers.get(
        lanes,
        lambda: fleets.two_for(tx, lanes, seen_since=seen_since, abilities=sides.abilities),
        now=now,
    )
    return two <= {worker.worker_id}


async def note_sighting(sides: Sides, worker: Worker, sighting: Sighting, now: datetime) -> Worker:
    """A poll or a heartbeat writes only when that is due: idle workers poll all day."""
    every = part_of(sides.settings.unseen_seconds_max)
    if not is_worth_writing(worker, sighting, now, every):
        return after(worker, sighting, now)
    central = sides.central
    async with central.say() if sighting.backend is None else central.begin() as tx:
        return await fleets.seen(tx, worker, sighting, now=now, every=every)


def _sighting(asked: Poll) -> Sighting:
    return Sighting(
        load=asked.current_load,
        models_loaded=asked.models_loaded,
        capabilities=None if asked.capabilities is None else frozenset(asked.capabilities),
        providers=asked.providers,
        max_concurrency=asked.max_concurrency,
        reading=asked.reading,
        backend=asked.backend,
    )


def _why_nothing(standing: Standing, asked: Poll) -> str | None:
    if standing.maintenance:
        return "maintenance: no new leases are given"
    if not standing.lanes:
        return standing.no_lanes
    if standing.load > asked.max_concurrency:
        return f"this worker holds {standing.load} jobs, as many as it may"
    return None


def load_of(held: Collection[int], asked: Poll, *, is_old: bool = False) -> int:
    """How many jobs the worker has before it, by dispatch id as we know them and as it says.

    A lease whose prompt has ended is still held while its outputs go up, and the backend must not
    wait for that: a worker that names what it holds is believed which of it is work, for as many
    again as it may hold. Leases that it doesn't name are on their way to it. Of those that it named a
    while ago some may have ended since: only what it still holds can be work.
    """
    if asked.held is None:
        return max(asked.current_load, len(held))
    named = {each.dispatch_id for each in asked.held}
    delivering_max = asked.max_concurrency + 1
    at_work = min(asked.current_load, len(named & set(held))) if is_old else asked.current_load
    return max(at_work + len(set(held) - named), len(held) - delivering_max)


def _waiter(standing: Standing, asked: Poll) -> Waiter:
    reading, load = asked.reading, standing.load
    free = 0
    if reading and reading.gpu_memory_total_bytes is not None:
        free = reading.gpu_memory_total_bytes - (reading.gpu_memory_used_bytes or 0)
    return Waiter(
        worker_id=standing.worker.worker_id,
        lanes=standing.lanes,
        affinities=standing.worker.affinities,
        load=load,
        models_loaded=asked.models_loaded or standing.worker.models_loaded,
        model_set=asked.model_set,
        free_gpu_memory_bytes=max(0, free),
        is_prefetch=load >= asked.max_concurrency,
        is_alone=standing.is_alone,
        key_hash=standing.worker.key_hash,
        fleet_id=standing.worker.fleet_id,
        tells_leases=asked.held is not None,
        offer=standing.offer,
        held_max=len(standing.held) + max(0, asked.max_concurrency - load - 1),
    )


def _without_lanes(standing: Standing) -> Waiter:
    """Of one that is held back until it may run something."""
    worker = standing.worker
    return Waiter(worker.worker_id, lanes=frozenset(), key_hash=worker.key_hash)


async def _lost_on_its_way(sides: Sides, standing: Standing, asked: Poll) -> Job | None:
    """A lease that the worker doesn't know, and never spoke of, is handed out again as it was."""
    if asked.held is None:
        return None
    known = {each.dispatch_id for each in asked.held}
    if known.issuperset(standing.held):
        return None
    async with sides.central.look() as tx:
        held = await dispatch.held_by(tx, standing.worker.worker_id)
    for row in held:
        if row.id in known or row.heard_at is not None or row.lease_token is None:
            continue
        if not standing.worker.takes_jobs or row.lane not in standing.lanes:
            await requeue(sides, row.id, row.lease_token, Requeue.REVOKED)
            continue
        job = await hand_out(sides, _lease_of(row), gives_back=False)
        if job:
            return job
    return None


def _lease_of(row: Dispatch) -> Lease:
    if row.lease_token is None or row.lease_expires_at is None or row.worker_id is None:
        raise ValueError(f"dispatch {row.id} is not leased")
    return Lease(
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


async def _recall_for(sides: Sides, waiter: Waiter) -> None:
    """An idle worker and nothing queued: what another has only prefetched is asked back."""
    async with sides.central.look() as tx:
        if not await dispatch.has_prefetched(tx, not_of=waiter.worker_id):
            return
    async with sides.central.look() as tx:
        if not await dispatch.is_any_prefetched(tx, waiter.lanes, not_of=waiter.worker_id):
            return
    async with sides.central.begin() as tx:
        asked_back = await dispatch.recall(
            tx,
            waiter.lanes,
            not_of=waiter.worker_id,
            is_wanted=lambda row: _could_run(sides, waiter, row),
        )
    sides.queue.push(row.id for row in asked_back)


def _could_run(sides: Sides, waiter: Waiter, row: Dispatch) -> bool:
    is_bound = row.backend_affinity and row.backend_affinity not in waiter.affinities
    return not is_bound and sides.queue.model_sets.may_run(waiter, row.model_set)
