"""Routes for submitting, reading, following, canceling and retrying effect jobs and batches."""

import contextlib
import hashlib
import json
from asyncio import get_running_loop
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Header, Query, Request, Response, status
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import Field

from comfyfleet.api.jobs import (
    AgainAnswer,
    BatchAnswer,
    JobAnswer,
    Jobs,
    JobSummary,
    JobWaitAnswer,
)
from comfyfleet.api.values import ROW_ID_MAX, text_of
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog.draft import PROPERTIES_MAX
from comfyfleet.server.db import Database
from comfyfleet.server.http.deps import NowDep, PlaneDep, problems
from comfyfleet.server.http.public import views
from comfyfleet.server.http.public.auth import (
    KEY_CHARACTERS_MAX,
    PAGE_USUAL,
    Body,
    IdempotencyHeader,
    Limit,
    Reader,
    Text,
    Wait,
    Writer,
    idempotency_key,
    public_router,
)
from comfyfleet.server.http.streams import MEDIA_TYPE, EventStream, StreamKeyCheck, run_shielded
from comfyfleet.server.jobs import batches, customer, stages
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.batches import BatchRequest
from comfyfleet.server.jobs.model import (
    JOBS_PER_BATCH_MAX,
    BatchSummary,
    Job,
    JobBatch,
    JobStatus,
)
from comfyfleet.server.jobs.progress import PreviewWatch
from comfyfleet.server.jobs.submit import (
    EffectSubmission,
    JobRequest,
    cached_shortage,
    submit_effect,
)
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications.model import EventKind, StoredJobEvent
from comfyfleet.server.tenants.model import Caller

router = public_router("ai-jobs")
WAITS = "No backend can run this job at the moment. It stays queued until one can."
IdempotencyKey = Annotated[
    Text | None,
    Field(
        min_length=1,
        max_length=KEY_CHARACTERS_MAX,
        description="Repeating the request with the same key returns the same object. If the body "
        "differs, the response is 409.",
        examples=["order-4711"],
    ),
]


class NewJob(Body):
    effect_id: UUID
    video_id: UUID | None = Field(
        default=None, description="The media item to process, if the effect accepts media."
    )
    idempotency_key: IdempotencyKey = None
    properties: dict[str, Any] = Field(
        default_factory=dict,
        max_length=PROPERTIES_MAX,
        description="Values for the properties in the effect's JSON Schema. Files are given by the "
        "ids of their media items.",
        examples=[{"prompt": "a cat"}],
    )


@router.post(
    "/ai-jobs",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": JobAnswer, "description": "A job with this idempotency key exists already"},
        **problems(404, 409),
    },
    name="submit",
)
async def submit_job(
    body: NewJob,
    plane: PlaneDep,
    now: NowDep,
    caller: Writer,
    response: Response,
    idempotency_header: IdempotencyHeader = None,
    wait: Wait = 0,
) -> JobAnswer:
    """Submits a job that applies an effect. The input is validated, the price reserved, and the job
    queued."""
    request = JobRequest(
        effect_id=body.effect_id,
        values=body.properties,
        video_id=body.video_id,
        user_id=caller.user_id,
        idempotency_key=idempotency_key(body.idempotency_key, idempotency_header),
    )
    submission = await submit_effect(plane.context, caller.tenant, request)
    response.status_code = status.HTTP_201_CREATED if submission.is_new else status.HTTP_200_OK
    job = await _wait_for_end(plane, submission.job, wait)
    answer = await _job_answer(
        plane, job, now, submission=submission if submission.is_new else None
    )
    short = await cached_shortage(plane.context, job.spec) if answer.status == "queued" else None
    return answer if short is None else answer.model_copy(update={"warnings": (WAITS,)})


@router.get("/ai-jobs", responses=problems(404))
async def list_jobs(
    plane: PlaneDep,
    caller: Reader,
    before: UUID | None = None,
    status: JobStatus | None = None,
    limit: Limit = PAGE_USUAL,
) -> Jobs:
    """Lists your jobs, newest first, without their outputs. To see a job's outputs, retrieve it by
    its id."""
    jobs_read = await customer.list_jobs(
        plane.context,
        caller.tenant.id,
        caller.user_id,
        before=before,
        status=status,
        limit=limit + 1,
    )
    page = jobs_read[:limit]
    return Jobs(
        jobs=tuple(summary(plane, job) for job in page),
        next=page[-1].id if len(jobs_read) > limit else None,
    )


