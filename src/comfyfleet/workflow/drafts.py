"""Graphs while their subgraphs are being put together: the only values here that change."""

from collections.abc import Iterable, Iterator
from typing import Any

from comfyfleet.workflow.model import SUBGRAPH_INPUT_ID, Graph, Link, Port
from comfyfleet.workflow.slots import Input
from comfyfleet.workflow.widgettypes import Widget
from comfyfleet.workflow.wiring import WiredGraph, WiredNode


class Draft:
    """One graph under construction."""

    def __init__(self, graph: Graph, nodes: dict[str, WiredNode], ports: list[Port]) -> None:
        self.graph = graph
        self.nodes = nodes
        self.ports = ports
        self.links = dict(graph.links)
        self.replaced: dict[str, str] = {}  # primitives by the ports that took their place

    def frozen(self) -> WiredGraph:
        graph = self.graph._replace(inputs=tuple(self.ports), links=self.links)
        return WiredGraph(graph, self.nodes)

    def ends_of(self, port: Port) -> Iterator[tuple[WiredNode, Input]]:
        """The inner inputs that a port feeds, in saved order."""
        for link_id in port.links:
            link = self.links.get(link_id)
            node = self.nodes.get(link.target) if link else None
            if link is None or node is None:
                continue
            for slot in node.inputs:
                if slot.link is not None and slot.link.id == link_id:
                    yield node, slot

    def promoted_widget(self, port: Port) -> tuple[Widget, Any] | None:
        """The inner widget that stands behind a port, and its value there."""
        for node, slot in self.ends_of(port):
            if slot.widget is not None and slot.widget in node.values:
                widget = next(widget for widget in node.widgets if widget.name == slot.widget)
                return widget, node.values[slot.widget]
        return None

    def source_of(self, port: Port) -> tuple[str, str] | None:
        """Inner node id and widget name (or input name of an inner instance) behind a port."""
        for node, slot in self.ends_of(port):
            if node.definition is not None:
                return node.node.id, slot.name
            if slot.widget is not None and slot.widget in node.values:
                return node.node.id, slot.widget
        return None

    def connect_port(self, name: str, slot_type: str, ends: Iterable[tuple[str, int]]) -> Port:
        """A new port, linked to inner (node id, slot)s in place of what was linked there."""
        links = []
        for node_id, slot in ends:
            link = Link(
                min(self.links, default=0) - 1, SUBGRAPH_INPUT_ID, len(self.ports), node_id, slot
            )
            self.links[link.id] = link
            links.append(link.id)
            self._set_link(node_id, slot, link)
        port = Port(name, slot_type, tuple(links))
        self.ports.append(port)
        return port

    def unlink(self, node_id: str, slot: int) -> None:
        self._set_link(node_id, slot, None)

    def _set_link(self, node_id: str, slot: int, link: Link | None) -> None:
        node = self.nodes[node_id]
        inputs = list(node.inputs)
        inputs[slot] = inputs[slot]._replace(link=link)
        self.nodes[node_id] = node._replace(inputs=tuple(inputs))


class Drafts:
    """All graphs so far, innermost first."""

    def __init__(self) -> None:
        self._drafts: dict[str, Draft] = {}

    def add(self, draft: Draft) -> None:
        self._drafts[draft.graph.id] = draft

    def get(self, graph_id: str | None) -> Draft | None:
        return None if graph_id is None else self._drafts.get(graph_id)

    def all(self) -> Iterable[Draft]:
        return self._drafts.values()

    def add_input_to_instances(self, definition: Draft, port: Port) -> None:
        """Every instance wired so far shows a new port of its definition, with the inner value."""
        source = definition.promoted_widget(port)
        for draft in self._drafts.values():
            for node_id, node in draft.nodes.items():
                if node.definition == definition.graph.id:
                    draft.nodes[node_id] = _with_input(node, port, source)


def _with_input(node: WiredNode, port: Port, source: tuple[Widget, Any] | None) -> WiredNode:
    slot = Input(port.name, port.type, port.name if source else None)
    node = node._replace(inputs=(*node.inputs, slot))
    if source is None:
        return node
    widget, value = source
    widgets = (*node.widgets, widget._replace(name=port.name))
    return node._replace(widgets=widgets, values={**node.values, port.name: value})
