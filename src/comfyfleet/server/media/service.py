"""Manages a tenant's files, which count against its quota, and its users' media items. Other users'
items are reported as not found."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.errors import (
    Conflict,
    InvalidInput,
    LimitExceeded,
    NotFound,
    Refused,
    StorageFull,
)
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.driver import StatementCall
from comfyfleet.server.media import store
from comfyfleet.server.media.model import (
    ANY_MEDIA,
    SHARES_PER_USER_MAX,
    File,
    MediaFilter,
    MediaItem,
    MediaKind,
    SharedLink,
    check_file,
    check_hash,
    ids_beginning,
)
from comfyfleet.server.secrets import hash_key

FILES_AT_ONCE_MAX = 1000


async def add_file(tx: Tx, file: File) -> File:
    """Adds a file, or an announced upload, which has no size yet."""
    await store.add_file(tx, check_file(file))
    return file


def add_call(file: File) -> StatementCall:
    """Builds a call like `add_file`, to be sent together with other writes."""
    return store.add_file_call(check_file(file))


async def used_bytes(tx: Tx, tenant_id: UUID) -> int:
    """Returns how many bytes the tenant stores, including announced uploads."""
    return await store.used_bytes(tx, tenant_id)


async def recount(pool: Database) -> dict[UUID, int]:
    """Corrects the tenants' storage counters. Returns how many bytes were added to each wrong
    counter.

    During an upgrade, a control plane of the older version may have checked or deleted files
    without updating the counters."""
    async with pool.read() as tx:
        missing = await store.storage_miscounts(tx)
    for tenant_id, size in missing.items():
        async with pool.transaction() as tx:
            await store.add_storage_bytes(tx, tenant_id, size)
    return missing


async def require_quota(tx: Tx, tenant_id: UUID, size: int, *, most: int) -> None:
    """Raises StorageFull if the quota would be exceeded. Locks the counter, so it must be called in
    the transaction that adds the file."""
    used = await store.used_bytes(tx, tenant_id)
    if used + size > most:
        raise StorageFull(
            f"{size:,} more bytes would exceed the quota of {most:,} bytes; {used:,} are in use",
            quota_bytes=most,
            used_bytes=used,
        )


async def get_file(tx: Tx, tenant_id: UUID, file_id: UUID) -> File:
    files = await store.find_files(tx, tenant_id, [file_id])
    if not files:
        raise _missing(file_id)
    return files[0]


async def get_files(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> dict[UUID, File]:
    """Returns files by id. Raises NotFound with the id of the first missing file."""
    if len(file_ids) > FILES_AT_ONCE_MAX:
        raise InvalidInput(f"at most {FILES_AT_ONCE_MAX} files can be looked up in one call")
    files = {file.id: file for file in await store.find_files(tx, tenant_id, file_ids)}
    for file_id in file_ids:
        if file_id not in files:
            raise _missing(file_id)
    return files


async def find_existing(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> dict[UUID, File]:
    """Returns the files that still exist, by id. A job may outlive its files."""
    if len(file_ids) > FILES_AT_ONCE_MAX:
        raise InvalidInput(f"at most {FILES_AT_ONCE_MAX} files can be looked up in one call")
    return {file.id: file for file in await store.find_files(tx, tenant_id, file_ids)}


async def lock_kept(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    file_ids: Collection[UUID],
    *,
    since: datetime | None,
) -> dict[UUID, File]:
    """Locks existing files of the user. With `since`, leaves out files whose retention period
    started before it."""
    ordered_ids = sorted(set(file_ids))
    files: dict[UUID, File] = {}
    for start in range(0, len(ordered_ids), FILES_AT_ONCE_MAX):
        part = ordered_ids[start : start + FILES_AT_ONCE_MAX]
        for file in await store.lock_own_files(tx, tenant_id, user_id, part):
            if since is None or (file.kept_from or file.created_at) > since:
                files[file.id] = file
    return files


async def keep_longer(
    tx: Tx, tenant_id: UUID, file_ids: Collection[UUID], *, now: datetime
) -> None:
    """Restarts the retention period of files. Their rows must be locked."""
    ordered_ids = sorted(file_ids)
    for start in range(0, len(ordered_ids), FILES_AT_ONCE_MAX):
        part = ordered_ids[start : start + FILES_AT_ONCE_MAX]
        await store.keep_longer(tx, tenant_id, part, now=now)


async def lock_file(tx: Tx, tenant_id: UUID, file_id: UUID) -> File:
    """Returns a file like `get_file`, and locks its row until the transaction ends."""
    file = await store.lock_file(tx, tenant_id, file_id)
    if file is None:
        raise _missing(file_id)
    return file


async def file_by_hash(
    tx: Tx, tenant_id: UUID, user_id: UUID | None, content_hash: str
) -> File | None:
    """Finds the user's oldest file with this content, so that the same bytes don't have to be
    uploaded again.

    Locks its row, so that it can't be deleted before the transaction that refers to it ends."""
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
    """Records that an announced file has arrived. Repeating it with the same values is allowed, but
    other values raise Conflict.

    `path` becomes its key, unless the file was confirmed before."""
    if size < 0:
        raise InvalidInput(f"a file can't have {size} bytes", field="size")
    claims = {"mime_type": mime_type, "content_hash": content_hash and check_hash(content_hash)}
    facts: dict[str, Any] = {"size": size} | {
        name: value for name, value in claims.items() if value is not None
    }
    moved = {"path": path} if path else {}
    if confirmed := await store.confirm_file(tx, tenant_id, file_id, {**facts, **moved}):
        return confirmed
    file = await get_file(tx, tenant_id, file_id)
    if any(getattr(file, name) != value for name, value in facts.items()):
        raise Conflict("the file already exists with other content", file_id=str(file_id))
    return file


