"""Follows types through a graph, connection by connection, and tells what doesn't fit."""

from collections.abc import Collection, Iterator, Mapping

from comfyfleet.graphs.catalogue import WorkflowFacts
from comfyfleet.graphs.model import (
    Connection,
    FanOutMode,
    FanOutNode,
    Graph,
    MergeNode,
    Node,
    Problem,
    WorkflowNode,
    port_number,
)
from comfyfleet.graphs.ports import (
    ANY,
    PortType,
    fits,
    fits_items,
    inputs_of,
    outputs_of,
    type_at,
    type_named,
)
from comfyfleet.graphs.shape import Shape


class Types:
    """The types that leave each port, found in the order of the graph."""

    def __init__(self, graph: Graph, shape: Shape) -> None:
        self.graph = graph
        self.leaving: dict[str, Mapping[str, PortType]] = {}
        for node in shape.order:
            arriving = [self.of(each) or ANY for each in shape.incoming[node]]
            given = arriving[0] if arriving else ANY
            self.leaving[node] = outputs_of(graph.nodes[node], given)

    def ports(self, node: str) -> Collection[str]:
        return (
            self.leaving[node] if node in self.leaving else outputs_of(self.graph.nodes[node], ANY)
        )

    def of(self, connection: Connection) -> PortType | None:
        """What arrives over a connection; None if there can't be anything at its source."""
        source = connection.source
        ports = self.leaving.get(source.node)
        if ports is None:  # in or behind a cycle: nothing is known
            return ANY
        return type_at(ports[source.port], source.path) if source.port in ports else None


def connection_problems(
    graph: Graph,
    types: Types,
    workflows: Mapping[str, WorkflowFacts],
    broken: Collection[str],
) -> Iterator[Problem]:
    taken: set[tuple[str, str]] = set()
    for each in graph.connections:
        yield from _unknown_nodes(graph, each, broken)
        if each.target in taken:
            yield Problem("repeated_input", "two connections end here", *each.target)
        taken.add(each.target)
        if each.source.node in graph.nodes:
            yield from _source_problems(types, each)
        if each.target.node in graph.nodes:
            yield from _target_problems(graph, types, workflows, each)


def _unknown_nodes(graph: Graph, each: Connection, broken: Collection[str]) -> Iterator[Problem]:
    for end, node in (("from", each.source.node), ("to", each.target.node)):
        if node not in graph.nodes and node not in broken:
            message = f"the connection {end} {each.source if end == 'from' else each.target} names an unknown node"
            yield Problem("unknown_node", message, *each.target)


def _source_problems(types: Types, each: Connection) -> Iterator[Problem]:
    ports = types.ports(each.source.node)
    if each.source.port not in ports:
        offered = ", ".join(ports) or "none"
        message = f"{each.source.node} has no output {each.source.port!r}; it has {offered}"
        yield Problem("unknown_port", message, *each.target)
    elif types.of(each) is None:
        yield Problem("unknown_field", f"there is no {each.source}", *each.target)


def _target_problems(
    graph: Graph, types: Types, workflows: Mapping[str, WorkflowFacts], each: Connection
) -> Iterator[Problem]:
    node = graph.nodes[each.target.node]
    wanted = _wanted(graph, workflows, each)
    if wanted is None:
        known = _ports_of(node, workflows)
        word = "property" if isinstance(node, WorkflowNode) else "input"
        offered = f"; it has {', '.join(known) or 'none'}" if known is not None else ""
        message = f"{each.target.node} has no {word} {each.target.port!r}{offered}"
        code = "unknown_property" if word == "property" else "unknown_port"
        yield Problem(code, message, *each.target)
        return
    given = types.of(each) if each.source.node in graph.nodes else None
    if given is None:
        return
    if isinstance(node, FanOutNode) and node.mode == FanOutMode.DISTRIBUTE:
        if not fits_items(given):
            message = f"takes a list; {each.source} is {given}"
            yield Problem("type_mismatch", message, *each.target)
    elif not fits(given, wanted):
        message = f"takes {wanted}; {each.source} is {given}{_hint(given, wanted)}"
        yield Problem("type_mismatch", message, *each.target)


def _ports_of(node: Node, workflows: Mapping[str, WorkflowFacts]) -> Collection[str] | None:
    """None for a node that has as many as are connected."""
    if isinstance(node, WorkflowNode):
        return [each.name for each in workflows[node.id].properties]
    return inputs_of(node)


def _wanted(
    graph: Graph, workflows: Mapping[str, WorkflowFacts], each: Connection
) -> PortType | None:
    """The type of the port that a connection ends at; None if there is no such port."""
    node, port = graph.nodes[each.target.node], each.target.port
    if isinstance(node, MergeNode):
        return None if port_number(port) is None else ANY
    if not isinstance(node, WorkflowNode):
        return (inputs_of(node) or {}).get(port)
    if node.id not in workflows:  # that it is unknown is told once
        return ANY
    found = workflows[node.id].property_named(port)
    return (type_named(found.type) or ANY) if found else None


def _hint(given: PortType, wanted: PortType) -> str:
    if given.item is not None and fits(given.item, wanted):
        return "; take one of them with .0, or distribute them with a fan-out"
    return ""
