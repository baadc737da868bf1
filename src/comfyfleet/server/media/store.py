"""The only SQL of files and media."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Row,
    Update,
    and_,
    bindparam,
    cast,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    union_all,
    update,
)

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import for_update, is_one_of, is_sqlite, upsert_sum
from comfyfleet.server.db.driver import PreparedForIds, PreparedStatement, StatementCall
from comfyfleet.server.db.tenant_tables import files, storage_use, videos
from comfyfleet.server.media.model import File, MediaItem

_ADD_FILE = PreparedStatement(lambda tx: insert(files), columns=File.__slots__)


def add_file_call(file: File) -> StatementCall:
    return _ADD_FILE, _row(file)


async def add_file(tx: Tx, file: File) -> None:
    await _ADD_FILE.tuples(tx, _row(file))


_FIND_FILE = PreparedForIds(
    files.c.id,
    lambda tx, is_one: select(files).where(files.c.tenant_id == bindparam("of_tenant"), is_one),
)


async def find_files(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> list[File]:
    if not file_ids:
        return []  # SQLite would scan all files of the tenant
    return [_file(row) for row in await _FIND_FILE.of(tx, file_ids, {"of_tenant": tenant_id})]


async def lock_file(tx: Tx, tenant_id: UUID, file_id: UUID) -> File | None:
    query = select(files).where(files.c.tenant_id == tenant_id, files.c.id == file_id)
    row = (await tx.execute(for_update(tx, query))).mappings().first()
    return None if row is None else _file(row)


async def file_by_hash(
    tx: Tx, tenant_id: UUID, user_id: UUID | None, content_hash: str
) -> File | None:
    query = (
        select(files)
        .where(
            files.c.tenant_id == tenant_id,
            files.c.user_id == user_id if user_id else files.c.user_id.is_(None),
            files.c.content_hash == content_hash,
            files.c.size.is_not(None),
        )
        .order_by(files.c.created_at, files.c.id)
        .limit(1)
    )
    found = await tx.execute(for_update(tx, query))
    row = found.mappings().first()
    return None if row is None else _file(row)


async def confirm_file(
    tx: Tx, tenant_id: UUID, file_id: UUID, facts: dict[str, Any]
) -> File | None:
    """Confirms an announced file; None if there is none, or it was confirmed before."""
    found = await tx.execute(
        update(files)
        .where(files.c.tenant_id == tenant_id, files.c.id == file_id, files.c.size.is_(None))
        .values(facts)
        .returning(files)
    )
    row = found.mappings().first()
    return None if row is None else _file(row)


async def set_metadata(
    tx: Tx, tenant_id: UUID, file_id: UUID, metadata: Mapping[str, Any]
) -> File | None:
    changed = await tx.execute(
        update(files)
        .where(files.c.tenant_id == tenant_id, files.c.id == file_id)
        .values(metadata=dict(metadata))
        .returning(files)
    )
    row = changed.mappings().first()
    return None if row is None else _file(row)


async def is_in_media(tx: Tx, tenant_id: UUID, file_id: UUID) -> bool:
    query = select(videos.c.id).where(
        videos.c.tenant_id == tenant_id,
        or_(videos.c.original_file_id == file_id, videos.c.processed_file_id == file_id),
    )
    return (await tx.execute(query.limit(1))).first() is not None


async def delete_file(tx: Tx, tenant_id: UUID, file_id: UUID) -> File | None:
    found = await tx.execute(
        delete(files).where(files.c.tenant_id == tenant_id, files.c.id == file_id).returning(files)
    )
    row = found.mappings().first()
    if row is None:
        return None
    if row["checked_at"] is not None:
        await add_storage_bytes(tx, tenant_id, -row["size"])
    return _file(row)


async def used_bytes(tx: Tx, tenant_id: UUID) -> int:
    """Returns the used bytes, including announced files; on PostgreSQL, locks the tenant until the
    transaction ends.

    Checked files are counted in the tenant's row of `storage_use`, in the transaction that checks
    or deletes them; the others are summed. One statement reads both, so that no file is missed or
    counted twice.
    """
    if not is_sqlite(tx):
        key = int.from_bytes(tenant_id.bytes[:8], signed=True)
        await tx.execute(select(func.pg_advisory_xact_lock(key)))
    announced = cast(files.c.metadata["announced_size"].as_string(), BigInteger)
    unchecked = select(func.sum(func.coalesce(files.c.size, announced))).where(
        files.c.tenant_id == tenant_id, text("files.checked_at IS NULL")
    )
    counted = select(storage_use.c.bytes).where(storage_use.c.tenant_id == tenant_id)
    parts = (await tx.execute(select(counted.scalar_subquery(), unchecked.scalar_subquery()))).one()
    return sum(int(each or 0) for each in parts)


async def add_storage_bytes(tx: Tx, tenant_id: UUID, size: int) -> None:
    """Adds to the tenant's counter of checked bytes; the row stays locked until the commit."""
    row = {"tenant_id": tenant_id, "bytes": size}
    await tx.execute(upsert_sum(tx, storage_use, row, key=["tenant_id"]))


