"""Changes to a document as it was saved: each gives a new one, and copies only what it touches."""

from collections.abc import Callable, Mapping
from typing import Any

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.limits import DEFAULT_LIMITS
from comfyfleet.workflow.parse import node_id

JsonObject = dict[str, Any]
Edit = Callable[[JsonObject], JsonObject]
# Where a graph is: the index of a definition in the list of each level. Empty for the root graph.
Path = tuple[int, ...]


def graph_paths(document: JsonObject) -> dict[str, Path]:
    """Of the root graph (its id is the empty text) and of all definitions.

    Of two definitions with one id the first counts, as everywhere.
    """
    found: dict[str, Path] = {"": ()}
    pending: list[tuple[JsonObject, Path]] = [(document, ())]
    while pending:
        owner, path = pending.pop()
        if len(path) > DEFAULT_LIMITS.subgraph_depth_max:
            raise LimitExceeded(
                f"definitions are nested more than {DEFAULT_LIMITS.subgraph_depth_max} levels deep"
            )
        if path:
            found.setdefault(node_id(owner.get("id"), "definitions"), path)
        inner = [(entry, (*path, index)) for index, entry in enumerate(_subgraphs(owner))]
        pending.extend(reversed(inner))
    return found


def graph_at(document: JsonObject, path: Path) -> JsonObject:
    for index in path:
        document = _subgraphs(document)[index]
    return document


def nodes_of(graph: JsonObject) -> list[JsonObject]:
    return graph.get("nodes") or []


def with_graph(document: JsonObject, path: Path, edit: Edit) -> JsonObject:
    graph = edit(graph_at(document, path))
    for depth in range(len(path) - 1, -1, -1):
        owner = graph_at(document, path[:depth])
        entries = list(_subgraphs(owner))
        entries[path[depth]] = graph
        graph = _with_subgraphs(owner, entries)
    return graph


def with_definition(document: JsonObject, definition: JsonObject) -> JsonObject:
    """One more definition, behind all others: so the ids that those lead to stay as they are."""
    return _with_subgraphs(document, [*_subgraphs(document), definition])


def with_nodes(graph: JsonObject, changes: Mapping[int, Mapping[str, Any]]) -> JsonObject:
    """`changes` are new members of nodes, by the index of the node."""
    nodes = [
        {**node, **changes[index]} if index in changes else node
        for index, node in enumerate(nodes_of(graph))
    ]
    return {**graph, "nodes": nodes}


def _subgraphs(owner: JsonObject) -> list[JsonObject]:
    return (owner.get("definitions") or {}).get("subgraphs") or []


def _with_subgraphs(owner: JsonObject, entries: list[JsonObject]) -> JsonObject:
    return {**owner, "definitions": {**(owner.get("definitions") or {}), "subgraphs": entries}}
