"""Submits, cancels and retries jobs: the tenant's database first, then the central queue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import SystemRandom
from typing import Any, NamedTuple, Protocol
from uuid import UUID, uuid5

from comfyfleet.errors import Conflict, InvalidInput, NotFound, QueueFull, Refused
from comfyfleet.server.catalog import payload
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import (
    PRIMARY_INPUT,
    SEED_MAX,
    AssetRef,
    JobPayload,
    RegisteredWorkflow,
    WorkflowVersion,
)
from comfyfleet.server.catalog.payload import RandomSource
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.jobs import files, service, store
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.idempotency import KeyedRequest, require_same_request
from comfyfleet.server.jobs.model import Job, JobSpec, JobStatus
from comfyfleet.server.jobs.outbox import flush, sync_dispatches
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, kind_of
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Tenant

JOBS_PER_SUBMIT_MAX = 1000
FULL_RETRY_SECONDS = 30


async def submit(
    context: JobContext,
    tenant_id: UUID,
    asked: JobSpec,
    *,
    tenant: Tenant | None = None,
) -> tuple[Job, bool]:
    """The job, and whether it is new: the same idempotency key gives the same job.

    It is not looked for first, as its key is mostly unused: the database decides.
    """
    added = await submit_many(context, tenant_id, {context.new_id(): asked}, tenant=tenant)
    if added:
        return added[0], True
    before = await find_repeated(context, tenant_id, asked.user_id, asked)
    if before is None:
        raise InvalidInput("the job could not be added: its id is taken")
    return before, False


class KeyedJobRequest(KeyedRequest, Protocol):
    @property
    def idempotency_key(self) -> str | None: ...


async def find_repeated(
    context: JobContext, tenant_id: UUID, user_id: UUID | None, asked: KeyedJobRequest
) -> Job | None:
    """The job of an earlier request with this idempotency key."""
    if asked.idempotency_key is None:
        return None
    async with context.tenant(tenant_id) as tx:
        job = await store.by_idempotency_key(tx, tenant_id, user_id, asked.idempotency_key)
    if job is None:
        return None
    require_same_request(job.asked, asked.request_hash)
    if job.status.is_active:  # the first request may have been cut off before its dispatch was made
        await sync_dispatches(context, [job])
    return job


async def submit_many(
    context: JobContext,
    tenant_id: UUID,
    asked: dict[UUID, JobSpec],
    *,
    tenant: Tenant | None = None,
) -> Sequence[Job]:
    clamped = await check_admission(context, tenant_id, asked, tenant=tenant)
    pool = await context.pool_of(tenant_id)
    done = await _submit_single(context, pool, tenant_id, clamped)
    if done is None:
        async with pool.transaction() as tx:
            done = await service.submit(
                tx, tenant_id, clamped, now=context.clock(), active_max=context.active_max
            )
    added, outbox_ids = done
    await flush(context, pool, added, outbox_ids)
    return added


async def _submit_single(
    context: JobContext, pool: Database, tenant_id: UUID, asked: Mapping[UUID, JobSpec]
) -> tuple[list[Job], list[int]] | None:
    """By one statement, which on PostgreSQL is a transaction by itself unless there is media to attach."""
    if pool.is_sqlite or not service.is_single(asked):
        return None
    has_media = any(each.video_id for each in asked.values())
    async with pool.transaction() if has_media else pool.execute_one() as tx:
        return await service.submit_one(
            tx, tenant_id, asked, context.active_max, now=context.clock()
        )


async def check_admission(
    context: JobContext,
    tenant_id: UUID,
    asked: dict[UUID, JobSpec],
    *,
    tenant: Tenant | None = None,
) -> dict[UUID, JobSpec]:
    """As the tenant may have them, if there is room for them. `tenant`: for who has just read it."""
    if not 0 < len(asked) <= JOBS_PER_SUBMIT_MAX:
        raise InvalidInput(f"from 1 to {JOBS_PER_SUBMIT_MAX} jobs at once, not {len(asked)}")
    if tenant is None:
        async with context.central.read() as tx:
            tenant = await tenants.require_kept(tx, tenant_id)
    await _refuse_if_full(context, tenant, len(asked))
    return {job_id: _clamp_priority(each, tenant) for job_id, each in asked.items()}


def _clamp_priority(asked: JobSpec, tenant: Tenant) -> JobSpec:
    priority = min(max(asked.priority, tenant.min_priority), tenant.max_priority)
    return asked if priority == asked.priority else replace(asked, priority=priority)


async def _refuse_if_full(context: JobContext, tenant: Tenant, more: int) -> None:
    settings = context.settings
    for whose, most, said in (
        (tenant.id, tenant.max_queued or settings.max_queued_per_tenant, "of this tenant"),
        (None, settings.max_queued_total, "of all tenants"),
    ):
        count = partial(_queued_count, context, whose)
        if not await context.caches.queue_depth.has_room(
            whose, more, most, count=count, now=context.clock()
        ):
            raise QueueFull(
                f"the queue {said} is full: at most {most} jobs may wait",
                retry_after_seconds=FULL_RETRY_SECONDS,
            )


async def _queued_count(context: JobContext, whose: UUID | None) -> int:
    async with context.central.read() as tx:
        return await dispatch.count_queued(tx, whose)


async def cancel_job(context: JobContext, tenant_id: UUID, job_id: UUID) -> Job:
    pool = await context.pool_of(tenant_id)
    async with pool.transaction() as tx:
        job, outbox_ids = await service.cancel(
            tx, tenant_id, job_id, new_id=context.new_id, now=context.clock()
        )
    if outbox_ids:
        await flush(context, pool, [job], outbox_ids)
    return job


async def get_job(context: JobContext, tenant_id: UUID, job_id: UUID) -> Job:
    async with context.tenant(tenant_id) as tx:
        return await service.get(tx, tenant_id, job_id)


async def retry_job(context: JobContext, tenant_id: UUID, job_id: UUID) -> Job:
    """The same prompt and files. Asked twice, it is still one retry."""
    ended = await get_job(context, tenant_id, job_id)
    if ended.status not in (JobStatus.FAILED, JobStatus.CANCELLED):
        raise Conflict(
            f"only a job that failed or was cancelled can be retried, not one that is {ended.status}"
        )
    new_id = retry_job_id(ended)
    added = await submit_many(context, tenant_id, {new_id: retry_spec(ended)})
    return added[0] if added else await get_job(context, tenant_id, new_id)


def retry_job_id(ended: Job) -> UUID:
    """Derived: however often a retry is asked for, it is one."""
    return uuid5(ended.id, "retry")


def retry_spec(ended: Job) -> JobSpec:
    """The same prompt and files. Its batch or run has counted the old job, and knows no other."""
    if not ended.asked.prompt:
        raise Refused("the job's prompt was deleted after its retention time: submit a new job")
    return replace(
        ended.asked,
        retry_of=ended.id,
        idempotency_key=None,
        request_hash=None,
        batch_id=None,
        batch_position=None,
        run_kind=None,
        run_id=None,
        is_held=False,
    )


# Some of them move, which their type does not tell; nodes that load videos do not take them.
MAYBE_ANIMATED = ("image/gif", "image/webp", "image/png", "image/avif")

_random = SystemRandom()


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What somebody asks for. `files` are files of the tenant, by property."""

    slug: str
    version: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    locked: tuple[str, ...] = ()  # properties that are the effect's alone
    media_types: tuple[str, ...] = ()  # of its primary input; none named: all of its kind
    max_upload_bytes: int | None = None
    files: Mapping[str, UUID] = field(default_factory=dict)
    stage: str = "production"
    provider: str = "self_hosted"
    priority: int = 0
    backend_affinity: str | None = None
    user_id: UUID | None = None
    effect_id: UUID | None = None
    idempotency_key: str | None = None
    request_hash: str | None = None
    price_tokens: int = 0
    video_id: UUID | None = None


