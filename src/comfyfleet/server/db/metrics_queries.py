"""SQL for metrics, sums over time and the operators' search. It uses tables of all packages."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import ColumnElement, case, delete, exists, func, literal_column, or_, select, text

from comfyfleet.api.account import TransactionType
from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import (
    IS_ENDED,
    LEASED,
    QUEUED,
    dispatches,
    effects,
    fleets,
    rollups,
    tenants,
    worker_readings,
    workers,
    workflow_fleets,
    workflows,
)
from comfyfleet.server.db.dialect import Moment, seconds_between, upsert_sum_each
from comfyfleet.server.db.tenant_tables import (
    HAS_OLD_PROMPT,
    ai_jobs,
    graph_runs,
    pipeline_runs,
    token_transactions,
    users,
)

READINGS_MAX = 5_000
# Rollup intervals in seconds for the 1-hour, 1-day and 1-week charts.
MINUTE, QUARTER, TWO_HOURS = ROLLUP_STEPS = (60, 900, 7_200)
# Prefix for the names of sums that count runs with the same model as the previous run, and runs
# with another model.
MODEL_RUNS = "model:"


class FleetRow(NamedTuple):
    id: int
    slug: str
    stage: str
    max_workers: int | None


class WorkersRow(NamedTuple):
    """The number of a fleet's workers in the same state."""

    fleet_id: int
    is_approved: bool
    is_draining: bool
    is_busy: bool
    is_offline: bool
    workers: int
    slots: int  # Number of jobs that these workers can run in parallel.


class EndedCountRow(NamedTuple):
    workflow_id: int
    stage: str
    status: str
    jobs: int
    timed: int  # Number of jobs with a known duration.
    seconds: float
    at_most: tuple[int, ...]  # For each bucket, the number of jobs up to its upper bound.


async def workflow_slugs(tx: Tx) -> dict[int, str]:
    rows = await tx.execute(select(workflows.c.id, workflows.c.slug))
    return {row.id: row.slug for row in rows}


async def all_fleets(tx: Tx) -> list[FleetRow]:
    query = select(fleets.c.id, fleets.c.slug, fleets.c.stage, fleets.c.max_workers)
    return [FleetRow(*row) for row in await tx.execute(query)]


async def assignments(tx: Tx) -> list[tuple[int, int]]:
    """Returns the ids of all assigned pairs of fleet and workflow."""
    query = select(workflow_fleets.c.fleet_id, workflow_fleets.c.workflow_id)
    return [(row.fleet_id, row.workflow_id) for row in await tx.execute(query)]


async def workers_by_state(tx: Tx, *, offline_before: datetime) -> list[WorkersRow]:
    """Counts workers by state. The database does the counting, so that few rows are returned."""
    w = workers.c
    # Uses the leases, because a polling worker's last report may be a minute old.
    has_lease = exists().where(text(LEASED), dispatches.c.worker_id == w.worker_id)
    # A worker whose ComfyUI is down can't run jobs, so it counts as offline.
    is_unusable = or_(w.last_seen_at < offline_before, w.backend_problem.is_not(None))
    states = (
        w.fleet_id,
        w.is_approved,
        w.is_draining,
        case((has_lease, 1), else_=0).label("is_busy"),
        case((is_unusable, 1), else_=0).label("is_offline"),
    )
    names = ("fleet_id", "is_approved", "is_draining", "is_busy", "is_offline")
    query = select(*states, func.count(), func.sum(w.max_concurrency)).group_by(*names)
    return [WorkersRow(*row) for row in await tx.execute(query)]


async def ended_counts(
    tx: Tx, *, after: datetime, until: datetime, buckets: Sequence[float]
) -> list[EndedCountRow]:
    """Counts the jobs that ended in a period by workflow, stage and outcome."""
    d = dispatches.c
    counted = [func.sum(case((d.duration_seconds <= most, 1), else_=0)) for most in buckets]
    query = (
        select(
            d.workflow_id,
            d.stage,
            d.status,
            func.count(),
            func.count(d.duration_seconds),
            func.coalesce(func.sum(d.duration_seconds), 0.0),
            *counted,
        )
        .where(d.ended_at.is_not(None), d.ended_at > after, d.ended_at <= until)
        .group_by(d.workflow_id, d.stage, d.status)
    )
    rows: list[Any] = list(await tx.execute(query))
    return [EndedCountRow._make((*row[:6], tuple(map(int, row[6:])))) for row in rows]


class EndedJobsRow(NamedTuple):
    """The number of jobs that have the same outcome and fall into the same buckets of waiting and
    running time. Bucket -1 means that the time is unknown.
    """

    workflow_id: int
    status: str
    wait_bucket: int
    run_bucket: int
    jobs: int
    run_seconds: float


