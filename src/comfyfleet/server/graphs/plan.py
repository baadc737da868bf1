"""Plans a graph for a run: the order and the scopes of its nodes, its cycles, and the facts about
its workflows when the run starts.

A node between a per-item fan-out and the merge over it runs once for each item. The scope of a node
consists of the fan-outs around it, outermost first. In a run, each execution of the node has one
index per fan-out. A run keeps its plan, so that new versions of workflows don't affect it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

from comfyfleet.api.expressions import MISSING, FieldPath, value_at
from comfyfleet.api.graph_model import (
    ANY,
    APPROVED_PORT,
    DEFAULT_PORT,
    FALSE_PORT,
    OUTPUTS_PORT,
    REJECTED_PORT,
    TRUE_PORT,
    ApproveNode,
    ClosingNode,
    ConditionNode,
    ConnectionSource,
    DocumentProblem,
    FanOutNode,
    GraphConnection,
    GraphDefinition,
    InputNode,
    LoopEndNode,
    Node,
    OutputNode,
    PassNode,
    PortType,
    RoundsNode,
    SwitchNode,
    ValueNode,
    WorkflowNode,
    closes_over,
    inputs_of,
    is_reference,
    opens_scope,
    reference_port,
    type_named,
)
from comfyfleet.api.templates import Template, templates_in
from comfyfleet.errors import InvalidInput, LimitExceeded
from comfyfleet.server.catalog.model import Property
from comfyfleet.server.graphs.catalogue import GraphCatalogue, WorkflowFacts
from comfyfleet.server.graphs.expand import NO_GRAPHS, GraphLibrary, expand

Scope: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GraphShape:
    order: tuple[str, ...]  # Each node after its sources, without nodes in or behind a cycle.
    incoming: Mapping[str, tuple[GraphConnection, ...]]
    sources: Mapping[str, tuple[str, ...]]  # For each node, the nodes that it waits for.
    targets: Mapping[str, tuple[str, ...]]  # For each node, the nodes that wait for it.
    scopes: Mapping[str, Scope]
    cycles: tuple[tuple[str, ...], ...] = ()
    problems: tuple[DocumentProblem, ...] = ()


def shape_of(graph: GraphDefinition) -> GraphShape:
    """Computes a graph's order, scopes and cycles. Skips connections with unknown nodes, because
    the validation reports them."""
    incoming: dict[str, list[GraphConnection]] = {node: [] for node in graph.nodes}
    for connection in graph.connections:
        if connection.source.node in graph.nodes and connection.target.node in graph.nodes:
            incoming[connection.target.node].append(connection)
    sources = {node: _sources(graph, node, connections) for node, connections in incoming.items()}
    order, cycles = _sort_topologically(sources)
    scopes, problems = _scopes(graph, order, sources)
    return GraphShape(
        order,
        {node: tuple(connections) for node, connections in incoming.items()},
        sources,
        _invert(sources),
        scopes,
        cycles,
        problems,
    )


def _sources(
    graph: GraphDefinition, node: str, incoming: Iterable[GraphConnection]
) -> tuple[str, ...]:
    """Returns the nodes that a node waits for. A merge over a fan-out also waits for the fan-out,
    which determines the number of items. Nodes inside a map or a loop also wait for the node that
    opens its items or rounds."""
    graph_node = graph.nodes[node]
    judge = graph_node.judge if isinstance(graph_node, LoopEndNode) else None
    over = closes_over(graph_node)
    implied = (over or graph.openers.get(node), judge)
    first = [source for source in implied if source is not None and source in graph.nodes]
    return tuple(dict.fromkeys([*first, *(connection.source.node for connection in incoming)]))


def _invert(sources: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    targets: dict[str, list[str]] = {node: [] for node in sources}
    for node, node_sources in sources.items():
        for source in node_sources:
            targets[source].append(node)
    return {node: tuple(node_targets) for node, node_targets in targets.items()}


def _sort_topologically(
    sources: Mapping[str, tuple[str, ...]],
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    targets = _invert(sources)
    waiting = {node: len(node_sources) for node, node_sources in sources.items()}
    order: list[str] = []
    _take_all([node for node, count in waiting.items() if not count], targets, waiting, order)
    sound = tuple(order)
    cycles: list[tuple[str, ...]] = []
    while len(order) < len(sources):
        cycle = _find_cycle(sources, set(order))
        cycles.append(cycle)
        # Treats the cycle as decided, because nodes behind it may form other cycles.
        for node in cycle:
            waiting[node] = -len(sources)
        _take_all(list(cycle), targets, waiting, order)
    return sound, tuple(cycles)


def _take_all(
    ready: list[str],
    targets: Mapping[str, tuple[str, ...]],
    waiting: dict[str, int],
    order: list[str],
) -> None:
    at = 0
    while at < len(ready):
        node = ready[at]
        at += 1
        order.append(node)
        for target in targets[node]:
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)


def _find_cycle(sources: Mapping[str, tuple[str, ...]], done: set[str]) -> tuple[str, ...]:
    """Finds a cycle among the remaining nodes. Each of them has a remaining source, so a walk back
    from any node eventually reaches a node for the second time."""
    node = next(source for source in sources if source not in done)
    path: dict[str, None] = {}
    while node not in path:
        path[node] = None
        node = next(source for source in sources[node] if source not in done)
    nodes = list(path)
    return tuple(reversed(nodes[nodes.index(node) :]))


def _scopes(
    graph: GraphDefinition, order: Iterable[str], sources: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Scope], tuple[DocumentProblem, ...]]:
    scopes: dict[str, Scope] = {}
    problems: list[DocumentProblem] = []
    for node in order:
        source_scopes = {
            source: _output_scope(graph, source, scopes[source]) for source in sources[node]
        }
        scopes[node] = _scope(graph, node, source_scopes, scopes, problems)
    return scopes, tuple(problems)


def _output_scope(graph: GraphDefinition, node: str, scope: Scope) -> Scope:
    """Returns the scope of a node's outputs. A per-item fan-out or a loop opens a new scope."""
    return (*scope, node) if opens_scope(graph.nodes[node]) else scope


