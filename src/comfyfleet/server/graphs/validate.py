"""Validates the types, connections, values and sizes of a graph before it runs. Each problem
includes the node and the port."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from comfyfleet.api.expressions import FieldPath
from comfyfleet.api.graph_model import (
    ANY,
    CHUNK,
    DEFAULT_LIMITS,
    VALUE_PORT,
    ClosingNode,
    ConnectionSource,
    ConnectionTarget,
    DocumentProblem,
    Fallback,
    FanOutMode,
    FanOutNode,
    GraphConnection,
    GraphDefinition,
    GraphLimits,
    InputNode,
    Node,
    OutputNode,
    PassNode,
    PortType,
    ValueNode,
    WorkflowNode,
    fits,
    fits_items,
    holds,
    input_type,
    inputs_of,
    is_reference,
    items_max,
    outputs_of,
    port_number,
    reference_port,
    told_names,
    told_problems,
    type_at,
    type_named,
    wrong_cells,
)
from comfyfleet.api.graph_parse import parse_graph
from comfyfleet.api.templates import Template, is_filled
from comfyfleet.errors import InvalidValue
from comfyfleet.server.catalog.model import Property, check_value, models_chosen
from comfyfleet.server.graphs.catalogue import (
    BackendNeed,
    BackendState,
    GraphCatalogue,
    WorkflowFacts,
)
from comfyfleet.server.graphs.expand import NO_GRAPHS, GraphLibrary, expand
from comfyfleet.server.graphs.plan import (
    GraphShape,
    cycle_problems,
    is_required,
    resolve_workflows,
    shape_of,
)
from comfyfleet.server.graphs.run import (
    VALUE_SIZE_MAX,
    alternatives,
    is_self_hosted,
    no_backend_message,
    size_of,
    too_large_message,
)


class PortTypes:
    """The types of all output ports. They are determined in the order of the graph."""

    def __init__(self, graph: GraphDefinition, shape: GraphShape) -> None:
        self.graph = graph
        self.leaving: dict[str, Mapping[str, PortType]] = {}
        for node in shape.order:
            arriving = {
                connection.target.port: self.of(connection) or ANY
                for connection in shape.incoming[node]
            }
            first_type = next(iter(arriving.values()), ANY)
            self.leaving[node] = {
                **outputs_of(graph.nodes[node], first_type),
                **_passed_on(graph.nodes[node], arriving),
            }

    def ports(self, node: str) -> Collection[str]:
        return (
            self.leaving[node] if node in self.leaving else outputs_of(self.graph.nodes[node], ANY)
        )

    def of(self, connection: GraphConnection) -> PortType | None:
        """Returns the type of the value that arrives over a connection. Returns None if the source
        doesn't exist."""
        source = connection.source
        ports = self.leaving.get(source.node)
        if ports is None:  # The types of nodes in or behind a cycle are unknown.
            return ANY
        return type_at(ports[source.port], source.path) if source.port in ports else None


def _passed_on(node: Node, arriving: Mapping[str, PortType]) -> Mapping[str, PortType]:
    """Returns the types of a value node's values, but only of those that pass on another node's
    value unchanged."""
    values = node.values if isinstance(node, ValueNode) else {}
    paths = {name: value.whole for name, value in values.items() if isinstance(value, Template)}
    return {
        name: arriving.get(reference_port(path), ANY)
        for name, path in paths.items()
        if isinstance(path, FieldPath)
    }


def connection_problems(
    graph: GraphDefinition,
    types: PortTypes,
    workflows: Mapping[str, WorkflowFacts],
    broken: Collection[str],
) -> Iterator[DocumentProblem]:
    used_targets: set[tuple[str, str]] = set()
    for connection in graph.connections:
        yield from _unknown_nodes(graph, connection, broken)
        if connection.target in used_targets:
            message = "the port has more than one connection"
            yield DocumentProblem("repeated_input", message, *connection.target)
        used_targets.add(connection.target)
        if connection.source.node in graph.nodes:
            yield from _source_problems(types, connection)
        if connection.target.node in graph.nodes:
            yield from _target_problems(graph, types, workflows, connection)


def _unknown_nodes(
    graph: GraphDefinition, connection: GraphConnection, broken: Collection[str]
) -> Iterator[DocumentProblem]:
    for end, node in (("from", connection.source.node), ("to", connection.target.node)):
        if node not in graph.nodes and node not in broken:
            port = connection.source if end == "from" else connection.target
            message = f"the connection {end} {port} refers to an unknown node"
            yield DocumentProblem("unknown_node", message, *connection.target)


