"""Draws a graph as an SVG image, optionally with the states of a run. Pure. The layout is computed
in graph_layout.

Nodes that contain others are boxes around these nodes. Texts are truncated and escaped. The image
contains no links, scripts or external files.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from comfyfleet.api.graph_layout import Box, Edge, Size, lay_out
from comfyfleet.api.graph_model import (
    INPUT_PORT,
    OUTPUT_PORT,
    OUTPUTS_PORT,
    VALUE_PORT,
    ApproveNode,
    CompositeNode,
    ConditionNode,
    FanOutNode,
    GraphBody,
    GraphConnection,
    GraphDefinition,
    InputNode,
    LoopNode,
    MapNode,
    MergeNode,
    Node,
    ScoreNode,
    SubgraphNode,
    SwitchNode,
    ValueNode,
    WorkflowNode,
    kind_of,
)
from comfyfleet.api.graphs import GraphRunAnswer
from comfyfleet.api.templates import templates_in

TITLE_CHARACTERS_MAX = 28
TEXT_CHARACTERS_MAX = 40
LABEL_CHARACTERS_MAX = 24
BODY_DEPTH_MAX = 10
CHARACTER_PX, SMALL_CHARACTER_PX = 8.2, 6.6
NODE_WIDTH_MIN, PADDING, LINE_PX = 96, 14, 16
MARGIN, HEAD_PX, BODY_GAP = 24, 36, 4
# Ports whose names add nothing to the arrow.
_PLAIN_PORTS = frozenset({INPUT_PORT, OUTPUT_PORT, OUTPUTS_PORT, VALUE_PORT, "item", "items"})
# Names with a special meaning inside a map or a loop.
_WORDS = frozenset({"item", "index", "previous", "round"})


class NodeMark(NamedTuple):
    """The state of a node in a run."""

    status: str
    done: int = 0
    expected: int = 1
    progress: float | None = None  # 0 to 1, while the node is running
    seconds: float | None = None


_SYMBOLS = {
    "done": "✓",
    "running": "▶",
    "queued": "○",
    "held": "○",
    "moving": "○",
    "asking": "?",
    "failed": "✗",
    "skipped": "–",
    "cancelled": "■",
    "stopping": "■",
    "pending": "·",
}


def marks_of(run: GraphRunAnswer) -> dict[str, NodeMark]:
    """Returns the states of a run's nodes. A map, a loop or a nested graph is running while
    something inside it is running."""
    asking = {question.node for question in run.questions}
    going: dict[str, list[float]] = {}
    for running in run.progress.running_nodes:
        going.setdefault(running.node_id, []).append(running.progress)
    spans: dict[str, list[float]] = {}
    for one in run.executions:
        if one.started_at and one.ended_at:
            spans.setdefault(one.node, []).extend(
                (one.started_at.timestamp(), one.ended_at.timestamp())
            )
    marks: dict[str, NodeMark] = {}
    for node in run.nodes:
        took = spans.get(node.id)
        ended = node.done + node.skipped + node.failed + node.cancelled
        part = (ended + sum(going.get(node.id, ()))) / max(1, node.expected)
        marks[node.id] = NodeMark(
            "asking" if node.id in asking else str(node.status),
            node.done,
            node.expected,
            min(1.0, part) if node.status == "running" else None,
            max(took) - min(took) if took else None,
        )
    return _with_insides(marks)


def _with_insides(marks: dict[str, NodeMark]) -> dict[str, NodeMark]:
    for name in list(marks):
        inner = marks[name]
        outer = name.rpartition("/")[0]
        while outer:
            outer_mark = marks.get(outer)
            if (
                outer_mark
                and outer_mark.status == "pending"
                and inner.status not in ("pending", "skipped")
            ):
                status = "asking" if inner.status == "asking" else "running"
                marks[outer] = outer_mark._replace(status=status)
            outer = outer.rpartition("/")[0]
    return marks


def draw_svg(graph: GraphDefinition, marks: Mapping[str, NodeMark] | None = None) -> str:
    """Returns a complete SVG document."""
    picture = _picture(graph.nodes, graph.connections, "", marks or {}, 0)
    width = max(picture.size.width, len(graph.name[:80]) * 9.0) + 2 * MARGIN
    height = picture.size.height + 2 * MARGIN + HEAD_PX
    title = _text(graph.name or "graph", 80)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-labelledby="graph-title">',
        f'<title id="graph-title">{title}</title>',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
        '<rect class="ground" width="100%" height="100%"/>',
        f'<text class="name" x="{MARGIN}" y="{MARGIN + 8}">{title}</text>',
        f'<g transform="translate({MARGIN} {MARGIN + HEAD_PX})">',
        *picture.lines,
        "</g>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


class _Picture(NamedTuple):
    size: Size
    lines: list[str]


class _Link(NamedTuple):
    source: str
    target: str
    label: str = ""


def _picture(
    nodes: Mapping[str, Node],
    connections: tuple[GraphConnection, ...],
    prefix: str,
    marks: Mapping[str, NodeMark],
    depth: int,
) -> _Picture:
    """Draws the nodes of a graph or of a node's body, beginning at 0, 0."""
    bodies = {
        node.id: _picture(body.nodes, body.connections, f"{prefix}{node.id}/", marks, depth + 1)
        for node in nodes.values()
        if (body := _body(node)) and depth < BODY_DEPTH_MAX
    }
    sizes = {
        node.id: _size(node, marks.get(prefix + node.id), bodies.get(node.id))
        for node in nodes.values()
    }
    links = list(dict.fromkeys(_links(nodes, connections)))
    laid = lay_out(
        sizes, [(link.source, link.target) for link in links], [_label_px(link) for link in links]
    )
    lines = [
        line
        for link, edge in zip(links, laid.edges, strict=True)
        for line in _edge(link, edge, is_passed=_is_passed(link, prefix, marks))
    ]
    for node in nodes.values():
        mark = marks.get(prefix + node.id)
        lines += _node(node, laid.boxes[node.id], mark, bodies.get(node.id))
    return _Picture(laid.size, lines)


