"""Jobs and their dispatches: submitted, found, explained, cancelled, retried, reprioritised."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Depends, Query
from pydantic import Field

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
from comfyfleet.api.values import ROW_ID_MAX, RowId, is_storable
from comfyfleet.errors import InvalidInput, NotFound
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.http.admin.auth import Body, OperatorDep, admin_router
from comfyfleet.server.http.deps import PlaneDep
from comfyfleet.server.http.request_body import Text, VersionNumber, in_utc
from comfyfleet.server.jobs import diagnosis
from comfyfleet.server.jobs import submit as job_submit
from comfyfleet.server.jobs.diagnosis import why
from comfyfleet.server.jobs.files import ANNOUNCED_SIZE
from comfyfleet.server.jobs.heartbeat import sent_prompt
from comfyfleet.server.jobs.model import Job, JobStatus
from comfyfleet.server.jobs.submit import JobRequest, cached_shortage, resolve, retry_job
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, upload_key
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch, DispatchStatus
from comfyfleet.server.tenants.model import DEFAULT_TENANT

dispatches_router = admin_router("/dispatches")
PAGE_MAX = 500
ATTEMPTS_MAX = 500
ATTEMPT_ACTIONS = ("lease", "start", "complete", "fail", "requeue", "cancel", "expire", "retry")


class NewPriority(Body):
    priority: int = Field(ge=-1000, le=1000)


def dispatch_view(row: Dispatch, slug: str) -> DispatchSeen:
    lane = {"workflow": slug, "stage": row.lane.stage, "provider": row.lane.provider}
    rest = set(DispatchSeen.model_fields) - lane.keys()
    return DispatchSeen.model_validate(lane | {name: getattr(row, name) for name in rest})


async def _dispatch_views(plane: ControlPlane, rows: Sequence[Dispatch]) -> list[DispatchSeen]:
    async with plane.central.read() as tx:
        slugs = {each.id: each.slug for each in await catalog.list_workflows(tx, with_open=True)}
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
    tenant: Annotated[UUID | None, Query(description="Only of this tenant.")] = None,
    poisoned: bool | None = None,
    before: RowId | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> DispatchPage:
    """The newest first."""
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
    """A dispatch with all attempts, and why it is not running."""
    row = await _get_dispatch(plane, dispatch_id)
    async with plane.central.read() as tx:
        entries = await notifications.find_audit_entries(
            tx, subject=f"dispatch:{dispatch_id}", limit=ATTEMPTS_MAX
        )
    attempts = [
        Attempt(at=each.at, actor=each.actor, action=each.action, details=dict(each.details))
        for each in reversed(entries)
    ]
    (shown,) = await _dispatch_views(plane, [row])
    return DispatchWhole(dispatch=shown, why=await why(plane.context, row), attempts=attempts)


@dispatches_router.get("/{dispatch_id}/why")
async def why_not_running(plane: PlaneDep, dispatch_id: RowId) -> WhyDispatch:
    return WhyDispatch(why=await why(plane.context, await _get_dispatch(plane, dispatch_id)))


@dispatches_router.post("/{dispatch_id}/cancel")
async def cancel(plane: PlaneDep, dispatch_id: RowId, operator: OperatorDep) -> DispatchSeen:
    """Cancels it: at once if it is queued, with the worker's next heartbeat if it is leased."""
    row = await _get_dispatch(plane, dispatch_id)
    await plane.context.audit(operator, "cancel", f"dispatch:{row.id}", row.tenant_id)
    await job_submit.cancel_job(plane.context, row.tenant_id, row.job_id)
    (shown,) = await _dispatch_views(plane, [await _get_dispatch(plane, dispatch_id)])
    return shown


@dispatches_router.post("/{dispatch_id}/retry", status_code=201)
async def retry(plane: PlaneDep, dispatch_id: RowId, operator: OperatorDep) -> RetriedDispatch:
    """A new job with the same prompt and files; the old one stays as it ended."""
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
    """Changes the priority of a queued dispatch. The tenant's range does not apply."""
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
    version: VersionNumber | None = Field(default=None, description="Default: the newest.")
    tenant_id: UUID | None = Field(default=None, description="Default: the tenant `default`.")
    properties: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, UUID] = Field(default_factory=dict, description="By property.")
    stage: str = "production"
    provider: Literal["self_hosted", "cloud"] = "self_hosted"
    priority: int = Field(default=0, ge=-1000, le=1000)
    backend_affinity: str | None = Field(
        default=None, description="worker:ID or fleet:SLUG/STAGE", pattern="^(worker|fleet):.+"
    )
    count: int = Field(default=1, ge=1, le=job_submit.JOBS_PER_SUBMIT_MAX)


@router.post("/jobs", status_code=201)
async def submit(plane: PlaneDep, wanted: NewJobs, operator: OperatorDep) -> JobIds:
    """Submits one job, or several alike; each gets its own seed."""
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
    asked = {
        plane.context.new_id(): await resolve(plane.context, tenant_id, order)
        for _ in range(wanted.count)
    }
    added = await job_submit.submit_many(plane.context, tenant_id, asked)
    await plane.context.audit(
        operator,
        "submit_jobs",
        f"tenant:{tenant_id}",
        tenant_id,
        workflow=wanted.workflow_slug,
        jobs=[job.id for job in added[:10]],
    )
    short = await cached_shortage(plane.context, added[0].asked) if added else None
    warnings = [] if short is None else [short.message]
    return JobIds(ids=[job.id for job in added], warnings=warnings)


