"""A customer's own jobs: read, list, wait for, cancel and retry them, and explain why one waits."""

import asyncio
from dataclasses import replace
from uuid import UUID

from comfyfleet.errors import Conflict, NotFound
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Tx
from comfyfleet.server.jobs import service, store, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.diagnosis import explain_to_customer
from comfyfleet.server.jobs.model import Job, JobStatus
from comfyfleet.server.jobs.submit import retry_job_id, retry_spec
from comfyfleet.server.queue import service as dispatch

WAIT_SECONDS_MAX = 60
RECHECK_SECONDS = 1.0
PAGE_MAX = 200


async def get_job(context: JobContext, tenant_id: UUID, user_id: UUID, job_id: UUID) -> Job:
    async with context.tenant(tenant_id) as tx:
        return await _get_own(tx, tenant_id, user_id, job_id)


async def _get_own(tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID) -> Job:
    job = await service.get(tx, tenant_id, job_id)
    if job.asked.user_id != user_id:
        raise NotFound(f"there is no job {job_id}")
    return job


async def list_jobs(
    context: JobContext,
    tenant_id: UUID,
    user_id: UUID,
    *,
    before: UUID | None = None,
    status: JobStatus | None = None,
    limit: int = 50,
) -> list[Job]:
    """Returns a page, the newest first; `before` is the last page's last id."""
    async with context.tenant(tenant_id) as tx:
        last = await _get_own(tx, tenant_id, user_id, before) if before else None
        return await store.list_page(
            tx, tenant_id, user_id, before=last, status=status, limit=min(limit, PAGE_MAX)
        )


async def cancel_job(context: JobContext, tenant_id: UUID, user_id: UUID, job_id: UUID) -> Job:
    await get_job(context, tenant_id, user_id, job_id)
    return await submit.cancel_job(context, tenant_id, job_id)


async def retry_job(
    context: JobContext, tenant_id: UUID, user_id: UUID, job_id: UUID
) -> tuple[Job, bool]:
    """Runs a failed job again, as a new one at today's price. A second call gives the same retry."""
    failed = await get_job(context, tenant_id, user_id, job_id)
    if failed.status != JobStatus.FAILED:
        raise Conflict(f"only a failed job can be retried, not one that is {failed.status}")
    new_id = retry_job_id(failed)
    asked = replace(retry_spec(failed), price_tokens=await _current_price(context, failed))
    added = await submit.submit_many(context, tenant_id, {new_id: asked})
    if added:
        return added[0], True
    return await get_job(context, tenant_id, user_id, new_id), False


async def _current_price(context: JobContext, job: Job) -> int:
    if job.asked.effect_id is None:
        return job.reserved_tokens
    async with context.central.read() as tx:
        return (await catalog.get_effect(tx, job.asked.effect_id)).settings.price_tokens


async def explain_job(context: JobContext, tenant_id: UUID, user_id: UUID, job_id: UUID) -> str:
    job = await get_job(context, tenant_id, user_id, job_id)
    if job.asked.is_held and job.status == JobStatus.QUEUED:
        return "It is held until others of yours have ended."
    async with context.central.read() as tx:
        row = await dispatch.of_job(tx, tenant_id, job_id)
    if row is None:
        return "It is on its way to the queue."
    return await explain_to_customer(context, row)


async def wait_for_end(context: JobContext, tenant_id: UUID, job_id: UUID, seconds: float) -> Job:
    """Returns the job when it has ended, or as it is when the time is up."""
    loop = asyncio.get_running_loop()
    until = loop.time() + min(seconds, WAIT_SECONDS_MAX)
    while True:
        job = await submit.get_job(context, tenant_id, job_id)
        left = until - loop.time()
        if not job.status.is_active or left <= 0:
            return job
        await context.notifier.changed(job_id, min(left, RECHECK_SECONDS))