def _source_problems(types: PortTypes, connection: GraphConnection) -> Iterator[DocumentProblem]:
    ports = types.ports(connection.source.node)
    if connection.source.port not in ports:
        source, known = connection.source, told_names(ports)
        message = f"{source.node} has no output {source.port!r}; available outputs: {known}"
        yield DocumentProblem("unknown_port", message, *connection.target)
    elif types.of(connection) is None:
        yield DocumentProblem(
            "unknown_field", f"{connection.source} doesn't exist", *connection.target
        )


def _target_problems(
    graph: GraphDefinition,
    types: PortTypes,
    workflows: Mapping[str, WorkflowFacts],
    connection: GraphConnection,
) -> Iterator[DocumentProblem]:
    node = graph.nodes[connection.target.node]
    expected = _wanted(graph, workflows, connection)
    if expected is None:
        known = _ports_of(node, workflows)
        word = "property" if isinstance(node, WorkflowNode) else "input"
        names = f"; available: {told_names(known)}" if known is not None else ""
        message = f"{connection.target.node} has no {word} {connection.target.port!r}{names}"
        code = "unknown_property" if word == "property" else "unknown_port"
        yield DocumentProblem(code, message, *connection.target)
        return
    actual = types.of(connection) if connection.source.node in graph.nodes else None
    if actual is None:
        return
    if isinstance(node, FanOutNode) and node.mode == FanOutMode.DISTRIBUTE:
        if not fits_items(actual):
            message = f"expects a list, but {connection.source} is {actual}"
            yield DocumentProblem("type_mismatch", message, *connection.target)
    elif not fits(actual, expected):
        hint = _hint(actual, expected)
        message = f"expects {expected}, but {connection.source} is {actual}{hint}"
        yield DocumentProblem("type_mismatch", message, *connection.target)


def _ports_of(node: Node, workflows: Mapping[str, WorkflowFacts]) -> Collection[str] | None:
    """Returns the names of a node's input ports. Returns None if the node accepts any number of
    inputs."""
    if isinstance(node, WorkflowNode):
        return [prop.name for prop in workflows[node.id].properties]
    return inputs_of(node)


def _wanted(
    graph: GraphDefinition, workflows: Mapping[str, WorkflowFacts], connection: GraphConnection
) -> PortType | None:
    """Returns the type of a connection's target port, or None if the port doesn't exist."""
    node, port = graph.nodes[connection.target.node], connection.target.port
    if is_reference(port):
        return ANY
    if isinstance(node, ClosingNode):
        return None if port_number(port) is None else ANY
    if not isinstance(node, WorkflowNode):
        return (inputs_of(node) or {}).get(port)
    if node.id not in workflows:  # The unknown workflow is reported elsewhere.
        return ANY
    prop = workflows[node.id].property_named(port)
    return (type_named(prop.type) or ANY) if prop else None


def _hint(actual: PortType, expected: PortType) -> str:
    if actual.item is not None and fits(actual.item, expected):
        return "; select an item with .0, or distribute the items with a fan-out"
    if actual.name == CHUNK:
        return "; set per_item: true in the fan-out to get one item at a time"
    return ""


def output_types(
    graph: GraphDefinition, library: GraphLibrary = NO_GRAPHS
) -> Mapping[str, PortType]:
    """Returns the types of a graph's outputs. Unknown types are `any`."""
    expanded = expand(graph, library).graph
    types = PortTypes(expanded, shape_of(expanded))
    arriving = {
        connection.target: types.of(connection) or ANY for connection in expanded.connections
    }
    outputs = (node.id for node in graph.nodes.values() if isinstance(node, OutputNode))
    return {output: arriving.get(ConnectionTarget(output, VALUE_PORT), ANY) for output in outputs}


class GraphCheck(NamedTuple):
    """The result of a validation. Warnings don't prevent a run, because a backend may come online
    later."""

    graph: GraphDefinition
    problems: tuple[DocumentProblem, ...]
    warnings: tuple[DocumentProblem, ...] = ()


