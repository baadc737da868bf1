"""What is wrong with a graph, before anything runs: all of it at once, each with node and port."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from comfyfleet.effects.model import Property
from comfyfleet.effects.models import models_chosen
from comfyfleet.effects.values import checked
from comfyfleet.graphs.budget import VALUE_MAX, size_of, too_large
from comfyfleet.graphs.catalogue import BackendState, Catalogue, Need, WorkflowFacts
from comfyfleet.graphs.documents import read_document
from comfyfleet.graphs.limits import DEFAULT_LIMITS, GraphLimits
from comfyfleet.graphs.model import (
    Fallback,
    FanOutNode,
    Graph,
    InputNode,
    MergeNode,
    Node,
    OutputNode,
    Problem,
    Source,
    WorkflowNode,
)
from comfyfleet.graphs.parsing import parse_graph
from comfyfleet.graphs.placing import alternatives, is_ours, nobody
from comfyfleet.graphs.plan import cycle_problems, must_be_given, resolved
from comfyfleet.graphs.ports import ANY, holds, inputs_of, type_named
from comfyfleet.graphs.porttypes import Types, connection_problems
from comfyfleet.graphs.shape import Shape, shape_of
from comfyfleet.kernel.errors import InvalidValue


class Checked(NamedTuple):
    """`warnings` keep nothing from being run: backends come and go."""

    graph: Graph
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()


def check_text(text: str, catalogue: Catalogue, limits: GraphLimits = DEFAULT_LIMITS) -> Checked:
    return check(read_document(text), catalogue, limits)


def check(document: Any, catalogue: Catalogue, limits: GraphLimits = DEFAULT_LIMITS) -> Checked:
    """Reads a document and validates what could be read, so that one mistake hides no other."""
    parsed = parse_graph(document, limits)
    found = validate(parsed.graph, catalogue, limits, parsed.broken)
    return Checked(parsed.graph, (*parsed.problems, *found), warnings(parsed.graph, catalogue))


def validate(
    graph: Graph,
    catalogue: Catalogue,
    limits: GraphLimits = DEFAULT_LIMITS,
    broken: Collection[str] = (),
) -> tuple[Problem, ...]:
    shape = shape_of(graph)
    workflows = resolved(graph, catalogue)
    types = Types(graph, shape)
    found = [
        *_workflow_problems(graph, workflows, catalogue),
        *connection_problems(graph, types, workflows, broken),
        *_missing_inputs(graph, shape, workflows),
        *cycle_problems(shape),
        *shape.problems,
        *_unreachable(graph, shape, broken),
        *_too_large(graph, shape, limits),
        *_growing(graph, shape),
    ]
    return tuple(dict.fromkeys(found))


def _workflow_problems(
    graph: Graph, workflows: Mapping[str, WorkflowFacts], catalogue: Catalogue
) -> Iterator[Problem]:
    for node in graph.nodes.values():
        if not isinstance(node, WorkflowNode):
            continue
        if node.id not in workflows:
            why = catalogue.why_unknown(node)
            yield Problem("unknown_workflow", why, node.id, node.work_field)
        else:
            yield from _literal_problems(node, workflows[node.id])
        if node.fallback_strategy == Fallback.NONE:
            yield from _affinity_problems(node, workflows.get(node.id), graph, catalogue)


def warnings(graph: Graph, catalogue: Catalogue) -> tuple[Problem, ...]:
    """What could not be run just now, and is not refused for that."""
    workflows = resolved(graph, catalogue)
    found: list[Problem] = []
    for node in graph.nodes.values():
        if not isinstance(node, WorkflowNode):
            continue
        facts = workflows.get(node.id)
        if node.fallback_strategy != Fallback.NONE:
            found += _affinity_problems(node, facts, graph, catalogue)
        if (
            facts
            and is_ours(facts)
            and not alternatives(_need(node, facts, graph), catalogue.backends)
        ):
            found.append(Problem("no_backend", nobody(facts), node.id, node.work_field))
    return tuple(found)


def _need(node: WorkflowNode, facts: WorkflowFacts, graph: Graph) -> Need:
    """What comes by a connection is not known yet."""
    unknown = {
        port: "" for id, port in (each.target for each in graph.connections) if id == node.id
    }
    return facts.need_for({**unknown, **node.properties})


def _literal_problems(node: WorkflowNode, workflow: WorkflowFacts) -> Iterator[Problem]:
    for name, value in node.properties.items():
        facts = workflow.property_named(name)
        if facts is None:
            known = ", ".join(each.name for each in workflow.properties) or "none"
            message = f"{workflow.name} has no property {name!r}; it has {known}"
            yield Problem("unknown_property", message, node.id, name)
        elif wrong := value_problem(facts, value):
            yield Problem("type_mismatch", wrong, node.id, name)


def value_problem(each: Property, value: Any) -> str:
    """Why a property can't take a value; empty if it can."""
    try:
        checked(each, value)
    except InvalidValue as problem:
        return problem.message
    return ""


def _affinity_problems(
    node: WorkflowNode, workflow: WorkflowFacts | None, graph: Graph, catalogue: Catalogue
) -> Iterator[Problem]:
    """Being offline is no problem here. What is gone is one only without a fallback."""
    if node.backend_affinity is None:
        return
    meant = [each for each in catalogue.backends if each.is_meant_by(node.backend_affinity)]
    if not meant:
        message = f"there is no backend {node.backend_affinity}"
        yield Problem("unknown_backend", message, node.id, "backend_affinity")
    elif workflow and not any(each.is_able(_need(node, workflow, graph)) for each in meant):
        message = f"{node.backend_affinity} can't run the {node.work_field} {node.name!r}"
        lacks = _models_lacking(node, workflow, meant)
        yield Problem("unable_backend", message + lacks, node.id, "backend_affinity")


