"""Typed ports: what a node takes and gives, and which type fits where."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comfyfleet.graphs.model import (
    FALSE_PORT,
    INPUT_PORT,
    OUTPUT_PORT,
    TRUE_PORT,
    VALUE_PORT,
    ConditionNode,
    FanOutMode,
    FanOutNode,
    InputNode,
    MergeMode,
    MergeNode,
    Node,
    OutputNode,
)
from comfyfleet.graphs.verdicts import MISSING

SCALARS = (
    "text", "number", "integer", "boolean", "choice", "seed", "image", "video", "audio", "file",
)  # fmt: skip
MEDIA = frozenset({"image", "video", "audio", "file"})


@dataclass(frozen=True, slots=True)
class PortType:
    """A scalar by its name, a list by its item, an object by its fields; `any` fits everything."""

    name: str
    item: "PortType | None" = None
    fields: tuple[tuple[str, "PortType"], ...] = ()

    def __str__(self) -> str:
        return self.name


ANY = PortType("any")
SCALAR_TYPES: Mapping[str, PortType] = {name: PortType(name) for name in SCALARS}
INTEGER, NUMBER, TEXT, IMAGE, FILE = (
    SCALAR_TYPES[name] for name in ("integer", "number", "text", "image", "file")
)


def list_of(item: PortType) -> PortType:
    return PortType(f"{item.name}[]", item=item)


def _object(name: str, **fields: PortType) -> PortType:
    return PortType(name, fields=tuple(fields.items()))


def chunk_of(items: PortType) -> PortType:
    return _object("chunk", items=items)


RESULT = _object(
    "result",
    images=list_of(IMAGE),
    files=list_of(FILE),
    width=INTEGER,
    height=INTEGER,
    text=TEXT,
    json=ANY,
    values=ANY,
    prompt_id=TEXT,
    execution_time=NUMBER,
)
COLLECTED = _object("collected", merged=list_of(ANY), count=INTEGER)
PICTURES = _object("pictures", images=list_of(IMAGE))


def type_named(name: str) -> PortType | None:
    """`image`, `text[]`, `any`; None for what is no type."""
    if name.endswith("[]"):
        inner = type_named(name[:-2]) if not name.endswith("[][][]") else None
        return list_of(inner) if inner else None
    return ANY if name == ANY.name else SCALAR_TYPES.get(name)


def type_at(given: PortType, path: tuple[str, ...]) -> PortType | None:
    """The type at the end of a path; None where there can't be anything."""
    for segment in path:
        inner = _inner(given, segment)
        if inner is None:
            return None
        given = inner
    return given


def _inner(given: PortType, segment: str) -> PortType | None:
    if given.name == ANY.name:
        return ANY
    if given.item is not None:
        if segment.isdecimal():
            return given.item
        return INTEGER if segment == "count" else None
    return dict(given.fields).get(segment)


# Beside itself, what each scalar type takes.
_TAKES: Mapping[str, frozenset[str]] = {
    "number": frozenset({"integer", "seed"}),
    "integer": frozenset({"seed"}),
    "seed": frozenset({"integer"}),
    "text": frozenset({"choice"}),
    "choice": frozenset({"text", "integer", "number", "boolean"}),
    "file": frozenset({"image", "video", "audio"}),
}


def fits(given: PortType, wanted: PortType) -> bool:
    """A whole result fits where one picture, video or sound is wanted: its first one is taken."""
    if ANY.name in (given.name, wanted.name) or given == wanted:
        return True
    if given.item is not None and wanted.item is not None:
        return fits(given.item, wanted.item)
    if wanted.name in MEDIA and given.fields:
        field = "images" if wanted.name == "image" else "files"
        return field in dict(given.fields)
    return given.name in _TAKES.get(wanted.name, frozenset())


def fits_items(given: PortType) -> bool:
    """What can be distributed: a list, or an object that holds one under `items`."""
    if given.name == ANY.name or given.item is not None:
        return True
    return "items" in dict(given.fields)


def inputs_of(node: Node) -> Mapping[str, PortType] | None:
    """The fixed input ports of a node; None for those that have as many as are connected."""
    match node:
        case InputNode():
            return {}
        case ConditionNode():
            return {INPUT_PORT: ANY}
        case FanOutNode():
            return {node.input_port: ANY}
        case OutputNode():
            return {VALUE_PORT: ANY}
    return None


def outputs_of(node: Node, incoming: PortType) -> Mapping[str, PortType]:
    """The output ports of a node, given what comes into it."""
    match node:
        case InputNode(value_type=name):
            return {VALUE_PORT: type_named(name) or ANY}
        case ConditionNode():
            return {TRUE_PORT: incoming, FALSE_PORT: incoming}
        case FanOutNode():
            given = _fanned_out(node, incoming)
            return dict.fromkeys(node.outputs, given)
        case MergeNode(mode=mode):
            return {OUTPUT_PORT: PICTURES if mode == MergeMode.CONCAT_IMAGES else COLLECTED}
        case OutputNode():
            return {}
    return {OUTPUT_PORT: RESULT}


def _fanned_out(node: FanOutNode, incoming: PortType) -> PortType:
    if node.mode == FanOutMode.BROADCAST:
        return incoming
    items = dict(incoming.fields).get("items", incoming)
    if node.per_item:
        return items.item or ANY
    return chunk_of(items)


def value_for(wanted: PortType, value: Any) -> Any:
    """The value as its port takes it; MISSING if an object was to hold a file and doesn't."""
    if wanted.name not in MEDIA or not isinstance(value, Mapping) or "file_id" in value:
        return value
    files = value.get("images" if wanted.name == "image" else "files")
    for each in files if isinstance(files, list | tuple) else ():
        if wanted.name in ("image", "file") or _is_a(wanted.name, each):
            return each
    return MISSING


def _is_a(kind: str, file: Any) -> bool:
    mime_type = file.get("mime_type") if isinstance(file, Mapping) else None
    return isinstance(mime_type, str) and mime_type.startswith(f"{kind}/")


def holds(wanted: PortType, value: Any) -> bool:
    """Whether a value that is given from outside is of a type."""
    if wanted.item is not None:
        return isinstance(value, list | tuple) and all(holds(wanted.item, each) for each in value)
    if wanted.name in MEDIA:
        return isinstance(value, str | Mapping) and bool(value)
    return _is_scalar(wanted.name, value)


def _is_scalar(name: str, value: Any) -> bool:
    if name in ("number", "integer", "seed"):
        is_number = isinstance(value, int) or (name == "number" and isinstance(value, float))
        return is_number and not isinstance(value, bool)
    if name == "boolean":
        return isinstance(value, bool)
    if name == "text":
        return isinstance(value, str)
    return name == ANY.name or isinstance(value, str | int | float | bool)
