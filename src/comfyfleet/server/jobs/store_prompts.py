"""SQL for gateway prompts and previews. Prompts are looked up with their tenant and user."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Integer,
    Select,
    and_,
    bindparam,
    delete,
    func,
    literal,
    literal_column,
    select,
    tuple_,
    union_all,
    update,
)

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import Moment, is_one_of, upsert
from comfyfleet.server.db.driver import PreparedForIds, PreparedStatement
from comfyfleet.server.db.tenant_tables import ai_jobs, job_previews, run_events
from comfyfleet.server.jobs.model import (
    AWAITS_BACKEND,
    EndedPrompt,
    Job,
    JobStatus,
    job_from_row,
)

# Maximum number of ids per statement. Larger statements take too long to compile and bind.
IDS_PER_STATEMENT = 1_000


def _of_gateway(tenant_id: UUID, user_id: UUID | None) -> Select[Any]:
    return select(ai_jobs).where(
        ai_jobs.c.tenant_id == tenant_id,
        ai_jobs.c.user_id == user_id,
        ai_jobs.c.gateway.is_not(None),
        ai_jobs.c.hidden_at.is_(None),
    )


async def find_prompt(tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID) -> Job | None:
    """Returns a gateway prompt, or None if it doesn't exist or its client has removed it from the
    history.
    """
    row = (await tx.execute(_of_gateway(tenant_id, user_id).where(ai_jobs.c.id == job_id))).first()
    return None if row is None else job_from_row(row._mapping)


_OF_USER = (
    ai_jobs.c.tenant_id == bindparam("of_tenant"),
    ai_jobs.c.user_id == bindparam("of_user"),
    ai_jobs.c.gateway.is_not(None),
    ai_jobs.c.hidden_at.is_(None),
)
_ACTIVE_IDS = PreparedStatement(
    lambda tx: (
        select(ai_jobs.c.id, ai_jobs.c.status, ai_jobs.c.started_at.is_not(None).label("has_begun"))
        .where(*_OF_USER, ai_jobs.c.completed_at.is_(None))
        .order_by(ai_jobs.c.submitted_at, ai_jobs.c.id)
        .limit(bindparam("most", type_=Integer))
    )
)
_STARTED_IDS = PreparedStatement(
    lambda tx: (
        select(ai_jobs.c.id)
        .where(*_OF_USER, ai_jobs.c.completed_at.is_(None), ai_jobs.c.started_at.is_not(None))
        .order_by(ai_jobs.c.submitted_at, ai_jobs.c.id)
        .limit(bindparam("most", type_=Integer))
    )
)
_NAMES = PreparedForIds(
    ai_jobs.c.id,
    lambda tx, is_one: select(
        ai_jobs.c.id,
        ai_jobs.c.gateway["number"].as_float().label("number"),
        ai_jobs.c.gateway["prompt_id"].as_string().label("prompt_id"),
    ).where(ai_jobs.c.tenant_id == bindparam("of_tenant"), is_one),
)
_ENDED_IDS = PreparedStatement(
    lambda tx: (
        select(ai_jobs.c.id)
        .where(*_OF_USER, ai_jobs.c.completed_at.is_not(None))
        .order_by(ai_jobs.c.completed_at.desc(), ai_jobs.c.submitted_at.desc(), ai_jobs.c.id.desc())
        .limit(bindparam("most", type_=Integer))
    )
)
_IS_ENDED = PreparedStatement(
    lambda tx: select(ai_jobs.c.completed_at.is_not(None).label("is_ended")).where(
        *_OF_USER, ai_jobs.c.id == bindparam("of_job")
    )
)


_ENDED = (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED)
_MOST = bindparam("most", type_=Integer)


def _last_ended(tx: Tx) -> Select[Any]:
    """Selects the prompts of each final status separately, so that the index scans skip waiting
    prompts. The client's id is read from the run log, because in the job's row it is part of a
    document that may be large.
    """
    order = ai_jobs.c.submitted_at.desc(), ai_jobs.c.id.desc()
    columns = ai_jobs.c.id, ai_jobs.c.model_key, ai_jobs.c.completed_at, ai_jobs.c.submitted_at
    parts = [
        select(*columns)
        .where(
            ai_jobs.c.tenant_id == bindparam("of_tenant"),
            ai_jobs.c.user_id == bindparam("of_user"),
            ai_jobs.c.status == literal_column(f"'{status.value}'"),
            ai_jobs.c.gateway.is_not(None),
        )
        .order_by(*order)
        .limit(_MOST)
        .subquery()
        for status in _ENDED
    ]
    ended = union_all(*(select(part) for part in parts)).subquery()
    record = and_(run_events.c.job_id == ended.c.id, run_events.c.record.is_not(None))
    return (
        select(ended.c.id, ended.c.model_key, ended.c.completed_at, run_events.c.client_id)
        .select_from(ended.outerjoin(run_events, record))
        .order_by(ended.c.submitted_at.desc(), ended.c.id.desc())
        .limit(_MOST)
    )


_LAST_ENDED = PreparedStatement(_last_ended)


async def last_ended(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[EndedPrompt]:
    """Returns the newest prompts that have ended, including those that were removed from the
    history.
    """
    values = {"of_tenant": tenant_id, "of_user": user_id, "most": limit}
    return [EndedPrompt(*row) for row in await _LAST_ENDED.tuples(tx, values)]


async def active_prompt_ids(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int
) -> list[tuple[UUID, bool]]:
    """Returns the ids of active prompts in the order of submission, each with whether it is
    running.
    """
    values = {"of_tenant": tenant_id, "of_user": user_id, "most": limit}
    return [
        (job_id, status == JobStatus.PROCESSING and bool(has_begun))
        for job_id, status, has_begun in await _ACTIVE_IDS.tuples(tx, values)
    ]


async def names_of(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> dict[UUID, tuple[float, str]]:
    """Returns each prompt's number and client-side prompt id, by job id."""
    rows = await _NAMES.of(tx, job_ids, {"of_tenant": tenant_id})
    return {row["id"]: (row["number"], row["prompt_id"]) for row in rows}


