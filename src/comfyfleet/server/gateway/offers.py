"""What a user's prompts can run on: the open fleets, and the union of their node types."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.tenants.model import Caller

UPLOADS = {
    "image_upload": "image",
    "video_upload": "video",
    "audio_upload": "audio",
    "animated_image_upload": "image",
    "file_upload": "3D",
}


@dataclass(frozen=True)
class OfferedNode:
    """A node type of some fleet; `files` are the user's own, by the inputs that take uploads."""

    name: str
    info: Mapping[str, Any]
    uploads: Mapping[str, str] = field(default_factory=dict)  # input → image, video, audio …
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_output(self) -> bool:
        return bool(self.info.get("output_node"))

    @property
    def validated(self) -> Sequence[str]:
        return tuple(self.uploads)

    def declared_inputs(self) -> Mapping[str, Any]:
        return with_choices(self.info, self.files)["input"]  # type: ignore[no-any-return]

    def check_values(self, values: Mapping[str, Any]) -> str | None:
        for name, kind in self.uploads.items():
            value = values.get(name)
            if isinstance(value, str) and value not in self.files.get(name, ()):
                return f"Invalid {kind} file: {value}"
        return None


def with_choices(info: Mapping[str, Any], files: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The same entry, in which the inputs that take uploads list these files."""
    groups = {
        group: {
            name: _with_files(spec, files[name]) if name in files else spec
            for name, spec in (inputs or {}).items()
        }
        for group, inputs in (info.get("input") or {}).items()
        if isinstance(inputs, Mapping)
    }
    return {**info, "input": {**(info.get("input") or {}), **groups}}


def _with_files(spec: Sequence[Any], names: Sequence[str]) -> list[Any]:
    options = spec[1] if len(spec) > 1 else {}
    if isinstance(spec[0], list):
        return [list(names), options]
    return [spec[0], {**options, "options": list(names)}]


def upload_inputs(info: Mapping[str, Any]) -> dict[str, str]:
    """Inputs that take an upload, and of which kind."""
    found: dict[str, str] = {}
    for group in ("required", "optional"):
        for name, spec in ((info.get("input") or {}).get(group) or {}).items():
            options = spec[1] if isinstance(spec, list) and len(spec) > 1 else {}
            kinds = [kind for option, kind in UPLOADS.items() if options.get(option)]
            if kinds:
                found[name] = kinds[0]
    return found


@dataclass(frozen=True)
class Offer:
    """Of one moment. `hash` changes with anything in it."""

    fleets: Sequence[Fleet]
    object_info: Mapping[str, Mapping[str, Any]]
    hash: str

    def nodes(self, files: Mapping[str, Sequence[str]]) -> dict[str, OfferedNode]:
        """`files`: the user's own, by kind of upload."""
        nodes = {}
        for name, info in self.object_info.items():
            uploads = upload_inputs(info)
            named = {each: files.get(kind, ()) for each, kind in uploads.items()}
            nodes[name] = OfferedNode(name, info, uploads, named)
        return nodes


async def offer_to(plane: ControlPlane, caller: Caller) -> Offer:
    """What this user's prompts may run on."""
    async with plane.central.read() as tx:
        found = [each for each in await fleets.list_fleets(tx) if each.prompts is not None]
    infos = [await _object_info(plane, each) for each in found]
    told = json.dumps([each.object_info_hash for each in found])
    return Offer(found, merged(infos), told)


async def _object_info(plane: ControlPlane, fleet: Fleet) -> Mapping[str, Any]:
    key = f"object_info/{fleet.object_info_hash}"
    info: Mapping[str, Any] | None = await plane.context.caches.documents.get(
        key, lambda: catalog.object_info_for(plane.store, fleet)
    )
    return info or {}


def merged(infos: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """By class; the first that has one tells what it is."""
    union: dict[str, Mapping[str, Any]] = {}
    for info in infos:
        for name, entry in info.items():
            union.setdefault(name, entry)
    return union
