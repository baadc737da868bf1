"""Jobs as operators submit and see them."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Depends, Query
from pydantic import BaseModel, Field

from comfyfleet.audit import service as audit
from comfyfleet.dispatch import service as dispatch
from comfyfleet.effects import service as effects
from comfyfleet.files import service as files
from comfyfleet.files.model import File, upload_key
from comfyfleet.http.admin.dispatches import DispatchSeen, seen
from comfyfleet.http.admin.routing import Body, Operator, admin_router
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.values import Text, VersionNumber, in_utc
from comfyfleet.jobs import lookup, submitting
from comfyfleet.jobs.arrival import ANNOUNCED_SIZE
from comfyfleet.jobs.attempts import sent_prompt
from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.jobs.ordering import Order, submission
from comfyfleet.jobs.shortage import shortage_for
from comfyfleet.jobs.why import why
from comfyfleet.kernel.errors import InvalidInput, NotFound
from comfyfleet.kernel.texts import is_storable
from comfyfleet.plane import Plane
from comfyfleet.tenants.model import DEFAULT_TENANT
from comfyfleet.wire.files import ROW_ID_MAX
from comfyfleet.wire.messages import Progress
from comfyfleet.wire.values import ShownValue

router = admin_router()
JOBS_PER_PAGE_MAX = 500


class NewJobs(Body):
    workflow_slug: str
    version: VersionNumber | None = Field(
        default=None, description="The newest, unless another is named."
    )
    tenant_id: UUID | None = Field(default=None, description="The tenant `default`, unless named.")
    properties: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, UUID] = Field(default_factory=dict, description="By property.")
    stage: str = "production"
    provider: Literal["self_hosted", "cloud"] = "self_hosted"
    priority: int = Field(default=0, ge=-1000, le=1000)
    backend_affinity: str | None = Field(
        default=None, description="worker:ID or fleet:SLUG/STAGE", pattern="^(worker|fleet):.+"
    )
    count: int = Field(default=1, ge=1, le=submitting.JOBS_PER_SUBMIT_MAX)


class JobIds(BaseModel):
    ids: list[UUID]
    warnings: list[str] = Field(default_factory=list, description="Why nobody can run them now.")


class OutputSeen(BaseModel):
    name: str
    filename: str = Field(description="As the backend named it.")
    url: str
    size: int | None
    content_type: str


class JobSeen(BaseModel):
    id: UUID
    tenant_id: UUID
    workflow: str
    version: int
    status: JobStatus
    error: str | None
    raw_error: str | None
    attempt: int
    properties: dict[str, Any]
    progress: Progress | None
    outputs: list[OutputSeen]
    values: list[ShownValue]
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    dispatch: DispatchSeen | None
    why: str | None = Field(description="Why it isn't running, if it isn't.")


class JobListed(BaseModel):
    id: UUID
    tenant_id: UUID
    user_id: UUID | None
    workflow: str
    status: JobStatus
    attempt: int
    error: str | None
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None


class JobPage(BaseModel):
    jobs: list[JobListed] = Field(description="The newest first.")
    next: str | None = Field(description="Ask on with after=next; null: that was all.")
    pools_left_out: list[str] = Field(description="They are down: their jobs are not listed.")


class AttemptSeen(BaseModel):
    attempt: int
    lease_number: int
    worker_id: str
    started_at: datetime
    prompt: dict[str, Any] | None = Field(description="null: removed, as the job ended long ago.")


class Attempts(BaseModel):
    prompt: dict[str, Any] | None = Field(description="As workers get it; null: removed.")
    attempts: list[AttemptSeen] = Field(description="As sent, in the order of leases.")


@router.post("/jobs", status_code=201)
async def submit(plane: GivenPlane, wanted: NewJobs, operator: Operator) -> JobIds:
    """One job, or several alike; each draws its own seed."""
    tenant_id = wanted.tenant_id or DEFAULT_TENANT
    async with plane.central.look() as tx:
        await effects.named(tx, wanted.workflow_slug)
    order = Order(
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
        plane.sides.new_id(): await submission(plane.sides, tenant_id, order)
        for _ in range(wanted.count)
    }
    added = await submitting.submit_many(plane.sides, tenant_id, asked)
    async with plane.central.begin() as tx:
        await audit.record(
            tx,
            actor=operator,
            action="submit_jobs",
            subject=f"tenant:{tenant_id}",
            now=plane.clock(),
            tenant_id=tenant_id,
            details={"workflow": wanted.workflow_slug, "jobs": [job.id for job in added[:10]]},
        )
    short = await shortage_for(plane.sides, added[0].asked) if added else None
    warnings = [] if short is None else [short.message]
    return JobIds(ids=[job.id for job in added], warnings=warnings)


async def wanted_of(
    status: JobStatus | None = None,
    tenant: Annotated[UUID | None, Query(description="Only of this tenant.")] = None,
    workflow: Annotated[str | None, Query(description="Only of this workflow.")] = None,
    worker: Annotated[str | None, Query(description="Only those that it had last.")] = None,
    since: Annotated[datetime | None, Query(description="Only those submitted since.")] = None,
) -> lookup.Wanted:
    for name, value in (("workflow", workflow), ("worker", worker)):
        if value is not None and not is_storable(value):
            raise InvalidInput(f"there is no such {name}", field=name)
    return lookup.Wanted(status, tenant, workflow, worker, since and in_utc(since))


@router.get("/jobs")
async def list_jobs(
    plane: GivenPlane,
    wanted: Annotated[lookup.Wanted, Depends(wanted_of)],
    after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=JOBS_PER_PAGE_MAX)] = 50,
) -> JobPage:
    """Of all tenants, the newest first. With `worker`, a page may have fewer and still go on."""
    page = await lookup.newest(plane.sides, wanted, after=after, limit=limit)
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
async def attempts_of(plane: GivenPlane, job_id: UUID) -> Attempts:
    """The prompt as it was sent to the backend, for each attempt whose worker has told it.

    Removed with the prompts of ended jobs, after COMFYFLEET_PROMPT_KEEP_DAYS.
    """
    job = await lookup.find(plane.sides, job_id)
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
            for each in await lookup.attempts_of(plane.sides, job)
        ],
    )


@router.get("/jobs/{job_id}")
async def show(plane: GivenPlane, job_id: UUID, tenant_id: UUID | None = None) -> JobSeen:
    """Whosever it is: its tenant needn't be named."""
    job = await lookup.find(plane.sides, job_id)
    if tenant_id not in (None, job.tenant_id):
        raise NotFound(f"there is no job {job_id} of the tenant {tenant_id}")
    async with plane.central.look() as tx:
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
        progress=plane.sides.progresses.of(job.lease_token) if job.status.is_active else None,
        outputs=await _outputs(plane, job),
        values=list(job.values),
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
        dispatch=seen(row, job.asked.workflow_slug) if row else None,
        why=await why(plane.sides, row) if row and job.status.is_active else None,
    )


