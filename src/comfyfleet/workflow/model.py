"""A saved workflow, parsed once into frozen values. Also defines size limits, and describes places
in a workflow for messages."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from comfyfleet.errors import LimitExceeded

# `new_tuple(Slot, (name, …))` is equal to `Slot(name, …)`, but takes half the time, because it skips
# the constructor, which is written in Python. A conversion uses it for values that it creates by the
# thousand. All fields are required, in order.
new_tuple = tuple.__new__

# The input and output ends of a subgraph appear as nodes with these fixed ids.
SUBGRAPH_INPUT_ID = "-10"
SUBGRAPH_OUTPUT_ID = "-20"
# The id of a node that has no id yet. It can't be linked.
UNASSIGNED = "-1"

ANY_TYPE = "*"


class Mode(IntEnum):
    """The editor's mode numbers. The other numbers (1 and 3) behave like ALWAYS."""

    ALWAYS = 0
    MUTED = 2
    BYPASSED = 4


INACTIVE = frozenset((2, 4))  # plain numbers for speed: this is checked once per node and link


class NodeSlot(NamedTuple):
    """An input of a saved node."""

    name: str
    type: str
    link: int | None = None
    widget: str | None = None


class Link(NamedTuple):
    id: int
    origin: str
    origin_slot: int
    target: str
    target_slot: int
    type: str = ANY_TYPE


class Node(NamedTuple):
    """A saved node. `values` is its `widgets_values`, which can have any shape."""

    id: str
    type: str
    title: str = ""
    mode: int = Mode.ALWAYS
    inputs: tuple[NodeSlot, ...] = ()
    outputs: tuple[str, ...] = ()
    values: Any = None
    properties: Mapping[str, Any] = {}
    # Values by widget name that take precedence over `values`: the values that a group node passes
    # to its inner nodes.
    overrides: Mapping[str, Any] = {}

    @property
    def is_inactive(self) -> bool:
        return self.mode in INACTIVE


class Port(NamedTuple):
    """An input or output of a subgraph definition. `links` are the inner links, in saved order.

    `label` is the author's name for the port, which the editor shows instead of its name.
    """

    name: str
    type: str
    links: tuple[int, ...] = ()
    label: str = ""


class WorkflowGraph(NamedTuple):
    """The root graph (id "") or a subgraph definition."""

    id: str
    name: str
    nodes: tuple[Node, ...] = ()
    links: Mapping[int, Link] = {}
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()


class Group(NamedTuple):
    """A titled rectangle drawn around nodes."""

    title: str
    bounding: tuple[float, float, float, float]


class Workflow(NamedTuple):
    root: WorkflowGraph
    definitions: Mapping[str, WorkflowGraph] = {}
    last_node_id: int = 0
    # The saved definitions of group nodes, the predecessors of subgraphs.
    group_nodes: Mapping[str, Any] = {}


Prompt = dict[str, dict[str, Any]]
ObjectInfo = Mapping[str, Any]


class Limits(NamedTuple):
    """Limits on the size of a workflow. Real workflows are a hundred times smaller. A hostile file
    hits the limits early."""

    nodes_max: int = 200_000  # after expansion of all subgraphs
    links_max: int = 1_000_000
    subgraph_depth_max: int = 100
    group_nodes_max: int = 1_000  # limited because the time per group node grows with their number
    value_depth_max: int = 100
    dynamic_rows_max: int = 1_000
    # Characters of a whole prompt. Instances of a subgraph repeat the strings inside it.
    text_characters_max: int = 64 * 1024**2
    choice_depth_max: int = 100  # nesting of {a|{b|c}} in one text
    choice_characters_max: int = 2_000_000  # characters read inside choices, counted once per level
    # characters inserted for all %Node.widget% patterns together
    filled_characters_max: int = 1_000_000


class CharacterBudget:
    """The number of characters that one step of a conversion may still read or produce."""

    def __init__(self, characters_max: int, what: str) -> None:
        self._left = self._max = characters_max
        self._what = what

    def take(self, characters: int) -> None:
        """Takes characters from the budget. Raises LimitExceeded if it is exhausted."""
        self._left -= characters
        if self._left < 0:
            raise LimitExceeded(f"{self._what} can have at most {self._max:,} characters")

    def take_value(self, value: Any) -> None:
        """Takes the lengths of all strings and names in a JSON value, and one character for each
        other value."""
        pending = [value]
        while pending:
            item = pending.pop()
            self.take(len(item) if isinstance(item, str) else 1)
            if isinstance(item, list):
                pending.extend(item)
            elif isinstance(item, dict):
                pending.extend(item)
                pending.extend(item.values())


DEFAULT_LIMITS = Limits()


SEPARATOR = " › "


def graph_place(graph: WorkflowGraph) -> str:
    return f'subgraph "{graph.name}"' if graph.id else ""


def node_place(node: Node, graph: WorkflowGraph | None = None) -> str:
    title = f' "{node.title}"' if node.title and node.title != node.type else ""
    return join_places(graph_place(graph) if graph else "", f"node {node.id} {node.type}{title}")


def join_places(*parts: str) -> str:
    return SEPARATOR.join(part for part in parts if part)
