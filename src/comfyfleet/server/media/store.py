"""All SQL for files and media."""

from collections.abc import Collection, Iterator, Mapping
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
    exists,
    func,
    insert,
    or_,
    select,
    text,
    union_all,
    update,
)

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import for_update, is_one_of, is_sqlite, upsert_sum, without_index
from comfyfleet.server.db.driver import PreparedForIds, PreparedStatement, StatementCall
from comfyfleet.server.db.tenant_tables import ai_jobs, files, shares, storage_use, videos
from comfyfleet.server.media.model import (
    ANY_MEDIA,
    File,
    MediaFilter,
    MediaItem,
    MediaStatus,
    SharedLink,
)

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


async def lock_own_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, file_ids: Collection[UUID]
) -> list[File]:
    """Locks files of a user in the order of their ids, so that two transactions can't deadlock."""
    query = (
        select(files)
        .where(
            without_index(tx, files.c.tenant_id) == tenant_id,
            files.c.user_id == user_id,
            is_one_of(tx, files.c.id, file_ids),
        )
        .order_by(files.c.id)
    )
    return [_file(row) for row in (await tx.execute(for_update(tx, query))).mappings()]


async def keep_longer(
    tx: Tx, tenant_id: UUID, file_ids: Collection[UUID], *, now: datetime
) -> None:
    mine = without_index(tx, files.c.tenant_id) == tenant_id
    await tx.execute(
        update(files).where(mine, is_one_of(tx, files.c.id, file_ids)).values(kept_from=now)
    )


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
    rows = await tx.execute(for_update(tx, query))
    row = rows.mappings().first()
    return None if row is None else _file(row)


async def confirm_file(
    tx: Tx, tenant_id: UUID, file_id: UUID, facts: dict[str, Any]
) -> File | None:
    """Confirms an announced file. Returns None if it doesn't exist or was confirmed before."""
    rows = await tx.execute(
        update(files)
        .where(files.c.tenant_id == tenant_id, files.c.id == file_id, files.c.size.is_(None))
        .values(facts)
        .returning(files)
    )
    row = rows.mappings().first()
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
    rows = await tx.execute(
        delete(files).where(files.c.tenant_id == tenant_id, files.c.id == file_id).returning(files)
    )
    row = rows.mappings().first()
    if row is None:
        return None
    if row["checked_at"] is not None:
        await add_storage_bytes(tx, tenant_id, -row["size"])
    return _file(row)


async def used_bytes(tx: Tx, tenant_id: UUID) -> int:
    """Returns the used bytes, including announced files. On PostgreSQL, locks the tenant until the
    transaction ends.

    Checked files are counted in the tenant's `storage_use` row, in the transaction that checks or
    deletes them. Other files are summed. A single statement reads both, so that no file is missed
    or counted twice."""
    if not is_sqlite(tx):
        key = int.from_bytes(tenant_id.bytes[:8], signed=True)
        await tx.execute(select(func.pg_advisory_xact_lock(key)))
    announced = cast(files.c.metadata["announced_size"].as_string(), BigInteger)
    unchecked = select(func.sum(func.coalesce(files.c.size, announced))).where(
        files.c.tenant_id == tenant_id, text("files.checked_at IS NULL")
    )
    counted = select(storage_use.c.bytes).where(storage_use.c.tenant_id == tenant_id)
    parts = (await tx.execute(select(counted.scalar_subquery(), unchecked.scalar_subquery()))).one()
    return sum(int(part or 0) for part in parts)


async def add_storage_bytes(tx: Tx, tenant_id: UUID, size: int) -> None:
    """Adds to the tenant's counter of checked bytes. The row remains locked until the commit."""
    row = {"tenant_id": tenant_id, "bytes": size}
    await tx.execute(upsert_sum(tx, storage_use, row, key=["tenant_id"]))


