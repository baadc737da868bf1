"""Reads a run's state, opens a locked transaction on it, and records its events.

An event is written in the transaction of the action itself. The audit log is in another database,
so it is written afterwards. If that fails, the sweep writes it."""

import logging
import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.errors import LimitExceeded, NotFound
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.outages import log_failure
from comfyfleet.server.graphs.catalogue import WorkflowFacts
from comfyfleet.server.graphs.environment import read_catalogue
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.jobs.outbox import flush
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File
from comfyfleet.server.notifications.service import PendingAudit, copy_audit
from comfyfleet.server.pipelines import store, store_candidates
from comfyfleet.server.pipelines import store_candidates as job_rows
from comfyfleet.server.pipelines.decide import (
    StepProgress,
    VoteTally,
    count_steps,
    tally_votes,
    to_cancel,
)
from comfyfleet.server.pipelines.model import (
    JobInFlight,
    JobState,
    PipelineCandidate,
    PipelineDefinition,
    PipelineJob,
    PipelineRunEvent,
    RunTree,
    StoredPipelineRun,
    StoredRun,
    WorkKey,
)
from comfyfleet.server.pipelines.store import StuckRunFilter
from comfyfleet.server.pipelines.store_candidates import CandidateFilter


class PipelineRunState(NamedTuple):
    stored: StoredRun
    pipeline: PipelineDefinition
    tree: RunTree
    in_flight: list[JobInFlight]

    @property
    def run(self) -> StoredPipelineRun:
        return self.stored.run


async def read_state(
    tx: Tx, tenant_id: UUID, run_id: UUID, *, is_locked: bool = False
) -> PipelineRunState:
    stored = await store.get_run(tx, tenant_id, run_id, is_locked=is_locked)
    if stored is None:
        raise NotFound(f"pipeline run {run_id} was not found")
    made_with = await store.get_pipeline(tx, tenant_id, stored.pipeline_id)
    if made_with is None:
        raise NotFound(f"pipeline {stored.pipeline_id} was not found")
    tree = RunTree(
        await store_candidates.tree_of(tx, run_id), await store_candidates.list_failed(tx, run_id)
    )
    return PipelineRunState(
        stored, made_with.pipeline, tree, await store_candidates.in_flight(tx, run_id)
    )


async def facts_by_work(tx: Tx, pipeline: PipelineDefinition) -> dict[WorkKey, WorkflowFacts]:
    """Returns the workflow facts of each step and judge. Leaves out workflows that aren't
    offered."""
    works = pipeline.works
    catalogue = await read_catalogue(tx, works.values())
    facts_by_key = {key: catalogue.facts_for(work) for key, work in works.items()}
    return {key: facts for key, facts in facts_by_key.items() if facts}


# Frequent automatic events are not copied to the audit log.
UNAUDITED_EVENTS = frozenset({"submitted", "candidates", "scored", "job_failed"})
AUDITED_PER_PASS_MAX = 200
SWEEP = "sweep"


async def record_event(
    tx: Tx,
    stored: StoredRun,
    kind: str,
    data: Mapping[str, Any] | None = None,
    *,
    actor: str = SWEEP,
    now: datetime,
) -> None:
    row = {
        "tenant_id": stored.tenant_id,
        "run_id": stored.id,
        "kind": kind,
        "actor": actor,
        "data": dict(data or {}),
        "is_audited": kind in UNAUDITED_EVENTS,
        "created_at": now,
    }
    await store.add_event(tx, row)


async def read_events(tx: Tx, run_id: UUID, *, after_id: int, limit: int) -> list[PipelineRunEvent]:
    return await store.events_after(tx, run_id, after_id=after_id, limit=limit)


async def flush_audit(context: JobContext, pool: Database) -> bool:
    """Copies events to the audit log, each exactly once. Returns whether there are more."""
    async with pool.read() as tx:
        unaudited = await store.unaudited_events(tx, limit=AUDITED_PER_PASS_MAX)
    if not unaudited:
        return False
    async with context.central.transaction() as tx:
        for event in unaudited:
            subject = f"pipeline_run:{event.run_id}"
            entry = PendingAudit(
                event.actor, f"pipeline_{event.kind}", subject, event.tenant_id, event.created_at
            )
            details = {**event.data, "event_id": event.id}
            await copy_audit(tx, f"{subject}:{event.id}", entry, details)
    async with pool.transaction() as tx:
        await store.mark_audited(tx, [event.id for event in unaudited])
    return len(unaudited) == AUDITED_PER_PASS_MAX


