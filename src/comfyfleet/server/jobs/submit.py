"""Submits, cancels and retries jobs. A submission turns a request into a spec, adds a row to the
tenant's database, and then adds a dispatch to the central queue.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import SystemRandom
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from comfyfleet.errors import (
    Conflict,
    FleetError,
    InvalidInput,
    InvalidValue,
    NotFound,
    QueueFull,
    Refused,
    WorkflowWithdrawn,
)
from comfyfleet.server.catalog import payload
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import (
    PRIMARY_INPUT,
    SEED_MAX,
    AssetRef,
    JobPayload,
    Property,
    RegisteredWorkflow,
    ResolvedEffect,
    WorkflowVersion,
    refuse_unknown,
)
from comfyfleet.server.catalog.payload import RandomSource
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.jobs import files, reuse, service, store
from comfyfleet.server.jobs.caches import ActiveJobLimits
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.diagnosis import (
    read_shortage,
    requirements_of_job,
)
from comfyfleet.server.jobs.idempotency import hash_request, require_same_request
from comfyfleet.server.jobs.model import Job, JobSpec, JobStatus, Shortage
from comfyfleet.server.jobs.outbox import flush, sync_dispatches
from comfyfleet.server.jobs.reuse import fingerprint_of
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, kind_of
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import DispatchStatus
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import LoggedRun
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Tenant

JOBS_PER_SUBMIT_MAX = 1000
# Seconds after which a client should retry if the queue is full.
FULL_RETRY_SECONDS = 30
# Types of images that may be animated. Nodes that load videos don't accept them.
MAYBE_ANIMATED = ("image/gif", "image/webp", "image/png", "image/avif")
_random = SystemRandom()


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request to run an effect, whose settings are added later, or to run a workflow.

    `files` contains ids of the tenant's files by property.
    """

    slug: str = ""
    version: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    locked: tuple[str, ...] = ()  # names of properties that only the effect may set
    # Media types that the primary input accepts. Empty means all types of its kind.
    media_types: tuple[str, ...] = ()
    max_upload_bytes: int | None = None
    files: Mapping[str, UUID] = field(default_factory=dict)
    stage: str = "production"
    provider: str = "self_hosted"
    priority: int = 0
    backend_affinity: str | None = None
    user_id: UUID | None = None
    effect_id: UUID | None = None
    idempotency_key: str | None = None
    price_tokens: int = 0
    video_id: UUID | None = None
    reuse: bool = False  # whether an existing result may be used instead of running the job

    @property
    def request_hash(self) -> str | None:
        """The hash of the customer's input, or None if the request has no idempotency key."""
        if self.idempotency_key is None:
            return None
        parts = str(self.effect_id), dict(self.values), str(self.video_id)
        return hash_request(*parts, {}, self.priority)  # the {} is part of all stored hashes


class ResolvedWorkflow(NamedTuple):
    """The workflow of a request, and the fleet whose node types are used to convert the workflow to
    a prompt.
    """

    workflow: RegisteredWorkflow
    version: WorkflowVersion
    fleet: Fleet | None


class EffectWorkflow(NamedTuple):
    """An effect with its workflow."""

    offer: ResolvedEffect
    registered: ResolvedWorkflow


class EffectSubmission(NamedTuple):
    job: Job
    is_new: bool
    # duration of the effect's typical job, or None if the job was submitted earlier
    typical_seconds: float | None


async def submit_effect(
    context: JobContext, tenant: Tenant, request: JobRequest
) -> EffectSubmission:
    """Submits a job for a customer's request to run an effect. `tenant` was read together with the
    caller's key.
    """
    try:
        return await _submit_effect(context, tenant, request)
    except FleetError:
        # A repeated request returns the job of the first one, even if the effect has changed or the
        # queue is full now.
        earlier_job = await find_repeated(context, tenant.id, request)
        if earlier_job is None:
            raise
        return EffectSubmission(earlier_job, False, None)


