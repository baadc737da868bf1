"""A graph: its nodes, the connections between ports, and its limits. Frozen and pure.

Nodes that contain others (map, loop, graph, score) are expanded before a run. The ids of the nodes
inside begin with the id of the outer node, as in `refine/sharpen`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from comfyfleet.api.expressions import MISSING, Expression, FieldPath
from comfyfleet.api.templates import Template, is_filled

INPUT_PORT, ITEMS_PORT, VALUE_PORT = "input", "items", "value"
OUTPUT_PORT, ITEM_PORT = "output", "item"
TRUE_PORT, FALSE_PORT, DEFAULT_PORT = "true", "false", "default"
APPROVED_PORT, REJECTED_PORT = "approved", "rejected"
INDEX_PORT, ROUND_PORT, ROUNDS_PORT, OUTPUTS_PORT = "index", "round", "rounds", "outputs"


class Fallback(StrEnum):
    """The action to take if a node's backend is offline."""

    NONE = "none"
    ASK_USER = "ask_user"
    AUTO_SELECT = "auto_select"


class FanOutMode(StrEnum):
    BROADCAST = "broadcast"  # the same value for all outputs
    DISTRIBUTE = "distribute"  # a list, split into parts


class MergeMode(StrEnum):
    COLLECT = "collect"
    CONCAT_IMAGES = "concat_images"


class DeadlineChoice(StrEnum):
    """The result of an approval that was not answered in time."""

    APPROVE = "approve"
    REJECT = "reject"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class InputNode:
    """A value that is passed when a run is started."""

    id: str
    value_type: str = "any"
    required: bool = True
    default: Any = None
    # for a table (a list of rows): the types of its columns
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkflowNode:
    """A job of an effect or a workflow, or a job for each item of the enclosing fan-out."""

    id: str
    workflow: str = ""  # empty if the node names an effect
    effect: str | None = None
    version: int | None = None  # version of the workflow; None means the latest one
    # Literals and templates. Other properties are connected.
    properties: Mapping[str, Any] = field(default_factory=dict)
    backend_affinity: str | None = None  # worker:ID or fleet:SLUG/STAGE
    fallback_strategy: Fallback = Fallback.NONE
    timeout_seconds: int | None = None
    retries: int = 0
    priority: int = 0
    continue_on_error: bool = False
    reuse: bool = False  # an identical earlier result is used instead of running a job

    @property
    def name(self) -> str:
        """Returns the effect or workflow that its jobs run."""
        return self.effect or self.workflow

    @property
    def literals(self) -> Mapping[str, Any]:
        """Returns the properties whose values are known before a run."""
        return {name: value for name, value in self.properties.items() if is_filled(value)}

    @property
    def work_field(self) -> str:
        """Returns the name of the document field that selects the effect or workflow."""
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
    # one output that is used once per item, instead of several outputs with chunks
    per_item: bool = False
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
    over: str | None = None  # the per-item fan-out whose items are merged


@dataclass(frozen=True, slots=True)
class OutputNode:
    id: str


@dataclass(frozen=True, slots=True)
class ValueNode:
    """Creates values. Each value is a port, and `outputs` contains all of them."""

    id: str
    values: Mapping[str, Any]  # literals and templates


class SwitchCase(NamedTuple):
    name: str
    text: str
    expression: Expression


@dataclass(frozen=True, slots=True)
class SwitchNode:
    """Passes its input on through the port of the first matching case, or through `default`."""

    id: str
    cases: tuple[SwitchCase, ...]


@dataclass(frozen=True, slots=True)
class ApproveNode:
    """Asks a user about its input, and passes it on through `approved` or `rejected`."""

    id: str
    message: str
    pick: bool = False  # the user selects some items of a list
    deadline_seconds: int | None = None
    on_deadline: DeadlineChoice = DeadlineChoice.FAIL  # the result once the deadline has passed


@dataclass(frozen=True, slots=True)
class GraphBody:
    """The nodes that a map or a loop runs repeatedly, and the path to an iteration's result."""

    nodes: Mapping[str, "Node"]
    connections: tuple["GraphConnection", ...]
    result: FieldPath