async def job_filter(
    status: JobStatus | None = None,
    tenant: Annotated[UUID | None, Query(description="Only of this tenant.")] = None,
    workflow: Annotated[str | None, Query(description="Only of this workflow.")] = None,
    worker: Annotated[
        str | None, Query(description="Only jobs whose last lease was with this worker.")
    ] = None,
    since: Annotated[datetime | None, Query(description="Only those submitted since.")] = None,
) -> diagnosis.JobFilter:
    for name, value in (("workflow", workflow), ("worker", worker)):
        if value is not None and not is_storable(value):
            raise InvalidInput(f"there is no such {name}", field=name)
    return diagnosis.JobFilter(status, tenant, workflow, worker, since and in_utc(since))


@router.get("/jobs")
async def list_jobs(
    plane: PlaneDep,
    wanted: Annotated[diagnosis.JobFilter, Depends(job_filter)],
    after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=JOBS_PER_PAGE_MAX)] = 50,
) -> JobPage:
    """Jobs of all tenants, the newest first. With `worker`, a page may have fewer rows and still have a next one."""
    page = await diagnosis.list_newest(plane.context, wanted, after=after, limit=limit)
    return JobPage(
        jobs=[_listed(job) for job in page.jobs],
        next=page.following,
        pools_left_out=list(page.pools_left_out),
    )


def _listed(job: Job) -> JobListed:
    return JobListed(
        id=job.id,
        tenant_id=job.tenant_id,
        user_id=job.asked.user_id,
        workflow=job.asked.workflow_slug,
        status=job.status,
        attempt=job.attempt,
        error=job.error_message,
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
    )


@router.get("/jobs/{job_id}/attempts")
async def attempts_of(plane: PlaneDep, job_id: UUID) -> Attempts:
    """The prompt as it was sent to the backend, for each attempt whose worker has reported it.

    Removed with the prompts of ended jobs, after COMFYFLEET_PROMPT_KEEP_DAYS.
    """
    job = await diagnosis.find_job(plane.context, job_id)
    return Attempts(
        prompt=dict(job.asked.prompt) or None,
        attempts=[
            AttemptSeen(
                attempt=each.attempt,
                lease_number=each.lease_number,
                worker_id=each.worker_id,
                started_at=each.started_at,
                prompt=sent_prompt(job, each),
            )
            for each in await diagnosis.attempts_of(plane.context, job)
        ],
    )


@router.get("/jobs/{job_id}", name="show")
async def show_job(plane: PlaneDep, job_id: UUID, tenant_id: UUID | None = None) -> JobSeen:
    """A job of any tenant."""
    job = await diagnosis.find_job(plane.context, job_id)
    if tenant_id not in (None, job.tenant_id):
        raise NotFound(f"there is no job {job_id} of the tenant {tenant_id}")
    async with plane.central.read() as tx:
        row = await dispatch.of_job(tx, job.tenant_id, job_id)
    return JobSeen(
        id=job.id,
        tenant_id=job.tenant_id,
        workflow=job.asked.workflow_slug,
        version=job.asked.workflow_version,
        status=job.shown_status,
        error=job.error_message,
        raw_error=job.raw_error,
        attempt=job.attempt,
        properties=dict(job.asked.properties),
        progress=plane.context.caches.progress.of(job.lease_token)
        if job.status.is_active
        else None,
        outputs=await _outputs(plane, job),
        values=list(job.values),
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
        dispatch=dispatch_view(row, job.asked.workflow_slug) if row else None,
        why=await why(plane.context, row) if row and job.status.is_active else None,
    )


async def _outputs(plane: ControlPlane, job: Job) -> list[OutputSeen]:
    names = {each.file_id: each.name for each in job.outputs}
    async with plane.context.tenant(job.tenant_id) as tx:
        found = await media.find_existing(tx, job.tenant_id, names)
    return [
        await _output(plane, name, found[file_id])
        for file_id, name in names.items()
        if file_id in found
    ]


async def _output(plane: ControlPlane, name: str, file: File) -> OutputSeen:
    url = await plane.store.url_to_get(
        file.path, seconds=plane.settings.url_seconds, filename=file.filename
    )
    return OutputSeen(
        name=name,
        filename=file.filename,
        url=url,
        size=file.size,
        content_type=file.mime_type,
    )


class AdminNewUpload(Body):
    filename: Text = Field(min_length=1, max_length=300)
    content_type: Text = Field(default="application/octet-stream", max_length=200)
    size: int = Field(ge=1, le=ROW_ID_MAX)
    tenant_id: UUID | None = None


@router.post("/uploads", status_code=201)
async def announce(plane: PlaneDep, wanted: AdminNewUpload) -> AdminUpload:
    """Creates a file that jobs can use once it has been PUT to the URL."""
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