async def _submit_effect(
    context: JobContext, tenant: Tenant, request: JobRequest
) -> EffectSubmission:
    async with context.central.read() as tx:
        offered = await resolve_effect(tx, request.effect_id)
    tenants.check_kept(tenant)
    spec = await resolve_request(context, tenant.id, request, offered)
    job, is_new = await submit(context, tenant.id, spec, tenant=tenant)
    return EffectSubmission(job, is_new, offered.offer.effect.typical_seconds if is_new else None)


async def resolve_effect(tx: Tx, effect_id: UUID | None) -> EffectWorkflow:
    offer, fleet = await catalog.resolve_with_fleet(tx, effect_id)
    require_active(offer.workflow)
    return EffectWorkflow(offer, ResolvedWorkflow(offer.workflow, offer.version, fleet))


async def resolve_request(
    context: JobContext, tenant_id: UUID, request: JobRequest, offered: EffectWorkflow
) -> JobSpec:
    """Adds the effect's settings to a request and checks it. Writes nothing."""
    offer, settings = offered.offer, offered.offer.effect.settings
    refuse_unknown(
        request.values,
        {prop.name for prop in offer.version.properties},
        [
            prop.name
            for prop in offer.version.properties
            if not prop.is_primary_input and prop.name not in settings.locked
        ],
    )
    filled = replace(
        request,
        slug=offer.workflow.slug,
        overrides=settings.overrides,
        locked=settings.locked,
        files=await _find_media(context, tenant_id, offer, request),
        stage=settings.stage,
        provider=settings.provider,
        price_tokens=settings.price_tokens,
        reuse=settings.reuse,
    )
    return await resolve(context, tenant_id, filled, known=offered.registered)


async def _find_media(
    context: JobContext, tenant_id: UUID, offer: ResolvedEffect, request: JobRequest
) -> dict[str, UUID]:
    """Returns the ids of the requested media items' files by property. Only finds media items of
    the customer.
    """
    if offer.takes is None and request.video_id:
        raise InvalidInput("this effect doesn't use a media item", field="video_id")
    if offer.takes and request.video_id is None:
        raise InvalidInput(f"this effect requires a media item ({offer.takes})", field="video_id")
    file_ids: dict[str, UUID] = {}
    if not any(prop.is_media for prop in offer.version.properties):
        return file_ids
    async with context.tenant(tenant_id) as tx:
        for prop in offer.version.properties:
            if prop.is_primary_input and request.video_id:
                file = await _file_of(tx, tenant_id, request.user_id, request.video_id, prop)
                most = context.settings.max_upload_bytes
                offer.check_upload(file.mime_type, file.size or 0, at_most_bytes=most)
                file_ids[prop.name] = file.id
            elif prop.is_media and request.values.get(prop.name) is not None:
                media_id = _media_id(prop, request.values[prop.name])
                file = await _file_of(tx, tenant_id, request.user_id, media_id, prop)
                file_ids[prop.name] = file.id
    return file_ids


async def _file_of(
    tx: Tx, tenant_id: UUID, user_id: UUID | None, media_id: UUID, prop: Property
) -> File:
    field_ = "video_id" if prop.is_primary_input else prop.name
    item = await media.get_media(tx, tenant_id, user_id, media_id)
    if item.original_file_id is None:
        raise Refused("the media item has expired", field=field_)
    if item.kind != prop.type:
        raise InvalidInput(
            f"this effect requires {prop.type}, but the media item is {item.kind}", field=field_
        )
    return await media.get_file(tx, tenant_id, item.original_file_id)


def _media_id(prop: Property, value: Any) -> UUID:
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, TypeError, AttributeError):
        raise InvalidValue(
            f"property {prop.name} must be the id of a media item", property=prop.name
        ) from None


