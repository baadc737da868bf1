"""The media's only SQL."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CTE, ColumnElement, Row, Update, and_, insert, or_, select, update

from comfyfleet.db import Tx
from comfyfleet.db.dialect import is_one_of, locked
from comfyfleet.db.tenant import videos
from comfyfleet.media.model import Media


async def add(tx: Tx, media: Media) -> None:
    row = {**asdict(media), "processing_details": dict(media.processing_details)}
    await tx.execute(insert(videos).values(row))


async def get(tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID) -> Media | None:
    query = select(videos).where(
        videos.c.tenant_id == tenant_id, videos.c.user_id == user_id, videos.c.id == media_id
    )
    found = (await tx.execute(query)).first()
    return _media(found) if found else None


async def of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> Media | None:
    query = select(videos).where(videos.c.tenant_id == tenant_id, videos.c.job_id == job_id)
    found = (await tx.execute(query)).first()
    return _media(found) if found else None


async def page(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, before: Media | None, limit: int
) -> list[Media]:
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


async def attach(
    tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID, job_id: UUID
) -> Media | None:
    """None: it is not there, or has expired."""
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


def ending(job: CTE, told: ColumnElement[Any]) -> Update:
    """The same as `end_job` for a job that has completed, as a part of a larger statement."""
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


async def end_job(tx: Tx, tenant_id: UUID, job_id: UUID, values: Mapping[str, Any]) -> Media | None:
    """None: no media, a later job, or its job ended before."""
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


async def old(tx: Tx, tenant_id: UUID, *, before: datetime, limit: int) -> list[Media]:
    """Made before then, still there and not at work; locked, so that no job is attached meanwhile."""
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
    return [_media(row) for row in await tx.execute(locked(tx, query, skip_locked=True))]


async def expire(tx: Tx, media_ids: list[UUID], now: datetime) -> None:
    await tx.execute(
        update(videos)
        .where(is_one_of(tx, videos.c.id, media_ids))
        .values(expired_at=now, original_file_id=None, processed_file_id=None)
    )


def _media(row: Row[Any]) -> Media:
    return Media(**row._mapping)
