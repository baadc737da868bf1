"""A graph ready to run: its order, scopes and cycles, and the facts of its workflows at the start.

A node between a per-item fan-out and the merge over it runs once for each item. The fan-outs around a node,
outermost first, are its scope; a run numbers the node's executions by one index for each. A run keeps its
plan, so that a later version of a workflow doesn't change it."""

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
    order: tuple[str, ...]  # every node after its sources; those in or behind a cycle are left out
    incoming: Mapping[str, tuple[GraphConnection, ...]]
    sources: Mapping[str, tuple[str, ...]]  # nodes that must be decided first
    targets: Mapping[str, tuple[str, ...]]  # nodes that wait for this one
    scopes: Mapping[str, Scope]
    cycles: tuple[tuple[str, ...], ...] = ()
    problems: tuple[DocumentProblem, ...] = ()


def shape_of(graph: GraphDefinition) -> GraphShape:
    """Computes order, scopes and cycles. Connections of unknown nodes are skipped; the validation
    reports them.
    """
    incoming: dict[str, list[GraphConnection]] = {node: [] for node in graph.nodes}
    for each in graph.connections:
        if each.source.node in graph.nodes and each.target.node in graph.nodes:
            incoming[each.target.node].append(each)
    sources = {node: _sources(graph, node, found) for node, found in incoming.items()}
    order, cycles = _sort_topologically(sources)
    scopes, problems = _scopes(graph, order, sources)
    return GraphShape(
        order,
        {node: tuple(found) for node, found in incoming.items()},
        sources,
        _invert(sources),
        scopes,
        cycles,
        problems,
    )


def _sources(
    graph: GraphDefinition, node: str, incoming: Iterable[GraphConnection]
) -> tuple[str, ...]:
    """Returns what a node waits for. A merge over a fan-out also waits for the fan-out, which gives
    the count, and what is inside a map or a loop waits for its items or rounds.
    """
    found = graph.nodes[node]
    judge = found.judge if isinstance(found, LoopEndNode) else None
    over = closes_over(found)
    implied = (over or graph.openers.get(node), judge)
    first = [each for each in implied if each is not None and each in graph.nodes]
    return tuple(dict.fromkeys([*first, *(each.source.node for each in incoming)]))