PIPELINE_RUN_KIND = "pipeline"


@dataclass
class RunTransaction:
    context: JobContext
    tx: Tx
    stored: StoredRun
    now: datetime
    actor: str | None = None  # the operator who acts for the tenant, if any
    changes: dict[str, Any] = field(default_factory=dict)
    ended: list[Job] = field(default_factory=list)
    outbox_ids: list[int] = field(default_factory=list)

    async def record(self, kind: str, **data: Any) -> None:
        who = {"user_id": str(self.stored.user_id)}
        actor = self.actor or f"tenant:{self.stored.tenant_id}"
        await record_event(self.tx, self.stored, kind, {**who, **data}, actor=actor, now=self.now)

    async def cancel_job(self, job_id: UUID) -> None:
        """Cancels a job and frees its place immediately. Its outbox row has no effect
        afterwards."""
        job, outbox_ids = await jobs.cancel(
            self.tx, self.stored.tenant_id, job_id, new_id=self.context.new_id, now=self.now
        )
        await job_rows.end_job(self.tx, job_id, JobState.CANCELLED, now=self.now, is_refunded=True)
        self.ended.append(job)
        self.outbox_ids += outbox_ids

    async def cancel_unneeded(self) -> int:
        """Cancels, under a lock, the queued jobs of rejected branches, and the judges' jobs for
        candidates that a person has judged. Jobs that have started in the meantime continue."""
        state = await read_state(self.tx, self.stored.tenant_id, self.stored.id)
        queued = set(await store_candidates.queued_of(self.tx, self.stored.id))
        unneeded = [job for job in to_cancel(state.tree, state.in_flight) if job.job_id in queued]
        for job in unneeded:
            await self.cancel_job(job.job_id)
        return len(unneeded)

    async def flush_cancelled(self, pool: Database) -> None:
        """Removes the cancelled jobs from the queue. Must be called after the transaction."""
        self.context.run_metrics.pipeline_jobs.labels(JobState.CANCELLED).inc(len(self.ended))
        if self.outbox_ids:
            await flush(self.context, pool, self.ended, self.outbox_ids)


@asynccontextmanager
async def run_transaction(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, *, actor: str | None = None
) -> AsyncIterator[RunTransaction]:
    """Opens a transaction on a locked run. Makes the run due afterwards, because any action may
    have made room for jobs."""
    pool = await context.pool_of(tenant_id)
    async with pool.transaction() as tx:
        stored = await get_own_run(tx, tenant_id, user_id, run_id, is_locked=True)
        act = RunTransaction(context, tx, stored, context.clock(), actor)
        yield act
        touched: Mapping[str, Any] = {"look_at": act.now, "changed_at": act.now}
        await store.change_run(tx, run_id, {**touched, **act.changes})
    await act.flush_cancelled(pool)
    context.notifier.tell(run_id)
    context.notifier.notify_run(PIPELINE_RUN_KIND)
    await flush_audit(context, pool)


async def get_own_run(
    tx: Tx, tenant_id: UUID, user_id: UUID, run_id: UUID, *, is_locked: bool = False
) -> StoredRun:
    stored = await store.get_run(tx, tenant_id, run_id, is_locked=is_locked)
    if stored is None or stored.user_id != user_id:
        raise NotFound(f"pipeline run {run_id} was not found")
    return stored


# A stuck run can't submit its next job because of an error that only a person can fix, such as an
# empty wallet. Stuck runs are checked at long intervals, and immediately when the problem may be
# solved.
log = logging.getLogger(__name__)
STUCK_RUN_KIND = "stuck_pipeline"


