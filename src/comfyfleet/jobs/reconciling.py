"""Finds what no retry and no sweep has put right, page by page, and repairs it. All is audited."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from comfyfleet.audit import service as audit
from comfyfleet.db import Database
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Dispatch
from comfyfleet.jobs import service, store
from comfyfleet.jobs.model import Failure, Job
from comfyfleet.jobs.settling import align, deliver, end_dispatch_of
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError, NotFound

log = logging.getLogger(__name__)
PAGE = 500
# What is younger is still on its way between the two databases.
SETTLED = timedelta(seconds=30)


@dataclass(frozen=True)
class Repairs:
    dispatches_ended: int = 0
    dispatches_made: int = 0
    pools_skipped: int = 0

    def __add__(self, other: "Repairs") -> "Repairs":
        return Repairs(
            self.dispatches_ended + other.dispatches_ended,
            self.dispatches_made + other.dispatches_made,
            self.pools_skipped + other.pools_skipped,
        )


async def reconcile(sides: Sides) -> Repairs:
    repairs = await _end_orphans(sides)
    for name, pool in sides.pools.items():
        try:
            repairs += await _dispatch_the_forgotten(sides, pool)
        except FleetError as error:
            log.warning("pool %s was left out: %s", name, error.message)
            repairs += Repairs(pools_skipped=1)
        except Exception:
            log.exception("pool %s was left out", name)
            repairs += Repairs(pools_skipped=1)
    return repairs


async def _end_orphans(sides: Sides) -> Repairs:
    """Dispatches whose job or workflow is gone or ended are ended."""
    repairs, after = Repairs(), 0
    while True:
        async with sides.central.look() as tx:
            rows = await dispatch.active_after(
                tx, after, before=sides.clock() - SETTLED, limit=PAGE
            )
        for row in rows:
            try:
                repairs += Repairs(dispatches_ended=await _end_if_orphaned(sides, row))
            except FleetError as error:
                log.warning("dispatch %s was left as it is: %s", row.id, error.message)
            except Exception:
                log.exception("dispatch %s was left as it is", row.id)
        if len(rows) < PAGE:
            return repairs
        after = rows[-1].id


async def _end_if_orphaned(sides: Sides, row: Dispatch) -> bool:
    try:
        pool = await sides.pool_of(row.tenant_id)
    except NotFound:
        await end_dispatch_of(sides, row, None)
        await _note(sides, row, "tenant is gone")
        return True
    async with pool.look() as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    if job and job.status.is_active:
        return False
    if job and row.cancel_requested:
        return False  # its worker is told with the next heartbeat
    await end_dispatch_of(sides, row, job)
    await _note(sides, row, f"job is {job.status}" if job else "job is gone")
    return True


async def _note(sides: Sides, row: Dispatch, found: str) -> None:
    async with sides.central.begin() as tx:
        await audit.record(
            tx,
            actor="sweep",
            action="reconcile",
            subject=f"dispatch:{row.id}",
            now=sides.clock(),
            tenant_id=row.tenant_id,
            details={"found": found},
        )


async def _dispatch_the_forgotten(sides: Sides, pool: Database) -> Repairs:
    """Active jobs without a dispatch get one; those whose dispatch has failed fail too."""
    repairs, after = Repairs(), None
    while True:
        async with pool.look() as tx:
            jobs = await store.active_after(tx, after, PAGE, sides.clock() - SETTLED)
        repairs += await _make_dispatches(sides, pool, jobs)
        if len(jobs) < PAGE:
            return repairs
        after = jobs[-1].id


async def _make_dispatches(sides: Sides, pool: Database, jobs: Sequence[Job]) -> Repairs:
    async with sides.central.look() as tx:
        found = await dispatch.of_jobs(tx, [(job.tenant_id, job.id) for job in jobs])
    forgotten = [job for job in jobs if job.id not in found]
    if forgotten:
        await align(sides, forgotten)
    for job in forgotten:
        await _note_made(sides, job)
    ended = [job for job in jobs if job.id in found and found[job.id].ended_at is not None]
    for job in ended:
        await _fail_with_its_dispatch(sides, pool, job.tenant_id, job.id, found[job.id])
    return Repairs(dispatches_made=len(forgotten))


async def _note_made(sides: Sides, job: Job) -> None:
    async with sides.central.begin() as tx:
        await audit.record(
            tx,
            actor="sweep",
            action="reconcile",
            subject=f"job:{job.id}",
            now=sides.clock(),
            tenant_id=job.tenant_id,
            details={"found": "an active job without a dispatch"},
        )


async def _fail_with_its_dispatch(
    sides: Sides, pool: Database, tenant_id: UUID, job_id: UUID, row: Dispatch
) -> None:
    """A dispatch never ends before its job, unless an operator or a restored backup made it so."""
    why = Failure(row.last_error or "Processing failed.", f"its dispatch is {row.status}")
    async with pool.begin() as tx:
        failed, words = await service.give_up(
            tx, tenant_id, job_id, why, new_id=sides.new_id, now=sides.clock()
        )
    if failed:
        await deliver(sides, pool, [failed], words)
        await _note(sides, row, f"job was active while its dispatch is {row.status}")
