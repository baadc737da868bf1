"""Finds the nodes that a user selects by id, title or group title. A group selects the nodes inside
it."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from comfyfleet.errors import InvalidInput, LimitExceeded
from comfyfleet.workflow.edit.documents import JsonObject, graph_at, graph_paths, nodes_of
from comfyfleet.workflow.model import (
    Group,
    Node,
    Workflow,
    WorkflowGraph,
    graph_place,
    join_places,
    node_place,
)
from comfyfleet.workflow.parse import parse_groups
from comfyfleet.workflow.subgraphs import unique_ids

# Titles extend above a node's position, and are part of the node when its center is computed.
TITLE_HEIGHT = 30.0
# Node types that the editor draws without a title.
UNTITLED_TYPES = ("Reroute",)
# Average width of a character in pixels. A collapsed node is as wide as its title, which the editor
# measures in its own font, so a computed center is off by a few pixels at most.
CHARACTER_WIDTH = 7.0
# Maximum number of comparisons of groups with nodes. Real workflows stay a thousand times below
# this.
NODES_COMPARED_MAX = 20_000_000


class Canvas:
    """Indexes the nodes of a graph by position."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Indexes saved nodes by the positions of their centers."""
        centres = ((centre(node), index) for index, node in enumerate(nodes))
        self._by_x = sorted((*middle, index) for middle, index in centres if middle is not None)
        self._budget = NODES_COMPARED_MAX

    def inside(self, group: Group) -> list[int]:
        """Returns the indices of the nodes inside a group. A group includes its left and top edges,
        but not its right and bottom edges.
        """
        x, top, width, height = group.bounding
        first, end = (bisect_left(self._by_x, (edge,)) for edge in (x, x + width))
        self._budget -= max(0, end - first)
        if self._budget < 0:
            raise LimitExceeded("the workflow has too many groups and nodes to search")
        within = self._by_x[first:end]
        return sorted(index for _, y, index in within if top <= y < top + height)


def centre(node: Mapping[str, Any]) -> tuple[float, float] | None:
    """Returns the center of a node, or None if the node has no position."""
    position, size = _pair(node.get("pos")), _pair(node.get("size")) or (0.0, 0.0)
    if position is None:
        return None
    title_height = 0.0 if node.get("type") in UNTITLED_TYPES else TITLE_HEIGHT
    width, height = size[0], size[1] + title_height
    flags = node.get("flags")
    if isinstance(flags, dict) and flags.get("collapsed"):
        width, height = _collapsed_width(node, size[0]), TITLE_HEIGHT
    return position[0] + width / 2, position[1] - title_height + height / 2


def _collapsed_width(node: Mapping[str, Any], width: float) -> float:
    title = str(node.get("title") or node.get("type") or "")
    return min(width, 2 * TITLE_HEIGHT + CHARACTER_WIDTH * len(title))


def _pair(value: Any) -> tuple[float, float] | None:
    """Parses a position or size, which is a list or, in older files, an object with the keys 0 and
    1."""
    if isinstance(value, dict):
        value = [value.get("0"), value.get("1")]
    if not isinstance(value, list) or len(value) < 2:
        return None
    first, second = value[0], value[1]
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return None
    # An integer in JSON may be too large for a float.
    return (float(first), float(second)) if max(abs(first), abs(second)) < 2**53 else None


T = TypeVar("T")
NAMES_COMPARED_MAX = 2_000  # how many names are searched for the closest ones
NAMES_OFFERED_MAX = 3
NAME_CHARACTERS_MAX = 100
LIKENESS_MIN = 0.5


class SelectorKind(IntEnum):
    """How a node was selected. If two selections contradict each other, the more exact one wins."""

    GROUP = 0
    TITLE = 1
    ID = 2


# A range such as `Extend 6-8`. People and editors use different dashes.
RANGE = re.compile(r"(.*\D)(\d{1,6})\s*[-\u2013\u2014]\s*(\d{1,6})\s*")
PARTS_MAX = 1_000  # maximum number of parts in a range
PREFIXES = {"id": SelectorKind.ID, "title": SelectorKind.TITLE, "group": SelectorKind.GROUP}


