"""Explains in one sentence why a job is not running, from its requirements and the available
workers. Also builds the timeline of a job's attempts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import RegisteredWorkflow, WorkflowVersion
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import (
    BackendOffer,
    FleetWorker,
    MissingRequirements,
    ModelUse,
    WorkflowRequirements,
)
from comfyfleet.server.jobs import store
from comfyfleet.server.jobs.context import JobContext, in_maintenance
from comfyfleet.server.jobs.model import JobAttempt, Shortage
from comfyfleet.server.notifications.model import AuditEntry
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import ENDED, Dispatch, DispatchStatus, QueueLane


@dataclass(frozen=True)
class JobRequirements:
    """The backend requirements of a job, or of a workflow's typical job."""

    workflow: RegisteredWorkflow
    lane: QueueLane
    node_types: Sequence[str] = ()
    models: Sequence[ModelUse] = ()


@dataclass(frozen=True)
class Availability:
    """The fleets and workers that are assigned to a job's workflow at a given moment."""

    requirements: JobRequirements
    fleets: Sequence[str]
    workers: Sequence[FleetWorker]
    offline_before: datetime
    # missing requirements by worker; workers that lack nothing are left out
    missing: Mapping[str, MissingRequirements] = field(default_factory=dict)

    def is_online(self, worker: FleetWorker) -> bool:
        return worker.last_seen_at >= self.offline_before

    def can_run(self, worker: FleetWorker) -> bool:
        """Whether the worker can run the job. Does not check whether it is online and accepts
        jobs.
        """
        return (
            self.requirements.lane.provider in worker.providers
            and self.requirements.workflow.required_capabilities <= worker.capabilities
            and worker.worker_id not in self.missing
        )


async def requirements_of_job(
    tx: Tx, lane: QueueLane, needs: WorkflowRequirements, version: int | None = None
) -> JobRequirements:
    """Returns the requirements of a job: the models of its prompt and the node types of its
    workflow. For an open workflow, the node types also come from the prompt.
    """
    workflow = await catalog.get_workflow(tx, lane.workflow_id)
    types: Sequence[str] = needs.node_types
    if not workflow.is_open:
        types = (await catalog.get_version(tx, workflow, version)).node_types
    return JobRequirements(workflow, lane, types, needs.models)


def requirements_of_workflow(
    workflow: RegisteredWorkflow, version: WorkflowVersion, lane: QueueLane
) -> JobRequirements:
    """Returns the requirements of a typical job of this workflow."""
    return JobRequirements(workflow, lane, version.node_types, version.models)


async def read_availability(
    tx: Tx, context: JobContext, requirements: JobRequirements
) -> Availability:
    now, lane = context.clock(), requirements.lane
    workers = await fleets.workers_for(tx, lane.workflow_id, stage=lane.stage)
    offers = await context.caches.eligibility.offers(tx, workers, now=now)
    named = await fleets.fleets_with(tx, lane.workflow_id, stage=lane.stage)
    return Availability(
        requirements,
        [fleet.name for fleet in named],
        workers,
        now - timedelta(seconds=context.settings.offline_after_seconds),
        _missing_by_worker(offers, requirements),
    )


def _missing_by_worker(
    offers: Mapping[str, BackendOffer], requirements: JobRequirements
) -> dict[str, MissingRequirements]:
    lacks = {
        worker_id: offer.lacks(requirements.node_types, requirements.models)
        for worker_id, offer in offers.items()
    }
    return {worker_id: missing for worker_id, missing in lacks.items() if missing}


async def read_shortage(
    tx: Tx, context: JobContext, requirements: JobRequirements, bound: str | None = None
) -> Shortage | None:
    """Returns the reason why no worker can run the job, or None if a worker should be able to.

    `bound` is the worker or fleet that must run the job, if any. Only an explanation needs all
    workers. Usually, one of the first online workers can run the job.
    """
    if await _has_able_worker(tx, context, requirements, bound):
        return None
    return find_shortage(await read_availability(tx, context, requirements), bound)


