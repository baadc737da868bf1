"""Stores object_infos like those that workers report to a control plane."""

import json
from collections.abc import Mapping
from typing import Any

from comfyfleet.api.worker import object_info_hash
from comfyfleet.server.fleets.object_info import JSON_TYPE, DocumentStore, object_info_key


async def store_object_info(
    objects: DocumentStore, object_info: Mapping[str, Any]
) -> tuple[str, str]:
    """Stores an object_info; returns its key and hash."""
    data = json.dumps(object_info, ensure_ascii=False, separators=(",", ":")).encode()
    content_hash = object_info_hash(object_info)
    key = object_info_key(content_hash)
    await objects.put(key, data, JSON_TYPE)
    return key, content_hash
