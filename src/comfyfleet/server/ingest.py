"""Receives customers' files, which are uploaded or fetched from a URL, and creates media items."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO
from uuid import UUID, uuid5

from blake3 import blake3

from comfyfleet.delivery import strip_metadata
from comfyfleet.errors import InvalidInput, LimitExceeded, NotFound, Refused
from comfyfleet.media import (
    LONG_HEADER_BYTES,
    SNIFF_BYTES,
    measure_picture,
    require_pixels,
)
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog.model import ExampleFile
from comfyfleet.server.db import Tx
from comfyfleet.server.jobs import files
from comfyfleet.server.jobs.files import ANNOUNCED_SIZE
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import (
    FILENAME_CHARACTERS_MAX,
    File,
    MediaItem,
    MediaKind,
    canonical_type,
    extension_of,
    kind_of,
    part_key,
    sniff_type,
    stored_key,
    upload_key,
)
from comfyfleet.server.storage import PresignedUrl
from comfyfleet.server.storage.outage import system_scratch
from comfyfleet.server.tenants.model import Caller
from comfyfleet.transport.fetch import FetchedSource, Fetcher, FetchLimits
from comfyfleet.transport.files import open_file

# A media item's id is derived from the file's id and this name. If a client repeats a request
# because the response was lost, it gets the same media item.
LINKED = "media"
BUFFER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class UploadRequest:
    filename: str
    content_type: str
    size: int
    is_in_parts: bool = False


def kind_named(content_type: str) -> MediaKind:
    kind = kind_of(content_type)
    if kind is None:
        raise InvalidInput(
            f"only images, videos and audio can be uploaded, not {content_type!r:.100}",
            field="content_type",
        )
    return kind


def check_size(plane: ControlPlane, size: int) -> None:
    most = plane.settings.max_upload_bytes
    if size > most:
        raise LimitExceeded(
            f"a file can have at most {most:,} bytes, not {size:,}", field="size", max_bytes=most
        )


EXAMPLE_BYTES_MAX = 32 * 1024**2


async def keep_example(plane: ControlPlane, content: bytes) -> ExampleFile:
    """Stores an example image or video of an effect, without metadata such as the workflow."""
    media_type = sniff_type(content[:SNIFF_BYTES])
    kind = kind_of(media_type or "")
    if media_type is None or kind not in ("image", "video"):
        raise InvalidInput("the request body must be an image or a video", field="body")
    if len(content) > EXAMPLE_BYTES_MAX:
        raise LimitExceeded(f"an example can have at most {EXAMPLE_BYTES_MAX:,} bytes")
    size = measure_picture(content) if kind == "image" else None
    require_pixels(size, plane.settings.max_picture_pixels)
    with system_scratch().opened() as folder:
        path = folder / "example"
        await asyncio.to_thread(path.write_bytes, content)
        bytes_left = await asyncio.to_thread(strip_metadata, path)
        name = f"{plane.context.new_id().hex}{extension_of(media_type)}"
        file = ExampleFile(name, media_type, bytes_left, *(size or ()))
        await plane.store.put_file(file.key, path, media_type)
    return file


async def create_upload(
    plane: ControlPlane, caller: Caller, announced: UploadRequest
) -> tuple[File, PresignedUrl]:
    """Stores the row of an announced file, and creates the URL to which the file is uploaded with
    PUT."""
    file_id = plane.context.new_id()
    file = File(
        id=file_id,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        disk=plane.store.disk,
        path=upload_key(caller.tenant.id, file_id, announced.filename),
        filename=announced.filename,
        mime_type=canonical_type(announced.content_type),
        metadata={
            ANNOUNCED_SIZE: announced.size,
            **({PART_BYTES: part_bytes_for(announced.size)} if announced.is_in_parts else {}),
        },
        created_at=plane.clock(),
    )
    put = await plane.store.url_to_put(
        file.path,
        content_type=file.mime_type,
        seconds=plane.settings.url_seconds,
        size=announced.size,
    )
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        most = quota_of(plane, caller)
        await media.require_quota(tx, caller.tenant.id, announced.size, most=most)
        await media.add_file(tx, file)
    return file, put


PART_BYTES = "part_bytes"
PART_BYTES_USUAL = 8 * 1024**2
PARTS_MAX = 100
HEADS_AT_ONCE_MAX = 8


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """A part of an upload. `put` is the URL for uploading it, or None if it is already stored."""

    number: int  # from 1
    start: int
    size: int
    put: PresignedUrl | None = None


@dataclass(frozen=True, slots=True)
class UploadProgress:
    file: File
    is_whole: bool
    parts: tuple[UploadedPart, ...] = ()

    @property
    def received_bytes(self) -> int:
        size: int = self.file.metadata[ANNOUNCED_SIZE]
        return size if self.is_whole else sum(part.size for part in self.parts if not part.put)


def part_bytes_for(size: int) -> int:
    """Returns the size of all parts except the last.

    Large files have larger parts, because the number of parts is limited so that all of them can be
    checked quickly.
    """
    return max(PART_BYTES_USUAL, -(-size // PARTS_MAX))


async def upload_progress(plane: ControlPlane, caller: Caller, file_id: UUID) -> UploadProgress:
    """Returns the parts of an announced file, with upload URLs for the missing parts."""
    async with plane.pools[caller.tenant.pool].read() as tx:
        file = await media.get_file(tx, caller.tenant.id, file_id)
    if file.user_id != caller.user_id or ANNOUNCED_SIZE not in file.metadata:
        raise NotFound(f"file {file_id} was not found", file_id=str(file_id))
    if not file.is_announced or await plane.store.head(file.path) is not None:
        return UploadProgress(file, is_whole=True)
    return UploadProgress(file, is_whole=False, parts=await upload_parts(plane, file))


async def upload_parts(plane: ControlPlane, file: File) -> tuple[UploadedPart, ...]:
    size, part_bytes = file.metadata[ANNOUNCED_SIZE], file.metadata.get(PART_BYTES)
    if part_bytes is None:
        return ()
    starts = range(0, size, part_bytes)
    parts = [
        UploadedPart(number, start, min(part_bytes, size - start))
        for number, start in enumerate(starts, 1)
    ]
    parts_with_urls: list[UploadedPart] = []
    for first in range(0, len(parts), HEADS_AT_ONCE_MAX):
        group = parts[first : first + HEADS_AT_ONCE_MAX]
        parts_with_urls += await asyncio.gather(*(_with_url(plane, file, part) for part in group))
    return tuple(parts_with_urls)


async def _with_url(plane: ControlPlane, file: File, part: UploadedPart) -> UploadedPart:
    key = part_key(file.path, part.number)
    facts = await plane.store.head(key)
    if facts is not None and facts.size == part.size:
        return part
    put = await plane.store.url_to_put(
        key,
        content_type=file.mime_type,
        seconds=plane.settings.url_seconds,
        size=part.size,
    )
    return replace(part, put=put)


async def _join_parts(plane: ControlPlane, file: File) -> None:
    """Joins the uploaded parts into the file. Does nothing if the file is already complete.

    Raises Refused if parts are missing, unless a concurrent call has joined the file.
    """
    size, part_bytes = file.metadata.get(ANNOUNCED_SIZE, 0), file.metadata.get(PART_BYTES)
    if part_bytes is None or await plane.store.head(file.path) is not None:
        return
    keys = [part_key(file.path, number) for number in range(1, -(-size // part_bytes) + 1)]
    try:
        await plane.store.join(keys, file.path, file.mime_type)
    except NotFound:
        if await plane.store.head(file.path) is None:
            raise Refused("some parts of the file haven't been uploaded", field="file_id") from None
    else:
        plane.context.deferred.delete_objects(plane.store, keys)


def quota_of(plane: ControlPlane, caller: Caller) -> int:
    own = caller.tenant.max_storage_bytes
    return plane.settings.max_storage_bytes_per_tenant if own is None else own


async def attach(plane: ControlPlane, caller: Caller, file_id: UUID) -> tuple[MediaItem, bool]:
    """Creates the media item of an uploaded file. Returns it, and whether it is new.

    Raises NotFound if the file belongs to another user.
    """
    media_id = uuid5(file_id, LINKED)
    pool = plane.pools[caller.tenant.pool]
    async with pool.read() as tx:
        existing = await _find_media(tx, caller, media_id)
        if existing is not None:
            return existing, False
        file = await media.get_file(tx, caller.tenant.id, file_id)
    if file.user_id != caller.user_id:
        raise NotFound(f"file {file_id} was not found", file_id=str(file_id))
    if file.is_announced:
        await _join_parts(plane, file)
    try:
        confirmed = await files.confirm_upload(plane.context, pool, file)
    except NotFound:
        # A concurrent call has deleted the file, because the user has an earlier file with the same
        # content. The media item then belongs to that file.
        async with pool.read() as tx:
            return await media.get_media(tx, caller.tenant.id, caller.user_id, media_id), False
    item, is_new = await _inspect(plane, caller, confirmed, media_id, is_fresh=file.is_announced)
    if is_new and item.original_file_id != file.id:
        await plane.store.delete(confirmed.path)  # the user already has a file with this content
    return item, is_new


async def _find_media(tx: Tx, caller: Caller, media_id: UUID) -> MediaItem | None:
    try:
        return await media.get_media(tx, caller.tenant.id, caller.user_id, media_id)
    except NotFound:
        return None


async def _inspect(
    plane: ControlPlane, caller: Caller, file: File, media_id: UUID, *, is_fresh: bool
) -> tuple[MediaItem, bool]:
    """Creates the media item of a file. Returns it, and whether it is new.

    If the user has an earlier file with the same content, the media item belongs to that file.
    """
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        try:
            # A concurrent call that attaches the same file waits here and then finds the media
            # item.
            await media.lock_file(tx, file.tenant_id, file.id)
        except NotFound:
            return await media.get_media(tx, caller.tenant.id, caller.user_id, media_id), False
        existing = await _find_media(tx, caller, media_id)
        if existing is not None:
            return existing, False
        twin = await _find_duplicate(tx, file) if is_fresh else None
        if twin is not None:
            await media.delete_file(tx, file.tenant_id, file.id)
        return await _create(tx, plane, caller, twin or file, media_id), True


async def _find_duplicate(tx: Tx, file: File) -> File | None:
    """Returns an earlier upload of the same user with the same content, or None.

    Outputs of jobs are ignored, because they are deleted with their jobs.
    """
    if file.content_hash is None:
        return None
    duplicate = await media.file_by_hash(tx, file.tenant_id, file.user_id, file.content_hash)
    if duplicate is None or duplicate.id == file.id or ANNOUNCED_SIZE not in duplicate.metadata:
        return None
    return duplicate if duplicate.mime_type == file.mime_type else None


async def _create(
    tx: Tx, plane: ControlPlane, caller: Caller, file: File, media_id: UUID
) -> MediaItem:
    return await media.create_media(
        tx,
        media_id=media_id,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        kind=kind_named(file.mime_type),
        original_file_id=file.id,
        now=plane.clock(),
    )


async def fetch_from_url(plane: ControlPlane, caller: Caller, url: str) -> MediaItem:
    """Fetches a file from a URL and creates a media item from it.

    The file is fetched into a scratch folder first, because only the complete content shows whether
    the user already has the same file.
    """
    limits = FetchLimits(plane.settings.max_upload_bytes, plane.settings.fetch_seconds)
    fetcher = Fetcher(plane.outward, media_type_of=sniff_type)
    with system_scratch().opened() as folder:
        path = folder / "fetched"
        async with fetcher.open(url, limits, who=caller.tenant.id) as source:
            size, content_hash = await _spooled(source.chunks, path)
        first = await asyncio.to_thread(_start_of, path)
        file = _fetched(plane, caller, source, size, content_hash, first)
        async with plane.pools[caller.tenant.pool].read() as tx:
            twin = await _find_duplicate(tx, file)
        if twin is None:
            await plane.store.put_file(file.path, path, file.mime_type)
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        if twin is None:
            most = quota_of(plane, caller)
            await media.require_quota(tx, caller.tenant.id, file.size or 0, most=most)
            await media.add_file(tx, file)
        return await _create(tx, plane, caller, twin or file, plane.context.new_id())


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LONG_HEADER_BYTES)


def _fetched(
    plane: ControlPlane,
    caller: Caller,
    source: FetchedSource,
    size: int,
    content_hash: str,
    first: bytes,
) -> File:
    file_id = plane.context.new_id()
    name = source.filename[:FILENAME_CHARACTERS_MAX]
    most = plane.settings.max_picture_pixels
    media_type = files.detect_media_type(
        source.media_type, first, pixels_max=most, is_operators=False
    )
    suffix = files.suffix_of(name, media_type)
    return File(
        id=file_id,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        disk=plane.store.disk,
        path=stored_key(caller.tenant.id, file_id, plane.context.new_id(), suffix),
        filename=name,
        mime_type=media_type,
        size=size,
        content_hash=content_hash,
        metadata={ANNOUNCED_SIZE: size},
        created_at=plane.clock(),
    )


async def _spooled(chunks: AsyncIterator[bytes], path: Path) -> tuple[int, str]:
    hasher, size, buffer = blake3(), 0, bytearray()
    with await open_file(path, "wb") as file:
        async for chunk in chunks:
            buffer += chunk
            if len(buffer) >= BUFFER_BYTES:
                size += await asyncio.to_thread(_write, file, hasher, bytes(buffer))
                buffer.clear()
        size += await asyncio.to_thread(_write, file, hasher, bytes(buffer))
    return size, hasher.hexdigest()


def _write(file: BinaryIO, hasher: blake3, data: bytes) -> int:
    hasher.update(data)
    return file.write(data)