async def _has_able_worker(
    tx: Tx, context: JobContext, requirements: JobRequirements, bound: str | None
) -> bool:
    """Checks whether one of the first online workers can run the job."""
    now, lane = context.clock(), requirements.lane
    online_since = now - timedelta(seconds=context.settings.offline_after_seconds)
    workers = await fleets.workers_for(
        tx, lane.workflow_id, stage=lane.stage, online_since=online_since
    )
    offers = await context.caches.eligibility.offers(tx, workers, now=now)
    missing = _missing_by_worker(offers, requirements)
    sample = Availability(requirements, (), workers, online_since, missing)
    return any(
        worker.takes_jobs and sample.can_run(worker) and (not bound or bound in worker.affinities)
        for worker in workers
    )


def find_shortage(ground: Availability, bound: str | None = None) -> Shortage | None:
    """Returns the reason why no worker can run a job, or None. `bound` is the worker or fleet that
    must run the job, if any.
    """
    message = (
        why_nobody_may_run(ground) or _why_bound_cannot(ground, bound) or why_nobody_can_run(ground)
    )
    return (
        None
        if message is None
        else Shortage(message, customer_message(ground.requirements.workflow))
    )


def customer_message(workflow: RegisteredWorkflow) -> str:
    needed = join_names(sorted(workflow.required_capabilities))
    which = f" (it requires {needed})" if needed else ""
    return f"No backend can run workflow {workflow.slug}{which} at the moment."


def why_nobody_may_run(ground: Availability) -> str | None:
    """Returns the reason why no worker would be allowed to run the job even if all workers were
    online.
    """
    slug, lane = ground.requirements.workflow.slug, ground.requirements.lane
    names = join_names(ground.fleets)
    if not ground.fleets:
        return f"No fleet of stage {lane.stage} has workflow {slug} assigned."
    if not ground.workers:
        return f"No worker has workflow {slug}: fleet {names} has no workers."
    if not any(lane.provider in worker.providers for worker in ground.workers):
        return f"No worker of fleet {names} offers the provider {lane.provider}."
    required = ground.requirements.workflow.required_capabilities
    if not any(required <= worker.capabilities for worker in ground.workers):
        return f"No worker of fleet {names} has the capabilities {join_names(sorted(required))}."
    return None


def _why_bound_cannot(ground: Availability, bound: str | None) -> str | None:
    if bound is None:
        return None
    slug = ground.requirements.workflow.slug
    named = [worker for worker in ground.workers if bound in worker.affinities]
    online = [worker for worker in named if ground.is_online(worker)]
    if not named:
        return f"The job is bound to {bound}, which doesn't exist or can't run workflow {slug}."
    if not online:
        return f"The job is bound to {bound}, which is offline."
    if not any(worker.takes_jobs for worker in online):
        problem = next((worker.problem for worker in online if worker.problem), None)
        if problem is not None:
            return f"The job is bound to {bound}, and {problem}."
        return f"The job is bound to {bound}, which is draining or not approved."
    if any(ground.can_run(worker) for worker in online):
        return None
    lacks = [
        ground.missing[worker.worker_id] for worker in online if worker.worker_id in ground.missing
    ]
    what = f": missing {lacks[0].in_words()}" if lacks else ""
    return f"The job is bound to {bound}, which can't run workflow {slug}{what}."


def why_nobody_can_run(ground: Availability) -> str | None:
    names = join_names(ground.fleets)
    online = [worker for worker in ground.workers if ground.is_online(worker)]
    if not online:
        return f"All workers of fleet {names} are offline."
    if all(worker.is_draining for worker in online):
        return f"All workers of fleet {names} are draining."
    if not any(worker.takes_jobs for worker in online):
        faulty = [worker for worker in online if worker.problem]
        if faulty:
            problems = join_names(
                [f"{worker.worker_id}: {worker.problem}" for worker in faulty[:NAMED_MAX]]
            )
            return f"No worker of fleet {names} can run jobs ({problems})."
        return f"No worker of fleet {names} is approved."
    if any(ground.can_run(worker) for worker in online):
        return None
    lacks = [
        ground.missing[worker.worker_id] for worker in online if worker.worker_id in ground.missing
    ]
    if not lacks:
        slug = ground.requirements.workflow.slug
        return f"No online worker of fleet {names} meets the requirements of workflow {slug}."
    nearest = min(lacks, key=lambda missing: len(missing.node_types) + len(missing.models))
    return f"Missing {nearest.in_words()} on fleet {names}."


# Maximum number of faulty workers that a message names.
NAMED_MAX = 3


def join_names(names: Sequence[str]) -> str:
    return ", ".join(names)


