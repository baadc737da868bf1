"""`comfyfleet graph`: graphs over the customers' API."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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
from comfyfleet.api.jobs import ENDED
from comfyfleet.cli import help_texts
from comfyfleet.cli.context import CliContext, InjectedContext, counted, printable, read_structure
from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, ApiSession, connect
from comfyfleet.cli.job_waiter import live_display, retry_while_away
from comfyfleet.cli.tables import print_fields, print_json, print_rows
from comfyfleet.cli.upload import download as download_to
from comfyfleet.cli.upload import upload
from comfyfleet.client.jobs import free_path
from comfyfleet.client.model import GraphRun
from comfyfleet.errors import (
    InvalidInput,
    LimitExceeded,
    NotFound,
    RunFailed,
    ServerUnavailable,
    Unavailable,
    UnexpectedAnswer,
)


def save_files(
    plane: ApiSession, seen: Mapping[str, Any], folder: Path, context: CliContext
) -> list[Path]:
    """Each once, several with their number in front so that a folder keeps their order."""
    files = GraphRun.model_validate(seen).files
    width = len(str(len(files)))
    saved: list[Path] = []
    for number, file in enumerate(files, start=1):
        folder.mkdir(parents=True, exist_ok=True)
        front = f"{number:0{width}}_" if len(files) > 1 else ""
        path = free_path(folder, front + file.filename)
        part = path.with_name(f"{path.name}.part")
        download_to(plane, file.url, part)
        part.replace(path)
        saved.append(path)
        context.print_line(str(path))
    return saved


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


def run_tree(seen: Mapping[str, Any]) -> Tree:
    root = Tree(Text(run_summary(seen), style="bold"))
    running: dict[str, list[Mapping[str, Any]]] = {}
    for each in seen["progress"]["running_nodes"]:
        running.setdefault(each["node_id"], []).append(each)
    seconds = _seconds_by_node(seen.get("executions", ()))
    for node in seen["nodes"]:
        branch = root.add(_node(node, seconds.get(node["id"])))
        for each in running.get(node["id"], ()):
            branch.add(_job(each))
    for line in _remarks(seen):
        root.add(Text(printable(line), style="yellow"))
    for name, value in (seen.get("outputs") or {}).items():
        root.add(Text.assemble(("→ ", "green"), printable(f"{name}: {_shown(value)}")))
    return root


def _seconds_by_node(executions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """From the first start to the last end; of nodes that have jobs, and once they have ended."""
    spans: dict[str, list[datetime]] = {}
    for each in executions:
        if each["started_at"] and each["ended_at"]:
            moments = (each["started_at"], each["ended_at"])
            spans.setdefault(each["node"], []).extend(map(datetime.fromisoformat, moments))
    return {node: (max(found) - min(found)).total_seconds() for node, found in spans.items()}


def _shown(value: Any) -> str:
    """Files by their names, texts as they are, everything else as JSON, on one line."""
    files = list({each["file_id"]: each["filename"] for each in _files_in(value)}.values())
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


def run_summary(seen: Mapping[str, Any]) -> str:
    progress = seen["progress"]
    counts = f"{progress['completed_nodes']} of {progress['total_nodes']} nodes"
    percent = f"{progress['weighted_percent']:.0f} %"
    name = seen["name"] or seen["id"]  # an expired run has lost its name
    return printable(f"{name}: {seen['status']}, {counts}, {percent}")


def _node(node: Mapping[str, Any], seconds: float | None) -> Text:
    mark, style = _MARKS.get(node["status"], ("·", ""))
    what = node["workflow"] or node.get("effect") or node["type"]
    times = f"  {node['done']}/{node['expected']}" if node["expected"] > 1 else ""
    took = f"  {seconds:.1f} s" if seconds is not None else ""
    return Text.assemble(
        (f"{mark} ", style), printable(node["id"]), (f"  {printable(what)}{times}{took}", "dim")
    )


def _job(job: Mapping[str, Any]) -> Text:
    index = "".join(f"[{number}]" for number in job["index"])
    where = job["backend_id"] or "in the queue"
    parts = [index, where, f"{100 * job['progress']:.0f} %", job["current_step"] or ""]
    return Text(printable(" ".join(filter(None, parts))), style="blue")


def _remarks(seen: Mapping[str, Any]) -> Iterator[str]:
    if seen.get("is_expired"):
        yield "its time was up: what went in, came out and was recorded is gone"
    for each in seen["questions"]:
        choices = ", ".join(each["choices"])
        others = f" (backends: {', '.join(each['backends'])})" if each["backends"] else ""
        yield f"{each['node']} asks: {each['message']}; answer {choices}{others}"
    if seen["error"]:
        yield seen["error"]["message"]
        if seen["error"]["alternatives"]:
            yield f"it could run on {', '.join(seen['error']['alternatives'])}"


app = App(name="graph", help=help_texts.GRAPH, help_format="markdown")
LOOK_SECONDS = 0.5
NODE_ENDS = ("done", "failed", "skipped", "cancelled")
PROGRESS = ("weighted_percent", "completed_nodes", "total_nodes", "running_nodes")
TOLD = ("status", "nodes", "questions")
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
        help="The value of an input node: JSON or a text; @FILE uploads a file; @a.png,@b.png is a list of files, and @a.png, (with a comma) a list of one.",
    ),
]
Most = Annotated[int, Parameter(help="Maximum number of rows.")]
GRAPH_COLUMNS = ("id", "name", "version", "created_at")
RUN_COLUMNS = ("id", "name", "status", "tokens", "created_at", "ended_at", "error")


def _public(options: ApiOptions, context: CliContext) -> AbstractContextManager[ApiSession]:
    return connect(options, context, base=PUBLIC_BASE)


def _read(path: Path) -> dict[str, Any]:
    found = read_structure(path)
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} is no graph")
    return found


@app.command
def validate(
    file: File, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Show all problems of a graph, before anything runs."""
    document = _read(file)
    with _public(options, context) as plane:
        verdict = plane.post("graphs", "validate", document=document)
    if options.as_json:
        print_json(verdict, context)
    for each in () if options.as_json else verdict["problems"]:
        place = ".".join(filter(None, (each["node"], each["port"])))
        context.out.print(f"{place or file.name}: {each['message']}", markup=False, soft_wrap=True)
    for each in () if options.as_json else verdict["warnings"]:
        context.warn(f"{each['node']}: {each['message']}")
    if not verdict["valid"]:
        many = counted(len(verdict["problems"]), "problem", "problems")
        raise InvalidInput(f"{file} has {many}")
    context.say(f"{file} is fine")


