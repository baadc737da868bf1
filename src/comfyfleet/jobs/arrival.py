"""Whether an announced file has arrived: the one decision, whichever door the file comes through.

What it is, its bytes tell; what it was announced as must fit. From then on it lies under a key that no
upload URL names, so that nobody can change it any more.
"""

from dataclasses import replace

from blake3 import blake3

from comfyfleet.db import Database
from comfyfleet.files import service as files
from comfyfleet.files.model import File, safe_name, stored_key
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import Conflict, InvalidInput, LimitExceeded, NotFound, Refused
from comfyfleet.kernel.pictures import (
    HEADER_BYTES,
    LONG_HEADER_BYTES,
    picture_size,
    require_pixels,
)
from comfyfleet.media.kinds import SNIFF_BYTES, check_claim, extension_of, kind_of, sniffed

ANNOUNCED_SIZE = "announced_size"
# What `arrived` raises of a file that can't be used.
REFUSALS = (Conflict, InvalidInput, LimitExceeded, Refused)


async def arrived(sides: Sides, pool: Database, file: File) -> File:
    """The file as it is kept; as it is, if it has arrived before. No transaction is held meanwhile."""
    if not file.is_announced:
        return file
    try:
        return await _taken(sides, pool, file)
    except (NotFound, Refused):
        # Somebody else may have taken it at the same moment, and then it lies elsewhere.
        async with pool.look() as tx:
            seen = await files.get(tx, file.tenant_id, file.id)
        if seen.is_announced:
            raise
        return seen


async def _taken(sides: Sides, pool: Database, file: File) -> File:
    media_type = await _media_type(sides, file)
    key = stored_key(file.tenant_id, file.id, sides.new_id(), suffix_of(file.filename, media_type))
    try:
        await sides.store.copy(file.path, key, media_type)
        # Looked at where nobody can write: what lay there before may have been replaced.
        kept = await _checked(sides, replace(file, path=key))
        async with pool.begin() as tx:
            confirmed = await files.confirm(
                tx,
                file.tenant_id,
                file.id,
                size=kept.size or 0,
                mime_type=kept.mime_type,
                content_hash=kept.content_hash,
                path=key,
            )
    except (NotFound, *REFUSALS):
        # Of anything else nobody knows whether it was committed: the sweep of leftovers finds out.
        await sides.store.delete(key)
        raise
    # Whoever was faster has a copy of their own.
    await sides.store.delete(file.path if confirmed.path == key else key)
    return confirmed


def suffix_of(filename: str, media_type: str) -> str:
    """By what the file is; only of what is no media, by what it is called."""
    stem, dot, ending = safe_name(filename).rpartition(".")
    return extension_of(media_type) or (f"{dot}{ending}" if stem else "")


def type_by_bytes(claimed: str, first: bytes, *, pixels_max: int, is_operators: bool) -> str:
    """The media type that these first bytes bear out. Operators may send what is no media."""
    start = first[:SNIFF_BYTES]
    if is_operators and kind_of(claimed) is None:
        media_type = sniffed(start) or claimed
    else:
        media_type = check_claim(claimed, start)
    require_pixels(picture_size(media_type, first), pixels_max)
    return media_type


async def _checked(sides: Sides, file: File) -> File:
    """With its size, its type and, unless it is very large, its content's hash."""
    facts = await sides.store.head(file.path)
    if facts is None:
        raise _never_came()
    announced = file.metadata.get(ANNOUNCED_SIZE, facts.size)
    if facts.size != announced:
        raise Refused(
            f"the file has {facts.size:,} bytes, and {announced:,} were announced", field="file_id"
        )
    return replace(
        file,
        size=facts.size,
        mime_type=await _media_type(sides, file),
        content_hash=await _hash_of(sides, file.path, facts.size),
    )


async def _media_type(sides: Sides, file: File) -> str:
    first = await _start(sides, file.path, HEADER_BYTES)
    told = sniffed(first[:SNIFF_BYTES]) or ""
    if kind_of(told) == "image" and len(first) == HEADER_BYTES and not picture_size(told, first):
        first = await _start(sides, file.path, LONG_HEADER_BYTES)
    return type_by_bytes(
        file.mime_type,
        first,
        pixels_max=sides.settings.max_picture_pixels,
        is_operators=file.user_id is None,
    )


async def _start(sides: Sides, key: str, size: int) -> bytes:
    try:
        return await sides.store.get_start(key, size)
    except NotFound:
        raise _never_came() from None


def _never_came() -> Refused:
    return Refused("the file was not uploaded", field="file_id")


async def _hash_of(sides: Sides, key: str, size: int) -> str | None:
    if size > sides.settings.max_hashed_bytes:
        return None
    hasher = blake3()
    async for chunk in sides.store.chunks(key):
        hasher.update(chunk)
    return hasher.hexdigest()
