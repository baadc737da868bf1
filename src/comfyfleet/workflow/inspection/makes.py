"""What a workflow makes: its output nodes, and the media that each makes."""

from collections.abc import Iterable, Iterator

from comfyfleet.workflow.inspection.model import Made, Media
from comfyfleet.workflow.inspection.names import media_named, words_of
from comfyfleet.workflow.inspection.view import SeenNode

FILE_NAME_INPUT = "filename_prefix"
OUTPUT_WORDS = frozenset(("save", "preview", "show"))
MEDIA_OF_TYPES: dict[str, Media] = {
    "IMAGE": "image",
    "MASK": "image",
    "SVG": "image",
    "VIDEO": "video",
    "AUDIO": "audio",
    "LATENT": "latent",
    "MESH": "3d",
    "VOXEL": "3d",
    "FILE_3D": "3d",
    "SPLAT": "3d",
    "STRING": "text",
    "*": "text",
    "MODEL": "model",
    "CLIP": "model",
    "VAE": "model",
}


def made(nodes: Iterable[SeenNode]) -> Iterator[Made]:
    for node in nodes:
        if node.is_active and _is_output(node):
            prefix = node.values.get(FILE_NAME_INPUT)
            yield Made(
                node.ref,
                media_of(node),
                saved=_is_saved(node),
                file_name_prefix=prefix if isinstance(prefix, str) else None,
            )


def _is_output(node: SeenNode) -> bool:
    """Without a server's word: what is called an output, or is fed and feeds nothing."""
    if node.type is not None:
        return node.type.is_output
    return bool(words_of(node.ref.class_type) & OUTPUT_WORDS) or (
        not node.feeds and bool(node.linked)
    )


def _is_saved(node: SeenNode) -> bool:
    """The preview nodes of ComfyUI write to its temp folder; whatever has a prefix for files is kept,
    except where it says itself that it is not (VideoHelperSuite)."""
    if node.values.get("save_output") is False:
        return False
    return FILE_NAME_INPUT in node.values or "save" in words_of(node.ref.class_type)


def media_of(node: SeenNode) -> Media:
    """By the name of the class, else by what comes in."""
    types = [slot.type for slot in node.type.inputs] if node.type else []
    guesses = (
        media_named(node.ref.class_type),
        *map(MEDIA_OF_TYPES.get, types),
        *map(media_named, node.linked),
    )
    return next((media for media in guesses if media is not None), "unknown")
