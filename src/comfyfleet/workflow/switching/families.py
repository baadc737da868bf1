"""Things that are numbered alike: groups, instances and nodes called "Extend 1", "Extend 2" …

The number may stand anywhere in a title, with whatever around it: `Segment_01`, `Part #3`,
`2. Extend`, `Clip 4 - the cat jumps`. What stands before it makes the family; where there is
nothing before it, what stands behind it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from comfyfleet.workflow.behaviours import is_virtual
from comfyfleet.workflow.model import Graph, Workflow
from comfyfleet.workflow.parse import parse_groups
from comfyfleet.workflow.switching.documents import JsonObject, nodes_of
from comfyfleet.workflow.switching.insides import Canvas
from comfyfleet.workflow.switching.model import Kind, Segment
from comfyfleet.workflow.switching.selectors import name_of

NUMBER = re.compile(r"[0-9]{1,9}")
DECORATION = re.compile(r"[\s_#.:,;()\[\]{}/|–—-]+")
NUMBERS_PER_TITLE_MAX = 4
# Per graph, and segments of each. Real workflows have a handful of a few dozen.
FAMILIES_MAX = 100
SEGMENTS_MAX = 1_000
NODES_EXAMINED_MAX = 2_000_000  # all nodes of the graph, once for each family


class Family(NamedTuple):
    kind: Kind
    name: str
    segments: tuple[Segment, ...]


class _Thing(NamedTuple):
    """A group, an instance or a node: something with a title."""

    kind: Kind
    title: str
    nodes: tuple[str, ...]


def find_families(graph: Graph, saved: JsonObject, workflow: Workflow) -> list[Family]:
    """The largest first."""
    families = [
        *_families(_groups(graph, saved)),
        *_families(_titled_nodes(graph, workflow)),
    ]
    families = [family for family in families if len(family.segments) <= SEGMENTS_MAX]
    families.sort(key=lambda family: -len(family.segments))
    return families[: min(FAMILIES_MAX, NODES_EXAMINED_MAX // max(1, len(graph.nodes)))]


def base_of(title: str) -> str:
    """A title without its numbers, to compare those of repeated nodes."""
    return tidy(NUMBER.sub(" ", title)).casefold()


def _groups(graph: Graph, saved: JsonObject) -> list[_Thing]:
    """The smallest first: what lies in two of them belongs to the inner one."""
    groups = [group for group in parse_groups(saved) if NUMBER.search(group.title)]
    groups.sort(key=lambda group: abs(group.bounding[2] * group.bounding[3]))
    canvas = Canvas(nodes_of(saved) if groups else ())
    return [
        _Thing(
            "group",
            group.title,
            tuple(graph.nodes[index].id for index in canvas.inside(group)),
        )
        for group in groups
    ]


def _titled_nodes(graph: Graph, workflow: Workflow) -> Iterator[_Thing]:
    for node in graph.nodes:
        if node.type in workflow.definitions:
            yield _Thing("instance", name_of(node, workflow), (node.id,))
        elif node.title and not is_virtual(node.type):
            yield _Thing("title", node.title, (node.id,))


def _families(things: Iterable[_Thing]) -> Iterator[Family]:
    found: dict[str, list[tuple[int, _Thing]]] = {}
    names: dict[str, str] = {}
    for thing in things:
        for name, number in _numbered(thing.title):
            names.setdefault(name.casefold(), name)
            found.setdefault(name.casefold(), []).append((number, thing))
    for key, members in found.items():
        if len({number for number, _ in members}) > 1:
            kinds = {thing.kind for _, thing in members}
            kind: Kind = kinds.pop() if len(kinds) == 1 else "title"
            yield Family(kind, names[key], tuple(_segments(members)))


def _segments(members: Sequence[tuple[int, _Thing]]) -> Iterator[Segment]:
    """In the order of the numbers. A node belongs to the first of several."""
    titles: dict[int, str] = {}
    owners: dict[str, int] = {}
    for number, thing in members:
        titles.setdefault(number, thing.title)
        for node in thing.nodes:
            owners.setdefault(node, number)
    nodes: dict[int, list[str]] = {number: [] for number in sorted(titles)}
    for node, number in owners.items():
        nodes[number].append(node)
    for number, own in nodes.items():
        yield Segment(number, titles[number], tuple(own))


def _numbered(title: str) -> Iterator[tuple[str, int]]:
    """The names of families that a title may belong to, and its number there."""
    for match in _first(NUMBER.finditer(title)):
        name = tidy(title[: match.start()])
        if not any(character.isalpha() for character in name):
            name = tidy(title[match.end() :])
        if any(character.isalpha() for character in name):
            yield name, int(match.group())


def _first(matches: Iterable[re.Match[str]]) -> Sequence[re.Match[str]]:
    return [match for match, _ in zip(matches, range(NUMBERS_PER_TITLE_MAX), strict=False)]


def tidy(text: str) -> str:
    """A name without what decorates the number beside it."""
    return DECORATION.sub(" ", text).strip()