def _scope(
    graph: GraphDefinition,
    node: str,
    source_scopes: Mapping[str, Scope],
    scopes: Mapping[str, Scope],
    problems: list[DocumentProblem],
) -> Scope:
    graph_node = graph.nodes[node]
    over = closes_over(graph_node)
    if over is not None:
        return _close_scope(graph, graph_node, over, source_scopes, scopes, problems)
    longest = max(source_scopes.values(), key=len, default=())
    for source, scope in source_scopes.items():
        if longest[: len(scope)] != scope:
            message = (
                f"{source} runs for each item of {scope[-1]}, but other inputs run for each item "
                f"of {longest[-1]}; merge one of them first"
            )
            problems.append(DocumentProblem("mixed_items", message, node))
    if longest and isinstance(graph_node, OutputNode):
        message = f"runs for each item of {longest[-1]}; put a merge over {longest[-1]} before it"
        problems.append(DocumentProblem("open_items", message, node))
    return longest


def _close_scope(
    graph: GraphDefinition,
    merge: Node,
    over: str,
    source_scopes: Mapping[str, Scope],
    scopes: Mapping[str, Scope],
    problems: list[DocumentProblem],
) -> Scope:
    opener = graph.nodes.get(over)
    if opener is None or not opens_scope(opener) or over not in scopes:
        message = f"over must be the id of a fan-out with per_item, not {over!r}"
        problems.append(DocumentProblem("invalid_over", message, merge.id, "over"))
        return max(source_scopes.values(), key=len, default=())
    inside = (*scopes[over], over)
    for source, scope in source_scopes.items():
        if scope != inside:
            message = f"{source} doesn't run for each item of {over}, so it can't be merged over it"
            problems.append(DocumentProblem("mixed_items", message, merge.id))
    return scopes[over]


