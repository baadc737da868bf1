"""Instances that can make nothing: everything in their definition is switched off."""

from typing import Any

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.behaviours import is_virtual
from comfyfleet.workflow.limits import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.model import Graph, Node, Workflow
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.subgraphs import innermost_first
from comfyfleet.workflow.switching.model import DeadShell
from comfyfleet.workflow.switching.selectors import name_of


def dead_shells(
    document: dict[str, Any], *, limits: Limits = DEFAULT_LIMITS
) -> tuple[DeadShell, ...]:
    """Whether the instance itself is on doesn't matter: it can make nothing either way."""
    workflow = parse(document, limits=limits)
    dead = dead_definitions(workflow)
    worth_entering = _leading_to(dead, workflow)
    found: list[DeadShell] = []
    pending: list[tuple[Graph, str, int]] = [(workflow.root, "", 0)]
    budget = limits.nodes_max
    while pending:
        graph, prefix, depth = pending.pop()
        budget -= len(graph.nodes)
        if budget < 0 or depth > limits.subgraph_depth_max:
            raise LimitExceeded(f"more than {limits.nodes_max} nodes when subgraphs are expanded")
        inner = []
        for node in graph.nodes:
            if node.type in dead:
                definition = workflow.definitions[node.type].name
                found.append(DeadShell(prefix + node.id, name_of(node, workflow), definition))
            elif node.type in worth_entering:
                inner.append((workflow.definitions[node.type], f"{prefix}{node.id}:", depth + 1))
        pending.extend(reversed(inner))
    return tuple(found)


def dead_definitions(workflow: Workflow) -> frozenset[str]:
    """Ids of definitions with nodes to execute, all of which are muted or bypassed. An inner
    instance is as dead as its own definition."""
    dead: set[str] = set()
    for graph in innermost_first(workflow):
        nodes = [node for node in graph.nodes if not is_virtual(node.type)]
        if nodes and all(node.is_inactive or node.type in dead for node in nodes):
            dead.add(graph.id)
    return frozenset(dead)


def _leading_to(dead: frozenset[str], workflow: Workflow) -> frozenset[str]:
    """Living definitions that have a dead instance somewhere inside."""
    leading: set[str] = set()
    for graph in innermost_first(workflow):
        if graph.id not in dead and any(_is_in(node, dead, leading) for node in graph.nodes):
            leading.add(graph.id)
    return frozenset(leading)


def _is_in(node: Node, *ids: frozenset[str] | set[str]) -> bool:
    return any(node.type in some for some in ids)
