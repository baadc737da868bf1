"""What a fleet's backends can do, as one of its workers last reported it: kept once per content."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

from comfyfleet.fleets.model import Fleet
from comfyfleet.kernel.errors import InvalidInput

JSON_TYPE = "application/json"
OBJECT_INFO_BYTES_MAX = 64 * 1024**2


class Objects(Protocol):
    """What is needed of the object store for documents."""

    async def put(self, key: str, data: bytes, content_type: str) -> None: ...

    async def get(self, key: str) -> bytes: ...


def key_of(content_hash: str) -> str:
    return f"central/object_info/{content_hash}.json"


def parse(data: bytes) -> dict[str, Any]:
    """By class; anything else was not sent by a ComfyUI."""
    if len(data) > OBJECT_INFO_BYTES_MAX:
        raise InvalidInput(f"an object_info has at most {OBJECT_INFO_BYTES_MAX:,} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the object_info is no JSON: {error}") from None
    if not isinstance(value, dict) or not all(map(_is_class, value.values())):
        raise InvalidInput("an object_info has an entry with `input` for each node class")
    return value


async def keep(objects: Objects, object_info: Mapping[str, Any]) -> tuple[str, str]:
    """Key and hash, to be noted with the fleet afterwards: no transaction waits for the store."""
    data = json.dumps(object_info, ensure_ascii=False, separators=(",", ":")).encode()
    content_hash = hashlib.sha256(data).hexdigest()
    key = key_of(content_hash)
    await objects.put(key, data, JSON_TYPE)
    return key, content_hash


async def read(objects: Objects, fleet: Fleet) -> dict[str, Any] | None:
    """None: none of its workers has reported one."""
    return (
        None if fleet.object_info_key is None else parse(await objects.get(fleet.object_info_key))
    )


def _is_class(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("input", {}), dict)