@router.get(
    "/ai-jobs/{job_id}",
    response_model=JobAnswer,
    responses={
        304: {"description": "The job hasn't changed since the response with this ETag"},
        **problems(404),
    },
    name="show",
)
async def show_job(
    job_id: UUID,
    plane: PlaneDep,
    now: NowDep,
    caller: Reader,
    response: Response,
    wait: Wait = 0,
    if_none_match: Annotated[
        str | None, Header(description="The ETag of the previous response.")
    ] = None,
) -> Any:
    """Returns a job. To poll, send the ETag of the last response as If-None-Match. If the job
    hasn't changed, the response is 304."""
    job = await customer.get_job(plane.context, caller.tenant.id, caller.user_id, job_id)
    job = await _wait_for_end(plane, job, wait)
    etag = _etag(plane, job, now)
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    if etag in [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]:
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    response.headers.update(headers)
    return await _job_answer(plane, job, now)


@router.post("/ai-jobs/{job_id}/cancel", include_in_schema=False)
@router.delete("/ai-jobs/{job_id}", responses=problems(404, 409), name="cancel")
async def cancel_job(job_id: UUID, plane: PlaneDep, now: NowDep, caller: Writer) -> JobAnswer:
    """Cancels a job and refunds its price. A job that is priced by the second is charged for the
    seconds that it has run.

    Returns 409 `job_ended` if the job has already completed or failed. The results of a completed
    job aren't deleted.
    """
    job = await customer.cancel_job(plane.context, caller.tenant.id, caller.user_id, job_id)
    return await _job_answer(plane, job, now)


@router.post(
    "/ai-jobs/{job_id}/retry",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": JobAnswer, "description": "The job was already retried as this job"},
        **problems(404, 409),
    },
)
async def retry(
    job_id: UUID, plane: PlaneDep, now: NowDep, caller: Writer, response: Response
) -> JobAnswer:
    """Retries a failed job as a new job at the current price."""
    job, is_new = await customer.retry_job(plane.context, caller.tenant.id, caller.user_id, job_id)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _job_answer(plane, job, now)


@router.get("/ai-jobs/{job_id}/why", responses=problems(404))
async def why(job_id: UUID, plane: PlaneDep, caller: Reader) -> JobWaitAnswer:
    """Returns the reason why a job isn't running."""
    explanation = await customer.explain_job(
        plane.context, caller.tenant.id, caller.user_id, job_id
    )
    needed = explanation.help_needed
    return JobWaitAnswer(
        why=explanation.why,
        person_needed_after=needed.after_seconds if needed else None,
        required_action=needed.action if needed else None,
    )


@router.get("/ai-jobs/{job_id}/again", responses=problems(404))
async def show_again(job_id: UUID, plane: PlaneDep, caller: Reader) -> AgainAnswer:
    """Returns a job's effect, media and properties, so that you can submit it again with
    changes."""
    settings = await customer.former_settings(
        plane.context, caller.tenant.id, caller.user_id, job_id
    )
    effect = settings.offer.effect if settings.offer else None
    return AgainAnswer(
        effect_id=effect.id if effect else None,
        effect_slug=effect.slug if effect else None,
        video_id=settings.video_id,
        properties=settings.properties,
        price_tokens=effect.settings.price_tokens if effect else None,
        problems=settings.problems,
    )


async def _wait_for_end(plane: ControlPlane, job: Job, seconds: float) -> Job:
    if not seconds or not job.status.is_active:
        return job
    return await customer.wait_for_end(plane.context, job.tenant_id, job.id, seconds)


def _etag(plane: ControlPlane, job: Job, now: datetime) -> str:
    """Returns an ETag that covers everything in the response that can change.

    The ETag of a finished job also changes when its URLs have reached half of their lifetime.
    """
    age = int(now.timestamp()) // max(1, plane.settings.url_seconds // 2)
    facts = [
        str(job.id),
        job.shown_status,
        job.lease_number,
        job.spec.is_held,
        views.percent_of(plane, job),
        None if job.status.is_active else age,
    ]
    return f'"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}"'


def summary(plane: ControlPlane, job: Job) -> JobSummary:
    return JobSummary(**_summary_fields(plane, job))


def _summary_fields(plane: ControlPlane, job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "status": job.shown_status,
        "effect_id": job.spec.effect_id,
        "video_id": job.spec.video_id,
        "batch_id": job.spec.batch_id,
        "retry_of": job.spec.retry_of,
        "reused_from": job.spec.reused_from,
        "price_tokens": job.reserved_tokens,
        "progress": views.percent_of(plane, job),
        "error": job.error_message,
        "submitted_at": job.submitted_at,
        "started_at": job.started_at,
        "completed_at": job.completed_at,
    }


