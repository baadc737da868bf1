"""Carries out the plan for a chain: modes, links and counts of inputs in a new document."""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from comfyfleet.workflow.behaviours import behaviour_of
from comfyfleet.workflow.model import Graph, Mode, Workflow
from comfyfleet.workflow.nodetypes import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.resolve import Source
from comfyfleet.workflow.switching.closing import Plan
from comfyfleet.workflow.switching.copies import with_all_inside
from comfyfleet.workflow.switching.documents import (
    JsonObject,
    graph_paths,
    with_graph,
    with_nodes,
)
from comfyfleet.workflow.switching.levels import End, Level, read_level
from comfyfleet.workflow.switching.links import with_links_moved, without_links

# A node with this button has as many inputs as its first value says.
GROWS_BY_BUTTON = "Update inputs"
LAST_NUMBER = re.compile(r"[0-9]{1,6}$")


class CarriedOut(NamedTuple):
    document: JsonObject
    only_cut: JsonObject  # the document before, but without the links that are surplus
    modes: Mapping[str, Mode]
    moves: Mapping[End, Source]


def carry_out(
    document: JsonObject,
    workflow: Workflow,
    graph_id: str,
    plan: Plan,
    *,
    level: Level,
    types: NodeTypes,
) -> CarriedOut:
    """Moves a link only where bypassing everything that is off would not do the same."""
    graph = workflow.definitions[graph_id] if graph_id else workflow.root
    edited = partial(_edited, document, graph, level, plan)
    bypassed = edited(dict.fromkeys(plan.off, Mode.BYPASSED), {})
    found = read_level(parse(bypassed), graph_id, types).sources
    moves = {end: source for end, source in plan.moves.items() if found.get(end) != source}
    through = _passed_through(level, plan.off, plan.moves.keys() - moves.keys())
    modes = {node: Mode.BYPASSED if node in through else Mode.MUTED for node in plan.off}
    result = edited(modes, moves)
    if graph_id:
        # Inside a subgraph the nodes of an instance are sent even if it is off, as the editor does it.
        for index, node in enumerate(graph.nodes):
            if node.id in modes and node.type in workflow.definitions:
                result = with_all_inside(
                    result, graph_id, index, Mode.MUTED, workflow.definitions.keys()
                )
    return CarriedOut(result, edited({}, {}), modes, moves)


def _passed_through(level: Level, off: Collection[str], ends: Collection[End]) -> set[str]:
    """What is off and feeds one of the inputs, through others that are off."""
    found: set[str] = set()
    pending = [level.sources[end].node_id for end in ends]
    while pending:
        node = pending.pop()
        if node in off and node not in found:
            found.add(node)
            pending.extend(source.node_id for _, source in level.inputs_of(node))
    return found


def _edited(
    document: JsonObject,
    graph: Graph,
    level: Level,
    plan: Plan,
    modes: Mapping[str, Mode],
    moves: Mapping[End, Source],
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


def _counts_of_inputs(level: Level, cuts: Collection[End]) -> Iterator[tuple[str, int]]:
    """How many inputs a node has from now on, if it says so itself."""
    for node in {end.node for end in cuts}:
        behaviour = behaviour_of(level.nodes[node].node.type)
        if behaviour is None or GROWS_BY_BUTTON not in behaviour.buttons:
            continue
        names = [level.input_name(end) for end, _ in level.inputs_of(node) if end not in cuts]
        numbers = [int(found.group()) for name in names if (found := LAST_NUMBER.search(name))]
        if numbers:
            yield node, max(numbers)
