"""'Why is my job not running?' in one sentence."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import ENDED, Dispatch, Status
from comfyfleet.effects.model import Workflow
from comfyfleet.effects.models import models_of
from comfyfleet.jobs import store
from comfyfleet.jobs.shared import in_maintenance
from comfyfleet.jobs.shortage import Ground, ground_for, shortage, wanted_by
from comfyfleet.jobs.sides import Sides

SOON = timedelta(minutes=1)
_MAINTENANCE = "Maintenance mode is on: running jobs end, and none begins."


@dataclass(frozen=True)
class Situation:
    """All that bears on a queued dispatch at one moment."""

    dispatch: Dispatch
    ground: Ground
    ahead: int
    typical_seconds: float | None
    maintenance: bool
    now: datetime

    @property
    def workflow(self) -> Workflow:
        return self.ground.wanted.workflow


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
    lane = row.lane
    pool = await sides.pool_of(row.tenant_id)
    async with pool.look() as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    models = () if job is None else models_of(job.asked.prompt)
    version = None if job is None else job.asked.workflow_version
    async with sides.central.look() as tx:
        wanted = await wanted_by(tx, lane, models, version)
        return Situation(
            dispatch=row,
            ground=await ground_for(tx, sides, wanted),
            ahead=await dispatch.ahead(tx, row),
            typical_seconds=await dispatch.typical_seconds(tx, lane.workflow_id),
            maintenance=await in_maintenance(tx),
            now=sides.clock(),
        )


async def why_for_customers(sides: Sides, row: Dispatch) -> str:
    """Without names of workers, fleets and models, which are the operator's."""
    if row.status in ENDED:
        return f"The job has ended: {row.status}."
    if row.status == Status.LEASED:
        return "It is being prepared." if row.started_at is None else "It is being run."
    return sentence_for_customers(await _situation(sides, row))


def sentence_for_customers(seen: Situation) -> str:
    if seen.maintenance:
        return _MAINTENANCE
    if _held_back(seen) or shortage(seen.ground, seen.dispatch.backend_affinity):
        return "Nobody can run it at the moment; it waits until somebody can."
    return _in_line(seen)


def sentence(seen: Situation) -> str:
    """The first thing that stands in the way, from the whole system down to the line."""
    short = shortage(seen.ground, seen.dispatch.backend_affinity)
    return _held_back(seen) or (short.message if short else _in_line(seen))


def _held_back(seen: Situation) -> str | None:
    slug, row = seen.workflow.slug, seen.dispatch
    if seen.maintenance:
        return _MAINTENANCE
    if not seen.workflow.is_active:
        return f"Workflow {slug} is not active."
    if seen.workflow.is_paused:
        return f"Workflow {slug} is paused by an operator."
    if row.not_before and row.not_before > seen.now:
        return f"It is put off until {row.not_before:%Y-%m-%d %H:%M:%S} UTC: {row.last_error or 'no reason given'}."
    return None


def _in_line(seen: Situation) -> str:
    if seen.ahead == 0:
        return "It is next in line; a worker takes it as soon as one is free."
    jobs = "1 job" if seen.ahead == 1 else f"{seen.ahead} jobs"
    if seen.typical_seconds is None:
        return f"{jobs} ahead."
    slots = sum(
        worker.max_concurrency
        for worker in seen.ground.workers
        if worker.takes_jobs and seen.ground.is_online(worker)
    )
    return f"{jobs} ahead, about {_spoken(seen.ahead * seen.typical_seconds / max(1, slots))}."


def _spoken(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    if seconds < SOON.total_seconds():
        return "less than a minute"
    if minutes < 120:
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    return f"{round(minutes / 60)} hours"
