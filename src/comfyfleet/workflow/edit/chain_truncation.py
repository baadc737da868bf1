"""Keeps the first segments of a chain and reconnects the nodes after it. First creates a plan, and
then a new document."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidInput
from comfyfleet.workflow.conversion import convert
from comfyfleet.workflow.edit.chains import (
    End,
    GraphLevel,
    behind,
    chains_of,
    corresponding_output,
    counterparts,
    follow,
    gathered,
    leading_out,
    mask_of,
    owners_of,
    read_level,
    tidy,
)
from comfyfleet.workflow.edit.documents import (
    JsonObject,
    count_instances,
    graph_paths,
    with_all_inside,
    with_graph,
    with_links_moved,
    with_nodes,
    without_links,
)
from comfyfleet.workflow.edit.node_modes import Chain, Switched, enable_nodes
from comfyfleet.workflow.edit.selectors import place_of
from comfyfleet.workflow.model import (
    ANY_TYPE,
    SUBGRAPH_OUTPUT_ID,
    Mode,
    Workflow,
    WorkflowGraph,
    join_places,
)
from comfyfleet.workflow.node_behaviours import behaviour_of
from comfyfleet.workflow.object_info import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.resolve import InputSource


def find_chain(chains: Sequence[Chain], name: str | None) -> Chain:
    """Returns the chain with this name. The form `kind:name`, such as `group:Extend`, distinguishes
    chains with the same name."""
    if not chains:
        raise InvalidInput("this workflow has no chain of numbered segments")
    matching = [chain for chain in chains if name is None or _is_called(chain, name)]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise InvalidInput(f"no chain is named {name}; the workflow has {_listed(chains)}")
    hint = "choose one" if name is None else "specify the kind as well (group:NAME)"
    raise InvalidInput(f"there are several chains; {hint}: {_listed(matching)}")


def check_count(chain: Chain, count: int) -> None:
    segment_count = len(chain.segments)
    if count < 1:
        raise InvalidInput("at least one segment must be kept")
    if count > segment_count + len(chain.off):
        off = f", even with the {len(chain.off)} that are off" if chain.off else ""
        raise InvalidInput(f"can't keep {count} segments of {described(chain)}{off}")


def described(chain: Chain) -> str:
    count = len(chain.segments)
    return f'"{chain.name}" ({chain.kind}, {count} segment{"" if count == 1 else "s"})'


def _is_called(chain: Chain, name: str) -> bool:
    kind, _, rest = name.partition(":")
    own_name = rest if kind == chain.kind else name
    return tidy(own_name).casefold() == chain.name.casefold()


def _listed(chains: Sequence[Chain]) -> str:
    return ", ".join(described(chain) for chain in chains)


class TruncationPlan(NamedTuple):
    off: frozenset[str]
    moves: dict[End, InputSource]  # inputs that get another source
    cuts: frozenset[End]  # inputs that intentionally lose their source
    lost: tuple[End, ...]  # inputs that have lost their source without a replacement
    # nodes of removed segments that stay on, because other nodes need them
    staying: tuple[str, ...]


def plan_truncation(
    level: GraphLevel, segments: Sequence[Sequence[str]], keep: int
) -> TruncationPlan:
    """Plans how to keep the first `keep` segments."""
    closing = _Truncation(level, segments, keep)
    closing.run()
    return closing.plan()


class _Truncation:
    """Holds the state of a truncation and decides about the nodes in the order of execution."""

    def __init__(self, level: GraphLevel, segments: Sequence[Sequence[str]], keep: int) -> None:
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
        self.passed: set[str] = set()  # switched-off nodes that pass on their input
        self.replacements: dict[InputSource, InputSource] = {}
        self.moves: dict[End, InputSource] = {}
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

    def plan(self) -> TruncationPlan:
        ends = (*self.moves, *self.cuts)
        unaffected = {end for end in ends if end.node in self.off}
        return TruncationPlan(
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
        """Removes nodes from the last segment that come after the chain, such as the final saver.

        These are nodes without a counterpart in the previous segment that don't feed a node with
        one.
        """
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
        """Returns the nodes outside the segments that follow only one segment, by the mask of that
        segment."""
        nodes_by_mask: dict[int, set[str]] = {}
        for node, mask in self.masks.items():
            if mask.bit_count() == 1 and node not in self.owners:
                nodes_by_mask.setdefault(mask, set()).add(node)
        return nodes_by_mask

    def _twins(self, ours: int, theirs: int) -> dict[str, str]:
        pairs = counterparts(self.level, self.nodes[ours], self.nodes[theirs])
        followers = self.following.get(1 << ours, set())
        others = self.following.get(1 << theirs, set()) & self.leading_out
        return follow(self.level, pairs, followers, others)

    def _counterpart(self, node: str, segment: int) -> str | None:
        """Returns the counterpart of a node in the last kept segment or after it."""
        if segment not in self._pairs:
            self._pairs[segment] = self._twins(segment, self.keep - 1)
        return self._pairs[segment].get(node)

    def _decide(self, node: str) -> None:
        """Decides whether a node outside the segments stays on, and which sources its inputs
        get."""
        mask = self.masks[node]
        unfed = [end for end, source in self.level.inputs_of(node) if source.node_id in self.off]
        if unfed and (node in self.followers or self._is_idle(node)):
            self._switch_off(node, self.last)
            return
        surplus = {end for end in unfed if self._is_surplus(end)}
        missing = [end for end in unfed if end not in surplus]
        is_extra = not mask >> self.last & 1 and node != SUBGRAPH_OUTPUT_ID
        if is_extra and any(not self._passes_kept_data(end) for end in missing):
            self._switch_off(node, self._first_gone(mask))
            return
        for end in missing:
            self._move(end)
        if surplus:
            self._reduce(node, surplus)

    def _is_idle(self, node: str) -> bool:
        """Checks whether a node saves nothing and feeds no other node. Such a node was meant for a
        segment that was never added."""
        node_type = self.level.nodes[node].type
        is_known = node_type is not None and not node_type.is_output
        return is_known and not self.level.consumers.get(node)

    def _passes_kept_data(self, end: End) -> bool:
        return self.level.sources[end].node_id in self.passed

    def _is_surplus(self, end: End) -> bool:
        """Checks whether another input of the node takes the output of the previous segment.

        In that case, the node merges segments, and this input isn't needed once its segment is
        removed.
        """
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
        """Returns the first segment of a mask that isn't kept, or None if all are kept."""
        removed = mask >> self.keep
        return self.keep + (removed & -removed).bit_length() - 1 if removed else None

    def _mask(self, source: InputSource) -> int:
        return mask_of(source.node_id, self.owners, self.masks)

    def _same_type(self, one: InputSource, other: InputSource) -> bool:
        return self.level.type_of(one) == self.level.type_of(other)

    def _move(self, end: End) -> None:
        source = self.level.sources[end]
        now = self._current_source(source)
        if now is not None:
            self.moves[end] = now
        elif not self.behind[source.node_id] and source.node_id in self.owners:
            self.staying.add(source.node_id)  # a loader that doesn't depend on its segment
        else:
            self.lost.append(end)

    def _current_source(self, source: InputSource) -> InputSource | None:
        return source if source.node_id not in self.off else self.replacements.get(source)

    def _reduce(self, node: str, surplus: set[End]) -> None:
        """Removes inputs from a node that merges. If only one input remains, there is nothing to
        merge, so the node is switched off."""
        kind = self.level.type_of(self.level.sources[min(surplus)])
        remaining = [
            now
            for end, source in self.level.inputs_of(node)
            if end not in surplus
            and self.level.type_of(source) == kind
            and (now := self._current_source(source)) is not None
        ]
        outputs = self._used_outputs(node)
        if len(remaining) > 1 or (
            remaining and not any(self.level.type_of(out) == kind for out in outputs)
        ):
            self.cuts.update(surplus)
            return
        self.off.add(node)
        self.passed.add(node)
        for output in outputs:
            if remaining and self.level.type_of(output) == kind:
                self.replacements[output] = remaining[0]

    def _used_outputs(self, node: str) -> list[InputSource]:
        ends = self.level.consumers.get(node, ())
        return list(dict.fromkeys(self.level.sources[end] for end in ends))

    def _switch_off(self, node: str, segment: int | None) -> None:
        self.off.add(node)
        twin = None if segment is None else self._counterpart(node, segment)
        for output in self._used_outputs(node):
            replacement = (
                corresponding_output(self.level, output, twin) if twin is not None else None
            )
            replacement = replacement or self._passing(node, output)
            if replacement is not None:
                self.replacements[output] = replacement

    def _passing(self, node: str, output: InputSource) -> InputSource | None:
        """Returns the input that a node without a counterpart would pass on: one with the same type
        as the output.

        Inputs that come from the chain take precedence over others.
        """
        if self.level.type_of(output) in (ANY_TYPE, ""):
            return None
        fitting = [
            source
            for _, source in self.level.inputs_of(node)
            if self._same_type(source, output) and self._current_source(source) is not None
        ]
        fitting.sort(key=lambda source: not self._mask(source))
        return self._current_source(fitting[0]) if fitting else None

    def _keep_what_stays(self) -> None:
        pending = list(self.staying)
        for node in pending:
            self.off.discard(node)
            for _, source in self.level.inputs_of(node):
                if source.node_id in self.off:
                    pending.append(source.node_id)

    def _drop_unneeded(self) -> None:
        """Switches off nodes outside the segments if they only fed nodes that are off, such as the
        prompts of removed segments.

        Nodes of an unknown class stay on, because they might save something.
        """
        needed = {source.node_id for source in self.moves.values()}
        for node in reversed(self.level.order):
            node_type = self.level.nodes[node].type
            ends = self.level.consumers.get(node, ())
            if node in self.owners or node in needed or node_type is None or node_type.is_output:
                continue
            if ends and all(self._can_drop_link(end) for end in ends):
                self.off.add(node)

    def _can_drop_link(self, end: End) -> bool:
        return end.node in self.off or end in self.cuts or end in self.moves