SOON = timedelta(minutes=1)
_MAINTENANCE = "Maintenance mode is on. Running jobs continue, but no new jobs start."


@dataclass(frozen=True)
class WaitSituation:
    """All facts that decide whether a queued dispatch can run at a given moment."""

    dispatch: Dispatch
    ground: Availability
    ahead: int
    typical_seconds: float | None
    maintenance: bool
    now: datetime

    @property
    def workflow(self) -> RegisteredWorkflow:
        return self.ground.requirements.workflow


async def why(context: JobContext, row: Dispatch) -> str:
    if row.status in ENDED:
        return f"The job has ended: {row.status}."
    if row.status == DispatchStatus.LEASED:
        return _leased(row)
    return explain_situation(await _read_situation(context, row))


def _leased(row: Dispatch) -> str:
    if row.started_at is None:
        return f"Worker {row.worker_id} is preparing the job (attempt {row.attempts})."
    return f"Worker {row.worker_id} is running the job (attempt {row.attempts})."


async def _read_situation(context: JobContext, row: Dispatch) -> WaitSituation:
    lane = row.lane
    async with context.tenant(row.tenant_id) as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    needs = WorkflowRequirements() if job is None else job.spec.needs
    version = None if job is None else job.spec.workflow_version
    async with context.central.read() as tx:
        requirements = await requirements_of_job(tx, lane, needs, version)
        return WaitSituation(
            dispatch=row,
            ground=await read_availability(tx, context, requirements),
            ahead=await dispatch.count_ahead(tx, row),
            typical_seconds=await dispatch.typical_seconds(tx, lane.workflow_id),
            maintenance=await in_maintenance(tx),
            now=context.clock(),
        )


async def explain_to_customer(context: JobContext, row: Dispatch) -> str:
    """Explains the wait without naming workers, fleets or models, which only operators may see."""
    if row.status in ENDED:
        return f"The job has ended: {row.status}."
    if row.status == DispatchStatus.LEASED:
        return "The job is being prepared." if row.started_at is None else "The job is running."
    return explain_situation_to_customer(await _read_situation(context, row))


class HelpNeeded(NamedTuple):
    """The action that a person must take if a job is still waiting after `after_seconds`."""

    after_seconds: float
    action: str


class WaitExplanation(NamedTuple):
    why: str
    # None if the job needs no help because the obstacle will disappear without any action
    help_needed: HelpNeeded | None = None


_OFFER_AGAIN = "Ask the operator to offer the workflow again, or use another one."
_RESUME = "Ask the operator to resume the workflow. The job then runs automatically."
_START_WORKER = (
    "Start a worker that can run it, or ask the operator to start one or to assign the workflow to "
    "a fleet that has one. The job then runs automatically."
)


async def explain_wait(context: JobContext, row: Dispatch) -> WaitExplanation:
    """Explains to a customer why a job is waiting, and whether it needs a person's help."""
    if row.status in ENDED or row.status == DispatchStatus.LEASED:
        return WaitExplanation(await explain_to_customer(context, row))
    seen = await _read_situation(context, row)
    return WaitExplanation(explain_situation_to_customer(seen), await _help_needed(context, seen))


async def _help_needed(context: JobContext, seen: WaitSituation) -> HelpNeeded | None:
    workflow = seen.workflow
    if not workflow.is_active:
        return HelpNeeded(0.0, _OFFER_AGAIN)
    is_stopped = workflow.is_paused or find_shortage(seen.ground, seen.dispatch.backend_affinity)
    if seen.maintenance or not is_stopped:
        return None
    async with context.central.read() as tx:
        starts_within = await fleets.starts_within(tx)
    seconds = float(starts_within.get(workflow.slug, context.settings.no_backend_seconds))
    return HelpNeeded(seconds, _RESUME if workflow.is_paused else _START_WORKER)


def explain_situation_to_customer(seen: WaitSituation) -> str:
    if seen.maintenance:
        return _MAINTENANCE
    if _held_back(seen) or find_shortage(seen.ground, seen.dispatch.backend_affinity):
        return "No worker can run the job at the moment. It waits until one can."
    return _queue_position_text(seen)


def explain_situation(seen: WaitSituation) -> str:
    """Returns the first obstacle. System-wide obstacles are checked first, and the job's position
    in the queue last.
    """
    short = find_shortage(seen.ground, seen.dispatch.backend_affinity)
    return _held_back(seen) or (short.message if short else _queue_position_text(seen))