@dataclass(frozen=True, slots=True)
class MapNode:
    """Runs its body for each item of a list, and collects the results in order."""

    id: str
    document: Mapping[str, Any]  # the original document
    over: FieldPath
    body: GraphBody
    max_items: int = 100
    at_once: int | None = None  # concurrent jobs; None means no limit besides the run's
    continue_on_error: bool = False


@dataclass(frozen=True, slots=True)
class LoopNode:
    """Runs its body repeatedly with the values of the previous round, until a condition is met."""

    id: str
    document: Mapping[str, Any]
    start: Mapping[str, Any]  # `previous` in the first round: literals and templates
    body: GraphBody
    until: Expression
    at_most: int
    best: Expression | None = (
        None  # The round with the highest value is the result. None means the last round.
    )


@dataclass(frozen=True, slots=True)
class SubgraphNode:
    """A stored graph as a node. Its inputs and outputs are ports."""

    id: str
    document: Mapping[str, Any]
    graph: str  # an id or a name
    version: int
    inputs: Mapping[str, Any]  # literals and templates


@dataclass(frozen=True, slots=True)
class ScoreNode:
    """Rates each image of a list with a number that a workflow shows, and ranks the images."""

    id: str
    document: Mapping[str, Any]
    over: FieldPath
    body: GraphBody
    score: Expression
    keep: int | None = None
    max_items: int = 100
    at_once: int | None = None


# The nodes that composite nodes are expanded to


@dataclass(frozen=True, slots=True)
class PassNode:
    """An input or output of a nested graph."""

    id: str
    value_type: str = "any"


@dataclass(frozen=True, slots=True)
class RoundsNode:
    """The beginning of a loop. It has one item per round: the result of the previous round."""

    id: str
    at_most: int


@dataclass(frozen=True, slots=True)
class RoundEndNode:
    """Evaluates one round of a loop: whether it was the last one, and how good it is."""

    id: str
    rounds: str
    until: Expression
    best: Expression | None = None


@dataclass(frozen=True, slots=True)
class LoopEndNode:
    """The result of a loop: that of its best or its last round."""

    id: str
    over: str
    judge: str  # the id of the RoundEndNode
    has_best: bool = False


@dataclass(frozen=True, slots=True)
class ResultsNode:
    """The results of a map, in the order of its items."""

    id: str
    over: str


@dataclass(frozen=True, slots=True)
class RankNode:
    """The rated images, best first."""

    id: str
    over: str
    score: Expression
    keep: int | None = None


CompositeNode: TypeAlias = MapNode | LoopNode | SubgraphNode | ScoreNode
# A node that combines the items of the node that opened the scope.
ClosingNode: TypeAlias = MergeNode | LoopEndNode | ResultsNode | RankNode
Node: TypeAlias = (
    InputNode
    | WorkflowNode
    | ConditionNode
    | FanOutNode
    | MergeNode
    | OutputNode
    | ValueNode
    | SwitchNode
    | ApproveNode
    | CompositeNode
    | PassNode
    | RoundsNode
    | RoundEndNode
    | LoopEndNode
    | ResultsNode
    | RankNode
)


def opens_scope(node: Node) -> bool:
    """Checks whether the nodes after this one run once for each of its items or rounds."""
    return isinstance(node, RoundsNode) or (isinstance(node, FanOutNode) and node.per_item)


def is_hidden(node: Node) -> bool:
    """Checks whether a node is internal, because it is part of an expanded map, loop or nested
    graph."""
    return isinstance(node, PassNode) or "/." in node.id


def closes_over(node: Node) -> str | None:
    """Returns the node whose items are merged here, or None."""
    return node.over if isinstance(node, ClosingNode) else None


def items_max(node: Node) -> int:
    """Returns the maximum number of items or rounds of a node that opens a scope."""
    if isinstance(node, RoundsNode):
        return node.at_most
    return node.max_items if isinstance(node, FanOutNode) else 1


