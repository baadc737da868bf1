"""Files of API v2: named by their content, put into a prompt as references."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import blake3

from comfyfleet.comfy.shapes import mapping_in, text_at

# A loader's input is a text to everybody else: the reference is made of it when it is submitted.
SCHEME = "comfy-asset://"


@dataclass(frozen=True, slots=True)
class Asset:
    asset_id: str
    file_path: str

    @property
    def value(self) -> str:
        return f"{SCHEME}{quote(self.asset_id, safe='')}/{quote(self.file_path)}"

    @property
    def reference(self) -> dict[str, Any]:
        info = {"id": self.asset_id, "file_path": self.file_path}
        return {"__type": "core/ASSET", "info": info}


def content_hash(path: Path) -> str:
    """Reads the whole file; not for the event loop."""
    digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
    digest.update_mmap(path)
    return f"blake3:{digest.hexdigest()}"


def parse_asset(answer: object, file_path: str) -> Asset:
    asset = mapping_in(answer, "an asset")
    told = asset.get("file_path")
    return Asset(text_at(asset, "id", "an asset"), told if isinstance(told, str) else file_path)


def asset_in(value: object) -> Asset | None:
    if not isinstance(value, str) or not value.startswith(SCHEME):
        return None
    asset_id, _, file_path = value.removeprefix(SCHEME).partition("/")
    return Asset(unquote(asset_id), unquote(file_path))


def with_references(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt with a reference in place of each value that an upload has returned."""
    return {node_id: _referring(node) for node_id, node in prompt.items()}


def _referring(node: Any) -> Any:
    if not isinstance(node, Mapping) or not isinstance(inputs := node.get("inputs"), Mapping):
        return node
    return {**node, "inputs": {name: _value(value) for name, value in inputs.items()}}


def _value(value: Any) -> Any:
    asset = asset_in(value)
    return value if asset is None else asset.reference
