"""Decides how a chain is closed behind the segments that are kept. Pure: a plan, no changes.

Later segments go off. What they fed is treated by what it is:

- what follows one segment only goes off with it: a saver per segment, or a link to the next one;
- what gathers segments (the running join of old and new frames, or one node with an input for each)
  loses the inputs of those that are gone; left with one, it is passed through;
- what comes after the last segment is fed by the counterpart in the last one that is kept.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from comfyfleet.workflow.model import ANY_TYPE, SUBGRAPH_OUTPUT_ID
from comfyfleet.workflow.resolve import Source
from comfyfleet.workflow.switching.counterparts import (
    corresponding_output,
    counterparts,
    follow,
)
from comfyfleet.workflow.switching.flows import (
    behind,
    gathered,
    leading_out,
    mask_of,
    owners_of,
)
from comfyfleet.workflow.switching.levels import End, Level


class Plan(NamedTuple):
    off: frozenset[str]
    moves: dict[End, Source]  # inputs that get another source
    cuts: frozenset[End]  # inputs that lose theirs, as they should
    lost: tuple[End, ...]  # inputs for which no other source was found
    staying: tuple[str, ...]  # nodes that stand in a segment that goes, and stay: others need them


def plan_closing(level: Level, segments: Sequence[Sequence[str]], keep: int) -> Plan:
    """Keeps the first `keep` of the segments."""
    closing = _Closing(level, segments, keep)
    closing.run()
    return closing.plan()


class _Closing:
    """The state of one decision, node by node in the order of execution."""

    def __init__(self, level: Level, segments: Sequence[Sequence[str]], keep: int) -> None:
        self.level = level
        self.keep = keep
        self.last = len(segments) - 1
        self.members = segments
        self.owners = owners_of(level, segments)
        self._pairs: dict[int, dict[str, str]] = {}
        self._release_tail()
        self.nodes = _by_segment(self.owners, len(segments))
        self.masks = gathered(level, self.owners)
        self.following = self._followers()
        self.leading_out = leading_out(level, self.owners)
        self.behind = behind(level, self.owners)
        followers = self._twins(self.last, self.last - 1)
        self.followers = {node for node in followers if node not in self.owners}
        self.off: set[str] = set()
        self.passed: set[str] = set()  # off, and what came in is passed on
        self.replacements: dict[Source, Source] = {}
        self.moves: dict[End, Source] = {}
        self.cuts: set[End] = set()
        self.lost: list[End] = []
        self.staying: set[str] = set()

    def run(self) -> None:
        for node in self.level.order:
            owner = self.owners.get(node)
            if owner is None:
                self._decide(node)
            elif owner >= self.keep:
                self._switch_off(node, owner)
        self._keep_what_stays()
        self._drop_unneeded()

    def plan(self) -> Plan:
        ends = (*self.moves, *self.cuts)
        unaffected = {end for end in ends if end.node in self.off}
        return Plan(
            off=frozenset(self.off),
            moves={end: source for end, source in self.moves.items() if end not in unaffected},
            cuts=frozenset(self.cuts - unaffected),
            lost=tuple(end for end in self.lost if end.node not in self.off),
            staying=tuple(
                node
                for nodes in self.members[self.keep :]
                for node in nodes
                if node in self.level.nodes and node not in self.off
            ),
        )

    def _release_tail(self) -> None:
        """What stands in the last segment, has no counterpart in the one before, and feeds none of
        the nodes that have one, comes after the chain: the final saver, say."""
        *_, before, own = _by_segment(self.owners, len(self.members))
        known = counterparts(self.level, own, before)
        feeding = set(known)
        for node in reversed(self.level.order):
            if any(end.node in feeding for end in self.level.consumers.get(node, ())):
                feeding.add(node)
        for node in own:
            if node not in feeding:
                del self.owners[node]

    def _followers(self) -> dict[int, set[str]]:
        """Nodes of the rest that follow one segment only, by the mask of it."""
        found: dict[int, set[str]] = {}
        for node, mask in self.masks.items():
            if mask.bit_count() == 1 and node not in self.owners:
                found.setdefault(mask, set()).add(node)
        return found

    def _twins(self, ours: int, theirs: int) -> dict[str, str]:
        pairs = counterparts(self.level, self.nodes[ours], self.nodes[theirs])
        followers = self.following.get(1 << ours, set())
        others = self.following.get(1 << theirs, set()) & self.leading_out
        return follow(self.level, pairs, followers, others)

    def _counterpart(self, node: str, segment: int) -> str | None:
        """In the last segment that is kept, or behind it."""
        if segment not in self._pairs:
            self._pairs[segment] = self._twins(segment, self.keep - 1)
        return self._pairs[segment].get(node)

    def _decide(self, node: str) -> None:
        """About a node that is in no segment."""
        mask = self.masks[node]
        gone = [end for end, source in self.level.inputs_of(node) if source.node_id in self.off]
        if gone and (node in self.followers or self._is_idle(node)):
            self._switch_off(node, self.last)
            return
        surplus = {end for end in gone if self._is_surplus(end)}
        missing = [end for end in gone if end not in surplus]
        is_extra = not mask >> self.last & 1 and node != SUBGRAPH_OUTPUT_ID
        if is_extra and any(not self._is_passed(end) for end in missing):
            self._switch_off(node, self._first_gone(mask))
            return
        for end in missing:
            self._move(end)
        if surplus:
            self._reduce(node, surplus)

    def _is_idle(self, node: str) -> bool:
        """Makes nothing and feeds nothing: the hand-over to a segment that was never added."""
        node_type = self.level.nodes[node].type
        known = node_type is not None and not node_type.is_output
        return known and not self.level.consumers.get(node)

    def _is_passed(self, end: End) -> bool:
        return self.level.sources[end].node_id in self.passed

    def _is_surplus(self, end: End) -> bool:
        """Does another input of the node hold what the segment before brought? Then the node
        gathers, and this input is not needed when its segment is gone."""
        source = self.level.sources[end]
        segment = self._first_gone(self._mask(source))
        if segment is None or source.node_id in self.passed or end.node == SUBGRAPH_OUTPUT_ID:
            return False
        before = 1 << (segment - 1)
        return any(
            other != end and self._mask(candidate) & before and self._same_type(candidate, source)
            for other, candidate in self.level.inputs_of(end.node)
        )

    def _first_gone(self, mask: int) -> int | None:
        """The first segment of a mask that is not kept."""
        gone = mask >> self.keep
        return self.keep + (gone & -gone).bit_length() - 1 if gone else None

    def _mask(self, source: Source) -> int:
        return mask_of(source.node_id, self.owners, self.masks)

    def _same_type(self, one: Source, other: Source) -> bool:
        return self.level.type_of(one) == self.level.type_of(other)

    def _move(self, end: End) -> None:
        source = self.level.sources[end]
        now = self._now(source)
        if now is not None:
            self.moves[end] = now
        elif not self.behind[source.node_id] and source.node_id in self.owners:
            self.staying.add(source.node_id)  # a loader: nothing that its segment made
        else:
            self.lost.append(end)

    def _now(self, source: Source) -> Source | None:
        return source if source.node_id not in self.off else self.replacements.get(source)

    def _reduce(self, node: str, surplus: set[End]) -> None:
        """Takes inputs from a node that gathers; with one left there is nothing to gather."""
        kind = self.level.type_of(self.level.sources[min(surplus)])
        left = [
            now
            for end, source in self.level.inputs_of(node)
            if end not in surplus
            and self.level.type_of(source) == kind
            and (now := self._now(source)) is not None
        ]
        outputs = self._used_outputs(node)
        if len(left) > 1 or (left and not any(self.level.type_of(out) == kind for out in outputs)):
            self.cuts.update(surplus)
            return
        self.off.add(node)
        self.passed.add(node)
        for output in outputs:
            if left and self.level.type_of(output) == kind:
                self.replacements[output] = left[0]

    def _used_outputs(self, node: str) -> list[Source]:
        ends = self.level.consumers.get(node, ())
        return list(dict.fromkeys(self.level.sources[end] for end in ends))

    def _switch_off(self, node: str, segment: int | None) -> None:
        self.off.add(node)
        twin = None if segment is None else self._counterpart(node, segment)
        for output in self._used_outputs(node):
            found = corresponding_output(self.level, output, twin) if twin is not None else None
            found = found or self._passing(node, output)
            if found is not None:
                self.replacements[output] = found

    def _passing(self, node: str, output: Source) -> Source | None:
        """Without a counterpart: what the node was given of the type that it gives. What comes
        along the chain goes before what comes from elsewhere."""
        if self.level.type_of(output) in (ANY_TYPE, ""):
            return None
        fitting = [
            source
            for _, source in self.level.inputs_of(node)
            if self._same_type(source, output) and self._now(source) is not None
        ]
        fitting.sort(key=lambda source: not self._mask(source))
        return self._now(fitting[0]) if fitting else None

    def _keep_what_stays(self) -> None:
        pending = list(self.staying)
        for node in pending:
            self.off.discard(node)
            for _, source in self.level.inputs_of(node):
                if source.node_id in self.off:
                    pending.append(source.node_id)

    def _drop_unneeded(self) -> None:
        """Nodes of the rest that fed nothing but what is off: texts per segment, say. Where the
        class is not known they stay on, for they might save something."""
        needed = {source.node_id for source in self.moves.values()}
        for node in reversed(self.level.order):
            node_type = self.level.nodes[node].type
            ends = self.level.consumers.get(node, ())
            if node in self.owners or node in needed or node_type is None or node_type.is_output:
                continue
            if ends and all(self._lets_go(end) for end in ends):
                self.off.add(node)

    def _lets_go(self, end: End) -> bool:
        return end.node in self.off or end in self.cuts or end in self.moves


def _by_segment(owners: Mapping[str, int], count: int) -> list[list[str]]:
    nodes: list[list[str]] = [[] for _ in range(count)]
    for node, segment in owners.items():
        nodes[segment].append(node)
    return nodes