def _by_segment(owners: Mapping[str, int], count: int) -> list[list[str]]:
    nodes: list[list[str]] = [[] for _ in range(count)]
    for node, segment in owners.items():
        nodes[segment].append(node)
    return nodes


# A node with this button has as many inputs as its first value specifies.
GROWS_BY_BUTTON = "Update inputs"
LAST_NUMBER = re.compile(r"[0-9]{1,6}$")


class AppliedPlan(NamedTuple):
    document: JsonObject
    only_cut: JsonObject  # the original document without the surplus links
    modes: Mapping[str, Mode]
    moves: Mapping[End, InputSource]


def apply_plan(
    document: JsonObject,
    workflow: Workflow,
    graph_id: str,
    plan: TruncationPlan,
    *,
    level: GraphLevel,
    types: NodeTypes,
) -> AppliedPlan:
    """Applies a plan. Moves a link only if bypassing all nodes that are off would not have the same
    effect."""
    graph = workflow.definitions[graph_id] if graph_id else workflow.root
    edited = partial(_edited, document, graph, level, plan)
    bypassed = edited(dict.fromkeys(plan.off, Mode.BYPASSED), {})
    bypassed_sources = read_level(parse(bypassed), graph_id, types).sources
    moves = {
        end: source for end, source in plan.moves.items() if bypassed_sources.get(end) != source
    }
    through = _passed_through(level, plan.off, plan.moves.keys() - moves.keys())
    modes = {node: Mode.BYPASSED if node in through else Mode.MUTED for node in plan.off}
    result = edited(modes, moves)
    if graph_id:
        # Inside a subgraph, the nodes of an instance are sent even if the instance is off, as in
        # the editor.
        for index, node in enumerate(graph.nodes):
            if node.id in modes and node.type in workflow.definitions:
                result = with_all_inside(
                    result, graph_id, index, Mode.MUTED, workflow.definitions.keys()
                )
    return AppliedPlan(result, edited({}, {}), modes, moves)


