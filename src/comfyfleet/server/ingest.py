"""Ingest of customers' files: uploaded and attached, or fetched from a URL."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import UUID, uuid5

from blake3 import blake3

from comfyfleet.errors import InvalidInput, LimitExceeded, NotFound
from comfyfleet.media import LONG_HEADER_BYTES
from comfyfleet.server.app import ControlPlane
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
    kind_of,
    sniff_type,
    stored_key,
    upload_key,
)
from comfyfleet.server.storage import PresignedUrl
from comfyfleet.server.tenants.model import Caller
from comfyfleet.transport.fetch import FetchedSource, Fetcher, FetchLimits
from comfyfleet.transport.files import open_file

# The media of a file is always the same one: who links it again after a lost answer gets it again.
LINKED = "media"
BUFFER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class UploadRequest:
    filename: str
    content_type: str
    size: int


def kind_named(content_type: str) -> MediaKind:
    kind = kind_of(content_type)
    if kind is None:
        raise InvalidInput(
            "content_type must be one of an image, a video or a sound", field="content_type"
        )
    return kind


def check_size(plane: ControlPlane, size: int) -> None:
    most = plane.settings.max_upload_bytes
    if size > most:
        raise LimitExceeded(
            f"a file has at most {most:,} bytes, not {size:,}", field="size", max_bytes=most
        )


async def create_upload(
    plane: ControlPlane, caller: Caller, announced: UploadRequest
) -> tuple[File, PresignedUrl]:
    """A row for a file to come, and the one PUT that brings it."""
    file_id = plane.context.new_id()
    file = File(
        id=file_id,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        disk=plane.store.disk,
        path=upload_key(caller.tenant.id, file_id, announced.filename),
        filename=announced.filename,
        mime_type=canonical_type(announced.content_type),
        metadata={ANNOUNCED_SIZE: announced.size},
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


def quota_of(plane: ControlPlane, caller: Caller) -> int:
    own = caller.tenant.max_storage_bytes
    return plane.settings.max_storage_bytes_per_tenant if own is None else own


async def attach(plane: ControlPlane, caller: Caller, file_id: UUID) -> tuple[MediaItem, bool]:
    """The media, and whether it is new. Another user's file is not there."""
    media_id = uuid5(file_id, LINKED)
    pool = plane.pools[caller.tenant.pool]
    async with pool.read() as tx:
        known = await _known(tx, caller, media_id)
        if known is not None:
            return known, False
        file = await media.get_file(tx, caller.tenant.id, file_id)
    if file.user_id != caller.user_id:
        raise NotFound(f"there is no file {file_id}", file_id=str(file_id))
    try:
        kept = await files.confirm_upload(plane.context, pool, file)
    except NotFound:
        # Linked at the same moment, as media of an earlier file with the same content.
        async with pool.read() as tx:
            return await media.get_media(tx, caller.tenant.id, caller.user_id, media_id), False
    linked, is_new = await _inspect(plane, caller, kept, media_id, is_fresh=file.is_announced)
    if is_new and linked.original_file_id != file.id:
        await plane.store.delete(kept.path)  # the user has the same content already
    return linked, is_new


async def _known(tx: Tx, caller: Caller, media_id: UUID) -> MediaItem | None:
    try:
        return await media.get_media(tx, caller.tenant.id, caller.user_id, media_id)
    except NotFound:
        return None


async def _inspect(
    plane: ControlPlane, caller: Caller, file: File, media_id: UUID, *, is_fresh: bool
) -> tuple[MediaItem, bool]:
    """The media, and whether it is new; of an earlier file if the user has one of the same content."""
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        try:
            # Whoever links the same file at the same time waits here, and then finds the media.
            await media.lock_file(tx, file.tenant_id, file.id)
        except NotFound:
            return await media.get_media(tx, caller.tenant.id, caller.user_id, media_id), False
        known = await _known(tx, caller, media_id)
        if known is not None:
            return known, False
        twin = await _find_duplicate(tx, file) if is_fresh else None
        if twin is not None:
            await media.delete_file(tx, file.tenant_id, file.id)
        return await _create(tx, plane, caller, twin or file, media_id), True


async def _find_duplicate(tx: Tx, file: File) -> File | None:
    """An upload of the same user with the same content. Outputs come and go with their jobs."""
    if file.content_hash is None:
        return None
    found = await media.file_by_hash(tx, file.tenant_id, file.user_id, file.content_hash)
    if found is None or found.id == file.id or ANNOUNCED_SIZE not in found.metadata:
        return None
    return found if found.mime_type == file.mime_type else None


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
    """Through a file of our own: only when all of it is here is it known whether it is there already."""
    limits = FetchLimits(plane.settings.max_upload_bytes, plane.settings.fetch_seconds)
    fetcher = Fetcher(plane.outward, media_type_of=sniff_type)
    with tempfile.TemporaryDirectory(prefix="comfyfleet-") as folder:
        path = Path(folder) / "fetched"
        async with fetcher.open(url, limits) as source:
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
    hasher, size, held = blake3(), 0, bytearray()
    with await open_file(path, "wb") as file:
        async for chunk in chunks:
            held += chunk
            if len(held) >= BUFFER_BYTES:
                size += await asyncio.to_thread(_write, file, hasher, bytes(held))
                held.clear()
        size += await asyncio.to_thread(_write, file, hasher, bytes(held))
    return size, hasher.hexdigest()


def _write(file: BinaryIO, hasher: blake3, data: bytes) -> int:
    hasher.update(data)
    return file.write(data)
