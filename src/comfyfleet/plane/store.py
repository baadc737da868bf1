"""Figures over all rooms at once: a handful of grouped queries, for those who watch the system."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import case, func, select

from comfyfleet.db import Tx
from comfyfleet.db.central import dispatches, fleets, workers, workflow_fleets, workflows


class FleetRow(NamedTuple):
    id: int
    slug: str
    stage: str
    max_workers: int | None


class WorkerRow(NamedTuple):
    fleet_id: int
    is_approved: bool
    is_draining: bool
    current_load: int
    max_concurrency: int
    last_seen_at: datetime


class EndedRow(NamedTuple):
    workflow_id: int
    stage: str
    status: str
    jobs: int
    timed: int  # those of which the duration is known
    seconds: float
    at_most: tuple[int, ...]  # how many lasted at most so long, by bucket


async def slugs(tx: Tx) -> dict[int, str]:
    rows = await tx.execute(select(workflows.c.id, workflows.c.slug))
    return {row.id: row.slug for row in rows}


async def all_fleets(tx: Tx) -> list[FleetRow]:
    query = select(fleets.c.id, fleets.c.slug, fleets.c.stage, fleets.c.max_workers)
    return [FleetRow(*row) for row in await tx.execute(query)]


async def assignments(tx: Tx) -> list[tuple[int, int]]:
    """(fleet, workflow)"""
    query = select(workflow_fleets.c.fleet_id, workflow_fleets.c.workflow_id)
    return [(row.fleet_id, row.workflow_id) for row in await tx.execute(query)]


async def all_workers(tx: Tx) -> list[WorkerRow]:
    query = select(*(workers.c[name] for name in WorkerRow._fields))
    return [WorkerRow(*row) for row in await tx.execute(query)]


async def ended(
    tx: Tx, *, after: datetime, until: datetime, buckets: Sequence[float]
) -> list[EndedRow]:
    """What ended in that span, by workflow and outcome; an index on the moment serves it."""
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
    return [EndedRow._make((*row[:6], tuple(map(int, row[6:])))) for row in rows]