def request_wake(context: JobContext) -> None:
    """Wakes the stuck runs of all tenants in the background, after a change of workflows, effects
    or workers.

    An unresponsive tenant database must not delay the operator or the worker that made the
    change."""
    context.notifier.notify_run(STUCK_RUN_KIND)


async def wake_stuck_runs(context: JobContext, pool: Database) -> None:
    """Makes all stuck runs of a pool due."""
    await _wake_matching(context, pool, StuckRunFilter())


async def wake_runs_of(context: JobContext, tenant_id: UUID, user_id: UUID) -> None:
    """Makes the stuck runs of a user due after a credit to the user's wallet. The credit is valid
    even if this fails."""
    try:
        pool = await context.pool_of(tenant_id)
        await _wake_matching(context, pool, StuckRunFilter(tenant_id=tenant_id, user_id=user_id))
    except Exception as error:  # noqa: BLE001 — the runs are checked later in any case
        log_failure(log, error, "the stuck pipeline runs of user %s were not woken", user_id)


async def wake_run(context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID) -> None:
    """Makes a run of the user due if it is stuck."""
    pool = await context.pool_of(tenant_id)
    async with pool.read() as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
    await _wake_matching(context, pool, StuckRunFilter(run_id=run_id))


async def _wake_matching(context: JobContext, pool: Database, wanted: StuckRunFilter) -> None:
    # Read first, because a read takes no locks and there are usually no stuck runs.
    async with pool.read() as tx:
        if not await store.has_stuck_runs(tx, wanted):
            return
    async with pool.transaction() as tx:
        run_ids = await store.wake_stuck_runs(tx, wanted, now=context.clock())
    for run_id in run_ids:
        context.notifier.tell(run_id)
    context.notifier.notify_run(PIPELINE_RUN_KIND)


TREE_MAX = 10_000
TIMED_JOBS_MAX = 50


@dataclass(frozen=True, slots=True)
class RunView:
    stored: StoredRun
    pipeline: PipelineDefinition
    steps: list[StepProgress]
    bytes: int
    queued: int  # queued jobs among those in flight
    jobs: dict[JobState, int]
    seconds_left: float | None
    last_event_id: int

    @property
    def success_rate(self) -> float | None:
        """The share of all ended jobs that succeeded. Jobs that failed and were retried count as
        failed."""
        done = self.jobs.get(JobState.DONE, 0)
        failed = self.jobs.get(JobState.FAILED, 0) + self.jobs.get(JobState.RETRIED, 0)
        return done / (done + failed) if done + failed else None


async def read_run(context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID) -> RunView:
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        # read first, so that later events are not missed
        last_event_id = await store.last_event_id(tx, run_id)
        state = await read_state(tx, tenant_id, run_id)
        rows = count_steps(state.pipeline, state.run, state.tree, state.in_flight)
        mean = await store_candidates.mean_seconds(tx, run_id, of_last=TIMED_JOBS_MAX)
        return RunView(
            stored=state.stored,
            pipeline=state.pipeline,
            steps=rows,
            bytes=await store_candidates.bytes_of(tx, run_id),
            queued=sum(job.is_queued for job in state.in_flight),
            jobs=await store_candidates.count_by_state(tx, run_id),
            seconds_left=_seconds_left(state.pipeline, state.stored, rows, mean),
            last_event_id=last_event_id,
        )


def _seconds_left(
    pipeline: PipelineDefinition,
    stored: StoredRun,
    rows: Sequence[StepProgress],
    mean: float | None,
) -> float | None:
    """Estimates the remaining time, from the number of jobs still needed and the duration of the
    last jobs.

    Returns None while a problem prevents the next job, because its duration is unknown."""
    if mean is None or stored.trouble:
        return None
    expected, unmade, jobs_left = stored.run.base_candidates, 0, 0
    for number, (step, row) in enumerate(zip(pipeline.steps, rows, strict=True)):
        if number:
            # Rejected candidates get no children. Candidates that don't exist yet or aren't judged
            # yet may get some.
            keep, before = pipeline.steps[number - 1].keep, rows[number - 1]
            parents = row.wanted // step.children_per_parent
            parents += unmade + before.waiting + before.unjudged
            expected = min(parents, keep or parents) * step.children_per_parent
        unmade = max(0, expected - row.made)
        jobs_left += math.ceil(unmade / step.images_per_job)
        if step.judge:
            jobs_left += unmade + row.unjudged
    return round(jobs_left * mean / stored.run.limits.concurrent_jobs, 1)


