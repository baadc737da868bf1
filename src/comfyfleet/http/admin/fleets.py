"""Fleets: made, capped, given new secrets, and workflows to run."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from fastapi import Path, status
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.switch_costs import Estimate
from comfyfleet.effects import assigning
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Assigned, Fleet
from comfyfleet.http.admin.routing import Answer, Body, Operator, admin_router
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.kernel.keys import hashed, new_key

router = admin_router()
Slug = Annotated[str, Path(description="The fleet's slug.")]
Stage = Annotated[str, Path(description="Its stage, such as production.")]
Approval: TypeAlias = Literal["auto", "manual"]


class NewFleet(Body):
    slug: str = Field(description="Lower-case letters, digits, - and _; at most 60.")
    stage: str = Field(
        default="production", description="Fleets of one slug may have several stages."
    )
    max_workers: int | None = Field(
        default=None, description="At most so many workers; else COMFYFLEET_MAX_FLEET_WORKERS."
    )

    approval: Approval = Field(
        default="auto",
        description="manual: who joins gets no job until an operator approves it.",
    )


class FleetSecret(Answer):
    slug: str
    stage: str
    secret: str = Field(description="Workers join with it. It is shown this once.")


class Cap(Body):
    max_workers: int | None = Field(description="null: as many as the settings allow.")


class WantedApproval(Body):
    approval: Approval = Field(description="auto or manual, for those who join from now on.")


class WantedWorkflows(Body):
    workflow_slugs: list[str] = Field(description="These and no others.", max_length=10_000)


class FleetAnswer(Answer):
    slug: str
    stage: str
    max_workers: int | None
    approval: str
    workers: int = Field(description="How many have joined.")
    workflows: list[str] = Field(description="Slugs of the workflows assigned to it.")
    object_info_hash: str | None = Field(description="Of what its backends last reported.")
    created_at: datetime


class SwitchAnswer(Answer):
    model: str = Field(description="A checkpoint or diffusion model.")
    seconds: float = Field(description="What a switch to it costs, at most.")
    run_seconds: float = Field(description="How long its runs take without a switch.")
    runs: int = Field(description="As many of each kind were compared.")
    is_free: bool = Field(description="So little that jobs of it go by the order of arrival.")


class FleetDetails(FleetAnswer):
    model_switches: list[SwitchAnswer] = Field(description="As far as finished runs tell.")


class Fleets(Answer):
    fleets: list[FleetAnswer]


class AssignmentAnswer(Answer):
    slug: str
    stage: str
    workflows: list[str]
    added: list[str]
    removed: list[str]
    warnings: list[str] = Field(description="What could not be checked.")


@router.post("/fleets", status_code=status.HTTP_201_CREATED)
async def create(
    body: NewFleet, plane: GivenPlane, now: GivenNow, operator: Operator
) -> FleetSecret:
    """Make a fleet. Its secret is shown this once, and stored hashed."""
    secret = new_key()
    async with plane.central.begin() as tx:
        fleet = await fleets.create(
            tx,
            slug=body.slug,
            stage=body.stage,
            secret_hash=hashed(secret),
            max_workers=body.max_workers,
            approval=body.approval,
            now=now,
        )
        details = {"max_workers": body.max_workers, "approval": body.approval}
        await audit.record(
            tx,
            actor=operator,
            action="create_fleet",
            subject=fleet.subject,
            now=now,
            details=details,
        )
    return FleetSecret(slug=fleet.slug, stage=fleet.stage, secret=secret)


@router.get("/fleets")
async def list_fleets(plane: GivenPlane) -> Fleets:
    async with plane.central.look() as tx:
        found = [await _answer(tx, fleet) for fleet in await fleets.all_of(tx)]
    return Fleets(fleets=found)


@router.get("/fleets/{slug}/{stage}")
async def show(slug: Slug, stage: Stage, plane: GivenPlane) -> FleetDetails:
    """With what a switch to each of its models costs."""
    async with plane.central.look() as tx:
        fleet = await fleets.get(tx, slug, stage)
        answer = await _answer(tx, fleet)
        costs = await dispatch.switch_costs(tx, fleet_id=fleet.id)
    switches = [_switch(model, each) for (_, model), each in sorted(costs.items())]
    return FleetDetails(**answer.model_dump(), model_switches=switches)


@router.post("/fleets/{slug}/{stage}/rotate-secret")
async def rotate_secret(
    slug: Slug, stage: Stage, plane: GivenPlane, now: GivenNow, operator: Operator
) -> FleetSecret:
    """A new secret; the old one lets nobody in any more. Workers that have joined go on."""
    secret = new_key()
    async with plane.central.begin() as tx:
        fleet = await fleets.rotate_secret(
            tx, await fleets.get(tx, slug, stage), secret_hash=hashed(secret)
        )
        await audit.record(
            tx, actor=operator, action="rotate_secret", subject=fleet.subject, now=now
        )
    return FleetSecret(slug=slug, stage=stage, secret=secret)


@router.put("/fleets/{slug}/{stage}/cap")
async def set_cap(
    slug: Slug, stage: Stage, body: Cap, plane: GivenPlane, now: GivenNow, operator: Operator
) -> FleetAnswer:
    """A lower cap sends nobody away; it lets nobody else in."""
    async with plane.central.begin() as tx:
        fleet = await fleets.get(tx, slug, stage)
        fleet = await fleets.set_cap(tx, fleet, max_workers=body.max_workers)
        details = {"max_workers": body.max_workers}
        await audit.record(
            tx, actor=operator, action="set_cap", subject=fleet.subject, now=now, details=details
        )
        return await _answer(tx, fleet)


@router.put("/fleets/{slug}/{stage}/approval")
async def set_approval(
    slug: Slug,
    stage: Stage,
    body: WantedApproval,
    plane: GivenPlane,
    now: GivenNow,
    operator: Operator,
) -> FleetAnswer:
    """Whether workers that join are approved at once, or by an operator."""
    async with plane.central.begin() as tx:
        fleet = await fleets.get(tx, slug, stage)
        fleet = await fleets.set_approval(tx, fleet, approval=body.approval)
        details = {"approval": body.approval}
        await audit.record(
            tx,
            actor=operator,
            action="set_approval",
            subject=fleet.subject,
            now=now,
            details=details,
        )
        return await _answer(tx, fleet)


@router.put("/fleets/{slug}/{stage}/workflows")
async def assign(
    slug: Slug,
    stage: Stage,
    body: WantedWorkflows,
    plane: GivenPlane,
    now: GivenNow,
    operator: Operator,
) -> AssignmentAnswer:
    """Set which workflows the fleet runs: these and no others.

    Refused (422 `refused`, with `details.missing`) if workers have told what they have and none of
    them can run one of these; if none has told, it is taken and `warnings` says so.
    """
    async with plane.central.begin() as tx:
        fleet = await fleets.get(tx, slug, stage)
        before = await fleets.assigned_to(tx, fleet)
        assignment, warnings = await assigning.assign(tx, fleet, body.workflow_slugs, now=now)
        after = await fleets.assigned_to(tx, fleet)
        answer = AssignmentAnswer(
            slug=slug,
            stage=stage,
            workflows=_slugs(after),
            added=_slugs(each for each in after if each.workflow_id in assignment.added),
            removed=_slugs(each for each in before if each.workflow_id in assignment.removed),
            warnings=warnings,
        )
        details = {"added": answer.added, "removed": answer.removed}
        await audit.record(
            tx, actor=operator, action="assign", subject=fleet.subject, now=now, details=details
        )
        workers = await fleets.workers_of(tx, fleet)
    # Those that wait for jobs ask anew, as what they now may run.
    plane.queue.order(worker.worker_id for worker in workers)
    return answer


async def _answer(tx: Tx, fleet: Fleet) -> FleetAnswer:
    return FleetAnswer(
        slug=fleet.slug,
        stage=fleet.stage,
        max_workers=fleet.max_workers,
        approval=fleet.approval,
        workers=await fleets.count_workers(tx, fleet),
        workflows=_slugs(await fleets.assigned_to(tx, fleet)),
        object_info_hash=fleet.object_info_hash,
        created_at=fleet.created_at,
    )


def _switch(model: str, known: Estimate) -> SwitchAnswer:
    return SwitchAnswer(
        model=model,
        seconds=round(known.seconds, 3),
        run_seconds=round(known.run_seconds, 3),
        runs=min(known.stayed, known.switched),
        is_free=known.is_free,
    )


def _slugs(assigned: Iterable[Assigned]) -> list[str]:
    """The open workflow is the fleet's own affair, and named by nobody."""
    return [each.slug for each in assigned if not each.is_open]
