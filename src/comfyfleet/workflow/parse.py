"""Pass 1: a document as the editor saves it (version 0.4 or 1.0) becomes frozen values.

The two versions differ in how links are written: arrays in 0.4 (root graph), objects in 1.0 and in
every subgraph. Each entry is read by its own shape, so a mixed file is fine too.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from comfyfleet.kernel.errors import InvalidWorkflow, LimitExceeded
from comfyfleet.workflow.limits import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.model import ANY_TYPE, Graph, Group, Link, Node, Port, Slot, Workflow
from comfyfleet.workflow.places import join_places

T = TypeVar("T")


def parse(document: Any, *, limits: Limits = DEFAULT_LIMITS) -> Workflow:
    """Raises InvalidWorkflow, naming the place, where the document has another shape."""
    if not isinstance(document, dict):
        raise InvalidWorkflow(f"a workflow is a JSON object, this is {shape_of(document)}")
    if document.get("nodes") is None:
        raise InvalidWorkflow("not a workflow: it has no list `nodes`")
    root = _graph(document, "", limits)
    extra = _mapping(document.get("extra"), "extra")
    return Workflow(
        root=root,
        definitions=_definitions(document, limits),
        last_node_id=_last_node_id(document),
        group_nodes=_mapping(extra.get("groupNodes"), "extra › groupNodes"),
    )


def parse_groups(graph: Mapping[str, Any]) -> tuple[Group, ...]:
    """The titled rectangles of a graph; ill-formed ones are decoration and passed over."""
    found = []
    for group in _list(graph.get("groups"), "groups"):
        bounding = group.get("bounding") if isinstance(group, dict) else None
        if isinstance(bounding, list) and len(bounding) == 4 and all(map(_is_number, bounding)):
            left, top, width, height = map(float, bounding)
            found.append(Group(str(group.get("title", "")), (left, top, width, height)))
    return tuple(found)


def shape_of(value: Any) -> str:
    """A JSON value's kind in words, for messages."""
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def node_id(value: Any, place: str) -> str:
    """Ids are compared as text, so 7, 7.0 and "7" are one id, as in the editor."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else str(value)
    raise InvalidWorkflow(f"{place}: an id is a number or a text, this is {shape_of(value)}")


def _definitions(document: Mapping[str, Any], limits: Limits) -> dict[str, Graph]:
    """All subgraph definitions; one that holds others comes right before them."""
    found: dict[str, Graph] = {}
    pending = _nested_definitions(document)
    while pending:
        entry = pending.pop()
        where = f"definitions › subgraph {entry.get('name', len(found))}"
        key = node_id(entry.get("id"), where)
        found.setdefault(key, _graph(entry, key, limits))
        pending.extend(_nested_definitions(entry))
    return found


def _nested_definitions(owner: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    holder = _mapping(owner.get("definitions"), "definitions")
    entries = _list(holder.get("subgraphs"), "definitions › subgraphs")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise InvalidWorkflow(
                f"definitions › subgraph {index} is {shape_of(entry)}, not an object"
            )
    return entries[::-1]


def _graph(data: Mapping[str, Any], graph_id: str, limits: Limits) -> Graph:
    name = str(data.get("name", "")) if graph_id else ""
    place = f'subgraph "{name}"' if graph_id else ""
    nodes = _list(data.get("nodes"), join_places(place, "nodes"))
    links = _list(data.get("links"), join_places(place, "links"))
    if len(nodes) > limits.nodes_max or len(links) > limits.links_max:
        raise LimitExceeded(
            f"{place or 'the workflow'} has {len(nodes)} nodes and {len(links)} links; "
            f"at most {limits.nodes_max} and {limits.links_max} are taken"
        )
    return Graph(
        id=graph_id,
        name=name,
        nodes=tuple(_each(nodes, parse_node, place, "node")),
        links=_links(links, place),
        inputs=_ports(data.get("inputs"), join_places(place, "inputs")) if graph_id else (),
        outputs=_ports(data.get("outputs"), join_places(place, "outputs")) if graph_id else (),
    )


def parse_node(data: Mapping[str, Any], place: str) -> Node:
    node_type = data.get("type")
    if not isinstance(node_type, str):
        raise InvalidWorkflow(f"{place}: `type` is {shape_of(node_type)}, not a text")
    place = f"{place} {node_type}"
    mode = data.get("mode")
    title = data.get("title")
    inputs = data.get("inputs")
    outputs = data.get("outputs")
    properties = data.get("properties")
    return Node(
        id=node_id(data.get("id", -1), place),
        type=node_type,
        title=title if isinstance(title, str) else "",
        mode=mode if isinstance(mode, int) else 0,
        inputs=_slots(inputs, place) if inputs else (),
        outputs=_output_types(outputs, place) if outputs else (),
        values=data.get("widgets_values"),
        properties=properties if isinstance(properties, dict) else {},
    )


def _slots(entries: Any, place: str) -> tuple[Slot, ...]:
    slots = []
    for entry in _list(entries, f"{place}: inputs"):
        if not isinstance(entry, dict):
            raise InvalidWorkflow(f"{place}: an input is {shape_of(entry)}, not an object")
        widget = entry.get("widget")
        link = entry.get("link")
        slots.append(
            Slot(
                _text(entry.get("name")),
                slot_type(entry.get("type")),
                None if link is None else _link_id(link, place),
                _text(widget.get("name")) if isinstance(widget, dict) else None,
            )
        )
    return tuple(slots)


def _output_types(entries: Any, place: str) -> tuple[str, ...]:
    return tuple(
        slot_type(entry.get("type")) if isinstance(entry, dict) else ANY_TYPE
        for entry in _list(entries, f"{place}: outputs")
    )


def _ports(entries: Any, place: str) -> tuple[Port, ...]:
    ports = []
    for entry in _list(entries, place):
        if not isinstance(entry, dict):
            raise InvalidWorkflow(f"{place}: an entry is {shape_of(entry)}, not an object")
        links = tuple(_link_id(link, place) for link in _list(entry.get("linkIds"), place))
        ports.append(Port(_text(entry.get("name")), slot_type(entry.get("type")), links))
    return tuple(ports)


def _links(entries: list[Any], place: str) -> dict[int, Link]:
    """By id; of two links with one id the first counts, as in the editor."""
    links: dict[int, Link] = {}
    for index, entry in enumerate(entries):
        if entry is None:  # very old files have holes
            continue
        link = _link(entry, index, place)
        links.setdefault(link.id, link)
    return links


def _link(entry: Any, index: int, place: str) -> Link:
    where = join_places(place, f"link {index}")
    if isinstance(entry, dict):
        keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        entry = [entry.get(key) for key in keys]
    if not isinstance(entry, list) or len(entry) < 5:
        raise InvalidWorkflow(f"{where} is neither a list of 6 members nor an object")
    return Link(
        _link_id(entry[0], where),
        node_id(entry[1], where),
        _index(entry[2], where),
        node_id(entry[3], where),
        _index(entry[4], where),
        slot_type(entry[5]) if len(entry) > 5 else ANY_TYPE,
    )


def slot_type(value: Any) -> str:
    """A slot's type as text. Lists are choices of old combos, which the editor joins by commas."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ",".join(map(str, value))
    return ANY_TYPE if value in (None, 0) else str(value)


def _link_id(value: Any, place: str) -> int:
    return _index(value, f"{place}: link id")


def _index(value: Any, place: str) -> int:
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
        return int(value)
    raise InvalidWorkflow(f"{place} should be a whole number, is {shape_of(value)}")


def _last_node_id(document: Mapping[str, Any]) -> int:
    state = document.get("state")
    last = state.get("lastNodeId") if isinstance(state, dict) else document.get("last_node_id")
    return int(last) if last is not None and _is_number(last) else 0


def _each(
    entries: Iterable[Any], read: Callable[[Mapping[str, Any], str], T], place: str, what: str
) -> Iterable[T]:
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            where = join_places(place, f"{what} at index {index}")
            raise InvalidWorkflow(f"{where} is {shape_of(entry)}, not an object")
        yield read(entry, join_places(place, f"{what} {entry.get('id')}"))


def _list(value: Any, place: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidWorkflow(f"{place} should be a list, is {shape_of(value)}")
    return value


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidWorkflow(f"{place} should be an object, is {shape_of(value)}")
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
