"""Operators' routes for fleets and their workers."""

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from shlex import quote
from typing import Annotated, Literal, NamedTuple, TypeAlias

from fastapi import Path, Query, status
from pydantic import Field

from comfyfleet.api.admin import (
    AssignmentAnswer,
    FleetAnswer,
    FleetDetails,
    FleetPrompts,
    FleetPromptsAnswer,
    Fleets,
    FleetSecret,
    NewKey,
    ReadingAnswer,
    Readings,
    Revoked,
    SwitchAnswer,
    WorkerAnswer,
    WorkerDetail,
    WorkerJob,
    Workers,
    WorkerSeen,
)
from comfyfleet.api.console import Matrix, MatrixWorker, MatrixWorkflow
from comfyfleet.api.worker import BackendFacts
from comfyfleet.errors import InvalidInput
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import RegisteredWorkflow, WorkflowVersion
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import actions
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import (
    AssignedWorkflow,
    BackendSummary,
    Fleet,
    FleetWorker,
    StoredReading,
)
from comfyfleet.server.gateway.offers import offer_cache
from comfyfleet.server.http.admin.auth import (
    PAGE_MAX,
    Body,
    OperatorDep,
    admin_router,
)
from comfyfleet.server.http.deps import NowDep, PlaneDep
from comfyfleet.server.jobs.finish import requeue_worker
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.pipelines.run_state import request_wake
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch, RequeueReason
from comfyfleet.server.queue.switch_costs import Estimate
from comfyfleet.server.registration import require_worker
from comfyfleet.server.secrets import hash_key, new_key

log = logging.getLogger(__name__)
router = admin_router()
READINGS_MAX = 3000
HELD_SHOWN_MAX = 5_000
WorkerId = Annotated[str, Path(description="The worker's id.")]


class Drain(Body):
    is_draining: bool = Field(default=True, description="False has the same effect as undrain.")


class RotateKey(Body):
    now: bool = Field(
        default=False,
        description="Whether the current key becomes invalid immediately. Otherwise, the worker "
        "gets the new key with its next response, and both keys work until it uses the new one.",
    )


