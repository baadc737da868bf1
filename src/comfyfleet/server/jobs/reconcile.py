"""Ends expired leases, and repairs dispatches by comparing them with jobs page by page.

The rows of both databases are compared as sets, with a few queries per page. A pass may end before
all rows are read. It then returns the cursor at which the next pass continues. Repairs are audited.
"""

import json
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

from comfyfleet.errors import InvalidInput
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.outages import errors_logged
from comfyfleet.server.jobs import context as job_context
from comfyfleet.server.jobs import service, store
from comfyfleet.server.jobs.context import JobContext, is_outage
from comfyfleet.server.jobs.finish import attempts_exhausted, requeue_job
from comfyfleet.server.jobs.model import Failure, Job, JobStatus
from comfyfleet.server.jobs.outbox import end_dispatch, flush, sync_dispatches
from comfyfleet.server.jobs.user_messages import UNKNOWN
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import ActiveDispatch, Dispatch, DispatchStatus, RequeueReason

EXPIRED_PER_PASS_MAX = 200


async def expire_due_leases(context: JobContext, *, last_pass: datetime | None) -> int:
    """Ends expired leases and returns their number. After a long outage of the control plane, no
    lease ends; all leases are extended instead. After a short outage, all leases are first extended
    by its duration.
    """
    now, settings = context.clock(), context.settings
    last_pass = last_pass or now
    pause = (now - last_pass).total_seconds()
    missed = pause - settings.sweep_seconds
    if pause > settings.outage_seconds:
        async with context.central.transaction() as tx:
            await dispatch.extend_all(tx, seconds=settings.grace_seconds, now=now)
            await _excuse_workers(tx, last_pass, now, settings.grace_seconds)
        return 0
    if is_outage(last_pass, now, settings):
        # Each lease is extended from its expiry time, even if it has expired. If leases were
        # extended from now, a machine that is always overloaded would extend the leases of dead
        # workers forever.
        async with context.central.transaction() as tx:
            await dispatch.postpone_all(tx, seconds=math.ceil(missed))
            await _excuse_workers(tx, last_pass, now, 2 * settings.heartbeat_seconds)
    unseen_since = now - timedelta(seconds=settings.lost_after_seconds)
    async with context.central.transaction() as tx:
        expired = await dispatch.take_expired(
            tx,
            token=context.new_id(),
            now=now,
            limit=EXPIRED_PER_PASS_MAX,
            unseen_since=None if await job_context.is_recovering(tx, now) else unseen_since,
        )
    return sum([await _expire_one(context, row) for row in expired])


async def _excuse_workers(tx: Tx, began: datetime, now: datetime, seconds: int) -> None:
    """Records the outage. No worker counts as lost for the next `seconds`, because workers couldn't
    send heartbeats during the outage.
    """
    await job_context.recover_until(tx, now + timedelta(seconds=seconds))
    await job_context.note_outage(tx, began, now)


async def _expire_one(context: JobContext, row: Dispatch) -> bool:
    """Ends a lease and returns whether that succeeded. If it failed, a sweep tries again after this
    sweep's own lease has expired.
    """
    with errors_logged(f"the lease of dispatch {row.id} has expired but could not be ended"):
        await _end_or_requeue(context, row)
        return True
    return False


async def _end_or_requeue(context: JobContext, row: Dispatch) -> None:
    async with context.tenant(row.tenant_id) as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    if job is None or not job.status.is_active:
        await end_dispatch(context, row, job)
        return
    if row.lease_token is None:
        return
    async with context.central.transaction() as tx:
        requeued = await dispatch.requeue(
            tx,
            row.id,
            row.lease_token,
            RequeueReason.EXPIRED,
            now=context.clock(),
            settings=context.settings,
        )
    if requeued.status == DispatchStatus.LEASED:
        await _fail_exhausted(context, requeued, job)
        return
    context.queue.arrived([requeued])
    if job.lease_token:
        await requeue_job(context, requeued, job.lease_token)


async def _fail_exhausted(context: JobContext, row: Dispatch, job: Job) -> None:
    pool = await context.pool_of(row.tenant_id)
    async with pool.transaction() as tx:
        ended, outbox_ids = await service.force_fail(
            tx,
            job.tenant_id,
            job.id,
            attempts_exhausted(row),
            new_id=context.new_id,
            now=context.clock(),
        )
        ended = ended or await service.get(tx, job.tenant_id, job.id)
    await flush(context, pool, [ended], outbox_ids)


# Rows per page.
PAGE = 2000
# Minimum age of rows that are compared. Younger rows may not have reached the other database yet.
MIN_AGE = timedelta(seconds=30)
LEASED, QUEUED, POOL = "leased", "queued", "pool"
Keys: TypeAlias = tuple[UUID, UUID]  # a job's tenant id and job id