async def ended_prompt_ids(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[UUID]:
    """Returns the ids of ended prompts, ordered by their end, the latest first."""
    values = {"of_tenant": tenant_id, "of_user": user_id, "most": limit}
    return [row[0] for row in await _ENDED_IDS.tuples(tx, values)]


_IS_PROMPT = PreparedStatement(
    lambda tx: select(ai_jobs.c.gateway.is_not(None).label("is_prompt")).where(
        ai_jobs.c.tenant_id == bindparam("of_tenant"), ai_jobs.c.id == bindparam("of_job")
    )
)


async def is_prompt(tx: Tx, tenant_id: UUID, job_id: UUID) -> bool:
    """Whether the job was submitted through the gateway."""
    rows = await _IS_PROMPT.tuples(tx, {"of_tenant": tenant_id, "of_job": job_id})
    return any(row[0] for row in rows)


async def is_prompt_ended(tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID) -> bool:
    """Whether the prompt has ended. Returns False if it doesn't exist or was removed from the
    history.
    """
    values = {"of_tenant": tenant_id, "of_user": user_id, "of_job": job_id}
    return any(row[0] for row in await _IS_ENDED.tuples(tx, values))


async def started_prompt_ids(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[UUID]:
    values = {"of_tenant": tenant_id, "of_user": user_id, "most": limit}
    return [row[0] for row in await _STARTED_IDS.tuples(tx, values)]


async def files_of_active_prompts(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int
) -> set[UUID]:
    query = _of_gateway(tenant_id, user_id).with_only_columns(ai_jobs.c.assets)
    rows = await tx.execute(query.where(ai_jobs.c.completed_at.is_(None)).limit(limit))
    return {UUID(asset["file_id"]) for row in rows for asset in row.assets}


async def list_prompt_ids(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    statuses: Sequence[JobStatus],
    before: tuple[datetime, UUID] | None,
    limit: int,
) -> list[UUID]:
    """Returns a page of the ids of gateway prompts, the newest first."""
    mine = _of_gateway(tenant_id, user_id).with_only_columns(ai_jobs.c.id)
    query = mine.where(ai_jobs.c.status.in_(statuses))
    place = tuple_(ai_jobs.c.submitted_at, ai_jobs.c.id)
    if before:
        query = query.where(place < tuple_(literal(before[0], Moment()), before[1]))
    order = ai_jobs.c.submitted_at.desc(), ai_jobs.c.id.desc()
    rows = await tx.execute(query.order_by(*order).limit(limit))
    return [row.id for row in rows]


async def count_prompts_ahead(tx: Tx, job: Job) -> int:
    """Counts the user's waiting prompts that were submitted before this one."""
    query = _of_gateway(job.tenant_id, job.spec.user_id).where(
        ai_jobs.c.completed_at.is_(None),
        ai_jobs.c.started_at.is_(None),
        tuple_(ai_jobs.c.submitted_at, ai_jobs.c.id)
        < tuple_(literal(job.submitted_at, Moment()), job.id),
    )
    return int(await tx.scalar(select(func.count()).select_from(query.subquery())) or 0)


async def release_key(
    tx: Tx, tenant_id: UUID, user_id: UUID, idempotency_key: str, *, used_before: datetime
) -> None:
    """Releases an idempotency key if it was used before a point in time."""
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
    """Removes ended prompts from their user's history, or all of them without `job_ids`."""
    hidden = update(ai_jobs).where(
        ai_jobs.c.tenant_id == tenant_id,
        ai_jobs.c.user_id == user_id,
        ai_jobs.c.gateway.is_not(None),
        ai_jobs.c.hidden_at.is_(None),
        ai_jobs.c.completed_at.is_not(None),
    )
    if job_ids is None:
        await tx.execute(hidden.values(hidden_at=now))
        return
    for start in range(0, len(job_ids), IDS_PER_STATEMENT):
        part = job_ids[start : start + IDS_PER_STATEMENT]
        await tx.execute(hidden.where(is_one_of(tx, ai_jobs.c.id, part)).values(hidden_at=now))
        await asyncio.sleep(0)  # lets other tasks run, because SQLite blocks the event loop


async def stop_awaiting(tx: Tx, job: Job) -> None:
    """Records that an active prompt's client no longer waits for the backend to accept or refuse
    it.
    """
    gateway = {**(job.spec.gateway or {}), AWAITS_BACKEND: False}
    waiting = update(ai_jobs).where(
        ai_jobs.c.tenant_id == job.tenant_id,
        ai_jobs.c.id == job.id,
        ai_jobs.c.completed_at.is_(None),
    )
    await tx.execute(waiting.values(gateway=gateway))


async def put_preview(
    tx: Tx, tenant_id: UUID, job_id: UUID, preview: Mapping[str, Any], *, now: datetime
) -> None:
    """Stores the newest preview image of a running job and replaces the previous one."""
    row = {"job_id": job_id, "tenant_id": tenant_id, "preview": dict(preview), "shown_at": now}
    await tx.execute(upsert(tx, job_previews, row, key=("job_id",)))


async def get_preview(tx: Tx, tenant_id: UUID, job_id: UUID) -> Mapping[str, Any] | None:
    query = select(job_previews.c.preview).where(
        job_previews.c.job_id == job_id, job_previews.c.tenant_id == tenant_id
    )
    preview: Mapping[str, Any] | None = (await tx.execute(query)).scalar_one_or_none()
    return preview


async def remove_preview(tx: Tx, tenant_id: UUID, job_id: UUID) -> None:
    await tx.execute(
        delete(job_previews).where(
            job_previews.c.job_id == job_id, job_previews.c.tenant_id == tenant_id
        )
    )


async def prune_previews(tx: Tx, *, before: datetime, limit: int) -> int:
    """Removes old previews that a stopped control plane could not remove."""
    old = select(job_previews.c.job_id).where(job_previews.c.shown_at < before).limit(limit)
    deleted = await tx.execute(
        delete(job_previews).where(job_previews.c.job_id.in_(old)).returning(job_previews.c.job_id)
    )
    return len(deleted.all())
