"""Changes to a saved document: each returns a new, consistent one and copies only what it changes."""

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
# Where a graph is: the index of a definition in the list of each level. Empty for the root graph.
Path = tuple[int, ...]


def graph_paths(document: JsonObject) -> dict[str, Path]:
    """Returns the paths of the root graph (its id is the empty text) and of all definitions.

    Of two definitions with the same id the first counts, as everywhere.
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
    """Adds a definition behind all others, so that the ids they lead to stay as they are."""
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


def with_own_definition(document: JsonObject, graph: str, index: int) -> tuple[JsonObject, str]:
    """Gives the instance at `index` a definition of its own; returns the document and that
    definition's id.
    """
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
    """Sets the mode of everything inside an instance, and inside inner ones of one of the
    `definitions`.
    """
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
    """Counts instances in the root graph and in every definition that it leads to."""
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
    """Returns an unused id, the same for the same document: nothing is random. Editors want a UUID."""
    candidates = (
        str(uuid5(NAMESPACE_OID, f"{shared} {instance} {number}"))
        for number in range(len(taken) + 1)  # one more than can be taken
    )
    return next(own for own in candidates if own not in taken)


def with_links_moved(graph: JsonObject, moves: Mapping[int, InputSource]) -> JsonObject:
    """Makes each link, by id, start at the given output and end where it ended."""
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


def without_links(graph: JsonObject, gone: Collection[int]) -> JsonObject:
    if not gone:
        return graph
    links = [link for link in graph["links"] if _link_id(link) not in gone]
    nodes = [_without_inputs(node, gone) for node in nodes_of(graph)]
    graph = {**graph, "links": links, "nodes": nodes}
    return _without_bends(_without_starts(graph, gone), gone)


def _link_id(link: Any) -> int:
    """Returns a link's id; -1 for a hole in the list, as very old files have them."""
    value = link.get("id") if isinstance(link, dict) else link and link[0]
    return -1 if value is None else int(value)


def _starting_at(link: Any, origin: Any, slot: int) -> Any:
    if isinstance(link, dict):
        moved = {key: value for key, value in link.items() if key != "parentId"}
        return {**moved, "origin_id": origin, "origin_slot": slot}
    return [link[0], origin, slot, *link[3:]]


def _without_inputs(node: JsonObject, gone: Collection[int]) -> JsonObject:
    inputs = node.get("inputs")
    if not inputs or not any(entry.get("link") in gone for entry in inputs):
        return node
    entries = [{**entry, "link": None} if entry.get("link") in gone else entry for entry in inputs]
    return {**node, "inputs": entries}


def _without_starts(graph: JsonObject, gone: Collection[int]) -> JsonObject:
    nodes = [
        {**node, "outputs": _without(node["outputs"], "links", gone)}
        if node.get("outputs")
        else node
        for node in nodes_of(graph)
    ]
    graph = {**graph, "nodes": nodes}
    return _with_ports(graph, _without(graph.get("inputs"), "linkIds", gone))


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


def _without(entries: Any, key: str, gone: Collection[int]) -> Any:
    """Returns the same list if nothing is removed."""
    if not isinstance(entries, list) or not any(_names(entry, key, gone) for entry in entries):
        return entries
    return [
        {**entry, key: [link for link in entry[key] if not _is_in(link, gone)]}
        if _names(entry, key, gone)
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


def _names(entry: Any, key: str, gone: Collection[int]) -> bool:
    links = entry.get(key) if isinstance(entry, dict) else None
    return isinstance(links, list) and any(_is_in(link, gone) for link in links)


def _is_in(link: Any, gone: Collection[int]) -> bool:
    return isinstance(link, int | float | str) and link in gone


def _without_bends(graph: JsonObject, gone: Collection[int]) -> JsonObject:
    """Removes the reroute points of moved links, which were drawn from the old start."""
    if isinstance(graph.get("reroutes"), list):
        graph = {**graph, "reroutes": _without(graph["reroutes"], "linkIds", gone)}
    extra = graph.get("extra")
    if not isinstance(extra, dict):
        return graph
    changed = {}
    if isinstance(extra.get("reroutes"), list):
        changed["reroutes"] = _without(extra["reroutes"], "linkIds", gone)
    if isinstance(extra.get("linkExtensions"), list):
        changed["linkExtensions"] = [
            entry
            for entry in extra["linkExtensions"]
            if not (isinstance(entry, dict) and _is_in(entry.get("id"), gone))
        ]
    return {**graph, "extra": {**extra, **changed}} if changed else graph