def _held_back(seen: WaitSituation) -> str | None:
    slug, row = seen.workflow.slug, seen.dispatch
    if seen.maintenance:
        return _MAINTENANCE
    if not seen.workflow.is_active:
        return f"Workflow {slug} is not active."
    if seen.workflow.is_paused:
        return f"Workflow {slug} is paused by an operator."
    if row.not_before and row.not_before > seen.now:
        reason = row.last_error or "no reason given"
        return f"The job is delayed until {row.not_before:%Y-%m-%d %H:%M:%S} UTC: {reason}."
    return None


def _queue_position_text(seen: WaitSituation) -> str:
    if seen.ahead == 0:
        return "The job is next in the queue and runs as soon as a worker is free."
    jobs = "1 job" if seen.ahead == 1 else f"{seen.ahead} jobs"
    if seen.typical_seconds is None:
        return f"{jobs} ahead."
    slots = sum(
        worker.max_concurrency
        for worker in seen.ground.workers
        if worker.takes_jobs and seen.ground.is_online(worker)
    )
    return (
        f"{jobs} ahead, about {_duration_text(seen.ahead * seen.typical_seconds / max(1, slots))}."
    )


def _duration_text(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    if seconds < SOON.total_seconds():
        return "less than a minute"
    if minutes < 120:
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    return f"{round(minutes / 60)} hours"


# The outcome of an attempt, by the action of the audit entry that recorded the attempt's end.
OUTCOMES = {
    "complete": "completed",
    "fail": "failed",
    "requeue": "requeued",
    "expire": "expired",
    "cancel": "cancelled",
}
WORKER = "worker:"


@dataclass(frozen=True, slots=True)
class TimelineAttempt:
    """A lease of a job. Unknown values and the times of future events are None."""

    attempt: int
    lease_number: int
    worker_id: str | None
    queued_at: datetime | None
    leased_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    outcome: str | None = None
    message: str | None = None


def build_timeline(
    entries: Iterable[AuditEntry], sent: Sequence[JobAttempt], row: Dispatch | None
) -> list[TimelineAttempt]:
    """Builds a job's attempts from the audit entries of its dispatch, which are ordered from the
    oldest to the newest.

    `sent` contains the time at which each attempt's prompt was sent to a backend. For the current
    lease, the dispatch also contains that time.
    """
    started_at_by_lease = {attempt.lease_number: attempt.started_at for attempt in sent}
    if row is not None and row.started_at is not None:
        started_at_by_lease.setdefault(row.lease_number, row.started_at)
    attempts: list[TimelineAttempt] = []
    queued_at: datetime | None = None
    for entry in entries:
        if entry.action == "submit":
            queued_at = entry.at
        elif entry.action == "lease":
            attempts.append(_leased_attempt(entry, queued_at))
            queued_at = None
        elif entry.action in OUTCOMES and not entry.details.get("asked"):
            if attempts:
                attempts[-1] = _ended_attempt(attempts[-1], entry)
            queued_at = entry.at if entry.action == "requeue" else queued_at
    return [
        replace(attempt, started_at=started_at_by_lease.get(attempt.lease_number))
        for attempt in attempts
    ]


def _leased_attempt(entry: AuditEntry, queued_at: datetime | None) -> TimelineAttempt:
    is_worker = entry.actor.startswith(WORKER)
    return TimelineAttempt(
        attempt=int(entry.details.get("attempt", 0)),
        lease_number=int(entry.details.get("lease", 0)),
        worker_id=entry.actor.removeprefix(WORKER) if is_worker else None,
        queued_at=queued_at,
        leased_at=entry.at,
    )


def _ended_attempt(attempt: TimelineAttempt, entry: AuditEntry) -> TimelineAttempt:
    """Adds the end of an attempt. If the attempt already has an end, only its message is updated,
    for example when the job is requeued after its lease has expired.
    """
    message = _message(entry.details) or attempt.message
    if attempt.ended_at is not None:
        return replace(attempt, message=message)
    return replace(attempt, ended_at=entry.at, outcome=OUTCOMES[entry.action], message=message)


def _message(details: Any) -> str | None:
    text = details.get("error") or details.get("detail") or details.get("reason")
    return None if text is None else str(text)
