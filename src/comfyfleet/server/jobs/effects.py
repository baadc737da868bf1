"""Customers' jobs: apply an effect, read, list, wait for, cancel and retry the jobs of a user."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.errors import Conflict, FleetError, InvalidInput, InvalidValue, NotFound, Refused
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import Property, ResolvedEffect
from comfyfleet.server.db import Tx
from comfyfleet.server.jobs import service, store, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.diagnosis import explain_to_customer
from comfyfleet.server.jobs.idempotency import hash_request
from comfyfleet.server.jobs.model import Job, JobSpec, JobStatus
from comfyfleet.server.jobs.submit import (
    JobRequest,
    ResolvedWorkflow,
    require_active,
    resolve,
    retry_job_id,
    retry_spec,
)
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Tenant

WAIT_SECONDS_MAX = 60
RECHECK_SECONDS = 1.0
PAGE_MAX = 200


@dataclass(frozen=True, slots=True)
class EffectRequest:
    """An effect, what it is applied to, and what the customer chose."""

    effect_id: UUID
    properties: Mapping[str, Any] = field(default_factory=dict)
    video_id: UUID | None = None
    files: Mapping[str, UUID] = field(default_factory=dict)
    idempotency_key: str | None = None
    priority: int = 0

    @property
    def request_hash(self) -> str:
        files = {name: str(each) for name, each in self.files.items()}
        return hash_request(
            str(self.effect_id), dict(self.properties), str(self.video_id), files, self.priority
        )


class EffectWorkflow(NamedTuple):
    """An effect, and what stands behind it for a job."""

    offer: ResolvedEffect
    registered: ResolvedWorkflow


class EffectSubmission(NamedTuple):
    job: Job
    is_new: bool
    typical_seconds: float | None  # of the effect; None also if it was asked for before


async def submit_effect(
    context: JobContext, tenant: Tenant, user_id: UUID, wanted: EffectRequest
) -> EffectSubmission:
    """`tenant`: as it has just been read, with the caller's key."""
    try:
        return await _submit_effect(context, tenant, user_id, wanted)
    except FleetError:
        # Asked again, it is answered as before: the effect may have changed, the queue be full.
        before = await submit.find_repeated(context, tenant.id, user_id, wanted)
        if before is None:
            raise
        return EffectSubmission(before, False, None)


async def _submit_effect(
    context: JobContext, tenant: Tenant, user_id: UUID, wanted: EffectRequest
) -> EffectSubmission:
    async with context.central.read() as tx:
        offered = await resolve_effect(tx, wanted.effect_id)
    tenants.check_kept(tenant)
    asked = await build_request(context, tenant.id, user_id, offered, wanted)
    job, is_new = await submit.submit(context, tenant.id, asked, tenant=tenant)
    return EffectSubmission(job, is_new, offered.offer.effect.typical_seconds if is_new else None)


async def resolve_effect(tx: Tx, effect_id: UUID) -> EffectWorkflow:
    offer, fleet = await catalog.resolve_with_fleet(tx, effect_id)
    require_active(offer.workflow)
    return EffectWorkflow(offer, ResolvedWorkflow(offer.workflow, offer.version, fleet))


async def build_request(
    context: JobContext,
    tenant_id: UUID,
    user_id: UUID,
    offered: EffectWorkflow,
    wanted: EffectRequest,
) -> JobSpec:
    """Checks all that can be checked before anything is written."""
    offer = offered.offer
    given = await _files(context, tenant_id, user_id, offer, wanted)
    settings = offer.effect.settings
    order = JobRequest(
        slug=offer.workflow.slug,
        values=wanted.properties,
        overrides=settings.overrides,
        locked=settings.locked,
        files=given,
        stage=settings.stage,
        provider=settings.provider,
        priority=wanted.priority,
        user_id=user_id,
        effect_id=offer.effect.id,
        idempotency_key=wanted.idempotency_key,
        request_hash=wanted.request_hash if wanted.idempotency_key else None,
        price_tokens=settings.price_tokens,
        video_id=wanted.video_id,
    )
    return await resolve(context, tenant_id, order, known=offered.registered)


async def _files(
    context: JobContext,
    tenant_id: UUID,
    user_id: UUID,
    offer: ResolvedEffect,
    wanted: EffectRequest,
) -> Mapping[str, UUID]:
    """Media goes where the effect takes it, by the id of the media, and only the customer's own."""
    if offer.takes is None and wanted.video_id:
        raise InvalidInput("this effect takes no media", field="video_id")
    if offer.takes and wanted.video_id is None:
        raise InvalidInput(f"this effect needs media ({offer.takes})", field="video_id")
    named = {**wanted.properties, **wanted.files}
    found = dict(wanted.files)
    if not any(each.is_media for each in offer.version.properties):
        return found
    async with context.tenant(tenant_id) as tx:
        for each in offer.version.properties:
            if each.is_primary_input and wanted.video_id:
                file = await _file_of(tx, tenant_id, user_id, wanted.video_id, each)
                most = context.settings.max_upload_bytes
                offer.check_upload(file.mime_type, file.size or 0, at_most_bytes=most)
                found[each.name] = file.id
            elif each.is_media and named.get(each.name) is not None:
                media_id = _media_id(each, named[each.name])
                found[each.name] = (await _file_of(tx, tenant_id, user_id, media_id, each)).id
    return found


async def _file_of(
    tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID, taken_as: Property
) -> File:
    field_ = "video_id" if taken_as.is_primary_input else taken_as.name
    item = await media.get_media(tx, tenant_id, user_id, media_id)
    if item.original_file_id is None:
        raise Refused("the media has expired", field=field_)
    if item.kind != taken_as.type:
        raise InvalidInput(
            f"this effect takes {taken_as.type}, and the media is {item.kind}", field=field_
        )
    return await media.get_file(tx, tenant_id, item.original_file_id)


def _media_id(each: Property, value: Any) -> UUID:
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, TypeError, AttributeError):
        raise InvalidValue(
            f"the property {each.name}: it must be the id of media", property=each.name
        ) from None


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
    """The newest first; go on with `before` = the last one's id."""
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
    """A failed job once more, as a new one at today's price. Asked twice, it is one retry."""
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
    """The job when it has ended, or as it is when the time is up."""
    loop = asyncio.get_running_loop()
    until = loop.time() + min(seconds, WAIT_SECONDS_MAX)
    while True:
        job = await submit.get_job(context, tenant_id, job_id)
        left = until - loop.time()
        if not job.status.is_active or left <= 0:
            return job
        await context.notifier.changed(job_id, min(left, RECHECK_SECONDS))
