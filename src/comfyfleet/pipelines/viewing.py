"""A run as people look at it: its board, its figures, its candidates and their files."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.files import service as files
from comfyfleet.files.model import File
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import LimitExceeded, NotFound
from comfyfleet.pipelines import journal
from comfyfleet.pipelines.acting import own_run
from comfyfleet.pipelines.board import StepRow, board
from comfyfleet.pipelines.model import (
    Candidate,
    JobState,
    Pipeline,
    PipelineEvent,
    PipelineJob,
    StoredRun,
)
from comfyfleet.pipelines.state import read_state
from comfyfleet.pipelines.store import candidates, jobs
from comfyfleet.pipelines.store.candidates import Filter

__all__ = ["Filter", "RunView"]
TREE_MAX = 10_000
TIMED_JOBS_MAX = 50


@dataclass(frozen=True, slots=True)
class RunView:
    stored: StoredRun
    pipeline: Pipeline
    steps: list[StepRow]
    bytes: int
    queued: int  # of those in flight
    jobs: dict[JobState, int]
    seconds_left: float | None

    @property
    def success_rate(self) -> float | None:
        """Of all jobs that ended, retried ones too."""
        done = self.jobs.get(JobState.DONE, 0)
        failed = self.jobs.get(JobState.FAILED, 0) + self.jobs.get(JobState.RETRIED, 0)
        return done / (done + failed) if done + failed else None


async def view(sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID) -> RunView:
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        await own_run(tx, tenant_id, user_id, run_id)
        state = await read_state(tx, tenant_id, run_id)
        rows = board(state.pipeline, state.run, state.tree, state.in_flight)
        mean = await jobs.mean_seconds(tx, run_id, of_last=TIMED_JOBS_MAX)
        return RunView(
            stored=state.stored,
            pipeline=state.pipeline,
            steps=rows,
            bytes=await candidates.bytes_of(tx, run_id),
            queued=sum(each.is_queued for each in state.in_flight),
            jobs=await jobs.counts(tx, run_id),
            seconds_left=_seconds_left(state.pipeline, state.stored, rows, mean),
        )


def _seconds_left(
    pipeline: Pipeline, stored: StoredRun, rows: Sequence[StepRow], mean: float | None
) -> float | None:
    """If all that can be made is made, and takes as long as the last jobs did."""
    if mean is None:
        return None
    expected, left = stored.run.base_candidates, 0
    for number, (step, row) in enumerate(zip(pipeline.steps, rows, strict=True)):
        if number:
            keep = pipeline.steps[number - 1].keep
            expected = (
                expected if keep is None else min(keep, expected)
            ) * step.children_per_parent
        left += math.ceil(max(0, expected - row.made) / step.images_per_job)
    return round(left * mean / stored.run.limits.concurrent_jobs, 1)


async def page(
    sides: Sides,
    tenant_id: UUID,
    user_id: UUID,
    run_id: UUID,
    wanted: Filter,
    *,
    after: UUID | None,
    limit: int,
) -> tuple[list[Candidate], dict[UUID, File]]:
    """The oldest first, with their files; go on with `after` = the last one's id."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        await own_run(tx, tenant_id, user_id, run_id)
        last = await _one(tx, run_id, after) if after else None
        found = await candidates.page(tx, run_id, wanted, after=last, limit=limit)
        return found, await _files(tx, tenant_id, found)


async def one(
    sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID, candidate_id: UUID
) -> tuple[Candidate, dict[UUID, File]]:
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        await own_run(tx, tenant_id, user_id, run_id)
        found = await _one(tx, run_id, candidate_id)
        return found, await _files(tx, tenant_id, [found])


async def _one(tx: Tx, run_id: UUID, candidate_id: UUID) -> Candidate:
    found = await candidates.get(tx, run_id, candidate_id)
    if found is None:
        raise NotFound(f"there is no candidate {candidate_id}")
    return found


async def _files(tx: Tx, tenant_id: UUID, found: Collection[Candidate]) -> dict[UUID, File]:
    ids = [UUID(each.file["file_id"]) for each in found if each.file and each.file["file_id"]]
    try:
        return await files.get_all(tx, tenant_id, ids) if ids else {}
    except NotFound:  # one was just removed: then each is asked for
        pairs = [(each, await _file(tx, tenant_id, each)) for each in ids]
        return {file_id: file for file_id, file in pairs if file}


async def _file(tx: Tx, tenant_id: UUID, file_id: UUID) -> File | None:
    try:
        return await files.get(tx, tenant_id, file_id)
    except NotFound:
        return None


async def files_of(sides: Sides, tenant_id: UUID, found: Collection[Candidate]) -> dict[UUID, File]:
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        return await _files(tx, tenant_id, found)


async def tree(sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID) -> list[Candidate]:
    """All of them without their files, the oldest first."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        await own_run(tx, tenant_id, user_id, run_id)
        found = await candidates.tree_of(tx, run_id)
    if len(found) > TREE_MAX:
        raise LimitExceeded(
            f"the run has more than {TREE_MAX:,} candidates; list them by step or parent"
        )
    return sorted(found.values(), key=lambda each: (each.created_at, each.id))


async def failures(
    sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID, *, limit: int
) -> list[PipelineJob]:
    """The newest first."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        await own_run(tx, tenant_id, user_id, run_id)
        return await jobs.page_of_failed(tx, run_id, limit=limit)


async def events(
    sides: Sides, tenant_id: UUID, run_id: UUID, *, after_id: int, limit: int
) -> list[PipelineEvent]:
    """Of a run that was looked up before: it is asked for again and again."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        return await journal.after(tx, run_id, after_id=after_id, limit=limit)
