"""The jobs of runs: what each makes, out of whom, and how it stands."""

from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import RowMapping, func, insert, select, update

from comfyfleet.db import Tx
from comfyfleet.db.dialect import locked
from comfyfleet.db.pipelines import pipeline_jobs
from comfyfleet.db.tenant import ai_jobs
from comfyfleet.pipelines.model import FailedJob, JobInFlight, JobState, PipelineJob

ACTIVE = ("queued", "processing")


class Underway(NamedTuple):
    """A job in flight, as its own row says it is."""

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
    )


async def add(tx: Tx, tenant_id: UUID, job: PipelineJob) -> None:
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
    }
    await tx.execute(insert(pipeline_jobs).values(row))


async def next_number(tx: Tx, run_id: UUID, step: int, parent: UUID | None) -> int:
    """Never used before: those that failed or were cancelled keep theirs."""
    is_same = pipeline_jobs.c.parent_id == parent if parent else pipeline_jobs.c.parent_id.is_(None)
    found = await tx.scalar(
        select(func.count()).where(
            pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.step == step, is_same
        )
    )
    return int(found or 0)


async def get(tx: Tx, run_id: UUID, job_id: UUID) -> PipelineJob | None:
    query = select(pipeline_jobs).where(
        pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.id == job_id
    )
    row = (await tx.execute(query)).mappings().one_or_none()
    return _job(row) if row else None


async def in_flight(tx: Tx, run_id: UUID) -> list[JobInFlight]:
    """Also those that have ended, and whose candidates are not written yet."""
    found = await tx.execute(
        select(
            pipeline_jobs.c.id, pipeline_jobs.c.step, pipeline_jobs.c.parent_id, ai_jobs.c.status
        )
        .join(ai_jobs, ai_jobs.c.id == pipeline_jobs.c.id)
        .where(pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.IN_FLIGHT)
    )
    return [
        JobInFlight(row.id, row.step, row.parent_id, is_queued=row.status == "queued")
        for row in found
    ]


async def failed(tx: Tx, run_id: UUID) -> tuple[FailedJob, ...]:
    found = await tx.execute(
        select(pipeline_jobs.c.id, pipeline_jobs.c.step, pipeline_jobs.c.parent_id).where(
            pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.FAILED
        )
    )
    return tuple(FailedJob(row.id, row.step, row.parent_id) for row in found)


async def page_of_failed(tx: Tx, run_id: UUID, *, limit: int) -> list[PipelineJob]:
    """The newest first."""
    found = await tx.execute(
        select(pipeline_jobs)
        .where(pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.FAILED)
        .order_by(pipeline_jobs.c.ended_at.desc(), pipeline_jobs.c.id)
        .limit(limit)
    )
    return [_job(row) for row in found.mappings()]


async def failures_since(tx: Tx, run_id: UUID, since: datetime) -> int:
    """Also those that have been retried since."""
    found = await tx.scalar(
        select(func.count()).where(
            pipeline_jobs.c.run_id == run_id,
            pipeline_jobs.c.ended_at >= since,
            pipeline_jobs.c.status.in_((JobState.FAILED, JobState.RETRIED)),
        )
    )
    return int(found or 0)


async def counts(tx: Tx, run_id: UUID) -> dict[JobState, int]:
    found = await tx.execute(
        select(pipeline_jobs.c.status, func.count().label("jobs"))
        .where(pipeline_jobs.c.run_id == run_id)
        .group_by(pipeline_jobs.c.status)
    )
    return {JobState(row.status): int(row.jobs) for row in found}


async def mean_seconds(tx: Tx, run_id: UUID, *, of_last: int) -> float | None:
    """From submit to end, of the last that were done."""
    found = await tx.execute(
        select(pipeline_jobs.c.created_at, pipeline_jobs.c.ended_at)
        .where(pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.DONE)
        .order_by(pipeline_jobs.c.ended_at.desc())
        .limit(of_last)
    )
    took = [(row.ended_at - row.created_at).total_seconds() for row in found]
    return sum(took) / len(took) if took else None


async def queued_of(tx: Tx, run_id: UUID) -> list[UUID]:
    """Locked: none of them is started until the transaction ends."""
    query = (
        select(ai_jobs.c.id)
        .join(pipeline_jobs, ai_jobs.c.id == pipeline_jobs.c.id)
        .where(
            pipeline_jobs.c.run_id == run_id,
            pipeline_jobs.c.status == JobState.IN_FLIGHT,
            ai_jobs.c.status == "queued",
        )
    )
    return [row.id for row in await tx.execute(locked(tx, query))]


async def end(
    tx: Tx,
    job_id: UUID,
    state: JobState,
    *,
    now: datetime,
    error: str | None = None,
    is_refunded: bool = False,
) -> bool:
    """Only one that is in flight: whoever says it first is heard."""
    values: dict[str, Any] = {"status": state, "ended_at": now, "error": error}
    if is_refunded:
        values["tokens"] = 0
    done = await tx.execute(
        update(pipeline_jobs)
        .where(pipeline_jobs.c.id == job_id, pipeline_jobs.c.status == JobState.IN_FLIGHT)
        .values(values)
    )
    return bool(done.rowcount)


async def free_failed(tx: Tx, run_id: UUID, job_id: UUID | None) -> list[UUID]:
    """This one, or all: their places are free."""
    failed_ones = update(pipeline_jobs).where(
        pipeline_jobs.c.run_id == run_id, pipeline_jobs.c.status == JobState.FAILED
    )
    if job_id:
        failed_ones = failed_ones.where(pipeline_jobs.c.id == job_id)
    done = await tx.execute(
        failed_ones.values(status=JobState.RETRIED).returning(pipeline_jobs.c.id)
    )
    return [row.id for row in done]


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


async def underway(tx: Tx, *, limit: int) -> list[Underway]:
    """Those that have waited or run longest first."""
    query = _UNDERWAY.where(ai_jobs.c.status.in_(ACTIVE))
    found = await tx.execute(query.order_by(ai_jobs.c.submitted_at).limit(limit))
    return [Underway(*row) for row in found]


async def ended_unheard(tx: Tx, *, limit: int) -> list[Underway]:
    """Whose candidates are not written though they have ended."""
    query = _UNDERWAY.where(ai_jobs.c.status.not_in(ACTIVE))
    found = await tx.execute(query.order_by(ai_jobs.c.completed_at).limit(limit))
    return [Underway(*row) for row in found]
