"""Expands nodes that contain other nodes into plain nodes and connections, without I/O.

A map becomes a per-item fan-out, its body, and a node that collects the results. A loop is expanded
in the same way, with rounds instead of items. A subgraph becomes its nodes, and its inputs and
outputs become nodes that pass values on. The ids of inner nodes start with the id of the enclosing
node, as in `refine/sharpen`. Names can refer to nodes of enclosing scopes, but not to nodes outside
a subgraph. In the ids of generated nodes, the last part starts with a dot. Each value that a
template reads arrives at a port with the value's name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from comfyfleet.api.expressions import FieldPath
from comfyfleet.api.graph_model import (
    DEFAULT_LIMITS,
    INDEX_PORT,
    INPUT_PORT,
    ITEM_PORT,
    ITEMS_PORT,
    OUTPUT_PORT,
    OUTPUTS_PORT,
    ROUND_PORT,
    VALUE_PORT,
    ConnectionSource,
    ConnectionTarget,
    DocumentProblem,
    FanOutMode,
    FanOutNode,
    GraphBody,
    GraphConnection,
    GraphDefinition,
    GraphLimits,
    InputNode,
    LoopEndNode,
    LoopNode,
    MapNode,
    Node,
    OutputNode,
    PassNode,
    RankNode,
    ResultsNode,
    RoundEndNode,
    RoundsNode,
    ScoreNode,
    SubgraphNode,
    ValueNode,
    WorkflowNode,
    reference_port,
    told_names,
)
from comfyfleet.api.templates import parse_template, templates_in

GraphName: TypeAlias = tuple[str, int]  # A graph's id or name as in the document, and its version.
GraphLibrary: TypeAlias = Mapping[GraphName, GraphDefinition]
NO_GRAPHS: GraphLibrary = {}
INPUT_NAME = "input"


class ExpandedGraph(NamedTuple):
    graph: GraphDefinition
    problems: tuple[DocumentProblem, ...] = ()


def subgraph_names(graph: GraphDefinition) -> set[GraphName]:
    """Returns the names of the graph's direct subgraphs, including those inside its maps and
    loops."""
    return {(node.graph, node.version) for node in _subgraphs(graph.nodes.values())}


def _subgraphs(nodes: Iterable[Node]) -> Iterator[SubgraphNode]:
    for node in nodes:
        if isinstance(node, SubgraphNode):
            yield node
        elif isinstance(node, MapNode | LoopNode | ScoreNode):
            yield from _subgraphs(node.body.nodes.values())


def expand(
    graph: GraphDefinition, library: GraphLibrary = NO_GRAPHS, limits: GraphLimits = DEFAULT_LIMITS
) -> ExpandedGraph:
    expander = _Expander(library, limits)
    expander.add(graph.nodes, graph.connections, _Names("", graph.nodes))
    expanded = replace(
        graph,
        nodes=expander.nodes,
        connections=tuple(expander.connections),
        openers=expander.openers,
        lanes=expander.lanes,
    )
    return ExpandedGraph(expanded, tuple(dict.fromkeys(expander.problems)))


@dataclass(frozen=True)
class _Names:
    """Resolves the names in a graph or a body: its nodes, a few special words such as `item`, and
    the names of the enclosing scope."""

    prefix: str
    nodes: Mapping[str, Node]
    words: Mapping[str, ConnectionSource] = field(default_factory=dict)
    around: "_Names | None" = None
    graphs: tuple[GraphName, ...] = ()  # The enclosing subgraphs.
    opener: str | None = None  # The fan-out or loop that opens the items or rounds of these nodes.

    def source(self, root: str, path: tuple[str, ...]) -> ConnectionSource | None:
        """Returns the port that a name refers to, with the rest of the path. Returns None if the
        name is unknown."""
        if root in self.words:
            word = self.words[root]
            return word._replace(path=(*word.path, *path))
        if root in self.nodes:
            return self._port(self.nodes[root], path)
        if root == INPUT_NAME and path and isinstance(self.nodes.get(path[0]), InputNode):
            return ConnectionSource(self.prefix + path[0], VALUE_PORT, path[1:])
        return self.around.source(root, path) if self.around else None

    def _port(self, node: Node, path: tuple[str, ...]) -> ConnectionSource:
        if isinstance(node, InputNode) and path[:1] != (VALUE_PORT,):
            path = (VALUE_PORT, *path)  # An input has only one port.
        port, *rest = path or (OUTPUT_PORT,)
        return ConnectionSource(self.prefix + node.id, port, tuple(rest))


class _Expander:
    def __init__(self, library: GraphLibrary, limits: GraphLimits) -> None:
        self.library = library
        self.limits = limits
        self.nodes: dict[str, Node] = {}
        self.connections: list[GraphConnection] = []
        # The connections for values that templates read, without duplicates.
        self.read: set[GraphConnection] = set()
        self.problems: list[DocumentProblem] = []
        self.lanes: dict[str, int] = {}
        self.openers: dict[str, str] = {}
        self.is_full = False

    def put(self, node: Node, names: _Names) -> None:
        self.nodes[node.id] = node
        if names.opener:
            self.openers[node.id] = names.opener

    def add(
        self,
        nodes: Mapping[str, Node],
        connections: Iterable[GraphConnection],
        names: _Names,
    ) -> None:
        for node in nodes.values():
            if len(self.nodes) >= self.limits.expanded_nodes_max:
                self.refuse_more(f"{self.limits.expanded_nodes_max:,} nodes")
            if self.is_full:
                return
            self.node(node, names)
        for connection in connections:
            if self.is_full:
                return
            source, target = connection
            target = ConnectionTarget(names.prefix + target.node, target.port)
            resolved = names.source(source.node, (source.port, *source.path))
            # Keeps an unknown name, because the validation reports it.
            self.wire(GraphConnection(resolved or source, target))

    def node(self, node: Node, names: _Names) -> None:
        match node:
            case MapNode():
                self.map(node, names)
            case LoopNode():
                self.loop(node, names)
            case ScoreNode():
                self.score(node, names)
            case SubgraphNode():
                self.subgraph(node, names)
            case _:
                self.plain(node, names)

    def plain(self, node: Node, names: _Names) -> None:
        """Adds a node without inner nodes, and connections for the values that its templates
        read."""
        node_id = names.prefix + node.id
        self.put(replace(node, id=node_id), names)
        if isinstance(node, WorkflowNode | ValueNode):
            values = node.properties if isinstance(node, WorkflowNode) else node.values
            for name, value in values.items():
                self.references(node_id, name, value, names)

    def references(self, node_id: str, port: str, value: Any, names: _Names) -> None:
        for path in dict.fromkeys(
            path for template in templates_in(value) for path in template.paths
        ):
            if self.is_full:
                return
            self.connect(path, ConnectionTarget(node_id, reference_port(path)), names, port)

    def connect(
        self, path: FieldPath, target: ConnectionTarget, names: _Names, port: str = ""
    ) -> None:
        source = names.source(path.root, path.segments)
        if source is None:
            message = f"{path.root!r} isn't the name of a node"
            self.problems.append(
                DocumentProblem("unknown_node", message, target.node, port or target.port)
            )
        elif (connection := GraphConnection(source, target)) not in self.read:
            self.read.add(connection)
            self.wire(connection)

    def link(self, source: str, port: str, target: str, to: str) -> None:
        self.wire(GraphConnection(ConnectionSource(source, port), ConnectionTarget(target, to)))

    def wire(self, connection: GraphConnection) -> None:
        if len(self.connections) < self.limits.expanded_connections_max:
            self.connections.append(connection)
        else:
            self.refuse_more(f"{self.limits.expanded_connections_max:,} connections")

    def refuse_more(self, what: str) -> None:
        self.is_full = True
        message = f"the graph has more than {what}, including nested ones"
        self.problems.append(DocumentProblem("too_many", message))

    # The methods below expand the nodes that repeat other nodes, such as maps and loops.

    def items(
        self,
        node: MapNode | ScoreNode,
        names: _Names,
        end: ResultsNode | RankNode,
        body: GraphBody,
    ) -> None:
        inside, opener = f"{end.id}/", end.over
        self.put(
            FanOutNode(opener, FanOutMode.DISTRIBUTE, per_item=True, max_items=node.max_items),
            names,
        )
        self.connect(node.over, ConnectionTarget(opener, ITEMS_PORT), names, "over")
        words = {
            "item": ConnectionSource(opener, ITEM_PORT),
            "index": ConnectionSource(opener, INDEX_PORT),
        }
        if node.at_once is not None:
            self.lanes[inside] = node.at_once
        inner = replace(
            names, prefix=inside, nodes=body.nodes, words=words, around=names, opener=opener
        )
        self.close(end, body, names, inner)

    def close(
        self,
        end: ResultsNode | RankNode | LoopEndNode,
        body: GraphBody,
        names: _Names,
        inner: _Names,
    ) -> None:
        """Adds the nodes of a body, and the node that collects the body's results."""
        self.add(body.nodes, body.connections, inner)
        self.put(end, names)
        self.connect(body.result, ConnectionTarget(end.id, "input_0"), inner, "do")

    def map(self, node: MapNode, names: _Names) -> None:
        body = node.body
        if node.continue_on_error:
            body = replace(
                body, nodes={child.id: _tolerant(child) for child in body.nodes.values()}
            )
        end = names.prefix + node.id
        self.items(node, names, ResultsNode(end, over=f"{end}/.each"), body)

    def score(self, node: ScoreNode, names: _Names) -> None:
        end = names.prefix + node.id
        rank = RankNode(end, f"{end}/.each", node.score, node.keep)
        self.items(node, names, rank, node.body)

    # Rounds

    def loop(self, node: LoopNode, names: _Names) -> None:
        end = names.prefix + node.id
        rounds, judge = f"{end}/.rounds", f"{end}/.judge"
        self.plain(ValueNode(f"{node.id}/.start", node.start), names)
        self.put(RoundsNode(rounds, node.at_most), names)
        self.link(f"{end}/.start", OUTPUTS_PORT, rounds, INPUT_PORT)
        words = {
            "previous": ConnectionSource(rounds, ITEM_PORT),
            ROUND_PORT: ConnectionSource(rounds, ROUND_PORT),
        }
        inner = replace(
            names,
            prefix=f"{end}/",
            nodes=node.body.nodes,
            words=words,
            around=names,
            opener=rounds,
        )
        closing = LoopEndNode(end, rounds, judge, node.best is not None)
        self.close(closing, node.body, names, inner)
        self.put(RoundEndNode(judge, rounds, node.until, node.best), inner)
        self.connect(node.body.result, ConnectionTarget(judge, INPUT_PORT), inner, "do")

    # Subgraphs

    def subgraph(self, node: SubgraphNode, names: _Names) -> None:
        node_id, name = names.prefix + node.id, (node.graph, node.version)
        graph = self.library.get(name)
        problem = ""
        if graph is None:
            problem = f"graph {node.graph!r} version {node.version} was not found"
        elif name in names.graphs:
            problem = f"graph {node.graph!r} contains itself"
        elif len(names.graphs) >= self.limits.graph_depth_max:
            problem = f"graphs are nested more than {self.limits.graph_depth_max} levels deep"
        if graph is None or problem:
            self.problems.append(DocumentProblem("unknown_graph", problem, node_id, "graph"))
            self.put(ValueNode(node_id, {}), names)
            return
        inner = _Names(
            f"{node_id}/", graph.nodes, graphs=(*names.graphs, name), opener=names.opener
        )
        self.inputs(node, graph, names, inner)
        rest = {
            child.id: PassNode(child.id) if isinstance(child, OutputNode) else child
            for child in graph.nodes.values()
            if not isinstance(child, InputNode)
        }
        self.add(rest, graph.connections, inner)
        outputs = [child.id for child in graph.nodes.values() if isinstance(child, OutputNode)]
        values = {
            output: parse_template(f"{{{{ {output}.{VALUE_PORT} }}}}", None) for output in outputs
        }
        self.put(ValueNode(node_id, values), names)
        for template in values.values():
            self.references(node_id, OUTPUTS_PORT, template, inner)

    def inputs(
        self, node: SubgraphNode, graph: GraphDefinition, names: _Names, inner: _Names
    ) -> None:
        node_id = names.prefix + node.id
        inputs = {child.id: child for child in graph.nodes.values() if isinstance(child, InputNode)}
        for name in node.inputs:
            if name not in inputs:
                known = told_names(inputs)
                message = f"{node.graph} has no input {name!r}; available inputs: {known}"
                self.problems.append(DocumentProblem("unknown_input", message, node_id, name))
        for input_node in inputs.values():
            value = node.inputs.get(input_node.id, input_node.default)
            if value is None and input_node.required:
                self.problems.append(
                    DocumentProblem("missing_input", "is required", node_id, input_node.id)
                )
            # The value is computed with the names of the outer scope, and passed on to the inner
            # scope with its type.
            value_node = f"{node.id}/.{input_node.id}"
            self.plain(ValueNode(value_node, {VALUE_PORT: value}), names)
            passed = inner.prefix + input_node.id
            self.put(PassNode(passed, input_node.value_type), inner)
            self.link(names.prefix + value_node, VALUE_PORT, passed, VALUE_PORT)


def _tolerant(node: Node) -> Node:
    return replace(node, continue_on_error=True) if isinstance(node, WorkflowNode) else node
