"""Finds the chains of a workflow. A chain is a family of similar, numbered parts that are connected
with each other."""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidWorkflow
from comfyfleet.workflow.edit.documents import JsonObject, graph_at, graph_paths, nodes_of
from comfyfleet.workflow.edit.node_modes import Chain, Kind, Segment, dead_definitions
from comfyfleet.workflow.edit.selectors import Canvas, name_of
from comfyfleet.workflow.model import (
    SUBGRAPH_INPUT_ID,
    SUBGRAPH_OUTPUT_ID,
    Mode,
    Node,
    Workflow,
    WorkflowGraph,
)
from comfyfleet.workflow.node_behaviours import is_virtual
from comfyfleet.workflow.node_inputs import Input
from comfyfleet.workflow.object_info import NodeTypes
from comfyfleet.workflow.parse import parse, parse_groups
from comfyfleet.workflow.resolve import InputSource, Resolved, Resolver
from comfyfleet.workflow.subgraphs import GraphScope
from comfyfleet.workflow.wire import WiredGraph, WiredNode, settle_types, wire


class End(NamedTuple):
    """An input of a node."""

    node: str
    slot: int


class GraphLevel(NamedTuple):
    """One graph. `nodes` are the executed nodes and the instances in the order of the file. In a
    definition, they include its input and output ports.

    `order` lists each node after the nodes that feed it. A cycle is cut at an arbitrary point.
    """

    nodes: Mapping[str, WiredNode]
    sources: Mapping[End, InputSource]
    # the id of the link that ends at each input, even if the link comes from a virtual node
    links: Mapping[End, int]
    consumers: Mapping[str, tuple[End, ...]]
    order: tuple[str, ...]

    def inputs_of(self, node: str) -> Iterator[tuple[End, InputSource]]:
        for slot in range(len(self.nodes[node].inputs)):
            source = self.sources.get(End(node, slot))
            if source is not None:
                yield End(node, slot), source

    def type_of(self, source: InputSource) -> str:
        outputs = self.nodes[source.node_id].outputs
        return outputs[source.slot] if 0 <= source.slot < len(outputs) else ""

    def input_name(self, end: End) -> str:
        return self.nodes[end.node].inputs[end.slot].name


def read_level(
    workflow: Workflow, graph_id: str, types: NodeTypes, *, all_on: bool = False
) -> GraphLevel:
    """Reads a graph. `all_on` reads it as if no node were switched off."""
    graph = workflow.definitions[graph_id] if graph_id else workflow.root
    if all_on:
        graph = graph._replace(nodes=tuple(node._replace(mode=Mode.ALWAYS) for node in graph.nodes))
    wired = settle_types(wire(graph, types, workflow.definitions))
    nodes = {**wired.nodes, **_ends(wired.graph)}
    # Instances are treated like other nodes, so links end there. Their definitions are left out
    # here.
    scope = GraphScope(
        WiredGraph(graph, {key: node._replace(definition=None) for key, node in nodes.items()})
    )
    executed = {
        key: node
        for key, node in nodes.items()
        if not node.node.is_inactive and not scope.wired.nodes[key].is_virtual
    }
    sources = dict(_sources(scope, executed))
    links = {
        End(key, slot): entry.link.id
        for key, node in executed.items()
        for slot, entry in enumerate(node.inputs)
        if entry.link is not None
    }
    return GraphLevel(executed, sources, links, _consumers(sources), _in_order(executed, sources))


def _ends(graph: WorkflowGraph) -> dict[str, WiredNode]:
    if not graph.id:
        return {}
    outputs = tuple(
        Input(
            port.name,
            port.type,
            link=next((graph.links[key] for key in port.links if key in graph.links), None),
        )
        for port in graph.outputs
    )
    feeding = tuple(port.type for port in graph.inputs)
    return {
        SUBGRAPH_INPUT_ID: WiredNode(Node(SUBGRAPH_INPUT_ID, "input"), (), feeding),
        SUBGRAPH_OUTPUT_ID: WiredNode(Node(SUBGRAPH_OUTPUT_ID, "output"), outputs, ()),
    }


