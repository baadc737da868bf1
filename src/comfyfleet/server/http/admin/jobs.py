"""Operators' routes for jobs and their dispatches."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Depends, Query
from pydantic import AwareDatetime, Field

from comfyfleet.api.admin import (
    AdminUpload,
    AdminUploadSlot,
    Attempt,
    Attempts,
    AttemptSeen,
    DispatchPage,
    DispatchSeen,
    DispatchWhole,
    JobIds,
    JobListed,
    JobPage,
    JobSeen,
    OutputSeen,
    RetriedDispatch,
    WhyDispatch,
)
from comfyfleet.api.console import (
    AttemptLine,
    BulkAct,
    BulkAnswer,
    BulkFailureAnswer,
    FileSeen,
    JobActs,
    JobCountsAnswer,
    JobDetails,
    JobPreview,
    ReplayedJob,
)
from comfyfleet.api.values import ROW_ID_MAX, RowId, is_storable
from comfyfleet.api.worker import Progress
from comfyfleet.errors import InvalidInput, NotFound
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Tx
from comfyfleet.server.gateway.model import gateway_data
from comfyfleet.server.http.admin.auth import Body, OperatorDep, admin_router
from comfyfleet.server.http.admin.operators import entry_view
from comfyfleet.server.http.deps import PlaneDep
from comfyfleet.server.http.request_body import Text, VersionNumber, in_utc
from comfyfleet.server.jobs import lists
from comfyfleet.server.jobs import submit as job_submit
from comfyfleet.server.jobs.diagnosis import TimelineAttempt, build_timeline, explain_wait, why
from comfyfleet.server.jobs.files import ANNOUNCED_SIZE
from comfyfleet.server.jobs.heartbeat import sent_prompt
from comfyfleet.server.jobs.lists import (
    JOBS_PER_BULK_MAX,
    BulkOrder,
    BulkOutcome,
    BulkSelection,
)
from comfyfleet.server.jobs.model import Job, JobAttempt, JobFilter, JobStatus, ListedJob
from comfyfleet.server.jobs.progress import ANY_JOB
from comfyfleet.server.jobs.submit import JobRequest, cached_shortage, resolve, retry_job
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, upload_key
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications.model import AuditEntry
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import ENDED, Dispatch, DispatchStatus
from comfyfleet.server.tenants.model import DEFAULT_TENANT

dispatches_router = admin_router("/dispatches")
PAGE_MAX = 500
ATTEMPTS_MAX = 500
# The audit action for access to a customer's files, and the period during which repeated access is
# recorded only once.
LOOK = "look_at_files"
LOOK_COUNTS_FOR = timedelta(minutes=10)
# Maximum seconds to wait for a preview.
PREVIEW_SECONDS = 2.0


class NewPriority(Body):
    priority: int = Field(ge=-1000, le=1000)


def dispatch_view(row: Dispatch, slug: str) -> DispatchSeen:
    lane = {"workflow": slug, "stage": row.lane.stage, "provider": row.lane.provider}
    rest = set(DispatchSeen.model_fields) - lane.keys()
    return DispatchSeen.model_validate(lane | {name: getattr(row, name) for name in rest})


async def _dispatch_views(plane: ControlPlane, rows: Sequence[Dispatch]) -> list[DispatchSeen]:
    async with plane.central.read() as tx:
        slugs = {
            workflow_row.id: workflow_row.slug
            for workflow_row in await catalog.list_workflows(tx, with_open=True)
        }
    return [dispatch_view(row, slugs.get(row.lane.workflow_id, "?")) for row in rows]


async def _get_dispatch(plane: ControlPlane, dispatch_id: RowId) -> Dispatch:
    async with plane.central.read() as tx:
        return await dispatch.get(tx, dispatch_id)


@dispatches_router.get("")
async def list_dispatches(
    plane: PlaneDep,
    status: DispatchStatus | None = None,
    workflow: str | None = None,
    worker: str | None = None,
    tenant: Annotated[UUID | None, Query(description="Only jobs of this tenant.")] = None,
    poisoned: bool | None = None,
    before: RowId | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> DispatchPage:
    """Lists dispatches, newest first."""
    async with plane.central.read() as tx:
        workflow_id = (await catalog.workflow_by_slug(tx, workflow)).id if workflow else None
        rows = await dispatch.list_dispatches(
            tx,
            status=status,
            workflow_id=workflow_id,
            worker_id=worker,
            tenant_id=tenant,
            is_poisoned=poisoned,
            before_id=before,
            limit=limit,
        )
    return DispatchPage(
        dispatches=await _dispatch_views(plane, rows),
        next=rows[-1].id if len(rows) == limit else None,
    )


@dispatches_router.get("/{dispatch_id}", name="show")
async def show_dispatch(plane: PlaneDep, dispatch_id: RowId) -> DispatchWhole:
    """Returns a dispatch with all its attempts and the reason why it isn't running."""
    row = await _get_dispatch(plane, dispatch_id)
    async with plane.central.read() as tx:
        entries = await notifications.find_audit_entries(
            tx, subject=f"dispatch:{dispatch_id}", limit=ATTEMPTS_MAX
        )
    attempts = [
        Attempt(at=entry.at, actor=entry.actor, action=entry.action, details=dict(entry.details))
        for entry in reversed(entries)
    ]
    (shown,) = await _dispatch_views(plane, [row])
    return DispatchWhole(dispatch=shown, why=await why(plane.context, row), attempts=attempts)


