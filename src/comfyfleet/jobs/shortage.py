"""Why nobody can run a job just now: the first thing that stands in the way, if anything does."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from comfyfleet.db import Tx
from comfyfleet.dispatch.model import Lane
from comfyfleet.effects import service as effects
from comfyfleet.effects.model import Version, Workflow
from comfyfleet.effects.models import models_of
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Worker
from comfyfleet.fleets.offers import Missing, ModelUse
from comfyfleet.jobs.model import Shortage, Submission
from comfyfleet.jobs.sides import Sides


@dataclass(frozen=True)
class Wanted:
    """What a job, or a workflow that might get jobs, needs of a backend."""

    workflow: Workflow
    lane: Lane
    node_types: Sequence[str] = ()
    models: Sequence[ModelUse] = ()


@dataclass(frozen=True)
class Ground:
    """Who is there for it at one moment."""

    wanted: Wanted
    fleets: Sequence[str]
    workers: Sequence[Worker]
    offline_before: datetime
    missing: Mapping[str, Missing] = field(default_factory=dict)  # by worker, if it lacks something

    def is_online(self, worker: Worker) -> bool:
        return worker.last_seen_at >= self.offline_before

    def can_run(self, worker: Worker) -> bool:
        """If it is there, and takes jobs."""
        return (
            self.wanted.lane.provider in worker.providers
            and self.wanted.workflow.required_capabilities <= worker.capabilities
            and worker.worker_id not in self.missing
        )


async def wanted_by(
    tx: Tx, lane: Lane, models: Iterable[ModelUse], version: int | None = None
) -> Wanted:
    """Of a job: its workflow's node types, and the models of its own prompt."""
    workflow = await effects.get(tx, lane.workflow_id)
    types: Sequence[str] = ()
    if not workflow.is_open:
        types = (await effects.get_version(tx, workflow, version)).node_types
    return Wanted(workflow, lane, types, tuple(models))


def wanted_of(workflow: Workflow, version: Version, lane: Lane) -> Wanted:
    """Of a workflow's usual job."""
    return Wanted(workflow, lane, version.node_types, version.models)


async def ground_for(tx: Tx, sides: Sides, wanted: Wanted) -> Ground:
    now, lane = sides.clock(), wanted.lane
    workers = await fleets.workers_for(tx, lane.workflow_id, stage=lane.stage)
    offers = await sides.abilities.offers(tx, workers, now=now)
    lacks = {name: offer.lacks(wanted.node_types, wanted.models) for name, offer in offers.items()}
    named = await fleets.fleets_with(tx, lane.workflow_id, stage=lane.stage)
    return Ground(
        wanted,
        [each.name for each in named],
        workers,
        now - timedelta(seconds=sides.settings.offline_after_seconds),
        {name: each for name, each in lacks.items() if each},
    )


async def shortage_for(sides: Sides, asked: Submission) -> Shortage | None:
    """Of a job that is submitted. Jobs alike are looked at once in a while, as they are many."""
    bound = asked.backend_affinity
    key = (asked.lane, asked.workflow_version, asked.model_set, bound)

    async def look() -> Shortage | None:
        async with sides.central.look() as tx:
            models = models_of(asked.prompt)
            wanted = await wanted_by(tx, asked.lane, models, asked.workflow_version)
            return shortage(await ground_for(tx, sides, wanted), bound)

    return await sides.shortages.get(key, look, now=sides.clock())


async def shortage_of(tx: Tx, sides: Sides, wanted: Wanted) -> Shortage | None:
    """None: somebody can run it, as far as anybody knows."""
    return shortage(await ground_for(tx, sides, wanted))


def shortage(ground: Ground, bound: str | None = None) -> Shortage | None:
    """`bound`: the worker or fleet that a job must be run by."""
    message = nobody_may(ground) or _bound_can_not(ground, bound) or nobody_can(ground)
    return None if message is None else Shortage(message, told_of(ground.wanted.workflow))


def told_of(workflow: Workflow) -> str:
    needed = listed(sorted(workflow.required_capabilities))
    which = f" (it needs {needed})" if needed else ""
    return f"No backend can run workflow {workflow.slug}{which} at the moment."


def nobody_may(ground: Ground) -> str | None:
    """Whatever state the workers are in."""
    slug, lane = ground.wanted.workflow.slug, ground.wanted.lane
    names = listed(ground.fleets)
    if not ground.fleets:
        return f"No fleet of stage {lane.stage} has workflow {slug} assigned."
    if not ground.workers:
        return f"No worker has workflow {slug}: fleet {names} has no workers."
    if not any(lane.provider in worker.providers for worker in ground.workers):
        return f"No worker of fleet {names} offers the provider {lane.provider}."
    required = ground.wanted.workflow.required_capabilities
    if not any(required <= worker.capabilities for worker in ground.workers):
        return f"No worker of fleet {names} has the capabilities {listed(sorted(required))}."
    return None


def _bound_can_not(ground: Ground, bound: str | None) -> str | None:
    if bound is None:
        return None
    slug = ground.wanted.workflow.slug
    named = [worker for worker in ground.workers if bound in worker.affinities]
    online = [worker for worker in named if ground.is_online(worker)]
    if not named:
        return f"It is bound to {bound}, which is not there or can't run workflow {slug}."
    if not online:
        return f"It is bound to {bound}, which is offline."
    if not any(worker.takes_jobs for worker in online):
        return f"It is bound to {bound}, which drains or is not approved."
    if any(ground.can_run(worker) for worker in online):
        return None
    lacks = [ground.missing[each.worker_id] for each in online if each.worker_id in ground.missing]
    what = f": missing {lacks[0].in_words()}" if lacks else ""
    return f"It is bound to {bound}, which can't run workflow {slug}{what}."


def nobody_can(ground: Ground) -> str | None:
    names = listed(ground.fleets)
    online = [worker for worker in ground.workers if ground.is_online(worker)]
    if not online:
        return f"All workers of fleet {names} are offline."
    if all(worker.is_draining for worker in online):
        return f"All workers of fleet {names} drain."
    if not any(worker.takes_jobs for worker in online):
        return f"No worker of fleet {names} is approved."
    if any(ground.can_run(worker) for worker in online):
        return None
    lacks = [ground.missing[each.worker_id] for each in online if each.worker_id in ground.missing]
    if not lacks:
        return f"No worker of fleet {names} that is online has what {ground.wanted.workflow.slug} asks for."
    nearest = min(lacks, key=lambda each: len(each.node_types) + len(each.models))
    return f"Missing {nearest.in_words()} on fleet {names}."


def listed(names: Sequence[str]) -> str:
    return ", ".join(names)
