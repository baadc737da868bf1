"""Files are looked at once their job has ended, so that no job waits for it: are they there, how large,
and what are they really? What was announced and never came goes."""

import asyncio
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from comfyfleet.db import Database
from comfyfleet.files.model import File
from comfyfleet.jobs.arrival import REFUSALS, arrived
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError, Unavailable
from comfyfleet.kernel.pictures import HEADER_BYTES, picture_size
from comfyfleet.media.kinds import SNIFF_BYTES, is_really, kind_of, sniffed
from comfyfleet.media.measuring import film_facts
from comfyfleet.storage import ObjectFacts
from comfyfleet.upkeep import store
from comfyfleet.upkeep.retaining import delete_objects
from comfyfleet.upkeep.store import Checked

log = logging.getLogger(__name__)
PAGE = 100
AT_ONCE_MAX = 4
ANNOUNCED_FOR = timedelta(days=1)
# Only our workers' films, and only small ones: a demuxer is no thing to feed with what strangers send.
FILM_BYTES_MAX = 64 * 1024**2
OUTPUTS = "/ai-jobs/"


async def check_files(sides: Sides, pool: Database) -> int:
    """How many were looked at."""
    before = sides.clock() - ANNOUNCED_FOR
    async with pool.look() as tx:
        found = await store.unchecked(tx, announced_before=before, limit=PAGE)
    checked: list[Checked] = []
    try:
        for start in range(0, len(found), AT_ONCE_MAX):
            some = found[start : start + AT_ONCE_MAX]
            looked_at = await asyncio.gather(*(_looked_at(sides, pool, each) for each in some))
            checked += [each for each in looked_at if each]
    finally:
        # Also of those before one that can't be looked at: it must not hold them up for ever.
        if checked:
            async with pool.begin() as tx:
                await store.note_checked(tx, checked)
    return len(found)


async def _looked_at(sides: Sides, pool: Database, file: File) -> Checked | None:
    """None: it is gone."""
    facts = await sides.store.head(file.path)
    if file.is_announced and (facts is None or file.user_id is not None):
        await _give_up(sides, pool, file)
        return None
    try:
        # Else it is an operator's upload that no job has named yet.
        file = await arrived(sides, pool, file)
    except REFUSALS:
        await _give_up(sides, pool, file)
        return None
    try:
        learnt = await _facts_of(sides, file, facts)
    except Unavailable:
        raise
    except FleetError as error:
        # It would stand before all others for ever.
        learnt = {"check_error": error.code}
    return Checked(file, {**file.metadata, **learnt}, sides.clock())


async def _give_up(sides: Sides, pool: Database, file: File) -> None:
    """Nobody linked it for a day. If somebody does at this moment, it stays."""
    async with pool.begin() as tx:
        is_gone = await store.remove_announced(tx, file)
    if is_gone:
        await delete_objects(sides, [file])


async def _facts_of(sides: Sides, file: File, facts: ObjectFacts | None) -> Mapping[str, Any]:
    if facts is None:
        log.warning("file %s of tenant %s has no object", file.id, file.tenant_id)
        return {"is_missing": True}
    first = await sides.store.get_start(file.path, HEADER_BYTES)
    really = sniffed(first[:SNIFF_BYTES])
    learnt: dict[str, Any] = {
        "stored_bytes": facts.size,
        "real_type": really,
        "is_as_claimed": is_really(file.mime_type, first[:SNIFF_BYTES]),
    }
    if facts.size != file.size:
        log.warning("file %s has %s bytes, not %s", file.id, facts.size, file.size)
    if size := picture_size(really, first):
        learnt |= {"width": size[0], "height": size[1]}
    is_ours = OUTPUTS in file.path and facts.size <= FILM_BYTES_MAX
    if is_ours and kind_of(really or "") in ("video", "audio"):
        learnt |= await asyncio.to_thread(film_facts, await sides.store.get(file.path))
    return learnt
