"""Wires graphs: gives every node its inputs in slot order, with their links, types and widget
values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.workflow.model import (
    ANY_TYPE,
    DEFAULT_LIMITS,
    INACTIVE,
    SUBGRAPH_INPUT_ID,
    Limits,
    Link,
    Node,
    NodeSlot,
    WorkflowGraph,
    new_tuple,
)
from comfyfleet.workflow.node_behaviours import BEHAVIOURS, is_virtual
from comfyfleet.workflow.node_inputs import (
    Input,
    InputLinker,
    Widget,
    link_dynamic_inputs,
    link_inputs,
)
from comfyfleet.workflow.object_info import MatchGroups, NodeType, NodeTypes, inputs_of
from comfyfleet.workflow.widget_values import WidgetValues, as_laid_out, assign_widget_values


class WiredNode(NamedTuple):
    """A node with its inputs, outputs and widget values.

    `definition` is set for instances of a subgraph, and `type` for nodes that the server knows.
    """

    node: Node
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    type: NodeType | None = None
    widgets: tuple[Widget, ...] = ()
    values: Mapping[str, Any] = {}
    value_slots: int = 0
    definition: str | None = None
    is_executed: bool = False  # neither virtual nor muted nor bypassed

    @property
    def is_virtual(self) -> bool:
        return self.definition is not None or (self.type is None and is_virtual(self.node.type))


Links = Mapping[int, Link]  # the links that end at one node, by id
NO_LINKS: Links = {}


class WiredGraph(NamedTuple):
    graph: WorkflowGraph
    nodes: Mapping[str, WiredNode]


def wire(
    graph: WorkflowGraph,
    types: NodeTypes,
    definitions: Mapping[str, WorkflowGraph],
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> WiredGraph:
    graph = one_link_per_input(graph)
    by_target: dict[str, dict[int, Link]] = {}
    for number, link in graph.links.items():
        if link.target in by_target:
            by_target[link.target][number] = link
        else:
            by_target[link.target] = {number: link}
    nodes = {}
    for node in graph.nodes:
        links = by_target.get(node.id, NO_LINKS)
        definition = definitions.get(node.type)
        if definition is not None:
            nodes[node.id] = _wire_instance(node, definition, links)
        else:
            nodes[node.id] = wire_node(node, types.get(node.type), links, limits=limits)
    return WiredGraph(graph, nodes)


def _wire_instance(node: Node, definition: WorkflowGraph, links: Links) -> WiredNode:
    slots = [Input(port.name, port.type) for port in definition.inputs]
    outputs = tuple(port.type for port in definition.outputs)
    inputs = link_inputs(slots, node.inputs, list(links.values()))
    return WiredNode(node, tuple(inputs), outputs, definition=definition.id)


def wire_node(
    node: Node,
    node_type: NodeType | None,
    links: Links,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> WiredNode:
    if node_type is None:
        saved = [Input(slot.name, slot.type, slot.widget) for slot in node.inputs]
        outputs = node.outputs
        if is_virtual(node.type):  # a virtual node has its slots even if they were not saved
            saved = saved or [Input("", ANY_TYPE)]
            outputs = outputs or (ANY_TYPE,)
        linked = tuple(link_inputs(saved, node.inputs, list(links.values())))
        return WiredNode(node, linked, outputs, values=_shown_value(node))
    assigned = assign_widget_values(node_type, node, limits=limits)
    outputs = node_type.outputs
    if len(node.outputs) > len(outputs):
        outputs = (*outputs, *node.outputs[len(outputs) :])
    inputs = _linked_by_name(node, node_type, links)
    if inputs is None:
        inputs = _linked_step_by_step(node, node_type, assigned, links)
    is_executed = node.mode not in INACTIVE
    return new_tuple(WiredNode, (node, inputs, outputs, node_type, *assigned, None, is_executed))


def _linked_by_name(node: Node, node_type: NodeType, links: Links) -> tuple[Input, ...] | None:
    """Links inputs by name, which is the fast path. Returns None if the saved inputs differ from
    the inputs of the class."""
    if node_type.is_dynamic:
        return None
    if not links:
        return node_type.inputs
    inputs = list(node_type.inputs)
    placed = 0
    for slot in node.inputs:
        index = node_type.slots.get(slot.name)
        if index is None:
            return None
        if slot.link is None:
            continue
        name, kind, widget, existing = inputs[index]
        link = links.get(slot.link)
        if link is not None:
            if existing is not None:
                return None
            placed += 1
            inputs[index] = new_tuple(Input, (name, kind, widget, link))
    return tuple(inputs) if placed == len(links) else None


def _linked_step_by_step(
    node: Node, node_type: NodeType, assigned: WidgetValues, links: Links
) -> tuple[Input, ...]:
    if not links and node_type.is_dynamic:
        return tuple(inputs_of(assigned.widgets))
    ending = list(links.values())
    slots = inputs_of(assigned.widgets) if node_type.is_dynamic else list(node_type.inputs)
    extra = _extra_inputs(node.inputs, slots)
    if node_type.is_dynamic:
        laid_out = as_laid_out(node_type)
        before = inputs_of(laid_out)
        linker = InputLinker(before + _extra_inputs(node.inputs, before), ending)
        linker.note_growth(laid_out)
        linked = link_dynamic_inputs(linker, assigned.widgets, slots, node.inputs)
    else:
        linked = link_inputs(slots + extra, node.inputs, ending)
    return tuple(_without_lost_widgets(linked, assigned.widgets) if extra else linked)


def _shown_value(node: Node) -> Mapping[str, Any]:
    """Returns the widget value of a node that only the editor knows, if the widget has a name."""
    name = BEHAVIOURS[node.type].shows if node.type in BEHAVIOURS else ""
    shown = node.values[0] if isinstance(node.values, list) and node.values else None
    return {name: shown} if name else {}


def _extra_inputs(saved: tuple[NodeSlot, ...], known: list[Input]) -> list[Input]:
    """Returns saved inputs that the class doesn't declare, which come from extensions and from
    groups that grow."""
    names = {slot.name for slot in known}
    return [Input(slot.name, slot.type, slot.widget) for slot in saved if slot.name not in names]


def _without_lost_widgets(inputs: list[Input], widgets: tuple[Widget, ...]) -> list[Input]:
    """Removes inputs of widgets that no longer exist, together with their links."""
    names = {widget.name for widget in widgets if widget.is_widget}
    return [slot for slot in inputs if slot.widget is None or slot.widget in names]


def one_link_per_input(graph: WorkflowGraph) -> WorkflowGraph:
    """Keeps only one of several links to the same input: the link that the node was saved with, or
    otherwise the first one.

    Saved inputs that refer to a removed link are updated to the remaining link.
    """
    places = {(link.target, link.target_slot) for link in graph.links.values()}
    if len(places) == len(graph.links):
        return graph
    saved = {slot.link for node in graph.nodes for slot in node.inputs}
    remaining: dict[tuple[str, int], Link] = {}
    for link in graph.links.values():
        place = (link.target, link.target_slot)
        other = remaining.setdefault(place, link)
        same_origin = (other.origin, other.origin_slot) == (link.origin, link.origin_slot)
        if not same_origin and link.id in saved and other.id not in saved:
            remaining[place] = link
    stays = {
        link.id: remaining[(link.target, link.target_slot)].id for link in graph.links.values()
    }
    return graph._replace(
        nodes=tuple(_renumbered(node, stays) for node in graph.nodes),
        links={link.id: link for link in remaining.values()},
    )


def _renumbered(node: Node, stays: Mapping[int, int]) -> Node:
    inputs = tuple(
        slot._replace(link=stays.get(slot.link)) if slot.link is not None else slot
        for slot in node.inputs
    )
    return node._replace(inputs=inputs)


MATCH_CHAIN_MAX = 50
REROUTE = "Reroute"
End = tuple[str, int]  # node id and slot
CIRCLE: End = ("", -1)


def are_compatible(one: str, other: str) -> bool:
    """Checks whether two types fit. They fit if one of them is any type, if they are equal except
    for case, or if their lists have a type in common."""
    if one in (ANY_TYPE, "") or other in (ANY_TYPE, "") or one == other:
        return True
    types, other_types = set(one.lower().split(",")), set(other.lower().split(","))
    return not types.isdisjoint(other_types) or not {ANY_TYPE, ""}.isdisjoint(types | other_types)


def common_type(types: Sequence[str]) -> str | None:
    """Returns the types that all given lists have in common, or None."""
    lists = [text.split(",") for text in types if text != ANY_TYPE]
    if not lists:
        return ANY_TYPE
    common = [part for part in lists[0] if all(part in other for other in lists[1:])]
    return ",".join(common) or None


def settle_types(wired: WiredGraph) -> WiredGraph:
    matching = []
    rerouting = False
    for node in wired.nodes.values():
        if node.type is None:
            rerouting = rerouting or node.node.type == REROUTE
        elif node.type.match is not None:
            matching.append(node)
    if not matching and not rerouting:
        return wired
    nodes = dict(wired.nodes)
    if rerouting:
        _unlink(nodes, _misfits_behind_reroutes(nodes))
    if matching:
        graph = WiredGraph(wired.graph, dict(nodes))
        for node in matching:
            nodes[node.node.id] = _matched(nodes[node.node.id], graph)
        _unlink(nodes, _misfits_behind(matching, nodes))
    return WiredGraph(wired.graph, nodes)


def _matched(node: WiredNode, graph: WiredGraph) -> WiredNode:
    match = node.type.match if node.type else None
    if match is None:
        return node
    connected = {
        slot.name: _origin_type(graph, slot, MATCH_CHAIN_MAX)
        for slot in node.inputs
        if slot.name in match.inputs
    }
    inputs = tuple(
        slot._replace(type=_narrowed(slot, match, connected)) if slot.name in connected else slot
        for slot in node.inputs
    )
    outputs = tuple(
        _output_type(graph, node, slot, MATCH_CHAIN_MAX) for slot in range(len(node.outputs))
    )
    return node._replace(inputs=inputs, outputs=outputs)


def _output_type(graph: WiredGraph, node: WiredNode, slot: int, chain_left: int) -> str:
    if not 0 <= slot < len(node.outputs):
        return ANY_TYPE
    match = node.type.match if node.type else None
    group = match.outputs.get(slot) if match else None
    if match is None or group is None or chain_left == 0:
        return node.outputs[slot]
    connected = [
        _origin_type(graph, candidate, chain_left - 1)
        for candidate in node.inputs
        if match.inputs.get(candidate.name, ("", ""))[0] == group
    ]
    return common_type(connected) or ANY_TYPE


def _narrowed(slot: Input, match: MatchGroups, connected: Mapping[str, str]) -> str:
    """Returns the allowed types that fit all other connected inputs of the group."""
    group, allowed = match.inputs[slot.name]
    others = [
        other_type
        for name, other_type in connected.items()
        if name != slot.name and match.inputs[name][0] == group
    ]
    return common_type([*others, allowed]) or slot.type


def _origin_type(graph: WiredGraph, slot: Input, chain_left: int) -> str:
    if slot.link is None:
        return ANY_TYPE
    if slot.link.origin == SUBGRAPH_INPUT_ID:
        ports = graph.graph.inputs
        place = slot.link.origin_slot
        return ports[place].type if 0 <= place < len(ports) else ANY_TYPE
    origin = graph.nodes.get(slot.link.origin)
    if origin is None:
        return ANY_TYPE
    return _output_type(graph, origin, slot.link.origin_slot, chain_left)


def _misfits_behind(matching: Sequence[WiredNode], nodes: Mapping[str, WiredNode]) -> Iterator[End]:
    ids = {node.node.id for node in matching}
    for node in nodes.values():
        for index, slot in enumerate(node.inputs):
            if slot.link is None or slot.link.origin not in ids:
                continue
            outputs = nodes[slot.link.origin].outputs
            place = slot.link.origin_slot
            if 0 <= place < len(outputs) and not are_compatible(outputs[place], slot.type):
                yield node.node.id, index


def _misfits_behind_reroutes(nodes: Mapping[str, WiredNode]) -> Iterator[End]:
    roots = _roots_of_reroutes(nodes)
    for node_id, root in roots.items():
        if root == CIRCLE:
            yield node_id, 0  # a cycle of reroutes is broken here
    for node in nodes.values():
        for index, slot in enumerate(node.inputs):
            root = roots.get(slot.link.origin) if slot.link is not None else None
            if root is None or root == CIRCLE or node.node.type == REROUTE:
                continue
            outputs = nodes[root[0]].outputs
            root_type = outputs[root[1]] if 0 <= root[1] < len(outputs) else ""
            if not are_compatible(root_type, slot.type):
                yield node.node.id, index


def _roots_of_reroutes(nodes: Mapping[str, WiredNode]) -> dict[str, End | None]:
    """Returns the output that feeds each reroute's chain, or None. Each reroute is visited once."""
    roots: dict[str, End | None] = {}
    for start in [key for key in nodes if _is_reroute(nodes, key)]:
        path: dict[str, None] = {}
        current = start
        while current not in roots:
            path[current] = None
            link = nodes[current].inputs[0].link if nodes[current].inputs else None
            if link is None or link.origin not in nodes:
                roots[current] = None
            elif not _is_reroute(nodes, link.origin):
                roots[current] = (link.origin, link.origin_slot)
            elif link.origin in path:
                roots[current] = CIRCLE
            else:
                current = link.origin
        roots.update(dict.fromkeys(path, roots[current]))
    return roots


def _is_reroute(nodes: Mapping[str, WiredNode], node_id: str) -> bool:
    node = nodes.get(node_id)
    return node is not None and node.node.type == REROUTE


def _unlink(nodes: dict[str, WiredNode], ends: Iterator[End]) -> None:
    for node_id, index in list(ends):
        inputs = list(nodes[node_id].inputs)
        inputs[index] = inputs[index]._replace(link=None)
        nodes[node_id] = nodes[node_id]._replace(inputs=tuple(inputs))
