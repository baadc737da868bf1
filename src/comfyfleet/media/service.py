"""What may happen to a user's media. Another user's is not there, whoever asks."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.kernel.errors import Conflict, NotFound, Refused
from comfyfleet.media import store
from comfyfleet.media.kinds import MediaKind
from comfyfleet.media.model import Media

PAGE_MAX = 500


async def create(
    tx: Tx,
    *,
    media_id: UUID,
    tenant_id: UUID,
    user_id: UUID,
    kind: MediaKind,
    original_file_id: UUID,
    now: datetime,
) -> Media:
    """Of a file that is there and is what it claims: `kinds.check_claim` has looked."""
    media = Media(media_id, tenant_id, user_id, kind, original_file_id, now)
    await store.add(tx, media)
    return media


async def get(tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID) -> Media:
    found = await store.get(tx, tenant_id, user_id, media_id)
    if found is None:
        raise NotFound(f"there is no media {media_id}")
    return found


async def of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> Media | None:
    """The media whose latest job this is."""
    return await store.of_job(tx, tenant_id, job_id)


async def all_of(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, before_id: UUID | None = None, limit: int
) -> list[Media]:
    """The newest first; go on with `before_id` = the last one's id."""
    before = await get(tx, tenant_id, user_id, before_id) if before_id else None
    return await store.page(tx, tenant_id, user_id, before=before, limit=min(limit, PAGE_MAX))


async def attach_job(tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID, job_id: UUID) -> Media:
    """One job at a time: a second one while the first is active is a Conflict."""
    attached = await store.attach(tx, tenant_id, user_id, media_id, job_id)
    if attached is not None:
        return attached
    found = await get(tx, tenant_id, user_id, media_id)
    if found.active_job_id == job_id:
        return found
    if found.expired_at is not None:
        raise Refused("the media has expired", field="video_id")
    raise Conflict("a job of this media is still active", job_id=str(found.active_job_id))


async def end_job(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    *,
    processed_file_id: UUID | None = None,
    details: Mapping[str, Any] | None = None,
) -> Media | None:
    """In the transaction that ends the job. An earlier result stays if there is no new one."""
    values: dict[str, Any] = {}
    if processed_file_id is not None:
        values["processed_file_id"] = processed_file_id
    if details is not None:
        values["processing_details"] = dict(details)
    return await store.end_job(tx, tenant_id, job_id, values)


async def expire(
    tx: Tx, tenant_id: UUID, *, before: datetime, now: datetime, limit: int
) -> list[Media]:
    """Media as they were, so that the caller knows whose files to remove."""
    found = await store.old(tx, tenant_id, before=before, limit=min(limit, PAGE_MAX))
    if found:
        await store.expire(tx, [each.id for each in found], now)
    return found
