"""Jobs as customers submit and follow them."""

import hashlib
import json
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Header, Response, status
from fastapi.routing import APIRoute
from pydantic import Field

from comfyfleet.effects.declaring import PROPERTIES_MAX
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public import showing
from comfyfleet.http.public.auth import Reader, Writer
from comfyfleet.http.public.routing import (
    PAGE_USUAL,
    Answer,
    Body,
    Limit,
    Text,
    Wait,
    public_router,
)
from comfyfleet.jobs import customers
from comfyfleet.jobs.customers import Application, Applied
from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.jobs.shortage import shortage_for
from comfyfleet.plane import Plane
from comfyfleet.wire.values import text_of

router = public_router("ai-jobs")
KEY_CHARACTERS_MAX = 200
WAITS = "No backend can run this at the moment: the job waits until one can."
IdempotencyKey = Annotated[
    Text | None,
    Field(
        min_length=1,
        max_length=KEY_CHARACTERS_MAX,
        description="The same key and body again give the same job; with another body: 409.",
        examples=["order-4711"],
    ),
]


class NewJob(Body):
    effect_id: UUID
    video_id: UUID | None = Field(
        default=None, description="The media that it is applied to, where the effect takes any."
    )
    idempotency_key: IdempotencyKey = None
    properties: dict[str, Any] = Field(
        default_factory=dict,
        max_length=PROPERTIES_MAX,
        description="As the effect's JSON Schema says. A file is named by the id of its media.",
        examples=[{"prompt": "a cat"}],
    )


class JobSummary(Answer):
    id: UUID
    status: JobStatus
    effect_id: UUID | None
    video_id: UUID | None
    batch_id: UUID | None
    retry_of: UUID | None
    price_tokens: int = Field(
        description="Reserved at submit; consumed on success, else refunded.", examples=[5]
    )
    progress: float | None = Field(description="Percent; null as long as nobody knows.")
    error: str | None = Field(description="Why it failed, in words for people.")
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None = Field(description="When it ended, however it ended.")


class JobAnswer(JobSummary):
    idempotency_key: str | None
    properties: dict[str, Any] = Field(description="With all that was filled in, such as a seed.")
    estimated_seconds_left: float | None = Field(
        description="From the effect's history, without the wait in the queue.", examples=[8.5]
    )
    outputs: list[showing.Output]
    processed_file_url: str | None = Field(description="The first output's.")
    values: list[showing.Value] = showing.VALUES
    text: str | None = showing.TEXT
    warnings: list[str] = Field(
        default_factory=list, description="At submit: that it will wait, as nobody can run it now."
    )


class Jobs(Answer):
    jobs: list[JobSummary] = Field(description="The newest first.")
    next: UUID | None = Field(description="Ask on with before=next; null: that was all.")


class JobWaitAnswer(Answer):
    why: str = Field(description="One sentence.", examples=["3 jobs ahead, about 2 minutes."])


@router.post(
    "/ai-jobs",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": JobAnswer, "description": "It was submitted before, by the same key"},
        **problems(404, 409),
    },
)
async def submit(
    body: NewJob,
    plane: GivenPlane,
    now: GivenNow,
    caller: Writer,
    response: Response,
    wait: Wait = 0,
) -> JobAnswer:
    """Applies an effect: checks everything, reserves its price, queues it."""
    wanted = Application(
        effect_id=body.effect_id,
        properties=body.properties,
        video_id=body.video_id,
        idempotency_key=body.idempotency_key,
    )
    made = await customers.apply(plane.sides, caller.tenant, caller.user_id, wanted)
    response.status_code = status.HTTP_201_CREATED if made.is_new else status.HTTP_200_OK
    job = await _waited(plane, made.job, wait)
    answer = await _answer(plane, job, now, known=made if made.is_new else None)
    short = await shortage_for(plane.sides, job.asked) if answer.status == "queued" else None
    return answer if short is None else answer.model_copy(update={"warnings": [WAITS]})


@router.get("/ai-jobs", responses=problems(404))
async def list_jobs(
    plane: GivenPlane,
    caller: Reader,
    before: UUID | None = None,
    status: JobStatus | None = None,
    limit: Limit = PAGE_USUAL,
) -> Jobs:
    """Without outputs: ask for one of them to get those."""
    found = await customers.list_(
        plane.sides,
        caller.tenant.id,
        caller.user_id,
        before=before,
        status=status,
        limit=limit + 1,
    )
    page = found[:limit]
    return Jobs(
        jobs=[summary(plane, each) for each in page],
        next=page[-1].id if len(found) > limit else None,
    )