class NodeLocation(NamedTuple):
    """The location of a node: the id of its graph, and its index there."""

    graph: str
    at: int


class Selection(NamedTuple):
    """The selected nodes.

    If a node was selected through instances, `through` has the indices of these instances, from the
    root graph inwards. Otherwise, all instances of the node's graph are meant.
    """

    meaning: SelectorKind
    spots: tuple[NodeLocation, ...]
    through: tuple[int, ...] = ()


class SelectorIndex:
    """Indexes all names in a document that can be selected."""

    def __init__(self, document: JsonObject, workflow: Workflow) -> None:
        self.workflow = workflow
        self._ids = _ids_by_graph(workflow)
        self._titles: dict[str, list[NodeLocation]] = {}
        self._groups: dict[str, list[tuple[str, Group]]] = {}
        self._saved: dict[str, JsonObject] = {}
        paths = graph_paths(document)
        for graph in (workflow.root, *workflow.definitions.values()):
            self._saved[graph.id] = graph_at(document, paths[graph.id])
            for index, node in enumerate(graph.nodes):
                spots = self._titles.setdefault(name_of(node, workflow), [])
                spots.append(NodeLocation(graph.id, index))
            for group in parse_groups(self._saved[graph.id]):
                self._groups.setdefault(group.title, []).append((graph.id, group))

    def select(self, selector: str) -> Selection:
        """Returns the nodes that a selector refers to. Raises InvalidInput if no node matches or if
        the selector is ambiguous."""
        prefix, _, name = selector.partition(":")
        if prefix == "title":
            spots = _named(self._titles, name) or _named(self._titles, name, fold=_folded)
            selection = Selection(SelectorKind.TITLE, tuple(spots)) if spots else None
        elif prefix == "group":
            groups = _named(self._groups, name) or _named(self._groups, name, fold=_folded)
            selection = self._in_groups(groups, selector) if groups else None
        else:
            selection = self._by_id(name if prefix == "id" else selector)
        if selection is None and prefix in PREFIXES:
            raise self._unknown(selector, PREFIXES[prefix])
        return selection or self._by_any_title(selector)

    def _in_groups(self, groups: Sequence[tuple[str, Group]], selector: str) -> Selection:
        spots = dict.fromkeys(
            NodeLocation(graph, index)
            for graph, group in groups
            for index in Canvas(nodes_of(self._saved[graph])).inside(group)
        )
        if not spots:
            raise InvalidInput(f"{selector}: this group contains no nodes")
        return Selection(SelectorKind.GROUP, tuple(spots))

    def _by_any_title(self, selector: str) -> Selection:
        for fold in (str, _folded):
            nodes = _named(self._titles, selector, fold=fold)
            groups = _named(self._groups, selector, fold=fold)
            if nodes and groups:
                raise InvalidInput(
                    f"{selector} is the title of both a node and a group; "
                    f"use title:{selector} or group:{selector}"
                )
            if nodes:
                return Selection(SelectorKind.TITLE, tuple(nodes))
            if groups:
                return self._in_groups(groups, selector)
        several = self._several(selector)
        if several is None:
            raise self._unknown(selector, None)
        return several

    def _several(self, selector: str) -> Selection | None:
        """Selects parts by a range of numbers or by a pattern."""
        numbered = RANGE.fullmatch(selector)
        if numbered is not None:
            names = _numbered(numbered[1], int(numbered[2]), int(numbered[3]), selector)
        elif "*" in selector or "?" in selector:
            pattern, known = _folded(selector), dict.fromkeys((*self._titles, *self._groups))
            names = [name for name in known if fnmatchcase(_folded(name), pattern)]
        else:
            return None
        selections = [self.select(name) for name in names]
        if not selections:
            return None
        spots = dict.fromkeys(spot for selection in selections for spot in selection.spots)
        return Selection(min(selection.meaning for selection in selections), tuple(spots))

    def _by_id(self, name: str) -> Selection | None:
        graph: WorkflowGraph | None = self.workflow.root
        indices: list[int] = []
        for part in name.strip().split(":"):
            if indices and graph is not None:
                graph = self.workflow.definitions.get(graph.nodes[indices[-1]].type)
            index = self._ids[graph.id].get(part) if graph else None
            if index is None:
                return None
            indices.append(index)
        if graph is None:
            return None
        return Selection(
            SelectorKind.ID, (NodeLocation(graph.id, indices[-1]),), tuple(indices[:-1])
        )

    def _unknown(self, selector: str, meaning: SelectorKind | None) -> InvalidInput:
        names = {
            SelectorKind.ID: [*self._ids[""], *self._inner_ids()],
            SelectorKind.TITLE: list(self._titles),
            SelectorKind.GROUP: list(self._groups),
            None: [*self._titles, *self._groups, *self._ids[""]],
        }[meaning]
        what = {None: "no node or group", SelectorKind.GROUP: "no group"}.get(meaning, "no node")
        name = selector if meaning is None else selector.partition(":")[2]
        return InvalidInput(f"{selector}: {what} has this name{_closest(name, names)}")

    def _inner_ids(self) -> Iterator[str]:
        """Yields the ids of nodes inside instances in the root graph, for hints."""
        for shown, index in self._ids[""].items():
            definition = self.workflow.definitions.get(self.workflow.root.nodes[index].type)
            for inner in self._ids[definition.id] if definition else ():
                yield f"{shown}:{inner}"


