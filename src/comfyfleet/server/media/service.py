"""Files of a tenant, counted against its quota, and media items of its users. What belongs to others is not found."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.errors import Conflict, InvalidInput, NotFound, Refused, StorageFull
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.driver import StatementCall
from comfyfleet.server.media import store
from comfyfleet.server.media.model import File, MediaItem, MediaKind, check_file, check_hash

FILES_AT_ONCE_MAX = 1000


async def add_file(tx: Tx, file: File) -> File:
    """A file whose bytes are there, or one that is only announced: then its size is None."""
    await store.add_file(tx, check_file(file))
    return file


def add_call(file: File) -> StatementCall:
    """The same, to be sent together with what else is written."""
    return store.add_file_call(check_file(file))


async def used_bytes(tx: Tx, tenant_id: UUID) -> int:
    """What the tenant stores, uploads that are only announced among it."""
    return await store.used_bytes(tx, tenant_id)


async def recount(pool: Database) -> dict[UUID, int]:
    """Corrects what is counted of tenants' storage; by tenant, how many bytes were missing.

    Older versions may have checked or removed files beside this one, and counted nothing.
    """
    async with pool.read() as tx:
        missing = await store.miscounts(tx)
    for tenant_id, size in missing.items():
        async with pool.transaction() as tx:
            await store.count(tx, tenant_id, size)
    return missing


async def require_room(tx: Tx, tenant_id: UUID, size: int, *, most: int) -> None:
    """In the transaction that adds the file: nobody else of the tenant can take the same room."""
    used = await store.used_bytes(tx, tenant_id)
    if used + size > most:
        raise StorageFull(
            f"the quota of {most:,} bytes does not hold {size:,} more: {used:,} are used",
            quota_bytes=most,
            used_bytes=used,
        )


async def get_file(tx: Tx, tenant_id: UUID, file_id: UUID) -> File:
    found = await store.find_files(tx, tenant_id, [file_id])
    if not found:
        raise _missing(file_id)
    return found[0]


async def get_files(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> dict[UUID, File]:
    """All of them, by id; NotFound names the first that is missing."""
    if len(file_ids) > FILES_AT_ONCE_MAX:
        raise InvalidInput(f"at most {FILES_AT_ONCE_MAX} files are looked up at once")
    found = {file.id: file for file in await store.find_files(tx, tenant_id, file_ids)}
    for file_id in file_ids:
        if file_id not in found:
            raise _missing(file_id)
    return found


async def find_existing(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> dict[UUID, File]:
    """Those that are still there, by id: a job outlives its files."""
    if len(file_ids) > FILES_AT_ONCE_MAX:
        raise InvalidInput(f"at most {FILES_AT_ONCE_MAX} files are looked up at once")
    return {file.id: file for file in await store.find_files(tx, tenant_id, file_ids)}


async def lock(tx: Tx, tenant_id: UUID, file_id: UUID) -> File:
    """As `get`; whoever else wants to hold it waits until the transaction ends."""
    found = await store.lock_files(tx, tenant_id, file_id)
    if found is None:
        raise _missing(file_id)
    return found


async def file_by_hash(
    tx: Tx, tenant_id: UUID, user_id: UUID | None, content_hash: str
) -> File | None:
    """The user's oldest file with this content: the same bytes needn't be sent again.

    It can't be removed until the transaction ends, in which something may come to name it.
    """
    return await store.file_by_hash(tx, tenant_id, user_id, check_hash(content_hash))


async def confirm_file(
    tx: Tx,
    tenant_id: UUID,
    file_id: UUID,
    *,
    size: int,
    mime_type: str | None = None,
    content_hash: str | None = None,
    path: str | None = None,
) -> File:
    """An announced file has arrived. Saying so again is fine, saying otherwise is a Conflict.

    It lies under `path` from now on, unless somebody else has said so before.
    """
    if size < 0:
        raise InvalidInput(f"a file can't have {size} bytes", field="size")
    told = {"mime_type": mime_type, "content_hash": content_hash and check_hash(content_hash)}
    facts: dict[str, Any] = {"size": size} | {
        name: value for name, value in told.items() if value is not None
    }
    moved = {"path": path} if path else {}
    if confirmed := await store.confirm_file(tx, tenant_id, file_id, {**facts, **moved}):
        return confirmed
    file = await get_file(tx, tenant_id, file_id)
    if any(getattr(file, name) != value for name, value in facts.items()):
        raise Conflict("the file is there already, and is another one", file_id=str(file_id))
    return file


async def delete_files(tx: Tx, tenant_id: UUID, file_id: UUID) -> File:
    """The row goes; the caller then deletes the object, after the commit.

    In this order a crash in between costs space, not a file that somebody still counts on.
    """
    removed = await store.delete_files(tx, tenant_id, file_id)
    if removed is None:
        raise _missing(file_id)
    return removed


def _missing(file_id: UUID) -> NotFound:
    return NotFound(f"there is no file {file_id}", file_id=str(file_id))


MEDIA_PER_PAGE_MAX = 500


async def create_media(
    tx: Tx,
    *,
    media_id: UUID,
    tenant_id: UUID,
    user_id: UUID,
    kind: MediaKind,
    original_file_id: UUID,
    now: datetime,
) -> MediaItem:
    """Of a file that is there and is what it claims: `kinds.check_claim` has looked."""
    media = MediaItem(media_id, tenant_id, user_id, kind, original_file_id, now)
    await store.add_media(tx, media)
    return media


async def get_media(tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID) -> MediaItem:
    found = await store.get_media(tx, tenant_id, user_id, media_id)
    if found is None:
        raise NotFound(f"there is no media {media_id}")
    return found


async def media_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> MediaItem | None:
    """The media whose latest job this is."""
    return await store.media_of_job(tx, tenant_id, job_id)


async def list_media(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, before_id: UUID | None = None, limit: int
) -> list[MediaItem]:
    """The newest first; go on with `before_id` = the last one's id."""
    before = await get_media(tx, tenant_id, user_id, before_id) if before_id else None
    return await store.page_of_media(
        tx, tenant_id, user_id, before=before, limit=min(limit, MEDIA_PER_PAGE_MAX)
    )


async def attach_job(
    tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID, job_id: UUID
) -> MediaItem:
    """Its latest job from now on; earlier ones go on beside it."""
    attached = await store.attach_job(tx, tenant_id, user_id, media_id, job_id)
    if attached is None:
        await get_media(tx, tenant_id, user_id, media_id)
        raise Refused("the media has expired", field="video_id")
    return attached


async def end_job(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    *,
    processed_file_id: UUID | None = None,
    details: Mapping[str, Any] | None = None,
) -> MediaItem | None:
    """In the transaction that ends the job. None unless it is the media's latest."""
    values: dict[str, Any] = {"processed_file_id": processed_file_id}
    if details is not None:
        values["processing_details"] = dict(details)
    return await store.end_job(tx, tenant_id, job_id, values)


async def expire_media(
    tx: Tx, tenant_id: UUID, *, before: datetime, now: datetime, limit: int
) -> list[MediaItem]:
    """Media as they were, so that the caller knows whose files to remove."""
    found = await store.expired_media(
        tx, tenant_id, before=before, limit=min(limit, MEDIA_PER_PAGE_MAX)
    )
    if found:
        await store.expire_media(tx, [each.id for each in found], now)
    return found
