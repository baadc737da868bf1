"""Reports on graph runs: the timeline in `graph show`, `graph compare` and `graph draw`."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from cyclopts import Parameter
from rich.text import Text

from comfyfleet.api.graph_parse import parse_graph
from comfyfleet.api.graph_reports import (
    ComparedRun,
    CriticalStep,
    KindSeconds,
    NodeTimeline,
    RunComparison,
    RunTimeline,
    SpanKind,
    TimelineSpan,
)
from comfyfleet.api.graph_svg import NodeMark, draw_svg, marks_of
from comfyfleet.cli.context import (
    CliContext,
    InjectedContext,
    printable,
    read_structure,
    write_file,
)
from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, ApiSession, connect
from comfyfleet.cli.tables import TextTable, exact_time, print_json
from comfyfleet.client import Graph, GraphRun
from comfyfleet.errors import InvalidInput, NotFound

_public = partial(connect, base=PUBLIC_BASE)
WIDTH_MAX = 120
NAME_CELLS_MAX = 24
TIME_CELLS = 10
WAIT_CELLS = 24
BAR_CELLS_MIN = 10
STEPS_SHOWN_MAX = 40
STEP_PART_MIN = 0.005  # fraction of the critical path; shorter steps are not listed
_BARS = {
    SpanKind.RUNNING: ("█", "blue", "ran"),
    SpanKind.QUEUED: ("░", "dim", "waited for a worker"),
    SpanKind.HELD: ("·", "dim", "waited for its turn"),
    SpanKind.ASKING: ("?", "yellow", "waited for a person"),
    SpanKind.RETRIED: ("▒", "red", "earlier attempts"),
}
_WAITS = {
    SpanKind.QUEUED: "queue",
    SpanKind.HELD: "turn",
    SpanKind.ASKING: "person",
    SpanKind.RETRIED: "retries",
}


# The timeline


def timeline_lines(timeline: RunTimeline, width: int) -> Iterator[Text]:
    """Yields a line for each node, then the critical path. The lines are as wide as the terminal,
    or 80 cells in a pipe."""
    if not timeline.nodes:
        return
    width = min(width, WIDTH_MAX)
    names = min(NAME_CELLS_MAX, max(len(_shown_name(node)) for node in timeline.nodes))
    cells = max(BAR_CELLS_MIN, width - 2 - names - 1 - TIME_CELLS - 1 - WAIT_CELLS - 1)
    end = took(timeline.seconds)
    scale = f"0 s{end:>{cells - 3}}"
    yield Text(f"  {'':{names}} {scale} {'ran':>{TIME_CELLS}} waited for", style="dim")
    for node in timeline.nodes:
        yield _row(node, timeline.seconds, names, cells)
    yield Text.assemble(("  " + ", ".join(_legend(timeline)), "dim"))
    yield from _path_lines(timeline)


def _shown_name(node: NodeTimeline) -> str:
    return printable(node.id)


def _row(node: NodeTimeline, seconds: float, names: int, cells: int) -> Text:
    mark = ("* ", "bold") if node.is_critical else ("  ", "")
    name = _shortened(_shown_name(node), names)
    row = Text.assemble(
        mark,
        (f"{name:{names}} ", "bold" if node.is_critical else ""),
        *bar_of(node.spans, seconds, cells),
        f" {_ran(node):>{TIME_CELLS}} ",
        (_shortened(_waited(node), WAIT_CELLS), "dim"),
    )
    row.rstrip()
    return row


def bar_of(spans: Sequence[TimelineSpan], seconds: float, cells: int) -> list[tuple[str, str]]:
    """Returns one character per cell. It shows the kind of span that fills most of the cell. Spans
    shorter than a cell remain visible."""
    signs = [(" ", "")] * cells
    filled = [0.0] * cells
    for span in spans:
        sign, style, _ = _BARS.get(span.kind, ("█", "", ""))
        first = min(cells - 1, int(span.start / seconds * cells)) if seconds else 0
        last = min(cells - 1, int(span.end / seconds * cells)) if seconds else 0
        for cell in range(first, last + 1):
            start, end = cell * seconds / cells, (cell + 1) * seconds / cells
            part = min(end, span.end) - max(start, span.start)
            if part > filled[cell]:
                signs[cell], filled[cell] = (sign, style), part
    return signs


def _ran(node: NodeTimeline) -> str:
    if node.status == "skipped":
        return "skipped"
    seconds = node.seconds.running
    if not seconds:
        return ""
    times = f"{node.executions} × " if node.executions > 1 else ""
    return f"{times}{took(seconds / max(1, node.executions))}"


def _waited(node: NodeTimeline) -> str:
    after = printable(node.after) if node.after else ""
    return ", ".join(filter(None, (after, _longest_wait(node.seconds, node.executions))))


def _longest_wait(seconds: KindSeconds, executions: int = 1) -> str:
    waits = {kind: getattr(seconds, kind.value) / max(1, executions) for kind in _WAITS}
    kind = max(waits, key=lambda wait_kind: waits[wait_kind])
    return f"{_WAITS[kind]} {took(waits[kind])}" if waits[kind] >= 0.05 else ""


def _legend(timeline: RunTimeline) -> Iterator[str]:
    kinds = {span.kind for node in timeline.nodes for span in node.spans}
    for kind, (sign, _, meaning) in _BARS.items():
        if kind in kinds:
            yield f"{sign} {meaning}"
    yield "* on the critical path"


def _path_lines(timeline: RunTimeline) -> Iterator[Text]:
    total = sum(step.end - step.start for step in timeline.critical_path)
    least = total * STEP_PART_MIN
    steps = [step for step in timeline.critical_path if step.end - step.start > least]
    if not steps:
        return
    yield Text(f"critical path, {took(total)}:", style="bold")
    shown = sorted(steps, key=lambda step: step.start - step.end)[:STEPS_SHOWN_MAX]
    for step in sorted(shown, key=lambda step: step.start):
        yield Text(f"  {_step(step)}")
    hidden = timeline.critical_total - len(timeline.critical_path) + len(steps) - len(shown)
    if hidden:
        yield Text(f"  and {hidden} shorter steps", style="dim")


def _step(step: CriticalStep) -> str:
    name = printable(step.node) + "".join(f"[{number}]" for number in step.index)
    parts = [f"ran {took(step.seconds.running)}" if step.seconds.running else ""]
    parts += [
        f"{_WAITS[kind]} {took(getattr(step.seconds, kind.value))}"
        for kind in _WAITS
        if getattr(step.seconds, kind.value) >= 0.05
    ]
    details = ", ".join(filter(None, parts))
    return f"{name}  {took(step.end - step.start)}{f' ({details})' if details else ''}"


def took(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _shortened(text: str, cells: int) -> str:
    return text if len(text) <= cells else f"{text[: cells - 1]}…"


def print_timeline(timeline: RunTimeline | None, context: CliContext) -> None:
    if timeline is None:
        return
    for line in timeline_lines(timeline, context.out.width):
        context.out.print(line, soft_wrap=True)


# The commands below compare runs and draw graphs.

RunId = Annotated[UUID, Parameter(metavar="RUN", help="The id of a run.")]


def compare(
    run_a: RunId,
    run_b: RunId,
    /,
    *,
    everything: Annotated[
        bool, Parameter(name="--all", negative="", help="Show equal values as well.")
    ] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Compare two runs: inputs, graphs, versions, prices, times and outputs.

    Only differences are shown. Files are compared by content. Times that differ by less than a
    tenth count as equal."""
    with _public(options, context) as plane:
        comparison = plane.run(plane.client.graphs.compare(run_a, run_b, with_same=everything))
    if options.as_json:
        print_json(comparison, context)
    else:
        print_comparison(comparison, context)


