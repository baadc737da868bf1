"""Finds `Node.widget` for patterns in texts: by the node's name for search and replace, else its title."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from comfyfleet.workflow.behaviours import BEHAVIOURS
from comfyfleet.workflow.texts import fill_patterns
from comfyfleet.workflow.widgettypes import ABSENT
from comfyfleet.workflow.wiring import WiredGraph, WiredNode

SEARCH_NAME = "Node name for S&R"


class Patterns:
    """Fills in patterns from the nodes of a graph and those inside it."""

    def __init__(self, graphs: Mapping[str, WiredGraph], now: datetime | None) -> None:
        self._graphs = graphs
        self._now = now
        self._nodes: dict[str, dict[str | None, WiredNode]] = {}

    def fill(self, text: str, graph_id: str = "") -> str:
        if "%" not in text:
            return text
        if graph_id not in self._nodes:
            self._nodes[graph_id] = _by_name(list(_inner_first(self._graphs, graph_id)))
        nodes = self._nodes[graph_id]

        def find(node_name: str, widget_name: str) -> Any:
            node = nodes.get(node_name)
            return ABSENT if node is None else node.values.get(widget_name, ABSENT)

        return fill_patterns(text, find, self._now, ABSENT)


def _by_name(nodes: list[WiredNode]) -> dict[str | None, WiredNode]:
    """The first node of a name counts; names for search and replace go before titles."""
    found: dict[str | None, WiredNode] = {}
    for name_of in (_search_name, title_of):
        for node in nodes:
            found.setdefault(name_of(node), node)
    return found


def title_of(node: WiredNode) -> str:
    return node.node.title or (node.type.display_name if node.type else node.node.type)


def _inner_first(graphs: Mapping[str, WiredGraph], graph_id: str) -> Iterator[WiredNode]:
    seen = {graph_id}
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


def _search_name(node: WiredNode) -> str | None:
    saved = node.node.properties.get(SEARCH_NAME)
    if saved is not None or node.type is None:
        return saved if isinstance(saved, str) else None
    behaviour = BEHAVIOURS.get(node.type.name)
    return None if behaviour and behaviour.saves_files else node.type.name