@router.get("/workers")
async def list_workers(
    plane: PlaneDep,
    now: NowDep,
    fleet: Annotated[
        str | None, Query(description="Only workers of this fleet, as SLUG/STAGE.")
    ] = None,
    after: Annotated[
        str | None, Query(pattern=r"^[^\x00]+$", description="Only workers after this id.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = PAGE_MAX,
) -> Workers:
    async with plane.central.read() as tx:
        workers = await fleets.workers_of(
            tx,
            await _fleet_by_name(tx, fleet) if fleet is not None else None,
            after_worker_id=after,
            limit=limit + 1,
        )
        page = workers[:limit]
        names = [worker.worker_id for worker in page]
        facts = WorkersSeen(
            backends=await fleets.backends_of(tx, names),
            readings=await fleets.latest_readings(tx, names),
            held=await dispatch.held_by_any(tx, names, limit=HELD_SHOWN_MAX),
            leases=await dispatch.count_leases(tx, names),
            slugs={
                workflow.id: workflow.slug
                for workflow in await catalog.list_workflows(tx, with_open=True)
            },
        )
    following = page[-1].worker_id if len(workers) > limit else None
    return Workers(
        workers=[_worker_seen(worker, facts, plane, now) for worker in page], next=following
    )


class WorkersSeen(NamedTuple):
    """Facts about the workers on a page, by worker id. `slugs` maps workflow ids to slugs."""

    backends: Mapping[str, BackendSummary]
    readings: Mapping[str, StoredReading]
    held: Mapping[str, Sequence[Dispatch]]
    leases: Mapping[str, int]
    slugs: Mapping[int, str]


def _worker_seen(
    worker: FleetWorker, seen: WorkersSeen, plane: ControlPlane, now: datetime
) -> WorkerSeen:
    backend = seen.backends.get(worker.worker_id)
    reading = seen.readings.get(worker.worker_id)
    leases = seen.leases.get(worker.worker_id, 0)
    return WorkerSeen(
        **_worker_answer(worker, leases, plane, now).model_dump(),
        backend_kind=backend.kind if backend else None,
        backend_version=backend.version if backend else None,
        gpu=backend.gpu if backend else None,
        gpu_memory_bytes=backend.gpu_memory_bytes if backend else None,
        reading=reading.reading if reading else None,
        read_at=reading.at if reading else None,
        jobs=[_worker_job(plane, row, seen.slugs) for row in seen.held.get(worker.worker_id, ())],
    )


def _worker_job(plane: ControlPlane, row: Dispatch, slugs: Mapping[int, str]) -> WorkerJob:
    progress = plane.context.caches.progress.of(row.lease_token)
    return WorkerJob(
        job_id=row.job_id,
        dispatch_id=row.id,
        tenant_id=row.tenant_id,
        workflow=slugs.get(row.lane.workflow_id, "?"),
        attempt=row.attempts,
        started_at=row.started_at,
        percent=progress.percent if progress else None,
        node=progress.node if progress else None,
    )


MATRIX_WORKERS_MAX = MATRIX_WORKFLOWS_MAX = 200


@router.get("/matrix")
async def matrix(plane: PlaneDep, now: NowDep) -> Matrix:
    """Returns the workflows that each worker can run, and the nodes and models that it lacks for the
    other workflows of its fleet."""
    offline_after = plane.settings.offline_after_seconds
    async with plane.central.read() as tx:
        workers = await fleets.workers_of(tx, None, limit=MATRIX_WORKERS_MAX + 1)
        facts = await fleets.facts_of(tx, workers[:MATRIX_WORKERS_MAX])
        workflows = await catalog.list_workflows(tx)
        versions = {
            workflow.id: await catalog.get_version(tx, workflow)
            for workflow in workflows[:MATRIX_WORKFLOWS_MAX]
        }
        assigned = await fleets.assignments(tx)
        names = {fleet.id: fleet.name for fleet in await fleets.list_fleets(tx)}
    registered = {workflow.id: workflow for workflow in workflows if workflow.id in versions}
    rows = []
    for worker in workers[:MATRIX_WORKERS_MAX]:
        mine = [
            registered[assignment.workflow_id]
            for assignment in assigned.get(worker.fleet_id, ())
            if assignment.workflow_id in registered
            and (worker.workflow_ids is None or assignment.workflow_id in worker.workflow_ids)
        ]
        state = worker.state_at(now, offline_after_seconds=offline_after)
        rows.append(_matrix_row(worker, state, mine, versions, facts))
    is_whole = len(workers) <= MATRIX_WORKERS_MAX and len(workflows) <= MATRIX_WORKFLOWS_MAX
    columns = [_matrix_column(workflow, rows, assigned, names) for workflow in registered.values()]
    return Matrix(workflows=columns, workers=rows, is_whole=is_whole)


def _matrix_row(
    worker: FleetWorker,
    state: str,
    workflows: Sequence[RegisteredWorkflow],
    versions: Mapping[int, WorkflowVersion],
    facts: Mapping[str, BackendFacts],
) -> MatrixWorker:
    able: list[str] = []
    unknown: list[str] = []
    missing: dict[str, dict[str, list[str]]] = {}
    for workflow in workflows:
        lacks = service.missing_by_worker(workflow, versions[workflow.id], [worker], facts)
        lack = lacks.get(worker.worker_id)
        if lack:
            missing[workflow.slug] = lack.as_json()
        else:
            (unknown if lack is None else able).append(workflow.slug)
    return MatrixWorker(
        worker_id=worker.worker_id,
        fleet=worker.fleet_name,
        state=state,
        can_run=able,
        missing=missing,
        unknown=unknown,
    )


def _matrix_column(
    workflow: RegisteredWorkflow,
    rows: Iterable[MatrixWorker],
    assigned: Mapping[int, Sequence[AssignedWorkflow]],
    names: Mapping[int, str],
) -> MatrixWorkflow:
    mine = [
        names[fleet_id]
        for fleet_id, fleet_workflows in assigned.items()
        if fleet_id in names
        and any(assignment.workflow_id == workflow.id for assignment in fleet_workflows)
    ]
    online = [row for row in rows if row.fleet in mine and row.state == "online"]
    return MatrixWorkflow(
        workflow=workflow.slug,
        fleets=sorted(mine),
        able=sum(workflow.slug in row.can_run for row in online),
        online=len(online),
    )


@router.get("/workers/{worker_id}", name="show")
async def show_worker(worker_id: WorkerId, plane: PlaneDep, now: NowDep) -> WorkerDetail:
    async with plane.central.read() as tx:
        worker = await fleets.get_worker(tx, worker_id)
        facts = await fleets.facts_of(tx, [worker])
        since = now - timedelta(hours=plane.settings.reading_keep_hours)
        readings = await fleets.readings(tx, worker_id, since=since, limit=1)
        workflows = await fleets.workflows_of(tx, worker)
        leases = await dispatch.count_leases(tx, [worker_id])
    return WorkerDetail(
        **_worker_answer(worker, leases.get(worker_id, 0), plane, now).model_dump(),
        workflows=workflows,
        backend=facts.get(worker_id),
        reading=readings[0].reading if readings else None,
    )


@router.get("/workers/{worker_id}/readings")
async def readings(
    worker_id: WorkerId,
    plane: PlaneDep,
    now: NowDep,
    hours: Annotated[float, Query(gt=0, le=24 * 31)] = 1,
    points: Annotated[
        int,
        Query(
            ge=1,
            le=READINGS_MAX,
            description="Maximum number of readings, which are picked at equal intervals.",
        ),
    ] = READINGS_MAX,
) -> Readings:
    """Returns a worker's readings of GPU, memory, temperature, CPU and disk over time, at most one
    per 30 seconds."""
    async with plane.central.read() as tx:
        await fleets.get_worker(tx, worker_id)
        stored = await fleets.readings(
            tx, worker_id, since=now - timedelta(hours=hours), limit=READINGS_MAX
        )
    picked = stored[:: math.ceil(len(stored) / points) or 1]
    return Readings(readings=[ReadingAnswer(at=row.at, reading=row.reading) for row in picked])


@router.post("/workers/{worker_id}/approve")
async def approve(
    worker_id: WorkerId, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> WorkerAnswer:
    """Approves a pending or revoked worker."""
    return await _change_worker(plane, worker_id, "approve", fleets.approve_worker, operator, now)


@router.post("/workers/{worker_id}/revoke")
async def revoke(
    worker_id: WorkerId, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> Revoked:
    """Revokes a worker's key and id immediately, and requeues its jobs."""

    async def change(tx: Tx, worker: FleetWorker) -> FleetWorker:
        return await fleets.revoke_worker(tx, worker, now=now)

    answer = await _change_worker(plane, worker_id, "revoke", change, operator, now)
    requeued = await requeue_worker(plane.context, worker_id, RequeueReason.REVOKED)
    hint = (
        f"The worker can join again under another id if it knows the secret of {answer.fleet}. "
        "If you don't trust this worker, rotate the secret as well."
    )
    return Revoked(**answer.model_dump(), requeued=requeued, hint=hint)


@router.post("/workers/{worker_id}/drain")
async def drain(
    worker_id: WorkerId,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
    body: Drain = Drain(),  # noqa: B008  frozen
) -> WorkerAnswer:
    """Drains a worker. It finishes its current jobs and gets no new ones."""
    if not body.is_draining:
        return await undrain(worker_id, plane, now, operator)
    return await _change_worker(plane, worker_id, "drain", fleets.drain_worker, operator, now)


@router.post("/workers/{worker_id}/undrain")
async def undrain(
    worker_id: WorkerId, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> WorkerAnswer:
    """Ends draining, so that the worker gets jobs again."""

    async def change(tx: Tx, worker: FleetWorker) -> FleetWorker:
        return await fleets.drain_worker(tx, worker, is_draining=False)

    return await _change_worker(plane, worker_id, "undrain", change, operator, now)


@router.post("/workers/{worker_id}/rotate-token")
async def rotate_token(
    worker_id: WorkerId,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
    body: RotateKey = RotateKey(),  # noqa: B008  frozen
) -> NewKey:
    """Creates a new key for a worker, which is shown only once. A running worker gets it
    automatically."""
    key = new_key()

    async def change(tx: Tx, worker: FleetWorker) -> FleetWorker:
        await fleets.rotate_key(tx, worker, key=key, at_once=body.now)
        return worker

    await _change_worker(plane, worker_id, "rotate_key", change, operator, now)
    return NewKey(worker_id=worker_id, token=key)


async def _change_worker(
    plane: ControlPlane,
    worker_id: str,
    action: str,
    change: Callable[[Tx, FleetWorker], Awaitable[FleetWorker]],
    operator: str,
    now: datetime,
) -> WorkerAnswer:
    async with plane.central.transaction() as tx:
        worker = await change(tx, await require_worker(tx, worker_id, now=now))
        await record_audit(tx, operator, action, worker.subject, now)
        leases = await dispatch.count_leases(tx, [worker_id])
    # Wakes the worker's pending poll, so that the new state applies to it.
    plane.queue.order([worker_id])
    request_wake(plane.context)
    return _worker_answer(worker, leases.get(worker_id, 0), plane, now)


async def _fleet_by_name(tx: Tx, name: str) -> Fleet:
    slug, slash, stage = name.partition("/")
    if not slash:
        raise InvalidInput("fleet must have the form SLUG/STAGE", field="fleet")
    return await fleets.get_fleet(tx, slug, stage)


def _worker_answer(
    worker: FleetWorker, leases: int, plane: ControlPlane, now: datetime
) -> WorkerAnswer:
    return WorkerAnswer(
        worker_id=worker.worker_id,
        fleet=worker.fleet_name,
        state=worker.state_at(now, offline_after_seconds=plane.settings.offline_after_seconds),
        problem=worker.problem,
        is_approved=worker.is_approved,
        is_draining=worker.is_draining,
        current_load=worker.load_with(leases),
        max_concurrency=worker.max_concurrency,
        capabilities=sorted(worker.capabilities),
        providers=list(worker.providers),
        models_loaded=list(worker.models_loaded),
        registration_source=worker.registration_source,
        protocol_version=worker.protocol_version,
        last_seen_at=worker.last_seen_at,
        silent_since=worker.silent_since(now, unseen_seconds_max=plane.settings.unseen_seconds_max),
        created_at=worker.created_at,
    )


Slug = Annotated[str, Path(description="The fleet's slug.")]
Stage = Annotated[str, Path(description="The fleet's stage, such as production.")]
Approval: TypeAlias = Literal["auto", "manual"]


class NewFleet(Body):
    slug: str = Field(description="Up to 60 lowercase letters, digits, hyphens and underscores.")
    stage: str = Field(
        default="production",
        description="The stage. Several fleets can have the same slug and different stages.",
    )
    max_workers: int | None = Field(
        default=None,
        description="Maximum number of workers. The default is COMFYFLEET_MAX_FLEET_WORKERS.",
    )

    approval: Approval = Field(
        default="auto",
        description="With `manual`, a new worker gets no jobs until an operator approves it.",
    )


class Cap(Body):
    max_workers: int | None = Field(
        description="Maximum number of workers. null means COMFYFLEET_MAX_FLEET_WORKERS."
    )


class StartsWithin(Body):
    seconds: int | None = Field(
        description="Seconds that jobs may wait for machines that start on demand. null means "
        "COMFYFLEET_NO_BACKEND_SECONDS."
    )


class WantedApproval(Body):
    approval: Approval = Field(
        description="How workers that join later are approved: `auto` or `manual`."
    )


class WantedWorkflows(Body):
    workflow_slugs: list[str] = Field(
        description="The complete list of workflows that the fleet runs.", max_length=10_000
    )


@router.post("/fleets", status_code=status.HTTP_201_CREATED)
async def create(
    body: NewFleet, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> FleetSecret:
    """Creates a fleet. Its secret is shown only once, because only a hash is stored."""
    secret = new_key()
    async with plane.central.transaction() as tx:
        fleet = await fleets.create_fleet(
            tx,
            slug=body.slug,
            stage=body.stage,
            secret_hash=hash_key(secret),
            max_workers=body.max_workers,
            approval=body.approval,
            now=now,
        )
        await record_audit(
            tx,
            operator,
            "create_fleet",
            fleet.subject,
            now,
            max_workers=body.max_workers,
            approval=body.approval,
        )
    join = join_command(plane, fleet.slug, fleet.stage, secret)
    return FleetSecret(slug=fleet.slug, stage=fleet.stage, secret=secret, join=join)


@router.get("/fleets")
async def list_fleets(plane: PlaneDep) -> Fleets:
    async with plane.central.read() as tx:
        answers = [await _fleet_answer(tx, fleet) for fleet in await fleets.list_fleets(tx)]
    return Fleets(fleets=answers)


@router.get("/fleets/{slug}/{stage}", name="show")
async def show_fleet(slug: Slug, stage: Stage, plane: PlaneDep) -> FleetDetails:
    """Returns a fleet with the cost of switching to each of its models."""
    async with plane.central.read() as tx:
        fleet = await fleets.get_fleet(tx, slug, stage)
        answer = await _fleet_answer(tx, fleet)
        costs = await dispatch.switch_costs(tx, fleet_id=fleet.id)
    switches = [_switch_answer(model, cost) for (_, model), cost in sorted(costs.items())]
    return FleetDetails(
        **answer.model_dump(), join=join_command(plane, slug, stage), model_switches=switches
    )


def join_command(plane: ControlPlane, slug: str, stage: str, secret: str | None = None) -> str:
    """Returns the shell commands that start a worker next to a ComfyUI server.

    Without a secret, the commands contain a placeholder.
    """
    own = "" if stage == "production" else f" --stage {quote(stage)}"
    return (
        f"export COMFYFLEET_FLEET_SECRET={secret or 'SECRET'}\n"
        f"comfyfleet worker --control {quote(plane.settings.public_url)} --fleet {quote(slug)}{own} "
        "--backend http://127.0.0.1:8188"
    )


@router.post("/fleets/{slug}/{stage}/rotate-secret")
async def rotate_secret(
    slug: Slug, stage: Stage, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> FleetSecret:
    """Creates a new secret for a fleet. The old secret becomes invalid. Workers that have already
    joined aren't affected."""
    secret = new_key()
    async with plane.central.transaction() as tx:
        fleet = await fleets.rotate_secret(
            tx, await fleets.get_fleet(tx, slug, stage), secret_hash=hash_key(secret)
        )
        await record_audit(tx, operator, "rotate_secret", fleet.subject, now)
    join = join_command(plane, slug, stage, secret)
    return FleetSecret(slug=slug, stage=stage, secret=secret, join=join)


@router.put("/fleets/{slug}/{stage}/starts-within")
async def set_starts_within(
    slug: Slug,
    stage: Stage,
    body: StartsWithin,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
) -> FleetAnswer:
    """Sets how many seconds the fleet's machines may take to start on demand.

    During that time, graphs, pipelines and commands keep waiting for a job even if no worker can
    run it.
    """
    fleet = await actions.set_starts_within(
        plane.central, slug, stage, seconds=body.seconds, operator=operator, now=now
    )
    async with plane.central.read() as tx:
        return await _fleet_answer(tx, fleet)


@router.put("/fleets/{slug}/{stage}/cap")
async def set_cap(
    slug: Slug, stage: Stage, body: Cap, plane: PlaneDep, now: NowDep, operator: OperatorDep
) -> FleetAnswer:
    """Sets the maximum number of workers. Workers above a lower maximum stay, but no more can
    join."""
    async with plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, slug, stage)
        fleet = await fleets.set_cap(tx, fleet, max_workers=body.max_workers)
        await record_audit(
            tx, operator, "set_cap", fleet.subject, now, max_workers=body.max_workers
        )
        return await _fleet_answer(tx, fleet)


@router.put("/fleets/{slug}/{stage}/approval")
async def set_approval(
    slug: Slug,
    stage: Stage,
    body: WantedApproval,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
) -> FleetAnswer:
    """Sets whether new workers are approved automatically or by an operator."""
    async with plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, slug, stage)
        fleet = await fleets.set_approval(tx, fleet, approval=body.approval)
        await record_audit(tx, operator, "set_approval", fleet.subject, now, approval=body.approval)
        return await _fleet_answer(tx, fleet)


@router.put("/fleets/{slug}/{stage}/workflows")
async def assign(
    slug: Slug,
    stage: Stage,
    body: WantedWorkflows,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
) -> AssignmentAnswer:
    """Replaces the list of workflows that the fleet runs.

    If workers have reported their nodes and models, and none of them can run one of the workflows,
    the request fails with 422 `refused`, and `details.missing` lists what is missing. If no worker
    has reported yet, the request succeeds with a warning in `warnings`.
    """
    async with plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, slug, stage)
        before = await fleets.assigned_to(tx, fleet)
        assignment, warnings = await service.assign_workflows(
            tx, fleet, body.workflow_slugs, now=now
        )
        after = await fleets.assigned_to(tx, fleet)
        answer = AssignmentAnswer(
            slug=slug,
            stage=stage,
            workflows=_slugs(after),
            added=_slugs(item for item in after if item.workflow_id in assignment.added),
            removed=_slugs(item for item in before if item.workflow_id in assignment.removed),
            warnings=warnings,
        )
        await record_audit(
            tx, operator, "assign", fleet.subject, now, added=answer.added, removed=answer.removed
        )
        workers = await fleets.workers_of(tx, fleet)
    # Wakes pending polls, so that the new assignment applies to them.
    plane.queue.order(worker.worker_id for worker in workers)
    request_wake(plane.context)
    return answer


class WantedPrompts(FleetPrompts, Body):
    """The complete settings for prompts of ComfyUI clients. Omitted fields are reset to their
    defaults."""


@router.get("/fleets/{slug}/{stage}/prompts")
async def show_prompts(slug: Slug, stage: Stage, plane: PlaneDep) -> FleetPromptsAnswer:
    """Returns the fleet's settings for prompts of ComfyUI clients."""
    async with plane.central.read() as tx:
        fleet = await fleets.get_fleet(tx, slug, stage)
        return await _prompts(tx, fleet)


@router.put("/fleets/{slug}/{stage}/prompts")
async def set_prompts(
    slug: Slug,
    stage: Stage,
    body: WantedPrompts,
    plane: PlaneDep,
    now: NowDep,
    operator: OperatorDep,
) -> FleetPromptsAnswer:
    """Sets whether the fleet runs prompts of ComfyUI clients, and their limits and price.

    Prompts that are already queued keep their price. The response contains a `warning` if prompts
    cost less than the fleet's most expensive workflow.
    """
    async with plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, slug, stage)
        fleet = await service.set_prompt_terms(tx, fleet, body, now=now)
        terms = await _prompts(tx, fleet)
        details = terms.model_dump(mode="json", exclude={"warning"})
        await record_audit(tx, operator, "set_prompts", fleet.subject, now, **details)
        workers = await fleets.workers_of(tx, fleet)
    if terms.warning:
        log.warning("fleet %s: %s", fleet.name, terms.warning)
    offer_cache(plane).forget()
    # Wakes pending polls, because the fleet's open workflow may just have been created.
    plane.queue.order(worker.worker_id for worker in workers)
    return terms


async def _prompts(tx: Tx, fleet: Fleet) -> FleetPromptsAnswer:
    terms = fleet.gateway or {"is_open": False}
    return FleetPromptsAnswer.model_validate(
        {**terms, "warning": await service.price_warning(tx, fleet)}
    )


async def _fleet_answer(tx: Tx, fleet: Fleet) -> FleetAnswer:
    return FleetAnswer(
        slug=fleet.slug,
        stage=fleet.stage,
        max_workers=fleet.max_workers,
        approval=fleet.approval,
        starts_within_seconds=fleet.starts_within_seconds,
        workers=await fleets.count_workers(tx, fleet),
        workflows=_slugs(await fleets.assigned_to(tx, fleet)),
        object_info_hash=fleet.object_info_hash,
        created_at=fleet.created_at,
    )


def _switch_answer(model: str, estimate: Estimate) -> SwitchAnswer:
    return SwitchAnswer(
        model=model,
        seconds=round(estimate.seconds, 3),
        run_seconds=round(estimate.run_seconds, 3),
        runs=min(estimate.stayed, estimate.switched),
        is_free=estimate.is_free,
    )


def _slugs(assigned: Iterable[AssignedWorkflow]) -> list[str]:
    """Returns the slugs without the fleet's open workflow, which has no public name."""
    return [item.slug for item in assigned if not item.is_open]
