"""One graph as it is executed: which node really feeds which, with everything virtual looked through.

Reroutes, Set and Get, and bypassed nodes are wires here; an instance of a subgraph is one node.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from comfyfleet.kernel.errors import InvalidWorkflow
from comfyfleet.workflow.model import (
    SUBGRAPH_INPUT_ID,
    SUBGRAPH_OUTPUT_ID,
    Graph,
    Mode,
    Node,
    Workflow,
)
from comfyfleet.workflow.nodetypes import NodeTypes
from comfyfleet.workflow.resolve import Resolved, Resolver, Source
from comfyfleet.workflow.scopes import Scope
from comfyfleet.workflow.slots import Input
from comfyfleet.workflow.slottypes import settle_types
from comfyfleet.workflow.wiring import WiredGraph, WiredNode, wire


class End(NamedTuple):
    """An input of a node."""

    node: str
    slot: int


class Level(NamedTuple):
    """`nodes` are those that are executed, and instances, in the order of the file; in a definition
    its two ends, too. `order` has each after those that feed it; a cycle is cut somewhere."""

    nodes: Mapping[str, WiredNode]
    sources: Mapping[End, Source]
    links: Mapping[End, int]  # the link that ends there, whatever it comes through
    consumers: Mapping[str, tuple[End, ...]]
    order: tuple[str, ...]

    def inputs_of(self, node: str) -> Iterator[tuple[End, Source]]:
        for slot in range(len(self.nodes[node].inputs)):
            source = self.sources.get(End(node, slot))
            if source is not None:
                yield End(node, slot), source

    def type_of(self, source: Source) -> str:
        outputs = self.nodes[source.node_id].outputs
        return outputs[source.slot] if 0 <= source.slot < len(outputs) else ""

    def input_name(self, end: End) -> str:
        return self.nodes[end.node].inputs[end.slot].name


def read_level(
    workflow: Workflow, graph_id: str, types: NodeTypes, *, all_on: bool = False
) -> Level:
    """`all_on` reads the graph as if nothing in it were switched off."""
    graph = workflow.definitions[graph_id] if graph_id else workflow.root
    if all_on:
        graph = graph._replace(nodes=tuple(node._replace(mode=Mode.ALWAYS) for node in graph.nodes))
    wired = settle_types(wire(graph, types, workflow.definitions))
    nodes = {**wired.nodes, **_ends(wired.graph)}
    # Without its definition an instance is a node like others: where a wire ends.
    scope = Scope(
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
    return Level(executed, sources, links, _consumers(sources), _in_order(executed, sources))


def _ends(graph: Graph) -> dict[str, WiredNode]:
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


def _sources(scope: Scope, nodes: Mapping[str, WiredNode]) -> Iterator[tuple[End, Source]]:
    resolver = Resolver([scope])
    for key, node in nodes.items():
        for slot, entry in enumerate(node.inputs):
            found = _resolved(resolver, scope, key, slot) if entry.link else None
            if isinstance(found, Source) and found.node_id in nodes:
                yield End(key, slot), found


def _resolved(resolver: Resolver, scope: Scope, node: str, slot: int) -> Resolved:
    try:
        return resolver.resolve(scope, scope.wired.nodes[node], slot)
    except InvalidWorkflow:  # conversion says so, if it matters for what is executed
        return None


def _consumers(sources: Mapping[End, Source]) -> dict[str, tuple[End, ...]]:
    found: dict[str, list[End]] = {}
    for end, source in sources.items():
        found.setdefault(source.node_id, []).append(end)
    return {key: tuple(ends) for key, ends in found.items()}


def _in_order(nodes: Mapping[str, WiredNode], sources: Mapping[End, Source]) -> tuple[str, ...]:
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
