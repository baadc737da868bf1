"""Stores the object_infos that workers report for their backends. Equal ones are stored only
once.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from comfyfleet.api.values import OutputSlot
from comfyfleet.api.worker import BackendFacts, object_info_hash
from comfyfleet.errors import InvalidInput, NotFound
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.fleets.object_info_parser import parse_object_info
from comfyfleet.server.storage import ObjectStore
from comfyfleet.server.turns import FairThreads

log = logging.getLogger(__name__)
JSON_TYPE = "application/json"
OBJECT_INFOS_KEPT_MAX = 24
STORED_KNOWN_MAX = 10_000


class DocumentStore(Protocol):
    """The methods of an object store that this module needs for documents."""

    async def put(self, key: str, data: bytes, content_type: str) -> None: ...

    async def get(self, key: str) -> bytes: ...


def object_info_key(content_hash: str) -> str:
    return f"central/object_info/{content_hash}.json"


def incoming_key(fleet: Fleet, content_hash: str) -> str:
    """Returns the key for a worker's upload. It contains the fleet, because the content has not
    been checked yet.
    """
    return f"central/object_info/incoming/{fleet.id}/{content_hash}.json"


# Number of object_infos that are parsed concurrently, and the maximum number that wait per fleet.
# Fleets take turns, so that a fleet with many reports doesn't delay the others.
AT_ONCE_MAX, WAITING_PER_FLEET_MAX = 1, 100
_parsers = FairThreads("object_info", AT_ONCE_MAX, waiting_each_max=WAITING_PER_FLEET_MAX)


async def _parse_announced(fleet: Fleet, data: bytes, content_hash: str | None) -> dict[str, Any]:
    """Parses an object_info in a thread. Raises InvalidInput if it doesn't match the hash."""

    def parse() -> dict[str, Any]:
        object_info = parse_object_info(data)
        if object_info_hash(object_info) != content_hash:
            raise InvalidInput("the content of the object_info doesn't match its hash")
        return object_info

    return await _parsers.run(fleet.id, parse)


async def upload_slot(
    store: ObjectStore, fleet: Fleet, facts: BackendFacts | None, *, seconds: int
) -> OutputSlot | None:
    """Returns an upload URL for an object_info. Returns None if the facts announce no object_info
    or it is already stored.
    """
    if facts is None or facts.object_info_hash is None or facts.object_info_size is None:
        return None
    if facts.object_info_hash == fleet.object_info_hash:
        return None
    if await store.head(object_info_key(facts.object_info_hash)) is not None:
        return None
    put = await store.url_to_put(
        incoming_key(fleet, facts.object_info_hash),
        content_type=JSON_TYPE,
        seconds=seconds,
        size=facts.object_info_size,
    )
    return OutputSlot(name="object_info", url=put.url, headers=dict(put.headers))


async def accept_upload(store: ObjectStore, fleet: Fleet, content_hash: str) -> str | None:
    """Checks an uploaded object_info and moves it to the key that all fleets share. Returns the
    key, or None if nothing has been uploaded yet.

    Deletes an upload that doesn't match the announced hash, and raises InvalidInput.
    """
    key, incoming = object_info_key(content_hash), incoming_key(fleet, content_hash)
    if await _is_stored(store, fleet, content_hash):
        await store.delete(incoming)
        return key
    try:
        data = await store.get(incoming)
    except NotFound:
        return None
    try:
        await _parse_announced(fleet, data, content_hash)
        await store.put(key, data, JSON_TYPE)
    finally:
        await store.delete(incoming)
    return key


class ObjectInfoCache:
    """Caches parsed object_infos by their hash. The content for a hash never changes."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._stored: OrderedDict[str, None] = OrderedDict()
        self._turn = asyncio.Lock()

    async def get(
        self, store: ObjectStore, fleet: Fleet, content_hash: str
    ) -> Mapping[str, Any] | None:
        """Returns an object_info, or None if it hasn't been uploaded or doesn't match its hash."""
        if content_hash not in self._kept:
            async with self._turn:
                await self._read(store, fleet, content_hash)
        if content_hash in self._kept:
            self._kept.move_to_end(content_hash)
        return self._kept.get(content_hash)

    async def accept(self, store: ObjectStore, fleet: Fleet, content_hash: str) -> str | None:
        """Accepts an upload like `accept_upload`, but remembers content that was already
        accepted.
        """
        if content_hash in self._stored:
            return object_info_key(content_hash)
        key = await accept_upload(store, fleet, content_hash)
        if key is not None:
            self._stored[content_hash] = None
            if len(self._stored) > STORED_KNOWN_MAX:
                self._stored.popitem(last=False)
        return key

    async def _read(self, store: ObjectStore, fleet: Fleet, content_hash: str) -> None:
        if content_hash in self._kept:
            return
        try:
            key = await self.accept(store, fleet, content_hash)
            if key is None:
                return
            data = await store.get(key)
            self._kept[content_hash] = await _parse_announced(fleet, data, content_hash)
        except (InvalidInput, NotFound) as error:
            self._stored.pop(content_hash, None)
            log.warning("fleet %s: an object_info can't be used: %s", fleet.name, error.message)
        if len(self._kept) > OBJECT_INFOS_KEPT_MAX:
            self._kept.popitem(last=False)


async def _is_stored(store: ObjectStore, fleet: Fleet, content_hash: str) -> bool:
    try:
        data = await store.get(object_info_key(content_hash))
        await _parse_announced(fleet, data, content_hash)
    except (InvalidInput, NotFound):
        return False
    return True


async def read_object_info(objects: DocumentStore, fleet: Fleet) -> dict[str, Any] | None:
    """Reads a fleet's object_info. Returns None if no worker has reported one or the stored content
    doesn't match its hash.
    """
    if fleet.object_info_key is None:
        return None
    data = await objects.get(fleet.object_info_key)
    try:
        return await _parse_announced(fleet, data, fleet.object_info_hash)
    except InvalidInput:
        log.warning("fleet %s: the stored object_info doesn't match its hash", fleet.name)
        return None
