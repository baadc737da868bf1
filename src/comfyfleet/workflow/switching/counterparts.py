"""Which node of one segment corresponds to which of another.

Segments are copies of each other, more or less: nodes are told apart by class, title and by what
they are linked to, the finest distinction first. What no fine one settles is left to coarser ones,
so a segment that was changed by hand still finds most of its counterparts.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import NamedTuple

from comfyfleet.workflow.resolve import Source
from comfyfleet.workflow.switching.families import base_of
from comfyfleet.workflow.switching.flows import Owners
from comfyfleet.workflow.switching.levels import End, Level

ROUNDS = 4  # how far around a node is looked
Looks = Mapping[str, Hashable]


def counterparts(level: Level, ours: Collection[str], theirs: Collection[str]) -> dict[str, str]:
    """Each of ours that has one, by its counterpart among theirs."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for looks in reversed(_rounds(level, ours, theirs)):
        waiting: dict[Hashable, list[str]] = {}
        for node in theirs:
            if node not in taken:
                waiting.setdefault(looks[node], []).append(node)
        for node in ours:
            same = waiting.get(looks[node])
            if node not in found and same:
                found[node] = same.pop(0)
                taken.add(found[node])
    return found


def follow(
    level: Level, pairs: Mapping[str, str], ours: Collection[str], theirs: Collection[str]
) -> dict[str, str]:
    """Pairs, and those further on: nodes outside that follow one segment only, such as its saver.
    `ours` and `theirs` are those that may be paired."""
    found = dict(pairs)
    taken = set(found.values())
    pending = list(pairs.items())
    for one, other in pending:
        candidates = [end for end in level.consumers.get(other, ()) if end.node in theirs]
        for end in level.consumers.get(one, ()):
            if end.node in found or end.node not in ours:
                continue
            same = [
                twin.node
                for twin in candidates
                if twin.node not in taken and _way(level, twin) == _way(level, end)
            ]
            if same:
                found[end.node] = _likest(level, end.node, same)
                taken.add(found[end.node])
                pending.append((end.node, found[end.node]))
    return found


def corresponding_output(level: Level, source: Source, node: str) -> Source | None:
    """The same output of a counterpart. Instances may have differing definitions."""
    ours, theirs = level.nodes[source.node_id], level.nodes[node]
    if ours.definition == theirs.definition and source.slot < len(theirs.outputs):
        return Source(node, source.slot)
    wanted = level.type_of(source)
    place = ours.outputs[: source.slot].count(wanted)
    fitting = [slot for slot, output in enumerate(theirs.outputs) if output == wanted]
    return Source(node, fitting[min(place, len(fitting) - 1)]) if fitting else None


def kind_of(level: Level, node: str) -> Hashable:
    """The class of a node; for an instance, whose definition may be one of many copies, what it
    puts out."""
    wired = level.nodes[node]
    return wired.node.type if wired.definition is None else ("subgraph", wired.outputs)


def _rounds(level: Level, ours: Collection[str], theirs: Collection[str]) -> list[Looks]:
    """How nodes look from ever closer; equal values look alike."""
    # One node that feeds both segments tells their nodes apart: the model of one sampler, say.
    shared = _feeding(level, ours) & _feeding(level, theirs)
    segments: Owners = {**dict.fromkeys(ours, 0), **dict.fromkeys(theirs, 1)}
    kinds = {node: (kind_of(level, node), _purpose(level, node)) for node in segments}
    titles = {node: base_of(level.nodes[node].node.title) for node in segments}
    rounds: list[Looks] = [kinds, {node: (kinds[node], titles[node]) for node in segments}]
    for _ in range(ROUNDS):
        rounds.append(_numbers(_Surroundings(level, segments, shared, rounds[-1])))
    return rounds


def _feeding(level: Level, nodes: Collection[str]) -> set[str]:
    return {source.node_id for node in nodes for _, source in level.inputs_of(node)}


def _purpose(level: Level, node: str) -> Hashable:
    """For a node without outputs what feeds it: a saver may stand for its segment or for the whole."""
    if level.nodes[node].outputs:
        return None
    return frozenset(kind_of(level, source.node_id) for _, source in level.inputs_of(node))


class _Surroundings(NamedTuple):
    """What is seen from a node: the looks of its neighbours so far."""

    level: Level
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


def _numbers(seen: _Surroundings) -> Looks:
    """One round further. Looks become numbers, or they would grow with each round."""
    numbers: dict[Hashable, int] = {}
    result = {}
    for node in seen.segments:
        around = (seen.looks[node], frozenset(seen.above(node)), frozenset(seen.below(node)))
        result[node] = numbers.setdefault(around, len(numbers))
    return result


def _way(level: Level, end: End) -> Hashable:
    """Through which output, into which input of what."""
    return level.sources[end].slot, kind_of(level, end.node), level.input_name(end)


def _likest(level: Level, node: str, candidates: list[str]) -> str:
    title = base_of(level.nodes[node].node.title)
    same = [other for other in candidates if base_of(level.nodes[other].node.title) == title]
    return (same or candidates)[0]