def _invert(sources: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    targets: dict[str, list[str]] = {node: [] for node in sources}
    for node, found in sources.items():
        for source in found:
            targets[source].append(node)
    return {node: tuple(found) for node, found in targets.items()}


def _sort_topologically(
    sources: Mapping[str, tuple[str, ...]],
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    targets = _invert(sources)
    waiting = {node: len(found) for node, found in sources.items()}
    order: list[str] = []
    _take_all([node for node, count in waiting.items() if not count], targets, waiting, order)
    sound = tuple(order)
    cycles: list[tuple[str, ...]] = []
    while len(order) < len(sources):
        cycle = _find_cycle(sources, set(order))
        cycles.append(cycle)
        # As if the cycle had been decided: what is behind it may have cycles of its own.
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
    """Finds a cycle: every remaining node has a remaining source, so going back from one must come
    round.
    """
    node = next(each for each in sources if each not in done)
    path: dict[str, None] = {}
    while node not in path:
        path[node] = None
        node = next(each for each in sources[node] if each not in done)
    nodes = list(path)
    return tuple(reversed(nodes[nodes.index(node) :]))


def _scopes(
    graph: GraphDefinition, order: Iterable[str], sources: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Scope], tuple[DocumentProblem, ...]]:
    scopes: dict[str, Scope] = {}
    problems: list[DocumentProblem] = []
    for node in order:
        given = {source: _given_scope(graph, source, scopes[source]) for source in sources[node]}
        scopes[node] = _scope(graph, node, given, scopes, problems)
    return scopes, tuple(problems)


def _given_scope(graph: GraphDefinition, node: str, scope: Scope) -> Scope:
    """Returns the scope of a node's outputs: a per-item fan-out or a loop opens one."""
    return (*scope, node) if opens_scope(graph.nodes[node]) else scope


def _scope(
    graph: GraphDefinition,
    node: str,
    given: Mapping[str, Scope],
    scopes: Mapping[str, Scope],
    problems: list[DocumentProblem],
) -> Scope:
    found = graph.nodes[node]
    over = closes_over(found)
    if over is not None:
        return _close_scope(graph, found, over, given, scopes, problems)
    longest = max(given.values(), key=len, default=())
    for source, scope in given.items():
        if longest[: len(scope)] != scope:
            message = (
                f"{source} runs for the items of {scope[-1]}, other inputs for those of "
                f"{longest[-1]}; merge one of them first"
            )
            problems.append(DocumentProblem("mixed_items", message, node))
    if longest and isinstance(found, OutputNode):
        message = f"runs for each item of {longest[-1]}; put a merge over {longest[-1]} before it"
        problems.append(DocumentProblem("open_items", message, node))
    return longest


def _close_scope(
    graph: GraphDefinition,
    merge: Node,
    over: str,
    given: Mapping[str, Scope],
    scopes: Mapping[str, Scope],
    problems: list[DocumentProblem],
) -> Scope:
    opener = graph.nodes.get(over)
    if opener is None or not opens_scope(opener) or over not in scopes:
        message = f"over must name a fan-out with per_item, not {over!r}"
        problems.append(DocumentProblem("invalid_over", message, merge.id, "over"))
        return max(given.values(), key=len, default=())
    inside = (*scopes[over], over)
    for source, scope in given.items():
        if scope != inside:
            message = (
                f"{source} doesn't run for each item of {over}, and so can't be merged over it"
            )
            problems.append(DocumentProblem("mixed_items", message, merge.id))
    return scopes[over]


@dataclass(frozen=True, slots=True)
class RunPlan:
    graph: GraphDefinition
    shape: GraphShape
    workflows: Mapping[str, WorkflowFacts]  # by node id
    needed: Mapping[str, frozenset[str]]  # ports without which a node can't do its work
    members: Mapping[str, tuple[str, ...]]  # per-item fan-out → nodes that run once for each item
    bundles: frozenset[str]  # nodes whose `outputs` is read
    source: GraphDefinition  # as it was written
    library: GraphLibrary  # the graphs inside it

    def node(self, node: str) -> Node:
        return self.graph.nodes[node]

    def workflow_node(self, node: str) -> WorkflowNode:
        found = self.graph.nodes[node]
        if not isinstance(found, WorkflowNode):
            raise TypeError(f"{node} has no jobs")
        return found

    def scope(self, node: str) -> Scope:
        return self.shape.scopes[node]

    def lane(self, node: str) -> str:
        """Returns the innermost map around a node whose jobs run a few at a time, or nothing."""
        return max(
            (each for each in self.graph.lanes if node.startswith(each)), key=len, default=""
        )

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(node for node in self.shape.order if not self.shape.sources[node])

    def wanted_type(self, node: str, port: str) -> PortType:
        facts = self.workflows.get(node)
        found = facts.property_named(port) if facts else None
        return (type_named(found.type) if found else None) or ANY


def plan_of(
    source: GraphDefinition, catalogue: GraphCatalogue, library: GraphLibrary = NO_GRAPHS
) -> RunPlan:
    """Plans a graph that was validated against the same catalogue and library."""
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
        each.source.node for each in graph.connections if each.source.port == OUTPUTS_PORT
    )
    members = _members(graph, shape)
    return RunPlan(graph, shape, workflows, needed, members, bundles, source, library)


def resolve_workflows(
    graph: GraphDefinition, catalogue: GraphCatalogue
) -> dict[str, WorkflowFacts]:
    """Returns the workflow of each workflow node, as far as there is one."""
    found: dict[str, WorkflowFacts] = {}
    for node in graph.nodes.values():
        facts = isinstance(node, WorkflowNode) and catalogue.facts_for(node)
        if facts:
            found[node.id] = facts
    return found