def check_graph(
    document: Any,
    catalogue: GraphCatalogue,
    limits: GraphLimits = DEFAULT_LIMITS,
    library: GraphLibrary = NO_GRAPHS,
) -> GraphCheck:
    """Parses a document and validates all parts that could be parsed, so that an error doesn't hide
    others."""
    parsed = parse_graph(document, limits)
    graph, problems = expand(parsed.graph, library, limits)
    validated = validate(graph, catalogue, limits, parsed.broken)
    # The contents of nodes that couldn't be parsed are unknown, so they aren't reported as missing.
    every = dict.fromkeys(
        _as_written(problem, graph) for problem in (*parsed.problems, *problems, *validated)
    )
    return GraphCheck(parsed.graph, told_problems(every), warnings(graph, catalogue))


# The last part of a generated node's id, and the field of the enclosing node that generates it.
_HIDDEN_FIELDS = {"each": "over", "start": "start", "rounds": "at_most", "judge": "until"}
_HIDDEN_NAME = re.compile(r"/\.([A-Za-z0-9_-]+)(\.value\b)?")


def _as_written(problem: DocumentProblem, graph: GraphDefinition) -> DocumentProblem:
    """Moves a problem with a generated node to the node and field of the document that it was
    generated from."""
    parent, _, last = problem.node.rpartition("/")
    node, port = problem.node, problem.port
    if isinstance(graph.nodes.get(node), PassNode):
        node, port = parent, last
    elif parent and last.startswith("."):
        name = last[1:]
        if port == VALUE_PORT:
            port = name  # This is an input of a subgraph.
        elif name == "start" and port:
            port = f"start.{port}"
        else:
            port = _HIDDEN_FIELDS.get(name, port)
        node = parent
    return problem._replace(
        message=_HIDDEN_NAME.sub(_visible_name, problem.message), node=node, port=port
    )


def _visible_name(match: "re.Match[str]") -> str:
    return "" if match[1] in _HIDDEN_FIELDS else f".{match[1]}"


def validate(
    graph: GraphDefinition,
    catalogue: GraphCatalogue,
    limits: GraphLimits = DEFAULT_LIMITS,
    broken: Collection[str] = (),
) -> tuple[DocumentProblem, ...]:
    shape = shape_of(graph)
    workflows = resolve_workflows(graph, catalogue)
    types = PortTypes(graph, shape)
    problems = [
        *_workflow_problems(graph, workflows, catalogue),
        *connection_problems(graph, types, workflows, broken),
        *_missing_inputs(graph, shape, workflows),
        *cycle_problems(shape),
        *shape.problems,
        *_unreachable(graph, shape, broken),
        *_too_large(graph, shape, limits),
        *_growing(graph, shape),
    ]
    return tuple(dict.fromkeys(problems))


def _workflow_problems(
    graph: GraphDefinition, workflows: Mapping[str, WorkflowFacts], catalogue: GraphCatalogue
) -> Iterator[DocumentProblem]:
    for node in graph.nodes.values():
        if not isinstance(node, WorkflowNode):
            continue
        if node.id not in workflows:
            why = catalogue.why_unknown(node)
            yield DocumentProblem("unknown_workflow", why, node.id, node.work_field)
        else:
            yield from _literal_problems(node, workflows[node.id])
        if node.fallback_strategy == Fallback.NONE:
            yield from _affinity_problems(node, workflows.get(node.id), graph, catalogue)


def warnings(graph: GraphDefinition, catalogue: GraphCatalogue) -> tuple[DocumentProblem, ...]:
    """Returns problems that currently prevent a run, although the graph is valid."""
    workflows = resolve_workflows(graph, catalogue)
    problems: list[DocumentProblem] = []
    for node in graph.nodes.values():
        if not isinstance(node, WorkflowNode):
            continue
        facts = workflows.get(node.id)
        if node.fallback_strategy != Fallback.NONE:
            problems += _affinity_problems(node, facts, graph, catalogue)
        if (
            facts
            and is_self_hosted(facts)
            and not alternatives(_need(node, facts, graph), catalogue.backends)
        ):
            problems.append(
                DocumentProblem("no_backend", no_backend_message(facts), node.id, node.work_field)
            )
    return tuple(problems)


def _need(node: WorkflowNode, facts: WorkflowFacts, graph: GraphDefinition) -> BackendNeed:
    """Returns a node's backend requirements. Values that arrive over connections aren't known
    yet."""
    unknown = {
        port: ""
        for id, port in (connection.target for connection in graph.connections)
        if id == node.id
    }
    return facts.need_for({**unknown, **dict.fromkeys(node.properties, ""), **node.literals})