def _sources(
    scope: GraphScope, nodes: Mapping[str, WiredNode]
) -> Iterator[tuple[End, InputSource]]:
    resolver = Resolver([scope])
    for key, node in nodes.items():
        for slot, entry in enumerate(node.inputs):
            source = _resolved(resolver, scope, key, slot) if entry.link else None
            if isinstance(source, InputSource) and source.node_id in nodes:
                yield End(key, slot), source


def _resolved(resolver: Resolver, scope: GraphScope, node: str, slot: int) -> Resolved:
    try:
        return resolver.resolve(scope, scope.wired.nodes[node], slot)
    except InvalidWorkflow:  # the conversion reports the error if it affects an executed node
        return None


def _consumers(sources: Mapping[End, InputSource]) -> dict[str, tuple[End, ...]]:
    ends_by_source: dict[str, list[End]] = {}
    for end, source in sources.items():
        ends_by_source.setdefault(source.node_id, []).append(end)
    return {key: tuple(ends) for key, ends in ends_by_source.items()}


def _in_order(
    nodes: Mapping[str, WiredNode], sources: Mapping[End, InputSource]
) -> tuple[str, ...]:
    waiting = dict.fromkeys(nodes, 0)
    feeds: dict[str, list[str]] = {}
    for end, source in sources.items():
        waiting[end.node] += 1
        feeds.setdefault(source.node_id, []).append(end.node)
    ready = [key for key, count in waiting.items() if count == 0]
    for key in ready:
        for fed in feeds.get(key, ()):
            waiting[fed] -= 1
            if waiting[fed] == 0:
                ready.append(fed)
    done = set(ready)
    return (*ready, *(key for key in nodes if key not in done))


NUMBER = re.compile(r"[0-9]{1,9}")
DECORATION = re.compile(r"[\s_#.:,;()\[\]{}/|–—-]+")
NUMBERS_PER_TITLE_MAX = 4
# Limits per graph and family. Real workflows have a few families with a few dozen segments.
FAMILIES_MAX = 100
SEGMENTS_MAX = 1_000
NODES_EXAMINED_MAX = 2_000_000  # the graph's nodes, multiplied by the number of families


class Family(NamedTuple):
    kind: Kind
    name: str
    segments: tuple[Segment, ...]


class _TitledPart(NamedTuple):
    """A group, an instance or a node with a title."""

    kind: Kind
    title: str
    nodes: tuple[str, ...]