async def _outputs(plane: Plane, job: Job) -> list[OutputSeen]:
    kept = (job.result_metadata or {}).get("outputs", [])
    pool = await plane.sides.pool_of(job.tenant_id)
    names = {UUID(each["file_id"]): each["name"] for each in kept}
    async with pool.look() as tx:
        found = await files.those_of(tx, job.tenant_id, names)
    return [
        await _output(plane, name, found[file_id])
        for file_id, name in names.items()
        if file_id in found
    ]


async def _output(plane: Plane, name: str, file: File) -> OutputSeen:
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


class AdminUploadSlot(BaseModel):
    method: str
    url: str
    headers: dict[str, str]


class AdminUpload(BaseModel):
    file_id: UUID
    upload: AdminUploadSlot


@router.post("/uploads", status_code=201)
async def announce(plane: GivenPlane, wanted: AdminNewUpload) -> AdminUpload:
    """A file that jobs may name once it has been PUT to the URL."""
    tenant_id = wanted.tenant_id or DEFAULT_TENANT
    pool = await plane.sides.pool_of(tenant_id)
    file_id = plane.sides.new_id()
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
    async with pool.begin() as tx:
        await files.add(tx, file)
    put = await plane.store.url_to_put(
        file.path,
        content_type=wanted.content_type,
        seconds=plane.settings.url_seconds,
        size=wanted.size,
    )
    slot = AdminUploadSlot(method=put.method, url=put.url, headers=dict(put.headers))
    return AdminUpload(file_id=file.id, upload=slot)