def _literal_problems(node: WorkflowNode, workflow: WorkflowFacts) -> Iterator[DocumentProblem]:
    for name, value in node.properties.items():
        facts = workflow.property_named(name)
        if facts is None:
            known = told_names(prop.name for prop in workflow.properties)
            message = f"{workflow.name} has no property {name!r}; available properties: {known}"
            yield DocumentProblem("unknown_property", message, node.id, name)
        elif wrong := _value_problem(facts, value):
            yield DocumentProblem("type_mismatch", wrong, node.id, name)


def _value_problem(facts: Property, value: Any) -> str:
    """Returns an error message if a property can't accept a literal or the result of a template.
    Returns an empty string if it can or if that isn't known yet."""
    if is_filled(value):
        return value_problem(facts, value)
    is_text = isinstance(value, Template) and value.whole is None
    if is_text and facts.type not in ("text", "choice"):
        return (
            f"expects {facts.type}, but a template with text around {{{{ }}}} always produces text"
        )
    return ""


def value_problem(prop: Property, value: Any) -> str:
    """Returns an error message if a property can't accept a value, or an empty string if it can."""
    try:
        check_value(prop, value)
    except InvalidValue as problem:
        return problem.message
    return ""


def _affinity_problems(
    node: WorkflowNode,
    workflow: WorkflowFacts | None,
    graph: GraphDefinition,
    catalogue: GraphCatalogue,
) -> Iterator[DocumentProblem]:
    """Checks a node's affinity. The backend may be offline, but it must exist and be able to run
    the workflow."""
    if node.backend_affinity is None:
        return
    targets = [
        backend for backend in catalogue.backends if backend.is_target_of(node.backend_affinity)
    ]
    if not targets:
        message = f"backend {node.backend_affinity} was not found"
        yield DocumentProblem("unknown_backend", message, node.id, "backend_affinity")
    elif workflow and not any(backend.is_able(_need(node, workflow, graph)) for backend in targets):
        message = f"{node.backend_affinity} can't run the {node.work_field} {node.name!r}"
        lacks = _models_lacking(node, workflow, targets)
        yield DocumentProblem("unable_backend", message + lacks, node.id, "backend_affinity")


def _models_lacking(
    node: WorkflowNode, workflow: WorkflowFacts, targets: Iterable[BackendState]
) -> str:
    """Lists missing models for an error message. Only models that the node itself names are listed,
    so that the operator's other models aren't revealed."""
    chosen = models_chosen(workflow.properties, node.literals)
    named = [model for model in chosen if model.file in node.literals.values()]
    offers = [backend.offer for backend in targets if backend.offer is not None]
    lacking = [model.file for model in named if any(offer.lacks_choice(model) for offer in offers)]
    return f": it lacks {', '.join(lacking)}" if lacking else ""


def _missing_inputs(
    graph: GraphDefinition, shape: GraphShape, workflows: Mapping[str, WorkflowFacts]
) -> Iterator[DocumentProblem]:
    connected = {connection.target for connection in graph.connections}
    for node in graph.nodes.values():
        properties = node.properties if isinstance(node, WorkflowNode) else {}
        for port in _must_have(node, shape, workflows):
            if port not in properties and (node.id, port) not in connected:
                yield DocumentProblem("missing_input", "has no connection", node.id, port)
        for port in properties:
            if (node.id, port) in connected:
                yield DocumentProblem(
                    "repeated_input", "has both a value and a connection", node.id, port
                )


def _must_have(
    node: Node, shape: GraphShape, workflows: Mapping[str, WorkflowFacts]
) -> tuple[str, ...]:
    if isinstance(node, ClosingNode):
        return () if shape.incoming[node.id] else ("input_0",)
    if not isinstance(node, WorkflowNode):
        return tuple(inputs_of(node) or ())
    facts = workflows[node.id].properties if node.id in workflows else ()
    return tuple(prop.name for prop in facts if is_required(prop))


def _unreachable(
    graph: GraphDefinition, shape: GraphShape, broken: Collection[str]
) -> Iterator[DocumentProblem]:
    """Reports nodes that don't lead to an output. The user would pay for their jobs without getting
    the results."""
    outputs = [node.id for node in graph.nodes.values() if isinstance(node, OutputNode)]
    if not outputs and not broken:
        yield DocumentProblem("no_output", "the graph has no output node")
    if not outputs or broken:
        return
    used, waiting = set(outputs), list(outputs)
    while waiting:
        for source in shape.sources[waiting.pop()]:
            if source not in used:
                used.add(source)
                waiting.append(source)
    for node in graph.nodes:
        if node not in used:
            yield DocumentProblem(
                "unreachable_node", "doesn't lead to any output of the graph", node
            )