def cycle_problems(shape: GraphShape) -> list[DocumentProblem]:
    return [
        DocumentProblem(
            "cycle", "the graph runs in a circle: " + " → ".join((*cycle, cycle[0])), cycle[0]
        )
        for cycle in shape.cycles
    ]


def raise_problems(problems: list[DocumentProblem]) -> None:
    """Raises with all problems, if there are any."""
    if not problems:
        return
    lines = "\n".join(f"  {problem}" for problem in problems)
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise InvalidInput(
        f"the graph has {count}:\n{lines}", problems=[each._asdict() for each in problems]
    )


def is_required(each: Property) -> bool:
    return bool(each.required) and each.default is None


def _needed(node: Node, workflows: Mapping[str, WorkflowFacts]) -> frozenset[str]:
    if isinstance(node, ClosingNode | ValueNode):
        return frozenset()
    if not isinstance(node, WorkflowNode):
        return frozenset(inputs_of(node) or ())
    facts = workflows[node.id].properties
    return _read_by(node.properties) | {each.name for each in facts if is_required(each)}


def _read_by(value: Any) -> frozenset[str]:
    """Returns the ports of what templates read and can't do without."""
    paths = (path for each in templates_in(value) for path in each.needed_paths)
    return frozenset(map(reference_port, paths))


def _members(graph: GraphDefinition, shape: GraphShape) -> dict[str, tuple[str, ...]]:
    openers = [
        each.id for each in graph.nodes.values() if isinstance(each, FanOutNode | RoundsNode)
    ]
    members: dict[str, list[str]] = {opener: [] for opener in openers}
    for node in shape.order:
        if shape.scopes[node]:
            members[shape.scopes[node][-1]].append(node)
    return {fanout: tuple(found) for fanout, found in members.items()}


OUTCOMES_MAX = 256  # combinations of ways that are counted one by one


@dataclass(frozen=True, slots=True)
class RunQuote:
    tokens_min: int
    tokens_max: int
    jobs_min: int
    jobs_max: int
    seconds_min: float
    seconds_max: float
    executions_min: int = 0  # nodes that run or are skipped, each counted per item and round
    executions_max: int = 0
    unknown_durations: tuple[str, ...] = ()  # workflows without a known duration; counted as 0 s
    warnings: tuple[DocumentProblem, ...] = ()  # what no backend could run now


class _Sum(NamedTuple):
    tokens: int
    jobs: int
    seconds: float
    executions: int


def quote_plan(
    plan: RunPlan, inputs: Mapping[str, Any] | None = None, *, side_by_side: int = 1
) -> RunQuote:
    """Estimates price and duration; `side_by_side` is how many jobs of the run can run at a time."""
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
        tokens_min=min(each.tokens for each in low),
        tokens_max=max(each.tokens for each in high),
        jobs_min=min(each.jobs for each in low),
        jobs_max=max(each.jobs for each in high),
        seconds_min=min(each.seconds for each in low),
        seconds_max=max(each.seconds for each in high),
        executions_min=min(each.executions for each in low),
        executions_max=max(each.executions for each in high),
        unknown_durations=_unknown(plan),
    )


def require_few_executions(quote: RunQuote, most: int) -> None:
    """Refuses a run that surely would have too many executions, before anything is spent on it."""
    if quote.executions_min > most:
        raise LimitExceeded(
            f"the run would have at least {quote.executions_min:,} executions, "
            f"more than its limit of {most:,}; use fewer items, rounds or nodes"
        )


def _ways(node: Node) -> tuple[str, ...]:
    """Returns the ports of which one fires; none for a node that is no junction."""
    match node:
        case ConditionNode():
            return (TRUE_PORT, FALSE_PORT)
        case SwitchNode(cases=cases):
            return (*(each.name for each in cases), DEFAULT_PORT)
        case ApproveNode():
            return (APPROVED_PORT, REJECTED_PORT)
    return ()


def _junctions(plan: RunPlan) -> dict[str, tuple[str, ...]]:
    found = {node: _ways(plan.node(node)) for node in plan.shape.order}
    return {node: ways for node, ways in found.items() if ways}


