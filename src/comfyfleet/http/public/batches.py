"""Many jobs of one effect under one id."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Query, Response, status
from pydantic import Field

from comfyfleet.batches.model import ADMITTED_AT_ONCE_MAX, JOBS_PER_BATCH_MAX, Batch, RollUp
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public.ai_jobs import IdempotencyKey, JobSummary, summary
from comfyfleet.http.public.auth import Reader, Writer
from comfyfleet.http.public.routing import PAGE_USUAL, Answer, Body, Limit, public_router
from comfyfleet.jobs import batching
from comfyfleet.jobs.batching import BatchOrder
from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.plane import Plane
from comfyfleet.tenants.keys.model import Caller

router = public_router("ai-jobs")


class Item(Body):
    properties: dict[str, Any] = Field(
        default_factory=dict, description="As the effect's JSON Schema says."
    )
    video_id: UUID | None = Field(default=None, description="Where the effect takes media.")


class NewBatch(Body):
    effect_id: UUID
    items: list[Item] = Field(
        min_length=1,
        max_length=JOBS_PER_BATCH_MAX,
        description="A job for each; all of them are accepted, or none.",
        examples=[[{"properties": {"prompt": "a cat"}}, {"properties": {"prompt": "a dog"}}]],
    )
    idempotency_key: IdempotencyKey = None


class BatchAnswer(Answer):
    id: UUID
    effect_id: UUID
    total: int
    held: int = Field(
        description=f"Not in the queue yet: {ADMITTED_AT_ONCE_MAX} of a batch are at a time."
    )
    counts: dict[JobStatus, int] = Field(description="Of those that are or were, by status.")
    progress: float = Field(description="Percent of the jobs that have ended.")
    is_ended: bool
    reserved_tokens: int = Field(description="Of jobs that have not ended.")
    consumed_tokens: int
    refunded_tokens: int
    created_at: datetime
    cancelled_at: datetime | None
    jobs: list[JobSummary] = Field(description="In the order of the items, a page of them.")
    next: int | None = Field(description="Ask on with start=next; null: that was all.")


@router.post(
    "/ai-jobs/batches",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": BatchAnswer, "description": "It was submitted before, by the same key"},
        **problems(404, 409),
    },
)
async def submit(
    body: NewBatch, plane: GivenPlane, caller: Writer, response: Response
) -> BatchAnswer:
    """Paid for as a whole at once; too few tokens for all refuse the whole batch."""
    has_media = any(each.video_id for each in body.items)
    wanted = BatchOrder(
        effect_id=body.effect_id,
        sets=tuple(each.properties for each in body.items),
        video_ids=tuple(each.video_id for each in body.items) if has_media else (),
        idempotency_key=body.idempotency_key,
    )
    batch, is_new = await batching.apply_batch(
        plane.sides, caller.tenant.id, caller.user_id, wanted
    )
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _answer(plane, caller, batch.id, 0, PAGE_USUAL)


@router.get("/ai-jobs/batches/{batch_id}", responses=problems(404))
async def show(
    batch_id: UUID,
    plane: GivenPlane,
    caller: Reader,
    start: Annotated[int, Query(ge=0, le=JOBS_PER_BATCH_MAX, description="From this item on.")] = 0,
    limit: Limit = PAGE_USUAL,
) -> BatchAnswer:
    """All of it in a few figures, and a page of its jobs."""
    return await _answer(plane, caller, batch_id, start, limit)


@router.delete("/ai-jobs/batches/{batch_id}", responses=problems(404))
async def cancel(batch_id: UUID, plane: GivenPlane, caller: Writer) -> BatchAnswer:
    """Cancels and refunds all that have not ended."""
    await batching.cancel_batch(plane.sides, caller.tenant.id, caller.user_id, batch_id)
    return await _answer(plane, caller, batch_id, 0, PAGE_USUAL)


async def _answer(
    plane: Plane, caller: Caller, batch_id: UUID, start: int, limit: int
) -> BatchAnswer:
    batch, figures, found = await batching.batch_of(
        plane.sides, caller.tenant.id, caller.user_id, batch_id
    )
    return _page(plane, batch, figures, found, start, limit)


def _page(
    plane: Plane, batch: Batch, figures: RollUp, found: list[Job], start: int, limit: int
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
        jobs=[summary(plane, each) for each in found[start:end]],
        next=end if end < len(found) else None,
    )