def _passed_through(level: GraphLevel, off: Collection[str], ends: Collection[End]) -> set[str]:
    """Returns the nodes that are off and feed one of the inputs, directly or through other nodes
    that are off."""
    through: set[str] = set()
    pending = [level.sources[end].node_id for end in ends]
    while pending:
        node = pending.pop()
        if node in off and node not in through:
            through.add(node)
            pending.extend(source.node_id for _, source in level.inputs_of(node))
    return through


def _edited(
    document: JsonObject,
    graph: WorkflowGraph,
    level: GraphLevel,
    plan: TruncationPlan,
    modes: Mapping[str, Mode],
    moves: Mapping[End, InputSource],
) -> JsonObject:
    changes: dict[int, dict[str, Any]] = {}
    reduced = dict(_counts_of_inputs(level, plan.cuts))
    for index, node in enumerate(graph.nodes):
        if node.id in modes:
            changes[index] = {"mode": int(modes[node.id])}
        elif node.id in reduced and isinstance(node.values, list):
            changes[index] = {"widgets_values": [reduced[node.id], *node.values[1:]]}
    cuts = {level.links[end] for end in plan.cuts}
    moved = {level.links[end]: source for end, source in moves.items()}

    def edit(saved: JsonObject) -> JsonObject:
        return with_links_moved(without_links(with_nodes(saved, changes), cuts), moved)

    return with_graph(document, graph_paths(document)[graph.id], edit)


