"""Changes to a saved document. Each function returns a new, consistent document and copies only the
parts that it changes."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from comfyfleet.errors import LimitExceeded
from comfyfleet.workflow.model import DEFAULT_LIMITS, SUBGRAPH_INPUT_ID, Mode
from comfyfleet.workflow.parse import node_id
from comfyfleet.workflow.resolve import InputSource

JsonObject = dict[str, Any]
Edit = Callable[[JsonObject], JsonObject]
# The position of a graph: at each level, the index of a definition in its list. The path of the
# root graph is empty.
Path = tuple[int, ...]


def graph_paths(document: JsonObject) -> dict[str, Path]:
    """Returns the path of each definition by its id, and that of the root graph under the empty id.

    If two definitions have the same id, the first one counts, as everywhere else.
    """
    paths: dict[str, Path] = {"": ()}
    pending: list[tuple[JsonObject, Path]] = [(document, ())]
    while pending:
        owner, path = pending.pop()
        if len(path) > DEFAULT_LIMITS.subgraph_depth_max:
            raise LimitExceeded(
                f"definitions are nested more than {DEFAULT_LIMITS.subgraph_depth_max} levels deep"
            )
        if path:
            paths.setdefault(node_id(owner.get("id"), "definitions"), path)
        inner = [(entry, (*path, index)) for index, entry in enumerate(_subgraphs(owner))]
        pending.extend(reversed(inner))
    return paths


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
    """Adds a definition after all others, so that the existing paths don't change."""
    return _with_subgraphs(document, [*_subgraphs(document), definition])


def with_nodes(graph: JsonObject, changes: Mapping[int, Mapping[str, Any]]) -> JsonObject:
    """Changes nodes of a graph. `changes` has the new members of each node, by the node's index."""
    nodes = [
        {**node, **changes[index]} if index in changes else node
        for index, node in enumerate(nodes_of(graph))
    ]
    return {**graph, "nodes": nodes}


def _subgraphs(owner: JsonObject) -> list[JsonObject]:
    return (owner.get("definitions") or {}).get("subgraphs") or []


def _with_subgraphs(owner: JsonObject, entries: list[JsonObject]) -> JsonObject:
    return {**owner, "definitions": {**(owner.get("definitions") or {}), "subgraphs": entries}}


def with_own_definition(document: JsonObject, graph: str, index: int) -> tuple[JsonObject, str]:
    """Gives the instance at `index` its own copy of its definition if other instances share the
    definition. Returns the document and the definition's id."""
    paths = graph_paths(document)
    instance = nodes_of(graph_at(document, paths[graph]))[index]
    shared: str = instance["type"]
    if count_instances(document, shared, paths) < 2:
        return document, shared
    own_id = _free_id(shared, node_id(instance.get("id", -1), "instance"), paths)
    # Inner definitions stay where they are, because they can be used from anywhere in the document.
    copy = {**graph_at(document, paths[shared]), "id": own_id}
    copy.pop("definitions", None)
    document = with_graph(
        document, paths[graph], lambda saved: with_nodes(saved, {index: {"type": own_id}})
    )
    return with_definition(document, copy), own_id


def with_all_inside(
    document: JsonObject, graph: str, index: int, mode: Mode, definitions: Collection[str]
) -> JsonObject:
    """Sets the mode of all nodes inside an instance, and inside nested instances of
    `definitions`."""
    pending = [(graph, index, 0)]
    while pending:
        around, at, depth = pending.pop()
        if depth > DEFAULT_LIMITS.subgraph_depth_max:
            raise LimitExceeded(
                f"subgraphs are nested more than {DEFAULT_LIMITS.subgraph_depth_max} levels deep"
            )
        document, own_id = with_own_definition(document, around, at)
        path = graph_paths(document)[own_id]
        nodes = nodes_of(graph_at(document, path))
        changes = {place: {"mode": int(mode)} for place in range(len(nodes))}
        document = with_graph(document, path, partial(with_nodes, changes=changes))
        inner = [place for place, node in enumerate(nodes) if node["type"] in definitions]
        pending.extend((own_id, place, depth + 1) for place in inner)
    return document


def count_instances(document: JsonObject, definition: str, paths: dict[str, Path]) -> int:
    """Counts the instances of a definition in the root graph and in every definition that the root
    graph uses."""
    reached, pending, count = {""}, [""], 0
    while pending:
        for node in nodes_of(graph_at(document, paths[pending.pop()])):
            node_type = node["type"]
            count += node_type == definition
            if node_type in paths and node_type not in reached:
                reached.add(node_type)
                pending.append(node_type)
    return count


def _free_id(shared: str, instance: str, used_ids: dict[str, Path]) -> str:
    """Returns an unused id. It is a UUID, because editors expect one, and depends only on the
    document, so that results are reproducible."""
    candidates = (
        str(uuid5(NAMESPACE_OID, f"{shared} {instance} {number}"))
        for number in range(len(used_ids) + 1)  # one more candidate than there are used ids
    )
    return next(own for own in candidates if own not in used_ids)