class WorkflowCache:
    """Caches workflows for requests that are handled together, so that each workflow is only looked
    up once.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._workflows: dict[tuple[str, int | None, str], ResolvedWorkflow] = {}

    async def get(self, request: JobRequest) -> ResolvedWorkflow:
        key = request.slug, request.version, request.stage
        if key not in self._workflows:
            self._workflows[key] = await _find_workflow(self._context, request)
        return self._workflows[key]


async def resolve(
    context: JobContext,
    tenant_id: UUID,
    request: JobRequest,
    *,
    known: ResolvedWorkflow | None = None,
) -> JobSpec:
    """Checks a request and builds the prompt. Errors name the affected property. Writes nothing.

    `known` is the workflow, if the caller has already read it.
    """
    registered = known or await _find_workflow(context, request)
    workflow, version = registered.workflow, registered.version
    _refuse_locked(request)
    built = await _build_payload(context, registered, request)
    assets = {asset.name: asset for asset in built.assets}
    inputs = await _require_files(context, tenant_id, request, assets)
    spec = JobSpec(
        workflow_id=workflow.id,
        workflow_slug=workflow.slug,
        workflow_version=version.version,
        prompt=built.prompt,
        properties=built.properties,
        assets=built.assets,
        output_node_id=version.output_node_id,
        stage=request.stage,
        provider=request.provider,
        priority=request.priority,
        backend_affinity=request.backend_affinity,
        model_key=built.model_key,
        model_set=built.model_set,
        user_id=request.user_id,
        effect_id=request.effect_id,
        idempotency_key=request.idempotency_key,
        request_hash=request.request_hash,
        price_tokens=request.price_tokens,
        video_id=request.video_id,
    )
    return replace(spec, fingerprint=fingerprint_of(spec, inputs)) if request.reuse else spec


def _refuse_locked(request: JobRequest) -> None:
    for name in request.locked:
        if name in request.values or name in request.files:
            raise InvalidInput(f"{name} is set by the effect and can't be changed", property=name)


async def _find_workflow(context: JobContext, request: JobRequest) -> ResolvedWorkflow:
    async with context.central.read() as tx:
        workflow = await catalog.workflow_by_slug(tx, request.slug)
        version = await catalog.get_version(tx, workflow, request.version)
        return await resolve_workflow(tx, workflow, version, stage=request.stage)


def require_active(workflow: RegisteredWorkflow) -> None:
    if not workflow.is_active or workflow.is_open:
        raise WorkflowWithdrawn(
            f"workflow {workflow.slug} doesn't accept jobs", field="workflow_slug"
        )


async def resolve_workflow(
    tx: Tx, workflow: RegisteredWorkflow, version: WorkflowVersion, *, stage: str
) -> ResolvedWorkflow:
    require_active(workflow)
    assigned = await fleets.fleets_with(tx, workflow.id, stage=stage)
    known = [fleet for fleet in assigned if fleet.object_info_hash]
    return ResolvedWorkflow(workflow, version, next(iter(known or assigned), None))


async def _build_payload(
    context: JobContext, registered: ResolvedWorkflow, request: JobRequest
) -> JobPayload:
    version, fleet = registered.version, registered.fleet
    document = await context.caches.documents.get(
        version.document_key, lambda: catalog.read_document(context.store, version)
    )
    of_fleet = f"object_info/{fleet.object_info_hash if fleet else None}"
    object_info = await context.caches.documents.get(
        of_fleet, lambda: catalog.object_info_for(context.store, fleet)
    )
    seed = _random.randint(0, SEED_MAX)
    resolved = payload.resolved_for(
        version, request.values, request.overrides, files=request.files, seed=seed
    )
    prompt = context.caches.prompts.get(
        f"{version.workflow_id}/{version.version}/{of_fleet}",
        lambda chance: payload.build_marked_prompt(version, document, object_info, chance),
        # As in ComfyUI's editor, each job gets a new random choice for {a|b} and the current date
        # for %date%.
        RandomSource(context.clock(), _random),
    )
    return payload.fill_payload(version, prompt, object_info, resolved)


async def _require_files(
    context: JobContext, tenant_id: UUID, request: JobRequest, assets: Mapping[str, AssetRef]
) -> dict[str, File]:
    """Returns the files of a request by property. Raises InvalidInput if a file doesn't belong to
    the user, wasn't uploaded or has the wrong type.

    Files in `request.files` are already known to belong to the user, but values may contain the id
    of any file.
    """
    pool = await context.pool_of(tenant_id)
    files_by_name: dict[str, File] = {}
    for name, asset in assets.items():
        try:
            async with pool.read() as tx:
                file = await media.get_file(tx, tenant_id, asset.file_id)
            if name not in request.files:
                _require_own(file, request.user_id)
        except NotFound:
            raise InvalidInput(
                f"{name}: file {asset.file_id} was not found", property=name
            ) from None
        try:
            file = await files.confirm_upload(context, pool, file)
        except files.REFUSALS as error:
            raise InvalidInput(f"{name}: {error.message}", property=name) from error
        _check_kind(asset, file)
        if name == PRIMARY_INPUT:
            _check_limits(request, file)
        files_by_name[name] = file
    return files_by_name


def _check_kind(asset: AssetRef, file: File) -> None:
    kind = kind_of(file.mime_type)
    if kind is not None and kind != asset.kind:
        raise InvalidInput(
            f"{asset.name} requires {asset.kind}, "
            f"but the file is {file.mime_type}{_advice(asset, file)}",
            property=asset.name,
        )


def _advice(asset: AssetRef, file: File) -> str:
    is_maybe_animated = asset.kind == "video" and file.mime_type in MAYBE_ANIMATED
    return "; convert animated images to MP4 or WebM first" if is_maybe_animated else ""


def _check_limits(request: JobRequest, file: File) -> None:
    """Checks the effect's limits for its primary input."""
    if request.media_types and file.mime_type not in request.media_types:
        raise InvalidInput(
            f"the effect accepts {', '.join(request.media_types)}, not {file.mime_type}",
            property=PRIMARY_INPUT,
        )
    most = request.max_upload_bytes
    if most is not None and (file.size or 0) > most:
        raise InvalidInput(
            f"the file has {file.size:,} bytes, but the effect accepts at most {most:,}",
            property=PRIMARY_INPUT,
        )


