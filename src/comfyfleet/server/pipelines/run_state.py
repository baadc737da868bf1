"""Reads a run's state, opens a locked transaction on it, and records its events.

An event is written in the transaction of the action itself. The audit log is in another database,
so it is written afterwards; if that fails, the sweep writes it.
"""

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
        raise NotFound(f"there is no pipeline run {run_id}")
    made_with = await store.get_pipeline(tx, tenant_id, stored.pipeline_id)
    if made_with is None:
        raise NotFound(f"there is no pipeline {stored.pipeline_id}")
    tree = RunTree(
        await store_candidates.tree_of(tx, run_id), await store_candidates.list_failed(tx, run_id)
    )
    return PipelineRunState(
        stored, made_with.pipeline, tree, await store_candidates.in_flight(tx, run_id)
    )


async def facts_by_work(tx: Tx, pipeline: PipelineDefinition) -> dict[WorkKey, WorkflowFacts]:
    """Returns the workflow facts of each step and judge; those not on offer are left out."""
    works = pipeline.works
    catalogue = await read_catalogue(tx, works.values())
    found = {key: catalogue.facts_for(work) for key, work in works.items()}
    return {key: facts for key, facts in found.items() if facts}


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
    """Copies events to the audit log, each of them once; returns whether there is more."""
    async with pool.read() as tx:
        unaudited = await store.unaudited_events(tx, limit=AUDITED_PER_PASS_MAX)
    if not unaudited:
        return False
    async with context.central.transaction() as tx:
        for each in unaudited:
            subject = f"pipeline_run:{each.run_id}"
            entry = PendingAudit(
                each.actor, f"pipeline_{each.kind}", subject, each.tenant_id, each.created_at
            )
            details = {**each.data, "event_id": each.id}
            await copy_audit(tx, f"{subject}:{each.id}", entry, details)
    async with pool.transaction() as tx:
        await store.mark_audited(tx, [each.id for each in unaudited])
    return len(unaudited) == AUDITED_PER_PASS_MAX


PIPELINE_RUN_KIND = "pipeline"


@dataclass
class RunTransaction:
    context: JobContext
    tx: Tx
    stored: StoredRun
    now: datetime
    actor: str | None = None  # an operator who acts for the tenant
    changes: dict[str, Any] = field(default_factory=dict)
    ended: list[Job] = field(default_factory=list)
    outbox_ids: list[int] = field(default_factory=list)

    async def record(self, kind: str, **data: Any) -> None:
        who = {"user_id": str(self.stored.user_id)}
        actor = self.actor or f"tenant:{self.stored.tenant_id}"
        await record_event(self.tx, self.stored, kind, {**who, **data}, actor=actor, now=self.now)

    async def cancel_job(self, job_id: UUID) -> None:
        """Cancels a job and frees its place at once; its outbox row then has no effect."""
        job, outbox_ids = await jobs.cancel(
            self.tx, self.stored.tenant_id, job_id, new_id=self.context.new_id, now=self.now
        )
        await job_rows.end_job(self.tx, job_id, JobState.CANCELLED, now=self.now, is_refunded=True)
        self.ended.append(job)
        self.outbox_ids += outbox_ids

    async def cancel_unneeded(self) -> int:
        """Cancels the queued jobs of rejected branches, and those that judge what a person has judged, under a lock;
        jobs that have started meanwhile finish."""
        state = await read_state(self.tx, self.stored.tenant_id, self.stored.id)
        queued = set(await store_candidates.queued_of(self.tx, self.stored.id))
        unneeded = [
            each for each in to_cancel(state.tree, state.in_flight) if each.job_id in queued
        ]
        for each in unneeded:
            await self.cancel_job(each.job_id)
        return len(unneeded)

    async def flush_cancelled(self, pool: Database) -> None:
        """Tells the queue what was cancelled, after the transaction."""
        self.context.run_metrics.pipeline_jobs.labels(JobState.CANCELLED).inc(len(self.ended))
        if self.outbox_ids:
            await flush(self.context, pool, self.ended, self.outbox_ids)


@asynccontextmanager
async def run_transaction(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, *, actor: str | None = None
) -> AsyncIterator[RunTransaction]:
    """Opens a transaction on a locked run; makes the run due afterwards, as any action may have
    made room for jobs."""
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
    found = await store.get_run(tx, tenant_id, run_id, is_locked=is_locked)
    if found is None or found.user_id != user_id:
        raise NotFound(f"there is no pipeline run {run_id}")
    return found


# Stuck runs: their next job failed with an error that only a person can fix, such as an empty wallet.
# They are checked at long intervals, and woken as soon as their problem may be solved.
log = logging.getLogger(__name__)
STUCK_RUN_KIND = "stuck_pipeline"


def request_wake(context: JobContext) -> None:
    """Wakes the stuck runs of all tenants in the background, after a change of workflows, effects or workers.

    A tenant's database that hangs must not hold up the operator or the worker that made the change.
    """
    context.notifier.notify_run(STUCK_RUN_KIND)


async def wake_stuck_runs(context: JobContext, pool: Database) -> None:
    """Makes all stuck runs of a pool due."""
    await _wake_matching(context, pool, StuckRunFilter())