@dataclass(frozen=True, slots=True)
class RunPlan:
    graph: GraphDefinition
    shape: GraphShape
    workflows: Mapping[str, WorkflowFacts]  # The workflows by node id.
    needed: Mapping[str, frozenset[str]]  # For each node, the ports that must have a value.
    # For each per-item fan-out or loop, the nodes that run once per item or round.
    members: Mapping[str, tuple[str, ...]]
    bundles: frozenset[str]  # The nodes whose `outputs` port is read.
    source: GraphDefinition  # The graph before its expansion.
    library: GraphLibrary  # The graph's subgraphs.

    def node(self, node: str) -> Node:
        return self.graph.nodes[node]

    def workflow_node(self, node: str) -> WorkflowNode:
        graph_node = self.graph.nodes[node]
        if not isinstance(graph_node, WorkflowNode):
            raise TypeError(f"node {node} doesn't run a workflow")
        return graph_node

    def scope(self, node: str) -> Scope:
        return self.shape.scopes[node]

    def lane(self, node: str) -> str:
        """Returns the innermost map around a node that limits concurrent jobs. Returns an empty
        string if no map limits them."""
        return max(
            (lane for lane in self.graph.lanes if node.startswith(lane)), key=len, default=""
        )

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(node for node in self.shape.order if not self.shape.sources[node])

    def wanted_type(self, node: str, port: str) -> PortType:
        facts = self.workflows.get(node)
        prop = facts.property_named(port) if facts else None
        return (type_named(prop.type) if prop else None) or ANY


def plan_of(
    source: GraphDefinition, catalogue: GraphCatalogue, library: GraphLibrary = NO_GRAPHS
) -> RunPlan:
    """Plans a graph. It must have been validated against the same catalog and library."""
    graph, problems = expand(source, library)
    raise_problems(list(problems))
    shape = shape_of(graph)
    workflows = resolve_workflows(graph, catalogue)
    lacking = [
        DocumentProblem("unknown_workflow", catalogue.why_unknown(node), node.id, node.work_field)
        for node in graph.nodes.values()
        if isinstance(node, WorkflowNode) and node.id not in workflows
    ]
    raise_problems([*lacking, *shape.problems, *cycle_problems(shape)])
    needed = {node: _needed(graph.nodes[node], workflows) for node in graph.nodes}
    bundles = frozenset(
        connection.source.node
        for connection in graph.connections
        if connection.source.port == OUTPUTS_PORT
    )
    members = _members(graph, shape)
    return RunPlan(graph, shape, workflows, needed, members, bundles, source, library)


def resolve_workflows(
    graph: GraphDefinition, catalogue: GraphCatalogue
) -> dict[str, WorkflowFacts]:
    """Returns the workflows by node id. Leaves out nodes whose workflow is unknown."""
    workflows: dict[str, WorkflowFacts] = {}
    for node in graph.nodes.values():
        facts = isinstance(node, WorkflowNode) and catalogue.facts_for(node)
        if facts:
            workflows[node.id] = facts
    return workflows


def cycle_problems(shape: GraphShape) -> list[DocumentProblem]:
    return [
        DocumentProblem(
            "cycle", "the graph has a cycle: " + " → ".join((*cycle, cycle[0])), cycle[0]
        )
        for cycle in shape.cycles
    ]


def raise_problems(problems: list[DocumentProblem]) -> None:
    """Raises InvalidInput with all problems, unless the list is empty."""
    if not problems:
        return
    lines = "\n".join(f"  {problem}" for problem in problems)
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise InvalidInput(
        f"the graph has {count}:\n{lines}", problems=[problem._asdict() for problem in problems]
    )


def is_required(prop: Property) -> bool:
    return bool(prop.required) and prop.default is None


def _needed(node: Node, workflows: Mapping[str, WorkflowFacts]) -> frozenset[str]:
    if isinstance(node, ClosingNode | ValueNode):
        return frozenset()
    if not isinstance(node, WorkflowNode):
        return frozenset(inputs_of(node) or ())
    facts = workflows[node.id].properties
    return _read_by(node.properties) | {prop.name for prop in facts if is_required(prop)}


def _read_by(value: Any) -> frozenset[str]:
    """Returns the ports of the values that templates read without a default."""
    paths = (path for template in templates_in(value) for path in template.needed_paths)
    return frozenset(map(reference_port, paths))


def _members(graph: GraphDefinition, shape: GraphShape) -> dict[str, tuple[str, ...]]:
    openers = [
        node.id for node in graph.nodes.values() if isinstance(node, FanOutNode | RoundsNode)
    ]
    members: dict[str, list[str]] = {opener: [] for opener in openers}
    for node in shape.order:
        if shape.scopes[node]:
            members[shape.scopes[node][-1]].append(node)
    return {fanout: tuple(nodes) for fanout, nodes in members.items()}


OUTCOMES_MAX = 256  # Maximum number of branch combinations that a quote evaluates separately.


