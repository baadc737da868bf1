"""SQL of the metrics: a handful of grouped queries over all tables."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import case, func, select, text

from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import (
    dispatches,
    fleets,
    workers,
    workflow_fleets,
    workflows,
)
from comfyfleet.server.db.tenant_tables import ai_jobs, graph_runs, pipeline_runs


class FleetRow(NamedTuple):
    id: int
    slug: str
    stage: str
    max_workers: int | None


class WorkersRow(NamedTuple):
    """Workers of a fleet that are in the same state."""

    fleet_id: int
    is_approved: bool
    is_draining: bool
    is_busy: bool
    is_offline: bool
    workers: int
    slots: int  # how many jobs they run at once


class EndedCountRow(NamedTuple):
    workflow_id: int
    stage: str
    status: str
    jobs: int
    timed: int  # those of which the duration is known
    seconds: float
    at_most: tuple[int, ...]  # how many lasted at most so long, by bucket


async def workflow_slugs(tx: Tx) -> dict[int, str]:
    rows = await tx.execute(select(workflows.c.id, workflows.c.slug))
    return {row.id: row.slug for row in rows}


async def all_fleets(tx: Tx) -> list[FleetRow]:
    query = select(fleets.c.id, fleets.c.slug, fleets.c.stage, fleets.c.max_workers)
    return [FleetRow(*row) for row in await tx.execute(query)]


async def assignments(tx: Tx) -> list[tuple[int, int]]:
    """Returns pairs of (fleet, workflow)."""
    query = select(workflow_fleets.c.fleet_id, workflow_fleets.c.workflow_id)
    return [(row.fleet_id, row.workflow_id) for row in await tx.execute(query)]


async def workers_by_state(tx: Tx, *, offline_before: datetime) -> list[WorkersRow]:
    """Counts workers by state in the database: for ten thousand workers a few rows are returned."""
    w = workers.c
    states = (
        w.fleet_id,
        w.is_approved,
        w.is_draining,
        case((w.current_load > 0, 1), else_=0).label("is_busy"),
        case((w.last_seen_at < offline_before, 1), else_=0).label("is_offline"),
    )
    names = ("fleet_id", "is_approved", "is_draining", "is_busy", "is_offline")
    query = select(*states, func.count(), func.sum(w.max_concurrency)).group_by(*names)
    return [WorkersRow(*row) for row in await tx.execute(query)]


async def ended_counts(
    tx: Tx, *, after: datetime, until: datetime, buckets: Sequence[float]
) -> list[EndedCountRow]:
    """Counts what ended in a span of time, by workflow and outcome; uses an index on that moment."""
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


# Of a tenant pool. Word for word what their indexes are made for: SQLite knows them by that only.
GOING_ON = text("status IN ('pending', 'running', 'waiting_for_user')")
ACTIVE = text("status IN ('queued', 'processing')")


async def active_graph_runs(tx: Tx) -> dict[str, int]:
    """Counts graph runs that have not ended, by status."""
    query = select(graph_runs.c.status, func.count()).where(GOING_ON)
    return _counted(await tx.execute(query.group_by(graph_runs.c.status)))


async def pipeline_runs_by_status(tx: Tx) -> dict[str, int]:
    query = select(pipeline_runs.c.status, func.count()).group_by(pipeline_runs.c.status)
    return _counted(await tx.execute(query))


async def jobs_of_runs(tx: Tx) -> dict[tuple[str, str], int]:
    """Counts jobs that have not ended, by (kind of run, status)."""
    query = (
        select(ai_jobs.c.run_kind, ai_jobs.c.status, func.count())
        .where(ACTIVE, ai_jobs.c.run_kind.is_not(None))
        .group_by(ai_jobs.c.run_kind, ai_jobs.c.status)
    )
    return {(kind, status): count for kind, status, count in await tx.execute(query)}


def _counted(rows: Iterable[Any]) -> dict[str, int]:
    return {row[0]: row[1] for row in rows}
