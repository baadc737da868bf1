"""A graph as a document again, for export and for the snapshot that a run keeps."""

from typing import Any

from comfyfleet.graphs.model import (
    ConditionNode,
    FanOutNode,
    Graph,
    InputNode,
    MergeNode,
    Node,
    WorkflowNode,
    kind_of,
)


def document_of(graph: Graph) -> dict[str, Any]:
    """What `parse_graph` reads as this graph."""
    document: dict[str, Any] = {"name": graph.name}
    if graph.max_tokens is not None:
        document["max_tokens"] = graph.max_tokens
    document["nodes"] = [
        {"id": node.id, "type": kind_of(node), **_fields(node)} for node in graph.nodes.values()
    ]
    document["connections"] = [
        {"from": str(each.source), "to": str(each.target)} for each in graph.connections
    ]
    return document


def _fields(node: Node) -> dict[str, Any]:
    match node:
        case InputNode():
            return _given(value_type=node.value_type, required=node.required, default=node.default)
        case WorkflowNode():
            return _workflow(node)
        case ConditionNode():
            return {"condition": node.text}
        case FanOutNode():
            return _fanout(node)
        case MergeNode():
            return _given(mode=node.mode.value, over=node.over)
    return {}


def _workflow(node: WorkflowNode) -> dict[str, Any]:
    return _given(
        workflow=node.workflow or None,
        effect=node.effect,
        version=node.version,
        properties=dict(node.properties) or None,
        backend_affinity=node.backend_affinity,
        fallback_strategy=node.fallback_strategy.value,
        timeout=node.timeout_seconds,
        retries=node.retries or None,
        priority=node.priority or None,
        continue_on_error=node.continue_on_error or None,
    )


def _fanout(node: FanOutNode) -> dict[str, Any]:
    return _given(
        mode=node.mode.value,
        output_count=node.output_count,
        per_item=node.per_item or None,
        max_items=node.max_items,
    )


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