@dataclass(frozen=True, slots=True)
class RunQuote:
    tokens_min: int
    tokens_max: int
    jobs_min: int
    jobs_max: int
    seconds_min: float
    seconds_max: float
    executions_min: int = 0  # Nodes that run or are skipped count once per item and round.
    executions_max: int = 0
    # Workflows without a known duration. Their jobs count as 0 seconds.
    unknown_durations: tuple[str, ...] = ()
    warnings: tuple[DocumentProblem, ...] = ()  # Temporary problems, such as a missing backend.


class _Sum(NamedTuple):
    tokens: int
    jobs: int
    seconds: float
    executions: int


def quote_plan(
    plan: RunPlan, inputs: Mapping[str, Any] | None = None, *, side_by_side: int = 1
) -> RunQuote:
    """Estimates the price and duration of a run. `side_by_side` is the number of jobs that can run
    concurrently."""
    least, most = _widths(plan, inputs or {})
    parallel = max(1, min(side_by_side, plan.graph.at_once or side_by_side))
    junctions = _junctions(plan)
    is_few = prod(len(ways) for ways in junctions.values()) <= OUTCOMES_MAX
    ways = [_running_nodes(plan, fires) for fires in _outcomes(junctions)] if is_few else []
    if not is_few:
        low_ways, high_ways = [_running_nodes(plan, {})], [set(plan.shape.order)]
    else:
        low_ways = high_ways = ways
    low = [_sum(plan, way, least, parallel, with_reuse=True) for way in low_ways]
    high = [_sum(plan, way, most, parallel) for way in high_ways]
    return RunQuote(
        tokens_min=min(total.tokens for total in low),
        tokens_max=max(total.tokens for total in high),
        jobs_min=min(total.jobs for total in low),
        jobs_max=max(total.jobs for total in high),
        seconds_min=min(total.seconds for total in low),
        seconds_max=max(total.seconds for total in high),
        executions_min=min(total.executions for total in low),
        executions_max=max(total.executions for total in high),
        unknown_durations=_unknown(plan),
    )


def require_few_executions(quote: RunQuote, most: int) -> None:
    """Refuses a run that will certainly have too many executions, before it spends any tokens."""
    if quote.executions_min > most:
        raise LimitExceeded(
            f"the run would have at least {quote.executions_min:,} executions, "
            f"more than its limit of {most:,}; use fewer items, rounds or nodes"
        )


def _ways(node: Node) -> tuple[str, ...]:
    """Returns the ports of a junction, which is a node that fires exactly one of them. Returns an
    empty tuple for other nodes."""
    match node:
        case ConditionNode():
            return (TRUE_PORT, FALSE_PORT)
        case SwitchNode(cases=cases):
            return (*(case.name for case in cases), DEFAULT_PORT)
        case ApproveNode():
            return (APPROVED_PORT, REJECTED_PORT)
    return ()


def _junctions(plan: RunPlan) -> dict[str, tuple[str, ...]]:
    ways_by_node = {node: _ways(plan.node(node)) for node in plan.shape.order}
    return {node: ways for node, ways in ways_by_node.items() if ways}


def _outcomes(junctions: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, frozenset[str]]]:
    """Yields each combination of branches: the port that fires, for each junction."""
    for answers in product(*junctions.values()):
        yield {node: frozenset({port}) for node, port in zip(junctions, answers, strict=True)}


def _running_nodes(plan: RunPlan, fires: Mapping[str, frozenset[str]]) -> set[str]:
    """Returns the nodes that run if the junctions fire the ports in `fires`. If `fires` is empty,
    leaves out the nodes behind junctions, because no branch is certain."""
    alive: set[str] = set()
    for node in plan.shape.order:
        if _runs(plan, node, alive, fires):
            alive.add(node)
    return alive


def _runs(plan: RunPlan, node: str, alive: set[str], fires: Mapping[str, frozenset[str]]) -> bool:
    over = closes_over(plan.node(node))
    if over is not None:
        return over in alive
    opener = plan.graph.openers.get(node)
    if opener is not None and opener not in alive:
        return False
    incoming = plan.shape.incoming[node]
    fed = {
        connection.target.port for connection in incoming if _feeds(plan, connection, alive, fires)
    }
    graph_node = plan.node(node)
    if isinstance(graph_node, ValueNode) and graph_node.values:
        return any(_read_by(value) <= fed for value in graph_node.values.values())
    if not fed and any(not is_reference(connection.target.port) for connection in incoming):
        return False
    return all(
        connection.target.port in fed
        for connection in incoming
        if connection.target.port in plan.needed[node]
    )


