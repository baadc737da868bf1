"""Converts other common spellings of graph documents to ours, before a document is parsed.

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
# The other names of a field, by the type of node.
FIELDS: Mapping[str, Mapping[str, str]] = {
    "condition": {"expression": "condition"},
    "workflow": {"workflow_id": "workflow"},
    "score": {"workflow_id": "workflow"},
}
# Fields with a fixed choice of words, which may be written in upper case.
CHOICES = ("fallback_strategy", "mode", "on_deadline")
AFFINITY = "backend_affinity"
WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
DEPTH_MAX = 50


def with_our_spelling(document: Any) -> Any:
    """Returns a graph document in our spelling; anything else is returned unchanged."""
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        return document
    return {**document, "nodes": [_node(entry, DEPTH_MAX) for entry in document["nodes"]]}


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
    """Moves the fields of `config` to the node. A field that stands in both places is left for the parser."""
    config = node.get(CONFIG)
    if not isinstance(config, dict) or config.keys() & node.keys():
        return node
    return {**{name: value for name, value in node.items() if name != CONFIG}, **config}


def _value(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if name in CHOICES and value.isupper():
        return value.lower()
    if name == AFFINITY and WORKER_ID.fullmatch(value):
        return f"worker:{value}"
    return value


def _body(value: dict[str, Any], depth: int) -> Any:
    """Converts what a map or a loop runs: nodes, or the fields of one node without its type."""
    if isinstance(value.get("nodes"), list):
        return {**value, "nodes": [_node(entry, depth) for entry in value["nodes"]]}
    kind = "graph" if "graph" in value else "workflow"
    node = _node({**value, "type": kind}, depth)
    return {name: each for name, each in node.items() if name != "type"}