@app.command(name="list")
def list_(
    *, limit: Most = 50, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Stored graphs, the newest first."""
    with _public(options, context) as plane:
        found = plane.pages("graphs", "graphs", limit=limit)
    if options.as_json:
        print_json(found, context)
    else:
        none = "no graph is stored: comfyfleet graph run FILE stores one and runs it"
        print_rows(found, GRAPH_COLUMNS, context, none=none)


@app.command
def runs(
    *,
    graph: Annotated[str | None, Parameter(help="Only its runs; an id or name.")] = None,
    status: Annotated[
        str | None, Parameter(help="Only runs with this status, such as running or failed.")
    ] = None,
    limit: Most = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Your runs, the newest first."""
    with _public(options, context) as plane:
        graph_id = plane.get("graphs", graph)["id"] if graph else None
        found = plane.pages("runs", "graph-runs", limit=limit, graph_id=graph_id, status=status)
    if options.as_json:
        print_json(found, context)
    else:
        print_rows(found, RUN_COLUMNS, context, none="there are no such runs")


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
        inputs = {name: _value(plane, text) for name, text in map(_named, input)}
        if Path(graph).is_file():
            graph = plane.post("graphs", document=_read(Path(graph)))["id"]
        found = plane.post("graphs", graph, "quote", inputs=inputs)
    if options.as_json:
        print_json(found, context)
        return
    fields = {
        "tokens": _span(found["tokens_min"], found["tokens_max"]),
        "jobs": _span(found["jobs_min"], found["jobs_max"]),
        "seconds": _span(round(found["seconds_min"]), round(found["seconds_max"])),
        "never_timed": ", ".join(found["unknown_durations"]),
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
        int | None, Parameter(help="Spending limit: no job starts that could exceed it.")
    ] = None,
    watch: Annotated[bool, Parameter(help="Follow the run to its end, as a live tree.")] = False,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            metavar="DIR",
            help="Follow the run, then save its files there.",
        ),
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Run a graph; prints the run's id. A file is stored with its first run."""
    with _public(options, context) as plane:
        inputs = {name: _value(plane, text) for name, text in map(_named, input)}
        started = _started(plane, graph, inputs=inputs, max_tokens=max_tokens)
        if not options.as_json:
            context.say(f"graph {started['graph_id']} ({started['name']})")
            context.print_line(started["id"])
        if watch or output:
            started = _watched(plane, started["id"], context)
        if output:
            save_files(plane, started, output, context)
    if options.as_json:
        print_json(started, context)
    if (watch or output) and started["status"] != "completed":
        raise RunFailed(_reason(started))


