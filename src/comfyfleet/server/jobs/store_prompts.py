"""The SQL of prompts that came through the gateway. Every row is looked up with its tenant and user."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Integer, Select, bindparam, func, literal, select, tuple_, update

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import Moment, is_one_of
from comfyfleet.server.db.driver import PreparedStatement
from comfyfleet.server.db.tenant_tables import ai_jobs
from comfyfleet.server.jobs.model import Job, JobStatus, job_from_row


def _of_gateway(tenant_id: UUID, user_id: UUID | None) -> Select[Any]:
    return select(ai_jobs).where(
        ai_jobs.c.tenant_id == tenant_id,
        ai_jobs.c.user_id == user_id,
        ai_jobs.c.gateway.is_not(None),
        ai_jobs.c.hidden_at.is_(None),
    )


async def find_prompt(tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID) -> Job | None:
    """None: there is none, or its client has removed it from the history."""
    row = (await tx.execute(_of_gateway(tenant_id, user_id).where(ai_jobs.c.id == job_id))).first()
    return None if row is None else job_from_row(row._mapping)


async def active_prompts(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[Job]:
    """Prompts of the gateway that wait or run, as they came."""
    query = _of_gateway(tenant_id, user_id).where(ai_jobs.c.completed_at.is_(None))
    rows = await tx.execute(query.order_by(ai_jobs.c.submitted_at, ai_jobs.c.id).limit(limit))
    return [job_from_row(row._mapping) for row in rows]


_ACTIVE_IDS = PreparedStatement(
    lambda tx: (
        select(ai_jobs.c.id)
        .where(
            ai_jobs.c.tenant_id == bindparam("of_tenant"),
            ai_jobs.c.user_id == bindparam("of_user"),
            ai_jobs.c.gateway.is_not(None),
            ai_jobs.c.hidden_at.is_(None),
            ai_jobs.c.completed_at.is_(None),
        )
        .limit(bindparam("most", type_=Integer))
    )
)


async def active_prompt_ids(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[UUID]:
    values = {"of_tenant": tenant_id, "of_user": user_id, "most": limit}
    return [row[0] for row in await _ACTIVE_IDS.tuples(tx, values)]


async def ended_prompts(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int, offset: int = 0
) -> list[Job]:
    """Prompts of the gateway that have ended, the last first."""
    query = _of_gateway(tenant_id, user_id).where(ai_jobs.c.completed_at.is_not(None))
    order = ai_jobs.c.completed_at.desc(), ai_jobs.c.submitted_at.desc(), ai_jobs.c.id.desc()
    rows = await tx.execute(query.order_by(*order).limit(limit).offset(offset))
    return [job_from_row(row._mapping) for row in rows]


async def list_prompts(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    statuses: Sequence[JobStatus],
    before: tuple[datetime, UUID] | None,
    limit: int,
) -> list[Job]:
    """Prompts of the gateway, the newest first."""
    query = _of_gateway(tenant_id, user_id).where(ai_jobs.c.status.in_(statuses))
    place = tuple_(ai_jobs.c.submitted_at, ai_jobs.c.id)
    if before:
        query = query.where(place < tuple_(literal(before[0], Moment()), before[1]))
    order = ai_jobs.c.submitted_at.desc(), ai_jobs.c.id.desc()
    rows = await tx.execute(query.order_by(*order).limit(limit))
    return [job_from_row(row._mapping) for row in rows]


async def count_prompts_ahead(tx: Tx, job: Job) -> int:
    """Prompts of the same user that came before it and have not begun either."""
    query = _of_gateway(job.tenant_id, job.asked.user_id).where(
        ai_jobs.c.completed_at.is_(None),
        ai_jobs.c.started_at.is_(None),
        tuple_(ai_jobs.c.submitted_at, ai_jobs.c.id)
        < tuple_(literal(job.submitted_at, Moment()), job.id),
    )
    return int(await tx.scalar(select(func.count()).select_from(query.subquery())) or 0)


async def release_key(
    tx: Tx, tenant_id: UUID, user_id: UUID, idempotency_key: str, *, used_before: datetime
) -> None:
    """The key can be used again if it was used before then."""
    old = update(ai_jobs).where(
        ai_jobs.c.tenant_id == tenant_id,
        ai_jobs.c.user_id == user_id,
        ai_jobs.c.idempotency_key == idempotency_key,
        ai_jobs.c.submitted_at < used_before,
    )
    await tx.execute(old.values(idempotency_key=None))


async def hide_prompts(
    tx: Tx, tenant_id: UUID, user_id: UUID, job_ids: Sequence[UUID] | None, *, now: datetime
) -> None:
    """From the history of their client; None: all that have ended."""
    hidden = update(ai_jobs).where(
        ai_jobs.c.tenant_id == tenant_id,
        ai_jobs.c.user_id == user_id,
        ai_jobs.c.gateway.is_not(None),
        ai_jobs.c.hidden_at.is_(None),
        ai_jobs.c.completed_at.is_not(None),
    )
    if job_ids is not None:
        hidden = hidden.where(is_one_of(tx, ai_jobs.c.id, job_ids))
    await tx.execute(hidden.values(hidden_at=now))