def _require_own(file: File, user_id: UUID | None) -> None:
    """Raises NotFound if the file doesn't belong to the user. Operators have no user and may use
    any file.
    """
    if user_id is not None and file.user_id != user_id:
        raise NotFound(f"file {file.id} was not found")


async def submit(
    context: JobContext,
    tenant_id: UUID,
    spec: JobSpec,
    *,
    tenant: Tenant | None = None,
) -> tuple[Job, bool]:
    """Submits a job. Returns it and whether it is new. A repeated request with the same idempotency
    key returns the same job.

    The key is not looked up first, because most keys are new. The database's unique index detects
    repeated keys.
    """
    added = await submit_many(context, tenant_id, {context.new_id(): spec}, tenant=tenant)
    if added:
        return added[0], True
    earlier_job = await find_repeated(context, tenant_id, spec)
    if earlier_job is None:
        raise InvalidInput("the job could not be added because its id is already in use")
    return earlier_job, False


async def find_repeated(
    context: JobContext, tenant_id: UUID, request: JobRequest | JobSpec
) -> Job | None:
    """Returns the job of an earlier request with the same idempotency key, if any."""
    if request.idempotency_key is None:
        return None
    async with context.tenant(tenant_id) as tx:
        job = await store.by_idempotency_key(
            tx, tenant_id, request.user_id, request.idempotency_key
        )
    if job is None:
        return None
    require_same_request(job.spec, request.request_hash)
    # The first request may have been interrupted before its dispatch was added.
    if job.status.is_active:
        await sync_dispatches(context, [job])
    return job


async def submit_many(
    context: JobContext,
    tenant_id: UUID,
    specs: dict[UUID, JobSpec],
    *,
    tenant: Tenant | None = None,
    active_max: ActiveJobLimits | None = None,
) -> Sequence[Job]:
    """Submits jobs and returns the new ones. `active_max` overrides the configured limits."""
    clamped = await check_admission(context, tenant_id, specs, tenant=tenant)
    pool = await context.pool_of(tenant_id)
    most = active_max or context.active_max
    done = await _submit_single(context, pool, tenant_id, clamped, most)
    if done is None:
        done = await _submit_step_by_step(context, pool, tenant_id, clamped, most, tenant)
    added, outbox_ids = done
    await flush(context, pool, added, outbox_ids)
    return added


