"""Submit and cancel: the tenant's side first, then the central one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from uuid import UUID

from comfyfleet.db import Database
from comfyfleet.dispatch import service as dispatch
from comfyfleet.jobs import service
from comfyfleet.jobs.model import Job, Submission
from comfyfleet.jobs.settling import align, deliver
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import InvalidInput, QueueFull
from comfyfleet.tenants import service as tenants
from comfyfleet.tenants.model import Tenant

JOBS_PER_SUBMIT_MAX = 1000
FULL_RETRY_SECONDS = 30


async def submit(sides: Sides, tenant_id: UUID, asked: Submission) -> tuple[Job, bool]:
    """The job, and whether it is new: the same idempotency key gives the same job."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        before = await service.same_asked_before(tx, tenant_id, asked)
    if before:
        return await again(sides, before), False
    return await submit_new(sides, tenant_id, asked)


async def submit_new(
    sides: Sides,
    tenant_id: UUID,
    asked: Submission,
    *,
    tenant: Tenant | None = None,
) -> tuple[Job, bool]:
    """Not looked for first, as its idempotency key is mostly unused: the database decides."""
    added = await submit_many(sides, tenant_id, {sides.new_id(): asked}, tenant=tenant)
    if added:
        return added[0], True
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        before = await service.same_asked_before(tx, tenant_id, asked)
    if before is None:
        raise InvalidInput("the job could not be added: its id is taken")
    return await again(sides, before), False


async def again(sides: Sides, job: Job) -> Job:
    """A repeated request may come because the first was cut off before its dispatch was made."""
    if job.status.is_active:
        await align(sides, [job])
    return job


async def submit_many(
    sides: Sides,
    tenant_id: UUID,
    asked: dict[UUID, Submission],
    *,
    tenant: Tenant | None = None,
) -> Sequence[Job]:
    clamped = await admissible(sides, tenant_id, asked, tenant=tenant)
    pool = await sides.pool_of(tenant_id)
    done = await _submit_single(sides, pool, tenant_id, clamped)
    if done is None:
        async with pool.begin() as tx:
            done = await service.submit(
                tx, tenant_id, clamped, now=sides.clock(), active_max=sides.active_max
            )
    added, words = done
    await deliver(sides, pool, added, words)
    return added


async def _submit_single(
    sides: Sides, pool: Database, tenant_id: UUID, asked: Mapping[UUID, Submission]
) -> tuple[list[Job], list[int]] | None:
    """By one statement, which on PostgreSQL is a transaction by itself unless there is media to attach."""
    if pool.is_sqlite or not service.is_single(asked):
        return None
    has_media = any(each.video_id for each in asked.values())
    async with pool.begin() if has_media else pool.say() as tx:
        return await service.submit_one(tx, tenant_id, asked, sides.active_max, now=sides.clock())


async def admissible(
    sides: Sides,
    tenant_id: UUID,
    asked: dict[UUID, Submission],
    *,
    tenant: Tenant | None = None,
) -> dict[UUID, Submission]:
    """As the tenant may have them, if there is room for them. `tenant`: for who has just read it."""
    if not 0 < len(asked) <= JOBS_PER_SUBMIT_MAX:
        raise InvalidInput(f"from 1 to {JOBS_PER_SUBMIT_MAX} jobs at once, not {len(asked)}")
    if tenant is None:
        async with sides.central.look() as tx:
            tenant = await tenants.require_kept(tx, tenant_id)
    await _refuse_if_full(sides, tenant, len(asked))
    return {job_id: _clamped(each, tenant) for job_id, each in asked.items()}


def _clamped(asked: Submission, tenant: Tenant) -> Submission:
    priority = min(max(asked.priority, tenant.min_priority), tenant.max_priority)
    return asked if priority == asked.priority else replace(asked, priority=priority)


async def _refuse_if_full(sides: Sides, tenant: Tenant, more: int) -> None:
    settings = sides.settings
    for whose, most, said in (
        (tenant.id, tenant.max_queued or settings.max_queued_per_tenant, "of this tenant"),
        (None, settings.max_queued_total, "of all tenants"),
    ):
        count = partial(_queued, sides, whose)
        if not await sides.caps.has_room(whose, more, most, count=count, now=sides.clock()):
            raise QueueFull(
                f"the queue {said} is full: at most {most} jobs may wait",
                retry_after_seconds=FULL_RETRY_SECONDS,
            )


async def _queued(sides: Sides, whose: UUID | None) -> int:
    async with sides.central.look() as tx:
        return await dispatch.queued(tx, whose)


async def cancel(sides: Sides, tenant_id: UUID, job_id: UUID) -> Job:
    pool = await sides.pool_of(tenant_id)
    async with pool.begin() as tx:
        job, words = await service.cancel(
            tx, tenant_id, job_id, new_id=sides.new_id, now=sides.clock()
        )
    if words:
        await deliver(sides, pool, [job], words)
    return job


async def get(sides: Sides, tenant_id: UUID, job_id: UUID) -> Job:
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        return await service.get(tx, tenant_id, job_id)
