"""The queue as operators see it: look, understand, put right."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Query
from pydantic import BaseModel, Field

from comfyfleet.audit import service as audit
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Dispatch, Status
from comfyfleet.effects import service as effects
from comfyfleet.http.admin.routing import Body, Operator, admin_router
from comfyfleet.http.given import GivenPlane
from comfyfleet.jobs import submitting
from comfyfleet.jobs.retrying import retry as retry_job
from comfyfleet.jobs.why import why
from comfyfleet.plane import Plane
from comfyfleet.wire.files import RowId

router = admin_router("/dispatches")
PAGE_MAX = 500
ATTEMPTS_MAX = 500
ATTEMPT_ACTIONS = ("lease", "start", "complete", "fail", "requeue", "cancel", "expire", "retry")


class DispatchSeen(BaseModel):
    id: int
    tenant_id: UUID
    job_id: UUID
    workflow: str
    stage: str
    provider: str
    status: Status
    priority: int
    attempts: int
    max_attempts: int
    requeues: int
    worker_id: str | None
    lease_expires_at: datetime | None
    not_before: datetime | None
    backend_affinity: str | None
    model_key: str | None
    is_poisoned: bool
    cancel_requested: bool
    duration_seconds: float | None
    last_error: str | None
    created_at: datetime
    queued_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class DispatchPage(BaseModel):
    dispatches: list[DispatchSeen]
    next: int | None = Field(description="Ask again with `before` set to this for older ones.")


class Attempt(BaseModel):
    at: datetime
    actor: str
    action: str
    details: dict[str, Any]


class DispatchWhole(BaseModel):
    dispatch: DispatchSeen
    why: str
    attempts: list[Attempt]


class NewPriority(Body):
    priority: int = Field(ge=-1000, le=1000)


class RetriedDispatch(BaseModel):
    job_id: UUID


class WhyDispatch(BaseModel):
    why: str


def seen(row: Dispatch, slug: str) -> DispatchSeen:
    lane = {"workflow": slug, "stage": row.lane.stage, "provider": row.lane.provider}
    rest = set(DispatchSeen.model_fields) - lane.keys()
    return DispatchSeen.model_validate(lane | {name: getattr(row, name) for name in rest})


async def _seen(plane: Plane, rows: Sequence[Dispatch]) -> list[DispatchSeen]:
    async with plane.central.look() as tx:
        slugs = {each.id: each.slug for each in await effects.all_of(tx, with_open=True)}
    return [seen(row, slugs.get(row.lane.workflow_id, "?")) for row in rows]


async def _row(plane: Plane, dispatch_id: RowId) -> Dispatch:
    async with plane.central.look() as tx:
        return await dispatch.get(tx, dispatch_id)


async def _note(plane: Plane, row: Dispatch, action: str, operator: str, **details: object) -> None:
    async with plane.central.begin() as tx:
        await audit.record(
            tx,
            actor=operator,
            action=action,
            subject=f"dispatch:{row.id}",
            now=plane.clock(),
            tenant_id=row.tenant_id,
            details=details,
        )


@router.get("")
async def list_dispatches(
    plane: GivenPlane,
    status: Status | None = None,
    workflow: str | None = None,
    worker: str | None = None,
    tenant: Annotated[UUID | None, Query(description="Only of this tenant.")] = None,
    poisoned: bool | None = None,
    before: RowId | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> DispatchPage:
    """The newest first."""
    async with plane.central.look() as tx:
        workflow_id = (await effects.by_slug(tx, workflow)).id if workflow else None
        rows = await dispatch.list_(
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
        dispatches=await _seen(plane, rows), next=rows[-1].id if len(rows) == limit else None
    )


@router.get("/{dispatch_id}")
async def show(plane: GivenPlane, dispatch_id: RowId) -> DispatchWhole:
    """With all attempts, and why it is not running if it isn't."""
    row = await _row(plane, dispatch_id)
    async with plane.central.look() as tx:
        entries = await audit.find(tx, subject=f"dispatch:{dispatch_id}", limit=ATTEMPTS_MAX)
    attempts = [
        Attempt(at=each.at, actor=each.actor, action=each.action, details=dict(each.details))
        for each in reversed(entries)
    ]
    (shown,) = await _seen(plane, [row])
    return DispatchWhole(dispatch=shown, why=await why(plane.sides, row), attempts=attempts)


@router.get("/{dispatch_id}/why")
async def why_not_running(plane: GivenPlane, dispatch_id: RowId) -> WhyDispatch:
    return WhyDispatch(why=await why(plane.sides, await _row(plane, dispatch_id)))


@router.post("/{dispatch_id}/cancel")
async def cancel(plane: GivenPlane, dispatch_id: RowId, operator: Operator) -> DispatchSeen:
    """Queued: ends at once. Leased: the worker is told with its next heartbeat."""
    row = await _row(plane, dispatch_id)
    await _note(plane, row, "cancel", operator)
    await submitting.cancel(plane.sides, row.tenant_id, row.job_id)
    (shown,) = await _seen(plane, [await _row(plane, dispatch_id)])
    return shown


@router.post("/{dispatch_id}/retry", status_code=201)
async def retry(plane: GivenPlane, dispatch_id: RowId, operator: Operator) -> RetriedDispatch:
    """A new job with the same prompt and files; the old one stays as it ended."""
    row = await _row(plane, dispatch_id)
    job = await retry_job(plane.sides, row.tenant_id, row.job_id)
    await _note(plane, row, "retry", operator, new_job=str(job.id))
    return RetriedDispatch(job_id=job.id)


@router.post("/{dispatch_id}/reprioritise")
async def reprioritise(
    plane: GivenPlane, dispatch_id: RowId, wanted: NewPriority, operator: Operator
) -> DispatchSeen:
    """Only while it is queued. An operator is not bound by the tenant's range."""
    async with plane.central.begin() as tx:
        row = await dispatch.reprioritise(
            tx, dispatch_id, wanted.priority, now=plane.clock(), actor=operator
        )
    plane.sides.queue.arrived([row])
    (shown,) = await _seen(plane, [row])
    return shown
