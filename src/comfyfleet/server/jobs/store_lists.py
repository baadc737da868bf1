"""SQL for operators' job lists: filters and counts the jobs of all tenants of a pool."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, func, literal, or_, select, text, tuple_

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import Moment, is_one_of, is_sqlite, without_index
from comfyfleet.server.db.tenant_tables import (
    HAS_ENDED_EFFECT,
    HAS_RARE_EFFECT,
    IS_ACTIVE,
    IS_ENDED,
    IS_RARE,
    ai_jobs,
)
from comfyfleet.server.jobs.model import (
    JobFilter,
    JobsFound,
    JobStatus,
    ListedJob,
    Place,
    merge_found,
)

ACTIVE = (JobStatus.QUEUED, JobStatus.PROCESSING)
# Number of the newest jobs that are searched for an error text, because error texts have no index.
LOOKED_AT_MAX = 5_000
# Upper limit for counts of jobs.
COUNTED_MAX = 10_000
_COLUMNS = tuple(ai_jobs.c[name] for name in ListedJob._fields)


async def list_newest(
    tx: Tx, job_filter: JobFilter, *, before: Place | None, limit: int
) -> JobsFound:
    """Returns the newest jobs of all tenants of the pool that match the filter. Ignores the
    filter's `worker_id`.
    """
    parts = []
    for part in _parts(tx, job_filter):
        query = select(*_COLUMNS).where(*_conditions(job_filter), *map(text, part))
        if before:
            place = tuple_(ai_jobs.c.submitted_at, ai_jobs.c.id)
            query = query.where(place < tuple_(literal(before[0], Moment()), before[1]))
        at: ColumnElement[Any] = ai_jobs.c.submitted_at
        if IS_ACTIVE in part:
            at = without_index(tx, ai_jobs.c.submitted_at)
        query = query.order_by(at.desc(), ai_jobs.c.id.desc())
        parts.append(await _fetch(tx, query, job_filter.error, limit))
    return merge_found(parts, limit)


async def _fetch(tx: Tx, query: Select[Any], error: str | None, limit: int) -> JobsFound:
    if error is None:
        jobs = [_listed(row) for row in await tx.execute(query.limit(limit))]
        return JobsFound(jobs, jobs[-1].place if len(jobs) == limit else None)
    some = query.add_columns(ai_jobs.c.raw_error).limit(LOOKED_AT_MAX).subquery()
    has_it = or_(*(some.c[name].icontains(error, autoescape=True) for name in _ERROR_COLUMNS))
    fitting = select(*(some.c[name] for name in ListedJob._fields)).where(has_it)
    newest = fitting.order_by(some.c.submitted_at.desc(), some.c.id.desc()).limit(limit)
    jobs = [_listed(row) for row in await tx.execute(newest)]
    if len(jobs) == limit:
        return JobsFound(jobs, jobs[-1].place)
    last = query.with_only_columns(ai_jobs.c.submitted_at, ai_jobs.c.id)
    end = (await tx.execute(last.offset(LOOKED_AT_MAX - 1).limit(1))).first()
    return JobsFound(jobs, None if end is None else (end[0], end[1]))


_ERROR_COLUMNS = ("error_message", "raw_error")


def _listed(row: Any) -> ListedJob:
    return ListedJob._make(row)._replace(status=JobStatus(row.status))


def _conditions(job_filter: JobFilter) -> list[ColumnElement[bool]]:
    columns: Mapping[str, Any] = {
        "tenant_id": job_filter.tenant_id,
        "workflow_slug": job_filter.workflow_slug,
        "effect_id": job_filter.effect_id,
    }
    conditions = [ai_jobs.c[name] == value for name, value in columns.items() if value is not None]
    if job_filter.since:
        conditions.append(ai_jobs.c.submitted_at >= job_filter.since)
    if job_filter.until:
        conditions.append(ai_jobs.c.submitted_at < job_filter.until)
    return conditions


def _parts(tx: Tx, job_filter: JobFilter) -> list[tuple[str, ...]]:
    """Splits a query into selects that can each use an index, and returns their conditions. The
    text of a condition must match that of the index.
    """
    statuses = job_filter.statuses
    if job_filter.error is not None and not statuses:
        statuses = (JobStatus.FAILED,)  # only failed jobs have errors
    if not statuses:
        is_named = job_filter.workflow_slug or job_filter.effect_id
        return [(IS_ACTIVE,), (_ended(job_filter),)] if is_named else [()]
    return [_part(tx, status, job_filter) for status in dict.fromkeys(statuses)]


def _ended(job_filter: JobFilter) -> str:
    return HAS_ENDED_EFFECT if job_filter.effect_id else IS_ENDED


def _part(tx: Tx, status: JobStatus, job_filter: JobFilter) -> tuple[str, ...]:
    own = f"status = '{status.value}'"
    if status in ACTIVE:
        return own, IS_ACTIVE
    if status == JobStatus.COMPLETED:
        return own, _ended(job_filter)
    # The status implies IS_RARE. SQLite needs both conditions to use the index, but PostgreSQL
    # would then underestimate the number of rows.
    return (own, HAS_RARE_EFFECT if job_filter.effect_id else IS_RARE) if is_sqlite(tx) else (own,)


async def count_by_status(tx: Tx, job_filter: JobFilter) -> dict[JobStatus, int]:
    """Counts the pool's jobs by status, up to COUNTED_MAX for each. Only applies filters on indexed
    columns.
    """
    counts = {}
    for status in job_filter.statuses or tuple(JobStatus):
        part = map(text, _part(tx, status, job_filter))
        some = select(ai_jobs.c.id).where(*_conditions(job_filter), *part).limit(COUNTED_MAX)
        query = select(func.count()).select_from(some.subquery())
        counts[status] = int(await tx.scalar(query) or 0)
    return counts


async def get_listed(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> list[ListedJob]:
    """Returns the tenant's jobs with these ids. Ids of missing jobs are left out."""
    is_own = without_index(tx, ai_jobs.c.tenant_id) == tenant_id
    query = select(*_COLUMNS).where(is_own, is_one_of(tx, ai_jobs.c.id, job_ids))
    return [_listed(row) for row in await tx.execute(query)]


async def find_listed(tx: Tx, job_ids: Sequence[UUID]) -> list[ListedJob]:
    """Returns the pool's jobs with these ids, regardless of their tenant. For operators only."""
    query = select(*_COLUMNS).where(is_one_of(tx, ai_jobs.c.id, job_ids))
    return [_listed(row) for row in await tx.execute(query)]


async def with_error(tx: Tx, job_ids: Sequence[UUID], error: str) -> set[UUID]:
    """Returns the ids of the jobs whose error message contains the text."""
    has_it = or_(*(ai_jobs.c[name].icontains(error, autoescape=True) for name in _ERROR_COLUMNS))
    query = select(ai_jobs.c.id).where(is_one_of(tx, ai_jobs.c.id, job_ids), has_it)
    return set(await tx.scalars(query))