async def set_metadata(tx: Tx, tenant_id: UUID, file_id: UUID, metadata: Mapping[str, Any]) -> File:
    """Replaces the metadata of a file."""
    changed = await store.set_metadata(tx, tenant_id, file_id, metadata)
    if changed is None:
        raise _missing(file_id)
    return changed


async def is_in_media(tx: Tx, tenant_id: UUID, file_id: UUID) -> bool:
    """Checks whether a media item needs the file."""
    return await store.is_in_media(tx, tenant_id, file_id)


async def delete_file(tx: Tx, tenant_id: UUID, file_id: UUID) -> File:
    """Deletes the row. The caller must delete the object after the commit.

    A crash in between leaves an unused object, but never a row without its object."""
    removed = await store.delete_file(tx, tenant_id, file_id)
    if removed is None:
        raise _missing(file_id)
    return removed


def _missing(file_id: UUID) -> NotFound:
    return NotFound(f"file {file_id} was not found", file_id=str(file_id))


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
    """Creates a media item for a file that was checked with `check_claim`."""
    media = MediaItem(media_id, tenant_id, user_id, kind, original_file_id, now)
    await store.add_media(tx, media)
    return media


async def get_media(tx: Tx, tenant_id: UUID, user_id: UUID | None, media_id: UUID) -> MediaItem:
    item = await store.get_media(tx, tenant_id, user_id, media_id)
    if item is None:
        raise NotFound(f"media item {media_id} was not found")
    return item


async def media_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> MediaItem | None:
    """Returns the media item that has this job as its latest one."""
    return await store.media_of_job(tx, tenant_id, job_id)


async def list_media(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    before_id: UUID | None = None,
    limit: int,
    wanted: MediaFilter = ANY_MEDIA,
) -> list[MediaItem]:
    """Returns a page of media, newest first. `before_id` is the last id of the previous page."""
    before = await get_media(tx, tenant_id, user_id, before_id) if before_id else None
    return await store.page_of_media(
        tx,
        tenant_id,
        user_id,
        before=before,
        limit=min(limit, MEDIA_PER_PAGE_MAX),
        wanted=wanted,
    )


