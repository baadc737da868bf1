"""Draws a graph as a Mermaid flowchart."""

from comfyfleet.api.graph_model import (
    INPUT_PORT,
    OUTPUT_PORT,
    VALUE_PORT,
    ApproveNode,
    CompositeNode,
    ConditionNode,
    FanOutNode,
    GraphConnection,
    GraphDefinition,
    InputNode,
    LoopNode,
    MapNode,
    MergeNode,
    Node,
    OutputNode,
    ScoreNode,
    SubgraphNode,
    SwitchNode,
    WorkflowNode,
    kind_of,
)

# Ports whose names add nothing to the arrow.
_PLAIN_PORTS = frozenset({INPUT_PORT, OUTPUT_PORT, VALUE_PORT, "item", "items"})


def draw_mermaid(graph: GraphDefinition) -> str:
    names = {node: f"n{number}" for number, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    lines += [f"    {names[node.id]}{_draw_node(node)}" for node in graph.nodes.values()]
    lines += [
        f"    {names[connection.source.node]} {_draw_arrow(connection)} {names[connection.target.node]}"
        for connection in graph.connections
        if connection.source.node in names and connection.target.node in names
    ]
    return "\n".join(lines) + "\n"


def _draw_node(node: Node) -> str:
    match node:
        case InputNode():
            return f'(["{_label(node.id, node.value_type)}"])'
        case WorkflowNode():
            version = f" v{node.version}" if node.version else ""
            return f'["{_label(node.id, node.name + version)}"]'
        case ConditionNode():
            return f'{{"{_label(node.id, node.text)}"}}'
        case FanOutNode():
            return f'[/"{_label(node.id, "each item" if node.per_item else node.mode)}"\\]'
        case MergeNode():
            over = f" over {node.over}" if node.over else ""
            return f'[\\"{_label(node.id, node.mode + over)}"/]'
        case OutputNode():
            return f'(["{_label(node.id, "output")}"])'
        case SwitchNode():
            return f'{{"{_label(node.id, ", ".join(case.name for case in node.cases))}"}}'
        case ApproveNode():
            return f'[/"{_label(node.id, "asks")}"/]'
        case MapNode() | LoopNode() | SubgraphNode() | ScoreNode():
            return f'[["{_label(node.id, _contained(node))}"]]'
    return f'["{_label(node.id, kind_of(node))}"]'


def _contained(node: CompositeNode) -> str:
    match node:
        case MapNode():
            return f"for each of {node.over}"
        case LoopNode():
            return f"until {node.document.get('until', '')}, at most {node.at_most} times"
        case SubgraphNode():
            return f"{node.graph} v{node.version}"
        case ScoreNode():
            return f"scores {node.over}"


def _label(name: str, more: str) -> str:
    return f"{_escape(name)}<br/><small>{_escape(more)}</small>"


def _escape(text: str) -> str:
    for char, code in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("\n", " ")):
        text = text.replace(char, code)
    return text


def _draw_arrow(connection: GraphConnection) -> str:
    source, target = connection
    start = source.port if source.port not in _PLAIN_PORTS else ""
    start = ".".join(filter(None, (start, *source.path)))
    end = "" if target.port in _PLAIN_PORTS else target.port
    label = " → ".join(filter(None, (start, end)))
    return f'-->|"{_escape(label)}"|' if label else "-->"