async def _job_answer(
    plane: ControlPlane, job: Job, now: datetime, submission: EffectSubmission | None = None
) -> JobAnswer:
    """Builds the response for a job. For a job that was just submitted, passing its `submission`
    saves a query."""
    original, named_files = await views.original_and_outputs(plane, job)
    names = await views.download_names(plane, job, original, [file for _, file in named_files])
    outputs = await views.outputs_of(plane, named_files, names)
    if submission:
        remaining = stages.seconds_left(job, submission.typical_seconds, now)
    else:
        remaining = await views.seconds_left(plane, job, now)
    return JobAnswer(
        **_summary_fields(plane, job),
        idempotency_key=job.spec.idempotency_key,
        properties=dict(job.spec.properties),
        estimated_seconds_left=remaining,
        outputs=outputs,
        original=(await views.outputs_of(plane, [("input", original)]))[0] if original else None,
        processed_file_url=outputs[0].url if outputs else None,
        values=views.values_of(job),
        text=text_of(job.values) if job.result_metadata else None,
    )


# Routes that are called for every job or repeatedly while it runs. They bypass FastAPI.
CALLED_OFTEN = tuple(
    route
    for route in router.routes
    if isinstance(route, APIRoute) and route.endpoint in (submit_job, show_job)
)


batches_router = public_router("ai-jobs")


class Item(Body):
    properties: dict[str, Any] = Field(
        default_factory=dict, description="Values for the properties in the effect's JSON Schema."
    )
    video_id: UUID | None = Field(
        default=None, description="The media item, if the effect accepts media."
    )


class NewBatch(Body):
    effect_id: UUID
    items: list[Item] = Field(
        min_length=1,
        max_length=JOBS_PER_BATCH_MAX,
        description="One job is created for each item. Either all items are accepted or none.",
        examples=[[{"properties": {"prompt": "a cat"}}, {"properties": {"prompt": "a dog"}}]],
    )
    idempotency_key: IdempotencyKey = None


@batches_router.post(
    "/ai-jobs/batches",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {
            "model": BatchAnswer,
            "description": "A batch with this idempotency key exists already",
        },
        **problems(404, 409),
    },
    name="submit",
)
async def submit_batch(
    body: NewBatch,
    plane: PlaneDep,
    caller: Writer,
    response: Response,
    idempotency_header: IdempotencyHeader = None,
) -> BatchAnswer:
    """Submits a batch of jobs and reserves their total price. If the balance is too low, the whole
    batch is rejected."""
    has_media = any(item.video_id for item in body.items)
    request = BatchRequest(
        effect_id=body.effect_id,
        sets=tuple(item.properties for item in body.items),
        video_ids=tuple(item.video_id for item in body.items) if has_media else (),
        idempotency_key=idempotency_key(body.idempotency_key, idempotency_header),
    )
    batch, is_new = await batches.submit_batch(
        plane.context, caller.tenant.id, caller.user_id, request
    )
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _batch_answer(plane, caller, batch.id, 0, PAGE_USUAL)


@batches_router.get("/ai-jobs/batches/{batch_id}", responses=problems(404), name="show")
async def show_batch(
    batch_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    start: Annotated[
        int, Query(ge=0, le=JOBS_PER_BATCH_MAX, description="Index of the first item to list.")
    ] = 0,
    limit: Limit = PAGE_USUAL,
) -> BatchAnswer:
    """Returns a summary of a batch and a page of its jobs."""
    return await _batch_answer(plane, caller, batch_id, start, limit)


@batches_router.delete("/ai-jobs/batches/{batch_id}", responses=problems(404), name="cancel")
async def cancel_batch(batch_id: UUID, plane: PlaneDep, caller: Writer) -> BatchAnswer:
    """Cancels a batch. All jobs that haven't finished are canceled and refunded."""
    await batches.cancel_batch(plane.context, caller.tenant.id, caller.user_id, batch_id)
    return await _batch_answer(plane, caller, batch_id, 0, PAGE_USUAL)


async def _batch_answer(
    plane: ControlPlane, caller: Caller, batch_id: UUID, start: int, limit: int
) -> BatchAnswer:
    batch, figures, batch_jobs = await batches.read_batch(
        plane.context, caller.tenant.id, caller.user_id, batch_id
    )
    return _page(plane, batch, figures, batch_jobs, start, limit)


def _page(
    plane: ControlPlane,
    batch: JobBatch,
    figures: BatchSummary,
    batch_jobs: list[Job],
    start: int,
    limit: int,
) -> BatchAnswer:
    end = start + limit
    return BatchAnswer(
        id=batch.id,
        effect_id=batch.effect_id,
        total=batch.total,
        held=figures.held,
        counts={JobStatus(name): count for name, count in figures.counts.items()},
        progress=round(100 * figures.progress, 1),
        is_ended=figures.is_ended,
        reserved_tokens=figures.reserved_tokens,
        consumed_tokens=figures.consumed_tokens,
        refunded_tokens=figures.refunded_tokens,
        created_at=batch.created_at,
        cancelled_at=batch.cancelled_at,
        jobs=tuple(summary(plane, job) for job in batch_jobs[start:end]),
        next=end if end < len(batch_jobs) else None,
    )


