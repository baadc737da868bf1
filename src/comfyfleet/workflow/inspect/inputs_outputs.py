"""Lists a workflow's inputs (every value that isn't linked, and the files that it names) and the
results of its output nodes."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from comfyfleet.errors import LimitExceeded
from comfyfleet.workflow.edit import SHORTHANDS
from comfyfleet.workflow.edit.input_lookup import read_entry
from comfyfleet.workflow.edit.prompt_flow import Flow
from comfyfleet.workflow.edit.shorthands import Several
from comfyfleet.workflow.inspect.node_view import NodeView, is_control, is_node
from comfyfleet.workflow.inspect.results import (
    InspectedInput,
    InspectedOutput,
    Media,
    NamedFile,
    Role,
)
from comfyfleet.workflow.model import DEFAULT_LIMITS, ObjectInfo
from comfyfleet.workflow.node_inputs import ABSENT, Widget
from comfyfleet.workflow.object_info import NodeType

Shorthands = Mapping[tuple[str, str], tuple[str, ...]]  # shorthands by node id and input


def shorthands_of(prompt: Mapping[str, Any], object_info: ObjectInfo) -> Shorthands:
    entries = {
        key: read_entry(key, raw, object_info) for key, raw in prompt.items() if is_node(raw)
    }
    names: dict[tuple[str, str], tuple[str, ...]] = {}
    # A search that exceeds its limit would not set a value either.
    with contextlib.suppress(LimitExceeded):
        flow = Flow(entries)
        for shorthand in SHORTHANDS:
            places = shorthand.find(flow)
            if shorthand.several is Several.LEAVE and len(places) > 1:
                continue  # several inputs match, so it would set none of them
            for place in places:
                key = (place.node_id, place.input)
                names[key] = (*names.get(key, ()), shorthand.name)
    return names


MODEL_SUFFIXES = (
    ".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".pth", ".bin", ".pkl", ".gguf", ".onnx",
    ".engine",
)  # fmt: skip
MEDIA_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".exr", ".svg",
    ".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v",
    ".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac",
    ".glb", ".gltf", ".obj", ".fbx", ".stl", ".ply", ".spz", ".splat", ".latent",
)  # fmt: skip
FILE_NAME_CHARACTERS_MAX = 500
# The name of a file in the output or temp folder ends with the folder: `cat.png [output]`.
_FOLDER = re.compile(r" \[(?:input|output|temp)\]$")
_EMBEDDING = re.compile(r"embedding:([^\s,()\[\]{}<>|:]+)")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+D?")
# The first match wins: SaveAnimatedWEBP takes images but produces an animation.
MEDIA_WORDS: tuple[tuple[Media, frozenset[str]], ...] = (
    ("animation", frozenset(("animated", "gif", "apng"))),
    ("video", frozenset(("video", "videos", "webm", "mp4"))),
    ("audio", frozenset(("audio", "sound", "music", "speech", "mp3", "flac", "opus"))),
    ("3d", frozenset(("3d", "glb", "gltf", "mesh", "splat", "voxel"))),
    ("text", frozenset(("text", "string", "json", "any"))),
    ("latent", frozenset(("latent", "latents"))),
    ("image", frozenset(("image", "images", "mask", "masks", "picture", "svg", "png", "jpg"))),
)


def is_model_file(value: Any) -> bool:
    """Checks whether a value is the name of a model file. A prompt that ends with the name of an
    embedding doesn't count."""
    return _has_suffix(value, MODEL_SUFFIXES) and not _EMBEDDING.search(value)


def is_media_file(value: Any) -> bool:
    return isinstance(value, str) and _has_suffix(_FOLDER.sub("", value), MEDIA_SUFFIXES)


def embeddings_in(text: str) -> Iterator[str]:
    for match in _EMBEDDING.finditer(text):
        yield match[1]


def words_of(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(name))


def media_named(name: str) -> Media | None:
    words = words_of(name)
    return next((media for media, hints in MEDIA_WORDS if words & hints), None)


def _has_suffix(value: Any, suffixes: tuple[str, ...]) -> bool:
    return (
        isinstance(value, str)
        and len(value) <= FILE_NAME_CHARACTERS_MAX
        and "\n" not in value
        and value.lower().endswith(suffixes)
    )


UPLOAD_FLAGS = (
    "image_upload", "video_upload", "audio_upload", "animated_image_upload", "file_upload",
)  # fmt: skip
# Widgets that only display something or perform an action. Users don't set their values.
NOT_SET_BY_PEOPLE = frozenset(("view", "button", "comparer", "viewport", "index", "control"))
TEXT_WORDS = frozenset(("text", "prompt", "positive", "negative", "lyrics", "tags"))
NUMBER_WORDS: tuple[tuple[Role, frozenset[str]], ...] = (
    ("seed", frozenset(("seed",))),
    ("steps", frozenset(("steps",))),
    ("size", frozenset(("width", "height", "length", "megapixels", "resolution"))),
)


