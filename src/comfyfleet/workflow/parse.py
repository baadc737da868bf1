"""Parses a document that the editor saved (version 0.4 or 1.0) into frozen values.

The versions differ in how links are written: as arrays in 0.4 (root graph), and as objects in 1.0
and in every subgraph. The format of each entry is detected separately, so files that mix both work
as well.
"""

import math
from collections.abc import Mapping
from typing import Any

from comfyfleet.errors import InvalidWorkflow, LimitExceeded
from comfyfleet.workflow.model import (
    ANY_TYPE,
    DEFAULT_LIMITS,
    UNASSIGNED,
    Group,
    Limits,
    Link,
    Node,
    NodeSlot,
    Port,
    Workflow,
    WorkflowGraph,
    join_places,
    new_tuple,
)


class _Malformed(Exception):
    """Describes a problem without its location, which the caller adds."""


def parse(document: Any, *, limits: Limits = DEFAULT_LIMITS) -> Workflow:
    """Parses a document. Raises InvalidWorkflow with the location of the problem if it is
    malformed."""
    if not isinstance(document, dict):
        raise InvalidWorkflow(f"a workflow must be a JSON object, not {shape_of(document)}")
    if document.get("nodes") is None:
        raise InvalidWorkflow("not a workflow: it has no `nodes` list")
    try:
        extra = _mapping(document, "extra")
        return Workflow(
            root=_graph(document, "", limits),
            definitions=_definitions(document, limits),
            last_node_id=_last_node_id(document),
            group_nodes=_mapping(extra, "groupNodes"),
        )
    except _Malformed as problem:
        raise InvalidWorkflow(str(problem)) from None


def parse_groups(graph: Mapping[str, Any]) -> tuple[Group, ...]:
    """Returns the titled rectangles of a graph. Malformed ones are skipped, because they are only
    decoration."""
    result = []
    groups = graph.get("groups")
    for group in groups if isinstance(groups, list) else ():
        bounding = group.get("bounding") if isinstance(group, dict) else None
        if isinstance(bounding, list) and len(bounding) == 4 and all(map(_is_number, bounding)):
            x, y, width, height = map(float, bounding)
            result.append(Group(str(group.get("title", "")), (x, y, width, height)))
    return tuple(result)


def parse_node(data: Any, place: str) -> Node:
    try:
        return _node(data)
    except _Malformed as problem:
        node_type = data.get("type") if isinstance(data, dict) else None
        where = f"{place} {node_type}" if isinstance(node_type, str) else place
        raise InvalidWorkflow(f"{where}: {problem}") from None


def node_id(value: Any, place: str) -> str:
    """Returns an id as a string, so that 7, 7.0 and "7" are the same id, as in the editor."""
    try:
        return _id(value)
    except _Malformed as problem:
        raise InvalidWorkflow(f"{place}: {problem}") from None


