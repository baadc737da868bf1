"""Finds the chains of a workflow: families whose members repeat each other and flow together."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from comfyfleet.workflow.behaviours import is_virtual
from comfyfleet.workflow.model import SUBGRAPH_OUTPUT_ID, Graph, Node, Workflow
from comfyfleet.workflow.nodetypes import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.switching.counterparts import kind_of
from comfyfleet.workflow.switching.documents import JsonObject, graph_at, graph_paths
from comfyfleet.workflow.switching.families import Family, find_families
from comfyfleet.workflow.switching.flows import gathered, mask_of, needed_by, owners_of
from comfyfleet.workflow.switching.levels import Level, read_level
from comfyfleet.workflow.switching.model import Chain, Segment
from comfyfleet.workflow.switching.shells import dead_definitions

KINDS = ("group", "instance", "title")
LIKENESS_MIN = 0.5  # of two segments in a row: how much of the smaller one is in the larger


class _Candidate(NamedTuple):
    family: Family
    owners: Mapping[str, int]
    before: Mapping[str, int]  # segments that reach a node, and
    behind: Mapping[str, int]  # segments that a node reaches
    is_direct: bool  # each segment feeds the next; else they are only gathered by something


def find_segments(document: dict[str, Any]) -> tuple[Chain, ...]:
    """All chains of numbered segments, those of the root graph first."""
    return chains_of(document, parse(document), NodeTypes({}))


def chains_of(document: JsonObject, workflow: Workflow, types: NodeTypes) -> tuple[Chain, ...]:
    paths = graph_paths(document)
    dead = dead_definitions(workflow)
    found: list[Chain] = []
    for graph in (workflow.root, *workflow.definitions.values()):
        families = find_families(graph, graph_at(document, paths[graph.id]), workflow)
        if families:
            level = read_level(workflow, graph.id, types, all_on=True)
            chains = _chains(families, level)
            found.extend(_chain(family, graph, dead) for family in chains)
    return tuple(found)


def _chains(families: Sequence[Family], level: Level) -> Iterator[Family]:
    candidates = [
        candidate for family in families if (candidate := _candidate(family, level)) is not None
    ]
    candidates.sort(key=lambda one: _rank(one, level))
    accepted: list[_Candidate] = []
    for candidate in candidates:
        around = next((one for one in accepted if _contains(one, candidate)), None)
        if around is None:
            accepted.append(candidate)
        else:
            accepted[accepted.index(around)] = around._replace(family=_merged(around, candidate))
    return (candidate.family for candidate in accepted)


def _candidate(family: Family, level: Level) -> _Candidate | None:
    owners = owners_of(level, [segment.nodes for segment in family.segments])
    nodes: list[list[str]] = [[] for _ in family.segments]
    for node, index in owners.items():
        nodes[index].append(node)
    if not all(nodes) or not _are_alike(nodes, level):
        return None
    before = gathered(level, owners)
    is_direct = _is_direct(nodes, owners, before, level)
    if not is_direct and (family.kind == "title" or not _is_gathered(nodes, before, level)):
        return None
    return _Candidate(family, owners, before, needed_by(level, owners), is_direct)


def _are_alike(segments: Sequence[Sequence[str]], level: Level) -> bool:
    """At least half of the pairs of neighbours: the first and the last may differ from the rest."""
    kinds = [Counter(kind_of(level, node) for node in nodes) for nodes in segments]
    alike = sum(_likeness(one, other) >= LIKENESS_MIN for one, other in pairwise(kinds))
    return 2 * alike >= len(kinds) - 1


def _likeness(one: Counter[Hashable], other: Counter[Hashable]) -> float:
    return (one & other).total() / min(one.total(), other.total())


def _is_direct(
    segments: Sequence[Sequence[str]],
    owners: Mapping[str, int],
    before: Mapping[str, int],
    level: Level,
) -> bool:
    """Is each segment fed by the one before it?"""
    for index in range(1, len(segments)):
        feeding = 0
        for node in segments[index]:
            for _, source in level.inputs_of(node):
                feeding |= mask_of(source.node_id, owners, before)
        if not feeding >> (index - 1) & 1:
            return False
    return True


def _is_gathered(
    segments: Sequence[Sequence[str]], before: Mapping[str, int], level: Level
) -> bool:
    """Are they more than a few loaders, and does some node gather each two neighbours?"""
    if not all(any(_is_fed(node, level) for node in nodes) for nodes in segments):
        return False
    masks = {mask for node, mask in before.items() if node != SUBGRAPH_OUTPUT_ID}
    return all(any(mask >> index & 3 == 3 for mask in masks) for index in range(len(segments) - 1))


def _is_fed(node: str, level: Level) -> bool:
    return next(level.inputs_of(node), None) is not None


def _rank(candidate: _Candidate, level: Level) -> tuple[bool, int, int, int]:
    """Which of two names the same parts better: by flow, by kind, by how much it takes in."""
    first = next(index for index, node in enumerate(level.order) if node in candidate.owners)
    kind = KINDS.index(candidate.family.kind)
    return not candidate.is_direct, kind, -len(candidate.owners), first


def _contains(around: _Candidate, candidate: _Candidate) -> bool:
    """Is every node of the candidate in a segment, or fed by only one, or feeding only one?"""
    return all(
        node in around.owners
        or around.before[node].bit_count() == 1
        or around.behind[node].bit_count() == 1
        for node in candidate.owners
    )


def _merged(around: _Candidate, candidate: _Candidate) -> Family:
    """Nodes with titles of their own that follow the segment of the same number belong to it."""
    ours, theirs = around.family, candidate.family
    numbers = [segment.number for segment in ours.segments]
    if theirs.kind != "title" or numbers != [segment.number for segment in theirs.segments]:
        return ours
    segments = []
    for index, (segment, more) in enumerate(zip(ours.segments, theirs.segments, strict=True)):
        if any(around.before.get(node, 0) != 1 << index for node in more.nodes):
            return ours
        segments.append(segment._replace(nodes=tuple(dict.fromkeys(segment.nodes + more.nodes))))
    return ours._replace(segments=tuple(segments))


def _chain(family: Family, graph: Graph, dead: frozenset[str]) -> Chain:
    nodes = {node.id: node for node in graph.nodes}
    on: list[Segment] = []
    off: list[Segment] = []
    for segment in family.segments:
        members = [nodes[node] for node in segment.nodes]
        (on if _makes_something(members, dead) else off).append(segment)
    return Chain(family.kind, family.name, tuple(on), tuple(off), graph.id)


def _makes_something(nodes: Sequence[Node], dead: frozenset[str]) -> bool:
    """Loaders that were left on don't count: only nodes that are fed by others do, if there are any."""
    executed = [node for node in nodes if not is_virtual(node.type)]
    fed = [node for node in executed if any(slot.link is not None for slot in node.inputs)]
    return any(not node.is_inactive and node.type not in dead for node in fed or executed)
