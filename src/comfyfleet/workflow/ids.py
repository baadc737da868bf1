"""Pass 2, first half: node ids become unique across the root graph and all definitions.

So every expanded id, `<instance>:<inner>`, is unique, and is the one that the editor would show:
an inner id that is taken already is replaced by the next free number.
"""

from collections.abc import Mapping
from typing import Any

from comfyfleet.workflow.model import UNASSIGNED, Graph, Link, Node, Workflow


def unique_ids(workflow: Workflow) -> Workflow:
    if not workflow.definitions and not workflow.group_nodes and _all_unique(workflow.root):
        return workflow
    minting = _Minting(workflow)
    renamed: dict[str, dict[str, str]] = {}
    definitions = {}
    for key, graph in workflow.definitions.items():
        definitions[key], names = _rename_inner(graph, minting)
        if names:
            renamed[key] = names
    root = _rename_repeated(workflow.root, minting)
    if renamed:
        root = _follow_renamed(root, renamed)
        definitions = {key: _follow_renamed(graph, renamed) for key, graph in definitions.items()}
    return workflow._replace(root=root, definitions=definitions, last_node_id=minting.last)


class _Minting:
    def __init__(self, workflow: Workflow) -> None:
        self.last = workflow.last_node_id
        self.used = {node.id for node in workflow.root.nodes}

    def take(self, node_id: str) -> None:
        self.used.add(node_id)
        number = _number(node_id)
        if number is not None:
            self.last = max(self.last, number)

    def mint(self) -> str:
        self.last += 1
        while str(self.last) in self.used:
            self.last += 1
        self.used.add(str(self.last))
        return str(self.last)


def _all_unique(graph: Graph) -> bool:
    ids = {node.id for node in graph.nodes}
    return len(ids) == len(graph.nodes) and UNASSIGNED not in ids


def _rename_inner(graph: Graph, minting: _Minting) -> tuple[Graph, dict[str, str]]:
    names: dict[str, str] = {}
    nodes: dict[str, Node] = {}
    for node in graph.nodes:
        if node.id in nodes:
            continue  # of two nodes with one id in a definition the editor keeps the first
        nodes[node.id] = node
        if node.id in minting.used:
            names[node.id] = minting.mint()
            nodes[node.id] = node._replace(id=names[node.id])
        else:
            minting.take(node.id)
    links = graph.links
    if names:
        links = {key: _renamed_link(link, names) for key, link in links.items()}
    return graph._replace(nodes=tuple(nodes.values()), links=links), names


def _renamed_link(link: Link, names: Mapping[str, str]) -> Link:
    return link._replace(
        origin=names.get(link.origin, link.origin), target=names.get(link.target, link.target)
    )


def _rename_repeated(root: Graph, minting: _Minting) -> Graph:
    """A second node under one id, or one without, gets a new id; links stay with the first."""
    for node in root.nodes:
        minting.take(node.id)
    if _all_unique(root):
        return root
    seen = {UNASSIGNED}
    nodes = []
    for node in root.nodes:
        nodes.append(node._replace(id=minting.mint()) if node.id in seen else node)
        seen.add(node.id)
    return root._replace(nodes=tuple(nodes))


def _follow_renamed(graph: Graph, renamed: Mapping[str, Mapping[str, str]]) -> Graph:
    """`proxyWidgets` of an instance name inner nodes by id."""
    nodes = []
    for node in graph.nodes:
        names = renamed.get(node.type)
        proxies = node.properties.get("proxyWidgets")
        if names and isinstance(proxies, list):
            properties = {**node.properties, "proxyWidgets": _renamed_proxies(proxies, names)}
            node = node._replace(properties=properties)
        nodes.append(node)
    return graph._replace(nodes=tuple(nodes))


def _renamed_proxies(proxies: list[Any], names: Mapping[str, str]) -> list[Any]:
    return [
        [names.get(str(entry[0]), entry[0]), *entry[1:]]
        if isinstance(entry, list) and entry
        else entry
        for entry in proxies
    ]


def _number(node_id: str) -> int | None:
    return int(node_id) if node_id.isdecimal() and str(int(node_id)) == node_id else None
