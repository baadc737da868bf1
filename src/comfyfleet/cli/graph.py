"""`comfyfleet graph`: commands for graphs, which use the public API."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import yaml
from cyclopts import App, Parameter
from rich.text import Text
from rich.tree import Tree

from comfyfleet.api.graph_mermaid import draw_mermaid
from comfyfleet.api.graph_parse import parse_graph
from comfyfleet.api.graph_reports import RunTimeline
from comfyfleet.api.graphs import (
    ExecutionSeen,
    GraphEvent,
    NodeSeen,
    QuestionSeen,
    ReusedFrom,
    RunningNodeSeen,
)
from comfyfleet.cli import help_texts
from comfyfleet.cli.context import CliContext, InjectedContext, counted, printable
from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, ApiSession, connect
from comfyfleet.cli.graph_inputs import (
    graph_inputs,
    json_or_text,
    node_lines,
    read_graph,
    split_named,
)
from comfyfleet.cli.graph_reports import compare, draw, print_timeline, stored_graph
from comfyfleet.cli.job_waiter import live_display, person_needed_if_refused, retry_while_away
from comfyfleet.cli.tables import print_fields, print_json, print_rows
from comfyfleet.client import Graph, GraphRun, GraphRunHandle
from comfyfleet.errors import (
    InvalidInput,
    NotFound,
    PersonNeeded,
    RunFailed,
    ServerUnavailable,
    Unavailable,
    UnexpectedAnswer,
)


def save_files(
    plane: ApiSession, handle: GraphRunHandle, folder: Path, context: CliContext
) -> None:
    for path in plane.iterate(handle.saved_files(folder)):
        context.print_line(str(path))


FILES_SHOWN_MAX = 8
VALUE_CHARACTERS_MAX = 200
_MARKS = {
    "done": ("✓", "green"),
    "running": ("▶", "blue"),
    "queued": ("○", ""),
    "failed": ("✗", "bold red"),
    "skipped": ("–", "dim"),
    "cancelled": ("■", "dim"),
    "pending": ("·", "dim"),
}


PAUSED = "paused"
ERRORS_SHOWN_MAX = 3  # errors shown per node


def run_tree(run: GraphRun) -> Tree:
    root = Tree(Text(run_summary(run), style="bold"))
    running: dict[str, list[RunningNodeSeen]] = {}
    for execution in run.progress.running_nodes:
        running.setdefault(execution.node_id, []).append(execution)
    seconds = _seconds_by_node(run.executions)
    reused = _reused_by_node(run.executions)
    errors = _errors_by_node(run.executions)
    for node in run.nodes:
        branch = root.add(_node(node, seconds.get(node.id)))
        if node.id in reused:
            branch.add(Text(_reused(reused[node.id]), style="dim"))
        for error in errors.get(node.id, ())[:ERRORS_SHOWN_MAX]:
            branch.add(Text(printable(error), style="red"))
        for job in running.get(node.id, ()):
            branch.add(_job(job))
    for line in _remarks(run):
        root.add(Text(printable(line), style="yellow"))
    for name, value in (run.outputs or {}).items():
        root.add(Text.assemble(("→ ", "green"), printable(f"{name}: {_shown(value)}")))
    return root


def _seconds_by_node(executions: Sequence[ExecutionSeen]) -> dict[str, float]:
    """Returns the seconds from the first start to the last end, for nodes whose jobs have ended."""
    spans: dict[str, list[datetime]] = {}
    for execution in executions:
        if execution.started_at and execution.ended_at:
            spans.setdefault(execution.node, []).extend((execution.started_at, execution.ended_at))
    return {node: (max(times) - min(times)).total_seconds() for node, times in spans.items()}


def _errors_by_node(executions: Sequence[ExecutionSeen]) -> dict[str, list[str]]:
    """Returns the distinct errors of each node, including errors after which the run continued."""
    errors_by_node: dict[str, dict[str, None]] = {}
    for execution in executions:
        if execution.error:
            errors_by_node.setdefault(execution.node, {})[execution.error] = None
    return {node: list(errors) for node, errors in errors_by_node.items()}


def _reused_by_node(executions: Sequence[ExecutionSeen]) -> dict[str, list[ReusedFrom]]:
    sources: dict[str, list[ReusedFrom]] = {}
    for execution in executions:
        if execution.reused_from:
            sources.setdefault(execution.node, []).append(execution.reused_from)
    return sources


def _reused(sources: Sequence[ReusedFrom]) -> str:
    if len(sources) > 1:
        runs = {source.run_id for source in sources if source.run_id}
        return f"{len(sources)} results reused from {counted(len(runs), 'run', 'runs')}"
    (one,) = sources
    if one.job_id is None:
        return f"answered in run {one.run_id}"
    of_run = f" of run {one.run_id}" if one.run_id else ""
    return f"reused from job {one.job_id}{of_run}"


def _shown(value: Any) -> str:
    """Formats a value on one line: files by name, strings unchanged, everything else as JSON."""
    files = list({file["file_id"]: file["filename"] for file in _files_in(value)}.values())
    if files:
        more = f" and {len(files) - FILES_SHOWN_MAX} more" if len(files) > FILES_SHOWN_MAX else ""
        return ", ".join(files[:FILES_SHOWN_MAX]) + more
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[: VALUE_CHARACTERS_MAX - 1]}…"


def _files_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if "file_id" in value and "filename" in value:
            yield value
            return
        value = [value["files"]] if value.get("files") else list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _files_in(part)


def run_summary(run: GraphRun) -> str:
    progress = run.progress
    counts = f"{progress.completed_nodes} of {progress.total_nodes} nodes"
    name = run.name or run.id  # an expired run has lost its name
    return printable(f"{name}: {_shown_status(run)}, {counts}, {progress.weighted_percent:.0f} %")


def _shown_status(run: GraphRun) -> str:
    """Returns the status to display, because the API reports a paused run as running."""
    return PAUSED if run.paused_at and not run.has_ended else str(run.status)


def _node(node: NodeSeen, seconds: float | None) -> Text:
    mark, style = _MARKS.get(node.status, ("·", ""))
    what = node.workflow or node.effect or node.type
    times = f"  {node.done}/{node.expected}" if node.expected > 1 else ""
    took = f"  {seconds:.1f} s" if seconds is not None else ""
    return Text.assemble(
        (f"{mark} ", style), printable(node.id), (f"  {printable(what)}{times}{took}", "dim")
    )


def _job(job: RunningNodeSeen) -> Text:
    index = "".join(f"[{number}]" for number in job.index)
    # The worker is only shown to users who chose it.
    parts = [
        index,
        (job.backend_id or "runs").removeprefix("worker:"),
        f"{100 * job.progress:.0f} %",
        job.current_step or "",
    ]
    return Text(printable(" ".join(filter(None, parts))), style="blue")


def _remarks(run: GraphRun) -> Iterator[str]:
    if run.is_expired:
        yield "the run has expired; its inputs, outputs and records were deleted"
    if run.rerun_of:
        node = f" from {run.rerun_of.node}" if run.rerun_of.node else ""
        yield f"rerun of {run.rerun_of.run_id}{node}"
    for question in run.questions:
        others = f" (backends: {', '.join(question.backends)})" if question.backends else ""
        picks = f" (--pick 0 to {question.pick_from - 1})" if question.pick_from else ""
        yield f"{question.node} asks: {question.message}; answer {', '.join(question.choices)}{others}{picks}"
    if run.error:
        yield run.error.message
        if run.error.alternatives:
            yield f"backends that could run it: {', '.join(run.error.alternatives)}"


app = App(name="graph", help=help_texts.GRAPH, help_format="markdown")
app.command(compare)
app.command(draw)
LOOK_SECONDS = 0.5
NODE_ENDS = ("done", "failed", "skipped", "cancelled")
File = Annotated[Path, Parameter(metavar="FILE", help="A graph, as JSON or YAML.")]
RunId = Annotated[UUID, Parameter(metavar="RUN", help="The run's id.")]
Which = Annotated[
    str, Parameter(metavar="WHAT", help="A file, a graph's id or name, or a run's id.")
]
GraphName = Annotated[str, Parameter(metavar="GRAPH", help="A file, or a graph's id or name.")]
StoredName = Annotated[str, Parameter(metavar="GRAPH", help="The graph's id or name.")]
Inputs = Annotated[
    tuple[str, ...],
    Parameter(
        name=["--input", "-i"],
        metavar="NAME=VALUE",
        help="An input node's value, as JSON or text. @FILE uploads a file, @a.png,@b.png a list of "
        "files, @a.png, (with a comma) a list with one file, and @rows.csv or @rows.jsonl a table.",
    ),
]
Watch = Annotated[bool, Parameter(help="Show the run as a live tree until it ends.")]
OutputFolder = Annotated[
    Path | None,
    Parameter(
        name=["--output", "-o"], metavar="DIR", help="Follow the run, then save its files there."
    ),
]
Most = Annotated[int, Parameter(help="Maximum number of rows.")]
GRAPH_COLUMNS = ("id", "name", "version", "created_at")
RUN_COLUMNS = ("id", "name", "status", "tokens", "created_at", "ended_at", "error")


_public = partial(connect, base=PUBLIC_BASE)


@app.command
def validate(
    file: File, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Show all problems of a graph before anything runs."""
    document = read_graph(file)
    with _public(options, context) as plane:
        verdict = plane.run(plane.client.graphs.validate(document))
    if options.as_json:
        print_json(verdict, context)
    lines = node_lines(file) if verdict.problems and not options.as_json else {}
    for problem in () if options.as_json else verdict.problems:
        place = ".".join(filter(None, (problem.node, problem.port)))
        where = f"{file.name}:{lines[problem.node]}" if problem.node in lines else file.name
        parts = filter(None, (where, place, problem.message))
        context.out.print(": ".join(parts), markup=False, soft_wrap=True)
    for warning in () if options.as_json else verdict.warnings:
        context.warn(f"{warning.node}: {warning.message}")
    if not verdict.valid:
        many = counted(len(verdict.problems), "problem", "problems")
        raise InvalidInput(f"{file} has {many}")
    context.say(f"{file} is valid")


