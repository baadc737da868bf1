"""Converts other common spellings of graph documents to ours before a document is parsed.

Stored graphs, responses and exports use only our spelling.
"""

import re
from collections.abc import Mapping
from typing import Any

KINDS = frozenset(
    {
        "input",
        "workflow",
        "condition",
        "fanout",
        "merge",
        "output",
        "value",
        "switch",
        "approve",
        "map",
        "loop",
        "graph",
        "score",
    }
)
CONFIG = "config"
# Alternative names of fields, by node type.
FIELDS: Mapping[str, Mapping[str, str]] = {
    "condition": {"expression": "condition"},
    "workflow": {"workflow_id": "workflow"},
    "score": {"workflow_id": "workflow"},
}
# Fields with a fixed set of values, which may be written in upper case.
CHOICES = ("fallback_strategy", "mode", "on_deadline")
AFFINITY = "backend_affinity"
WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
DEPTH_MAX = 50
CONNECTIONS, ENDS = "connections", ("from", "to")
# The default ports of connections that name only a node, by node type. The default input of a
# workflow takes the user's media.
SOURCES = {"input": "value", "workflow": "output", "merge": "output"}
TARGETS = {
    "workflow": "input",
    "condition": "input",
    "switch": "input",
    "approve": "input",
    "output": "value",
}


def with_our_spelling(document: Any) -> Any:
    """Returns a graph document in our spelling. Other values are returned unchanged."""
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        return document
    nodes = [_node(entry, DEPTH_MAX) for entry in document["nodes"]]
    return _with_ports(_with_layout({**document, "nodes": nodes}))


def _with_layout(document: dict[str, Any]) -> dict[str, Any]:
    """Moves the `position` of nodes to the document's layout."""
    layout = document.get("layout", {})
    if not isinstance(layout, dict):
        return document
    places = {
        node["id"]: place
        for node in document["nodes"]
        if isinstance(node, dict) and isinstance(node.get("id"), str) and node["id"] not in layout
        if (place := _place(node.get("position"))) is not None
    }
    if not places:
        return document
    nodes = [_without_position(node, places) for node in document["nodes"]]
    return {**document, "nodes": nodes, "layout": {**layout, **places}}


def _without_position(node: Any, places: Mapping[str, Any]) -> Any:
    if not isinstance(node, dict) or node.get("id") not in places:
        return node
    return {name: value for name, value in node.items() if name != "position"}


def _place(value: Any) -> list[Any] | None:
    """Reads `{x, y}` or `[x, y]`. Returns None for anything else."""
    if isinstance(value, dict) and value.keys() == {"x", "y"}:
        return [value["x"], value["y"]]
    return value if isinstance(value, list) and len(value) == 2 else None


def _with_ports(document: dict[str, Any]) -> dict[str, Any]:
    """Completes connections that name a node without its port, if the node has only one."""
    if "edges" in document and "connections" not in document:
        document = {CONNECTIONS if name == "edges" else name: document[name] for name in document}
    connections = document.get(CONNECTIONS)
    if not isinstance(connections, list):
        return document
    nodes = {
        node["id"]: node
        for node in document["nodes"]
        if isinstance(node, dict) and isinstance(node.get("id"), str)
    }
    used = {entry.get("to") for entry in connections if _is_connection(entry)}
    return {**document, CONNECTIONS: [_connection(entry, nodes, used) for entry in connections]}


def _is_connection(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(end), str) for end in ENDS)


def _connection(entry: Any, nodes: Mapping[str, Any], used: set[Any]) -> Any:
    if not _is_connection(entry):
        return entry
    target = _target(entry["to"], nodes, used)
    used.add(target)
    return {**entry, "from": _source(entry["from"], nodes), "to": target}


def _source(text: str, nodes: Mapping[str, Any]) -> str:
    node_id, _, port = text.partition(".")
    node = nodes.get(node_id, {})
    if not port and text in nodes and node.get("type") in SOURCES:
        return f"{text}.{SOURCES[node['type']]}"
    if port == "images" and node.get("type") == "merge" and node.get("mode") == "concat_images":
        return f"{node_id}.output"
    return text


def _target(text: str, nodes: Mapping[str, Any], used: set[Any]) -> str:
    node = nodes.get(text, {})
    kind = node.get("type")
    if kind == "merge":
        numbers = range(len(used) + 1)
        return next(port for n in numbers if (port := f"{text}.input_{n}") not in used)
    if kind == "fanout":
        return f"{text}.{'items' if node.get('mode') == 'distribute' else 'input'}"
    return f"{text}.{TARGETS[kind]}" if kind in TARGETS else text


def _node(entry: Any, depth: int) -> Any:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or depth == 0:
        return entry
    kind = entry["type"].lower()
    if kind not in KINDS:
        return entry
    node = _with_config({**entry, "type": kind})
    for other, ours in FIELDS.get(kind, {}).items():
        if other in node and ours not in node:
            node = {ours if name == other else name: value for name, value in node.items()}
    node = {name: _value(name, value) for name, value in node.items()}
    if isinstance(node.get("do"), dict):
        node["do"] = _body(node["do"], depth - 1)
    return node


def _with_config(node: dict[str, Any]) -> dict[str, Any]:
    """Moves the fields of `config` to the node. If a field exists in both places, the parser
    reports it."""
    config = node.get(CONFIG)
    if not isinstance(config, dict) or config.keys() & node.keys():
        return node
    return {**{name: value for name, value in node.items() if name != CONFIG}, **config}


def _value(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if name in CHOICES and value.isupper():
        return value.lower()
    return full_backend_name(value) if name == AFFINITY else value


def full_backend_name(name: str) -> str:
    """Returns `worker:ID` for the bare id of a worker. Other names are returned unchanged."""
    return f"worker:{name}" if WORKER_ID.fullmatch(name) else name


def _body(value: dict[str, Any], depth: int) -> Any:
    """Converts the body of a map or a loop: nodes, or the fields of a single node without its
    type."""
    if isinstance(value.get("nodes"), list):
        return _with_ports({**value, "nodes": [_node(entry, depth) for entry in value["nodes"]]})
    kind = "graph" if "graph" in value else "workflow"
    node = _node({**value, "type": kind}, depth)
    return {name: value for name, value in node.items() if name != "type"}