@dataclass(frozen=True)
class Repairs:
    dispatches_ended: int = 0
    dispatches_made: int = 0
    pools_skipped: int = 0
    rows_read: int = 0
    next: str | None = None  # the cursor of the next pass, or None if all rows were read

    def __add__(self, other: "Repairs") -> "Repairs":
        return Repairs(
            self.dispatches_ended + other.dispatches_ended,
            self.dispatches_made + other.dispatches_made,
            self.pools_skipped + other.pools_skipped,
            self.rows_read + other.rows_read,
        )


@dataclass(frozen=True)
class ReconcileCursor:
    """The position of a pass, which reads leased dispatches first, then queued dispatches, and then
    the jobs of each pool.
    """

    stage: str = LEASED
    pool: str = ""
    after: tuple[Any, ...] = ()

    def as_text(self) -> str:
        return json.dumps([self.stage, self.pool, *self.after], default=str)


def parse_cursor(text: str) -> ReconcileCursor:
    try:
        stage, pool, *after = json.loads(text)
        if stage == LEASED:
            return ReconcileCursor(LEASED, after=tuple(map(int, after)))
        if stage == QUEUED:
            return ReconcileCursor(QUEUED, after=_share(*after) if after else ())
        return ReconcileCursor(POOL, str(pool), tuple(map(UUID, after)))
    except (ValueError, TypeError, AttributeError):
        raise InvalidInput(
            "after must be the `next` value of an earlier response", field="after"
        ) from None


def _share(
    tenant_id: str, workflow_id: int, stage: str, provider: str, priority: int, *rest: int
) -> tuple[Any, ...]:
    rank, row_id = rest
    numbers = map(int, (priority, rank, row_id))
    return UUID(tenant_id), int(workflow_id), str(stage), str(provider), *numbers


async def reconcile(
    context: JobContext, *, after: str | None = None, rows_max: int | None = None
) -> Repairs:
    """Compares about `rows_max` rows, starting at the cursor `after`. If `rows_max` is None,
    compares all rows.
    """
    place: ReconcileCursor | None = parse_cursor(after) if after else ReconcileCursor()
    repairs = Repairs()
    while place is not None:
        if rows_max is not None and repairs.rows_read >= rows_max:
            return replace(repairs, next=place.as_text())
        page_repairs, place = await _page_at(context, place)
        repairs += page_repairs
    return repairs


async def _page_at(
    context: JobContext, place: ReconcileCursor
) -> tuple[Repairs, ReconcileCursor | None]:
    if place.stage == POOL:
        return await _pool_page(context, place)
    before = context.clock() - MIN_AGE
    on: ReconcileCursor | None
    async with context.central.read() as tx:
        if place.stage == LEASED:
            last = place.after[0] if place.after else 0
            rows = await dispatch.leased_after(tx, last, before=before, limit=PAGE)
            on = (
                ReconcileCursor(LEASED, after=(rows[-1].id,))
                if len(rows) == PAGE
                else ReconcileCursor(QUEUED)
            )
        else:
            rows, following = await dispatch.queued_after(
                tx, place.after or None, before=before, limit=PAGE
            )
            on = (
                ReconcileCursor(QUEUED, after=tuple(following))
                if following
                else _pool_after(context, "")
            )
    ended = await _end_orphans(context, rows)
    return Repairs(dispatches_ended=ended, rows_read=len(rows)), on


def _pool_after(context: JobContext, name: str) -> ReconcileCursor | None:
    following = sorted(name_of_pool for name_of_pool in context.pools if name_of_pool > name)
    return ReconcileCursor(POOL, following[0]) if following else None


async def _pool_page(
    context: JobContext, place: ReconcileCursor
) -> tuple[Repairs, ReconcileCursor | None]:
    """Compares a page of a pool's jobs. A pool that is down or was removed doesn't stop the
    pass.
    """
    name = place.pool
    following = _pool_after(context, name)
    with errors_logged(f"the jobs of pool {name} could not be compared"):
        keys, repairs = await _compare_jobs(context, context.pools[name], place.after)
        is_full = len(keys) == PAGE
        return repairs, ReconcileCursor(POOL, name, keys[-1]) if is_full else following
    return Repairs(pools_skipped=1), following


async def _end_orphans(context: JobContext, rows: Sequence[ActiveDispatch]) -> int:
    """Ends dispatches whose jobs have ended or were deleted. Returns their number."""
    ended = 0
    for pool, part in (await _by_pool(context, rows)).items():
        with errors_logged(f"{len(part)} dispatches could not be compared"):
            statuses = await _job_statuses(context, pool, part)
            for row in part:
                ended += await _guarded(row.id, _end_if_orphaned, context, row, statuses)
    return ended


