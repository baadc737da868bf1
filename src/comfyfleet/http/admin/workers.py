"""Workers: looked at, held back, let go. They join by themselves, never by hand."""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import Path, Query
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.dispatch.model import Requeue
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Fleet, Worker
from comfyfleet.http.admin.routing import PAGE_MAX, Answer, Body, Operator, admin_router
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.jobs.ending import requeue_all_of
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.keys import new_key
from comfyfleet.plane import Plane
from comfyfleet.wire.messages import BackendFacts, Reading

router = admin_router()
READINGS_MAX = 3000
WorkerId = Annotated[str, Path(description="The worker's id.")]


class WorkerAnswer(Answer):
    worker_id: str
    fleet: str = Field(description="SLUG/STAGE")
    state: str = Field(description="online, offline, draining, pending or revoked")
    is_approved: bool
    is_draining: bool
    current_load: int
    max_concurrency: int
    capabilities: list[str]
    providers: list[str]
    models_loaded: list[str]
    registration_source: str
    protocol_version: int
    last_seen_at: datetime
    created_at: datetime


class Workers(Answer):
    workers: list[WorkerAnswer]
    next: str | None = Field(description="Ask on with after=next; null: that was all.")


class WorkerDetail(WorkerAnswer):
    workflows: list[str] = Field(description="What it may run, by its fleet's assignments.")
    backend: BackendFacts | None = Field(description="What its backend is and has.")
    reading: Reading | None = Field(description="Its machine's state when it last told.")


class ReadingAnswer(Answer):
    at: datetime
    reading: Reading


class Readings(Answer):
    readings: list[ReadingAnswer] = Field(description="The newest first.")


class Revoked(WorkerAnswer):
    requeued: int = Field(description="How many jobs went back to the queue.")
    hint: str = Field(description="What else may have to be done to keep it out.")


class RotateKey(Body):
    now: bool = Field(
        default=False,
        description="The key it has is dead at once. Else it is told the new one with its next "
        "answer, and has both until it uses that.",
    )


class NewKey(Answer):
    worker_id: str
    token: str = Field(description="The worker's new key, shown this once.")


