"""A graph made ready to run: its shape, and the facts of its workflows as they were at the start.

A run keeps this, so that a later version of a workflow changes nothing under its feet.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from comfyfleet.effects.model import Property
from comfyfleet.graphs.catalogue import Catalogue, WorkflowFacts
from comfyfleet.graphs.model import FanOutNode, Graph, MergeNode, Node, Problem, WorkflowNode
from comfyfleet.graphs.ports import ANY, PortType, inputs_of, type_named
from comfyfleet.graphs.shape import Scope, Shape, shape_of
from comfyfleet.kernel.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Plan:
    graph: Graph
    shape: Shape
    workflows: Mapping[str, WorkflowFacts]  # by node id
    needed: Mapping[str, frozenset[str]]  # ports without which a node can't do its work
    members: Mapping[str, tuple[str, ...]]  # per-item fan-out → nodes that run once for each item

    def node(self, node: str) -> Node:
        return self.graph.nodes[node]

    def workflow_node(self, node: str) -> WorkflowNode:
        found = self.graph.nodes[node]
        if not isinstance(found, WorkflowNode):
            raise TypeError(f"{node} has no jobs")
        return found

    def scope(self, node: str) -> Scope:
        return self.shape.scopes[node]

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(node for node in self.shape.order if not self.shape.sources[node])

    def wanted_type(self, node: str, port: str) -> PortType:
        facts = self.workflows.get(node)
        found = facts.property_named(port) if facts else None
        return (type_named(found.type) if found else None) or ANY


def plan_of(graph: Graph, catalogue: Catalogue) -> Plan:
    """Of a graph that was validated against the same catalogue."""
    shape = shape_of(graph)
    workflows = resolved(graph, catalogue)
    lacking = [
        Problem("unknown_workflow", catalogue.why_unknown(node), node.id, node.work_field)
        for node in graph.nodes.values()
        if isinstance(node, WorkflowNode) and node.id not in workflows
    ]
    refuse([*lacking, *shape.problems, *cycle_problems(shape)])
    needed = {node: _needed(graph.nodes[node], workflows) for node in graph.nodes}
    return Plan(graph, shape, workflows, needed, _members(graph, shape))


def resolved(graph: Graph, catalogue: Catalogue) -> dict[str, WorkflowFacts]:
    """The workflow of each workflow node, as far as there is one."""
    found: dict[str, WorkflowFacts] = {}
    for node in graph.nodes.values():
        facts = isinstance(node, WorkflowNode) and catalogue.facts_for(node)
        if facts:
            found[node.id] = facts
    return found


def cycle_problems(shape: Shape) -> list[Problem]:
    return [
        Problem("cycle", "the graph runs in a circle: " + " → ".join((*cycle, cycle[0])), cycle[0])
        for cycle in shape.cycles
    ]


def refuse(problems: list[Problem]) -> None:
    """Raises with all of them, if there are any."""
    if not problems:
        return
    lines = "\n".join(f"  {problem}" for problem in problems)
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise InvalidInput(
        f"the graph has {count}:\n{lines}", problems=[each._asdict() for each in problems]
    )


def must_be_given(each: Property) -> bool:
    return bool(each.required) and each.default is None


def _needed(node: Node, workflows: Mapping[str, WorkflowFacts]) -> frozenset[str]:
    if isinstance(node, MergeNode):
        return frozenset()
    if not isinstance(node, WorkflowNode):
        return frozenset(inputs_of(node) or ())
    facts = workflows[node.id].properties
    return frozenset(each.name for each in facts if must_be_given(each))


def _members(graph: Graph, shape: Shape) -> dict[str, tuple[str, ...]]:
    fanouts = [each.id for each in graph.nodes.values() if isinstance(each, FanOutNode)]
    members: dict[str, list[str]] = {fanout: [] for fanout in fanouts}
    for node in shape.order:
        if shape.scopes[node]:
            members[shape.scopes[node][-1]].append(node)
    return {fanout: tuple(found) for fanout, found in members.items()}