async def storage_miscounts(tx: Tx) -> dict[UUID, int]:
    """Returns how many bytes must be added to each tenant's storage counter if it is wrong."""
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
    row = (await tx.execute(query)).first()
    return _media(row) if row else None


async def media_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> MediaItem | None:
    query = select(videos).where(videos.c.tenant_id == tenant_id, videos.c.job_id == job_id)
    row = (await tx.execute(query)).first()
    return _media(row) if row else None


async def page_of_media(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    before: MediaItem | None,
    limit: int,
    wanted: MediaFilter = ANY_MEDIA,
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
    query = query.where(*_filters(wanted))
    return [_media(row) for row in await tx.execute(query)]


def _filters(filters: MediaFilter) -> Iterator[ColumnElement[bool]]:
    if filters.kind is not None:
        yield videos.c.kind == filters.kind
    if filters.status is not None:
        yield _has_status(filters.status)
    if filters.effect_id is not None:
        yield exists().where(
            ai_jobs.c.tenant_id == videos.c.tenant_id,
            ai_jobs.c.video_id == videos.c.id,
            ai_jobs.c.effect_id == filters.effect_id,
        )
    if filters.text is not None:
        yield exists().where(
            files.c.id == videos.c.original_file_id,
            files.c.filename.icontains(filters.text, autoescape=True),
        )


def _has_status(status: MediaStatus) -> ColumnElement[bool]:
    """Returns the condition for a status, consistent with `status_of`. A prefetched latest job
    counts as queued."""
    if status == MediaStatus.EXPIRED:
        return videos.c.expired_at.is_not(None)
    is_kept = videos.c.expired_at.is_(None)
    if status == MediaStatus.UPLOADED:
        return and_(is_kept, videos.c.job_id.is_(None))
    begun = ai_jobs.c.started_at.is_not(None)
    is_so: ColumnElement[bool] = ai_jobs.c.status == status.value
    if status == MediaStatus.PROCESSING:
        is_so = and_(is_so, begun)
    elif status == MediaStatus.QUEUED:
        is_so = or_(is_so, and_(ai_jobs.c.status == "processing", ~begun))
    return and_(is_kept, exists().where(ai_jobs.c.id == videos.c.job_id, is_so))


async def search_media(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    text: str,
    *,
    between: tuple[UUID, UUID] | None,
    limit: int,
) -> list[tuple[MediaItem, str | None]]:
    """Returns the newest media whose file name contains the text, or whose id is in the range, each
    with its file name."""
    is_found = [files.c.filename.icontains(text, autoescape=True)]
    if between is not None:
        is_found.append(videos.c.id.between(*between))
    query = (
        select(videos, files.c.filename.label("filename"))
        .outerjoin(files, files.c.id == videos.c.original_file_id)
        .where(videos.c.tenant_id == tenant_id, videos.c.user_id == user_id, or_(*is_found))
        .order_by(videos.c.created_at.desc(), videos.c.id.desc())
        .limit(limit)
    )
    media = []
    for row in (await tx.execute(query)).mappings():
        values = dict(row)
        name = values.pop("filename")
        media.append((MediaItem(**values), name))
    return media


async def media_of_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, file_ids: Collection[UUID]
) -> dict[UUID, UUID]:
    """Returns the ids of the user's media by the id of their original file."""
    if not file_ids:
        return {}
    query = select(videos.c.original_file_id, videos.c.id).where(
        without_index(tx, videos.c.tenant_id) == tenant_id,
        without_index(tx, videos.c.user_id) == user_id,
        is_one_of(tx, videos.c.original_file_id, file_ids),
    )
    return {row.original_file_id: row.id for row in await tx.execute(query)}


async def add_share(tx: Tx, share: SharedLink) -> None:
    await tx.execute(insert(shares).values(asdict(share)))


