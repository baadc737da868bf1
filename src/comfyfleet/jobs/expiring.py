"""Leases whose time is up. The sweep holds each lease itself while it decides what follows."""

import logging
from datetime import datetime, timedelta

from comfyfleet.db.outages import level_of
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Dispatch, Requeue, Status
from comfyfleet.jobs import service, shared, store
from comfyfleet.jobs.ending import put_back, used_up
from comfyfleet.jobs.model import Job
from comfyfleet.jobs.settling import deliver, end_dispatch_of
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import Unavailable

log = logging.getLogger(__name__)
EXPIRED_PER_PASS_MAX = 200


async def expire(sides: Sides, *, last_pass: datetime | None) -> int:
    """How many leases were ended. After an outage of ours every lease first gets more time."""
    now = sides.clock()
    if last_pass and now - last_pass > timedelta(seconds=sides.settings.outage_seconds):
        async with sides.central.begin() as tx:
            await dispatch.extend_all(tx, seconds=sides.settings.grace_seconds, now=now)
            # Nor could anybody be seen: until then, nobody passes for lost.
            await shared.settle_until(tx, now + timedelta(seconds=sides.settings.grace_seconds))
        return 0
    unseen_since = now - timedelta(seconds=sides.settings.lost_after_seconds)
    async with sides.central.begin() as tx:
        taken = await dispatch.take_expired(
            tx,
            token=sides.new_id(),
            now=now,
            limit=EXPIRED_PER_PASS_MAX,
            unseen_since=None if await shared.is_settling(tx, now) else unseen_since,
        )
    return sum([await _expired(sides, row) for row in taken])


async def _expired(sides: Sides, row: Dispatch) -> bool:
    """One that can't be put right now is taken again when the sweep's own lease has run out."""
    try:
        await _end_or_requeue(sides, row)
    except Unavailable as error:
        log.log(
            level_of(error), "expired dispatch %s waits for its pool: %s", row.id, error.message
        )
        return False
    except Exception:
        log.exception("expired dispatch %s could not be put right", row.id)
        return False
    return True


async def _end_or_requeue(sides: Sides, row: Dispatch) -> None:
    pool = await sides.pool_of(row.tenant_id)
    async with pool.look() as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    if job is None or not job.status.is_active:
        await end_dispatch_of(sides, row, job)
        return
    if row.lease_token is None:
        return
    async with sides.central.begin() as tx:
        back = await dispatch.requeue(
            tx,
            row.id,
            row.lease_token,
            Requeue.EXPIRED,
            now=sides.clock(),
            settings=sides.settings,
        )
    if back.status == Status.LEASED:
        await _give_up(sides, back, job)
        return
    sides.queue.arrived([back])
    if job.lease_token:
        await put_back(sides, back, job.lease_token)


async def _give_up(sides: Sides, row: Dispatch, job: Job) -> None:
    pool = await sides.pool_of(row.tenant_id)
    async with pool.begin() as tx:
        ended, words = await service.give_up(
            tx,
            job.tenant_id,
            job.id,
            used_up(row),
            new_id=sides.new_id,
            now=sides.clock(),
        )
        ended = ended or await service.get(tx, job.tenant_id, job.id)
    await deliver(sides, pool, [ended], words)