class ResolvedWorkflow(NamedTuple):
    """What an order names, and the fleet whose node types decide how it becomes a prompt."""

    workflow: RegisteredWorkflow
    version: WorkflowVersion
    fleet: Fleet | None


class WorkflowCache:
    """What orders of one moment name: however many they are, each is looked up once."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._found: dict[tuple[str, int | None, str], ResolvedWorkflow] = {}

    async def get(self, order: JobRequest) -> ResolvedWorkflow:
        key = order.slug, order.version, order.stage
        if key not in self._found:
            self._found[key] = await _find_workflow(self._context, order)
        return self._found[key]


async def resolve(
    context: JobContext,
    tenant_id: UUID,
    order: JobRequest,
    *,
    known: ResolvedWorkflow | None = None,
) -> JobSpec:
    """Raises what is wrong with the order, and names the property. Nothing is written.

    `known`: what the order names, for who has just read it.
    """
    found = known or await _find_workflow(context, order)
    workflow, version = found.workflow, found.version
    _refuse_locked(order)
    built = await _build_payload(context, found, order)
    wanted = {each.name: each for each in built.assets}
    await _require_files(context, tenant_id, order, wanted)
    return JobSpec(
        workflow_id=workflow.id,
        workflow_slug=workflow.slug,
        workflow_version=version.version,
        prompt=built.prompt,
        properties=built.properties,
        assets=built.assets,
        output_node_id=version.output_node_id,
        stage=order.stage,
        provider=order.provider,
        priority=order.priority,
        backend_affinity=order.backend_affinity,
        model_key=built.model_key,
        model_set=built.model_set,
        user_id=order.user_id,
        effect_id=order.effect_id,
        idempotency_key=order.idempotency_key,
        request_hash=order.request_hash,
        price_tokens=order.price_tokens,
        video_id=order.video_id,
    )


def _refuse_locked(order: JobRequest) -> None:
    for name in order.locked:
        if name in order.values or name in order.files:
            raise InvalidInput(f"{name} is set by the effect", property=name)


async def _find_workflow(context: JobContext, order: JobRequest) -> ResolvedWorkflow:
    async with context.central.read() as tx:
        workflow = await catalog.workflow_by_slug(tx, order.slug)
        version = await catalog.get_version(tx, workflow, order.version)
        return await resolve_workflow(tx, workflow, version, stage=order.stage)


def require_active(workflow: RegisteredWorkflow) -> None:
    if not workflow.is_active or workflow.is_open:
        raise Refused(f"the workflow {workflow.slug} takes no jobs", field="workflow_slug")


async def resolve_workflow(
    tx: Tx, workflow: RegisteredWorkflow, version: WorkflowVersion, *, stage: str
) -> ResolvedWorkflow:
    require_active(workflow)
    assigned = await fleets.fleets_with(tx, workflow.id, stage=stage)
    known = [fleet for fleet in assigned if fleet.object_info_hash]
    return ResolvedWorkflow(workflow, version, next(iter(known or assigned), None))


async def _build_payload(
    context: JobContext, found: ResolvedWorkflow, order: JobRequest
) -> JobPayload:
    version, fleet = found.version, found.fleet
    document = await context.caches.documents.get(
        version.document_key, lambda: catalog.read_document(context.store, version)
    )
    of_fleet = f"object_info/{fleet.object_info_hash if fleet else None}"
    object_info = await context.caches.documents.get(
        of_fleet, lambda: catalog.object_info_for(context.store, fleet)
    )
    seed = _random.randint(0, SEED_MAX)
    resolved = payload.resolved_for(
        version, order.values, order.overrides, files=order.files, seed=seed
    )
    prompt = context.caches.prompts.get(
        f"{version.workflow_id}/{version.version}/{of_fleet}",
        lambda chance: payload.build_marked_prompt(version, document, object_info, chance),
        # As the editor does when it queues: {a|b} is chosen anew, and %date% is today's.
        RandomSource(context.clock(), _random),
    )
    return payload.fill_payload(version, prompt, object_info, resolved)


async def _require_files(
    context: JobContext, tenant_id: UUID, order: JobRequest, wanted: Mapping[str, AssetRef]
) -> None:
    """Each is the user's, of its property's kind, and has arrived; one that was only announced is looked for.

    Those in `order.files` were looked up by whoever orders; values may name anything.
    """
    pool = await context.pool_of(tenant_id)
    for name, asset in wanted.items():
        try:
            async with pool.read() as tx:
                file = await media.get_file(tx, tenant_id, asset.file_id)
            if name not in order.files:
                _require_own(file, order.user_id)
        except NotFound:
            raise InvalidInput(f"{name}: there is no file {asset.file_id}", property=name) from None
        try:
            file = await files.confirm_upload(context, pool, file)
        except files.REFUSALS as error:
            raise InvalidInput(f"{name}: {error.message}", property=name) from error
        _check_kind(asset, file)
        if name == PRIMARY_INPUT:
            _check_limits(order, file)


def _check_kind(asset: AssetRef, file: File) -> None:
    kind = kind_of(file.mime_type)
    if kind is not None and kind != asset.kind:
        raise InvalidInput(
            f"{asset.name} takes {asset.kind}, and the file is {file.mime_type}{_advice(asset, file)}",
            property=asset.name,
        )


def _advice(asset: AssetRef, file: File) -> str:
    is_maybe_animated = asset.kind == "video" and file.mime_type in MAYBE_ANIMATED
    return (
        "; an animated picture has to be converted to MP4 or WebM first"
        if is_maybe_animated
        else ""
    )


def _check_limits(order: JobRequest, file: File) -> None:
    """Those of the effect, on what it is applied to."""
    if order.media_types and file.mime_type not in order.media_types:
        raise InvalidInput(
            f"the effect takes {', '.join(order.media_types)}, not {file.mime_type}",
            property=PRIMARY_INPUT,
        )
    most = order.max_upload_bytes
    if most is not None and (file.size or 0) > most:
        raise InvalidInput(
            f"the effect takes at most {most:,} bytes, not {file.size:,}", property=PRIMARY_INPUT
        )


def _require_own(file: File, user_id: UUID | None) -> None:
    """Operators have no user, and may name any."""
    if user_id is not None and file.user_id != user_id:
        raise NotFound(f"there is no file {file.id}")
