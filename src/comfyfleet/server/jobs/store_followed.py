"""SQL for jobs that users are waiting for. Prompts are not read, because these queries run
often.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, bindparam, func, or_, select, text

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import without_index
from comfyfleet.server.db.driver import PreparedForIds
from comfyfleet.server.db.tenant_tables import IS_ACTIVE, ai_jobs
from comfyfleet.server.jobs.model import JobStatus
from comfyfleet.server.jobs.stages import WaitingJob

# Number of the user's newest jobs that are searched.
SEARCHED_MAX = 2000
_WAITING_COLUMNS = [ai_jobs.c[name] for name in WaitingJob._fields]
_BY_ID = PreparedForIds(
    ai_jobs.c.id,
    lambda tx, is_one: select(*_WAITING_COLUMNS).where(
        ai_jobs.c.tenant_id == bindparam("of_tenant"), is_one
    ),
)


async def waiting_by_id(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> list[WaitingJob]:
    """Returns jobs without their prompts. Ids of missing jobs are left out."""
    if not job_ids:
        return []
    return [_waiting_job(row) for row in await _BY_ID.of(tx, job_ids, {"of_tenant": tenant_id})]


async def waiting_of_media(
    tx: Tx, tenant_id: UUID, media_id: UUID, *, limit: int
) -> list[WaitingJob]:
    """Returns the latest jobs of a media item, the newest first."""
    query = (
        select(*_WAITING_COLUMNS)
        .where(ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.video_id == media_id)
        .order_by(ai_jobs.c.submitted_at.desc(), ai_jobs.c.batch_position.desc())
        .limit(limit)
    )
    return [_waiting_job(row) for row in (await tx.execute(query)).mappings()]


async def active_of_user(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[WaitingJob]:
    """Returns the user's active jobs for effects, the newest first. Jobs of runs and gateway
    prompts are left out, because they are shown elsewhere.
    """
    query = (
        select(*_WAITING_COLUMNS)
        .where(*_of_effects(tenant_id, user_id), text(IS_ACTIVE))
        .order_by(without_index(tx, ai_jobs.c.submitted_at).desc(), ai_jobs.c.id.desc())
        .limit(limit)
    )
    return [_waiting_job(row) for row in (await tx.execute(query)).mappings()]


async def ended_since(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, since: datetime, limit: int
) -> list[WaitingJob]:
    """Returns jobs that have ended since a point in time, from among the user's `limit` newest jobs
    for effects.
    """
    newest = (
        select(*_WAITING_COLUMNS)
        .where(*_of_effects(tenant_id, user_id))
        .order_by(ai_jobs.c.submitted_at.desc(), ai_jobs.c.id.desc())
        .limit(limit)
        .subquery()
    )
    rows = await tx.execute(select(newest).where(newest.c.completed_at >= since))
    return [_waiting_job(row) for row in rows.mappings()]


async def reserved_tokens(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    query = select(func.sum(ai_jobs.c.reserved_tokens)).where(
        ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.user_id == user_id, text(IS_ACTIVE)
    )
    return int(await tx.scalar(query) or 0)


async def search(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    between: tuple[UUID, UUID] | None,
    effect_ids: Collection[UUID],
    limit: int,
) -> list[WaitingJob]:
    """Returns the user's jobs whose ids are in a range or that belong to one of the effects, the
    newest first. Only searches the user's newest jobs.
    """
    newest = (
        select(*_WAITING_COLUMNS)
        .where(*_of_effects(tenant_id, user_id))
        .order_by(ai_jobs.c.submitted_at.desc(), ai_jobs.c.id.desc())
        .limit(SEARCHED_MAX)
        .subquery()
    )
    conditions = [newest.c.effect_id.in_(list(effect_ids))] if effect_ids else []
    if between is not None:
        conditions.append(newest.c.id.between(*between))
    if not conditions:
        return []
    query = (
        select(newest).where(or_(*conditions)).order_by(newest.c.submitted_at.desc()).limit(limit)
    )
    return [_waiting_job(row) for row in (await tx.execute(query)).mappings()]


def _of_effects(tenant_id: UUID, user_id: UUID) -> tuple[ColumnElement[bool], ...]:
    return (
        ai_jobs.c.tenant_id == tenant_id,
        ai_jobs.c.user_id == user_id,
        ai_jobs.c.effect_id.is_not(None),
        ai_jobs.c.run_id.is_(None),
    )


def _waiting_job(row: Mapping[Any, Any]) -> WaitingJob:
    return WaitingJob(**{**row, "status": JobStatus(row["status"])})
