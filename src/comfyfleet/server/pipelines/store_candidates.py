"""The SQL for candidates and for the jobs that generate them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import RowMapping, case, func, insert, literal, select, tuple_, update

from comfyfleet.api.pipelines import CandidateSort
from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import Moment, for_update, is_one_of
from comfyfleet.server.db.tenant_tables import ai_jobs, pipeline_jobs
from comfyfleet.server.db.tenant_tables import pipeline_candidates as candidates
from comfyfleet.server.pipelines.model import (
    CandidateStatus,
    FailedJob,
    JobInFlight,
    JobState,
    JudgedBy,
    PipelineCandidate,
    PipelineJob,
)

# The columns that decisions need. Properties are left out, because they may be long.
_DECIDING = (
    "id",
    "step",
    "parent_id",
    "status",
    "score",
    "child_count",
    "job_id",
    "output_index",
    "created_at",
    "judged_by",
    "judge_score",
    "judge_error",
)
_WITH_JOB = select(
    candidates,
    select(ai_jobs.c.provider_job_id)
    .where(ai_jobs.c.tenant_id == candidates.c.tenant_id, ai_jobs.c.id == candidates.c.job_id)
    .scalar_subquery()
    .label("provider_job_id"),
)
_NO_SCORE = -sys.float_info.max  # lower than any score of a judge
_BEST_FIRST = ("winner", "approved", "active", "rejected")


@dataclass(frozen=True, slots=True)
class CandidateFilter:
    step: int | None = None
    status: CandidateStatus | None = None
    parent: UUID | None = None
    is_base: bool = False  # only those without a parent
    sort: CandidateSort = CandidateSort.OLDEST


def _light(row: RowMapping) -> PipelineCandidate:
    return PipelineCandidate(
        id=row["id"],
        step=row["step"],
        created_at=row["created_at"],
        parent=row["parent_id"],
        status=CandidateStatus(row["status"]),
        score=row["score"],
        child_count=row["child_count"],
        job_id=row["job_id"],
        output_index=row["output_index"],
        **_judged(row),
    )


def _judged(row: RowMapping) -> dict[str, Any]:
    return {
        "judged_by": JudgedBy(row["judged_by"]) if row["judged_by"] else None,
        "judge_score": row["judge_score"],
        "judge_error": row["judge_error"],
    }


def _whole(row: RowMapping) -> PipelineCandidate:
    file = {
        "file_id": str(row["file_id"]) if row["file_id"] else None,
        "path": row["path"],
        "mime_type": row["mime_type"],
        "size": row["size"],
    }
    return PipelineCandidate(
        id=row["id"],
        step=row["step"],
        created_at=row["created_at"],
        parent=row["parent_id"],
        status=CandidateStatus(row["status"]),
        score=row["score"],
        child_count=row["child_count"],
        file=file,
        text=row["text"],
        seed=None if row["seed"] is None else int(row["seed"]),
        properties=row["properties"],
        job_id=row["job_id"],
        output_index=row["output_index"],
        provider_job_id=row["provider_job_id"],
        **_judged(row),
    )


async def add_candidate(
    tx: Tx, tenant_id: UUID, run_id: UUID, rows: Sequence[PipelineCandidate]
) -> None:
    await tx.execute(insert(candidates), [_row(tenant_id, run_id, candidate) for candidate in rows])


def _row(tenant_id: UUID, run_id: UUID, candidate: PipelineCandidate) -> dict[str, Any]:
    file = candidate.file or {}
    return {
        "id": candidate.id,
        "tenant_id": tenant_id,
        "run_id": run_id,
        "step": candidate.step,
        "parent_id": candidate.parent,
        "job_id": candidate.job_id,
        "output_index": candidate.output_index,
        "file_id": UUID(file["file_id"]) if file.get("file_id") else None,
        "path": file["path"],
        "mime_type": file["mime_type"],
        "size": file["size"],
        "seed": None if candidate.seed is None else str(candidate.seed),
        "properties": dict(candidate.properties),
        "score": candidate.score,
        "status": candidate.status,
        "child_count": 0,
        "created_at": candidate.created_at,
        "text": candidate.text,
        "judge_error": candidate.judge_error,
    }


async def count_children(tx: Tx, parent: UUID, more: int) -> None:
    await tx.execute(
        update(candidates)
        .where(candidates.c.id == parent)
        .values(child_count=candidates.c.child_count + more)
    )


async def tree_of(tx: Tx, run_id: UUID) -> dict[UUID, PipelineCandidate]:
    columns = [candidates.c[name] for name in _DECIDING]
    rows = await tx.execute(select(*columns).where(candidates.c.run_id == run_id))
    return {row["id"]: _light(row) for row in rows.mappings()}


async def get_candidate(tx: Tx, run_id: UUID, candidate_id: UUID) -> PipelineCandidate | None:
    rows = await tx.execute(
        _WITH_JOB.where(candidates.c.run_id == run_id, candidates.c.id == candidate_id)
    )
    row = rows.mappings().one_or_none()
    return _whole(row) if row else None


async def list_page(
    tx: Tx, run_id: UUID, wanted: CandidateFilter, *, after: PipelineCandidate | None, limit: int
) -> list[PipelineCandidate]:
    """Returns a page of candidates. If they are sorted by `best`, there is only one page."""
    query = _WITH_JOB.where(candidates.c.run_id == run_id)
    if wanted.step is not None:
        query = query.where(candidates.c.step == wanted.step)
    if wanted.status:
        query = query.where(candidates.c.status == wanted.status)
    if wanted.parent:
        query = query.where(candidates.c.parent_id == wanted.parent)
    if wanted.is_base:
        query = query.where(candidates.c.parent_id.is_(None))
    order: tuple[Any, ...] = (candidates.c.created_at, candidates.c.id)
    if wanted.sort == CandidateSort.SCORE:
        order = (-func.coalesce(candidates.c.judge_score, _NO_SCORE), *order)
    if after and wanted.sort != CandidateSort.BEST:
        query = query.where(tuple_(*order) > tuple_(*_place(after, wanted.sort)))
    if wanted.sort == CandidateSort.BEST:
        ranks = {status: rank for rank, status in enumerate(_BEST_FIRST)}
        rank = case(ranks, value=candidates.c.status)
        order = (rank, candidates.c.step.desc(), candidates.c.score.desc(), *order)
    rows = await tx.execute(query.order_by(*order).limit(limit))
    return [_whole(row) for row in rows.mappings()]


def _place(after: PipelineCandidate, sort: CandidateSort) -> tuple[Any, ...]:
    age = (literal(after.created_at, Moment()), after.id)
    score = _NO_SCORE if after.judge_score is None else after.judge_score
    return (-score, *age) if sort == CandidateSort.SCORE else age


async def set_status(
    tx: Tx,
    candidate_id: UUID,
    *,
    before: CandidateStatus,
    after: CandidateStatus,
    judged_by: JudgedBy | None,
) -> bool:
    done = await tx.execute(
        update(candidates)
        .where(candidates.c.id == candidate_id, candidates.c.status == before)
        .values(status=after, judged_by=judged_by)
    )
    return bool(done.rowcount)


async def set_judge_result(
    tx: Tx, candidate_ids: Sequence[UUID], *, score: float | None, error: str | None
) -> None:
    """Writes the result of a judge. If both values are None, the judge will score the candidates
    again."""
    await tx.execute(
        update(candidates)
        .where(is_one_of(tx, candidates.c.id, candidate_ids))
        .values(judge_score=score, judge_error=error)
    )


async def set_scores(tx: Tx, scores: Mapping[UUID, float]) -> None:
    for candidate_id, score in scores.items():
        await tx.execute(
            update(candidates).where(candidates.c.id == candidate_id).values(score=score)
        )


async def reset_scores(tx: Tx, run_id: UUID, score: float) -> None:
    await tx.execute(update(candidates).where(candidates.c.run_id == run_id).values(score=score))


async def bytes_of(tx: Tx, run_id: UUID) -> int:
    """Returns the total size of the files that still exist."""
    total = await tx.scalar(
        select(func.coalesce(func.sum(candidates.c.size), 0)).where(
            candidates.c.run_id == run_id, candidates.c.file_id.is_not(None)
        )
    )
    return int(total or 0)


async def files_of(tx: Tx, run_id: UUID, *, limit: int) -> dict[UUID, UUID]:
    """Returns the file ids of the candidates that still have a file."""
    rows = await tx.execute(
        select(candidates.c.id, candidates.c.file_id)
        .where(candidates.c.run_id == run_id, candidates.c.file_id.is_not(None))
        .limit(limit)
    )
    return {row.id: row.file_id for row in rows}


async def clear_file(tx: Tx, candidate_id: UUID) -> None:
    await tx.execute(update(candidates).where(candidates.c.id == candidate_id).values(file_id=None))


ACTIVE = ("queued", "processing")


class UnderwayJob(NamedTuple):
    """A job in flight, with the status of its own row."""

    tenant_id: UUID
    run_id: UUID
    job_id: UUID
    status: str
    timeout_seconds: int
    submitted_at: datetime
    started_at: datetime | None


def _job(row: RowMapping) -> PipelineJob:
    return PipelineJob(
        id=row["id"],
        run_id=row["run_id"],
        step=row["step"],
        parent=row["parent_id"],
        number=row["number"],
        seed=None if row["seed"] is None else int(row["seed"]),
        state=JobState(row["status"]),
        tokens=row["tokens"],
        timeout_seconds=row["timeout_seconds"],
        error=row["error"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
        is_judge=row["is_judge"],
    )


async def add_job(tx: Tx, tenant_id: UUID, job: PipelineJob) -> None:
    row = {
        "id": job.id,
        "tenant_id": tenant_id,
        "run_id": job.run_id,
        "step": job.step,
        "parent_id": job.parent,
        "number": job.number,
        "seed": None if job.seed is None else str(job.seed),
        "status": job.state,
        "tokens": job.tokens,
        "timeout_seconds": job.timeout_seconds,
        "created_at": job.created_at,
        "is_judge": job.is_judge,
    }
    await tx.execute(insert(pipeline_jobs).values(row))


async def next_number(tx: Tx, run_id: UUID, step: int, parent: UUID | None) -> int:
    """Returns the next unused job number. Failed and cancelled jobs keep their numbers."""
    is_same = pipeline_jobs.c.parent_id == parent if parent else pipeline_jobs.c.parent_id.is_(None)
    count = await tx.scalar(
        select(func.count()).where(
            pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.step == step, is_same
        )
    )
    return int(count or 0)


async def get_job(tx: Tx, run_id: UUID, job_id: UUID) -> PipelineJob | None:
    query = select(pipeline_jobs).where(
        pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.id == job_id
    )
    row = (await tx.execute(query)).mappings().one_or_none()
    return _job(row) if row else None


async def in_flight(tx: Tx, run_id: UUID) -> list[JobInFlight]:
    """Returns the jobs in flight, including ended jobs whose candidates are not written yet."""
    rows = await tx.execute(
        select(
            pipeline_jobs.c.id,
            pipeline_jobs.c.step,
            pipeline_jobs.c.parent_id,
            pipeline_jobs.c.is_judge,
            ai_jobs.c.status,
        )
        .join(ai_jobs, ai_jobs.c.id == pipeline_jobs.c.id)
        .where(pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.IN_FLIGHT)
    )
    return [
        JobInFlight(row.id, row.step, row.parent_id, row.status == "queued", row.is_judge)
        for row in rows
    ]


async def list_failed(tx: Tx, run_id: UUID) -> tuple[FailedJob, ...]:
    rows = await tx.execute(
        select(
            pipeline_jobs.c.id,
            pipeline_jobs.c.step,
            pipeline_jobs.c.parent_id,
            pipeline_jobs.c.is_judge,
        ).where(pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.FAILED)
    )
    return tuple(FailedJob(row.id, row.step, row.parent_id, row.is_judge) for row in rows)


async def page_of_failed(tx: Tx, run_id: UUID, *, limit: int) -> list[PipelineJob]:
    """Returns failed jobs, newest first."""
    rows = await tx.execute(
        select(pipeline_jobs)
        .where(pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.FAILED)
        .order_by(pipeline_jobs.c.ended_at.desc(), pipeline_jobs.c.id)
        .limit(limit)
    )
    return [_job(row) for row in rows.mappings()]


async def failures_since(tx: Tx, run_id: UUID, since: datetime) -> int:
    """Counts failed jobs, including retried ones."""
    count = await tx.scalar(
        select(func.count()).where(
            pipeline_jobs.c.run_id == run_id,
            pipeline_jobs.c.ended_at >= since,
            pipeline_jobs.c.status.in_((JobState.FAILED, JobState.RETRIED)),
        )
    )
    return int(count or 0)


async def count_by_state(tx: Tx, run_id: UUID) -> dict[JobState, int]:
    rows = await tx.execute(
        select(pipeline_jobs.c.status, func.count().label("jobs"))
        .where(pipeline_jobs.c.run_id == run_id)
        .group_by(pipeline_jobs.c.status)
    )
    return {JobState(row.status): int(row.jobs) for row in rows}


async def mean_seconds(tx: Tx, run_id: UUID, *, of_last: int) -> float | None:
    """Returns the mean time from submission to end of the last successful jobs."""
    rows = await tx.execute(
        select(pipeline_jobs.c.created_at, pipeline_jobs.c.ended_at)
        .where(pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.DONE)
        .order_by(pipeline_jobs.c.ended_at.desc())
        .limit(of_last)
    )
    took = [(row.ended_at - row.created_at).total_seconds() for row in rows]
    return sum(took) / len(took) if took else None


async def queued_of(tx: Tx, run_id: UUID) -> list[UUID]:
    """Returns queued jobs and locks them, so that none of them can start until the transaction
    ends."""
    query = (
        select(ai_jobs.c.id)
        .join(pipeline_jobs, ai_jobs.c.id == pipeline_jobs.c.id)
        .where(
            pipeline_jobs.c.run_id == run_id,
            pipeline_jobs.c.status == JobState.IN_FLIGHT,
            ai_jobs.c.status == "queued",
        )
    )
    return [row.id for row in await tx.execute(for_update(tx, query))]


async def end_job(
    tx: Tx,
    job_id: UUID,
    state: JobState,
    *,
    now: datetime,
    error: str | None = None,
    is_refunded: bool = False,
) -> bool:
    """Ends a job that is in flight. Returns False if another process ended it first."""
    values: dict[str, Any] = {"status": state, "ended_at": now, "error": error}
    if is_refunded:
        values["tokens"] = 0
    done = await tx.execute(
        update(pipeline_jobs)
        .where(pipeline_jobs.c.id == job_id, pipeline_jobs.c.status == JobState.IN_FLIGHT)
        .values(values)
    )
    return bool(done.rowcount)


async def release_failed(tx: Tx, run_id: UUID, job_id: UUID | None) -> list[FailedJob]:
    """Marks one failed job or all of them as retried, which frees their places."""
    failed_ones = update(pipeline_jobs).where(
        pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.FAILED
    )
    if job_id:
        failed_ones = failed_ones.where(pipeline_jobs.c.id == job_id)
    done = await tx.execute(
        failed_ones.values(status=JobState.RETRIED).returning(
            pipeline_jobs.c.id,
            pipeline_jobs.c.step,
            pipeline_jobs.c.parent_id,
            pipeline_jobs.c.is_judge,
        )
    )
    return [FailedJob(row.id, row.step, row.parent_id, row.is_judge) for row in done]


_UNDERWAY = (
    select(
        pipeline_jobs.c.tenant_id,
        pipeline_jobs.c.run_id,
        pipeline_jobs.c.id.label("job_id"),
        ai_jobs.c.status,
        pipeline_jobs.c.timeout_seconds,
        ai_jobs.c.submitted_at,
        ai_jobs.c.started_at,
    )
    .join(ai_jobs, ai_jobs.c.id == pipeline_jobs.c.id)
    .where(pipeline_jobs.c.status == JobState.IN_FLIGHT)
)


async def list_underway(tx: Tx, *, limit: int) -> list[UnderwayJob]:
    """Returns active jobs, oldest first."""
    query = _UNDERWAY.where(ai_jobs.c.status.in_(ACTIVE))
    rows = await tx.execute(query.order_by(ai_jobs.c.submitted_at).limit(limit))
    return [UnderwayJob(*row) for row in rows]


async def ended_uncollected(tx: Tx, *, limit: int) -> list[UnderwayJob]:
    """Returns ended jobs whose candidates are not written yet."""
    query = _UNDERWAY.where(ai_jobs.c.status.not_in(ACTIVE))
    rows = await tx.execute(query.order_by(ai_jobs.c.completed_at).limit(limit))
    return [UnderwayJob(*row) for row in rows]