@dispatches_router.get("/{dispatch_id}/why")
async def why_not_running(plane: PlaneDep, dispatch_id: RowId) -> WhyDispatch:
    return WhyDispatch(why=await why(plane.context, await _get_dispatch(plane, dispatch_id)))


@dispatches_router.post("/{dispatch_id}/cancel")
async def cancel(plane: PlaneDep, dispatch_id: RowId, operator: OperatorDep) -> DispatchSeen:
    """Cancels a dispatch. A queued dispatch is canceled immediately. A running one is canceled with
    the worker's next heartbeat."""
    row = await _get_dispatch(plane, dispatch_id)
    await plane.context.audit(operator, "cancel", f"dispatch:{row.id}", row.tenant_id)
    await job_submit.cancel_job(plane.context, row.tenant_id, row.job_id)
    (shown,) = await _dispatch_views(plane, [await _get_dispatch(plane, dispatch_id)])
    return shown


@dispatches_router.post("/{dispatch_id}/retry", status_code=201)
async def retry(plane: PlaneDep, dispatch_id: RowId, operator: OperatorDep) -> RetriedDispatch:
    """Creates a new job with the same prompt and files. The old job isn't changed."""
    row = await _get_dispatch(plane, dispatch_id)
    job = await retry_job(plane.context, row.tenant_id, row.job_id)
    await plane.context.audit(
        operator, "retry", f"dispatch:{row.id}", row.tenant_id, new_job=str(job.id)
    )
    return RetriedDispatch(job_id=job.id)


@dispatches_router.post("/{dispatch_id}/reprioritise")
async def reprioritise(
    plane: PlaneDep, dispatch_id: RowId, wanted: NewPriority, operator: OperatorDep
) -> DispatchSeen:
    """Changes the priority of a queued dispatch. The new priority may be outside the tenant's
    range."""
    async with plane.central.transaction() as tx:
        row = await dispatch.reprioritise(
            tx, dispatch_id, wanted.priority, now=plane.clock(), actor=operator
        )
    plane.context.queue.arrived([row])
    (shown,) = await _dispatch_views(plane, [row])
    return shown


router = admin_router()
JOBS_PER_PAGE_MAX = 500


class NewJobs(Body):
    workflow_slug: str
    version: VersionNumber | None = Field(
        default=None, description="The workflow's version. The default is the newest one."
    )
    tenant_id: UUID | None = Field(
        default=None, description="The tenant. The default is the tenant named `default`."
    )
    properties: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, UUID] = Field(default_factory=dict, description="File ids, by property name.")
    stage: str = "production"
    provider: Literal["self_hosted", "cloud"] = "self_hosted"
    priority: int = Field(default=0, ge=-1000, le=1000)
    backend_affinity: str | None = Field(
        default=None,
        description="The worker or fleet that must run the job, as worker:ID or fleet:SLUG/STAGE.",
        pattern="^(worker|fleet):.+",
    )
    count: int = Field(default=1, ge=1, le=job_submit.JOBS_PER_SUBMIT_MAX)


