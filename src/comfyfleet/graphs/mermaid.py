"""Draws a graph as a Mermaid flowchart; with a run, each node in the colour of its state."""

from collections.abc import Iterator

from comfyfleet.graphs.model import (
    INPUT_PORT,
    OUTPUT_PORT,
    VALUE_PORT,
    ConditionNode,
    Connection,
    FanOutNode,
    Graph,
    InputNode,
    MergeNode,
    Node,
    OutputNode,
    WorkflowNode,
)
from comfyfleet.graphs.plan import Plan
from comfyfleet.graphs.progress import node_status
from comfyfleet.graphs.runs import Run, Status

# Saying nothing that the arrow doesn't.
_PLAIN_PORTS = frozenset({INPUT_PORT, OUTPUT_PORT, VALUE_PORT, "item", "items"})
_COLOURS = {
    Status.DONE: "fill:#d3f9d8,stroke:#2b8a3e",
    Status.RUNNING: "fill:#d0ebff,stroke:#1864ab",
    Status.FAILED: "fill:#ffe3e3,stroke:#c92a2a",
    Status.SKIPPED: "fill:#f1f3f5,stroke:#adb5bd,stroke-dasharray:4",
    Status.CANCELLED: "fill:#f1f3f5,stroke:#868e96",
}


def draw(graph: Graph, *, plan: Plan | None = None, run: Run | None = None) -> str:
    names = {node: f"n{number}" for number, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    lines += [f"    {names[node.id]}{_shape(node)}" for node in graph.nodes.values()]
    lines += [
        f"    {names[each.source.node]} {_arrow(each)} {names[each.target.node]}"
        for each in graph.connections
        if each.source.node in names and each.target.node in names
    ]
    if plan is not None and run is not None:
        lines += _coloured(names, plan, run)
    return "\n".join(lines) + "\n"


def _shape(node: Node) -> str:
    match node:
        case InputNode():
            return f'(["{_said(node.id, node.value_type)}"])'
        case WorkflowNode():
            version = f" v{node.version}" if node.version else ""
            return f'["{_said(node.id, node.name + version)}"]'
        case ConditionNode():
            return f'{{"{_said(node.id, node.text)}"}}'
        case FanOutNode():
            return f'[/"{_said(node.id, "each item" if node.per_item else node.mode)}"\\]'
        case MergeNode():
            over = f" over {node.over}" if node.over else ""
            return f'[\\"{_said(node.id, node.mode + over)}"/]'
        case OutputNode():
            return f'(["{_said(node.id, "output")}"])'


def _said(name: str, more: str) -> str:
    return f"{_escaped(name)}<br/><small>{_escaped(more)}</small>"


def _escaped(text: str) -> str:
    for char, code in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("\n", " ")):
        text = text.replace(char, code)
    return text


def _arrow(connection: Connection) -> str:
    source, target = connection
    start = source.port if source.port not in _PLAIN_PORTS else ""
    start = ".".join(filter(None, (start, *source.path)))
    end = "" if target.port in _PLAIN_PORTS else target.port
    label = " → ".join(filter(None, (start, end)))
    return f'-->|"{_escaped(label)}"|' if label else "-->"


def _coloured(names: dict[str, str], plan: Plan, run: Run) -> Iterator[str]:
    yield from (f"    classDef {status} {colours}" for status, colours in _COLOURS.items())
    for node, name in names.items():
        status = node_status(plan, run, node)
        if status in _COLOURS:
            yield f"    class {name} {status}"
