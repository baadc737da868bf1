"""What may happen to a user's media. Another user's is not there, whoever asks."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.kernel.errors import NotFound, Refused
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
    """Its latest job from now on; earlier ones go on beside it."""
    attached = await store.attach(tx, tenant_id, user_id, media_id, job_id)
    if attached is None:
        await get(tx, tenant_id, user_id, media_id)
        raise Refused("the media has expired", field="video_id")
    return attached


async def end_job(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    *,
    processed_file_id: UUID | None = None,
    details: Mapping[str, Any] | None = None,
) -> Media | None:
    """In the transaction that ends the job. None unless it is the media's latest."""
    values: dict[str, Any] = {"processed_file_id": processed_file_id}
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
