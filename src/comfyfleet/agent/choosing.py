"""Which of a run's outputs are delivered, and as what. Pure."""

import mimetypes
from collections.abc import Sequence
from pathlib import PurePath

from comfyfleet.comfy.backend import OutputFile, Outputs
from comfyfleet.wire.files import NAME_CHARACTERS_MAX, OutputSlot
from comfyfleet.wire.values import ShownValue, fitting

DEFAULT_TYPE = "application/octet-stream"
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


def fitting_slot(slots: Sequence[OutputSlot], filenames: Sequence[str]) -> str | None:
    """The slot that came with the lease, if it was made for what has come out.

    Its URL holds for one content type, and that is what the store then says of the file.
    """
    for slot in slots[:1] if filenames else ():
        types = {name.lower(): value for name, value in slot.headers.items()}
        made_for = types.get("content-type")
        if made_for is None or made_for == content_type_of(filenames[0], DEFAULT_TYPE):
            return slot.name
    return None


def shows(outputs: Outputs, node_id: str) -> bool:
    """Whether a node has made values: then it needs no file to be done."""
    return any(_is_of(each.node_id, node_id) for each in outputs.values)


def shown_of(outputs: Outputs, output_node_id: str | None) -> tuple[ShownValue, ...]:
    """What nodes showed, the named node's values first, as much as may be told."""
    values = sorted(outputs.values, key=lambda each: not _is_of(each.node_id, output_node_id))
    told = (
        ShownValue(
            node_id=each.node_id[:NAME_CHARACTERS_MAX],
            name=each.key[:NAME_CHARACTERS_MAX],
            value=each.value,
        )
        for each in values
    )
    return tuple(fitting(told))