def _numbered(stem: str, first: int, last: int, selector: str) -> list[str]:
    if not first <= last < first + PARTS_MAX:
        raise InvalidInput(
            f"{selector}: a range must end with a higher number and can't have more than "
            f"{PARTS_MAX} parts"
        )
    return [f"{stem}{number}" for number in range(first, last + 1)]


def name_of(node: Node, workflow: Workflow) -> str:
    definition = workflow.definitions.get(node.type)
    return node.title or (definition.name if definition else node.type)


def place_of(node: Node, workflow: Workflow, graph: WorkflowGraph | None = None) -> str:
    """Returns the description of a node for messages. An instance is described by its name, because
    its type is an id."""
    if node.type not in workflow.definitions:
        return node_place(node, graph)
    around = graph_place(graph) if graph else ""
    return join_places(around, f'instance {node.id} "{name_of(node, workflow)}"')


def _ids_by_graph(workflow: Workflow) -> dict[str, dict[str, int]]:
    """Returns the indices of nodes by id for each graph. Ids in the prompt take precedence over
    saved ids."""
    shown = unique_ids(workflow)
    indices_by_graph = {}
    for saved, renamed in (
        (workflow.root, shown.root),
        *((graph, shown.definitions[key]) for key, graph in workflow.definitions.items()),
    ):
        indices = _kept_indices(saved, renamed)
        ids = {node.id: index for node, index in zip(renamed.nodes, indices, strict=True)}
        for index in indices:
            ids.setdefault(saved.nodes[index].id, index)
        indices_by_graph[saved.id] = ids
    return indices_by_graph


def _kept_indices(saved: WorkflowGraph, shown: WorkflowGraph) -> Sequence[int]:
    """Returns the indices of the nodes that exist in the prompt. If two nodes of a definition have
    the same id, only the first one exists there."""
    if len(saved.nodes) == len(shown.nodes):
        return range(len(saved.nodes))
    first: dict[str, int] = {}
    for index, node in enumerate(saved.nodes):
        first.setdefault(node.id, index)
    return list(first.values())


def _named(
    names: Mapping[str, Sequence[T]], requested: str, *, fold: Callable[[str], str] = str
) -> list[T]:
    """Returns all items whose name equals `requested` after `fold` was applied to both."""
    requested = fold(requested)
    return [item for name, items in names.items() if fold(name) == requested for item in items]


def _folded(name: str) -> str:
    return name.strip().casefold()


def _closest(requested: str, names: Sequence[str]) -> str:
    by_folded = {
        _folded(name): name
        for name in names[:NAMES_COMPARED_MAX]
        if 0 < len(name) <= NAME_CHARACTERS_MAX
    }
    folded = _folded(requested)[:NAME_CHARACTERS_MAX]
    close = get_close_matches(folded, list(by_folded), NAMES_OFFERED_MAX, LIKENESS_MIN)
    return f"; closest: {', '.join(by_folded[name] for name in close)}" if close else ""