async def _submit_single(
    context: JobContext,
    pool: Database,
    tenant_id: UUID,
    specs: Mapping[UUID, JobSpec],
    most: ActiveJobLimits,
) -> tuple[list[Job], list[int]] | None:
    """Submits a single job in one statement. A transaction is only used if a media item must be
    attached.

    Returns None on SQLite, for several jobs, and if the job can't be added this way. The caller
    then submits step by step.
    """
    if pool.is_sqlite or not service.is_single(specs):
        return None
    has_media = any(spec.video_id for spec in specs.values())
    async with pool.transaction() if has_media else pool.execute_one() as tx:
        return await service.submit_one(tx, tenant_id, specs, most, now=context.clock())


async def _submit_step_by_step(
    context: JobContext,
    pool: Database,
    tenant_id: UUID,
    specs: Mapping[UUID, JobSpec],
    most: ActiveJobLimits,
    tenant: Tenant | None,
) -> tuple[list[Job], list[int]]:
    """Submits jobs in several statements. The commit may not be on disk yet when this returns.
    The caller's `flush` waits for that.
    """
    if not reuse.asks_for_reuse(specs):
        async with pool.transaction(persists=False) as tx:
            return await service.submit(tx, tenant_id, specs, now=context.clock(), active_max=most)
    kept_since = await reuse.files_kept_since(context, tenant_id, tenant=tenant)
    async with pool.transaction(persists=False) as tx:
        return await reuse.submit(
            context, tx, tenant_id, specs, kept_since=kept_since, active_max=most
        )


async def check_admission(
    context: JobContext,
    tenant_id: UUID,
    specs: dict[UUID, JobSpec],
    *,
    tenant: Tenant | None = None,
) -> dict[UUID, JobSpec]:
    """Raises an error if the jobs exceed the queue's limits. Otherwise, returns them with their
    priorities clamped to the tenant's range.

    `tenant` is the tenant, if the caller has already read it.
    """
    if not 0 < len(specs) <= JOBS_PER_SUBMIT_MAX:
        raise InvalidInput(f"submit 1 to {JOBS_PER_SUBMIT_MAX} jobs per request, not {len(specs)}")
    if tenant is None:
        async with context.central.read() as tx:
            tenant = await tenants.require_kept(tx, tenant_id)
    await _refuse_if_full(context, tenant, len(specs))
    return {job_id: _clamp_priority(spec, tenant) for job_id, spec in specs.items()}


def _clamp_priority(spec: JobSpec, tenant: Tenant) -> JobSpec:
    priority = min(max(spec.priority, tenant.min_priority), tenant.max_priority)
    return spec if priority == spec.priority else replace(spec, priority=priority)


async def _refuse_if_full(context: JobContext, tenant: Tenant, more: int) -> None:
    settings, own = context.settings, tenant.max_queued
    for whose, most, owner in (
        (tenant.id, settings.max_queued_per_tenant if own is None else own, "of this tenant"),
        (None, settings.max_queued_total, "of all tenants"),
    ):
        count = partial(_queued_count, context, whose)
        if not await context.caches.queue_depth.has_room(
            whose, more, most, count=count, now=context.clock()
        ):
            raise QueueFull(
                f"the queue {owner} is full; it can hold at most {most} waiting jobs",
                retry_after_seconds=FULL_RETRY_SECONDS,
            )


async def _queued_count(context: JobContext, whose: UUID | None) -> int:
    async with context.central.read() as tx:
        return await dispatch.count_queued(tx, whose)


async def cached_shortage(context: JobContext, spec: JobSpec) -> Shortage | None:
    """Returns the reason why no worker can run a job that was just submitted, or None. The result
    is cached for a few seconds for similar jobs.
    """
    bound = spec.backend_affinity
    key = (spec.lane, spec.workflow_version, spec.model_set, bound)

    async def read() -> Shortage | None:
        async with context.central.read() as tx:
            requirements = await requirements_of_job(
                tx, spec.lane, spec.needs, spec.workflow_version
            )
            return await read_shortage(tx, context, requirements, bound)

    return await context.caches.shortages.get(key, read, now=context.clock())