def _models_lacking(
    node: WorkflowNode, workflow: WorkflowFacts, meant: Iterable[BackendState]
) -> str:
    """Only models that the node itself names: which others there are is the operator's."""
    chosen = models_chosen(workflow.properties, node.properties)
    named = [each for each in chosen if each.file in node.properties.values()]
    offers = [each.offer for each in meant if each.offer is not None]
    lacking = [each.file for each in named if any(offer.lacks_choice(each) for offer in offers)]
    return f": it lacks {', '.join(lacking)}" if lacking else ""


def _missing_inputs(
    graph: Graph, shape: Shape, workflows: Mapping[str, WorkflowFacts]
) -> Iterator[Problem]:
    connected = {each.target for each in graph.connections}
    for node in graph.nodes.values():
        given = node.properties if isinstance(node, WorkflowNode) else {}
        for port in _must_have(node, shape, workflows):
            if port not in given and (node.id, port) not in connected:
                yield Problem("missing_input", "nothing is connected here", node.id, port)
        for port in given:
            if (node.id, port) in connected:
                yield Problem("repeated_input", "has both a value and a connection", node.id, port)


def _must_have(node: Node, shape: Shape, workflows: Mapping[str, WorkflowFacts]) -> tuple[str, ...]:
    if isinstance(node, MergeNode):
        return () if shape.incoming[node.id] else ("input_0",)
    if not isinstance(node, WorkflowNode):
        return tuple(inputs_of(node) or ())
    facts = workflows[node.id].properties if node.id in workflows else ()
    return tuple(each.name for each in facts if must_be_given(each))


def _unreachable(graph: Graph, shape: Shape, broken: Collection[str]) -> Iterator[Problem]:
    """A node that leads to no output would be paid for, and nobody could get what it made."""
    outputs = [each.id for each in graph.nodes.values() if isinstance(each, OutputNode)]
    if not outputs and not broken:
        yield Problem("no_output", "the graph has no output node")
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
            yield Problem("unreachable_node", "no output of the graph can be reached from it", node)


def _too_large(graph: Graph, shape: Shape, limits: GraphLimits) -> Iterator[Problem]:
    jobs = 0
    for node, scope in shape.scopes.items():
        if len(scope) > limits.fanout_depth_max:
            message = f"stands inside {len(scope)} fan-outs, more than {limits.fanout_depth_max}"
            yield Problem("too_deep", message, node)
        if isinstance(graph.nodes[node], WorkflowNode):
            jobs += width_max(graph, scope)
    if jobs > limits.jobs_max:
        message = (
            f"the graph could start {jobs:,} jobs, more than {limits.jobs_max:,}; lower max_items"
        )
        yield Problem("too_many_jobs", message)


def _growing(graph: Graph, shape: Shape) -> Iterator[Problem]:
    """Merges that repeat merges: how many values they make whatever the run is given, if all arrive."""
    counts: dict[str, int] = {}
    for node in shape.order:
        fed = [_count_at(counts, each.source) for each in shape.incoming[node]]
        # A merge adds itself, its list and its count; others hand on what comes.
        count = 3 + sum(fed) if isinstance(graph.nodes[node], MergeNode) else max(fed, default=1)
        counts[node] = count if count <= VALUE_MAX.values else 1  # told once
        if count > VALUE_MAX.values:
            message = f"would hold {count:,} values, more than {VALUE_MAX.values:,}"
            yield Problem("too_large", message, node)


def _count_at(counts: Mapping[str, int], source: Source) -> int:
    """One of several, or their number, is as good as one."""
    is_part = any(each.isdecimal() or each == "count" for each in source.path)
    return 1 if is_part else counts.get(source.node, 1)


def width_max(graph: Graph, scope: tuple[str, ...]) -> int:
    """How often a node runs at most: the widths of the fan-outs around it, multiplied."""
    fanouts = [graph.nodes[each] for each in scope]
    return prod(each.max_items for each in fanouts if isinstance(each, FanOutNode))


def check_inputs(graph: Graph, inputs: Mapping[str, Any]) -> tuple[Problem, ...]:
    """What is wrong with the values that a run was given."""
    nodes = {each.id: each for each in graph.nodes.values() if isinstance(each, InputNode)}
    known = ", ".join(nodes) or "none"
    if not size_of(inputs).fits(VALUE_MAX):
        return (Problem("too_large", f"the inputs are {too_large(VALUE_MAX)}"),)
    problems = [
        Problem("unknown_input", f"the graph has no input {name!r}; it has {known}")
        for name in inputs
        if name not in nodes
    ]
    for node in nodes.values():
        if node.id not in inputs:
            if node.required and node.default is None:
                problems.append(Problem("missing_input", "is not given", node.id))
            continue
        wanted = type_named(node.value_type) or ANY
        if not holds(wanted, inputs[node.id]):
            message = f"takes {wanted}, not {inputs[node.id]!r:.60}"
            problems.append(Problem("type_mismatch", message, node.id))
    return tuple(problems)
