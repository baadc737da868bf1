"""The job events' only SQL."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import Row, bindparam, delete, insert, select

from comfyfleet.db import Tx
from comfyfleet.db.statement import Call, Statement
from comfyfleet.db.tenant import job_events
from comfyfleet.events.model import EventKind, JobEvent

COLUMNS = ("tenant_id", "job_id", "kind", "data", "created_at")
_ADD = Statement(lambda tx: insert(job_events).returning(job_events.c.id), columns=COLUMNS)


async def add(tx: Tx, row: Mapping[str, Any]) -> int:
    """Its number."""
    return int((await _ADD.rows(tx, row))[0]["id"])


async def add_all(tx: Tx, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        await tx.execute(insert(job_events), rows)


def adding(rows: Sequence[Mapping[str, Any]]) -> Call:
    """A few at once: one INSERT, so that their numbers follow each other."""
    return _adding(len(rows)), {
        f"{name}_{place}": row[name] for place, row in enumerate(rows) for name in COLUMNS
    }


@cache
def _adding(count: int) -> Statement:
    rows: list[dict[str, Any]] = [
        {name: bindparam(f"{name}_{place}", type_=job_events.c[name].type) for name in COLUMNS}
        for place in range(count)
    ]
    return Statement(lambda tx: insert(job_events).values(rows))


async def after(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int, limit: int
) -> list[JobEvent]:
    query = (
        select(job_events)
        .where(
            job_events.c.tenant_id == tenant_id,
            job_events.c.job_id == job_id,
            job_events.c.id > after_id,
        )
        .order_by(job_events.c.id)
        .limit(limit)
    )
    return [_event(row) for row in await tx.execute(query)]


async def prune(tx: Tx, *, before: datetime, limit: int) -> int:
    old = select(job_events.c.id).where(job_events.c.created_at < before).limit(limit)
    gone = await tx.execute(
        delete(job_events).where(job_events.c.id.in_(old)).returning(job_events.c.id)
    )
    return len(gone.all())


def _event(row: Row[Any]) -> JobEvent:
    return JobEvent(**{**row._mapping, "kind": EventKind(row.kind)})