async def search(
    tx: Tx, tenant_id: UUID, user_id: UUID, text: str, *, limit: int
) -> list[tuple[MediaItem, str | None]]:
    """Finds the user's newest media by file name or by the first digits of an id. Returns each with
    its file name."""
    return await store.search_media(
        tx, tenant_id, user_id, text, between=ids_beginning(text), limit=limit
    )


async def media_of_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, file_ids: Collection[UUID]
) -> dict[UUID, UUID]:
    """Returns the ids of the user's media by the id of their original file."""
    return await store.media_of_files(tx, tenant_id, user_id, file_ids)


async def create_share(tx: Tx, share: SharedLink, *, now: datetime) -> SharedLink:
    if (
        await store.count_open_shares(tx, share.tenant_id, share.user_id, now)
        >= SHARES_PER_USER_MAX
    ):
        raise LimitExceeded(
            f"a user can have at most {SHARES_PER_USER_MAX:,} active links; revoke some first"
        )
    await store.add_share(tx, share)
    return share


async def find_share(tx: Tx, tenant_id: UUID, secret: str) -> SharedLink | None:
    """Finds a share by its secret, even if it has expired. Returns None if it was revoked."""
    share = await store.share_by_hash(tx, tenant_id, hash_key(secret))
    return share if share and share.revoked_at is None else None


async def list_shares(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    video_id: UUID | None = None,
    job_id: UUID | None = None,
    before_id: UUID | None = None,
    limit: int,
) -> list[SharedLink]:
    """Returns a page of shares, newest first. `before_id` is the last id of the previous page."""
    before = await get_share(tx, tenant_id, user_id, before_id) if before_id else None
    filters = {"video_id": video_id, "job_id": job_id}
    return await store.page_of_shares(
        tx, tenant_id, user_id, wanted=filters, before=before, limit=min(limit, MEDIA_PER_PAGE_MAX)
    )


async def get_share(tx: Tx, tenant_id: UUID, user_id: UUID, share_id: UUID) -> SharedLink:
    share = await store.get_share(tx, tenant_id, user_id, share_id)
    if share is None:
        raise NotFound(f"share {share_id} was not found")
    return share


async def revoke_share(
    tx: Tx, tenant_id: UUID, user_id: UUID, share_id: UUID, *, now: datetime
) -> SharedLink:
    """Revokes a share immediately. Repeating it has no effect."""
    revoked = await store.revoke_share(tx, tenant_id, user_id, share_id, now)
    return revoked or await get_share(tx, tenant_id, user_id, share_id)


async def prune_shares(tx: Tx, *, before: datetime, limit: int) -> int:
    """Deletes shares that expired before the given time. Returns their number."""
    return await store.prune_shares(tx, before=before, limit=limit)


async def attach_job(
    tx: Tx, tenant_id: UUID, user_id: UUID, media_id: UUID, job_id: UUID
) -> MediaItem:
    """Makes this job the latest job of a media item. Earlier jobs continue."""
    attached = await store.attach_job(tx, tenant_id, user_id, media_id, job_id)
    if attached is None:
        await get_media(tx, tenant_id, user_id, media_id)
        raise Refused("the media item has expired", field="video_id")
    return attached


async def end_job(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    *,
    processed_file_id: UUID | None = None,
    details: Mapping[str, Any] | None = None,
) -> MediaItem | None:
    """Records the end of a media item's job, in the transaction that ends the job. Returns None if
    the item has a later job."""
    values: dict[str, Any] = {"processed_file_id": processed_file_id}
    if details is not None:
        values["processing_details"] = dict(details)
    return await store.end_job(tx, tenant_id, job_id, values)


async def expire_media(
    tx: Tx, tenant_id: UUID, *, before: datetime, now: datetime, limit: int
) -> list[MediaItem]:
    """Expires media. Returns them with their file ids, so that the caller can delete the files."""
    expired = await store.expired_media(
        tx, tenant_id, before=before, limit=min(limit, MEDIA_PER_PAGE_MAX)
    )
    if expired:
        await store.expire_media(tx, [item.id for item in expired], now)
    return expired