async def first_ended(tx: Tx, *, after: datetime, until: datetime) -> datetime | None:
    d = dispatches.c
    query = select(d.ended_at).where(text(IS_ENDED), d.ended_at > after, d.ended_at <= until)
    ended_at: datetime | None = await tx.scalar(query.order_by(d.ended_at).limit(1))
    return ended_at


async def is_any_active(tx: Tx) -> bool:
    """Checks whether any job is queued or leased.

    The order matches the indexes. Without it, the database might read the whole table.
    """
    d = dispatches.c
    for part, first in ((QUEUED, d.tenant_id), (LEASED, d.lease_expires_at)):
        if await tx.scalar(select(d.id).where(text(part)).order_by(first).limit(1)) is not None:
            return True
    return False


async def ended_jobs(
    tx: Tx, *, after: datetime, until: datetime, buckets: Sequence[float]
) -> list[EndedJobsRow]:
    """Counts the jobs that ended in a period by the wait for their last worker and their run
    time.
    """
    d = dispatches.c
    begun = func.coalesce(d.started_at, d.leased_at, type_=Moment)
    waited = _bucket(seconds_between(tx, d.queued_at, begun), buckets).label("waited")
    ran = _bucket(d.duration_seconds, buckets).label("ran")
    query = (
        select(
            d.workflow_id,
            d.status,
            waited,
            ran,
            func.count(),
            func.coalesce(func.sum(d.duration_seconds), 0.0),
        )
        .where(text(IS_ENDED), d.ended_at > after, d.ended_at <= until)
        .group_by(d.workflow_id, d.status, "waited", "ran")
    )
    return [EndedJobsRow(*row) for row in await tx.execute(query)]


def _bucket(value: ColumnElement[Any], buckets: Sequence[float]) -> ColumnElement[int]:
    """Returns an expression for the first bucket that a value fits into.

    The bounds are literals, because GROUP BY requires exactly the same expression.
    """
    fitting: list[Any] = [
        (value <= literal_column(str(most)), literal_column(str(number)))
        for number, most in enumerate(buckets)
    ]
    beyond: ColumnElement[int] = literal_column(str(len(buckets)))
    return case((value.is_(None), literal_column("-1")), *fitting, else_=beyond)


async def mean_gpu_percent(tx: Tx, *, after: datetime, until: datetime) -> float | None:
    """Returns the mean GPU load that workers reported, or None if no worker has reported it."""
    r = worker_readings.c
    load = r.reading["gpu_load_percent"].as_float()
    some = select(load.label("load")).where(r.at > after, r.at <= until).limit(READINGS_MAX)
    mean = await tx.scalar(select(func.avg(some.subquery().c.load)))
    return None if mean is None else float(mean)


async def add_sums(
    tx: Tx, at: datetime, sums: Mapping[str, float], *, steps: Sequence[int]
) -> None:
    """Adds sums to the time steps that contain `at`.

    The rows are written in a fixed order, so that control planes can't deadlock.
    """
    rows = [
        {"step_seconds": step, "at": step_start(at, step), "name": name, "value": sums[name]}
        for step in sorted(steps)
        for name in sorted(sums)
        if sums[name]
    ]
    if rows:
        key = ("step_seconds", "at", "name")
        await tx.execute(upsert_sum_each(tx, rollups, key=key), rows)


def step_start(at: datetime, step_seconds: int) -> datetime:
    seconds = int(at.timestamp())
    return datetime.fromtimestamp(seconds - seconds % step_seconds, UTC)


async def read_sums(
    tx: Tx, step_seconds: int, *, since: datetime
) -> dict[datetime, dict[str, float]]:
    """Returns the sums by the start of their time step and by name."""
    query = select(rollups.c.at, rollups.c.name, rollups.c.value).where(
        rollups.c.step_seconds == step_seconds, rollups.c.at >= since
    )
    sums: dict[datetime, dict[str, float]] = {}
    for at, name, value in await tx.execute(query):
        sums.setdefault(at, {})[name] = value
    return sums


async def delete_sums(tx: Tx, step_seconds: int, *, before: datetime) -> None:
    old = delete(rollups).where(rollups.c.step_seconds == step_seconds, rollups.c.at < before)
    await tx.execute(old)


async def tokens_used(tx: Tx, *, after: datetime, until: datetime) -> int:
    """Returns the cost of the pool's completed jobs, which is reserved minus returned tokens."""
    j, t = ai_jobs.c, token_transactions.c
    is_settled = (
        (t.tenant_id == j.tenant_id) & (t.job_id == j.id) & (t.type == TransactionType.JOB_CONSUME)
    )
    query = (
        select(func.coalesce(func.sum(j.reserved_tokens), 0) - func.coalesce(func.sum(t.amount), 0))
        .select_from(ai_jobs.outerjoin(token_transactions, is_settled))
        .where(
            text(HAS_OLD_PROMPT),
            j.completed_at > after,
            j.completed_at <= until,
            j.status == "completed",
            j.reserved_tokens > 0,
        )
    )
    return int(await tx.scalar(query) or 0)


