"""Which of a run's outputs are delivered, and as what. Pure."""

import mimetypes
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from comfyfleet.comfy.backend import OutputFile, Outputs, OutputText

DEFAULT_TYPE = "application/octet-stream"
TEXT_CHARACTERS_MAX = 10_000
TEXTS_MAX = 100
# Ask the table first for those that systems name differently, or not at all.
KNOWN_TYPES = {
    ".webp": "image/webp",
    ".avif": "image/avif",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".mkv": "video/x-matroska",
    ".flac": "audio/flac",
    ".opus": "audio/ogg",
    ".glb": "model/gltf-binary",
    ".safetensors": "application/octet-stream",
}


def chosen(outputs: Outputs, output_node_id: str | None) -> tuple[OutputFile, ...]:
    """Of the named node, else of all; previews only if there is nothing else."""
    own = [file for file in outputs.files if _is_of(file.node_id, output_node_id)]
    kept = [file for file in own if file.folder == "output"]
    return tuple(dict.fromkeys(kept or own))


def _is_of(node_id: str, wanted: str | None) -> bool:
    """A node inside the wanted one, if that stands for a group of them, counts as the wanted one."""
    return wanted is None or node_id == wanted or node_id.startswith(f"{wanted}:")


def content_type_of(filename: str, told: str) -> str:
    """By the file's ending, which was meant; a server's word is often only 'bytes'."""
    ending = PurePath(filename).suffix.lower()
    guessed = KNOWN_TYPES.get(ending) or mimetypes.guess_type(filename)[0]
    return guessed or told.partition(";")[0].strip() or DEFAULT_TYPE


def metadata_of(texts: Sequence[OutputText]) -> dict[str, Any]:
    """What nodes showed: node id → key → texts, cut where they are long."""
    shown: dict[str, dict[str, list[str]]] = {}
    for text in texts[:TEXTS_MAX]:
        values = shown.setdefault(text.node_id, {}).setdefault(text.key, [])
        values.append(text.text[:TEXT_CHARACTERS_MAX])
    return {"texts": shown} if shown else {}
