"""Where in a workflow something is, in words: `subgraph "Upscale" › node 12 KSampler › input steps`."""

from comfyfleet.workflow.model import Graph, Node

SEPARATOR = " › "


def graph_place(graph: Graph) -> str:
    return f'subgraph "{graph.name}"' if graph.id else ""


def node_place(node: Node, graph: Graph | None = None) -> str:
    title = f' "{node.title}"' if node.title and node.title != node.type else ""
    return join_places(graph_place(graph) if graph else "", f"node {node.id} {node.type}{title}")


def join_places(*parts: str) -> str:
    return SEPARATOR.join(part for part in parts if part)