def list_inputs(nodes: Iterable[NodeView], shorthands: Shorthands) -> Iterator[InspectedInput]:
    for node in nodes:
        if not node.is_active:
            continue
        widgets = widgets_of_values(node.type, node.values) if node.type else {}
        for name, value in node.values.items():
            widget = widgets.get(name)
            if widget is not None and widget.kind in NOT_SET_BY_PEOPLE:
                continue
            # Extensions add inputs that no class declares. Among these, only plain values can be
            # set by users.
            if widget is not None or isinstance(value, str | int | float):
                inspected = _inspect_input(node, name, value, widget)
                yield replace(inspected, shorthands=shorthands.get((node.ref.id, name), ()))
        yield from _unnamed(node)


def _unnamed(node: NodeView) -> Iterator[InspectedInput]:
    """Yields the values of an old file that stores them only by position."""
    values = node.unnamed_values
    for index, value in enumerate(values):
        followed_by = values[index + 1] if index + 1 < len(values) else None
        if is_control(value) or not isinstance(value, str | int | float):
            continue
        role = role_of("seed" if is_control(followed_by) else "", value, None)
        if role is None and isinstance(value, str) and " " in value.strip():
            role = "text"
        yield InspectedInput(None, node.ref, None, _type_of(value), value, role)


def widgets_of_values(node_type: NodeType, values: Mapping[str, Any]) -> dict[str, Widget]:
    """Returns the widgets of a node by name, including those added by its choices."""
    widgets: dict[str, Widget] = {}
    pending = list(reversed(node_type.widgets))
    while pending:
        widget = pending.pop()
        if not widget.is_widget:
            continue
        widgets[widget.name] = widget
        if widget.children is not None:
            pending.extend(reversed(widget.children(_bounded(values.get(widget.name)))))
    return widgets


def _bounded(value: Any) -> Any:
    """Limits a number that may be a count of rows, because each row adds inputs."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    is_number = isinstance(value, int | float)
    return min(value, DEFAULT_LIMITS.dynamic_rows_max) if is_number else value


def _inspect_input(node: NodeView, name: str, value: Any, widget: Widget | None) -> InspectedInput:
    address = f"{node.ref.id}.{name}"
    # The only input of a primitive has this name, so its title describes the purpose.
    role = role_of(node.ref.title if name == "value" else name, value, widget)
    exposed = node.exposed[name].name if name in node.exposed else None
    if widget is None:
        guessed = _type_of(value)
        return InspectedInput(address, node.ref, name, guessed, value, role, exposed)
    options = widget.options
    return InspectedInput(
        address,
        node.ref,
        name,
        "COMBO" if widget.choices is not None else widget.input_type or widget.kind.upper(),
        value,
        role,
        exposed,
        default=None if widget.default is ABSENT else widget.default,
        min=_number(options.get("min")),
        max=_number(options.get("max")),
        step=_number(options.get("step")),
        choices=None if widget.choices is None else tuple(widget.choices),
        multiline=widget.kind == "multiline",
    )


def role_of(label: str, value: Any, widget: Widget | None) -> Role | None:
    if is_file_input(value, widget):
        return "file"
    if is_model_file(value):
        return "model"
    if isinstance(value, str):
        return "text" if _is_prose(label, widget) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _role_of_number(label)


def is_file_input(value: Any, widget: Widget | None) -> bool:
    if widget is not None and any(widget.options.get(flag) for flag in UPLOAD_FLAGS):
        return True
    is_chosen = widget is None or widget.choices is not None
    return is_chosen and is_media_file(value)


def _is_prose(label: str, widget: Widget | None) -> bool:
    if widget is not None and widget.input_type != "STRING":
        return False
    if widget is not None and widget.options.get("dynamicPrompts"):
        return True
    return bool(words_of(label) & TEXT_WORDS)


def _role_of_number(label: str) -> Role | None:
    words = words_of(label)
    return next((role for role, hints in NUMBER_WORDS if words & hints), None)


def _type_of(value: Any) -> str:
    """Returns the server's type name for a value without a declaration."""
    names: dict[type, str] = {bool: "BOOLEAN", int: "INT", float: "FLOAT", str: "STRING"}
    return names.get(type(value), "UNKNOWN")


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# Maximum depth to search a value for models. Some packs store a list of models, or a model with its
# strength, in one value.
VALUE_DEPTH_MAX = 4
_Key = tuple[str, str]  # kind and name
# The choices of loaders that load nothing.
NO_FILE = ("", "none", "None")