# Conditions for tables of a tenant pool. They match the conditions of the indexes literally,
# because SQLite wouldn't use the indexes otherwise.
GOING_ON = text("status IN ('pending', 'running', 'waiting_for_user')")
ACTIVE = text("status IN ('queued', 'processing')")


async def active_graph_runs(tx: Tx) -> dict[str, int]:
    """Counts active graph runs by status."""
    query = select(graph_runs.c.status, func.count()).where(GOING_ON)
    return _counted(await tx.execute(query.group_by(graph_runs.c.status)))


async def pipeline_runs_by_status(tx: Tx) -> dict[str, int]:
    query = select(pipeline_runs.c.status, func.count()).group_by(pipeline_runs.c.status)
    return _counted(await tx.execute(query))


async def jobs_of_runs(tx: Tx) -> dict[tuple[str, str], int]:
    """Counts the active jobs of runs by kind of run and status."""
    query = (
        select(ai_jobs.c.run_kind, ai_jobs.c.status, func.count())
        .where(ACTIVE, ai_jobs.c.run_kind.is_not(None))
        .group_by(ai_jobs.c.run_kind, ai_jobs.c.status)
    )
    return {(kind, status): count for kind, status, count in await tx.execute(query)}


def _counted(rows: Iterable[Any]) -> dict[str, int]:
    return {row[0]: row[1] for row in rows}


class IdSpan(NamedTuple):
    """The range of ids with a common prefix, which can be searched in an index."""

    first: UUID
    last: UUID

    @classmethod
    def starting_with(cls, digits: str) -> "IdSpan":
        return cls(UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f")))


class FoundRow(NamedTuple):
    id: Any
    name: str
    detail: Any


async def find_workers(tx: Tx, text: str, *, limit: int) -> list[FoundRow]:
    w = workers.c
    query = (
        select(w.worker_id, w.worker_id, fleets.c.slug + "/" + fleets.c.stage)
        .join(fleets, fleets.c.id == w.fleet_id)
        .where(_has(w.worker_id, text))
        .order_by(w.worker_id)
    )
    return [FoundRow(*row) for row in await tx.execute(query.limit(limit))]


async def find_tenants(tx: Tx, text: str, span: IdSpan | None, *, limit: int) -> list[FoundRow]:
    t = tenants.c
    fits = [_has(t.name, text)]
    if span is not None:
        fits.append(t.id.between(*span))
    query = select(t.id, t.name, t.pool).where(or_(*fits)).order_by(t.name, t.id)
    return [FoundRow(*row) for row in await tx.execute(query.limit(limit))]


async def find_effects(tx: Tx, text: str, *, limit: int) -> list[FoundRow]:
    e = effects.c
    fits = or_(_has(e.slug, text), _has(e.title, text))
    query = select(e.slug, e.title, e.is_published).where(fits).order_by(e.slug)
    return [FoundRow(*row) for row in await tx.execute(query.limit(limit))]


async def find_workflows(tx: Tx, text: str, *, limit: int) -> list[FoundRow]:
    w = workflows.c
    query = select(w.slug, w.slug, w.is_active).where(_has(w.slug, text), w.is_open.is_(False))
    return [FoundRow(*row) for row in await tx.execute(query.order_by(w.slug).limit(limit))]


async def find_jobs(tx: Tx, span: IdSpan, *, limit: int) -> list[FoundRow]:
    """Finds a pool's jobs by a range of ids."""
    j = ai_jobs.c
    query = select(j.id, j.workflow_slug, j.status).where(j.id.between(*span)).order_by(j.id)
    return [FoundRow(*row) for row in await tx.execute(query.limit(limit))]


async def find_jobs_among(tx: Tx, job_ids: Sequence[UUID], *, limit: int) -> list[FoundRow]:
    j = ai_jobs.c
    query = select(j.id, j.workflow_slug, j.status).where(j.id.in_(job_ids)).order_by(j.id)
    return [FoundRow(*row) for row in await tx.execute(query.limit(limit))]


async def newest_users(tx: Tx, *, limit: int) -> list[tuple[UUID, UUID]]:
    """Returns the tenant ids and user ids of the newest users."""
    query = select(users.c.tenant_id, users.c.id).order_by(users.c.created_at.desc())
    return [(row.tenant_id, row.id) for row in await tx.execute(query.limit(limit))]


def _has(column: ColumnElement[str], text: str) -> ColumnElement[bool]:
    return column.icontains(text, autoescape=True)
