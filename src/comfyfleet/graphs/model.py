"""A graph: nodes, and connections from port to port. Frozen and pure; what a run adds is in `runs`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from comfyfleet.graphs.conditions import Expression

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
        """Of what its jobs are."""
        return self.effect or self.workflow

    @property
    def work_field(self) -> str:
        """The field of the document that names it."""
        return "effect" if self.effect else "workflow"


@dataclass(frozen=True, slots=True)
class ConditionNode:
    """Passes what comes in on through one of two ports."""

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


class Source(NamedTuple):
    """Where a value comes from; the path leads into it, as in `soften.output.images.0`."""

    node: str
    port: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.node, self.port, *self.path))


class Target(NamedTuple):
    node: str
    port: str

    def __str__(self) -> str:
        return f"{self.node}.{self.port}"


class Connection(NamedTuple):
    source: Source
    target: Target


@dataclass(frozen=True, slots=True)
class Graph:
    name: str
    nodes: Mapping[str, Node]  # by id, in the order of the document
    connections: tuple[Connection, ...]
    max_tokens: int | None = None


class Problem(NamedTuple):
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
    """3 for `input_3`; None for a port that isn't one of a numbered row."""
    prefix, _, number = port.rpartition("_")
    if prefix != INPUT_PORT or not number.isdecimal() or len(number) > 6:
        return None
    return int(number) if number == str(int(number)) else None
