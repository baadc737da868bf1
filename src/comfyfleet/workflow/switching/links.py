"""Links of a saved graph moved to another output, or taken out: a new graph, consistent in itself.

A link is written in up to five places: the list of links, both of its nodes, the ports of a
definition, and the bends that are drawn on it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from comfyfleet.workflow.model import SUBGRAPH_INPUT_ID
from comfyfleet.workflow.parse import node_id
from comfyfleet.workflow.resolve import Source
from comfyfleet.workflow.switching.documents import JsonObject, nodes_of


def with_links_moved(graph: JsonObject, moves: Mapping[int, Source]) -> JsonObject:
    """Each link, by id, starts at the given output from now on and ends where it ended."""
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
    """-1 for a hole in the list, as very old files have them."""
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


def _with_starts(graph: JsonObject, moves: Mapping[int, Source]) -> JsonObject:
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
    """The same list if nothing of it goes."""
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
    """Bends are drawn on the way from the old start: the link goes straight from now on."""
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