class ConnectionSource(NamedTuple):
    """The source of a value. The path leads into the value, as in `soften.output.images.0`."""

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
    nodes: Mapping[str, Node]  # nodes by id, in the order of the document
    connections: tuple[GraphConnection, ...]
    max_tokens: int | None = None
    # positions of nodes in the editor
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    reuse: bool = False  # default for its nodes
    priority: int = 0  # default for its nodes
    at_once: int | None = None  # concurrent jobs of a run; None means the control plane's limit
    deadline_seconds: int | None = None  # counted from the start of a run, or of its last retry
    # Maps each node to the node whose items it runs for. Only set after maps, loops and nested
    # graphs have been expanded.
    openers: Mapping[str, str] = field(default_factory=dict)
    lanes: Mapping[str, int] = field(default_factory=dict)  # concurrent jobs by node id prefix


class DocumentProblem(NamedTuple):
    """A problem of a document. `code` is stable and intended for programs. `message` is intended
    for people."""

    code: str
    message: str
    node: str = ""
    port: str = ""

    def __str__(self) -> str:
        place = f"{self.node}.{self.port}" if self.port else self.node
        return f"{place}: {self.message}" if place else self.message


PROBLEMS_TOLD_MAX = 1_000
NAMES_TOLD_MAX, NAME_CHARACTERS_TOLD_MAX = 20, 64


def told_problems(problems: Collection[DocumentProblem]) -> tuple[DocumentProblem, ...]:
    """Returns the first problems. If there are more, the last entry counts the omitted ones."""
    first = tuple(islice(problems, PROBLEMS_TOLD_MAX))
    if len(problems) == len(first):
        return first
    return (
        *first,
        DocumentProblem("too_many", f"and {len(problems) - len(first):,} more problems"),
    )


def told_names(names: Iterable[str]) -> str:
    """Lists names for an error. Only the first ones are included, because many problems may repeat
    the same list."""
    some = list(islice(names, NAMES_TOLD_MAX + 1))
    shown = [f"{name:.{NAME_CHARACTERS_TOLD_MAX}}" for name in some[:NAMES_TOLD_MAX]]
    return ", ".join([*shown, "…"] if len(some) > len(shown) else shown) or "none"


NODE_KINDS: Mapping[type[Any], str] = {
    InputNode: "input",
    WorkflowNode: "workflow",
    ConditionNode: "condition",
    FanOutNode: "fanout",
    MergeNode: "merge",
    OutputNode: "output",
    ValueNode: "value",
    SwitchNode: "switch",
    ApproveNode: "approve",
    MapNode: "map",
    LoopNode: "loop",
    SubgraphNode: "graph",
    ScoreNode: "score",
    PassNode: "pass",
    RoundsNode: "rounds",
    RoundEndNode: "round",
    LoopEndNode: "loop",
    ResultsNode: "map",
    RankNode: "score",
}


def kind_of(node: Node) -> str:
    return NODE_KINDS[type(node)]


def port_number(port: str) -> int | None:
    """Returns the number of a port: 3 for `input_3`. Returns None for a port without a number."""
    prefix, _, number = port.rpartition("_")
    if prefix != INPUT_PORT or not number.isdecimal() or len(number) > 6:
        return None
    return int(number) if number == str(int(number)) else None


class GraphLimits(NamedTuple):
    nodes_max: int = 500
    connections_max: int = 5_000
    fanout_outputs_max: int = 100
    fanout_items_max: int = 10_000
    fanout_depth_max: int = 3  # nesting of per-item fan-outs, maps and loops
    rounds_max: int = 50  # rounds of a loop
    graph_depth_max: int = 5  # nesting of graphs
    expanded_nodes_max: int = 2_000  # including the nodes inside maps, loops and nested graphs
    expanded_connections_max: int = 20_000  # including references in templates
    cases_max: int = 50
    jobs_max: int = 20_000  # if every list has its maximum length
    retries_max: int = 10
    timeout_seconds_max: int = 7 * 24 * 3600
    priority_max: int = 1_000  # positive or negative
    at_once_max: int = 1_000
    columns_max: int = 200  # columns of a table input
    text_characters_max: int = 200


DEFAULT_LIMITS = GraphLimits()


SCALARS = (
    "text", "number", "integer", "boolean", "choice", "seed", "image", "video", "audio", "file",
)  # fmt: skip
MEDIA = frozenset({"image", "video", "audio", "file"})