def find_families(graph: WorkflowGraph, saved: JsonObject, workflow: Workflow) -> list[Family]:
    """Returns the families of numbered parts, largest first."""
    families = [
        *_families(_groups(graph, saved)),
        *_families(_titled_nodes(graph, workflow)),
    ]
    families = [family for family in families if len(family.segments) <= SEGMENTS_MAX]
    families.sort(key=lambda family: -len(family.segments))
    return families[: min(FAMILIES_MAX, NODES_EXAMINED_MAX // max(1, len(graph.nodes)))]


def base_of(title: str) -> str:
    """Returns a title without its numbers, to compare the titles of repeated nodes."""
    return tidy(NUMBER.sub(" ", title)).casefold()


def _groups(graph: WorkflowGraph, saved: JsonObject) -> list[_TitledPart]:
    """Returns the groups, smallest first, so that a node inside two groups belongs to the inner
    one."""
    groups = [group for group in parse_groups(saved) if NUMBER.search(group.title)]
    groups.sort(key=lambda group: abs(group.bounding[2] * group.bounding[3]))
    canvas = Canvas(nodes_of(saved) if groups else ())
    return [
        _TitledPart(
            "group",
            group.title,
            tuple(graph.nodes[index].id for index in canvas.inside(group)),
        )
        for group in groups
    ]


def _titled_nodes(graph: WorkflowGraph, workflow: Workflow) -> Iterator[_TitledPart]:
    for node in graph.nodes:
        if node.type in workflow.definitions:
            yield _TitledPart("instance", name_of(node, workflow), (node.id,))
        elif node.title and not is_virtual(node.type):
            yield _TitledPart("title", node.title, (node.id,))


def _families(parts: Iterable[_TitledPart]) -> Iterator[Family]:
    members_by_name: dict[str, list[tuple[int, _TitledPart]]] = {}
    names: dict[str, str] = {}
    for part in parts:
        for name, number in _numbered(part.title):
            names.setdefault(name.casefold(), name)
            members_by_name.setdefault(name.casefold(), []).append((number, part))
    for key, members in members_by_name.items():
        if len({number for number, _ in members}) > 1:
            kinds = {part.kind for _, part in members}
            kind: Kind = kinds.pop() if len(kinds) == 1 else "title"
            yield Family(kind, names[key], tuple(_segments(members)))


def _segments(members: Sequence[tuple[int, _TitledPart]]) -> Iterator[Segment]:
    """Yields the segments, ordered by number. A node in several segments belongs to the first
    one."""
    titles: dict[int, str] = {}
    owners: dict[str, int] = {}
    for number, part in members:
        titles.setdefault(number, part.title)
        for node in part.nodes:
            owners.setdefault(node, number)
    nodes: dict[int, list[str]] = {number: [] for number in sorted(titles)}
    for node, number in owners.items():
        nodes[number].append(node)
    for number, segment_nodes in nodes.items():
        yield Segment(number, titles[number], tuple(segment_nodes))


def _numbered(title: str) -> Iterator[tuple[str, int]]:
    """Yields each family name that a title may belong to, and the title's number in that family."""
    for match in _first(NUMBER.finditer(title)):
        name = tidy(title[: match.start()])
        if not any(character.isalpha() for character in name):
            name = tidy(title[match.end() :])
        if any(character.isalpha() for character in name):
            yield name, int(match.group())


def _first(matches: Iterable[re.Match[str]]) -> Sequence[re.Match[str]]:
    return [match for match, _ in zip(matches, range(NUMBERS_PER_TITLE_MAX), strict=False)]


def tidy(text: str) -> str:
    """Returns a name without the punctuation around its number."""
    return DECORATION.sub(" ", text).strip()


# The index of the segment that a node belongs to. Nodes outside the segments ("the rest") have
# none.
Owners = Mapping[str, int]


def owners_of(level: GraphLevel, segments: Sequence[Collection[str]]) -> dict[str, int]:
    """Returns the segment of each node.

    A node that also feeds an earlier segment, such as a loader that happens to be drawn in this
    one, doesn't belong to its segment but to the rest.
    """
    owners = {
        node: index
        for index, nodes in reversed(list(enumerate(segments)))
        for node in nodes
        if node in level.nodes
    }
    earliest: dict[str, int] = {}
    for node in reversed(level.order):
        fed = [earliest[end.node] for end in level.consumers.get(node, ()) if end.node in earliest]
        earliest[node] = min([owners.get(node, len(segments)), *fed])
    return {node: index for node, index in owners.items() if earliest[node] == index}


def gathered(level: GraphLevel, owners: Owners) -> dict[str, int]:
    """Returns, for each node, a bit mask of the segments whose output reaches it without passing
    through another segment.
    """
    masks: dict[str, int] = {}
    for node in level.order:
        mask = 0
        for _, source in level.inputs_of(node):
            mask |= mask_of(source.node_id, owners, masks)
        masks[node] = mask
    return masks


def needed_by(level: GraphLevel, owners: Owners) -> dict[str, int]:
    """Returns, for each node, a bit mask of the segments that its output reaches without passing
    through another segment.
    """
    masks: dict[str, int] = {}
    for node in reversed(level.order):
        mask = 0
        for end in level.consumers.get(node, ()):
            mask |= mask_of(end.node, owners, masks)
        masks[node] = mask
    return masks


def mask_of(node: str, owners: Owners, masks: Mapping[str, int]) -> int:
    """Returns the segment of a node as a bit mask. For a node outside the segments, returns its
    entry in `masks`."""
    owner = owners.get(node)
    return masks.get(node, 0) if owner is None else 1 << owner


def behind(level: GraphLevel, owners: Owners) -> dict[str, int]:
    """Returns, for each node, a bit mask of all segments that it depends on, except its own."""
    masks: dict[str, int] = {}
    for node in level.order:
        mask = 0
        for _, source in level.inputs_of(node):
            mask |= masks.get(source.node_id, 0) | mask_of(source.node_id, owners, {})
        masks[node] = mask
    return {
        node: mask & ~(1 << owners[node]) if node in owners else mask
        for node, mask in masks.items()
    }


def leading_out(level: GraphLevel, owners: Owners) -> set[str]:
    """Returns the nodes outside the segments that lead to something other than segments, such as a
    saver or a node that merges segments.

    Other nodes of the rest only pass data from one segment to the next.
    """
    leading: set[str] = set()
    for node in reversed(level.order):
        ends = level.consumers.get(node, ())
        if node not in owners and (not ends or any(end.node in leading for end in ends)):
            leading.add(node)
    return leading


ROUNDS = 4  # maximum distance of the neighbors that are included when two nodes are compared
Looks = Mapping[str, Hashable]


def counterparts(
    level: GraphLevel, ours: Collection[str], theirs: Collection[str]
) -> dict[str, str]:
    """Pairs each node in `ours` with its counterpart in `theirs`, if it has one."""
    pairs: dict[str, str] = {}
    paired: set[str] = set()
    for looks in reversed(_rounds(level, ours, theirs)):
        waiting: dict[Hashable, list[str]] = {}
        for node in theirs:
            if node not in paired:
                waiting.setdefault(looks[node], []).append(node)
        for node in ours:
            same = waiting.get(looks[node])
            if node not in pairs and same:
                pairs[node] = same.pop(0)
                paired.add(pairs[node])
    return pairs


def follow(
    level: GraphLevel, pairs: Mapping[str, str], ours: Collection[str], theirs: Collection[str]
) -> dict[str, str]:
    """Returns the pairs, extended to nodes outside the segments that follow only one segment, such
    as its saver.

    Only nodes in `ours` and `theirs` are added.
    """
    twins = dict(pairs)
    paired = set(twins.values())
    pending = list(pairs.items())
    for one, other in pending:
        candidates = [end for end in level.consumers.get(other, ()) if end.node in theirs]
        for end in level.consumers.get(one, ()):
            if end.node in twins or end.node not in ours:
                continue
            same = [
                twin.node
                for twin in candidates
                if twin.node not in paired and _way(level, twin) == _way(level, end)
            ]
            if same:
                twins[end.node] = _likest(level, end.node, same)
                paired.add(twins[end.node])
                pending.append((end.node, twins[end.node]))
    return twins


def corresponding_output(level: GraphLevel, source: InputSource, node: str) -> InputSource | None:
    """Returns the corresponding output of a counterpart. Two instances may have different
    definitions, so the output is then found by type and position."""
    ours, theirs = level.nodes[source.node_id], level.nodes[node]
    if ours.definition == theirs.definition and source.slot < len(theirs.outputs):
        return InputSource(node, source.slot)
    output_type = level.type_of(source)
    place = ours.outputs[: source.slot].count(output_type)
    fitting = [slot for slot, output in enumerate(theirs.outputs) if output == output_type]
    return InputSource(node, fitting[min(place, len(fitting) - 1)]) if fitting else None


def kind_of(level: GraphLevel, node: str) -> Hashable:
    """Returns the class of a node. An instance is represented by the types of its outputs, because
    its definition may be one of many copies."""
    wired = level.nodes[node]
    return wired.node.type if wired.definition is None else ("subgraph", wired.outputs)


def _rounds(level: GraphLevel, ours: Collection[str], theirs: Collection[str]) -> list[Looks]:
    """Labels nodes by the classes and titles of increasingly large neighborhoods. Nodes with the
    same label have the same kind of neighborhood.
    """
    # Nodes that feed both segments, such as a shared model loader, help to tell the nodes of a
    # segment apart.
    shared = _feeding(level, ours) & _feeding(level, theirs)
    segments: Owners = {**dict.fromkeys(ours, 0), **dict.fromkeys(theirs, 1)}
    kinds = {node: (kind_of(level, node), _purpose(level, node)) for node in segments}
    titles = {node: base_of(level.nodes[node].node.title) for node in segments}
    rounds: list[Looks] = [kinds, {node: (kinds[node], titles[node]) for node in segments}]
    for _ in range(ROUNDS):
        rounds.append(_numbers(_Neighbours(level, segments, shared, rounds[-1])))
    return rounds


def _feeding(level: GraphLevel, nodes: Collection[str]) -> set[str]:
    return {source.node_id for node in nodes for _, source in level.inputs_of(node)}


def _purpose(level: GraphLevel, node: str) -> Hashable:
    """Returns the classes of the nodes that feed a node without outputs, or None for other nodes.
    These classes show whether a saver belongs to a segment or to the whole workflow.
    """
    if level.nodes[node].outputs:
        return None
    return frozenset(kind_of(level, source.node_id) for _, source in level.inputs_of(node))


class _Neighbours(NamedTuple):
    """The current labels of a node's neighbors."""

    level: GraphLevel
    segments: Owners
    shared: Collection[str]
    looks: Looks

    def above(self, node: str) -> Iterator[Hashable]:
        for end, source in self.level.inputs_of(node):
            yield self.level.input_name(end), source.slot, self._label(source.node_id, node)

    def below(self, node: str) -> Iterator[Hashable]:
        for end in self.level.consumers.get(node, ()):
            if self.segments.get(end.node) == self.segments[node]:
                slot = self.level.sources[end].slot
                yield slot, self.level.input_name(end), self.looks[end.node]

    def _label(self, other: str, node: str) -> Hashable:
        if self.segments.get(other) == self.segments[node]:
            return self.looks[other]
        return other if other in self.shared else kind_of(self.level, other)


def _numbers(seen: _Neighbours) -> Looks:
    """Replaces labels with numbers, because nested labels would grow with each round."""
    numbers: dict[Hashable, int] = {}
    result = {}
    for node in seen.segments:
        container = (seen.looks[node], frozenset(seen.above(node)), frozenset(seen.below(node)))
        result[node] = numbers.setdefault(container, len(numbers))
    return result


def _way(level: GraphLevel, end: End) -> Hashable:
    """Returns the output, the class and the input that a link connects."""
    return level.sources[end].slot, kind_of(level, end.node), level.input_name(end)


def _likest(level: GraphLevel, node: str, candidates: list[str]) -> str:
    title = base_of(level.nodes[node].node.title)
    same = [other for other in candidates if base_of(level.nodes[other].node.title) == title]
    return (same or candidates)[0]


KINDS = ("group", "instance", "title")
# minimum share of the smaller segment's nodes that its neighbor must also have
LIKENESS_MIN = 0.5


class _Candidate(NamedTuple):
    family: Family
    owners: Mapping[str, int]
    before: Mapping[str, int]  # for each node, a bit mask of the segments that reach it
    behind: Mapping[str, int]  # for each node, a bit mask of the segments that it reaches
    is_direct: bool  # each segment feeds the next one; otherwise, other nodes merge them


def find_segments(document: dict[str, Any]) -> tuple[Chain, ...]:
    """Returns all chains of numbered segments. The chains in the root graph come first."""
    return chains_of(document, parse(document), NodeTypes({}))


def chains_of(document: JsonObject, workflow: Workflow, types: NodeTypes) -> tuple[Chain, ...]:
    paths = graph_paths(document)
    dead = dead_definitions(workflow)
    result: list[Chain] = []
    for graph in (workflow.root, *workflow.definitions.values()):
        families = find_families(graph, graph_at(document, paths[graph.id]), workflow)
        if families:
            level = read_level(workflow, graph.id, types, all_on=True)
            chains = _chains(families, level)
            result.extend(_chain(family, graph, dead) for family in chains)
    return tuple(result)


def _chains(families: Sequence[Family], level: GraphLevel) -> Iterator[Family]:
    candidates = [
        candidate for family in families if (candidate := _candidate(family, level)) is not None
    ]
    candidates.sort(key=lambda one: _rank(one, level))
    accepted: list[_Candidate] = []
    for candidate in candidates:
        container = next((one for one in accepted if _contains(one, candidate)), None)
        if container is None:
            accepted.append(candidate)
        else:
            accepted[accepted.index(container)] = container._replace(
                family=_merged(container, candidate)
            )
    return (candidate.family for candidate in accepted)


def _candidate(family: Family, level: GraphLevel) -> _Candidate | None:
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


def _are_alike(segments: Sequence[Sequence[str]], level: GraphLevel) -> bool:
    """Checks whether at least half of the adjacent segments are alike, because the first and last
    one may differ."""
    kinds = [Counter(kind_of(level, node) for node in nodes) for nodes in segments]
    alike = sum(_likeness(one, other) >= LIKENESS_MIN for one, other in pairwise(kinds))
    return 2 * alike >= len(kinds) - 1


def _likeness(one: Counter[Hashable], other: Counter[Hashable]) -> float:
    return (one & other).total() / min(one.total(), other.total())


def _is_direct(
    segments: Sequence[Sequence[str]],
    owners: Mapping[str, int],
    before: Mapping[str, int],
    level: GraphLevel,
) -> bool:
    """Checks whether each segment is fed by the previous one."""
    for index in range(1, len(segments)):
        feeding = 0
        for node in segments[index]:
            for _, source in level.inputs_of(node):
                feeding |= mask_of(source.node_id, owners, before)
        if not feeding >> (index - 1) & 1:
            return False
    return True


def _is_gathered(
    segments: Sequence[Sequence[str]], before: Mapping[str, int], level: GraphLevel
) -> bool:
    """Checks whether each segment contains more than loaders, and whether each pair of adjacent
    segments is merged by some node."""
    if not all(any(_is_fed(node, level) for node in nodes) for nodes in segments):
        return False
    masks = {mask for node, mask in before.items() if node != SUBGRAPH_OUTPUT_ID}
    return all(any(mask >> index & 3 == 3 for mask in masks) for index in range(len(segments) - 1))


def _is_fed(node: str, level: GraphLevel) -> bool:
    return next(level.inputs_of(node), None) is not None


def _rank(candidate: _Candidate, level: GraphLevel) -> tuple[bool, int, int, int]:
    """Returns a sort key to decide which of two candidates describes the same parts better: by data
    flow, kind and size."""
    first = next(index for index, node in enumerate(level.order) if node in candidate.owners)
    kind = KINDS.index(candidate.family.kind)
    return not candidate.is_direct, kind, -len(candidate.owners), first


def _contains(container: _Candidate, candidate: _Candidate) -> bool:
    """Checks whether every node of the candidate is in a segment, is fed by only one segment or
    feeds only one."""
    return all(
        node in container.owners
        or container.before[node].bit_count() == 1
        or container.behind[node].bit_count() == 1
        for node in candidate.owners
    )


def _merged(container: _Candidate, candidate: _Candidate) -> Family:
    """Adds titled nodes to the segment that they follow and share a number with."""
    ours, theirs = container.family, candidate.family
    numbers = [segment.number for segment in ours.segments]
    if theirs.kind != "title" or numbers != [segment.number for segment in theirs.segments]:
        return ours
    segments = []
    for index, (segment, more) in enumerate(zip(ours.segments, theirs.segments, strict=True)):
        if any(container.before.get(node, 0) != 1 << index for node in more.nodes):
            return ours
        segments.append(segment._replace(nodes=tuple(dict.fromkeys(segment.nodes + more.nodes))))
    return ours._replace(segments=tuple(segments))


def _chain(family: Family, graph: WorkflowGraph, dead: frozenset[str]) -> Chain:
    nodes = {node.id: node for node in graph.nodes}
    on: list[Segment] = []
    off: list[Segment] = []
    for segment in family.segments:
        members = [nodes[node] for node in segment.nodes]
        (on if _makes_something(members, dead) else off).append(segment)
    return Chain(family.kind, family.name, tuple(on), tuple(off), graph.id)


def _makes_something(nodes: Sequence[Node], dead: frozenset[str]) -> bool:
    """Checks whether any node with linked inputs is active. If no node of the segment has linked
    inputs, checks whether any node is active."""
    executed = [node for node in nodes if not is_virtual(node.type)]
    fed = [node for node in executed if any(slot.link is not None for slot in node.inputs)]
    return any(not node.is_inactive and node.type not in dead for node in fed or executed)
