"""Inputs whose choices the server keeps under routes of their own, to be fetched by whoever may."""

from collections.abc import Iterator, Mapping
from typing import Any

from comfyfleet.workflow.media import Opened
from comfyfleet.workflow.nodetypes import NodeTypes
from comfyfleet.workflow.parse import parse


def remote_lists(opened: Opened, object_info: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By route, what the server says of each list that a document needs."""
    types = NodeTypes(object_info)
    found: dict[str, Mapping[str, Any]] = {}
    for name in sorted(set(_types_in(opened))):
        known = types.get(name)
        for widget in known.widgets if known else ():
            remote = widget.options.get("remote")
            if isinstance(remote, dict) and isinstance(remote.get("route"), str):
                found[remote["route"]] = remote
    return found


def _types_in(opened: Opened) -> Iterator[str]:
    if opened.workflow is None:
        entries = (opened.prompt or {}).values()
        yield from (str(entry.get("class_type")) for entry in entries if isinstance(entry, dict))
        return
    workflow = parse(opened.workflow)
    for graph in (workflow.root, *workflow.definitions.values()):
        yield from (node.type for node in graph.nodes)
    for group in workflow.group_nodes.values():
        nodes = group.get("nodes") if isinstance(group, dict) else None
        for node in nodes if isinstance(nodes, list) else ():
            if isinstance(node, dict):
                yield str(node.get("type"))
