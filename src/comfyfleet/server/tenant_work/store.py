"""SQL for the open work of a tenant: graph runs, pipeline runs and triggers."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import ColumnElement, Select, Table, and_, case, func, select, text, update

from comfyfleet.api.admin import WorkKind
from comfyfleet.server.db import Tx
from comfyfleet.server.db.tenant_tables import (
    IS_ACTIVE,
    ai_jobs,
    graph_runs,
    pipeline_runs,
    triggers,
)

_TABLES: dict[WorkKind, Table] = {
    WorkKind.GRAPH_RUN: graph_runs,
    WorkKind.PIPELINE_RUN: pipeline_runs,
    WorkKind.TRIGGER: triggers,
}
_OPEN_RUN = graph_runs.c.status.in_(("pending", "running", "waiting_for_user"))
_OPEN_PIPELINE = pipeline_runs.c.status != "cancelled"
_ACTIVE_JOB = text(IS_ACTIVE)


class WorkItem(NamedTuple):
    kind: WorkKind
    id: UUID
    user_id: UUID
    status: str
    created_at: datetime

    @property
    def is_open(self) -> bool:
        return self.status not in ("completed", "failed", "cancelled")


async def open_work(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID | None,
    *,
    kind: WorkKind,
    is_running: bool = False,
    limit: int,
) -> list[WorkItem]:
    """Returns the newest open items of a kind. `is_running` leaves out paused items."""
    table = _TABLES[kind]
    query = _of(table, tenant_id, user_id)
    if kind is WorkKind.GRAPH_RUN:
        query = query.where(_OPEN_RUN)
    elif kind is WorkKind.PIPELINE_RUN:
        query = query.where(_OPEN_PIPELINE)
    if is_running and kind is WorkKind.GRAPH_RUN:
        query = query.where(graph_runs.c.paused_at.is_(None))
    if is_running and kind is WorkKind.PIPELINE_RUN:
        query = query.where(pipeline_runs.c.status == "active")
    if is_running and kind is WorkKind.TRIGGER:
        query = query.where(triggers.c.is_paused.is_(False))
    rows = await tx.execute(query.order_by(table.c.created_at.desc(), table.c.id).limit(limit))
    return [_item(kind, row) for row in rows]


async def find_work(tx: Tx, tenant_id: UUID, kind: WorkKind, item_id: UUID) -> WorkItem | None:
    """Returns an item, whether it is open or not."""
    query = _of(_TABLES[kind], tenant_id, None).where(_TABLES[kind].c.id == item_id)
    row = (await tx.execute(query)).first()
    return _item(kind, row) if row else None


async def active_jobs(
    tx: Tx, tenant_id: UUID, *, user_id: UUID | None, run_id: UUID | None, limit: int
) -> list[UUID]:
    """Returns queued and running jobs of a user, of a run, or of both."""
    query = select(ai_jobs.c.id).where(and_(ai_jobs.c.tenant_id == tenant_id, _ACTIVE_JOB))
    if user_id is not None:
        query = query.where(ai_jobs.c.user_id == user_id)
    if run_id is not None:
        query = query.where(ai_jobs.c.run_id == run_id)
    return list((await tx.execute(query.order_by(ai_jobs.c.id).limit(limit))).scalars())


async def count_cancelled_jobs(tx: Tx, tenant_id: UUID, run_id: UUID) -> int:
    is_cancelled = and_(ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.status == "cancelled")
    query = select(func.count()).where(is_cancelled, ai_jobs.c.run_id == run_id)
    return int((await tx.execute(query)).scalar_one())


async def pause_triggers(
    tx: Tx, tenant_id: UUID, user_id: UUID | None, ids: Sequence[UUID] | None = None
) -> list[UUID]:
    """Pauses all triggers or those in `ids`. Returns those that were not paused before."""
    statement = update(triggers).where(
        triggers.c.tenant_id == tenant_id, triggers.c.is_paused.is_(False)
    )
    if user_id is not None:
        statement = statement.where(triggers.c.user_id == user_id)
    if ids is not None:
        statement = statement.where(triggers.c.id.in_(ids))
    changed = await tx.execute(statement.values(is_paused=True).returning(triggers.c.id))
    return sorted(changed.scalars())


def _of(table: Table, tenant_id: UUID, user_id: UUID | None) -> Select[Any]:
    status: ColumnElement[Any] = table.c.status if table is not triggers else table.c.is_paused
    if table is graph_runs:
        is_paused = and_(graph_runs.c.paused_at.is_not(None), _OPEN_RUN)
        status = case((is_paused, "paused"), else_=graph_runs.c.status)
    query = select(table.c.id, table.c.user_id, status.label("status"), table.c.created_at)
    query = query.where(table.c.tenant_id == tenant_id)
    return query if user_id is None else query.where(table.c.user_id == user_id)


def _item(kind: WorkKind, row: Any) -> WorkItem:
    status = row.status
    if kind is WorkKind.TRIGGER:
        status = "paused" if status else "active"
    return WorkItem(kind, row.id, row.user_id, status, row.created_at)
