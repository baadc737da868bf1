"""A graph: nodes, connections from port to port, and its limits. Frozen and pure.

Nodes that contain others (map, loop, graph, score) are expanded before a run; the ids of what they contain begin
with theirs, as in `refine/sharpen`."""

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


class DeadlineChoice(StrEnum):
    """What an approval becomes when nobody has answered in time."""

    APPROVE = "approve"
    REJECT = "reject"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class InputNode:
    """One value that is given when a run is started."""

    id: str
    value_type: str = "any"
    required: bool = True
    default: Any = None
    columns: Mapping[str, str] = field(default_factory=dict)  # of a table: a list of rows, by type


@dataclass(frozen=True, slots=True)
class WorkflowNode:
    """One job of an effect or a workflow, or one for each item of the fan-out around it."""

    id: str
    workflow: str = ""  # empty if it names an effect
    effect: str | None = None
    version: int | None = None  # of the workflow; None: the latest
    # Literals and templates; the rest is connected.
    properties: Mapping[str, Any] = field(default_factory=dict)
    backend_affinity: str | None = None  # worker:ID or fleet:SLUG/STAGE
    fallback_strategy: Fallback = Fallback.NONE
    timeout_seconds: int | None = None
    retries: int = 0
    priority: int = 0
    continue_on_error: bool = False
    reuse: bool = False  # an equal result that is there already is taken, instead of a job

    @property
    def name(self) -> str:
        """The effect or workflow that its jobs run."""
        return self.effect or self.workflow

    @property
    def literals(self) -> Mapping[str, Any]:
        """The properties whose values are known before a run."""
        return {name: value for name, value in self.properties.items() if is_filled(value)}

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


@dataclass(frozen=True, slots=True)
class ValueNode:
    """Makes values; each is a port, and `outputs` has all of them."""

    id: str
    values: Mapping[str, Any]  # literals and templates


class SwitchCase(NamedTuple):
    name: str
    text: str
    expression: Expression


@dataclass(frozen=True, slots=True)
class SwitchNode:
    """Passes its input on through the port of the first case that holds, or through `default`."""

    id: str
    cases: tuple[SwitchCase, ...]


@dataclass(frozen=True, slots=True)
class ApproveNode:
    """Asks a person about its input, and passes it on through `approved` or `rejected`."""

    id: str
    message: str
    pick: bool = False  # the person chooses some of a list
    deadline_seconds: int | None = None
    on_deadline: DeadlineChoice = DeadlineChoice.FAIL  # when the deadline has passed


@dataclass(frozen=True, slots=True)
class GraphBody:
    """The nodes that a map or a loop runs many times, and the value that one time gives."""

    nodes: Mapping[str, "Node"]
    connections: tuple["GraphConnection", ...]
    result: FieldPath


@dataclass(frozen=True, slots=True)
class MapNode:
    """Runs its body for each item of a list, in order, and brings the results together."""

    id: str
    document: Mapping[str, Any]  # as it was written
    over: FieldPath
    body: GraphBody
    max_items: int = 100
    at_once: int | None = None  # jobs at a time; None: as many as the run may
    continue_on_error: bool = False


@dataclass(frozen=True, slots=True)
class LoopNode:
    """Runs its body again, with the values of the last round, until a condition holds."""

    id: str
    document: Mapping[str, Any]
    start: Mapping[str, Any]  # what `previous` is in the first round: literals and templates
    body: GraphBody
    until: Expression
    at_most: int
    best: Expression | None = (
        None  # the round with the highest number is the result; None: the last
    )


@dataclass(frozen=True, slots=True)
class SubgraphNode:
    """A stored graph as a node: its inputs and outputs are ports."""

    id: str
    document: Mapping[str, Any]
    graph: str  # id or name
    version: int
    inputs: Mapping[str, Any]  # literals and templates


@dataclass(frozen=True, slots=True)
class ScoreNode:
    """Judges each picture of a list by a number that a workflow shows, and ranks them."""

    id: str
    document: Mapping[str, Any]
    over: FieldPath
    body: GraphBody
    score: Expression
    keep: int | None = None
    max_items: int = 100
    at_once: int | None = None


# What nodes that contain others are expanded to


@dataclass(frozen=True, slots=True)
class PassNode:
    """An input or output of a graph inside another."""

    id: str
    value_type: str = "any"


@dataclass(frozen=True, slots=True)
class RoundsNode:
    """The beginning of a loop: one item for each round, which is what the round before gave."""

    id: str
    at_most: int


@dataclass(frozen=True, slots=True)
class RoundEndNode:
    """Judges one round of a loop: whether it was the last one, and how good it is."""

    id: str
    rounds: str
    until: Expression
    best: Expression | None = None


@dataclass(frozen=True, slots=True)
class LoopEndNode:
    """The result of a loop: of its best or its last round."""

    id: str
    over: str
    judge: str  # the RoundEndNode
    has_best: bool = False


@dataclass(frozen=True, slots=True)
class ResultsNode:
    """The results of a map, in the order of its items."""

    id: str
    over: str