@dataclass(frozen=True, slots=True)
class PortType:
    """A type: a scalar (identified by its name), a list (by its item), or an object (by its
    fields). `any` is compatible with everything."""

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


CHUNK = "chunk"  # the output type of a fan-out in chunks


def _object(name: str, **fields: PortType) -> PortType:
    return PortType(name, fields=tuple(fields.items()))


def chunk_of(items: PortType) -> PortType:
    return _object(CHUNK, items=items)


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
RESULTS = _object(
    "results", results=list_of(ANY), count=INTEGER, failed=INTEGER, images=list_of(IMAGE)
)
RANKED = _object(
    "ranked", scored=list_of(ANY), best=list_of(ANY), images=list_of(IMAGE), score=NUMBER
)
PICTURES = _object("pictures", images=list_of(IMAGE))


def type_named(name: str) -> PortType | None:
    """Parses a type such as `image`, `text[]` or `any`. Returns None for an unknown type."""
    if name.endswith("[]"):
        inner = type_named(name[:-2]) if not name.endswith("[][][]") else None
        return list_of(inner) if inner else None
    return ANY if name == ANY.name else SCALAR_TYPES.get(name)


def input_type(node: InputNode) -> PortType:
    if not node.columns:
        return type_named(node.value_type) or ANY
    cells = ((name, SCALAR_TYPES.get(kind, ANY)) for name, kind in node.columns.items())
    return list_of(PortType("row", fields=tuple(cells)))


def type_at(current: PortType, path: tuple[str, ...]) -> PortType | None:
    """Returns the type at the end of a path, or None if there can't be a value."""
    for segment in path:
        inner = _inner(current, segment)
        if inner is None:
            return None
        current = inner
    return current


def _inner(current: PortType, segment: str) -> PortType | None:
    if current.name == ANY.name:
        return ANY
    if current.item is not None:
        if segment.isdecimal():
            return current.item
        return INTEGER if segment == "count" else None
    return dict(current.fields).get(segment)


# The types that each scalar type accepts in addition to itself.
_TAKES: Mapping[str, frozenset[str]] = {
    "number": frozenset({"integer", "seed"}),
    "integer": frozenset({"seed"}),
    "seed": frozenset({"integer"}),
    "text": frozenset({"choice"}),
    "choice": frozenset({"text", "integer", "number", "boolean"}),
    "file": frozenset({"image", "video", "audio"}),
}


def fits(source: PortType, target: PortType) -> bool:
    """Checks whether a type fits a port. A whole result fits a port for a single file, which gets
    the first one."""
    if ANY.name in (source.name, target.name) or source == target:
        return True
    if source.item is not None and target.item is not None:
        return fits(source.item, target.item)
    if target.name in MEDIA and source.fields:
        field = "images" if target.name == "image" else "files"
        return field in dict(source.fields)
    return source.name in _TAKES.get(target.name, frozenset())


def fits_items(source: PortType) -> bool:
    """Checks whether a type can be distributed, because it is a list or an object with a list under
    `items`."""
    if source.name == ANY.name or source.item is not None:
        return True
    return "items" in dict(source.fields)


def reference_port(path: FieldPath) -> str:
    """Returns the port that receives the value a template refers to."""
    return f"{{{{{path}}}}}"


def is_reference(port: str) -> bool:
    return port.startswith("{{")


def inputs_of(node: Node) -> Mapping[str, PortType] | None:
    """Returns the fixed input ports of a node, or None for nodes with as many ports as there are
    connections."""
    match node:
        case InputNode():
            return {}
        case ConditionNode() | SwitchNode() | ApproveNode() | RoundsNode() | RoundEndNode():
            return {INPUT_PORT: ANY}
        case FanOutNode():
            return {node.input_port: ANY}
        case OutputNode():
            return {VALUE_PORT: ANY}
        case PassNode(value_type=name):
            return {VALUE_PORT: type_named(name) or ANY}
    return None


