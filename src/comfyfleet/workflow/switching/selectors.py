"""Which nodes a person means by an id, a title, or the title of a group.

`12` is a node, `57:3` one inside instance 57, as a prompt shows them; ids as saved are understood,
too. Anything else is a title, of nodes (all that have it, in every graph) or of groups. A node
without a title of its own is called by its type, an instance by the name of its definition. Where
a word could mean several of these, `id:`, `title:` or `group:` in front of it decide. `Extend 6-8`
means the three parts of these numbers, `Extend *` all whose title fits the pattern; a title that is
written just so goes first.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.workflow.ids import unique_ids
from comfyfleet.workflow.model import Graph, Group, Node, Workflow
from comfyfleet.workflow.parse import parse_groups
from comfyfleet.workflow.places import graph_place, join_places, node_place
from comfyfleet.workflow.switching.documents import JsonObject, graph_at, graph_paths, nodes_of
from comfyfleet.workflow.switching.insides import Canvas

T = TypeVar("T")
NAMES_COMPARED_MAX = 2_000  # for the closest ones in a message
NAMES_OFFERED_MAX = 3
NAME_CHARACTERS_MAX = 100
LIKENESS_MIN = 0.5


class Meaning(IntEnum):
    """How a node was named; the more exact way wins where two contradict each other."""

    GROUP = 0
    TITLE = 1
    ID = 2


# `Extend 6-8`; people and editors write the dash in several ways.
RANGE = re.compile(r"(.*\D)(\d{1,6})\s*[-\u2013\u2014]\s*(\d{1,6})\s*")
PARTS_MAX = 1_000  # that one range may name
PREFIXES = {"id": Meaning.ID, "title": Meaning.TITLE, "group": Meaning.GROUP}


class Spot(NamedTuple):
    """A node: the id of its graph, and at which index it is there."""

    graph: str
    at: int


class Selection(NamedTuple):
    """`through` are the indices of the instances that lead to the one node from the root graph, if
    it was named through them; else every instance of its graph is meant."""

    meaning: Meaning
    spots: tuple[Spot, ...]
    through: tuple[int, ...] = ()


class Catalogue:
    """Everything that can be named in a document."""

    def __init__(self, document: JsonObject, workflow: Workflow) -> None:
        self.workflow = workflow
        self._ids = _ids_by_graph(workflow)
        self._titles: dict[str, list[Spot]] = {}
        self._groups: dict[str, list[tuple[str, Group]]] = {}
        self._saved: dict[str, JsonObject] = {}
        paths = graph_paths(document)
        for graph in (workflow.root, *workflow.definitions.values()):
            self._saved[graph.id] = graph_at(document, paths[graph.id])
            for index, node in enumerate(graph.nodes):
                spots = self._titles.setdefault(name_of(node, workflow), [])
                spots.append(Spot(graph.id, index))
            for group in parse_groups(self._saved[graph.id]):
                self._groups.setdefault(group.title, []).append((graph.id, group))

    def select(self, selector: str) -> Selection:
        """Raises InvalidInput where that is nothing, or two things."""
        prefix, _, name = selector.partition(":")
        if prefix == "title":
            spots = _named(self._titles, name) or _named(self._titles, name, fold=_folded)
            found = Selection(Meaning.TITLE, tuple(spots)) if spots else None
        elif prefix == "group":
            groups = _named(self._groups, name) or _named(self._groups, name, fold=_folded)
            found = self._in_groups(groups, selector) if groups else None
        else:
            found = self._by_id(name if prefix == "id" else selector)
        if found is None and prefix in PREFIXES:
            raise self._unknown(selector, PREFIXES[prefix])
        return found or self._by_any_title(selector)

    def _in_groups(self, groups: Sequence[tuple[str, Group]], selector: str) -> Selection:
        spots = dict.fromkeys(
            Spot(graph, index)
            for graph, group in groups
            for index in Canvas(nodes_of(self._saved[graph])).inside(group)
        )
        if not spots:
            raise InvalidInput(f"{selector}: this group has no nodes in it")
        return Selection(Meaning.GROUP, tuple(spots))

    def _by_any_title(self, selector: str) -> Selection:
        for fold in (str, _folded):
            nodes = _named(self._titles, selector, fold=fold)
            groups = _named(self._groups, selector, fold=fold)
            if nodes and groups:
                raise InvalidInput(
                    f"{selector}: is the title of a node and of a group; "
                    f"say title:{selector} or group:{selector}"
                )
            if nodes:
                return Selection(Meaning.TITLE, tuple(nodes))
            if groups:
                return self._in_groups(groups, selector)
        several = self._several(selector)
        if several is None:
            raise self._unknown(selector, None)
        return several

    def _several(self, selector: str) -> Selection | None:
        """Parts that are named by a range of numbers or by a pattern, together."""
        numbered = RANGE.fullmatch(selector)
        if numbered is not None:
            names = _numbered(numbered[1], int(numbered[2]), int(numbered[3]), selector)
        elif "*" in selector or "?" in selector:
            pattern, known = _folded(selector), dict.fromkeys((*self._titles, *self._groups))
            names = [name for name in known if fnmatchcase(_folded(name), pattern)]
        else:
            return None
        found = [self.select(name) for name in names]
        if not found:
            return None
        spots = dict.fromkeys(spot for selection in found for spot in selection.spots)
        return Selection(min(selection.meaning for selection in found), tuple(spots))

    def _by_id(self, name: str) -> Selection | None:
        graph: Graph | None = self.workflow.root
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
        return Selection(Meaning.ID, (Spot(graph.id, indices[-1]),), tuple(indices[:-1]))

    def _unknown(self, selector: str, meaning: Meaning | None) -> InvalidInput:
        names = {
            Meaning.ID: [*self._ids[""], *self._inner_ids()],
            Meaning.TITLE: list(self._titles),
            Meaning.GROUP: list(self._groups),
            None: [*self._titles, *self._groups, *self._ids[""]],
        }[meaning]
        what = {None: "no node or group", Meaning.GROUP: "no group"}.get(meaning, "no node")
        wanted = selector if meaning is None else selector.partition(":")[2]
        return InvalidInput(f"{selector}: {what} of that name{_closest(wanted, names)}")

    def _inner_ids(self) -> Iterator[str]:
        """Of nodes inside instances in the root graph: enough for a hint."""
        for shown, index in self._ids[""].items():
            definition = self.workflow.definitions.get(self.workflow.root.nodes[index].type)
            for inner in self._ids[definition.id] if definition else ():
                yield f"{shown}:{inner}"


def _numbered(stem: str, first: int, last: int, selector: str) -> list[str]:
    if not first <= last < first + PARTS_MAX:
        raise InvalidInput(
            f"{selector}: a range goes from a lower to a higher number, over at most {PARTS_MAX}"
        )
    return [f"{stem}{number}" for number in range(first, last + 1)]


def name_of(node: Node, workflow: Workflow) -> str:
    definition = workflow.definitions.get(node.type)
    return node.title or (definition.name if definition else node.type)


def place_of(node: Node, workflow: Workflow, graph: Graph | None = None) -> str:
    """As in other messages; but an instance by its name, for its type is an id."""
    if node.type not in workflow.definitions:
        return node_place(node, graph)
    around = graph_place(graph) if graph else ""
    return join_places(around, f'instance {node.id} "{name_of(node, workflow)}"')


def _ids_by_graph(workflow: Workflow) -> dict[str, dict[str, int]]:
    """For each graph the index of a node by its id: as a prompt shows it, else as saved."""
    shown = unique_ids(workflow)
    found = {}
    for saved, renamed in (
        (workflow.root, shown.root),
        *((graph, shown.definitions[key]) for key, graph in workflow.definitions.items()),
    ):
        indices = _kept_indices(saved, renamed)
        ids = {node.id: index for node, index in zip(renamed.nodes, indices, strict=True)}
        for index in indices:
            ids.setdefault(saved.nodes[index].id, index)
        found[saved.id] = ids
    return found


def _kept_indices(saved: Graph, shown: Graph) -> Sequence[int]:
    """Of two nodes with one id in a definition only the first is shown."""
    if len(saved.nodes) == len(shown.nodes):
        return range(len(saved.nodes))
    first: dict[str, int] = {}
    for index, node in enumerate(saved.nodes):
        first.setdefault(node.id, index)
    return list(first.values())


def _named(
    names: Mapping[str, Sequence[T]], wanted: str, *, fold: Callable[[str], str] = str
) -> list[T]:
    """Everything of that name, as written; or as folded, for other capitals."""
    wanted = fold(wanted)
    return [thing for name, things in names.items() if fold(name) == wanted for thing in things]


def _folded(name: str) -> str:
    return name.strip().casefold()


def _closest(wanted: str, names: Sequence[str]) -> str:
    by_folded = {
        _folded(name): name
        for name in names[:NAMES_COMPARED_MAX]
        if 0 < len(name) <= NAME_CHARACTERS_MAX
    }
    folded = _folded(wanted)[:NAME_CHARACTERS_MAX]
    close = get_close_matches(folded, list(by_folded), NAMES_OFFERED_MAX, LIKENESS_MIN)
    return f"; closest: {', '.join(by_folded[name] for name in close)}" if close else ""
