"""The SQL of jobs: rows of a tenant's pool, every one looked up with its tenant."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import RowMapping, delete, func, insert, literal, or_, select, tuple_, update

from comfyfleet.db import Tx
from comfyfleet.db.dialect import insert_if_new, locked
from comfyfleet.db.tenant import ai_jobs, outbox
from comfyfleet.db.types import Moment
from comfyfleet.effects.model import AssetRef
from comfyfleet.jobs.model import Failure, Job, JobStatus, Submission

ACTIVE = (JobStatus.QUEUED, JobStatus.PROCESSING)
_PINNED = (
    "workflow_id",
    "workflow_slug",
    "workflow_version",
    "prompt",
    "properties",
    "output_node_id",
    "stage",
    "provider",
    "priority",
    "backend_affinity",
    "model_key",
    "model_set",
    "user_id",
    "effect_id",
    "retry_of",
    "idempotency_key",
    "request_hash",
    "video_id",
    "batch_id",
    "batch_position",
    "run_kind",
    "run_id",
    "is_held",
)
_KEPT = (
    "id",
    "tenant_id",
    "attempt",
    "lease_number",
    "lease_token",
    "output_file_id",
    "provider_job_id",
    "result_metadata",
    "error_message",
    "raw_error",
    "submitted_at",
    "started_at",
    "completed_at",
)


def _asset_row(asset: AssetRef) -> dict[str, Any]:
    return {**asdict(asset), "file_id": str(asset.file_id)}


def _asset(row: Mapping[str, Any]) -> AssetRef:
    return AssetRef(**{**row, "file_id": UUID(row["file_id"])})


def _job(row: RowMapping) -> Job:
    asked = Submission(
        assets=tuple(map(_asset, row["assets"])),
        price_tokens=row["reserved_tokens"],
        **{name: row[name] for name in _PINNED},
    )
    return Job(asked=asked, status=JobStatus(row["status"]), **{name: row[name] for name in _KEPT})


def _row(tenant_id: UUID, job_id: UUID, asked: Submission, now: datetime) -> dict[str, Any]:
    return {
        **{name: getattr(asked, name) for name in _PINNED},
        "prompt": dict(asked.prompt),
        "properties": dict(asked.properties),
        "assets": [_asset_row(each) for each in asked.assets],
        "input_file_id": asked.input_file_id,
        "reserved_tokens": asked.price_tokens,
        "id": job_id,
        "tenant_id": tenant_id,
        "status": JobStatus.QUEUED,
        "submitted_at": now,
    }


async def add(
    tx: Tx, tenant_id: UUID, asked: Mapping[UUID, Submission], *, now: datetime
) -> list[Job]:
    """Those that are new; one whose id or idempotency key is known already is not."""
    rows = [_row(tenant_id, job_id, each, now) for job_id, each in asked.items()]
    added = await tx.execute(insert_if_new(tx, ai_jobs, rows).returning(ai_jobs))
    return [_job(row) for row in added.mappings()]


def _one(tenant_id: UUID, job_id: UUID) -> tuple[Any, Any]:
    return ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.id == job_id


async def get(tx: Tx, tenant_id: UUID, job_id: UUID) -> Job | None:
    found = await tx.execute(select(ai_jobs).where(*_one(tenant_id, job_id)))
    row = found.mappings().one_or_none()
    return _job(row) if row else None


async def some(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID], *, lock: bool = False
) -> list[Job]:
    """Those of them that exist, by their ids; locked in that order, so that two don't cross."""
    if not job_ids:
        return []
    query = select(ai_jobs).where(ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.id.in_(job_ids))
    query = query.order_by(ai_jobs.c.id)
    found = await tx.execute(locked(tx, query) if lock else query)
    return [_job(row) for row in found.mappings()]


async def by_key(tx: Tx, tenant_id: UUID, idempotency_key: str) -> Job | None:
    found = await tx.execute(
        select(ai_jobs).where(
            ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.idempotency_key == idempotency_key
        )
    )
    row = found.mappings().one_or_none()
    return _job(row) if row else None