async def cancel_job(context: JobContext, tenant_id: UUID, job_id: UUID) -> Job:
    pool = await context.pool_of(tenant_id)
    async with pool.transaction() as tx:
        job, outbox_ids = await service.cancel(
            tx, tenant_id, job_id, new_id=context.new_id, now=context.clock()
        )
    if outbox_ids:
        await flush(context, pool, [job], outbox_ids)
    return job


async def take_back_prompts(
    context: JobContext, owner: tuple[UUID, UUID], job_ids: Sequence[UUID], *, is_clear: bool
) -> int:
    """Cancels a user's queued gateway prompts and removes them from the history. Returns the number
    of cancelled prompts.

    The same messages that ComfyUI sends to its sockets are logged in the same transaction.
    """
    pool, now = await context.pool_of(owner[0]), context.clock()
    cancelled: list[Job] = []
    outbox: list[int] = []
    async with pool.transaction() as tx:
        for job_id in job_ids:
            current = await service.find(tx, owner[0], job_id)
            if current is None or current.shown_status != JobStatus.QUEUED:
                continue
            await asyncio.sleep(0)
            job, outbox_ids = await service.cancel(
                tx, owner[0], job_id, new_id=context.new_id, now=now
            )
            cancelled.append(job)
            outbox += outbox_ids
            await asyncio.sleep(0)
        if cancelled:
            await service.hide_prompts(tx, *owner, [job.id for job in cancelled], now=now)
            remaining = await service.active_prompt_ids(tx, *owner)
            # ComfyUI sends the message twice when the last queued prompt is deleted.
            is_last = not is_clear and all(is_running for _, is_running in remaining)
            first = cancelled[0]
            prompt_id = (first.spec.gateway or {}).get("prompt_id", "")
            run = LoggedRun(*owner, first.id, first.lease_number, None, prompt_id)
            tells = 2 if is_last else 1
            await run_log.log_removed(tx, run, count=len(cancelled), tells=tells, now=now)
    if cancelled:
        await flush(context, pool, cancelled, outbox)
    return len(cancelled)


async def interrupt_job(context: JobContext, tenant_id: UUID, job_id: UUID) -> bool:
    """Requests that the worker stops the run. The job stays active until the worker has reported
    how the run ended. Returns False if no worker holds the job.
    """
    async with context.central.transaction() as tx:
        row = await dispatch.of_job(tx, tenant_id, job_id)
        if row is None or row.status != DispatchStatus.LEASED:
            return False
        await dispatch.cancel(tx, row.id, now=context.clock())
    context.queue.push([row.id])
    return True


async def get_job(context: JobContext, tenant_id: UUID, job_id: UUID) -> Job:
    async with context.tenant(tenant_id) as tx:
        return await service.get(tx, tenant_id, job_id)


async def retry_job(context: JobContext, tenant_id: UUID, job_id: UUID) -> Job:
    """Submits a failed or cancelled job's prompt and files again as a new job. A second call
    returns the same new job.
    """
    ended = await get_job(context, tenant_id, job_id)
    if ended.status not in (JobStatus.FAILED, JobStatus.CANCELLED):
        raise Conflict(
            f"only failed or cancelled jobs can be retried, and this job is {ended.status}"
        )
    new_id = retry_job_id(ended)
    added = await submit_many(context, tenant_id, {new_id: retry_spec(ended)})
    return added[0] if added else await get_job(context, tenant_id, new_id)


def retry_job_id(ended: Job) -> UUID:
    """Derives the id of the retry from the job's id, so that a job is retried only once."""
    return uuid5(ended.id, "retry")


def retry_spec(ended: Job) -> JobSpec:
    """Returns a spec with the job's prompt and files for its retry. The retry doesn't belong to the
    job's batch or run, because those have already counted the job.
    """
    if not ended.spec.prompt:
        raise Refused("the job's prompt was deleted after its retention time; submit a new job")
    return replace(
        ended.spec,
        retry_of=ended.id,
        idempotency_key=None,
        request_hash=None,
        batch_id=None,
        batch_position=None,
        run_kind=None,
        run_id=None,
        is_held=False,
    )