def _started(plane: ApiSession, graph: str, **body: Any) -> dict[str, Any]:
    if Path(graph).is_file():
        return plane.post("graph-runs", document=_read(Path(graph)), **body)
    return plane.post("graphs", graph, "runs", **body)


@app.command
def cancel(
    run_id: RunId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Stop a run and its jobs; jobs that did not complete are refunded."""
    with _public(options, context) as plane:
        seen = plane.post("graph-runs", run_id, "cancel")
    _told(seen, options, context)


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
    """Save the files that a run made, in their order; prints the paths. Nothing is overwritten."""
    with _public(options, context) as plane:
        seen = plane.get("graph-runs", run_id, executions=0)
        saved = save_files(plane, seen, output, context)
    if not saved:
        raise RunFailed(f"the run is {seen['status']} and has no files")


@app.command
def delete(
    graph: StoredName, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Delete one of your graphs; its runs stay."""
    with _public(options, context) as plane:
        plane.delete("graphs", graph)
    context.say(f"{graph} is deleted; its runs stay")


def _reason(seen: dict[str, Any]) -> str:
    return seen["error"]["message"] if seen["error"] else f"the run is {seen['status']}"


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"--input {text}: it must be NAME=VALUE")
    return name, value


def _value(plane: ApiSession, text: str) -> Any:
    if text.startswith("@"):
        names = [each.removeprefix("@") for each in text.split(",")]
        files = [_uploaded(plane, Path(name)) for name in names if name]
        return files if len(names) > 1 else files[0]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _uploaded(plane: ApiSession, path: Path) -> str:
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}")
    return upload(plane, path, "videos", "uploads")


def _watched(plane: ApiSession, run_id: str, context: CliContext) -> dict[str, Any]:
    """Until it is over. Ctrl-C only stops watching: the run goes on."""
    seen = _looked(plane, run_id, context)
    changes = RunChanges(run_id, context)
    with live_display(context.err, run_tree(seen)) as live:
        while seen["status"] not in ENDED:
            for told in _heard(plane, run_id, seen):
                seen = told
                live.update(run_tree(seen))
                changes.tell(seen)
            if seen["status"] not in ENDED:  # the stream broke, or none came through
                time.sleep(LOOK_SECONDS)
                seen = _looked(plane, run_id, context)
                changes.tell(seen)
        seen = _looked(plane, run_id, context)
        live.update(run_tree(seen))
    return seen


def _looked(plane: ApiSession, run_id: str, context: CliContext) -> dict[str, Any]:
    """The run, even if its control plane is away for a while: the run doesn't end by that."""
    get = partial(plane.get, "graph-runs", run_id)
    return retry_while_away(get, context, "the run goes on", time.sleep)