async def list_candidates(
    context: JobContext,
    tenant_id: UUID,
    user_id: UUID,
    run_id: UUID,
    wanted: CandidateFilter,
    *,
    after: UUID | None,
    limit: int,
) -> tuple[list[PipelineCandidate], dict[UUID, File]]:
    """Returns a page of candidates with their files. `after` is the last id of the previous
    page."""
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        last = await _get_candidate(tx, run_id, after) if after else None
        page = await store_candidates.list_page(tx, run_id, wanted, after=last, limit=limit)
        return page, await _files(tx, tenant_id, page)


async def read_candidate(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, candidate_id: UUID
) -> tuple[PipelineCandidate, dict[UUID, File]]:
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        candidate = await _get_candidate(tx, run_id, candidate_id)
        return candidate, await _files(tx, tenant_id, [candidate])


class Lineage(NamedTuple):
    candidates: list[PipelineCandidate]  # the candidate first, its base candidate last
    votes: VoteTally
    files: dict[UUID, File]


async def read_lineage(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, candidate_id: UUID
) -> Lineage:
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        lineage = [await _get_candidate(tx, run_id, candidate_id)]
        while lineage[-1].parent is not None and lineage[-1].step > 0:
            lineage.append(await _get_candidate(tx, run_id, lineage[-1].parent))
        votes = tally_votes(candidate_id, await store.votes_of(tx, run_id))
        return Lineage(lineage, votes, await _files(tx, tenant_id, lineage))


async def _get_candidate(tx: Tx, run_id: UUID, candidate_id: UUID) -> PipelineCandidate:
    candidate = await store_candidates.get_candidate(tx, run_id, candidate_id)
    if candidate is None:
        raise NotFound(f"candidate {candidate_id} was not found")
    return candidate


async def _files(
    tx: Tx, tenant_id: UUID, candidates: Collection[PipelineCandidate]
) -> dict[UUID, File]:
    ids = [
        UUID(candidate.file["file_id"])
        for candidate in candidates
        if candidate.file and candidate.file["file_id"]
    ]
    try:
        return await media.get_files(tx, tenant_id, ids) if ids else {}
    except NotFound:  # a file was just deleted, so read them one by one
        pairs = [(file_id, await _find_file(tx, tenant_id, file_id)) for file_id in ids]
        return {file_id: file for file_id, file in pairs if file}


async def _find_file(tx: Tx, tenant_id: UUID, file_id: UUID) -> File | None:
    try:
        return await media.get_file(tx, tenant_id, file_id)
    except NotFound:
        return None


async def files_of(
    context: JobContext, tenant_id: UUID, candidates: Collection[PipelineCandidate]
) -> dict[UUID, File]:
    async with context.tenant(tenant_id) as tx:
        return await _files(tx, tenant_id, candidates)


async def read_tree(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID
) -> list[PipelineCandidate]:
    """Returns all candidates without their files, oldest first."""
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        tree = await store_candidates.tree_of(tx, run_id)
    if len(tree) > TREE_MAX:
        raise LimitExceeded(
            f"the run has more than {TREE_MAX:,} candidates; list them by step or parent"
        )
    return sorted(tree.values(), key=lambda candidate: (candidate.created_at, candidate.id))


async def list_failures(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, *, limit: int
) -> list[PipelineJob]:
    """Returns failed jobs, newest first."""
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        return await store_candidates.page_of_failed(tx, run_id, limit=limit)


async def list_events(
    context: JobContext, tenant_id: UUID, run_id: UUID, *, after_id: int, limit: int
) -> list[PipelineRunEvent]:
    """Returns events of a run. The caller must have checked the owner, because streams call this
    repeatedly."""
    async with context.tenant(tenant_id) as tx:
        return await read_events(tx, run_id, after_id=after_id, limit=limit)


__all__ = ["CandidateFilter", "RunView"]