async def known(tx: Tx, pairs: Sequence[tuple[UUID, UUID]]) -> dict[UUID, JobStatus]:
    """Which of these (tenant, job) exist, and how they are."""
    found = await tx.execute(
        select(ai_jobs.c.id, ai_jobs.c.status).where(
            tuple_(ai_jobs.c.tenant_id, ai_jobs.c.id).in_(pairs)
        )
    )
    return {row.id: JobStatus(row.status) for row in found}


async def active_after(tx: Tx, after: UUID | None, limit: int, before: datetime) -> list[Job]:
    """Active jobs of all tenants of the pool, page by page; those submitted just now are left."""
    query = select(ai_jobs).where(
        ai_jobs.c.status.in_(ACTIVE), ~ai_jobs.c.is_held, ai_jobs.c.submitted_at < before
    )
    if after:
        query = query.where(ai_jobs.c.id > after)
    found = await tx.execute(query.order_by(ai_jobs.c.id).limit(limit))
    return [_job(row) for row in found.mappings()]


async def count_active(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    """Of a user; those of batches and runs have limits of their own."""
    mine = (ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.user_id == user_id)
    query = select(func.count()).where(
        *mine,
        ai_jobs.c.status.in_(ACTIVE),
        ai_jobs.c.batch_id.is_(None),
        ai_jobs.c.run_id.is_(None),
    )
    return int(await tx.scalar(query) or 0)


async def page(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    before: Job | None,
    status: JobStatus | None,
    limit: int,
) -> list[Job]:
    """The newest first."""
    query = select(ai_jobs).where(ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.user_id == user_id)
    if status:
        query = query.where(ai_jobs.c.status == status)
    if before:
        place = tuple_(ai_jobs.c.submitted_at, ai_jobs.c.id)
        query = query.where(place < tuple_(literal(before.submitted_at, Moment()), before.id))
    newest = (ai_jobs.c.submitted_at.desc(), ai_jobs.c.id.desc())
    found = await tx.execute(query.order_by(*newest).limit(limit))
    return [_job(row) for row in found.mappings()]


async def of_batch(tx: Tx, tenant_id: UUID, batch_id: UUID) -> list[Job]:
    """By their positions."""
    found = await tx.execute(
        select(ai_jobs)
        .where(ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.batch_id == batch_id)
        .order_by(ai_jobs.c.batch_position)
    )
    return [_job(row) for row in found.mappings()]


async def batches_with_held(tx: Tx, *, limit: int) -> list[tuple[UUID, UUID]]:
    """(tenant, batch) of those that have jobs to admit."""
    found = await tx.execute(
        select(ai_jobs.c.tenant_id, ai_jobs.c.batch_id)
        .where(
            ai_jobs.c.status == JobStatus.QUEUED, ai_jobs.c.is_held, ai_jobs.c.batch_id.is_not(None)
        )
        .distinct()
        .limit(limit)
    )
    return [(row.tenant_id, row.batch_id) for row in found]


async def admit(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> list[Job]:
    admitted = await tx.execute(
        update(ai_jobs)
        .where(
            ai_jobs.c.tenant_id == tenant_id,
            ai_jobs.c.id.in_(job_ids),
            ai_jobs.c.is_held,
            ai_jobs.c.status == JobStatus.QUEUED,
        )
        .values(is_held=False)
        .returning(ai_jobs)
    )
    return [_job(row) for row in admitted.mappings()]


async def _changed(tx: Tx, statement: Any) -> Job | None:
    changed = await tx.execute(statement.returning(ai_jobs))
    row = changed.mappings().one_or_none()
    return _job(row) if row else None


async def start(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, token: UUID, number: int, attempt: int, now: datetime
) -> Job | None:
    """Only if the job is active and this lease is newer than any it knows, or the same again."""
    newer = or_(
        ai_jobs.c.lease_number < number,
        (ai_jobs.c.lease_number == number) & (ai_jobs.c.lease_token == token),
    )
    return await _changed(
        tx,
        update(ai_jobs)
        .where(*_one(tenant_id, job_id), ai_jobs.c.status.in_(ACTIVE), newer)
        .values(
            status=JobStatus.PROCESSING,
            lease_token=token,
            lease_number=number,
            attempt=attempt,
            started_at=now,
        ),
    )


def _held(tenant_id: UUID, job_id: UUID, token: UUID) -> Any:
    return update(ai_jobs).where(
        *_one(tenant_id, job_id),
        ai_jobs.c.status == JobStatus.PROCESSING,
        ai_jobs.c.lease_token == token,
    )


async def complete(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, values: Mapping[str, Any], *, now: datetime
) -> Job | None:
    done = {"status": JobStatus.COMPLETED, "completed_at": now, **values}
    return await _changed(tx, _held(tenant_id, job_id, token).values(done))


async def fail(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, why: Failure, *, now: datetime
) -> Job | None:
    return await _changed(tx, _held(tenant_id, job_id, token).values(_failed(why, now)))


async def put_back(tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID) -> Job | None:
    return await _changed(tx, _held(tenant_id, job_id, token).values(status=JobStatus.QUEUED))


async def end_active(
    tx: Tx, tenant_id: UUID, job_id: UUID, status: JobStatus, why: Failure | None, *, now: datetime
) -> Job | None:
    """Whoever holds it: by its owner (cancel) or an operator."""
    values = _failed(why, now) if why else {"completed_at": now}
    return await _changed(
        tx,
        update(ai_jobs)
        .where(*_one(tenant_id, job_id), ai_jobs.c.status.in_(ACTIVE))
        .values({**values, "status": status}),
    )


def _failed(why: Failure, now: datetime) -> dict[str, Any]:
    return {
        "status": JobStatus.FAILED,
        "error_message": why.message,
        "raw_error": why.raw,
        "completed_at": now,
    }


async def leave_word(tx: Tx, jobs: Iterable[Job], *, now: datetime) -> list[int]:
    """An outbox row each: the central side must follow. One per change, so none is overlooked."""
    rows = [
        {
            "tenant_id": job.tenant_id,
            "job_id": job.id,
            "kind": "dispatch",
            "payload": {},
            "not_before": now,
            "created_at": now,
        }
        for job in jobs
    ]
    added = await tx.execute(insert(outbox).returning(outbox.c.id), rows)
    return [row.id for row in added]


async def leave_word_for_run(tx: Tx, job: Job, *, now: datetime) -> None:
    """The run that it is a part of goes on when it has read this."""
    row = {
        "tenant_id": job.tenant_id,
        "job_id": job.id,
        "kind": job.asked.run_kind,
        "payload": {"run_id": str(job.asked.run_id), "status": job.status},
        "not_before": now,
        "created_at": now,
    }
    await tx.execute(insert(outbox).values(row))


async def words_for_runs(
    tx: Tx, kind: str, *, now: datetime, limit: int, after: int = 0
) -> list[tuple[int, UUID, UUID, UUID]]:
    """(word, tenant, run, job) of jobs that have ended; the oldest first, page by page."""
    found = await tx.execute(
        select(outbox.c.id, outbox.c.tenant_id, outbox.c.payload, outbox.c.job_id)
        .where(outbox.c.kind == kind, outbox.c.not_before <= now, outbox.c.id > after)
        .order_by(outbox.c.id)
        .limit(limit)
    )
    return [(row.id, row.tenant_id, UUID(row.payload["run_id"]), row.job_id) for row in found]


async def words_due(tx: Tx, *, now: datetime, limit: int) -> list[tuple[int, UUID, UUID]]:
    found = await tx.execute(
        select(outbox.c.id, outbox.c.tenant_id, outbox.c.job_id)
        .where(outbox.c.kind == "dispatch", outbox.c.not_before <= now)
        .order_by(outbox.c.not_before, outbox.c.id)
        .limit(limit)
    )
    return [(row.id, row.tenant_id, row.job_id) for row in found]


async def forget_words(tx: Tx, ids: Sequence[int]) -> None:
    if ids:
        await tx.execute(delete(outbox).where(outbox.c.id.in_(ids)))


async def postpone_words(tx: Tx, ids: Sequence[int], *, until: datetime) -> None:
    await tx.execute(
        update(outbox)
        .where(outbox.c.id.in_(ids))
        .values(tries=outbox.c.tries + 1, not_before=until)
    )
