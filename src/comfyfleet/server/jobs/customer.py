"""Reads, lists, awaits, cancels and retries a customer's jobs, and explains why a job is
waiting.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.errors import Conflict, InvalidValue, JobEnded, NotFound
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import Property, ResolvedEffect, check_value
from comfyfleet.server.db import Tx
from comfyfleet.server.jobs import service, store, store_followed, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.diagnosis import WaitExplanation, explain_to_customer, explain_wait
from comfyfleet.server.jobs.model import Job, JobStatus
from comfyfleet.server.jobs.stages import WaitingJob
from comfyfleet.server.jobs.submit import retry_job_id, retry_spec
from comfyfleet.server.media import service as media
from comfyfleet.server.queue import service as dispatch

WAIT_SECONDS_MAX = 60
RECHECK_SECONDS = 1.0
PAGE_MAX = 200
TITLE_CHARACTERS_MAX = 100
HELD = "This job is held until some of your other jobs have ended."
ON_ITS_WAY = "This job is being added to the queue."


async def get_job(context: JobContext, tenant_id: UUID, user_id: UUID, job_id: UUID) -> Job:
    async with context.tenant(tenant_id) as tx:
        return await _get_own(tx, tenant_id, user_id, job_id)


async def _get_own(tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID) -> Job:
    job = await service.get(tx, tenant_id, job_id)
    if job.spec.user_id != user_id:
        raise NotFound(f"job {job_id} was not found")
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
    """Returns a page of jobs, the newest first. `before` is the last id of the previous page."""
    async with context.tenant(tenant_id) as tx:
        last = await _get_own(tx, tenant_id, user_id, before) if before else None
        return await store.list_page(
            tx, tenant_id, user_id, before=last, status=status, limit=min(limit, PAGE_MAX)
        )


async def cancel_job(context: JobContext, tenant_id: UUID, user_id: UUID, job_id: UUID) -> Job:
    """Cancels a job. A repeated call returns the cancelled job. Raises JobEnded if the job has
    completed or failed.
    """
    job = await get_job(context, tenant_id, user_id, job_id)
    is_running = job.spec.gateway is not None and job.shown_status == JobStatus.PROCESSING
    # A running prompt only counts as cancelled once its backend has reported the end of the run,
    # because results may already have been shown.
    if is_running and await submit.interrupt_job(context, tenant_id, job_id):
        return job
    ended = await submit.cancel_job(context, tenant_id, job_id)
    if ended.status != JobStatus.CANCELLED:
        raise JobEnded(
            f"the job has already ended ({ended.status}) and can't be cancelled. "
            "Its results are unchanged, because cancelling never deletes results.",
            status=ended.status,
        )
    return ended


async def retry_job(
    context: JobContext, tenant_id: UUID, user_id: UUID, job_id: UUID
) -> tuple[Job, bool]:
    """Submits a failed job again as a new job at the current price. A second call returns the same
    new job.
    """
    failed = await get_job(context, tenant_id, user_id, job_id)
    if failed.status != JobStatus.FAILED:
        raise Conflict(f"only failed jobs can be retried, and this job is {failed.status}")
    if failed.spec.gateway is not None:
        # The fleet's prices and terms may have changed since the prompt was submitted.
        raise Conflict("a prompt from a ComfyUI client can't be retried; submit it again instead")
    new_id = retry_job_id(failed)
    spec = replace(retry_spec(failed), price_tokens=await _current_price(context, failed))
    added = await submit.submit_many(context, tenant_id, {new_id: spec})
    if added:
        return added[0], True
    return await get_job(context, tenant_id, user_id, new_id), False


async def _current_price(context: JobContext, job: Job) -> int:
    if job.spec.effect_id is None:
        return job.reserved_tokens
    async with context.central.read() as tx:
        return (await catalog.get_effect(tx, job.spec.effect_id)).settings.price_tokens


async def explain_job(
    context: JobContext, tenant_id: UUID, user_id: UUID, job_id: UUID
) -> WaitExplanation:
    """Explains why a job is not running, and whether it needs a person's help."""
    job = await get_job(context, tenant_id, user_id, job_id)
    if job.spec.is_held and job.status == JobStatus.QUEUED:
        return WaitExplanation(HELD)
    async with context.central.read() as tx:
        row = await dispatch.of_job(tx, tenant_id, job_id)
    if row is None:
        return WaitExplanation(ON_ITS_WAY)
    return await explain_wait(context, row)


class FormerSettings(NamedTuple):
    """The reusable settings of an earlier job. `problems` explains why its other settings can't be
    used.
    """

    offer: ResolvedEffect | None
    video_id: UUID | None
    properties: dict[str, Any]
    problems: tuple[str, ...]