def shape_of(value: Any) -> str:
    """Describes the type of a JSON value for messages."""
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def slot_type(value: Any) -> str:
    """Returns a slot's type as a string. In old combos, it is a list of choices, which the editor
    joins with commas."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ",".join(map(str, value))
    return ANY_TYPE if value in (None, 0) else str(value)


def _definitions(document: Mapping[str, Any], limits: Limits) -> dict[str, WorkflowGraph]:
    """Returns all subgraph definitions. A definition comes right before the definitions nested in
    it."""
    definitions: dict[str, WorkflowGraph] = {}
    pending = _nested_definitions(document)
    while pending:
        entry = pending.pop()
        key = _id(entry.get("id"))
        if key not in definitions:
            definitions[key] = _graph(entry, key, limits)
        pending.extend(_nested_definitions(entry))
    return definitions


def _nested_definitions(owner: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries = _list(_mapping(owner, "definitions"), "subgraphs")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise _Malformed(f"subgraph definition {index} is {shape_of(entry)}, not an object")
    return entries[::-1]


def _graph(data: Mapping[str, Any], graph_id: str, limits: Limits) -> WorkflowGraph:
    name = str(data.get("name", "")) if graph_id else ""
    place = f'subgraph "{name}"' if graph_id else ""
    try:
        nodes, links = _list(data, "nodes"), _list(data, "links")
        inputs = _ports(data, "inputs") if graph_id else ()
        outputs = _ports(data, "outputs") if graph_id else ()
    except _Malformed as problem:
        raise InvalidWorkflow(join_places(place, str(problem))) from None
    if len(nodes) > limits.nodes_max or len(links) > limits.links_max:
        raise LimitExceeded(
            f"{place or 'the workflow'} has {len(nodes)} nodes and {len(links)} links; "
            f"the limits are {limits.nodes_max} and {limits.links_max}"
        )
    return WorkflowGraph(
        graph_id, name, _nodes(nodes, place), _links(links, place), inputs=inputs, outputs=outputs
    )


def _nodes(entries: list[Any], place: str) -> tuple[Node, ...]:
    nodes = []
    for index, entry in enumerate(entries):
        try:
            nodes.append(_node(entry))
        except _Malformed:
            node_name = entry.get("id", f"at index {index}") if isinstance(entry, dict) else index
            nodes.append(parse_node(entry, join_places(place, f"node {node_name}")))
    return tuple(nodes)


def _node(data: Any) -> Node:
    if not isinstance(data, dict):
        raise _Malformed(f"must be an object, not {shape_of(data)}")
    get = data.get
    node_type, title, mode, properties = get("type"), get("title"), get("mode"), get("properties")
    if not isinstance(node_type, str):
        raise _Malformed(f"`type` must be a string, not {shape_of(node_type)}")
    inputs, outputs = get("inputs"), get("outputs")
    fields: tuple[Any, ...] = (
        _id(get("id", UNASSIGNED)),
        node_type,
        title if isinstance(title, str) else "",
        mode if isinstance(mode, int) else 0,
        _slots(inputs) if inputs else (),
        _output_types(outputs) if outputs else (),
        get("widgets_values"),
        properties if isinstance(properties, dict) else {},
        {},
    )
    return new_tuple(Node, fields)


def _slots(entries: Any) -> tuple[NodeSlot, ...]:
    if not isinstance(entries, list):
        raise _Malformed(f"`inputs` must be a list, not {shape_of(entries)}")
    slots = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise _Malformed(f"an input must be an object, not {shape_of(entry)}")
        get = entry.get
        name, kind, link, widget = get("name"), get("type"), get("link"), get("widget")
        fields = (
            name if isinstance(name, str) else _text(name),
            kind if isinstance(kind, str) else slot_type(kind),
            link if link is None or type(link) is int else _index(link),
            _widget_name(widget) if widget is not None else None,
        )
        slots.append(new_tuple(NodeSlot, fields))
    return tuple(slots)


def _widget_name(widget: Any) -> str | None:
    if not isinstance(widget, dict):
        return None
    name = widget.get("name")
    return name if isinstance(name, str) else _text(name)


def _output_types(entries: Any) -> tuple[str, ...]:
    if not isinstance(entries, list):
        raise _Malformed(f"`outputs` must be a list, not {shape_of(entries)}")
    types = []
    for entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else ANY_TYPE
        types.append(kind if isinstance(kind, str) else slot_type(kind))
    return tuple(types)


def _ports(data: Mapping[str, Any], key: str) -> tuple[Port, ...]:
    ports = []
    for entry in _list(data, key):
        if not isinstance(entry, dict):
            raise _Malformed(f"an entry of `{key}` must be an object, not {shape_of(entry)}")
        links = tuple([_index(link) for link in _list(entry, "linkIds")])
        label = entry.get("label")
        name, kind = _text(entry.get("name")), slot_type(entry.get("type"))
        ports.append(Port(name, kind, links, label if isinstance(label, str) else ""))
    return tuple(ports)


def _links(entries: list[Any], place: str) -> dict[int, Link]:
    """Returns links by id. If two links have the same id, the first one counts, as in the
    editor."""
    links: dict[int, Link] = {}
    for index, entry in enumerate(entries):
        if entry is None:  # very old files have gaps in their list of links
            continue
        try:
            link = _link(entry)
        except _Malformed as problem:
            where = join_places(place, f"link at index {index}")
            raise InvalidWorkflow(f"{where}: {problem}") from None
        if link.id not in links:
            links[link.id] = link
    return links


def _link(entry: Any) -> Link:
    if isinstance(entry, dict):
        get = entry.get
        number, origin, origin_slot = get("id"), get("origin_id"), get("origin_slot")
        target, target_slot, kind = get("target_id"), get("target_slot"), get("type")
    elif isinstance(entry, list) and len(entry) > 4:
        number, origin, origin_slot, target, target_slot = entry[:5]
        kind = entry[5] if len(entry) > 5 else ANY_TYPE
    else:
        raise _Malformed("must be a list of 6 members or an object")
    if type(number) is type(origin_slot) is type(target_slot) is int:
        ends = _id(origin), origin_slot, _id(target), target_slot
        return new_tuple(Link, (number, *ends, slot_type(kind)))
    slots = _index(origin_slot), _index(target_slot)
    return Link(_index(number), _id(origin), slots[0], _id(target), slots[1], slot_type(kind))


def _id(value: Any) -> str:
    if type(value) is int:
        return str(value)
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else str(value)
    raise _Malformed(f"an id must be a number or a string, not {shape_of(value)}")


def _index(value: Any) -> int:
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) < 20 and value.strip().lstrip("-").isdecimal():
        return int(value)
    raise _Malformed(f"the number of a link or slot must be an integer, not {shape_of(value)}")


def _last_node_id(document: Mapping[str, Any]) -> int:
    state = document.get("state")
    saved = state.get("lastNodeId") if isinstance(state, dict) else None
    return max(_whole(saved), _whole(document.get("last_node_id")))


def _whole(value: Any) -> int:
    return int(value) if _is_number(value) else 0


def _list(owner: Mapping[str, Any], key: str) -> list[Any]:
    value = owner.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Malformed(f"`{key}` must be a list, not {shape_of(value)}")
    return value


def _mapping(owner: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = owner.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Malformed(f"`{key}` must be an object, not {shape_of(value)}")
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