def _outcomes(junctions: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, frozenset[str]]]:
    """Returns the ports that fire, for each combination of results."""
    for answers in product(*junctions.values()):
        yield {node: frozenset({port}) for node, port in zip(junctions, answers, strict=True)}


def _running_nodes(plan: RunPlan, fires: Mapping[str, frozenset[str]]) -> set[str]:
    """Returns the nodes that run, if every condition fires the ports given; none: neither is
    certain.
    """
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
    fed = {each.target.port for each in incoming if _feeds(plan, each, alive, fires)}
    found = plan.node(node)
    if isinstance(found, ValueNode) and found.values:
        return any(_read_by(value) <= fed for value in found.values.values())
    if not fed and any(not is_reference(each.target.port) for each in incoming):
        return False
    return all(
        each.target.port in fed for each in incoming if each.target.port in plan.needed[node]
    )


def _feeds(
    plan: RunPlan, each: GraphConnection, alive: set[str], fires: Mapping[str, frozenset[str]]
) -> bool:
    if each.source.node not in alive:
        return False
    if not _ways(plan.node(each.source.node)):
        return True
    return each.source.port in fires.get(each.source.node, frozenset())


def _sum(
    plan: RunPlan,
    alive: Iterable[str],
    widths: Mapping[str, int],
    parallel: int,
    *,
    with_reuse: bool = False,
) -> _Sum:
    """`with_reuse`: as if nodes that may take a result that is there already all did."""
    tokens, jobs, work, executions = 0, 0, 0.0, 0
    ready: dict[str, float] = {}
    running = set(alive)
    for node in plan.shape.order:
        # A node that is not reached is skipped, which is an execution, too.
        executions += prod(widths[each] if each in running else 0 for each in plan.scope(node))
        if node not in running:
            continue
        times = prod(widths[each] for each in plan.scope(node))
        facts = plan.workflows.get(node)
        if with_reuse and facts and plan.workflow_node(node).reuse:
            facts = None
        seconds = (facts.typical_seconds or 0.0) if facts else 0.0
        begin = max((ready.get(each, 0.0) for each in plan.shape.sources[node]), default=0.0)
        rounds = prod(widths[each] for each in plan.scope(node) if _is_loop(plan, each))
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
    """Returns how many items each fan-out has, at least and at most; equal where the list is known."""
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
    source = next((each.source for each in plan.shape.incoming[node.id]), None)
    value = _known_value(plan, source, inputs) if source else None
    items = value.get("items", MISSING) if isinstance(value, Mapping) else value
    return len(items) if isinstance(items, list | tuple) else None


def _known_value(plan: RunPlan, source: ConnectionSource, inputs: Mapping[str, Any]) -> Any:
    """Returns a value that doesn't depend on a job: an input, or a literal, perhaps with templates inside it.

    Follows nodes that pass it on unchanged. Returns None for other values.
    """
    path = source.path
    for _ in plan.graph.nodes:  # no chain is longer
        found = plan.graph.nodes[source.node]
        onward: GraphConnection | None = None
        match found:
            case InputNode():
                return value_at(inputs.get(found.id, found.default), path)
            case PassNode():
                onward = next(iter(plan.shape.incoming[found.id]), None)
            case ValueNode(values=values):
                value = values.get(source.port)
                if not isinstance(value, Template):
                    value, path = value_at(value, path), ()
                whole = value.whole if isinstance(value, Template) else None
                if not isinstance(whole, FieldPath):
                    return value
                port = reference_port(whole)
                arriving = plan.shape.incoming[found.id]
                onward = next((each for each in arriving if each.target.port == port), None)
        if onward is None:
            return None
        source, path = onward.source, (*onward.source.path, *path)
    return None


def _unknown(plan: RunPlan) -> tuple[str, ...]:
    facts = plan.workflows.values()
    return tuple(sorted({each.slug for each in facts if each.typical_seconds is None}))