@router.post("/jobs", status_code=201)
async def submit(plane: PlaneDep, wanted: NewJobs, operator: OperatorDep) -> JobIds:
    """Submits one or more copies of a job. Each copy gets its own random seed."""
    tenant_id = wanted.tenant_id or DEFAULT_TENANT
    async with plane.central.read() as tx:
        await catalog.find_workflow(tx, wanted.workflow_slug)
    order = JobRequest(
        slug=wanted.workflow_slug,
        version=wanted.version,
        values=wanted.properties,
        files=wanted.files,
        stage=wanted.stage,
        provider=wanted.provider,
        priority=wanted.priority,
        backend_affinity=wanted.backend_affinity,
    )
    specs = {
        plane.context.new_id(): await resolve(plane.context, tenant_id, order)
        for _ in range(wanted.count)
    }
    added = await job_submit.submit_many(plane.context, tenant_id, specs)
    await plane.context.audit(
        operator,
        "submit_jobs",
        f"tenant:{tenant_id}",
        tenant_id,
        workflow=wanted.workflow_slug,
        jobs=[job.id for job in added[:10]],
    )
    short = await cached_shortage(plane.context, added[0].spec) if added else None
    warnings = [] if short is None else [short.message]
    return JobIds(ids=[job.id for job in added], warnings=warnings)


def _require_storable(**values: str | None) -> None:
    for name, value in values.items():
        if value is not None and not is_storable(value):
            raise InvalidInput(f"{name} contains invalid characters", field=name)


async def scope_filter(
    plane: PlaneDep,
    tenant: Annotated[UUID | None, Query(description="Only jobs of this tenant.")] = None,
    workflow: Annotated[str | None, Query(description="Only jobs of this workflow.")] = None,
    effect: Annotated[str | None, Query(description="Only jobs of this effect (its slug).")] = None,
    since: Annotated[
        datetime | None, Query(description="Only jobs submitted at or after this time.")
    ] = None,
    until: Annotated[
        datetime | None, Query(description="Only jobs submitted before this time.")
    ] = None,
) -> JobFilter:
    _require_storable(workflow=workflow)
    return JobFilter(
        tenant_id=tenant,
        workflow_slug=workflow,
        effect_id=await _effect_id(plane, effect),
        since=since and in_utc(since),
        until=until and in_utc(until),
    )


async def job_filter(
    within: Annotated[JobFilter, Depends(scope_filter)],
    status: Annotated[
        list[JobStatus], Query(description="Only jobs with one of these statuses.")
    ] = [],  # noqa: B006
    worker: Annotated[
        str | None, Query(description="Only jobs whose last lease was with this worker.")
    ] = None,
    error: Annotated[
        str | None,
        Query(
            description="Only jobs whose error contains this text. Case is ignored.",
            max_length=200,
        ),
    ] = None,
) -> JobFilter:
    _require_storable(worker=worker, error=error)
    return replace(within, statuses=tuple(status), worker_id=worker, error=error or None)


async def _effect_id(plane: ControlPlane, slug: str | None) -> UUID | None:
    if slug is None:
        return None
    async with plane.central.read() as tx:
        return (await catalog.effect_by_slug(tx, slug)).id