# Seconds between reads. Another control plane may have written an event, and notifications only
# reach this process.
REREAD_SECONDS = 1.0
# Seconds between comments, which keep proxies from closing an idle connection.
HEARTBEAT_SECONDS = 15.0
# Seconds until the stream ends. The client then reconnects with its last event id.
STREAM_SECONDS_MAX = 3600.0
RETRY_MILLISECONDS = 2000
EXAMPLE = (
    'id: 7\nevent: status\ndata: {"job_id": "6a1f…", "status": "processing"}\n\n'
    'event: progress\ndata: {"percent": 40.0, "node": "3"}\n\n'
)
DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "`status`, `progress` and `outputs` events until the job finishes.",
        "content": {MEDIA_TYPE: {"example": EXAMPLE}},
    },
    204: {"description": "The job has finished and all events were sent. Don't reconnect."},
}
# Browsers send the header when they reconnect. The query parameter has the same purpose for the
# first request after a page reload.
Since = Annotated[
    int, Header(ge=0, le=ROW_ID_MAX, description="The id of the last event received.")
]
After = Annotated[int, Query(ge=0, le=ROW_ID_MAX, description="Same as the Last-Event-ID header.")]


@router.get(
    "/ai-jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={**DESCRIBED, **problems(404)},
)
async def follow(
    request: Request,
    job_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    last_event_id: Since = 0,
    after: After = 0,
    previews: Annotated[bool, Query(description="Whether to include previews.")] = False,
) -> Response:
    """Streams a job's events as server-sent events. The stream ends when the job finishes."""
    job = await customer.get_job(plane.context, caller.tenant.id, caller.user_id, job_id)
    pool = plane.pools[caller.tenant.pool]
    since = max(last_event_id, after)
    if not job.status.is_active:
        async with pool.read() as tx:
            remaining = await notifications.events_after(
                tx, job.tenant_id, job.id, after_id=since, limit=1
            )
        if not remaining:
            return Response(status_code=status.HTTP_204_NO_CONTENT)
    lines = _lines(plane, caller, job, since, previews=previews)
    return EventStream(request, caller, lines)


async def _lines(
    plane: ControlPlane, caller: Caller, job: Job, since: int, *, previews: bool
) -> AsyncIterator[str]:
    """Yields the lines of the event stream. Each read uses a new transaction, so that a slow client
    doesn't keep one open."""
    pool, key = plane.pools[caller.tenant.pool], StreamKeyCheck(plane, caller)
    clock = get_running_loop().time
    started_at = sent_at = clock()
    progress: dict[str, Any] | None = None
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(_watched(plane, job)) if previews else None
        while clock() - started_at < STREAM_SECONDS_MAX and await key.is_valid():
            job, events = await run_shielded(_read_events(pool, job, since))
            if events:
                since, sent_at = events[-1].id, clock()
                yield "".join(map(_stored_event, events))
                continue  # there may be another page of events
            if not job.status.is_active:
                return
            latest = _progress(plane, job, watch)
            if latest != progress:
                progress, sent_at = latest, clock()
                yield _format_event(EventKind.PROGRESS, latest or {})
            elif clock() - sent_at >= HEARTBEAT_SECONDS:
                sent_at = clock()
                yield ": still there\n\n"
            await plane.context.notifier.changed(job.id, REREAD_SECONDS)


def _watched(plane: ControlPlane, job: Job) -> PreviewWatch:
    notifier = plane.context.notifier
    return plane.context.previews.watch(job.tenant_id, job.id, lambda: notifier.tell(job.id))


async def _read_events(
    pool: Database, job: Job, since: int
) -> tuple[Job, Sequence[StoredJobEvent]]:
    """Reads a job and then its new events. In this order, no event of a finished job is missed."""
    async with pool.read() as tx:
        current = await jobs.get(tx, job.tenant_id, job.id)
        return current, await notifications.events_after(tx, job.tenant_id, job.id, after_id=since)


def _progress(plane: ControlPlane, job: Job, watch: PreviewWatch | None) -> dict[str, Any] | None:
    report = plane.context.caches.progress.of(job.lease_token)
    hidden = None if watch else {"preview"}
    data = report.model_dump(mode="json", exclude_none=True, exclude=hidden) if report else {}
    if watch is not None and watch.latest is not None:
        data["preview"] = watch.latest.data_url
    return data or None


def _stored_event(event: StoredJobEvent) -> str:
    return f"id: {event.id}\n{_format_event(event.kind, dict(event.data))}"


def _format_event(kind: str, data: dict[str, Any]) -> str:
    """Formats a server-sent event. The data fits on one line, because JSON escapes line breaks."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