def with_links_moved(graph: JsonObject, moves: Mapping[int, InputSource]) -> JsonObject:
    """Makes each link in `moves` (by its id) start at the given output. Its end doesn't change."""
    if not moves:
        return graph
    raw_ids = {node_id(node.get("id", -1), "node"): node.get("id") for node in nodes_of(graph)}
    raw_ids[SUBGRAPH_INPUT_ID] = int(SUBGRAPH_INPUT_ID)
    links = []
    for link in graph["links"]:
        source = moves.get(_link_id(link))
        moved = source and _starting_at(link, raw_ids[source.node_id], source.slot)
        links.append(moved or link)
    graph = _without_bends(_without_starts({**graph, "links": links}, moves), moves)
    return _with_starts(graph, moves)


def without_links(graph: JsonObject, removed: Collection[int]) -> JsonObject:
    if not removed:
        return graph
    links = [link for link in graph["links"] if _link_id(link) not in removed]
    nodes = [_without_inputs(node, removed) for node in nodes_of(graph)]
    graph = {**graph, "links": links, "nodes": nodes}
    return _without_bends(_without_starts(graph, removed), removed)


def _link_id(link: Any) -> int:
    """Returns the id of a link, or -1 for a hole in the list of links, which very old files
    contain."""
    value = link.get("id") if isinstance(link, dict) else link and link[0]
    return -1 if value is None else int(value)


def _starting_at(link: Any, origin: Any, slot: int) -> Any:
    if isinstance(link, dict):
        moved = {key: value for key, value in link.items() if key != "parentId"}
        return {**moved, "origin_id": origin, "origin_slot": slot}
    return [link[0], origin, slot, *link[3:]]


def _without_inputs(node: JsonObject, removed: Collection[int]) -> JsonObject:
    inputs = node.get("inputs")
    if not inputs or not any(entry.get("link") in removed for entry in inputs):
        return node
    entries = [
        {**entry, "link": None} if entry.get("link") in removed else entry for entry in inputs
    ]
    return {**node, "inputs": entries}


def _without_starts(graph: JsonObject, removed: Collection[int]) -> JsonObject:
    nodes = [
        {**node, "outputs": _without(node["outputs"], "links", removed)}
        if node.get("outputs")
        else node
        for node in nodes_of(graph)
    ]
    graph = {**graph, "nodes": nodes}
    return _with_ports(graph, _without(graph.get("inputs"), "linkIds", removed))


def _with_starts(graph: JsonObject, moves: Mapping[int, InputSource]) -> JsonObject:
    starts: dict[str, dict[int, list[int]]] = {}
    for link, source in moves.items():
        starts.setdefault(source.node_id, {}).setdefault(source.slot, []).append(link)
    nodes = [
        {**node, "outputs": _with(node["outputs"], "links", starts[key])}
        if (key := node_id(node.get("id", -1), "node")) in starts and node.get("outputs")
        else node
        for node in nodes_of(graph)
    ]
    ports = _with(graph.get("inputs"), "linkIds", starts.get(SUBGRAPH_INPUT_ID, {}))
    return _with_ports({**graph, "nodes": nodes}, ports)


def _with_ports(graph: JsonObject, ports: Any) -> JsonObject:
    return {**graph, "inputs": ports} if isinstance(ports, list) else graph


def _without(entries: Any, key: str, removed: Collection[int]) -> Any:
    """Removes link ids from a member of all entries. Returns the same list if nothing was
    removed."""
    if not isinstance(entries, list) or not any(_names(entry, key, removed) for entry in entries):
        return entries
    return [
        {**entry, key: [link for link in entry[key] if not _is_in(link, removed)]}
        if _names(entry, key, removed)
        else entry
        for entry in entries
    ]


def _with(entries: Any, key: str, links: Mapping[int, list[int]]) -> Any:
    if not isinstance(entries, list):
        return entries
    return [
        {**entry, key: [*_listed(entry.get(key)), *links[slot]]}
        if slot in links and isinstance(entry, dict)
        else entry
        for slot, entry in enumerate(entries)
    ]


def _listed(links: Any) -> list[Any]:
    return links if isinstance(links, list) else []


def _names(entry: Any, key: str, removed: Collection[int]) -> bool:
    links = entry.get(key) if isinstance(entry, dict) else None
    return isinstance(links, list) and any(_is_in(link, removed) for link in links)


def _is_in(link: Any, removed: Collection[int]) -> bool:
    return isinstance(link, int | float | str) and link in removed


def _without_bends(graph: JsonObject, removed: Collection[int]) -> JsonObject:
    """Removes the reroute points of moved links, because their positions only suit the old
    start."""
    if isinstance(graph.get("reroutes"), list):
        graph = {**graph, "reroutes": _without(graph["reroutes"], "linkIds", removed)}
    extra = graph.get("extra")
    if not isinstance(extra, dict):
        return graph
    changed = {}
    if isinstance(extra.get("reroutes"), list):
        changed["reroutes"] = _without(extra["reroutes"], "linkIds", removed)
    if isinstance(extra.get("linkExtensions"), list):
        changed["linkExtensions"] = [
            entry
            for entry in extra["linkExtensions"]
            if not (isinstance(entry, dict) and _is_in(entry.get("id"), removed))
        ]
    return {**graph, "extra": {**extra, **changed}} if changed else graph