@router.get("/jobs")
async def list_jobs(
    plane: PlaneDep,
    wanted: Annotated[JobFilter, Depends(job_filter)],
    after: Annotated[str | None, Query(description="`next` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=JOBS_PER_PAGE_MAX)] = 50,
) -> JobPage:
    """Lists jobs of all tenants, newest first. With `worker` or `error`, a page may contain fewer
    jobs than `limit` even if there is a next page."""
    page = await lists.list_newest(plane.context, wanted, after=after, limit=limit)
    return JobPage(
        jobs=await job_views(plane, page.jobs),
        next=page.following,
        pools_left_out=list(page.pools_left_out),
    )


async def job_views(plane: ControlPlane, jobs: Sequence[ListedJob]) -> list[JobListed]:
    async with plane.central.read() as tx:
        rows = await dispatch.of_pairs(tx, [(job.tenant_id, job.id) for job in jobs])
        slugs = await catalog.effect_slugs(tx, {job.effect_id for job in jobs if job.effect_id})
    return [_listed(plane, job, rows.get(job.id), slugs) for job in jobs]


def _listed(
    plane: ControlPlane, job: ListedJob, row: Dispatch | None, slugs: Mapping[UUID, str]
) -> JobListed:
    progress = plane.context.caches.progress.of(job.lease_token) if job.status.is_active else None
    return JobListed(
        id=job.id,
        tenant_id=job.tenant_id,
        user_id=job.user_id,
        workflow=job.workflow_slug,
        effect=slugs.get(job.effect_id) if job.effect_id else None,
        status=job.status,
        priority=row.priority if row else job.priority,
        attempt=job.attempt,
        worker_id=row.worker_id if row else None,
        percent=progress.percent if progress else None,
        dispatch_id=row.id if row else None,
        reserved_tokens=job.reserved_tokens,
        retry_of=job.retry_of,
        error=job.error_message,
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
    )


@router.get("/jobs/counts")
async def count_jobs(
    plane: PlaneDep, wanted: Annotated[JobFilter, Depends(scope_filter)]
) -> JobCountsAnswer:
    """Counts jobs by status, up to the limit in `counted_max`."""
    counted = await lists.count_by_status(plane.context, wanted)
    return JobCountsAnswer(
        counts=counted.by_status,
        counted_max=lists.COUNTED_MAX,
        pools_left_out=list(counted.pools_left_out),
    )


class BulkFilter(Body):
    status: list[JobStatus] = Field(
        default_factory=list,
        description="Only jobs with one of these statuses. The default is every status to which "
        "the action applies.",
        max_length=5,
    )
    tenant: UUID | None = None
    workflow: Text | None = None
    effect: Text | None = None
    worker: Text | None = None
    error: Text | None = Field(default=None, min_length=1, max_length=200)
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None


class BulkOrderBody(Body):
    """A bulk action on jobs, selected by their ids or by a filter."""

    act: BulkAct
    ids: list[UUID] | None = Field(default=None, min_length=1, max_length=JOBS_PER_BULK_MAX)
    filter: BulkFilter | None = Field(
        default=None, description="Selects jobs with the same filters as the list of jobs."
    )
    priority: int | None = Field(
        default=None, ge=-1000, le=1000, description="The new priority, for `reprioritise` only."
    )
    after: str | None = Field(default=None, description="`next` of the previous response.")
    limit: int = Field(default=JOBS_PER_BULK_MAX, ge=1, le=JOBS_PER_BULK_MAX)
    dry_run: bool = Field(
        default=False, description="Only returns the number of matching jobs and changes nothing."
    )


@router.post("/jobs/bulk")
async def act_on_jobs(plane: PlaneDep, body: BulkOrderBody, operator: OperatorDep) -> BulkAnswer:
    """Cancels, retries or reprioritizes up to 500 jobs.

    Each job is handled independently. `failed` lists the jobs for which the action failed. With a
    filter, `next` is set if more jobs match.
    """
    if (body.ids is None) == (body.filter is None):
        raise InvalidInput("send either ids or filter", field="ids")
    if (body.act is BulkAct.REPRIORITISE) == (body.priority is None):
        raise InvalidInput(
            "priority is required for reprioritise and not allowed otherwise", field="priority"
        )
    chosen = await _chosen(plane, body)
    done = BulkOutcome([], [], {})
    if not body.dry_run and (chosen.jobs or chosen.missing):
        order = BulkOrder(body.act, operator, body.priority or 0)
        done = await lists.act_on_all(plane.context, order, chosen)
    return BulkAnswer(
        matched=len(chosen.jobs),
        done=len(done.done),
        failed=[BulkFailureAnswer(**failure._asdict()) for failure in done.failed],
        retries=done.retries,
        next=chosen.following,
        pools_left_out=list(chosen.pools_left_out),
    )


async def _chosen(plane: ControlPlane, body: BulkOrderBody) -> BulkSelection:
    if body.filter is None:
        return await lists.select_by_ids(plane.context, body.ids or [])
    selection = body.filter
    job_filter = JobFilter(
        statuses=tuple(selection.status),
        tenant_id=selection.tenant,
        workflow_slug=selection.workflow,
        effect_id=await _effect_id(plane, selection.effect),
        worker_id=selection.worker,
        error=selection.error,
        since=selection.since and in_utc(selection.since),
        until=selection.until and in_utc(selection.until),
    )
    return await lists.select_by_filter(
        plane.context, body.act, job_filter, after=body.after, limit=body.limit
    )


@router.get("/jobs/{job_id}/attempts")
async def attempts_of(plane: PlaneDep, job_id: UUID) -> Attempts:
    """Lists a job's attempts, each with the prompt that its worker reported sending to the backend.

    The prompts of finished jobs are deleted after COMFYFLEET_PROMPT_KEEP_DAYS.
    """
    job = await lists.find_job(plane.context, job_id)
    return Attempts(
        prompt=dict(job.spec.prompt) or None,
        attempts=[
            AttemptSeen(
                attempt=attempt.attempt,
                lease_number=attempt.lease_number,
                worker_id=attempt.worker_id,
                started_at=attempt.started_at,
                prompt=sent_prompt(job, attempt),
            )
            for attempt in await lists.attempts_of(plane.context, job)
        ],
    )


@router.get("/jobs/{job_id}", name="show")
async def show_job(
    plane: PlaneDep, job_id: UUID, operator: OperatorDep, tenant_id: UUID | None = None
) -> JobSeen:
    """Returns a job of any tenant. Access to a customer's files is audited."""
    job = await lists.find_job(plane.context, job_id)
    if tenant_id not in (None, job.tenant_id):
        raise NotFound(f"job {job_id} of tenant {tenant_id} was not found")
    async with plane.central.read() as tx:
        row = await dispatch.of_job(tx, job.tenant_id, job_id)
    outputs, facts = await _outputs(plane, job), await _facts(plane, job, row)
    if outputs or _has_preview(facts):
        await _audit_look(plane, job, operator)
    return JobSeen(**facts, outputs=outputs)


def _has_preview(facts: Mapping[str, Any]) -> bool:
    progress: Progress | None = facts["progress"]
    return progress is not None and progress.preview is not None


async def _facts(
    plane: ControlPlane, job: Job, row: Dispatch | None, *, with_preview: bool = True
) -> dict[str, Any]:
    progress = plane.context.caches.progress.of(job.lease_token) if job.status.is_active else None
    if progress is not None and not with_preview:
        progress = progress.model_copy(update={"preview": None})
    is_open = row is not None and job.status.is_active
    needed = (await explain_wait(plane.context, row)).help_needed if row and is_open else None
    return {
        "id": job.id,
        "tenant_id": job.tenant_id,
        "workflow": job.spec.workflow_slug,
        "version": job.spec.workflow_version,
        "status": job.shown_status,
        "error": job.error_message,
        "raw_error": job.raw_error,
        "attempt": job.attempt,
        "properties": dict(job.spec.properties),
        "prompt_id": gateway_data(job).get("prompt_id"),
        "provider_job_id": job.provider_job_id,
        "progress": progress,
        "values": list(job.values),
        "submitted_at": job.submitted_at,
        "started_at": job.started_at,
        "completed_at": job.completed_at,
        "dispatch": dispatch_view(row, job.spec.workflow_slug) if row else None,
        "why": await why(plane.context, row) if row and is_open else None,
        "person_needed_after": needed.after_seconds if needed else None,
        "required_action": needed.action if needed else None,
    }


async def _audit_look(plane: ControlPlane, job: Job, operator: str) -> None:
    """Records in the audit log that an operator accessed a customer's files. Repeated access within
    ten minutes is recorded once."""
    if job.spec.user_id is None:
        return
    subject, now = f"job:{job.id}", plane.clock()
    query: dict[str, Any] = {
        "actor": operator,
        "action": LOOK,
        "subject": subject,
        "since": now - LOOK_COUNTS_FOR,
    }
    async with plane.central.transaction() as tx:
        if not await notifications.find_audit_entries(tx, **query, limit=1):
            await record_audit(tx, operator, LOOK, subject, now, job.tenant_id)


async def _outputs(plane: ControlPlane, job: Job) -> list[OutputSeen]:
    names = {output.file_id: output.name for output in job.outputs}
    existing = await _files(plane, job, names)
    return [
        OutputSeen(
            name=name,
            filename=file.filename,
            url=await _url(plane, file),
            size=file.size,
            content_type=file.mime_type,
        )
        for file_id, name in names.items()
        if (file := existing.get(file_id)) is not None
    ]


async def _files(plane: ControlPlane, job: Job, file_ids: Collection[UUID]) -> Mapping[UUID, File]:
    async with plane.context.tenant(job.tenant_id) as tx:
        return await media.find_existing(tx, job.tenant_id, file_ids)


async def _url(plane: ControlPlane, file: File) -> str:
    return await plane.store.url_to_get(
        file.path, seconds=plane.settings.url_seconds, filename=file.filename
    )


@router.get("/jobs/{job_id}/preview")
async def live_preview(plane: PlaneDep, job_id: UUID, operator: OperatorDep) -> JobPreview:
    """Waits up to 2 seconds for the next preview of a running job. Access to a customer's preview
    is audited.

    Workers create previews only on request. Each call makes them do so for this job, and for jobs
    that start within the next 15 seconds.
    """
    job = await lists.find_job(plane.context, job_id)
    previews, arrived = plane.context.previews, asyncio.Event()
    previews.expect(ANY_JOB)
    if job.status is not JobStatus.PROCESSING:
        return JobPreview(preview=None)
    previews.expect(job.id)  # keeps the worker sending previews between calls
    with previews.watch(job.tenant_id, job.id, arrived.set) as watch:
        try:
            async with asyncio.timeout(PREVIEW_SECONDS):
                await arrived.wait()
        except TimeoutError:
            return JobPreview(preview=None)
        picture = watch.latest
    if picture is not None:
        await _audit_look(plane, job, operator)
    return JobPreview(preview=picture.data_url if picture else None)


@router.get("/jobs/{job_id}/details")
async def job_details(
    plane: PlaneDep,
    job_id: UUID,
    operator: OperatorDep,
    files: Annotated[
        bool,
        Query(
            description="Whether to include the file URLs and the preview. Access to a customer's "
            "files is audited."
        ),
    ] = True,
) -> JobDetails:
    """Returns a job with its attempts, prompt, files, error and audit entries, the reason why it is
    waiting, and the available actions."""
    job = await lists.find_job(plane.context, job_id)
    sent = await lists.attempts_of(plane.context, job)
    effect_id = job.spec.effect_id
    async with plane.central.read() as tx:
        row = await dispatch.of_job(tx, job.tenant_id, job_id)
        entries = await _audit_of(tx, job, row)
        slugs = await catalog.effect_slugs(tx, [effect_id] if effect_id else [])
    names = [(asset.name, asset.file_id) for asset in job.spec.assets]
    names += [(output.name, output.file_id) for output in job.outputs]
    existing = await _files(plane, job, {file_id for _, file_id in names})
    files_seen = [
        await _file_seen(plane, name, existing.get(file_id), files) for name, file_id in names
    ]
    facts = await _facts(plane, job, row, with_preview=files)
    if (files and existing) or _has_preview(facts):
        await _audit_look(plane, job, operator)
    of_dispatch = [entry for entry in entries if entry.subject.startswith("dispatch:")]
    spec = {name: getattr(job.spec, name) for name in SPEC_SHOWN}
    return JobDetails(
        **facts,
        **spec,
        effect=slugs.get(effect_id) if effect_id else None,
        priority=row.priority if row else job.spec.priority,
        reserved_tokens=job.reserved_tokens,
        media_id=job.spec.video_id,
        prompt=dict(job.spec.prompt) or None,
        inputs=files_seen[: len(job.spec.assets)],
        outputs=files_seen[len(job.spec.assets) :],
        attempts=_attempt_lines(job, sent, build_timeline(of_dispatch, sent, row)),
        audit=[entry_view(entry) for entry in entries],
        can=_acts(job, row),
    )


SPEC_SHOWN = (
    *("user_id", "stage", "provider", "backend_affinity", "retry_of", "reused_from"),
    *("batch_id", "run_kind", "run_id", "is_held", "output_node_id"),
)


async def _audit_of(tx: Tx, job: Job, row: Dispatch | None) -> list[AuditEntry]:
    """Returns the latest audit entries about the job and its dispatch, in chronological order."""
    subjects = [f"job:{job.id}", *([f"dispatch:{row.id}"] if row else [])]
    entries: list[AuditEntry] = []
    for subject in subjects:
        entries += await notifications.find_audit_entries(tx, subject=subject, limit=ATTEMPTS_MAX)
    return sorted(entries, key=lambda entry: entry.id)


async def _file_seen(plane: ControlPlane, name: str, file: File | None, with_url: bool) -> FileSeen:
    if file is None:
        return FileSeen(name=name, filename="", url=None, size=None, content_type=None)
    return FileSeen(
        name=name,
        filename=file.filename,
        url=await _url(plane, file) if with_url else None,
        size=file.size,
        content_type=file.mime_type,
    )


def _attempt_lines(
    job: Job, sent: Sequence[JobAttempt], timeline: Sequence[TimelineAttempt]
) -> list[AttemptLine]:
    prompts = {attempt.lease_number: sent_prompt(job, attempt) for attempt in sent}
    return [AttemptLine(**asdict(line), prompt=prompts.get(line.lease_number)) for line in timeline]


def _acts(job: Job, row: Dispatch | None) -> JobActs:
    is_active, has_prompt = job.status.is_active, bool(job.spec.prompt)
    return JobActs(
        cancel=is_active,
        retry=job.status in (JobStatus.FAILED, JobStatus.CANCELLED) and has_prompt,
        reprioritise=is_active and row is not None and row.status not in ENDED,
        replay=not is_active and has_prompt and job.spec.gateway is None,
    )


class Replay(Body):
    backend_affinity: Text | None = Field(
        default=None,
        description="The worker or fleet that must run the job, as worker:ID or fleet:SLUG/STAGE.",
        pattern="^(worker|fleet):.+",
    )
    priority: int = Field(default=0, ge=-1000, le=1000)


@router.post("/jobs/{job_id}/replay", status_code=201)
async def replay(
    plane: PlaneDep,
    job_id: UUID,
    operator: OperatorDep,
    body: Replay = Replay(),  # noqa: B008  frozen
) -> ReplayedJob:
    """Runs the prompt and files of a finished job again, as a new job that isn't charged."""
    job = await lists.find_job(plane.context, job_id)
    added = await lists.replay_job(
        plane.context, job, backend_affinity=body.backend_affinity, priority=body.priority
    )
    await plane.context.audit(
        operator, "replay", f"job:{job.id}", job.tenant_id, new_job=str(added.id)
    )
    return ReplayedJob(job_id=added.id)


class AdminNewUpload(Body):
    filename: Text = Field(min_length=1, max_length=300)
    content_type: Text = Field(default="application/octet-stream", max_length=200)
    size: int = Field(ge=1, le=ROW_ID_MAX)
    tenant_id: UUID | None = None


@router.post("/uploads", status_code=201)
async def announce(plane: PlaneDep, wanted: AdminNewUpload) -> AdminUpload:
    """Creates a file and returns a URL to upload it to. Jobs can use the file after it has been
    uploaded with PUT."""
    tenant_id = wanted.tenant_id or DEFAULT_TENANT
    file_id = plane.context.new_id()
    file = File(
        id=file_id,
        tenant_id=tenant_id,
        disk=plane.store.disk,
        path=upload_key(tenant_id, file_id, wanted.filename),
        filename=wanted.filename,
        mime_type=wanted.content_type,
        metadata={ANNOUNCED_SIZE: wanted.size},
        created_at=plane.clock(),
    )
    async with plane.context.tenant_transaction(tenant_id) as tx:
        await media.add_file(tx, file)
    put = await plane.store.url_to_put(
        file.path,
        content_type=wanted.content_type,
        seconds=plane.settings.url_seconds,
        size=wanted.size,
    )
    slot = AdminUploadSlot(method=put.method, url=put.url, headers=dict(put.headers))
    return AdminUpload(file_id=file.id, upload=slot)