def _body(node: Node) -> GraphBody | None:
    return (
        node.body if isinstance(node, MapNode | LoopNode | ScoreNode) and node.body.nodes else None
    )


# References between nodes


def _links(nodes: Mapping[str, Node], connections: tuple[GraphConnection, ...]) -> Iterator[_Link]:
    for connection in connections:
        if connection.source.node in nodes and connection.target.node in nodes:
            yield _Link(connection.source.node, connection.target.node, _label(connection))
    wired = {(connection.source.node, connection.target.node) for connection in connections}
    for node in nodes.values():
        for root, path in _reads(node, 0):
            source = path[0] if root == "input" and root not in nodes and path else root
            if source in nodes and source != node.id and (source, node.id) not in wired:
                is_way = isinstance(nodes[source], ConditionNode | SwitchNode | ApproveNode)
                yield _Link(source, node.id, path[0] if is_way and path else "")


def _label_px(link: _Link) -> float:
    return min(len(link.label), LABEL_CHARACTERS_MAX) * SMALL_CHARACTER_PX


def _reads(node: Node, depth: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the names that a node reads, including outer names that the nodes inside it read."""
    if isinstance(node, MapNode | ScoreNode):
        yield node.over.root, node.over.segments
    for template in templates_in(_templates(node)):
        for path in template.paths:
            yield path.root, path.segments
    body = _body(node)
    if body is None or depth >= BODY_DEPTH_MAX:
        return
    inside = [read for inner in body.nodes.values() for read in _reads(inner, depth + 1)]
    inside += [(connection.source.node, ()) for connection in body.connections]
    for root, segments in inside:
        if root not in body.nodes and root not in _WORDS:
            yield root, segments


def _templates(node: Node) -> Mapping[str, Any]:
    match node:
        case WorkflowNode(properties=values) | ValueNode(values=values):
            return values
        case SubgraphNode(inputs=values) | LoopNode(start=values):
            return values
    return {}


def _label(connection: GraphConnection) -> str:
    source, target = connection
    start = source.port if source.port not in _PLAIN_PORTS else ""
    start = ".".join(filter(None, (start, *source.path)))
    end = "" if target.port in _PLAIN_PORTS or target.port.startswith("input_") else target.port
    return " → ".join(filter(None, (start, end)))


# Nodes


def _title(node: Node) -> str:
    return _cut(node.id, TITLE_CHARACTERS_MAX)


def _description(node: Node) -> str:
    """Returns the description of a node for the line below its name."""
    match node:
        case InputNode(value_type=kind, columns=columns):
            return f"input, {'table' if columns else kind}"
        case WorkflowNode(version=version):
            return node.name + (f" v{version}" if version else "")
        case ConditionNode(text=text):
            return f"if {text}"
        case SwitchNode(cases=cases):
            return f"switch: {', '.join(case.name for case in cases)}"
        case FanOutNode(per_item=per_item, mode=mode):
            return f"fan-out, {'each item' if per_item else mode}"
        case MergeNode(over=over, mode=mode):
            return f"merge, {mode}" + (f" over {over}" if over else "")
        case ApproveNode(pick=pick):
            return "a person picks" if pick else "a person approves"
        case ValueNode(values=values):
            return f"value: {', '.join(values)}"
    return _told_of_composite(node) if isinstance(node, CompositeNode) else kind_of(node)


def _told_of_composite(node: CompositeNode) -> str:
    match node:
        case MapNode(over=over, at_once=at_once):
            return f"map, each of {over}" + (f", {at_once} at once" if at_once else "")
        case LoopNode(at_most=at_most):
            return f"loop until {node.document.get('until', '')}, at most {at_most}"
        case SubgraphNode(graph=graph, version=version):
            return f"graph {graph} v{version}"
        case ScoreNode(over=over, keep=keep):
            return f"score {over}" + (f", keep {keep}" if keep else "")


def _size(node: Node, mark: NodeMark | None, body: _Picture | None) -> Size:
    title = len(_title(node)) * CHARACTER_PX
    subtitle = len(_cut(_description(node), TEXT_CHARACTERS_MAX)) * SMALL_CHARACTER_PX
    state = len(_state(mark)) * SMALL_CHARACTER_PX if mark else 0
    sides = 2 * PADDING + (16 if _has_points(node) else 0)
    width = max(NODE_WIDTH_MIN, title + sides, subtitle + sides, state + sides)
    height = 2 * LINE_PX + (LINE_PX if mark else 0) + (18 if _has_points(node) else 14)
    if body is None:
        return Size(width, height)
    inside = Size(body.size.width + 2 * PADDING, body.size.height + PADDING + BODY_GAP)
    return Size(max(width, inside.width), height + inside.height)


def _has_points(node: Node) -> bool:
    return isinstance(node, ConditionNode | SwitchNode | FanOutNode | MergeNode)


def _node(node: Node, box: Box, mark: NodeMark | None, body: _Picture | None) -> Iterator[str]:
    status = mark.status if mark else ""
    yield f'<g class="node {kind_of(node)} {status if status in _SYMBOLS else ""}">'
    yield f"<title>{_text(f'{node.id}: {_description(node)}', 300)}</title>"
    yield f'<path class="shape" d="{_shape(node, box, body)}"/>'
    x = box.x + PADDING + (8 if _has_points(node) else 0)
    y = box.y + (23 if _has_points(node) else 21)
    yield f'<text class="title" x="{x:.1f}" y="{y:.1f}">{_text(node.id, TITLE_CHARACTERS_MAX)}</text>'
    y += LINE_PX
    yield f'<text class="told" x="{x:.1f}" y="{y:.1f}">{_text(_description(node), TEXT_CHARACTERS_MAX)}</text>'
    if mark:
        y += LINE_PX
        yield f'<text class="state" x="{x:.1f}" y="{y:.1f}">{_text(_state(mark), 60)}</text>'
        if mark.progress is not None:
            yield from _progress(box, mark.progress)
    if body:
        top = box.y + box.height - body.size.height - PADDING
        x = box.x + (box.width - body.size.width) / 2
        yield f'<g transform="translate({x:.1f} {top:.1f})">'
        yield from body.lines
        yield "</g>"
    yield "</g>"


def _state(mark: NodeMark) -> str:
    times = f" {mark.done}/{mark.expected}" if mark.expected > 1 else ""
    percent = f" {100 * mark.progress:.0f} %" if mark.progress is not None else ""
    seconds = f" {mark.seconds:.1f} s" if mark.seconds is not None else ""
    return f"{_SYMBOLS.get(mark.status, '·')} {mark.status}{times}{percent}{seconds}"


def _progress(box: Box, part: float) -> Iterator[str]:
    y = box.y + box.height - 5
    width = box.width - 12
    yield f'<rect class="track" x="{box.x + 6:.1f}" y="{y:.1f}" width="{width:.1f}" height="3"/>'
    yield f'<rect class="bar" x="{box.x + 6:.1f}" y="{y:.1f}" width="{width * part:.1f}" height="3"/>'


def _shape(node: Node, box: Box, body: _Picture | None) -> str:
    x, y, w, h = box
    match node:
        case ConditionNode() | SwitchNode():  # a hexagon, which fits more text than a diamond
            points = [(x + 12, y), (x + w - 12, y), (x + w, y + h / 2), (x + w - 12, y + h)]
            points += [(x + 12, y + h), (x, y + h / 2)]
        case FanOutNode():  # opens to the right
            points = [(x, y + 6), (x + w, y), (x + w, y + h), (x, y + h - 6)]
        case MergeNode():
            points = [(x, y), (x + w, y + 6), (x + w, y + h - 6), (x, y + h)]
        case ApproveNode():
            return _bubble(box)
        case _:
            is_end = kind_of(node) in ("input", "output")
            return _rounded(box, min(w, h) / 2 if is_end and body is None else 6)
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points) + "Z"


def _rounded(box: Box, radius: float) -> str:
    x, y, w, h = box
    r = radius
    return (
        f"M{x + r:.1f} {y:.1f}h{w - 2 * r:.1f}a{r} {r} 0 0 1 {r} {r}v{h - 2 * r:.1f}a{r} {r} 0 0 1 {-r} {r}"
        f"h{2 * r - w:.1f}a{r} {r} 0 0 1 {-r} {-r}v{2 * r - h:.1f}a{r} {r} 0 0 1 {r} {-r}Z"
    )


def _bubble(box: Box) -> str:
    """Returns the path of a speech bubble: a box with a tail."""
    x, y, _, h = box
    tail = f"M{x + 18:.1f} {y + h:.1f}l4 9 10 -9Z"
    return _rounded(box, 6) + tail


def _is_passed(link: _Link, prefix: str, marks: Mapping[str, NodeMark]) -> bool:
    """Checks whether a value passed along the line, because the target has started."""
    source, target = marks.get(prefix + link.source), marks.get(prefix + link.target)
    if source is None or target is None or source.status != "done":
        return False
    return target.status not in ("pending", "skipped", "cancelled")


def _edge(link: _Link, edge: Edge, *, is_passed: bool) -> Iterator[str]:
    first, *rest = edge.points
    path = f"M{first[0]:.1f} {first[1]:.1f}"
    at = first
    for x, y in rest:
        middle = (at[0] + x) / 2
        path += f"C{middle:.1f} {at[1]:.1f} {middle:.1f} {y:.1f} {x:.1f} {y:.1f}"
        at = (x, y)
    passed = " passed" if is_passed else ""
    yield f'<path class="edge{passed}" d="{path}" marker-end="url(#arrow)"/>'
    if link.label:
        x, y = edge.label
        yield f'<text class="label" x="{x:.1f}" y="{y:.1f}">{_text(link.label, LABEL_CHARACTERS_MAX)}</text>'


# Texts


def _cut(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _text(text: str, most: int) -> str:
    """Returns text that is truncated, escaped, and contains only valid XML characters."""
    return escape(
        "".join(character if character.isprintable() else "?" for character in _cut(text, most))
    )


_STYLE = """
text{font:12px "Instrument Sans",ui-sans-serif,system-ui,"Segoe UI",Roboto,sans-serif;fill:#444}
.name{font-size:16px;font-weight:600;fill:#141414}.title{font-size:13px;font-weight:600;fill:#141414}
.told{font-size:11px}.label{font-size:10.5px;text-anchor:middle;paint-order:stroke;stroke:#f2f2f2;stroke-width:4px}
.ground{fill:#f2f2f2}.shape{fill:#fff;stroke:#828282;stroke-width:1.25}.tip{fill:#828282}
.edge{fill:none;stroke:#828282;stroke-width:1.25}.edge.passed{stroke:#06704f}
.map>.shape,.loop>.shape,.graph>.shape,.score>.shape{fill:#f6f6f6;stroke-dasharray:5 3}
.graph>.shape{stroke-width:2.5;stroke-dasharray:none}.loop>.shape{stroke-dasharray:2 3}
.condition>.shape,.switch>.shape{fill:#e8e8e8}.value>.shape{stroke-dasharray:1 2}
.approve>.shape{fill:#fff4cc;stroke:#735300}
.state{font-size:11px;font-weight:600}.track{fill:#e0e0e0}.bar{fill:#0b5fc0}
.done>.shape{stroke:#06704f}.done>.state{fill:#06704f}
.running>.shape{stroke:#0b5fc0;stroke-width:2}.running>.state{fill:#0b5fc0}
.failed>.shape{stroke:#b3330f;stroke-width:2}.failed>.state{fill:#b3330f}
.asking>.shape{fill:#ffcc1a;stroke:#141414;stroke-width:2}.asking>text{fill:#141414}
.skipped>.shape,.cancelled>.shape,.stopping>.shape{stroke-dasharray:3 4}
.skipped>text,.cancelled>text,.pending>text{fill:#606060}
@media (prefers-color-scheme:dark){text{fill:#bdbdbd}.name,.title{fill:#f3f3f3}.ground{fill:#101010}
.label{stroke:#101010}.shape{fill:#202020;stroke:#747474}.edge{stroke:#747474}.tip{fill:#747474}
.map>.shape,.loop>.shape,.graph>.shape,.score>.shape{fill:#181818}.condition>.shape,.switch>.shape{fill:#2b2b2b}
.approve>.shape{fill:#2b2510;stroke:#ffcc1a}.edge.passed{stroke:#42c79a}.track{fill:#3f3f3f}.bar{fill:#74b6ff}
.done>.shape{stroke:#42c79a}.done>.state{fill:#42c79a}.running>.shape{stroke:#74b6ff}.running>.state{fill:#74b6ff}
.failed>.shape{stroke:#ff8163}.failed>.state{fill:#ff8163}.asking>.shape{fill:#ffcc1a;stroke:#f3f3f3}
.asking>text{fill:#141414}.skipped>text,.cancelled>text,.pending>text{fill:#969696}}
""".replace("\n", "")
