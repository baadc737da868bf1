"""Documents in the object store: written once, named by their content, never changed."""

import json
from typing import Any

from comfyfleet.effects.model import Draft, Version
from comfyfleet.fleets.objectinfo import JSON_TYPE, Objects


async def keep(objects: Objects, draft: Draft) -> None:
    """Before its row is written: a document without a row harms nobody, a row without one would."""
    await objects.put(draft.document_key, draft.document, JSON_TYPE)


async def read(objects: Objects, version: Version) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(await objects.get(version.document_key))
    return document
