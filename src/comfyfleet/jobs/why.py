"""'Why is my job not running?' in one sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import ENDED, Dispatch, Status
from comfyfleet.effects import service as effects
from comfyfleet.effects.model import Workflow
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Worker
from comfyfleet.fleets.offers import Missing
from comfyfleet.jobs.shared import in_maintenance
from comfyfleet.jobs.sides import Sides

SOON = timedelta(minutes=1)


@dataclass(frozen=True)
class Situation:
    """All that bears on a queued dispatch at one moment."""

    dispatch: Dispatch
    workflow: Workflow
    fleets: Sequence[str]
    workers: Sequence[Worker]
    missing: Mapping[str, Missing]  # by worker, for those that lack something
    ahead: int
    typical_seconds: float | None
    maintenance: bool
    now: datetime
    offline_before: datetime


async def why(sides: Sides, row: Dispatch) -> str:
    if row.status in ENDED:
        return f"The job has ended: {row.status}."
    if row.status == Status.LEASED:
        return _leased(row)
    return sentence(await _situation(sides, row))


def _leased(row: Dispatch) -> str:
    if row.started_at is None:
        return f"Worker {row.worker_id} has it and prepares it (attempt {row.attempts})."
    return f"Worker {row.worker_id} runs it (attempt {row.attempts})."


async def _situation(sides: Sides, row: Dispatch) -> Situation:
    now, lane = sides.clock(), row.lane
    async with sides.central.look() as tx:
        workflow = await effects.get(tx, lane.workflow_id)
        workers = await fleets.workers_for(tx, lane.workflow_id, stage=lane.stage)
        facts = await fleets.facts_of(tx, workers)
        version = await effects.get_version(tx, workflow)
        found = {name: effects.missing_on(version, fact) for name, fact in facts.items()}
        return Situation(
            dispatch=row,
            workflow=workflow,
            fleets=[
                each.name
                for each in await fleets.fleets_with(tx, lane.workflow_id, stage=lane.stage)
            ],
            workers=workers,
            missing={name: each for name, each in found.items() if each},
            ahead=await dispatch.ahead(tx, row),
            typical_seconds=await dispatch.typical_seconds(tx, lane.workflow_id),
            maintenance=await in_maintenance(tx),
            now=now,
            offline_before=now - timedelta(seconds=sides.settings.offline_after_seconds),
        )


def sentence(seen: Situation) -> str:
    """The first thing that stands in the way, from the whole system down to the line."""
    return (
        _held_back(seen)
        or _nobody_may(seen)
        or _affinity(seen)
        or _nobody_can(seen)
        or _in_line(seen)
    )


def _held_back(seen: Situation) -> str | None:
    slug, row = seen.workflow.slug, seen.dispatch
    if seen.maintenance:
        return "Maintenance mode is on: running jobs end, and none begins."
    if not seen.workflow.is_active:
        return f"Workflow {slug} is not active."
    if seen.workflow.is_paused:
        return f"Workflow {slug} is paused by an operator."
    if row.not_before and row.not_before > seen.now:
        return f"It is put off until {row.not_before:%Y-%m-%d %H:%M:%S} UTC: {row.last_error or 'no reason given'}."
    return None


def _nobody_may(seen: Situation) -> str | None:
    slug, stage = seen.workflow.slug, seen.dispatch.lane.stage
    if not seen.fleets:
        return f"No fleet of stage {stage} has workflow {slug} assigned."
    if not seen.workers:
        return f"No worker has workflow {slug}: fleet {_listed(seen.fleets)} has no workers."
    provider = seen.dispatch.lane.provider
    if not any(provider in worker.providers for worker in seen.workers):
        return f"No worker of fleet {_listed(seen.fleets)} offers the provider {provider}."
    required = frozenset(seen.workflow.required_capabilities)
    if not any(required <= worker.capabilities for worker in seen.workers):
        return f"No worker of fleet {_listed(seen.fleets)} has the capabilities {_listed(sorted(required))}."
    return None


def _affinity(seen: Situation) -> str | None:
    bound = seen.dispatch.backend_affinity
    if bound is None:
        return None
    able = [worker for worker in seen.workers if bound in worker.affinities]
    if not able:
        return f"It is bound to {bound}, which is not there or can't run workflow {seen.workflow.slug}."
    if not any(_is_online(seen, worker) for worker in able):
        return f"It is bound to {bound}, which is offline."
    return None


def _nobody_can(seen: Situation) -> str | None:
    names = _listed(seen.fleets)
    online = [worker for worker in seen.workers if _is_online(seen, worker)]
    if not online:
        return f"All workers of fleet {names} are offline."
    if all(worker.is_draining for worker in online):
        return f"All workers of fleet {names} drain."
    lacking = [seen.missing.get(worker.worker_id) for worker in online]
    if all(lacking) and lacking[0]:
        return f"Missing {lacking[0].in_words()} on fleet {names}."
    if not any(worker.takes_jobs for worker in online):
        return f"No worker of fleet {names} is approved."
    return None


def _in_line(seen: Situation) -> str:
    if seen.ahead == 0:
        return "It is next in line; a worker takes it as soon as one is free."
    jobs = "1 job" if seen.ahead == 1 else f"{seen.ahead} jobs"
    if seen.typical_seconds is None:
        return f"{jobs} ahead."
    slots = sum(
        worker.max_concurrency
        for worker in seen.workers
        if worker.takes_jobs and _is_online(seen, worker)
    )
    return f"{jobs} ahead, about {_spoken(seen.ahead * seen.typical_seconds / max(1, slots))}."


def _is_online(seen: Situation, worker: Worker) -> bool:
    return worker.last_seen_at >= seen.offline_before


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _spoken(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    if seconds < SOON.total_seconds():
        return "less than a minute"
    if minutes < 120:
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    return f"{round(minutes / 60)} hours"