async def former_settings(
    context: JobContext, tenant_id: UUID, user_id: UUID, job_id: UUID
) -> FormerSettings:
    """Returns the values of an earlier job that the customer may submit again for its effect, and
    explains why other values can't be used.
    """
    job = await get_job(context, tenant_id, user_id, job_id)
    offer = await _offer_of(context, job)
    if offer is None:
        return FormerSettings(None, None, {}, ("The effect is no longer offered.",))
    values = [(prop, job.spec.properties.get(prop.name)) for prop in offer.properties]
    async with context.tenant(tenant_id) as tx:
        video = await _kept_media(tx, tenant_id, user_id, job.spec.video_id)
        ids = {file_id for prop, value in values if prop.is_media and (file_id := _as_id(value))}
        uploaded = await media.media_of_files(tx, tenant_id, user_id, ids)
    problems = (
        [] if video or offer.takes is None else ["The media item has expired. Choose another one."]
    )
    properties: dict[str, Any] = {}
    for prop, value in values:
        if prop.is_primary_input or value is None:
            continue
        current = uploaded.get(_as_id(value) or job.id) if prop.is_media else value
        if current is None or not _is_valid(prop, current):
            problems.append(f"{prop.label or prop.name} can't be reused. Choose a new value.")
        else:
            properties[prop.name] = str(current) if prop.is_media else current
    return FormerSettings(offer, video, properties, tuple(problems))


async def _offer_of(context: JobContext, job: Job) -> ResolvedEffect | None:
    if job.spec.effect_id is None:
        return None
    try:
        async with context.central.read() as tx:
            return await catalog.resolve(tx, job.spec.effect_id)
    except NotFound:
        return None


async def _kept_media(tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID | None) -> UUID | None:
    try:
        item = await media.get_media(tx, tenant_id, user_id, media_id) if media_id else None
    except NotFound:
        return None
    return item.id if item and item.original_file_id else None


def _as_id(value: Any) -> UUID | None:
    try:
        return UUID(str(value))
    except ValueError:
        return None


def _is_valid(prop: Property, value: Any) -> bool:
    try:
        check_value(prop, value)
    except InvalidValue:
        return False
    return True


JOBS_FOLLOWED_MAX = 100


async def read_media_jobs(context: JobContext, tenant_id: UUID, media_id: UUID) -> list[WaitingJob]:
    """Returns the latest job and all active jobs of a media item."""
    async with context.tenant(tenant_id) as tx:
        jobs = await store_followed.waiting_of_media(
            tx, tenant_id, media_id, limit=JOBS_FOLLOWED_MAX
        )
    return [job for place, job in enumerate(jobs) if not place or job.status.is_active]


async def read_active_jobs(
    context: JobContext, tenant_id: UUID, user_id: UUID, *, ended_since: datetime | None = None
) -> list[WaitingJob]:
    """Returns the user's active jobs that were submitted for effects. If `ended_since` is set, also
    returns the jobs that have ended since then.
    """
    async with context.tenant(tenant_id) as tx:
        active = await store_followed.active_of_user(
            tx, tenant_id, user_id, limit=JOBS_FOLLOWED_MAX
        )
        if ended_since is None:
            return active
        ended = await store_followed.ended_since(
            tx, tenant_id, user_id, since=ended_since, limit=JOBS_FOLLOWED_MAX
        )
    return active + ended


async def read_waiting(
    context: JobContext, tenant_id: UUID, job_ids: Sequence[UUID]
) -> list[WaitingJob]:
    async with context.tenant(tenant_id) as tx:
        return await store_followed.waiting_by_id(tx, tenant_id, job_ids)


async def explain_waiting(context: JobContext, job: WaitingJob) -> str:
    """Explains to a job's owner why it is not running."""
    if job.is_held and job.status == JobStatus.QUEUED:
        return HELD
    async with context.central.read() as tx:
        row = await dispatch.of_job(tx, job.tenant_id, job.id)
    return ON_ITS_WAY if row is None else await explain_to_customer(context, row)


async def node_titles(context: JobContext, tenant_id: UUID, job_id: UUID) -> dict[str, str]:
    """Returns the titles of the nodes in a job's prompt, as their author named them."""
    async with context.tenant(tenant_id) as tx:
        job = await store.get(tx, tenant_id, job_id)
    prompt: Mapping[str, Any] = job.spec.prompt if job else {}
    return {node_id: _title(node) for node_id, node in prompt.items() if isinstance(node, dict)}


def _title(node: Mapping[str, Any]) -> str:
    named = node.get("_meta")
    title = named.get("title") if isinstance(named, dict) else None
    return str(title or node.get("class_type", ""))[:TITLE_CHARACTERS_MAX]


async def wait_for_end(context: JobContext, tenant_id: UUID, job_id: UUID, seconds: float) -> Job:
    """Waits until the job has ended, and returns it. After the timeout, or when this process stops,
    returns the unfinished job.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + min(seconds, WAIT_SECONDS_MAX)
    while True:
        job = await submit.get_job(context, tenant_id, job_id)
        remaining = until - loop.time()
        if not job.status.is_active or remaining <= 0 or context.notifier.is_stopping:
            return job
        await context.notifier.changed(job_id, min(remaining, RECHECK_SECONDS))
