"""Who may run what, and which sightings are worth a write. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from comfyfleet.fleets.model import Assigned, Lane, Sighting, Worker, after

SEEN_WRITE_EVERY = timedelta(seconds=10)
READING_EVERY = timedelta(seconds=30)


def may_run(worker: Worker, workflow: Assigned) -> bool:
    """Of its fleet's workflows; a worker that drains or was revoked may none."""
    return (
        worker.takes_jobs
        and workflow.is_runnable
        and (worker.workflow_ids is None or workflow.workflow_id in worker.workflow_ids)
        and workflow.required_capabilities <= worker.capabilities
    )


def lanes(
    worker: Worker, workflows: Iterable[Assigned], providers: Iterable[str]
) -> frozenset[Lane]:
    """Never a lane for 'any' workflow: what is not assigned is not run."""
    named = tuple(providers)
    return frozenset(
        Lane(workflow.workflow_id, worker.stage, provider)
        for workflow in workflows
        if may_run(worker, workflow)
        for provider in named
    )


def why_no_lanes(worker: Worker, workflows: Iterable[Assigned]) -> str:
    """The first reason, in the order in which an operator would look for it."""
    mine = [
        each
        for each in workflows
        if worker.workflow_ids is None or each.workflow_id in worker.workflow_ids
    ]
    if not worker.is_approved:
        return "this worker waits for an operator's approval"
    if worker.is_draining:
        return "this worker is draining"
    if not mine:
        return "no workflow is assigned to this worker"
    if not any(each.is_runnable for each in mine):
        return "all workflows assigned to this worker are paused or switched off"
    return "this worker lacks what its workflows need"


def by_lane(
    workers: Iterable[Worker], assigned: Mapping[int, Iterable[Assigned]]
) -> dict[Lane, frozenset[str]]:
    """The workers of each lane; `assigned` has the workflows of each fleet."""
    found: dict[Lane, set[str]] = {}
    for worker in workers:
        for lane in lanes(worker, assigned.get(worker.fleet_id, ()), worker.providers):
            found.setdefault(lane, set()).add(worker.worker_id)
    return {lane: frozenset(ids) for lane, ids in found.items()}


def part_of(unseen_seconds_max: float) -> timedelta:
    """How long a wait may go unnoticed, and a sighting unwritten: both together keep it online."""
    return timedelta(seconds=unseen_seconds_max / 3)


def is_worth_writing(
    worker: Worker, sighting: Sighting, now: datetime, every: timedelta = SEEN_WRITE_EVERY
) -> bool:
    """Its load and its models change all the time: they go along with the next write that is due."""
    is_due = now - worker.last_seen_at >= min(every, SEEN_WRITE_EVERY)
    if sighting.backend is not None or is_due:
        return True
    seen = after(worker, sighting, now)
    return (seen.capabilities, seen.providers, seen.max_concurrency) != (
        worker.capabilities,
        worker.providers,
        worker.max_concurrency,
    )