def print_comparison(comparison: RunComparison, context: CliContext) -> None:
    listing = TextTable(["what", "name", "a", "b"])
    for value in comparison.values:
        mark = "= " if value.is_same else ""
        cells = (_cell(value.a), _cell(value.b))
        listing.add(f"{mark}{value.section}", printable(value.name), *cells)
    for name, run in (("a", comparison.a), ("b", comparison.b)):
        context.say(f"{name}: {_run_line(run)}")
    if listing.rows:
        listing.print_on(context.out)
    if comparison.left_out:
        context.say(f"{comparison.left_out:,} more are not shown")
    context.say(f"{comparison.different:,} different, {comparison.same:,} the same")


def _cell(value: str | None) -> Text:
    return Text("none", style="dim") if value is None else Text(printable(value))


def _run_line(run: ComparedRun) -> str:
    name = run.name or "a graph without a name"
    expired = "; its values have expired" if run.is_expired else ""
    at = exact_time(run.created_at)
    return printable(f"{run.id}, {name} v{run.graph_version}, {run.status}, {at}{expired}")


# Drawing


def draw(
    what: Annotated[
        str, Parameter(metavar="WHAT", help="A file, a graph's id or name, or a run's id.")
    ],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            metavar="FILE",
            help="The file to write. Default: print to stdout.",
        ),
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Draw a graph as SVG. For a run, include the states of its nodes."""
    marks: Mapping[str, NodeMark] = {}
    if output is not None and output.suffix.lower() not in ("", ".svg"):
        raise InvalidInput(f"{output} isn't an SVG file; use a name like {output.stem}.svg")
    if Path(what).is_file():
        document = read_structure(Path(what))
    else:
        with _public(options, context) as plane:
            document, marks = _drawn(plane, what)
    parsed = parse_graph(document)
    if not parsed.graph.nodes:
        reason = f": {parsed.problems[0]}" if parsed.problems else ""
        raise InvalidInput(f"{what} has no nodes to draw{reason}")
    picture = draw_svg(parsed.graph, marks)
    if options.as_json:
        print_json({"svg": picture}, context)
    if output is None and not options.as_json:
        context.out.print(picture, markup=False, highlight=False, soft_wrap=True, end="")
    if output is not None:
        write_file(output, picture.encode())
        context.say(f"{output} is written")


def stored_graph(plane: ApiSession, what: str) -> Graph:
    """Returns a graph by its id or name. The error mentions files and runs, which the user may have
    meant."""
    try:
        return plane.run(plane.client.graphs.get(what))
    except NotFound:
        raise NotFound(
            f"no file, graph or run named {what} was found",
            hint="List graphs with comfyfleet graph list, and runs with comfyfleet graph runs",
        ) from None


def _drawn(plane: ApiSession, what: str) -> tuple[Any, Mapping[str, NodeMark]]:
    """Returns the document of a graph, or the document of a run with the states of its nodes."""
    try:
        run_id = UUID(what)
        answer = plane.get("graph-runs", run_id, document=True, executions=1_000)
    except (ValueError, NotFound):
        return stored_graph(plane, what).document, {}
    run = GraphRun.model_validate(answer)
    if run.document is None:
        raise InvalidInput("the run has expired, and its graph was deleted")
    return run.document, marks_of(run)
