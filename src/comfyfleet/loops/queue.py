"""The sweeps that keep the queue true: outbox, expiry, due jobs, lost workers, reconcile."""

import logging
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from comfyfleet.audit import service as audit
from comfyfleet.db.outages import level_of
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Requeue
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Worker
from comfyfleet.jobs import shared
from comfyfleet.jobs.admitting import admit_all
from comfyfleet.jobs.ending import requeue_all_of
from comfyfleet.jobs.expiring import expire
from comfyfleet.jobs.reconciling import reconcile
from comfyfleet.jobs.settling import deliver_words
from comfyfleet.kernel.errors import FleetError, InvalidInput
from comfyfleet.loops.learning import learn_object_infos
from comfyfleet.loops.sweeping import Sweep
from comfyfleet.plane import Plane

log = logging.getLogger(__name__)
WORDS_PER_PASS_MAX = 500
DUE_PER_PASS_MAX = 1000
RECONCILE_SECONDS = 60.0
# About a second of each minute, however much waits; the next pass goes on where it ended.
RECONCILED_PER_PASS_MAX = 20_000


def queue_sweeps(plane: Plane) -> Iterator[Sweep]:
    often = plane.settings.sweep_seconds
    yield Sweep("outbox", partial(deliver_outboxes, plane), often)
    yield Sweep("expiry", partial(expire_leases, plane), often)
    yield Sweep("due", partial(wake_due, plane), min(often, 1.0))
    yield Sweep("workers", partial(remove_lost_workers, plane), often)
    yield Sweep("batches", partial(admit_all, plane.sides), often)
    yield Sweep("reconcile", partial(reconcile_some, plane), RECONCILE_SECONDS)
    yield Sweep("object_info", partial(learn_object_infos, plane), often)


async def deliver_outboxes(plane: Plane) -> bool:
    """True: there is more. A pool that is down holds up no other."""
    has_more = False
    for name, pool in plane.pools.items():
        try:
            delivered = await deliver_words(plane.sides, pool, limit=WORDS_PER_PASS_MAX)
            has_more |= delivered == WORDS_PER_PASS_MAX
        except FleetError as error:
            log.log(level_of(error), "the outbox of pool %s was left out: %s", name, error.message)
        except Exception:
            log.exception("the outbox of pool %s was left out", name)
    return has_more


async def expire_leases(plane: Plane) -> None:
    async with plane.central.look() as tx:
        before = await shared.last_expiry(tx)
    await expire(plane.sides, last_pass=before)
    async with plane.central.begin() as tx:
        await shared.note_expiry(tx, plane.clock())


async def wake_due(plane: Plane) -> bool:
    async with plane.central.look() as tx:
        if not await dispatch.is_any_due(tx, plane.clock()):
            return False
    async with plane.central.begin() as tx:
        due = await dispatch.wake_due(tx, now=plane.clock(), limit=DUE_PER_PASS_MAX)
    plane.sides.queue.arrived(due)
    return len(due) == DUE_PER_PASS_MAX


async def remove_lost_workers(plane: Plane) -> None:
    """Unseen for so long: its id and its place in the fleet are free again."""
    unseen = plane.clock() - timedelta(seconds=plane.settings.remove_worker_after_seconds)
    async with plane.central.look() as tx:
        lost = await fleets.stale(tx, unseen_since=unseen)
    for worker in lost:
        try:
            await _remove_lost(plane, worker)
        except FleetError as error:
            log.log(
                level_of(error),
                "worker %s could not be removed: %s",
                worker.worker_id,
                error.message,
            )


async def _remove_lost(plane: Plane, worker: Worker) -> None:
    unseen = plane.clock() - timedelta(seconds=plane.settings.remove_worker_after_seconds)
    async with plane.central.begin() as tx:
        removed = await fleets.remove_stale(tx, worker, unseen_since=unseen)
        if removed:
            await audit.record(
                tx,
                actor="sweep",
                action="deregister",
                subject=worker.subject,
                now=plane.clock(),
                details={"fleet": worker.fleet_name, "reason": "not heard of"},
            )
    if removed:
        await requeue_all_of(plane.sides, worker.worker_id, Requeue.EXPIRED)


async def reconcile_some(plane: Plane) -> None:
    async with plane.central.look() as tx:
        after = await shared.reconciled(tx)
    try:
        repairs = await reconcile(plane.sides, after=after, rows_max=RECONCILED_PER_PASS_MAX)
    except InvalidInput:  # the place is one that another version has told
        repairs = await reconcile(plane.sides, rows_max=RECONCILED_PER_PASS_MAX)
    if repairs.next != after:
        async with plane.central.begin() as tx:
            await shared.note_reconciled(tx, repairs.next)