def _counts_of_inputs(level: GraphLevel, cuts: Collection[End]) -> Iterator[tuple[str, int]]:
    """Yields the new number of inputs of each node that stores this number in a widget."""
    for node in {end.node for end in cuts}:
        behaviour = behaviour_of(level.nodes[node].node.type)
        if behaviour is None or GROWS_BY_BUTTON not in behaviour.buttons:
            continue
        names = [level.input_name(end) for end, _ in level.inputs_of(node) if end not in cuts]
        numbers = [int(match.group()) for name in names if (match := LAST_NUMBER.search(name))]
        if numbers:
            yield node, max(numbers)


NODES_LISTED_MAX = 12


def keep_segments(
    document: dict[str, Any],
    count: int,
    *,
    chain: str | None = None,
    object_info: Mapping[str, Any] | None = None,
) -> Switched:
    """Switches off all segments except the first `count`, and feeds the nodes after the chain from
    the last kept segment. If fewer than `count` segments are on, switches on the next ones.

    Nodes that lead to the nodes after the chain are bypassed, and dead branches are muted. A link
    is moved only if a bypass would pass on nothing or the wrong value. Nodes behind a moved link
    are muted. Nodes that are never executed (reroutes, Set and Get, notes) don't change. Without
    `object_info`, the saved slot types are used.

    Segments at the end that are already off are part of the chain, which then ends after the last
    kept segment. Other segments that are off, and instances with nothing active inside, count only
    if they are needed. Raises InvalidInput if an input would lose its link without a replacement,
    or if an output that depends on the chain isn't fed.
    """
    workflow = parse(document)
    types = NodeTypes(object_info or {})
    chosen = find_chain(chains_of(document, workflow, types), chain)
    check_count(chosen, count)
    depending = _ChainOutputs(chosen, read_level(workflow, chosen.graph, types, all_on=True), types)
    if count == len(chosen.segments) and not depending.unfed(document, object_info or {}):
        return Switched(document, (f"kept all of {described(chosen)}",))
    if count > len(chosen.segments) or _ends_off(chosen):
        result = _enable_then_truncate(document, chosen, count, object_info, depending.level)
    elif count == len(chosen.segments):
        result = Switched(document)
    else:
        result = _truncate(document, workflow, chosen, count, object_info)
    unfed = depending.unfed(result.document, object_info or {})
    if unfed:
        raise InvalidInput(
            f"{described(chosen)} can't be truncated: no source remains for {', '.join(unfed)}"
        )
    return result


