"""A graph: nodes, connections from port to port, and its limits. Frozen and pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from comfyfleet.api.graph_conditions import MISSING, Expression

INPUT_PORT, ITEMS_PORT, VALUE_PORT = "input", "items", "value"
OUTPUT_PORT, ITEM_PORT = "output", "item"
TRUE_PORT, FALSE_PORT = "true", "false"


class Fallback(StrEnum):
    """What happens when the backend that a node wants is offline."""

    NONE = "none"
    ASK_USER = "ask_user"
    AUTO_SELECT = "auto_select"


class FanOutMode(StrEnum):
    BROADCAST = "broadcast"  # the same to all
    DISTRIBUTE = "distribute"  # a list, in parts


class MergeMode(StrEnum):
    COLLECT = "collect"
    CONCAT_IMAGES = "concat_images"


@dataclass(frozen=True, slots=True)
class InputNode:
    """One value that is given when a run is started."""

    id: str
    value_type: str = "any"
    required: bool = True
    default: Any = None


@dataclass(frozen=True, slots=True)
class WorkflowNode:
    """One job of an effect or a workflow, or one for each item of the fan-out around it."""

    id: str
    workflow: str = ""  # empty if it names an effect
    effect: str | None = None
    version: int | None = None  # of the workflow; None: the latest
    properties: Mapping[str, Any] = field(default_factory=dict)  # literals; the rest is connected
    backend_affinity: str | None = None  # worker:ID or fleet:SLUG/STAGE
    fallback_strategy: Fallback = Fallback.NONE
    timeout_seconds: int | None = None
    retries: int = 0
    priority: int = 0
    continue_on_error: bool = False

    @property
    def name(self) -> str:
        """The effect or workflow that its jobs run."""
        return self.effect or self.workflow

    @property
    def work_field(self) -> str:
        """The field of the document that names the effect or workflow."""
        return "effect" if self.effect else "workflow"


@dataclass(frozen=True, slots=True)
class ConditionNode:
    """Passes its input on through one of two ports."""

    id: str
    text: str
    expression: Expression


@dataclass(frozen=True, slots=True)
class FanOutNode:
    id: str
    mode: FanOutMode = FanOutMode.BROADCAST
    output_count: int = 2
    per_item: bool = False  # one output, once for each item, instead of chunks
    max_items: int = 100

    @property
    def input_port(self) -> str:
        return INPUT_PORT if self.mode == FanOutMode.BROADCAST else ITEMS_PORT

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.per_item:
            return (ITEM_PORT,)
        return tuple(f"output_{number}" for number in range(self.output_count))


@dataclass(frozen=True, slots=True)
class MergeNode:
    id: str
    mode: MergeMode = MergeMode.COLLECT
    over: str | None = None  # the per-item fan-out whose items are brought together again


@dataclass(frozen=True, slots=True)
class OutputNode:
    id: str


Node: TypeAlias = InputNode | WorkflowNode | ConditionNode | FanOutNode | MergeNode | OutputNode


class ConnectionSource(NamedTuple):
    """The source of a value; the path leads into it, as in `soften.output.images.0`."""

    node: str
    port: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.node, self.port, *self.path))


class ConnectionTarget(NamedTuple):
    node: str
    port: str

    def __str__(self) -> str:
        return f"{self.node}.{self.port}"


class GraphConnection(NamedTuple):
    source: ConnectionSource
    target: ConnectionTarget


@dataclass(frozen=True, slots=True)
class GraphDefinition:
    name: str
    nodes: Mapping[str, Node]  # by id, in the order of the document
    connections: tuple[GraphConnection, ...]
    max_tokens: int | None = None


class DocumentProblem(NamedTuple):
    """`code` is stable, for programs; `message` is for people."""

    code: str
    message: str
    node: str = ""
    port: str = ""

    def __str__(self) -> str:
        place = f"{self.node}.{self.port}" if self.port else self.node
        return f"{place}: {self.message}" if place else self.message


NODE_KINDS: Mapping[type[Any], str] = {
    InputNode: "input",
    WorkflowNode: "workflow",
    ConditionNode: "condition",
    FanOutNode: "fanout",
    MergeNode: "merge",
    OutputNode: "output",
}


def kind_of(node: Node) -> str:
    return NODE_KINDS[type(node)]


def port_number(port: str) -> int | None:
    """Returns 3 for `input_3`; None for a port without a number."""
    prefix, _, number = port.rpartition("_")
    if prefix != INPUT_PORT or not number.isdecimal() or len(number) > 6:
        return None
    return int(number) if number == str(int(number)) else None


class GraphLimits(NamedTuple):
    nodes_max: int = 500
    connections_max: int = 5_000
    fanout_outputs_max: int = 100
    fanout_items_max: int = 10_000
    fanout_depth_max: int = 3  # one per-item fan-out inside another
    jobs_max: int = 20_000  # with every list as long as it may be
    retries_max: int = 10
    timeout_seconds_max: int = 7 * 24 * 3600
    priority_max: int = 1_000  # either way
    text_characters_max: int = 200


DEFAULT_LIMITS = GraphLimits()


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
    """Parses `image`, `text[]` or `any`; None for an unknown type."""
    if name.endswith("[]"):
        inner = type_named(name[:-2]) if not name.endswith("[][][]") else None
        return list_of(inner) if inner else None
    return ANY if name == ANY.name else SCALAR_TYPES.get(name)


def type_at(given: PortType, path: tuple[str, ...]) -> PortType | None:
    """Returns the type at the end of a path; None where there can't be a value."""
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
    """Whether a type fits a port. A whole result fits where one file is wanted: its first one is
    taken.
    """
    if ANY.name in (given.name, wanted.name) or given == wanted:
        return True
    if given.item is not None and wanted.item is not None:
        return fits(given.item, wanted.item)
    if wanted.name in MEDIA and given.fields:
        field = "images" if wanted.name == "image" else "files"
        return field in dict(given.fields)
    return given.name in _TAKES.get(wanted.name, frozenset())


def fits_items(given: PortType) -> bool:
    """Whether a type can be distributed: a list, or an object that holds one under `items`."""
    if given.name == ANY.name or given.item is not None:
        return True
    return "items" in dict(given.fields)


def inputs_of(node: Node) -> Mapping[str, PortType] | None:
    """Returns the fixed input ports of a node; None for nodes that have as many as are connected."""
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
    """Returns the output ports of a node, given the types of its inputs."""
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
    """Converts a value to what its port takes; MISSING if an object was to hold a file and doesn't."""
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
    """Whether a value from outside is of the type."""
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
