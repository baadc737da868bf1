"""Registered workflows: looked at, chosen, held back."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any

from fastapi import Body as InBody
from fastapi import Path, Query, status
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.effects import assigning, documents
from comfyfleet.effects import service as effects
from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.effects.model import Workflow
from comfyfleet.fleets import service as fleets
from comfyfleet.http.admin.properties import PropertyAnswer, answer_of
from comfyfleet.http.admin.registering import NewWorkflow, RegisteredVersion, TermsBody, register
from comfyfleet.http.admin.routing import Answer, Body, Operator, admin_router
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.http.values import Tokens, VersionNumber
from comfyfleet.plane import Plane

router = admin_router()
Slug = Annotated[str, Path(description="The workflow's slug.")]
Number = Annotated[VersionNumber | None, Query(description="Else the one that new jobs get.")]


class WorkflowAnswer(Answer):
    slug: str
    version: int = Field(description="The one that new jobs get.")
    is_active: bool
    is_paused: bool
    required_capabilities: list[str]
    run_limit_seconds: int
    price_tokens: Tokens | None = Field(
        description="Of a job in customers' graphs and pipelines; null: it is not offered there."
    )
    fleets: list[str] = Field(description="SLUG/STAGE of those that it is assigned to.")
    created_at: datetime


class Workflows(Answer):
    workflows: list[WorkflowAnswer]


class Model(Answer):
    input: str = Field(description="Class.input; empty where the node type isn't known.")
    file: str


class WorkflowDetail(WorkflowAnswer):
    kind: str = Field(description="workflow or prompt: what its document is.")
    document_hash: str
    output_node_id: str | None
    properties: list[PropertyAnswer]
    node_types: list[str]
    models: list[Model]
    versions: list[int]


class Chosen(Body):
    version: VersionNumber | None = Field(
        default=None, description="The version that new jobs get."
    )
    break_effects: bool = Field(
        default=False, description="Though published effects don't fit it; they refuse jobs then."
    )


class AbleWorker(Answer):
    worker_id: str
    fleet: str
    can_run: bool
    missing: dict[str, list[str]] = Field(description="node_types, models and capabilities.")


class AbleWorkers(Answer):
    workers: list[AbleWorker] = Field(description="Those that have told what they have.")


@router.post("/workflows", status_code=status.HTTP_201_CREATED)
async def create(body: NewWorkflow, plane: GivenPlane, operator: Operator) -> RegisteredVersion:
    """Register a workflow or, under a slug that exists, its next version.

    Everything is checked first; 422 names the property and the node, and nothing is written.
    """
    return await register(body, plane, operator)


@router.get("/workflows")
async def list_workflows(plane: GivenPlane) -> Workflows:
    async with plane.central.look() as tx:
        found = [await _answer(tx, each) for each in await effects.all_of(tx)]
    return Workflows(workflows=found)


@router.get("/workflows/{slug}")
async def show(slug: Slug, plane: GivenPlane, version: Number = None) -> WorkflowDetail:
    async with plane.central.look() as tx:
        workflow = await effects.named(tx, slug)
        found = await effects.get_version(tx, workflow, version)
        return WorkflowDetail(
            **(await _answer(tx, workflow)).model_dump(),
            kind=found.kind,
            document_hash=found.document_hash,
            output_node_id=found.output_node_id,
            properties=[answer_of(each) for each in found.properties],
            node_types=list(found.node_types),
            models=[Model(input=each.input, file=each.file) for each in found.models],
            versions=[each.version for each in await effects.versions_of(tx, workflow)],
        )


@router.get("/workflows/{slug}/document")
async def document(slug: Slug, plane: GivenPlane, version: Number = None) -> dict[str, Any]:
    """As it was registered."""
    async with plane.central.look() as tx:
        found = await effects.get_version(tx, await effects.named(tx, slug), version)
    return await documents.read(plane.store, found)


@router.get("/workflows/{slug}/workers")
async def able_workers(slug: Slug, plane: GivenPlane, version: Number = None) -> AbleWorkers:
    """Which workers of its fleets can run it, and what is missing where."""
    async with plane.central.look() as tx:
        workflow = await effects.named(tx, slug)
        found = await effects.get_version(tx, workflow, version)
        rows = [
            AbleWorker(worker_id=name, fleet=fleet.name, can_run=not lack, missing=lack.as_json())
            for fleet in await fleets.fleets_with(tx, workflow.id)
            for name, lack in (await assigning.lacks_of(tx, fleet, workflow, found)).items()
        ]
    return AbleWorkers(workers=rows)


@router.patch("/workflows/{slug}")
async def change_terms(
    slug: Slug, body: TermsBody, plane: GivenPlane, now: GivenNow, operator: Operator
) -> WorkflowAnswer:
    """Capabilities, run limit and price, without a new version."""

    async def change(tx: Tx, workflow: Workflow) -> Workflow:
        return await effects.change_terms(tx, workflow, body.terms())

    details = body.model_dump(exclude_unset=True)
    return await _acted(plane, slug, "change_workflow", change, operator, now, details)


@router.post("/workflows/{slug}/activate")
async def activate(
    slug: Slug,
    plane: GivenPlane,
    now: GivenNow,
    operator: Operator,
    body: Annotated[Chosen | None, InBody()] = None,
) -> WorkflowAnswer:
    """Let new jobs use it, or another version of it."""
    version = body.version if body else None

    async def change(tx: Tx, workflow: Workflow) -> Workflow:
        if body and version is not None and not body.break_effects:
            wanted = await effects.get_version(tx, workflow, version)
            before = await effects.properties_in_use(tx, workflow.slug)
            await catalogue.require_unbroken(tx, workflow, wanted.properties, before)
        return await effects.activate(tx, workflow, version=version)

    return await _acted(plane, slug, "activate", change, operator, now, {"version": version})


@router.post("/workflows/{slug}/deactivate")
async def deactivate(
    slug: Slug, plane: GivenPlane, now: GivenNow, operator: Operator
) -> WorkflowAnswer:
    """No new jobs; those that wait stay where they are."""
    return await _acted(plane, slug, "deactivate", effects.deactivate, operator, now)


@router.post("/workflows/{slug}/pause")
async def pause(slug: Slug, plane: GivenPlane, now: GivenNow, operator: Operator) -> WorkflowAnswer:
    """Jobs are taken and wait; those that run are let end."""
    return await _acted(plane, slug, "pause", effects.pause, operator, now)


@router.post("/workflows/{slug}/resume")
async def resume(
    slug: Slug, plane: GivenPlane, now: GivenNow, operator: Operator
) -> WorkflowAnswer:
    return await _acted(plane, slug, "resume", effects.resume, operator, now)


async def _acted(
    plane: Plane,
    slug: str,
    action: str,
    change: Callable[[Tx, Workflow], Awaitable[Workflow]],
    operator: str,
    now: datetime,
    details: dict[str, Any] | None = None,
) -> WorkflowAnswer:
    async with plane.central.begin() as tx:
        workflow = await change(tx, await effects.named(tx, slug))
        await audit.record(
            tx, actor=operator, action=action, subject=workflow.subject, now=now, details=details
        )
        answer = await _answer(tx, workflow)
        concerned = [
            worker.worker_id
            for fleet in await fleets.fleets_with(tx, workflow.id)
            for worker in await fleets.workers_of(tx, fleet)
        ]
    # Those that wait for jobs ask anew, as what they now may run.
    plane.queue.order(concerned)
    return answer


async def _answer(tx: Tx, workflow: Workflow) -> WorkflowAnswer:
    return WorkflowAnswer(
        slug=workflow.slug,
        version=workflow.version,
        is_active=workflow.is_active,
        is_paused=workflow.is_paused,
        required_capabilities=sorted(workflow.required_capabilities),
        run_limit_seconds=workflow.run_limit_seconds,
        price_tokens=workflow.price_tokens,
        fleets=[each.name for each in await fleets.fleets_with(tx, workflow.id)],
        created_at=workflow.created_at,
    )