def _ends_off(chain: Chain) -> bool:
    """Checks whether all segments that are off come after the segments that are on."""
    if not chain.off or not chain.segments:
        return False
    return min(segment.number for segment in chain.off) > max(
        segment.number for segment in chain.segments
    )


class _ChainOutputs(NamedTuple):
    """The outputs that depend on a chain. `level` is the chain's graph as if all nodes were on."""

    chain: Chain
    level: GraphLevel
    types: NodeTypes

    def unfed(self, document: JsonObject, object_info: Mapping[str, Any]) -> list[str]:
        """Returns the required inputs of these outputs that have a link but no source."""
        workflow = parse(document)
        now = read_level(workflow, self.chain.graph, self.types)
        report = _Report(now, workflow)
        ends = (end for end in now.links if end not in now.sources and end.node in self._outputs())
        return [
            report.input(end)
            for end in ends
            if not _is_optional(object_info, now.nodes[end.node].node.type, now.input_name(end))
        ]

    def _outputs(self) -> set[str]:
        segments = [segment.nodes for segment in (*self.chain.segments, *self.chain.off)]
        owners = owners_of(self.level, segments)
        masks = gathered(self.level, owners)
        return {
            node
            for node in self.level.nodes
            if node not in owners and masks[node] and not self.level.consumers.get(node)
        }


def _truncate(
    document: JsonObject,
    workflow: Workflow,
    chosen: Chain,
    count: int,
    object_info: Mapping[str, Any] | None,
) -> Switched:
    types = NodeTypes(object_info or {})
    level = read_level(workflow, chosen.graph, types)
    plan = plan_truncation(level, [segment.nodes for segment in chosen.segments], count)
    applied = apply_plan(document, workflow, chosen.graph, plan, level=level, types=types)
    missing = _missing(applied, object_info or {})
    if missing:
        title = chosen.segments[count - 1].title
        raise InvalidInput(
            f'{described(chosen)} can\'t be truncated after "{title}": '
            f"no source remains for {', '.join(missing)}"
        )
    report = _Report(level, workflow)
    return Switched(
        applied.document,
        tuple(_done(chosen, count, applied, report)),
        tuple(_warnings(chosen, document, plan, report)),
    )


def _enable_then_truncate(
    document: JsonObject,
    chain: Chain,
    count: int,
    object_info: Mapping[str, Any] | None,
    level: GraphLevel,
) -> Switched:
    """Switches on all segments to make the chain complete, then truncates it."""
    nodes = _nodes_to_enable(document, chain, level)
    enabled = enable_nodes(document, chain.graph, nodes, chain.name)
    workflow = parse(enabled.document)
    chains = chains_of(enabled.document, workflow, NodeTypes(object_info or {}))
    complete = find_chain(
        [candidate for candidate in chains if candidate.graph == chain.graph],
        f"{chain.kind}:{chain.name}",
    )
    check_count(complete, count)
    if count >= len(complete.segments):
        result = Switched(enabled.document, (f"kept all of {described(complete)}",))
    else:
        result = _truncate(enabled.document, workflow, complete, count, object_info)
    first = sorted((*chain.segments, *chain.off), key=lambda segment: segment.number)[:count]
    titles = ", ".join(f'"{segment.title}"' for segment in first if segment in chain.off)
    return result._replace(
        done=(*((f"switched on {titles}",) if titles else ()), *result.done),
        warnings=(*enabled.warnings, *result.warnings),
    )