def _too_large(
    graph: GraphDefinition, shape: GraphShape, limits: GraphLimits
) -> Iterator[DocumentProblem]:
    jobs = 0
    for node, scope in shape.scopes.items():
        if len(scope) > limits.fanout_depth_max:
            message = f"is inside {len(scope)} fan-outs; the limit is {limits.fanout_depth_max}"
            yield DocumentProblem("too_deep", message, node)
        if isinstance(graph.nodes[node], WorkflowNode):
            jobs += width_max(graph, scope)
    if jobs > limits.jobs_max:
        message = (
            f"the graph could start {jobs:,} jobs; the limit is {limits.jobs_max:,}. "
            "Reduce max_items"
        )
        yield DocumentProblem("too_many_jobs", message)


def _growing(graph: GraphDefinition, shape: GraphShape) -> Iterator[DocumentProblem]:
    """Reports nested merges that would have too many values, regardless of the run's inputs."""
    counts: dict[str, int] = {}
    for node in shape.order:
        fed = [_count_at(counts, connection.source) for connection in shape.incoming[node]]
        # A merge adds three values: itself, its list and its count. Other nodes pass on their
        # input.
        count = 3 + sum(fed) if isinstance(graph.nodes[node], ClosingNode) else max(fed, default=1)
        # Counting only 1 value prevents further reports about the successors.
        counts[node] = count if count <= VALUE_SIZE_MAX.values else 1
        if count > VALUE_SIZE_MAX.values:
            message = f"would have {count:,} values; the limit is {VALUE_SIZE_MAX.values:,}"
            yield DocumentProblem("too_large", message, node)


def _count_at(counts: Mapping[str, int], source: ConnectionSource) -> int:
    """Returns the number of values at a source. A single item or the number of items counts as
    one."""
    is_part = any(part.isdecimal() or part == "count" for part in source.path)
    return 1 if is_part else counts.get(source.node, 1)


def width_max(graph: GraphDefinition, scope: tuple[str, ...]) -> int:
    """Returns the maximum number of a node's executions, which is the product of the maximum widths
    of the fan-outs around it."""
    return prod(items_max(graph.nodes[opener]) for opener in scope)


def check_inputs(graph: GraphDefinition, inputs: Mapping[str, Any]) -> tuple[DocumentProblem, ...]:
    """Returns the problems with a run's input values."""
    nodes = {node.id: node for node in graph.nodes.values() if isinstance(node, InputNode)}
    known = told_names(nodes)
    if not size_of(inputs).fits(VALUE_SIZE_MAX):
        return (
            DocumentProblem("too_large", f"the inputs are {too_large_message(VALUE_SIZE_MAX)}"),
        )
    problems = [
        DocumentProblem(
            "unknown_input", f"the graph has no input {name!r}; available inputs: {known}"
        )
        for name in inputs
        if name not in nodes
    ]
    for node in nodes.values():
        if node.id not in inputs:
            if node.required and node.default is None:
                problems.append(DocumentProblem("missing_input", "is required", node.id))
            continue
        expected = input_type(node)
        if node.columns and isinstance(inputs[node.id], list | tuple):
            problems += _row_problems(node, expected, inputs[node.id])
        elif not holds(expected, inputs[node.id]):
            message = f"must be of type {expected}, not {inputs[node.id]!r:.60}"
            problems.append(DocumentProblem("type_mismatch", message, node.id))
    return told_problems(problems)


CELLS_TOLD_MAX = 20


def _row_problems(
    node: InputNode, table: PortType, rows: Iterable[Any]
) -> Iterator[DocumentProblem]:
    """Yields a problem for each invalid cell of a table, up to a limit. Row numbers start at 1."""
    problems = (
        DocumentProblem("type_mismatch", f"row {number}{message}", node.id)
        for number, row in enumerate(rows, start=1)
        for message in _row_messages(table.item or ANY, row)
    )
    yield from islice(problems, CELLS_TOLD_MAX)


def _row_messages(kind: PortType, row: Any) -> Iterator[str]:
    if not isinstance(row, Mapping):
        yield f" must be an object, not {row!r:.60}"
        return
    for name, expected in wrong_cells(kind, row):
        yield f", column {name}: must be of type {expected}, not {row[name]!r:.60}"