async def storage_miscounts(tx: Tx) -> dict[UUID, int]:
    """Returns by tenant how many bytes its checked files have beyond the counter."""
    has = (
        select(files.c.tenant_id, func.sum(files.c.size).label("bytes"))
        .where(files.c.checked_at.is_not(None))
        .group_by(files.c.tenant_id)
    )
    both = union_all(has, select(storage_use.c.tenant_id, -storage_use.c.bytes)).subquery()
    more = func.sum(both.c.bytes)
    query = select(both.c.tenant_id, more).group_by(both.c.tenant_id).having(more != 0)
    return {tenant_id: int(size) for tenant_id, size in await tx.execute(query)}


def _row(file: File) -> dict[str, Any]:
    row = {name: getattr(file, name) for name in File.__slots__}
    return row | {"metadata": dict(file.metadata)}


def _file(row: Mapping[Any, Any]) -> File:
    return File(**row)


async def add_media(tx: Tx, media: MediaItem) -> None:
    row = {**asdict(media), "processing_details": dict(media.processing_details)}
    await tx.execute(insert(videos).values(row))


async def get_media(
    tx: Tx, tenant_id: UUID, user_id: UUID | None, media_id: UUID
) -> MediaItem | None:
    query = select(videos).where(
        videos.c.tenant_id == tenant_id, videos.c.user_id == user_id, videos.c.id == media_id
    )
    found = (await tx.execute(query)).first()
    return _media(found) if found else None


async def media_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> MediaItem | None:
    query = select(videos).where(videos.c.tenant_id == tenant_id, videos.c.job_id == job_id)
    found = (await tx.execute(query)).first()
    return _media(found) if found else None


async def page_of_media(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, before: MediaItem | None, limit: int
) -> list[MediaItem]:
    at = videos.c.created_at
    query = (
        select(videos)
        .where(videos.c.tenant_id == tenant_id, videos.c.user_id == user_id)
        .order_by(at.desc(), videos.c.id.desc())
        .limit(limit)
    )
    if before is not None:
        earlier = or_(
            at < before.created_at, and_(at == before.created_at, videos.c.id < before.id)
        )
        query = query.where(earlier)
    return [_media(row) for row in await tx.execute(query)]


async def attach_job(
    tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID, job_id: UUID
) -> MediaItem | None:
    """Attaches a job; None if the media item is missing or expired."""
    statement = (
        update(videos)
        .where(
            videos.c.tenant_id == tenant_id,
            videos.c.user_id == user_id,
            videos.c.id == media_id,
            videos.c.expired_at.is_(None),
        )
        .values(job_id=job_id, active_job_id=job_id, processed_file_id=None)
        .returning(videos)
    )
    found = (await tx.execute(statement)).first()
    return _media(found) if found else None


def end_job_update(job: CTE, told: ColumnElement[Any]) -> Update:
    """Builds `end_job` for a completed job as part of a larger statement."""
    return (
        update(videos)
        .where(
            videos.c.id == job.c.video_id,
            videos.c.tenant_id == job.c.tenant_id,
            videos.c.job_id == job.c.id,
            videos.c.active_job_id == job.c.id,
        )
        .values(active_job_id=None, processed_file_id=job.c.output_file_id, processing_details=told)
    )


async def end_job(
    tx: Tx, tenant_id: UUID, job_id: UUID, values: Mapping[str, Any]
) -> MediaItem | None:
    """Ends the job of a media item; None if there is no such item, it has a later job, or the job
    has ended before."""
    statement = (
        update(videos)
        .where(
            videos.c.tenant_id == tenant_id,
            videos.c.job_id == job_id,
            videos.c.active_job_id == job_id,
        )
        .values(active_job_id=None, **values)
        .returning(videos)
    )
    found = (await tx.execute(statement)).first()
    return _media(found) if found else None


async def expired_media(
    tx: Tx, tenant_id: UUID, *, before: datetime, limit: int
) -> list[MediaItem]:
    """Returns media without active jobs that were created before a moment; locked, so that no job
    is attached meanwhile."""
    query = (
        select(videos)
        .where(
            videos.c.tenant_id == tenant_id,
            videos.c.expired_at.is_(None),
            videos.c.active_job_id.is_(None),
            videos.c.created_at < before,
        )
        .order_by(videos.c.created_at)
        .limit(limit)
    )
    return [_media(row) for row in await tx.execute(for_update(tx, query, skip_locked=True))]


async def expire_media(tx: Tx, media_ids: list[UUID], now: datetime) -> None:
    await tx.execute(
        update(videos)
        .where(is_one_of(tx, videos.c.id, media_ids))
        .values(expired_at=now, original_file_id=None, processed_file_id=None)
    )


def _media(row: Row[Any]) -> MediaItem:
    return MediaItem(**row._mapping)