class RunChanges:
    """Tells what changed, a line each, where no live tree can be shown: in a pipe or in CI."""

    def __init__(self, run_id: str, context: CliContext) -> None:
        self._run_id, self._context = run_id, context
        self._told: set[tuple[str, ...]] = set()

    def tell(self, seen: dict[str, Any]) -> None:
        if self._context.err.is_terminal:
            return
        for node in seen["nodes"]:
            if node["status"] in NODE_ENDS:
                self._once((node["id"], node["status"]), f"{node['id']}: {node['status']}")
        for each in seen["questions"]:
            where = (each["node"], *map(str, each["index"]))
            line = f"{each['node']} asks: {each['message']}; answer with: comfyfleet graph answer"
            self._once(where, f"{line} {self._run_id} {'|'.join(each['choices'])}")

    def _once(self, key: tuple[str, ...], line: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._context.say(line)


def _heard(plane: ApiSession, run_id: str, seen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The run as its events tell it, until it is over or they break off."""
    try:
        for event in plane.events("graph-runs", run_id, "events"):
            told = _read_event(event.data)
            if told:
                seen = {**seen, **told}
                yield seen
    except (LimitExceeded, ServerUnavailable, Unavailable, UnexpectedAnswer):
        return


def _read_event(data: str) -> dict[str, Any] | None:
    """None: nothing that this version knows."""
    try:
        told = json.loads(data)
        progress = {name: told[name] for name in PROGRESS}
        return {"progress": progress, **{name: told[name] for name in TOLD}}
    except (ValueError, TypeError, KeyError):
        return None


@app.command
def show(
    what: Which,
    /,
    *,
    mermaid: Annotated[bool, Parameter(help="Print it as a Mermaid diagram.")] = False,
    watch: Annotated[bool, Parameter(help="Follow a run to its end.")] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show a run as a tree, or draw a graph (from a file, or as it is stored)."""
    if Path(what).is_file():
        context.out.print(
            draw_mermaid(parse_graph(_read(Path(what))).graph), markup=False, soft_wrap=True
        )
        return
    with _public(options, context) as plane:
        seen, graph = _found(plane, what)
        if watch and seen:
            seen = _watched(plane, what, context)
    if options.as_json:
        print_json(seen or graph, context)
    elif mermaid or seen is None:
        context.out.print(graph["mermaid"], markup=False, soft_wrap=True)
    elif not watch:
        context.out.print(run_tree(seen))
    if seen and seen["status"] == "failed":
        context.say(_reason(seen))


def _found(plane: ApiSession, what: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A run with its graph, or a graph, which may also be named."""
    try:
        UUID(what)
    except ValueError:
        return None, plane.get("graphs", what)
    try:
        seen = plane.get("graph-runs", what)
    except NotFound:
        return None, plane.get("graphs", what)
    return seen, plane.get("graphs", seen["graph_id"], version=seen["graph_version"])


@app.command
def retry(
    run_id: RunId,
    /,
    *,
    backend: Annotated[
        str | None, Parameter(metavar="WHO", help="Run the failed nodes there: worker:ID.")
    ] = None,
    max_tokens: Annotated[
        int | None, Parameter(help="A higher spending limit for the whole run.")
    ] = None,
    watch: Annotated[bool, Parameter(help="Follow it to its end.")] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Continue a failed run; finished results are reused."""
    with _public(options, context) as plane:
        seen = plane.post("graph-runs", run_id, "retry", backend=backend, max_tokens=max_tokens)
        seen = _watched(plane, str(run_id), context) if watch else seen
    _told(seen, options, context)


@app.command
def answer(
    run_id: RunId,
    choice: Annotated[Literal["backend", "retry", "skip", "fail"], Parameter(help="The answer.")],
    /,
    *,
    node: Annotated[str | None, Parameter(help="The node that asks; needed if several do.")] = None,
    index: Annotated[tuple[int, ...], Parameter(help="The item that asks.")] = (),
    backend: Annotated[str | None, Parameter(metavar="WHO", help="worker:ID.")] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Answer a node whose backend is offline."""
    if choice == "backend" and backend is None:
        raise InvalidInput(
            "the answer backend needs --backend WHO",
            hint=f"comfyfleet graph show {run_id} lists those that could run it.",
        )
    said = {"node": node, "index": list(index), "choice": choice, "backend": backend}
    with _public(options, context) as plane:
        seen = plane.post("graph-runs", run_id, "answer", **said)
    _told(seen, options, context)


def _told(seen: dict[str, Any], options: ApiOptions, context: CliContext) -> None:
    if options.as_json:
        print_json(seen, context)
    else:
        context.say(run_summary(seen))


@app.command
def export(
    graph: StoredName,
    /,
    *,
    version: Annotated[int | None, Parameter(help="The version; default: the newest.")] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Print a stored graph as YAML (or JSON)."""
    with _public(options, context) as plane:
        document = plane.get("graphs", graph, version=version)["document"]
    if options.as_json:
        print_json(document, context)
        return
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    context.out.print(text, markup=False, soft_wrap=True, end="")