async def _by_pool(
    context: JobContext, rows: Sequence[ActiveDispatch]
) -> dict[str | None, list[ActiveDispatch]]:
    """Groups dispatches by pool. Dispatches of tenants that no longer exist have the key None."""
    parts: dict[str | None, list[ActiveDispatch]] = defaultdict(list)
    for row in rows:
        parts[await context.pool_name_of(row.tenant_id)].append(row)
    return parts


async def _job_statuses(
    context: JobContext, pool: str | None, rows: Sequence[ActiveDispatch]
) -> dict[Keys, JobStatus]:
    if pool is None:
        return {}
    async with context.pools[pool].read() as tx:
        return await store.statuses_of(tx, [row.job_id for row in rows])


async def _end_if_orphaned(
    context: JobContext, row: ActiveDispatch, statuses: dict[Keys, JobStatus]
) -> bool:
    status = statuses.get((row.tenant_id, row.job_id))
    if status is not None and (status.is_active or row.cancel_requested):
        # The worker is notified of a cancellation by the response to its next heartbeat.
        return False
    job = None if status is None else await _job(context, row.tenant_id, row.job_id)
    if job and job.status.is_active:
        return False
    await end_dispatch(context, row, job)
    finding = f"job is {job.status}" if job else "job no longer exists"
    await context.audit("sweep", "reconcile", f"dispatch:{row.id}", row.tenant_id, found=finding)
    return True


async def _job(context: JobContext, tenant_id: UUID, job_id: UUID) -> Job | None:
    async with context.tenant(tenant_id) as tx:
        return await store.get(tx, tenant_id, job_id)


async def _guarded(name: object, act: Callable[..., Awaitable[bool]], *args: object) -> bool:
    """Calls `act`, and logs an exception instead of raising it, so that one row doesn't stop the
    others.
    """
    with errors_logged(f"{name} could not be repaired"):
        return await act(*args)
    return False


async def _compare_jobs(
    context: JobContext, pool: Database, after: tuple[Any, ...]
) -> tuple[list[Keys], Repairs]:
    """Adds the missing dispatches of active jobs, and fails active jobs whose dispatch has
    ended.
    """
    before = context.clock() - MIN_AGE
    place = (after[0], after[1]) if after else None
    async with pool.read() as tx:
        keys = await store.active_after(tx, place, before=before, limit=PAGE)
    async with context.central.read() as tx:
        has_ended = await dispatch.have_ended(tx, keys)
    added = await _make_dispatches(context, pool, [key for key in keys if key[1] not in has_ended])
    for tenant_id, job_id in keys:
        if has_ended.get(job_id):
            await _guarded(job_id, _fail_with_its_dispatch, context, pool, tenant_id, job_id)
    return keys, Repairs(dispatches_made=added, rows_read=len(keys))


async def _make_dispatches(context: JobContext, pool: Database, missing: Sequence[Keys]) -> int:
    ids_of: dict[UUID, list[UUID]] = defaultdict(list)
    for tenant_id, job_id in missing:
        ids_of[tenant_id].append(job_id)
    added = 0
    for tenant_id, job_ids in ids_of.items():
        async with pool.read() as tx:
            jobs = await store.get_many(tx, tenant_id, job_ids)
        await sync_dispatches(context, jobs)
        for job in jobs:
            finding = "active job had no dispatch"
            await context.audit("sweep", "reconcile", f"job:{job.id}", tenant_id, found=finding)
        added += len(jobs)
    return added


async def _fail_with_its_dispatch(
    context: JobContext, pool: Database, tenant_id: UUID, job_id: UUID
) -> bool:
    """Fails a job whose dispatch ended before the job did. Only an operator or a restored backup
    can cause this.
    """
    async with context.central.read() as tx:
        row: Dispatch | None = await dispatch.of_job(tx, tenant_id, job_id)
    if row is None or row.ended_at is None:
        return False
    why = Failure(UNKNOWN, f"its dispatch is {row.status}: {row.last_error}")
    async with pool.transaction() as tx:
        failed, outbox_ids = await service.force_fail(
            tx, tenant_id, job_id, why, new_id=context.new_id, now=context.clock()
        )
    if failed:
        await flush(context, pool, [failed], outbox_ids)
        finding = f"job was active although its dispatch is {row.status}"
        await context.audit(
            "sweep", "reconcile", f"dispatch:{row.id}", row.tenant_id, found=finding
        )
    return failed is not None
