"""How a customer's file becomes media: uploaded and linked, or fetched from a URL.

What it is, its bytes tell; what it was announced as must fit. No transaction is held while bytes move.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import UUID, uuid5

from blake3 import blake3

from comfyfleet.db import Tx
from comfyfleet.fetching.fetcher import Fetcher, Limits, Source
from comfyfleet.files import service as files
from comfyfleet.files.model import FILENAME_CHARACTERS_MAX, File, stored_key, upload_key
from comfyfleet.jobs import arrival
from comfyfleet.jobs.arrival import ANNOUNCED_SIZE
from comfyfleet.kernel.errors import InvalidInput, LimitExceeded, NotFound
from comfyfleet.kernel.pictures import LONG_HEADER_BYTES
from comfyfleet.media import service as media
from comfyfleet.media.kinds import MediaKind, canonical, kind_of, sniffed
from comfyfleet.media.model import Media
from comfyfleet.opened_files import opened
from comfyfleet.plane import Plane
from comfyfleet.storage import Presigned
from comfyfleet.tenants.keys.model import Caller

# The media of a file is always the same one: who links it again after a lost answer gets it again.
LINKED = "media"
BUFFER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Announcement:
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


def check_size(plane: Plane, size: int) -> None:
    most = plane.settings.max_upload_bytes
    if size > most:
        raise LimitExceeded(
            f"a file has at most {most:,} bytes, not {size:,}", field="size", max_bytes=most
        )


async def announce(plane: Plane, caller: Caller, announced: Announcement) -> tuple[File, Presigned]:
    """A row for a file to come, and the one PUT that brings it."""
    file_id = plane.sides.new_id()
    file = File(
        id=file_id,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        disk=plane.store.disk,
        path=upload_key(caller.tenant.id, file_id, announced.filename),
        filename=announced.filename,
        mime_type=canonical(announced.content_type),
        metadata={ANNOUNCED_SIZE: announced.size},
        created_at=plane.clock(),
    )
    put = await plane.store.url_to_put(
        file.path,
        content_type=file.mime_type,
        seconds=plane.settings.url_seconds,
        size=announced.size,
    )
    async with plane.pools[caller.tenant.pool].begin() as tx:
        most = quota_of(plane, caller)
        await files.require_room(tx, caller.tenant.id, announced.size, most=most)
        await files.add(tx, file)
    return file, put


def quota_of(plane: Plane, caller: Caller) -> int:
    own = caller.tenant.max_storage_bytes
    return plane.settings.max_storage_bytes_per_tenant if own is None else own


async def link(plane: Plane, caller: Caller, file_id: UUID) -> tuple[Media, bool]:
    """The media, and whether it is new. Another user's file is not there."""
    media_id = uuid5(file_id, LINKED)
    pool = plane.pools[caller.tenant.pool]
    async with pool.look() as tx:
        known = await _known(tx, caller, media_id)
        if known is not None:
            return known, False
        file = await files.get(tx, caller.tenant.id, file_id)
    if file.user_id != caller.user_id:
        raise NotFound(f"there is no file {file_id}", file_id=str(file_id))
    try:
        kept = await arrival.arrived(plane.sides, pool, file)
    except NotFound:
        # Linked at the same moment, as media of an earlier file with the same content.
        async with pool.look() as tx:
            return await media.get(tx, caller.tenant.id, caller.user_id, media_id), False
    linked, is_new = await _linked(plane, caller, kept, media_id, is_fresh=file.is_announced)
    if is_new and linked.original_file_id != file.id:
        await plane.store.delete(kept.path)  # the user has the same content already
    return linked, is_new


async def _known(tx: Tx, caller: Caller, media_id: UUID) -> Media | None:
    try:
        return await media.get(tx, caller.tenant.id, caller.user_id, media_id)
    except NotFound:
        return None


async def _linked(
    plane: Plane, caller: Caller, file: File, media_id: UUID, *, is_fresh: bool
) -> tuple[Media, bool]:
    """The media, and whether it is new; of an earlier file if the user has one of the same content."""
    async with plane.pools[caller.tenant.pool].begin() as tx:
        try:
            # Whoever links the same file at the same time waits here, and then finds the media.
            await files.hold(tx, file.tenant_id, file.id)
        except NotFound:
            return await media.get(tx, caller.tenant.id, caller.user_id, media_id), False
        known = await _known(tx, caller, media_id)
        if known is not None:
            return known, False
        twin = await _twin(tx, file) if is_fresh else None
        if twin is not None:
            await files.delete(tx, file.tenant_id, file.id)
        return await _create(tx, plane, caller, twin or file, media_id), True


async def _twin(tx: Tx, file: File) -> File | None:
    """An upload of the same user with the same content. Outputs come and go with their jobs."""
    if file.content_hash is None:
        return None
    found = await files.by_hash(tx, file.tenant_id, file.user_id, file.content_hash)
    if found is None or found.id == file.id or ANNOUNCED_SIZE not in found.metadata:
        return None
    return found if found.mime_type == file.mime_type else None


async def _create(tx: Tx, plane: Plane, caller: Caller, file: File, media_id: UUID) -> Media:
    return await media.create(
        tx,
        media_id=media_id,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        kind=kind_named(file.mime_type),
        original_file_id=file.id,
        now=plane.clock(),
    )


async def fetch(plane: Plane, caller: Caller, url: str) -> Media:
    """Through a file of our own: only when all of it is here is it known whether it is there already."""
    limits = Limits(plane.settings.max_upload_bytes, plane.settings.fetch_seconds)
    fetcher = Fetcher(plane.outward, media_type_of=sniffed)
    with tempfile.TemporaryDirectory(prefix="comfyfleet-") as folder:
        path = Path(folder) / "fetched"
        async with fetcher.open(url, limits) as source:
            size, content_hash = await _spooled(source.chunks, path)
        first = await asyncio.to_thread(_start_of, path)
        file = _fetched(plane, caller, source, size, content_hash, first)
        async with plane.pools[caller.tenant.pool].look() as tx:
            twin = await _twin(tx, file)
        if twin is None:
            await plane.store.put_file(file.path, path, file.mime_type)
    async with plane.pools[caller.tenant.pool].begin() as tx:
        if twin is None:
            most = quota_of(plane, caller)
            await files.require_room(tx, caller.tenant.id, file.size or 0, most=most)
            await files.add(tx, file)
        return await _create(tx, plane, caller, twin or file, plane.sides.new_id())


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LONG_HEADER_BYTES)


def _fetched(
    plane: Plane, caller: Caller, source: Source, size: int, content_hash: str, first: bytes
) -> File:
    file_id = plane.sides.new_id()
    name = source.filename[:FILENAME_CHARACTERS_MAX]
    most = plane.settings.max_picture_pixels
    media_type = arrival.type_by_bytes(
        source.media_type, first, pixels_max=most, is_operators=False
    )
    suffix = arrival.suffix_of(name, media_type)
    return File(
        id=file_id,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        disk=plane.store.disk,
        path=stored_key(caller.tenant.id, file_id, plane.sides.new_id(), suffix),
        filename=name,
        mime_type=media_type,
        size=size,
        content_hash=content_hash,
        metadata={ANNOUNCED_SIZE: size},
        created_at=plane.clock(),
    )


async def _spooled(chunks: AsyncIterator[bytes], path: Path) -> tuple[int, str]:
    hasher, size, held = blake3(), 0, bytearray()
    with await opened(path, "wb") as file:
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