def _feeds(
    plan: RunPlan, connection: GraphConnection, alive: set[str], fires: Mapping[str, frozenset[str]]
) -> bool:
    if connection.source.node not in alive:
        return False
    if not _ways(plan.node(connection.source.node)):
        return True
    return connection.source.port in fires.get(connection.source.node, frozenset())


def _sum(
    plan: RunPlan,
    alive: Iterable[str],
    widths: Mapping[str, int],
    parallel: int,
    *,
    with_reuse: bool = False,
) -> _Sum:
    """Sums up the cost of the nodes that run. If `with_reuse` is set, nodes that may reuse a result
    are free."""
    tokens, jobs, work, executions = 0, 0, 0.0, 0
    ready: dict[str, float] = {}
    running = set(alive)
    for node in plan.shape.order:
        # A node that isn't reached is skipped, which counts as an execution.
        executions += prod(
            widths[opener] if opener in running else 0 for opener in plan.scope(node)
        )
        if node not in running:
            continue
        times = prod(widths[opener] for opener in plan.scope(node))
        facts = plan.workflows.get(node)
        if with_reuse and facts and plan.workflow_node(node).reuse:
            facts = None
        seconds = (facts.typical_seconds or 0.0) if facts else 0.0
        begin = max((ready.get(source, 0.0) for source in plan.shape.sources[node]), default=0.0)
        rounds = prod(widths[opener] for opener in plan.scope(node) if _is_loop(plan, opener))
        ready[node] = begin + (seconds * rounds if times else 0.0)
        if facts is not None:
            tokens, jobs, work = (
                tokens + times * facts.price_tokens,
                jobs + times,
                work + times * seconds,
            )
    return _Sum(tokens, jobs, max([work / parallel, *ready.values()]), executions)


def _is_loop(plan: RunPlan, node: str) -> bool:
    return isinstance(plan.node(node), RoundsNode)


def _widths(plan: RunPlan, inputs: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the minimum and maximum number of items of each fan-out, and of rounds of each loop.
    If a list is known, both numbers are the same."""
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for node in plan.graph.nodes.values():
        if isinstance(node, RoundsNode):
            least[node.id], most[node.id] = 1, node.at_most
        if isinstance(node, FanOutNode) and node.per_item:
            known = _known_width(plan, node, inputs)
            least[node.id] = 0 if known is None else known
            most[node.id] = node.max_items if known is None else min(known, node.max_items)
    return least, most


def _known_width(plan: RunPlan, node: FanOutNode, inputs: Mapping[str, Any]) -> int | None:
    source = next((connection.source for connection in plan.shape.incoming[node.id]), None)
    value = _known_value(plan, source, inputs) if source else None
    items = value.get("items", MISSING) if isinstance(value, Mapping) else value
    return len(items) if isinstance(items, list | tuple) else None


def _known_value(plan: RunPlan, source: ConnectionSource, inputs: Mapping[str, Any]) -> Any:
    """Returns a value that doesn't depend on a job: an input or a literal, which may contain
    templates. Returns None for other values.

    Follows nodes that pass the value on unchanged."""
    path = source.path
    for _ in plan.graph.nodes:  # The number of nodes is the maximum length of a chain.
        graph_node = plan.graph.nodes[source.node]
        onward: GraphConnection | None = None
        match graph_node:
            case InputNode():
                return value_at(inputs.get(graph_node.id, graph_node.default), path)
            case PassNode():
                onward = next(iter(plan.shape.incoming[graph_node.id]), None)
            case ValueNode(values=values):
                value = values.get(source.port)
                if not isinstance(value, Template):
                    value, path = value_at(value, path), ()
                whole = value.whole if isinstance(value, Template) else None
                if not isinstance(whole, FieldPath):
                    return value
                port = reference_port(whole)
                arriving = plan.shape.incoming[graph_node.id]
                onward = next(
                    (connection for connection in arriving if connection.target.port == port), None
                )
        if onward is None:
            return None
        source, path = onward.source, (*onward.source.path, *path)
    return None


def _unknown(plan: RunPlan) -> tuple[str, ...]:
    facts = plan.workflows.values()
    return tuple(sorted({workflow.slug for workflow in facts if workflow.typical_seconds is None}))