COMPARED_SEGMENTS = 3  # number of active segments that are compared with those in `off`


def _nodes_to_enable(document: JsonObject, chain: Chain, level: GraphLevel) -> set[str]:
    """Returns the nodes of segments that are off, except for nodes whose counterparts are also off
    in the segments that are on."""
    workflow = parse(document)
    graph = workflow.definitions[chain.graph] if chain.graph else workflow.root
    inactive = {node.id for node in graph.nodes if node.is_inactive}
    step = max(1, len(chain.segments) // COMPARED_SEGMENTS)
    compared = chain.segments[::step][:COMPARED_SEGMENTS]
    enabled: set[str] = set()
    for segment in chain.off:
        ours = [node for node in segment.nodes if node in level.nodes]
        twins: dict[str, list[str]] = {}
        for other in compared:
            theirs = [node for node in other.nodes if node in level.nodes]
            for node, twin in counterparts(level, ours, theirs).items():
                twins.setdefault(node, []).append(twin)
        enabled |= {
            node
            for node in segment.nodes
            if node not in twins or not all(twin in inactive for twin in twins[node])
        }
    return enabled


def _missing(applied: AppliedPlan, object_info: Mapping[str, Any]) -> list[str]:
    """Returns the inputs of the prompt that had a link before and have none now."""
    before = convert(applied.only_cut, object_info, unknown="keep")
    after = convert(applied.document, object_info, unknown="keep")
    return [
        join_places(f"node {key} {entry['_meta']['title']}", f"input {name}")
        for key, entry in after.items()
        for name, value in before.get(key, entry)["inputs"].items()
        if isinstance(value, list)
        and not isinstance(entry["inputs"].get(name), list)
        and not _is_optional(object_info, entry.get("class_type"), name)
    ]


def _is_optional(object_info: Mapping[str, Any], class_type: Any, name: str) -> bool:
    declared = object_info.get(class_type)
    inputs = declared.get("input") if isinstance(declared, dict) else None
    return isinstance(inputs, dict) and name not in (inputs.get("required") or {})


class _Report(NamedTuple):
    """Formats the nodes and inputs of a plan for messages."""

    level: GraphLevel
    workflow: Workflow

    def node(self, node: str) -> str:
        return place_of(self.level.nodes[node].node, self.workflow)

    def input(self, end: End) -> str:
        return join_places(self.node(end.node), f"input {self.level.input_name(end)}")


def _done(chain: Chain, count: int, applied: AppliedPlan, report: _Report) -> Iterator[str]:
    first, last = chain.segments[0].title, chain.segments[count - 1].title
    titles = f'"{first}"' if count == 1 else f'"{first}" to "{last}"'
    yield f"kept {titles} of {described(chain)}"
    for mode, word in ((Mode.BYPASSED, "bypassed"), (Mode.MUTED, "muted")):
        nodes = [node for node in report.level.nodes if applied.modes.get(node) == mode]
        if nodes:
            more = len(nodes) - NODES_LISTED_MAX
            listed = ", ".join(nodes[:NODES_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")
            yield f"{word} node{'' if len(nodes) == 1 else 's'} {listed}"
    for end, source in applied.moves.items():
        yield f"{report.input(end)} is now fed by {report.node(source.node_id)}"


def _warnings(
    chain: Chain, document: JsonObject, plan: TruncationPlan, report: _Report
) -> Iterator[str]:
    if chain.graph:
        count = count_instances(document, chain.graph, graph_paths(document))
        if count > 1:
            yield f"the chain is in a subgraph with {count} instances, all of which change"
    for node in plan.staying:
        yield f"{report.node(node)} stays on although its segment is off: other nodes need it"
    for end in plan.lost:
        yield f"{report.input(end)} has no source anymore"