@app.command(name="list")
def list_(
    *, limit: Most = 50, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """List stored graphs, newest first."""
    with _public(options, context) as plane:
        graphs = plane.pages("graphs", "graphs", limit=limit)
    if options.as_json:
        print_json(graphs, context)
    else:
        none = "there are no graphs yet: comfyfleet graph run FILE stores and runs one"
        print_rows(graphs, GRAPH_COLUMNS, context, none=none)


@app.command
def runs(
    *,
    graph: Annotated[
        str | None, Parameter(help="Only runs of this graph, given by id or name.")
    ] = None,
    status: Annotated[
        str | None, Parameter(help="Only runs with this status, such as running or failed.")
    ] = None,
    rerun_of: Annotated[
        UUID | None, Parameter(metavar="RUN", help="Show only reruns of this run.")
    ] = None,
    limit: Most = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List your runs, newest first."""
    with _public(options, context) as plane:
        graph_id = plane.get("graphs", graph)["id"] if graph else None
        filters = {"graph_id": graph_id, "status": status, "rerun_of": rerun_of}
        listed = plane.pages("runs", "graph-runs", limit=limit, **filters)
    if options.as_json:
        print_json(listed, context)
    else:
        paused = {"status": PAUSED}
        rows = [
            {**run, **(paused if run.get("paused_at") and not run["ended_at"] else {})}
            for run in listed
        ]
        print_rows(rows, RUN_COLUMNS, context, none="there are no matching runs")


@app.command
def quote(
    graph: GraphName,
    /,
    *,
    input: Inputs = (),
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show the minimum and maximum price and duration of a run.

    Without inputs, lists are assumed to have their maximum length. A graph file is stored first.
    """
    with _public(options, context) as plane:
        inputs = graph_inputs(plane, graph, input)
        if Path(graph).is_file():
            graph = str(plane.run(plane.client.graphs.create(read_graph(Path(graph)))).id)
        estimate = plane.run(plane.client.graphs.quote(graph, inputs))
    if options.as_json:
        print_json(estimate, context)
        return
    fields = {
        "tokens": _span(estimate.tokens_min, estimate.tokens_max),
        "jobs": _span(estimate.jobs_min, estimate.jobs_max),
        "seconds": _span(round(estimate.seconds_min), round(estimate.seconds_max)),
        "executions": _span(estimate.executions_min, estimate.executions_max),
        "executions_limit": estimate.executions_limit,
        "never_timed": ", ".join(estimate.unknown_durations),
    }
    print_fields(fields, context)


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


@app.command
def run(
    graph: GraphName,
    /,
    *,
    input: Inputs = (),
    max_tokens: Annotated[
        int | None, Parameter(help="Spending limit. Jobs that could exceed it don't start.")
    ] = None,
    watch: Watch = False,
    output: OutputFolder = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Run a graph and print the run's id. A graph from a file is stored at its first run."""
    with _public(options, context) as plane:
        inputs = graph_inputs(plane, graph, input)
        with person_needed_if_refused(waits=watch or output is not None):
            handle = _started(plane, graph, inputs=inputs, max_tokens=max_tokens)
        if not options.as_json:
            context.say(f"graph {handle.run.graph_id} ({handle.run.name})")
            context.print_line(str(handle.id))
        seen = _followed(plane, handle, context, watch=watch, output=output)
    if options.as_json:
        print_json(seen, context)
    if watch or output:
        _require_success(seen)


def _followed(
    plane: ApiSession,
    handle: GraphRunHandle,
    context: CliContext,
    *,
    watch: bool,
    output: Path | None,
) -> GraphRun:
    seen = _watched(plane, handle, context) if watch or output else handle.run
    if output and seen.has_ended:
        save_files(plane, handle, output, context)
    return seen


def _started(plane: ApiSession, graph: str, **options: Any) -> GraphRunHandle:
    graphs = plane.client.graphs
    if Path(graph).is_file():
        return plane.run(graphs.run_document(read_graph(Path(graph)), **options))
    return plane.run(graphs.run(graph, **options))


@app.command
def cancel(
    run_id: RunId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Cancel a run and its jobs. Jobs that did not complete are refunded."""
    with _public(options, context) as plane:
        handle = _act(plane, run_id, "cancel")
    _told(handle.run, options, context)


@app.command
def pause(
    run_id: RunId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Pause a run. It starts no more jobs, but submitted jobs continue."""
    with _public(options, context) as plane:
        handle = _act(plane, run_id, "pause")
    _told(handle.run, options, context)


@app.command
def resume(
    run_id: RunId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Resume a paused run."""
    with _public(options, context) as plane:
        handle = _act(plane, run_id, "resume")
    _told(handle.run, options, context)


@app.command
def download(
    run_id: RunId,
    /,
    *,
    output: Annotated[
        Path, Parameter(name=["--output", "-o"], metavar="DIR", help="Folder for the files.")
    ] = Path("output"),
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Save the output files of a run in order, and print their paths. Nothing is overwritten."""
    with _public(options, context) as plane:
        handle = _run(plane, run_id)
        save_files(plane, handle, output, context)
        if not handle.run.files:
            raise RunFailed(f"the run is {handle.run.status} and has no files")


@app.command
def delete(
    graph: StoredName, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Delete one of your graphs. Its runs are kept."""
    with _public(options, context) as plane:
        plane.run(plane.client.graphs.delete(graph))
    context.say(f"{graph} is deleted; its runs are kept")


def _run(plane: ApiSession, run_id: UUID | str) -> GraphRunHandle:
    return plane.run(plane.client.graphs.get_run(run_id))


def _act(plane: ApiSession, run_id: UUID, act: str, **body: Any) -> GraphRunHandle:
    answer = plane.post("graph-runs", run_id, act, **body)
    return GraphRunHandle(plane.client.calls, GraphRun.model_validate(answer))


def _require_success(seen: GraphRun) -> None:
    """Raises PersonNeeded if a person must help, and RunFailed after other failures."""
    if seen.status == "completed":
        return
    if not seen.has_ended and seen.paused_at:
        raise PersonNeeded(
            f"run {seen.id} is paused. Resume it with: comfyfleet graph resume {seen.id}"
        )
    if not seen.has_ended:
        questions = "; ".join(_question_line(seen.id, question) for question in seen.questions)
        raise PersonNeeded(
            f"the run is waiting for an answer: {questions}",
            hint=f"Then follow it with: comfyfleet graph show {seen.id} --watch",
        )
    if action := _required_action(seen):
        raise PersonNeeded(
            f"{_reason(seen).rstrip('.')}. {action}",
            hint=f"Retry it and keep completed results with: comfyfleet graph retry {seen.id}",
        )
    raise RunFailed(_reason(seen))


def _required_action(seen: GraphRun) -> str | None:
    """Returns the action that a person must take before a failed run can succeed."""
    return seen.error.action if seen.error else None


def _question_line(run_id: object, question: QuestionSeen) -> str:
    choices = "|".join(map(str, question.choices))
    return (
        f"{question.node} asks: {question.message}; answer with: "
        f"comfyfleet graph answer {run_id} {choices}"
    )


def _reason(seen: GraphRun) -> str:
    return seen.error.message if seen.error else f"the run is {seen.status}"


def _watched(plane: ApiSession, handle: GraphRunHandle, context: CliContext) -> GraphRun:
    """Follows a run until it ends, even through outages. Ctrl-C stops watching, but not the run."""
    changes = RunChanges(handle, context)

    def refresh() -> GraphRun:
        return plane.run(handle.refresh())

    look = partial(retry_while_away, refresh, context, "the run continues", time.sleep)
    with live_display(context.err, run_tree(look())) as live:
        while not handle.run.has_ended and not _is_stuck(handle.run, context):
            try:
                for event in plane.iterate(handle.events()):
                    changes.tell(event)
                    seen = handle.run.model_copy(update=_as_seen(event))
                    live.update(run_tree(seen))
                    if _is_stuck(seen, context):
                        break
            except (ServerUnavailable, Unavailable, UnexpectedAnswer):
                time.sleep(LOOK_SECONDS)
            changes.tell(look())
        live.update(run_tree(handle.run))
    return handle.run


def _is_stuck(run: GraphRun, context: CliContext) -> bool:
    """Checks whether the run is paused, or needs an answer that can't be given at this terminal."""
    return run.paused_at is not None or (
        run.status == "waiting_for_user" and not context.err.is_terminal
    )


def _as_seen(event: GraphEvent) -> dict[str, Any]:
    """Returns the event's fields in the form of a run."""
    names = ("status", "nodes", "questions", "paused_at")
    fields = {name: getattr(event, name) for name in names}
    return {**fields, "progress": event}


class RunChanges:
    """Prints changes line by line where no live tree can be shown, such as in a pipe or in CI."""

    def __init__(self, handle: GraphRunHandle, context: CliContext) -> None:
        self._run_id, self._context = handle.id, context
        self._told: set[tuple[str, ...]] = set()

    def tell(self, seen: GraphRun | GraphEvent) -> None:
        for question in seen.questions:
            where = (question.node, *map(str, question.index))
            self._once(where, _question_line(self._run_id, question))
        if self._context.err.is_terminal:
            return
        for node in seen.nodes:
            if node.status in NODE_ENDS:
                self._once((node.id, node.status), f"{node.id}: {node.status}")

    def _once(self, key: tuple[str, ...], line: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._context.say(line)


@app.command
def show(
    what: Which,
    /,
    *,
    mermaid: Annotated[bool, Parameter(help="Print the graph as a Mermaid diagram.")] = False,
    watch: Annotated[bool, Parameter(help="Follow the run until it ends.")] = False,
    timeline: Annotated[
        bool,
        Parameter(
            negative="", help="Show only the timeline of a run. Can be combined with --json."
        ),
    ] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show a run as a tree with a timeline, or draw a graph from a file or a stored graph.

    The timeline shows what each node waited for, and the critical path."""
    if Path(what).is_file():
        context.out.print(
            draw_mermaid(parse_graph(read_graph(Path(what))).graph), markup=False, soft_wrap=True
        )
        return
    with _public(options, context) as plane:
        handle = _found_run(plane, what)
        graph = _graph(plane, handle, what) if mermaid or handle is None else None
        if handle and watch:
            _watched(plane, handle, context)
        times = _timeline(plane, handle)
    seen = handle.run if handle else None
    if options.as_json:
        print_json((times if timeline else None) or seen or graph, context)
    elif graph or seen is None:
        context.out.print(graph.mermaid if graph else "", markup=False, soft_wrap=True)
    else:
        if not watch and not timeline:
            context.out.print(run_tree(seen))
        print_timeline(times, context)
    if seen and seen.status == "failed":
        context.say(_reason(seen))
    if seen and watch and (not seen.has_ended or _required_action(seen)):
        _require_success(seen)


def _timeline(plane: ApiSession, handle: GraphRunHandle | None) -> RunTimeline | None:
    """Returns a run's timeline, or None for a graph or an older control plane without timelines."""
    try:
        return plane.run(handle.timeline()) if handle else None
    except NotFound:
        return None


def _found_run(plane: ApiSession, what: str) -> GraphRunHandle | None:
    """Returns the run with this id. Returns None for anything else, such as a graph's name."""
    try:
        return _run(plane, UUID(what))
    except (ValueError, NotFound):
        return None


def _graph(plane: ApiSession, handle: GraphRunHandle | None, what: str) -> Graph:
    if handle is None:
        return stored_graph(plane, what)
    return plane.run(plane.client.graphs.get(handle.run.graph_id, version=handle.run.graph_version))


@app.command
def retry(
    run_id: RunId,
    /,
    *,
    backend: Annotated[
        str | None, Parameter(metavar="WHO", help="The backend for the failed nodes: worker:ID.")
    ] = None,
    max_tokens: Annotated[
        int | None, Parameter(help="New spending limit of the whole run.")
    ] = None,
    watch: Annotated[bool, Parameter(help="Follow the run until it ends.")] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Continue a failed run. Finished results are reused."""
    with _public(options, context) as plane:
        with person_needed_if_refused(waits=watch):
            handle = _act(plane, run_id, "retry", backend=backend, max_tokens=max_tokens)
        if watch:
            _watched(plane, handle, context)
    _told(handle.run, options, context)
    if watch:
        _require_success(handle.run)


@Parameter(name="*")
@dataclass(frozen=True)
class _RerunChanges:
    """The changes to the earlier run."""

    start: Annotated[
        str | None,
        Parameter(
            name="--from",
            metavar="NODE",
            help="Run this node again, and everything that depends on it. Without it, run only nodes that have no result or have changed.",
        ),
    ] = None
    input: Inputs = ()
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            metavar="NODE.PROPERTY=VALUE",
            help="A node's property for this run only, as JSON or text.",
        ),
    ] = ()
    version: Annotated[
        int | None, Parameter(help="The graph's version. Default: the value of the earlier run.")
    ] = None


_AS_IT_WAS = _RerunChanges()


@app.command
def rerun(
    run_id: RunId,
    /,
    *,
    changes: _RerunChanges = _AS_IT_WAS,
    max_tokens: Annotated[
        int | None,
        Parameter(help="Spending limit of the new run. Default: the value of the earlier run."),
    ] = None,
    watch: Watch = False,
    output: OutputFolder = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Start a new run that reuses results of a finished one, free of charge, and print its id."""
    values = dict(split_named(text, "--set", "NODE.PROPERTY=VALUE") for text in changes.set_)
    with _public(options, context) as plane:
        earlier = _run(plane, run_id)
        new = earlier.rerun(
            changes.start,
            graph_inputs(plane, str(earlier.run.graph_id), changes.input),
            changes={name: json_or_text(text) for name, text in values.items()},
            version=changes.version,
            max_tokens=max_tokens,
        )
        with person_needed_if_refused(waits=watch or output is not None):
            handle = plane.run(new)
        if not options.as_json:
            context.print_line(str(handle.id))
        seen = _followed(plane, handle, context, watch=watch, output=output)
    if options.as_json:
        print_json(seen, context)
    if watch or output:
        _require_success(seen)


@Parameter(name="*")
@dataclass(frozen=True)
class _Question:
    """Selects the question to answer."""

    node: Annotated[
        str | None, Parameter(help="The node to answer. Required if several nodes have questions.")
    ] = None
    index: Annotated[tuple[int, ...], Parameter(help="The index of the item to answer.")] = ()
    for_all: Annotated[
        bool,
        Parameter(name="--all", negative="", help="Answer for all items of the node."),
    ] = False


_ONLY_QUESTION = _Question()


@app.command
def answer(
    run_id: RunId,
    choice: Annotated[
        Literal["backend", "retry", "skip", "fail", "approve", "reject"],
        Parameter(help="The answer."),
    ],
    /,
    *,
    question: _Question = _ONLY_QUESTION,
    backend: Annotated[str | None, Parameter(metavar="WHO", help="worker:ID.")] = None,
    pick: Annotated[
        tuple[int, ...], Parameter(help="With approve, the images to pick, counted from 0.")
    ] = (),
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Answer a node's question about an offline backend or an approval."""
    if choice == "backend" and backend is None:
        raise InvalidInput(
            "the answer `backend` requires --backend WHO",
            hint=f"List the backends that could run it with: comfyfleet graph show {run_id}",
        )
    with _public(options, context) as plane:
        body = {**asdict(question), "choice": choice, "backend": backend, "picked": pick or None}
        handle = _act(plane, run_id, "answer", **body)
    _told(handle.run, options, context)


def _told(seen: GraphRun, options: ApiOptions, context: CliContext) -> None:
    if options.as_json:
        print_json(seen, context)
    else:
        context.say(run_summary(seen))


@app.command
def export(
    graph: StoredName,
    /,
    *,
    version: Annotated[int | None, Parameter(help="Version number. Default: the newest.")] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Print a stored graph as YAML (or JSON)."""
    with _public(options, context) as plane:
        document = plane.run(plane.client.graphs.get(graph, version=version)).document
    if options.as_json:
        print_json(document, context)
        return
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    context.out.print(text, markup=False, soft_wrap=True, end="")