def outputs_of(node: Node, incoming: PortType) -> Mapping[str, PortType]:
    """Returns the output ports of a node, given the type of its first input."""
    match node:
        case InputNode():
            return {VALUE_PORT: input_type(node)}
        case PassNode(value_type=name):
            return {VALUE_PORT: incoming if name == ANY.name else type_named(name) or ANY}
        case ConditionNode():
            return {TRUE_PORT: incoming, FALSE_PORT: incoming}
        case SwitchNode(cases=cases):
            return dict.fromkeys((*(case.name for case in cases), DEFAULT_PORT), incoming)
        case ApproveNode(pick=pick):
            return {APPROVED_PORT: ANY if pick else incoming, REJECTED_PORT: incoming}
        case ValueNode(values=values):
            return {
                **{name: _value_type(value) for name, value in values.items()},
                OUTPUTS_PORT: ANY,
            }
        case FanOutNode() | RoundsNode():
            return _opened(node, incoming)
        case OutputNode() | RoundEndNode():
            return {}
    return _closed(node, incoming)


def _value_type(value: Any) -> PortType:
    is_text = isinstance(value, str) or (isinstance(value, Template) and value.whole is None)
    return TEXT if is_text else ANY


def _opened(node: FanOutNode | RoundsNode, incoming: PortType) -> Mapping[str, PortType]:
    if isinstance(node, RoundsNode):
        return {ITEM_PORT: ANY, ROUND_PORT: INTEGER}
    ports = dict.fromkeys(node.outputs, _fanned_out(node, incoming))
    return {**ports, INDEX_PORT: INTEGER} if node.per_item else ports


def _closed(node: Node, incoming: PortType) -> Mapping[str, PortType]:
    match node:
        case MergeNode(mode=mode):
            return {OUTPUT_PORT: PICTURES if mode == MergeMode.CONCAT_IMAGES else COLLECTED}
        case LoopEndNode():
            boolean = SCALAR_TYPES["boolean"]
            return {OUTPUT_PORT: incoming, ROUNDS_PORT: INTEGER, "done": boolean, "score": ANY}
        case ResultsNode():
            return {OUTPUT_PORT: RESULTS}
        case RankNode():
            return {OUTPUT_PORT: RANKED}
    return {OUTPUT_PORT: RESULT}


def _fanned_out(node: FanOutNode, incoming: PortType) -> PortType:
    if node.mode == FanOutMode.BROADCAST:
        return incoming
    items = dict(incoming.fields).get("items", incoming)
    if node.per_item:
        return items.item or ANY
    return chunk_of(items)


def value_for(target: PortType, value: Any) -> Any:
    """Converts a value to the type of its port. Returns MISSING for an object without the required
    file."""
    if target.name not in MEDIA or not isinstance(value, Mapping) or "file_id" in value:
        return value
    files = value.get("images" if target.name == "image" else "files")
    for file in files if isinstance(files, list | tuple) else ():
        if target.name in ("image", "file") or _is_a(target.name, file):
            return file
    return MISSING


def _is_a(kind: str, file: Any) -> bool:
    mime_type = file.get("mime_type") if isinstance(file, Mapping) else None
    return isinstance(mime_type, str) and mime_type.startswith(f"{kind}/")


def holds(expected: PortType, value: Any) -> bool:
    """Checks whether an external value has the type."""
    if expected.item is not None:
        return isinstance(value, list | tuple) and all(holds(expected.item, item) for item in value)
    if expected.fields:
        return isinstance(value, Mapping) and not any(wrong_cells(expected, value))
    if expected.name in MEDIA:
        return isinstance(value, str | Mapping) and bool(value)
    return _is_scalar(expected.name, value)


def wrong_cells(row: PortType, value: Mapping[str, Any]) -> Iterator[tuple[str, PortType]]:
    """Yields the columns whose cells have a different type, with the expected type. Missing cells
    are allowed."""
    for name, kind in row.fields:
        if name in value and not holds(kind, value[name]):
            yield name, kind


def _is_scalar(name: str, value: Any) -> bool:
    if name in ("number", "integer", "seed"):
        is_number = isinstance(value, int) or (name == "number" and isinstance(value, float))
        return is_number and not isinstance(value, bool)
    if name == "boolean":
        return isinstance(value, bool)
    if name == "text":
        return isinstance(value, str)
    return name == ANY.name or isinstance(value, str | int | float | bool)