@router.get(
    "/ai-jobs/{job_id}",
    response_model=JobAnswer,
    responses={304: {"description": "As If-None-Match has it"}, **problems(404)},
)
async def show(
    job_id: UUID,
    plane: GivenPlane,
    now: GivenNow,
    caller: Reader,
    response: Response,
    wait: Wait = 0,
    if_none_match: Annotated[str | None, Header(description="An ETag that was answered.")] = None,
) -> Any:
    """Poll with the ETag of the last answer: 304 as long as nothing has changed."""
    job = await customers.get(plane.sides, caller.tenant.id, caller.user_id, job_id)
    job = await _waited(plane, job, wait)
    etag = _etag(plane, job, now)
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    if etag in [each.strip().removeprefix("W/") for each in (if_none_match or "").split(",")]:
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    response.headers.update(headers)
    return await _answer(plane, job, now)


@router.delete("/ai-jobs/{job_id}", responses=problems(404))
async def cancel(job_id: UUID, plane: GivenPlane, now: GivenNow, caller: Writer) -> JobAnswer:
    """Ends and refunds it; one that has ended stays as it is, and is answered as such."""
    job = await customers.cancel(plane.sides, caller.tenant.id, caller.user_id, job_id)
    return await _answer(plane, job, now)


@router.post(
    "/ai-jobs/{job_id}/retry",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": JobAnswer, "description": "It was retried before, by this job"},
        **problems(404, 409),
    },
)
async def retry(
    job_id: UUID, plane: GivenPlane, now: GivenNow, caller: Writer, response: Response
) -> JobAnswer:
    """A failed job once more: a new job, at today's price."""
    job, is_new = await customers.retry(plane.sides, caller.tenant.id, caller.user_id, job_id)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _answer(plane, job, now)


@router.get("/ai-jobs/{job_id}/why", responses=problems(404))
async def why(job_id: UUID, plane: GivenPlane, caller: Reader) -> JobWaitAnswer:
    """Why it isn't running."""
    said = await customers.why(plane.sides, caller.tenant.id, caller.user_id, job_id)
    return JobWaitAnswer(why=said)


async def _waited(plane: Plane, job: Job, seconds: float) -> Job:
    if not seconds or not job.status.is_active:
        return job
    return await customers.wait_for_end(plane.sides, job.tenant_id, job.id, seconds)


def _etag(plane: Plane, job: Job, now: datetime) -> str:
    """Of what can change; URLs only when those that were answered have half of their life behind them."""
    age = int(now.timestamp()) // max(1, plane.settings.url_seconds // 2)
    facts = [
        str(job.id),
        job.shown_status,
        job.lease_number,
        job.asked.is_held,
        showing.percent_of(plane, job),
        None if job.status.is_active else age,
    ]
    return f'"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}"'


def summary(plane: Plane, job: Job) -> JobSummary:
    return JobSummary(**_summed_up(plane, job))


def _summed_up(plane: Plane, job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "status": job.shown_status,
        "effect_id": job.asked.effect_id,
        "video_id": job.asked.video_id,
        "batch_id": job.asked.batch_id,
        "retry_of": job.asked.retry_of,
        "price_tokens": job.reserved_tokens,
        "progress": showing.percent_of(plane, job),
        "error": job.error_message,
        "submitted_at": job.submitted_at,
        "started_at": job.started_at,
        "completed_at": job.completed_at,
    }


async def _answer(plane: Plane, job: Job, now: datetime, known: Applied | None = None) -> JobAnswer:
    """`known`: what was read when it was submitted, just now."""
    outputs = await showing.outputs_of(plane, await showing.files_of(plane, job))
    if known:
        left = showing.left_of(job, known.typical_seconds, now)
    else:
        left = await showing.seconds_left(plane, job, now)
    return JobAnswer(
        **_summed_up(plane, job),
        idempotency_key=job.asked.idempotency_key,
        properties=dict(job.asked.properties),
        estimated_seconds_left=left,
        outputs=outputs,
        processed_file_url=outputs[0].url if outputs else None,
        values=showing.values_of(job),
        text=text_of(job.values),
    )


# At least once for each job, or again and again while it runs.
CALLED_OFTEN = tuple(
    each for each in router.routes if isinstance(each, APIRoute) and each.endpoint in (submit, show)
)
