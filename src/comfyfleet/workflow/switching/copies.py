"""An instance gets its own copy of its definition, so that a change inside it changes no other.

Modes are kept in the definition, not with the instance. So a node of one instance can be switched
only where that instance is the only one.
"""

from collections.abc import Collection
from functools import partial
from uuid import NAMESPACE_OID, uuid5

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.limits import DEFAULT_LIMITS
from comfyfleet.workflow.model import Mode
from comfyfleet.workflow.parse import node_id
from comfyfleet.workflow.switching.documents import (
    JsonObject,
    Path,
    graph_at,
    graph_paths,
    nodes_of,
    with_definition,
    with_graph,
    with_nodes,
)


def with_own_definition(document: JsonObject, graph: str, index: int) -> tuple[JsonObject, str]:
    """For the instance at `index` of a graph: the document, and the id of the definition that is
    now its alone."""
    paths = graph_paths(document)
    instance = nodes_of(graph_at(document, paths[graph]))[index]
    shared: str = instance["type"]
    if count_instances(document, shared, paths) < 2:
        return document, shared
    own = _free_id(shared, node_id(instance.get("id", -1), "instance"), paths)
    # Definitions inside it stay where they are: they are found from anywhere in the document.
    copy = {**graph_at(document, paths[shared]), "id": own}
    copy.pop("definitions", None)
    document = with_graph(
        document, paths[graph], lambda saved: with_nodes(saved, {index: {"type": own}})
    )
    return with_definition(document, copy), own


def with_all_inside(
    document: JsonObject, graph: str, index: int, mode: Mode, definitions: Collection[str]
) -> JsonObject:
    """Switches everything inside an instance, and inside inner ones if they are of one of the
    `definitions`."""
    pending = [(graph, index, 0)]
    while pending:
        around, at, depth = pending.pop()
        if depth > DEFAULT_LIMITS.subgraph_depth_max:
            raise LimitExceeded(
                f"more than {DEFAULT_LIMITS.subgraph_depth_max} levels of subgraphs"
            )
        document, own = with_own_definition(document, around, at)
        path = graph_paths(document)[own]
        nodes = nodes_of(graph_at(document, path))
        changes = {place: {"mode": int(mode)} for place in range(len(nodes))}
        document = with_graph(document, path, partial(with_nodes, changes=changes))
        inner = [place for place, node in enumerate(nodes) if node["type"] in definitions]
        pending.extend((own, place, depth + 1) for place in inner)
    return document


def count_instances(document: JsonObject, definition: str, paths: dict[str, Path]) -> int:
    """In the root graph and in every definition that it leads to."""
    reached, pending, count = {""}, [""], 0
    while pending:
        for node in nodes_of(graph_at(document, paths[pending.pop()])):
            node_type = node["type"]
            count += node_type == definition
            if node_type in paths and node_type not in reached:
                reached.add(node_type)
                pending.append(node_type)
    return count


def _free_id(shared: str, instance: str, taken: dict[str, Path]) -> str:
    """The same for the same document: nothing here is random. Editors want it to be a UUID."""
    candidates = (
        str(uuid5(NAMESPACE_OID, f"{shared} {instance} {number}"))
        for number in range(len(taken) + 1)  # one more than can be taken
    )
    return next(own for own in candidates if own not in taken)