async def share_by_hash(tx: Tx, tenant_id: UUID, secret_hash: str) -> SharedLink | None:
    query = select(shares).where(
        shares.c.tenant_id == tenant_id, shares.c.secret_hash == secret_hash
    )
    row = (await tx.execute(query)).first()
    return SharedLink(**row._mapping) if row else None


async def get_share(tx: Tx, tenant_id: UUID, user_id: UUID, share_id: UUID) -> SharedLink | None:
    query = select(shares).where(*_own_shares(tenant_id, user_id), shares.c.id == share_id)
    row = (await tx.execute(query)).first()
    return SharedLink(**row._mapping) if row else None


async def page_of_shares(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    wanted: Mapping[str, Any],
    before: SharedLink | None,
    limit: int,
) -> list[SharedLink]:
    at = shares.c.created_at
    query = (
        select(shares)
        .where(*_own_shares(tenant_id, user_id))
        .where(*(shares.c[name] == value for name, value in wanted.items() if value is not None))
        .order_by(at.desc(), shares.c.id.desc())
        .limit(limit)
    )
    if before is not None:
        earlier = and_(at == before.created_at, shares.c.id < before.id)
        query = query.where(or_(at < before.created_at, earlier))
    return [SharedLink(**row._mapping) for row in await tx.execute(query)]


async def count_open_shares(tx: Tx, tenant_id: UUID, user_id: UUID, now: datetime) -> int:
    query = select(func.count()).where(
        *_own_shares(tenant_id, user_id), shares.c.revoked_at.is_(None), shares.c.expires_at > now
    )
    return int(await tx.scalar(query) or 0)


async def revoke_share(
    tx: Tx, tenant_id: UUID, user_id: UUID, share_id: UUID, now: datetime
) -> SharedLink | None:
    """Revokes a share. Returns None if it doesn't exist or was revoked before."""
    statement = (
        update(shares)
        .where(
            *_own_shares(tenant_id, user_id), shares.c.id == share_id, shares.c.revoked_at.is_(None)
        )
        .values(revoked_at=now)
        .returning(shares)
    )
    row = (await tx.execute(statement)).first()
    return SharedLink(**row._mapping) if row else None


async def prune_shares(tx: Tx, *, before: datetime, limit: int) -> int:
    old = select(shares.c.id).where(shares.c.expires_at < before).limit(limit)
    deleted = await tx.execute(delete(shares).where(shares.c.id.in_(old)).returning(shares.c.id))
    return len(deleted.all())


def _own_shares(tenant_id: UUID, user_id: UUID) -> tuple[ColumnElement[bool], ...]:
    return shares.c.tenant_id == tenant_id, shares.c.user_id == user_id


async def attach_job(
    tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID, job_id: UUID
) -> MediaItem | None:
    """Attaches a job to a media item. Returns None if the item is missing or expired."""
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
    row = (await tx.execute(statement)).first()
    return _media(row) if row else None


def end_job_update(job: CTE, details: ColumnElement[Any]) -> Update:
    """Builds the update of `end_job` for a completed job, to be used as part of a larger
    statement."""
    return (
        update(videos)
        .where(
            videos.c.id == job.c.video_id,
            videos.c.tenant_id == job.c.tenant_id,
            videos.c.job_id == job.c.id,
            videos.c.active_job_id == job.c.id,
        )
        .values(
            active_job_id=None, processed_file_id=job.c.output_file_id, processing_details=details
        )
    )


async def end_job(
    tx: Tx, tenant_id: UUID, job_id: UUID, values: Mapping[str, Any]
) -> MediaItem | None:
    """Ends the job of a media item. Returns None if the item doesn't exist, if it has a later job,
    or if the job has already ended."""
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
    row = (await tx.execute(statement)).first()
    return _media(row) if row else None


async def expired_media(
    tx: Tx, tenant_id: UUID, *, before: datetime, limit: int
) -> list[MediaItem]:
    """Returns media without active jobs that were created before the given time. Locks them, so
    that no job can be attached in between."""
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