@dataclass(frozen=True, slots=True)
class RankNode:
    """The pictures that were judged, the best first."""

    id: str
    over: str
    score: Expression
    keep: int | None = None


CompositeNode: TypeAlias = MapNode | LoopNode | SubgraphNode | ScoreNode
# A merge of some kind, over the items of a node that opens a scope.
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
    """Whether what is behind it runs once for each of its items or rounds."""
    return isinstance(node, RoundsNode) or (isinstance(node, FanOutNode) and node.per_item)


def is_hidden(node: Node) -> bool:
    """Whether nobody wrote it: a part of a map, a loop or a graph inside."""
    return isinstance(node, PassNode) or "/." in node.id


def closes_over(node: Node) -> str | None:
    """Returns the node whose items are brought together again here."""
    return node.over if isinstance(node, ClosingNode) else None


def items_max(node: Node) -> int:
    """Returns how many items or rounds a node that opens a scope may have."""
    if isinstance(node, RoundsNode):
        return node.at_most
    return node.max_items if isinstance(node, FanOutNode) else 1


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
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # where people see nodes
    reuse: bool = False  # of nodes that don't say
    priority: int = 0  # of nodes that don't say
    at_once: int | None = None  # jobs of one run; None: as many as the control plane allows
    deadline_seconds: int | None = None  # from the start of a run, or of its last retry
    # Of a graph whose maps, loops and graphs were expanded:
    openers: Mapping[str, str] = field(default_factory=dict)  # node → whose items it runs for
    lanes: Mapping[str, int] = field(default_factory=dict)  # prefix of nodes → jobs at a time


class DocumentProblem(NamedTuple):
    """`code` is stable, for programs; `message` is for people."""

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
    """Returns the first problems, and how many there are besides: nobody reads a hundred thousand."""
    told = tuple(islice(problems, PROBLEMS_TOLD_MAX))
    if len(problems) == len(told):
        return told
    return (*told, DocumentProblem("too_many", f"and {len(problems) - len(told):,} more problems"))


def told_names(names: Iterable[str]) -> str:
    """Returns names as a problem tells them. Only the first: each of many problems may tell the same ones."""
    some = list(islice(names, NAMES_TOLD_MAX + 1))
    told = [f"{each:.{NAME_CHARACTERS_TOLD_MAX}}" for each in some[:NAMES_TOLD_MAX]]
    return ", ".join([*told, "…"] if len(some) > len(told) else told) or "none"


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
    fanout_depth_max: int = 3  # one per-item fan-out, map or loop inside another
    rounds_max: int = 50  # of a loop
    graph_depth_max: int = 5  # one graph inside another
    expanded_nodes_max: int = 2_000  # with what is inside maps, loops and graphs
    expanded_connections_max: int = 20_000  # with what templates read
    cases_max: int = 50
    jobs_max: int = 20_000  # with every list as long as it may be
    retries_max: int = 10
    timeout_seconds_max: int = 7 * 24 * 3600
    priority_max: int = 1_000  # either way
    at_once_max: int = 1_000
    columns_max: int = 200  # of a table that is given as an input
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


CHUNK = "chunk"  # the type of what a fan-out in chunks gives


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
    """Parses `image`, `text[]` or `any`; None for an unknown type."""
    if name.endswith("[]"):
        inner = type_named(name[:-2]) if not name.endswith("[][][]") else None
        return list_of(inner) if inner else None
    return ANY if name == ANY.name else SCALAR_TYPES.get(name)


def input_type(node: InputNode) -> PortType:
    if not node.columns:
        return type_named(node.value_type) or ANY
    cells = ((name, SCALAR_TYPES.get(kind, ANY)) for name, kind in node.columns.items())
    return list_of(PortType("row", fields=tuple(cells)))


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


def reference_port(path: FieldPath) -> str:
    """Returns the port at which a value arrives that a template reads."""
    return f"{{{{{path}}}}}"


def is_reference(port: str) -> bool:
    return port.startswith("{{")


def inputs_of(node: Node) -> Mapping[str, PortType] | None:
    """Returns the fixed input ports of a node; None for nodes that have as many as are connected."""
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
            return dict.fromkeys((*(each.name for each in cases), DEFAULT_PORT), incoming)
        case ApproveNode(pick=pick):
            return {APPROVED_PORT: ANY if pick else incoming, REJECTED_PORT: incoming}
        case ValueNode(values=values):
            return {**{name: _value_type(each) for name, each in values.items()}, OUTPUTS_PORT: ANY}
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
    given = dict.fromkeys(node.outputs, _fanned_out(node, incoming))
    return {**given, INDEX_PORT: INTEGER} if node.per_item else given


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
    if wanted.fields:
        return isinstance(value, Mapping) and not any(wrong_cells(wanted, value))
    if wanted.name in MEDIA:
        return isinstance(value, str | Mapping) and bool(value)
    return _is_scalar(wanted.name, value)


def wrong_cells(row: PortType, value: Mapping[str, Any]) -> Iterator[tuple[str, PortType]]:
    """Yields the columns whose cells are of another type, each with its type; a cell may be missing."""
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
