"""Pass 4: every node of a graph gets its inputs in slot order, their links and its widget values.

A node's inputs are those of its class, in the order of the class, with the link of the saved input
of the same name; then come saved inputs that the class doesn't know. So the order in the file
doesn't matter, and a link that only the list of links knows is put where that list says.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from comfyfleet.workflow.behaviours import BEHAVIOURS, is_virtual
from comfyfleet.workflow.limits import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.model import ANY_TYPE, INACTIVE, Graph, Link, Node, Slot, made
from comfyfleet.workflow.nodetypes import NodeType, NodeTypes, inputs_of
from comfyfleet.workflow.slots import Input, Workbench, link_dynamic_inputs, link_inputs
from comfyfleet.workflow.values import Dealt, as_laid_out, deal_values
from comfyfleet.workflow.widgettypes import Widget


class WiredNode(NamedTuple):
    """`definition` is set on instances of a subgraph, `type` on nodes that the server knows."""

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


Links = Mapping[int, Link]  # that end at one node, by their id
NO_LINKS: Links = {}


class WiredGraph(NamedTuple):
    graph: Graph
    nodes: Mapping[str, WiredNode]


def wire(
    graph: Graph,
    types: NodeTypes,
    definitions: Mapping[str, Graph],
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


def _wire_instance(node: Node, definition: Graph, links: Links) -> WiredNode:
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
        if is_virtual(node.type):  # such a node has its slots even where they were not saved
            saved = saved or [Input("", ANY_TYPE)]
            outputs = outputs or (ANY_TYPE,)
        linked = tuple(link_inputs(saved, node.inputs, list(links.values())))
        return WiredNode(node, linked, outputs, values=_shown_value(node))
    dealt = deal_values(node_type, node, limits=limits)
    outputs = node_type.outputs
    if len(node.outputs) > len(outputs):
        outputs = (*outputs, *node.outputs[len(outputs) :])
    inputs = _linked_by_name(node, node_type, links)
    if inputs is None:
        inputs = _linked_step_by_step(node, node_type, dealt, links)
    is_executed = node.mode not in INACTIVE
    return made(WiredNode, (node, inputs, outputs, node_type, *dealt, None, is_executed))


def _linked_by_name(node: Node, node_type: NodeType, links: Links) -> tuple[Input, ...] | None:
    """The quick way, for a node whose saved inputs are those of its class and name all its links."""
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
        name, kind, widget, taken = inputs[index]
        link = links.get(slot.link)
        if link is not None:
            if taken is not None:
                return None
            placed += 1
            inputs[index] = made(Input, (name, kind, widget, link))
    return tuple(inputs) if placed == len(links) else None


def _linked_step_by_step(
    node: Node, node_type: NodeType, dealt: Dealt, links: Links
) -> tuple[Input, ...]:
    if not links and node_type.is_dynamic:
        return tuple(inputs_of(dealt.widgets))
    ending = list(links.values())
    slots = inputs_of(dealt.widgets) if node_type.is_dynamic else list(node_type.inputs)
    extra = _extra_inputs(node.inputs, slots)
    if node_type.is_dynamic:
        laid_out = as_laid_out(node_type)
        before = inputs_of(laid_out)
        bench = Workbench(before + _extra_inputs(node.inputs, before), ending)
        bench.learn(laid_out)
        linked = link_dynamic_inputs(bench, dealt.widgets, slots, node.inputs)
    else:
        linked = link_inputs(slots + extra, node.inputs, ending)
    return tuple(_without_lost_widgets(linked, dealt.widgets) if extra else linked)


def _shown_value(node: Node) -> Mapping[str, Any]:
    """The one widget of a node that only the editor knows, where it has a name."""
    name = BEHAVIOURS[node.type].shows if node.type in BEHAVIOURS else ""
    shown = node.values[0] if isinstance(node.values, list) and node.values else None
    return {name: shown} if name else {}


def _extra_inputs(saved: tuple[Slot, ...], known: list[Input]) -> list[Input]:
    """Saved inputs that the class doesn't declare: extensions add such, and groups that grow."""
    names = {slot.name for slot in known}
    return [Input(slot.name, slot.type, slot.widget) for slot in saved if slot.name not in names]


def _without_lost_widgets(inputs: list[Input], widgets: tuple[Widget, ...]) -> list[Input]:
    """An input that stood for a widget goes with it, and its link too."""
    names = {widget.name for widget in widgets if widget.is_widget}
    return [slot for slot in inputs if slot.widget is None or slot.widget in names]


def one_link_per_input(graph: Graph) -> Graph:
    """Of several links to one input slot the first stays, unless only a later one is saved there.
    Saved inputs that name a link which goes follow the one that stays."""
    places = {(link.target, link.target_slot) for link in graph.links.values()}
    if len(places) == len(graph.links):
        return graph
    saved = {slot.link for node in graph.nodes for slot in node.inputs}
    kept: dict[tuple[str, int], Link] = {}
    for link in graph.links.values():
        place = (link.target, link.target_slot)
        other = kept.setdefault(place, link)
        same_origin = (other.origin, other.origin_slot) == (link.origin, link.origin_slot)
        if not same_origin and link.id in saved and other.id not in saved:
            kept[place] = link
    stays = {link.id: kept[(link.target, link.target_slot)].id for link in graph.links.values()}
    return graph._replace(
        nodes=tuple(_renumbered(node, stays) for node in graph.nodes),
        links={link.id: link for link in kept.values()},
    )


def _renumbered(node: Node, stays: Mapping[int, int]) -> Node:
    inputs = tuple(
        slot._replace(link=stays.get(slot.link)) if slot.link is not None else slot
        for slot in node.inputs
    )
    return node._replace(inputs=inputs)
