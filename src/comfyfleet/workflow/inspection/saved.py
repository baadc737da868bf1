"""Values under their names as far as the file itself tells them, without a server's node types."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from comfyfleet.workflow.behaviours import PRIMITIVE, is_virtual
from comfyfleet.workflow.model import Node
from comfyfleet.workflow.parse import parse_node
from comfyfleet.workflow.widgettypes import ABSENT
from comfyfleet.workflow.wiring import WiredGraph, WiredNode

_GROUP_PREFIX = re.compile("^workflow[>/]")
# Behind a seed the file keeps what happens to it after a run. It is the only companion that stands
# between the values of named inputs.
CONTROL_VALUES = ("fixed", "increment", "decrement", "randomize")
# Behind all values of a loader stands its upload button.
COMPANIONS_BEHIND_MAX = 1


def saved_values(node: WiredNode) -> Mapping[str, Any]:
    if node.type is not None:
        return {name: value for name, value in node.values.items() if value is not ABSENT}
    values = node.node.values
    linked = {slot.name for slot in node.inputs if slot.link is not None}
    if isinstance(values, dict):
        named = values
    else:
        names = [slot.widget for slot in node.node.inputs if slot.widget]
        named = _named(names, values if isinstance(values, list) else [])
    return {name: value for name, value in named.items() if name not in linked}


def primitive_values(wired: WiredGraph, node: WiredNode) -> Iterator[tuple[str, Any]]:
    """A primitive writes its value into the inputs that it is linked to; no link stays."""
    for slot in node.inputs:
        source = wired.nodes.get(slot.link.origin) if slot.link is not None else None
        saved = source.node.values if source and source.node.type == PRIMITIVE else None
        if isinstance(saved, list) and saved:
            yield slot.name, saved[0]


def nodes_of_group(instance: Node, group_nodes: Mapping[str, Any]) -> Iterator[Node]:
    """What a group node, the predecessor of a subgraph, holds. Older editors call its nodes so, too."""
    group = group_nodes.get(_GROUP_PREFIX.sub("", instance.type))
    nodes = group.get("nodes") if isinstance(group, dict) else None
    for index, saved in enumerate(nodes if isinstance(nodes, list) else ()):
        if isinstance(saved, dict) and isinstance(saved.get("type"), str):
            node = parse_node({**saved, "id": f"{instance.id}:{index}"}, "group node")
            if not is_virtual(node.type):
                yield node


def is_control(value: Any) -> bool:
    return isinstance(value, str) and value in CONTROL_VALUES


def _named(names: list[str], values: list[Any]) -> dict[str, Any]:
    """Nothing where the counts don't fit: old files name only the inputs that were made sockets."""
    plain = [
        value
        for index, value in enumerate(values)
        if not (is_control(value) and index > 0 and _is_whole(values[index - 1]))
    ]
    if not 0 <= len(plain) - len(names) <= COMPANIONS_BEHIND_MAX:
        return {}
    return dict(zip(names, plain, strict=False))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
