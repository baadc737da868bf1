"""Finds `Node.widget` for patterns in texts: by the node's name for search and replace, else its title."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from comfyfleet.workflow.behaviours import BEHAVIOURS
from comfyfleet.workflow.texts import fill_patterns
from comfyfleet.workflow.widgettypes import ABSENT
from comfyfleet.workflow.wiring import WiredGraph, WiredNode

SEARCH_NAME = "Node name for S&R"


def filled(text: str, graphs: Mapping[str, WiredGraph], graph_id: str, now: datetime | None) -> str:
    """The text with its patterns filled in from the nodes of a graph and those inside it."""
    if "%" not in text:
        return text
    nodes = list(_inner_first(graphs, graph_id, {graph_id}))

    def find(node_name: str, widget_name: str) -> Any:
        for name_of in (_search_name, title_of):
            for node in nodes:
                if name_of(node) == node_name:
                    return node.values.get(widget_name, ABSENT)
        return ABSENT

    return fill_patterns(text, find, now, ABSENT)


def title_of(node: WiredNode) -> str:
    return node.node.title or (node.type.display_name if node.type else node.node.type)


def _inner_first(
    graphs: Mapping[str, WiredGraph], graph_id: str, seen: set[str]
) -> Iterator[WiredNode]:
    stack = [iter(graphs[graph_id].nodes.values())]
    held: list[WiredNode] = []
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
            if held:
                yield held.pop()
        elif node.definition is not None and node.definition not in seen:
            seen.add(node.definition)
            held.append(node)
            stack.append(iter(graphs[node.definition].nodes.values()))
        else:
            yield node


def _search_name(node: WiredNode) -> Any:
    saved = node.node.properties.get(SEARCH_NAME)
    if saved is not None or node.type is None:
        return saved
    behaviour = BEHAVIOURS.get(node.type.name)
    return None if behaviour and behaviour.saves_files else node.type.name