async def wake_runs_of(context: JobContext, tenant_id: UUID, user_id: UUID) -> None:
    """Makes the stuck runs of a user due, after a credit. The credit counts even if this fails."""
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
    async with pool.read() as tx:  # Usually there is none, and a read locks nothing.
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
    queued: int  # of those in flight
    jobs: dict[JobState, int]
    seconds_left: float | None
    last_event_id: int

    @property
    def success_rate(self) -> float | None:
        """The share of all ended jobs that succeeded, including retried ones."""
        done = self.jobs.get(JobState.DONE, 0)
        failed = self.jobs.get(JobState.FAILED, 0) + self.jobs.get(JobState.RETRIED, 0)
        return done / (done + failed) if done + failed else None


async def read_run(context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID) -> RunView:
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        last_event_id = await store.last_event_id(tx, run_id)  # first: what comes later is told
        state = await read_state(tx, tenant_id, run_id)
        rows = count_steps(state.pipeline, state.run, state.tree, state.in_flight)
        mean = await store_candidates.mean_seconds(tx, run_id, of_last=TIMED_JOBS_MAX)
        return RunView(
            stored=state.stored,
            pipeline=state.pipeline,
            steps=rows,
            bytes=await store_candidates.bytes_of(tx, run_id),
            queued=sum(each.is_queued for each in state.in_flight),
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
    """Estimates the remaining time: all that can be made, at the speed of the last jobs.

    Returns None while something prevents the next job, as nobody knows for how long.
    """
    if mean is None or stored.trouble:
        return None
    expected, unmade, left = stored.run.base_candidates, 0, 0
    for number, (step, row) in enumerate(zip(pipeline.steps, rows, strict=True)):
        if number:
            # Rejected candidates get no children; those to come and to be judged may.
            keep, before = pipeline.steps[number - 1].keep, rows[number - 1]
            parents = row.wanted // step.children_per_parent
            parents += unmade + before.waiting + before.unjudged
            expected = min(parents, keep or parents) * step.children_per_parent
        unmade = max(0, expected - row.made)
        left += math.ceil(unmade / step.images_per_job)
        if step.judge:
            left += unmade + row.unjudged
    return round(left * mean / stored.run.limits.concurrent_jobs, 1)


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
    """Returns a page with files; `after` is the id of the last page's last."""
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        last = await _get_candidate(tx, run_id, after) if after else None
        found = await store_candidates.list_page(tx, run_id, wanted, after=last, limit=limit)
        return found, await _files(tx, tenant_id, found)


async def read_candidate(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, candidate_id: UUID
) -> tuple[PipelineCandidate, dict[UUID, File]]:
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        found = await _get_candidate(tx, run_id, candidate_id)
        return found, await _files(tx, tenant_id, [found])


class Lineage(NamedTuple):
    candidates: list[PipelineCandidate]  # itself first, the base last
    votes: VoteTally
    files: dict[UUID, File]


async def read_lineage(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, candidate_id: UUID
) -> Lineage:
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        found = [await _get_candidate(tx, run_id, candidate_id)]
        while found[-1].parent is not None and found[-1].step > 0:
            found.append(await _get_candidate(tx, run_id, found[-1].parent))
        votes = tally_votes(candidate_id, await store.votes_of(tx, run_id))
        return Lineage(found, votes, await _files(tx, tenant_id, found))


async def _get_candidate(tx: Tx, run_id: UUID, candidate_id: UUID) -> PipelineCandidate:
    found = await store_candidates.get_candidate(tx, run_id, candidate_id)
    if found is None:
        raise NotFound(f"there is no candidate {candidate_id}")
    return found


async def _files(tx: Tx, tenant_id: UUID, found: Collection[PipelineCandidate]) -> dict[UUID, File]:
    ids = [UUID(each.file["file_id"]) for each in found if each.file and each.file["file_id"]]
    try:
        return await media.get_files(tx, tenant_id, ids) if ids else {}
    except NotFound:  # one was just removed: read them one by one
        pairs = [(each, await _find_file(tx, tenant_id, each)) for each in ids]
        return {file_id: file for file_id, file in pairs if file}


async def _find_file(tx: Tx, tenant_id: UUID, file_id: UUID) -> File | None:
    try:
        return await media.get_file(tx, tenant_id, file_id)
    except NotFound:
        return None


async def files_of(
    context: JobContext, tenant_id: UUID, found: Collection[PipelineCandidate]
) -> dict[UUID, File]:
    async with context.tenant(tenant_id) as tx:
        return await _files(tx, tenant_id, found)


async def read_tree(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID
) -> list[PipelineCandidate]:
    """Returns all candidates without their files, the oldest first."""
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        found = await store_candidates.tree_of(tx, run_id)
    if len(found) > TREE_MAX:
        raise LimitExceeded(
            f"the run has more than {TREE_MAX:,} candidates; list them by step or parent"
        )
    return sorted(found.values(), key=lambda each: (each.created_at, each.id))


async def list_failures(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, *, limit: int
) -> list[PipelineJob]:
    """Returns failed jobs, the newest first."""
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        return await store_candidates.page_of_failed(tx, run_id, limit=limit)


async def list_events(
    context: JobContext, tenant_id: UUID, run_id: UUID, *, after_id: int, limit: int
) -> list[PipelineRunEvent]:
    """Returns events of a run. The caller has checked its owner, as streams call this repeatedly."""
    async with context.tenant(tenant_id) as tx:
        return await read_events(tx, run_id, after_id=after_id, limit=limit)


__all__ = ["CandidateFilter", "RunView"]