@router.get("/workers")
async def list_workers(
    plane: GivenPlane,
    now: GivenNow,
    fleet: Annotated[str | None, Query(description="Only this one's, as SLUG/STAGE.")] = None,
    after: Annotated[
        str | None, Query(pattern=r"^[^\x00]+$", description="Only ids behind this one.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = PAGE_MAX,
) -> Workers:
    async with plane.central.look() as tx:
        found = await fleets.workers_of(
            tx,
            await _fleet(tx, fleet) if fleet is not None else None,
            after_worker_id=after,
            limit=limit + 1,
        )
    page = found[:limit]
    following = page[-1].worker_id if len(found) > limit else None
    return Workers(workers=[_answer(each, plane, now) for each in page], next=following)


@router.get("/workers/{worker_id}")
async def show(worker_id: WorkerId, plane: GivenPlane, now: GivenNow) -> WorkerDetail:
    async with plane.central.look() as tx:
        worker = await fleets.get_worker(tx, worker_id)
        facts = await fleets.facts_of(tx, [worker])
        since = now - timedelta(hours=plane.settings.reading_keep_hours)
        readings = await fleets.readings(tx, worker_id, since=since, limit=1)
        workflows = await fleets.workflows_of(tx, worker)
    return WorkerDetail(
        **_answer(worker, plane, now).model_dump(),
        workflows=workflows,
        backend=facts.get(worker_id),
        reading=readings[0].reading if readings else None,
    )


@router.get("/workers/{worker_id}/readings")
async def readings(
    worker_id: WorkerId,
    plane: GivenPlane,
    now: GivenNow,
    hours: Annotated[float, Query(gt=0, le=24 * 31)] = 1,
) -> Readings:
    """GPU, memory, temperature, CPU and disk over time, at most one each 30 s."""
    async with plane.central.look() as tx:
        await fleets.get_worker(tx, worker_id)
        found = await fleets.readings(
            tx, worker_id, since=now - timedelta(hours=hours), limit=READINGS_MAX
        )
    return Readings(readings=[ReadingAnswer(at=each.at, reading=each.reading) for each in found])


@router.post("/workers/{worker_id}/approve")
async def approve(
    worker_id: WorkerId, plane: GivenPlane, now: GivenNow, operator: Operator
) -> WorkerAnswer:
    """It may take jobs: one that waits for approval, or that was revoked."""
    return await _acted(plane, worker_id, "approve", fleets.approve, operator, now)


@router.post("/workers/{worker_id}/revoke")
async def revoke(
    worker_id: WorkerId, plane: GivenPlane, now: GivenNow, operator: Operator
) -> Revoked:
    """Its key is dead at once, its id lets nobody in again, and its jobs go to others."""

    async def change(tx: Tx, worker: Worker) -> Worker:
        return await fleets.revoke(tx, worker, now=now)

    answer = await _acted(plane, worker_id, "revoke", change, operator, now)
    requeued = await requeue_all_of(plane.sides, worker_id, Requeue.REVOKED)
    hint = (
        f"Who knows the secret of {answer.fleet} can join under another id: "
        "rotate it too if this worker is not to be trusted."
    )
    return Revoked(**answer.model_dump(), requeued=requeued, hint=hint)


@router.post("/workers/{worker_id}/drain")
async def drain(
    worker_id: WorkerId, plane: GivenPlane, now: GivenNow, operator: Operator
) -> WorkerAnswer:
    """It finishes what it runs and takes nothing new."""
    return await _acted(plane, worker_id, "drain", fleets.drain, operator, now)


@router.post("/workers/{worker_id}/undrain")
async def undrain(
    worker_id: WorkerId, plane: GivenPlane, now: GivenNow, operator: Operator
) -> WorkerAnswer:
    """It takes jobs again."""

    async def change(tx: Tx, worker: Worker) -> Worker:
        return await fleets.drain(tx, worker, is_draining=False)

    return await _acted(plane, worker_id, "undrain", change, operator, now)


@router.post("/workers/{worker_id}/rotate-token")
async def rotate_token(
    worker_id: WorkerId,
    plane: GivenPlane,
    now: GivenNow,
    operator: Operator,
    body: RotateKey = RotateKey(),  # noqa: B008  frozen
) -> NewKey:
    """A new key, shown this once; a worker that runs is told of it and goes on with it."""
    key = new_key()

    async def change(tx: Tx, worker: Worker) -> Worker:
        await fleets.rotate_key(tx, worker, key=key, at_once=body.now)
        return worker

    await _acted(plane, worker_id, "rotate_key", change, operator, now)
    return NewKey(worker_id=worker_id, token=key)


async def _acted(
    plane: Plane,
    worker_id: str,
    action: str,
    change: Callable[[Tx, Worker], Awaitable[Worker]],
    operator: str,
    now: datetime,
) -> WorkerAnswer:
    async with plane.central.begin() as tx:
        worker = await change(tx, await fleets.get_worker(tx, worker_id))
        await audit.record(tx, actor=operator, action=action, subject=worker.subject, now=now)
    # If it waits for a job it asks anew, as what it now is.
    plane.queue.order([worker_id])
    return _answer(worker, plane, now)


async def _fleet(tx: Tx, name: str) -> Fleet:
    slug, slash, stage = name.partition("/")
    if not slash:
        raise InvalidInput("a fleet is named SLUG/STAGE", field="fleet")
    return await fleets.get(tx, slug, stage)


def _state(worker: Worker, plane: Plane, now: datetime) -> str:
    if worker.revoked_at is not None:
        return "revoked"
    if not worker.is_approved:
        return "pending"
    if now - worker.last_seen_at > timedelta(seconds=plane.settings.offline_after_seconds):
        return "offline"
    return "draining" if worker.is_draining else "online"


def _answer(worker: Worker, plane: Plane, now: datetime) -> WorkerAnswer:
    return WorkerAnswer(
        worker_id=worker.worker_id,
        fleet=worker.fleet_name,
        state=_state(worker, plane, now),
        is_approved=worker.is_approved,
        is_draining=worker.is_draining,
        current_load=worker.current_load,
        max_concurrency=worker.max_concurrency,
        capabilities=sorted(worker.capabilities),
        providers=list(worker.providers),
        models_loaded=list(worker.models_loaded),
        registration_source=worker.registration_source,
        protocol_version=worker.protocol_version,
        last_seen_at=worker.last_seen_at,
        created_at=worker.created_at,
    )