def named_files(nodes: Iterable[NodeView], listed_models: Any = None) -> tuple[NamedFile, ...]:
    """Returns the files that a workflow names. `listed_models` are models that the workflow lists
    itself, in addition to those in its nodes."""
    files: dict[_Key, NamedFile] = {}
    sources: list[tuple[Any, bool]] = [(listed_models, True)]
    for node in nodes:
        for file in _files_of(node):
            key = (file.kind, file.name)
            files[key] = _merged(files[key], file) if key in files else file
        sources.append((node.properties.get("models"), node.is_active))
    described = [
        replace(model, active=active)
        for source, active in sources
        for model in _described_models(source)
    ]
    return tuple(_with_descriptions(files, described).values())


def _files_of(node: NodeView) -> Iterator[NamedFile]:
    widgets = widgets_of_values(node.type, node.values) if node.type else {}
    for name, value in node.values.items():
        address = f"{node.ref.id}.{name}"
        for file in _files_in(value, widgets.get(name)):
            yield replace(file, addresses=(address,), active=node.is_active)
    for value in node.unnamed_values:
        for file in _files_in(value, None):
            yield replace(file, active=node.is_active)


def _files_in(value: Any, widget: Widget | None) -> Iterator[NamedFile]:
    if isinstance(value, str):
        yield from _files_in_text(value, widget)
    else:
        for name in _models_inside(value, VALUE_DEPTH_MAX):
            yield NamedFile(name, "model")


def _models_inside(value: Any, depth_left: int) -> Iterator[str]:
    """Yields model files only, because an image inside a value is merely what a node displayed
    last."""
    if is_model_file(value):
        yield value
    elif isinstance(value, dict | list) and depth_left > 0:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _models_inside(inner, depth_left - 1)


def _files_in_text(value: str, widget: Widget | None) -> Iterator[NamedFile]:
    present = _is_listed(value, widget)
    if is_model_file(value):
        yield NamedFile(value, "model", present=present)
    elif is_file_input(value, widget):
        if value not in NO_FILE:
            yield NamedFile(value, "input", present=present)
    else:
        for name in embeddings_in(value):
            yield NamedFile(name, "embedding")


def _is_listed(value: str, widget: Widget | None) -> bool | None:
    if widget is None or widget.choices is None or widget.kind == "remote":
        return None
    return value in widget.choices


def _merged(one: NamedFile, other: NamedFile) -> NamedFile:
    return replace(
        one,
        addresses=tuple(dict.fromkeys((*one.addresses, *other.addresses))),
        active=one.active or other.active,
        present=other.present if one.present is None else one.present,
    )


def _described_models(entries: Any) -> Iterator[NamedFile]:
    """Yields the models that a template describes, with their URLs."""
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            yield NamedFile(
                entry["name"], "model", directory=_text(entry, "directory"), url=_text(entry, "url")
            )


def _with_descriptions(
    files: Mapping[_Key, NamedFile], described: Iterable[NamedFile]
) -> dict[_Key, NamedFile]:
    """Adds descriptions to every model with the same file name, regardless of its folder."""
    result = dict(files)
    keys: dict[str, list[_Key]] = {}
    for kind, name in files:
        if kind == "model":
            keys.setdefault(_file_name(name), []).append((kind, name))
    for model in described:
        own_keys = keys.setdefault(_file_name(model.name), [])
        for key in own_keys:
            file = result[key]
            result[key] = replace(
                file, directory=file.directory or model.directory, url=file.url or model.url
            )
        if not own_keys:
            own_keys.append((model.kind, model.name))
            result[(model.kind, model.name)] = model
    return result


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _text(entry: Mapping[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return value if isinstance(value, str) and value else None


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


def list_outputs(nodes: Iterable[NodeView]) -> Iterator[InspectedOutput]:
    for node in nodes:
        if node.is_active and _is_output(node):
            prefix = node.values.get(FILE_NAME_INPUT)
            yield InspectedOutput(
                node.ref,
                media_of(node),
                saved=_is_saved(node),
                file_name_prefix=prefix if isinstance(prefix, str) else None,
            )


def _is_output(node: NodeView) -> bool:
    """Checks whether a node is an output node. Without a server, this is guessed from its name and
    links."""
    if node.type is not None:
        return node.type.is_output
    return bool(words_of(node.ref.class_type) & OUTPUT_WORDS) or (
        not node.feeds and bool(node.linked)
    )


def _is_saved(node: NodeView) -> bool:
    """Checks whether the output is stored permanently.

    ComfyUI's preview nodes write to its temp folder. A node with a file name prefix saves its
    output, unless its `save_output` is off (VideoHelperSuite).
    """
    if node.values.get("save_output") is False:
        return False
    return FILE_NAME_INPUT in node.values or "save" in words_of(node.ref.class_type)


def media_of(node: NodeView) -> Media:
    """Returns the kind of media that a node produces, based on the name of its class or else on its
    inputs."""
    types = [slot.type for slot in node.type.inputs] if node.type else []
    guesses = (
        media_named(node.ref.class_type),
        *map(MEDIA_OF_TYPES.get, types),
        *map(media_named, node.linked),
    )
    return next((media for media in guesses if media is not None), "unknown")
