"""How the nodes of a graph hang together: order, cycles, and which items they run for.

A node between a per-item fan-out and the merge over it runs once for each item. The fan-outs around
a node, outermost first, are its scope; a run numbers the node's executions by one index for each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from comfyfleet.graphs.model import (
    Connection,
    FanOutNode,
    Graph,
    MergeNode,
    OutputNode,
    Problem,
)

Scope: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    order: tuple[str, ...]  # every node after its sources; those in or behind a cycle are left out
    incoming: Mapping[str, tuple[Connection, ...]]
    sources: Mapping[str, tuple[str, ...]]  # nodes that must be decided first
    targets: Mapping[str, tuple[str, ...]]  # nodes that wait for this one
    scopes: Mapping[str, Scope]
    cycles: tuple[tuple[str, ...], ...] = ()
    problems: tuple[Problem, ...] = ()


def shape_of(graph: Graph) -> Shape:
    """Connections that name unknown nodes are passed over: the validation tells of them."""
    incoming: dict[str, list[Connection]] = {node: [] for node in graph.nodes}
    for each in graph.connections:
        if each.source.node in graph.nodes and each.target.node in graph.nodes:
            incoming[each.target.node].append(each)
    sources = {node: _sources(graph, node, found) for node, found in incoming.items()}
    order, cycles = _ordered(sources)
    scopes, problems = _scopes(graph, order, sources)
    return Shape(
        order,
        {node: tuple(found) for node, found in incoming.items()},
        sources,
        _turned(sources),
        scopes,
        cycles,
        problems,
    )


def _sources(graph: Graph, node: str, incoming: Iterable[Connection]) -> tuple[str, ...]:
    """A merge over a fan-out also waits for the fan-out, which tells how many items there are."""
    merge = graph.nodes[node]
    over = merge.over if isinstance(merge, MergeNode) else None
    first = [over] if over in graph.nodes and over is not None else []
    return tuple(dict.fromkeys([*first, *(each.source.node for each in incoming)]))


def _turned(sources: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    targets: dict[str, list[str]] = {node: [] for node in sources}
    for node, found in sources.items():
        for source in found:
            targets[source].append(node)
    return {node: tuple(found) for node, found in targets.items()}


def _ordered(
    sources: Mapping[str, tuple[str, ...]],
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    targets = _turned(sources)
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
    """Every node that is left has a source that is left: going back from one must come round."""
    node = next(each for each in sources if each not in done)
    path: dict[str, None] = {}
    while node not in path:
        path[node] = None
        node = next(each for each in sources[node] if each not in done)
    nodes = list(path)
    return tuple(reversed(nodes[nodes.index(node) :]))


def _scopes(
    graph: Graph, order: Iterable[str], sources: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Scope], tuple[Problem, ...]]:
    scopes: dict[str, Scope] = {}
    problems: list[Problem] = []
    for node in order:
        given = {source: _given_scope(graph, source, scopes[source]) for source in sources[node]}
        scopes[node] = _scope(graph, node, given, scopes, problems)
    return scopes, tuple(problems)


def _given_scope(graph: Graph, node: str, scope: Scope) -> Scope:
    """The scope of what a node gives: a per-item fan-out opens one."""
    fanout = graph.nodes[node]
    is_opening = isinstance(fanout, FanOutNode) and fanout.per_item
    return (*scope, node) if is_opening else scope


def _scope(
    graph: Graph,
    node: str,
    given: Mapping[str, Scope],
    scopes: Mapping[str, Scope],
    problems: list[Problem],
) -> Scope:
    found = graph.nodes[node]
    if isinstance(found, MergeNode) and found.over is not None:
        return _closed(graph, found, given, scopes, problems)
    longest = max(given.values(), key=len, default=())
    for source, scope in given.items():
        if longest[: len(scope)] != scope:
            message = (
                f"{source} runs for the items of {scope[-1]}, other inputs for those of "
                f"{longest[-1]}; merge one of them first"
            )
            problems.append(Problem("mixed_items", message, node))
    if longest and isinstance(found, OutputNode):
        message = f"runs for each item of {longest[-1]}; put a merge over {longest[-1]} before it"
        problems.append(Problem("open_items", message, node))
    return longest


def _closed(
    graph: Graph,
    merge: MergeNode,
    given: Mapping[str, Scope],
    scopes: Mapping[str, Scope],
    problems: list[Problem],
) -> Scope:
    fanout = graph.nodes.get(merge.over or "")
    if not isinstance(fanout, FanOutNode) or not fanout.per_item:
        message = f"over must name a fan-out with per_item, not {merge.over!r}"
        problems.append(Problem("invalid_over", message, merge.id, "over"))
        return max(given.values(), key=len, default=())
    inside = (*scopes[fanout.id], fanout.id)
    for source, scope in given.items():
        if scope != inside:
            message = (
                f"{source} doesn't run for each item of {fanout.id}, and so can't be merged over it"
            )
            problems.append(Problem("mixed_items", message, merge.id))
    return scopes[fanout.id]
