"""`comfyfleet graph`: graphs over the customers' API."""

import json
import mimetypes
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import yaml
from cyclopts import App, Parameter

from comfyfleet.cli import helps
from comfyfleet.cli.admin.client import PUBLIC_BASE, USUALLY, Asking, Control, control
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.admin.waiting import outlasted
from comfyfleet.cli.files import read_structure
from comfyfleet.cli.graph_files import save_files
from comfyfleet.cli.graph_tree import summary, tree
from comfyfleet.cli.live import live_on
from comfyfleet.cli.world import InWorld, World, counted
from comfyfleet.graphs.mermaid import draw
from comfyfleet.graphs.parsing import parse_graph
from comfyfleet.kernel.errors import (
    InvalidInput,
    LimitExceeded,
    NotFound,
    RunFailed,
    ServerUnavailable,
    Unavailable,
    UnexpectedAnswer,
)

app = App(name="graph", help=helps.GRAPH, help_format="markdown")
LOOK_SECONDS = 0.5
NODE_ENDS = ("done", "failed", "skipped", "cancelled")
OVER = ("completed", "failed", "cancelled")
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
        help="Of an input node: JSON or a text; @FILE uploads a file; @a.png,@b.png is a list of files, and @a.png, one of one.",
    ),
]
Most = Annotated[int, Parameter(help="At most so many.")]
GRAPH_COLUMNS = ("id", "name", "version", "created_at")
RUN_COLUMNS = ("id", "name", "status", "tokens", "created_at", "ended_at", "error")


def _public(asking: Asking, world: World) -> AbstractContextManager[Control]:
    return control(asking, world, base=PUBLIC_BASE)


def _read(path: Path) -> dict[str, Any]:
    found = read_structure(path)
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} is no graph")
    return found


@app.command
def validate(file: File, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Tell all that is wrong with a graph, before anything runs."""
    document = _read(file)
    with _public(asking, world) as plane:
        verdict = plane.post("graphs", "validate", document=document)
    if asking.as_json:
        print_json(verdict, world)
    for each in () if asking.as_json else verdict["problems"]:
        place = ".".join(filter(None, (each["node"], each["port"])))
        world.out.print(f"{place or file.name}: {each['message']}", markup=False, soft_wrap=True)
    for each in () if asking.as_json else verdict["warnings"]:
        world.warn(f"{each['node']}: {each['message']}")
    if not verdict["valid"]:
        many = counted(len(verdict["problems"]), "problem", "problems")
        raise InvalidInput(f"{file} has {many}")
    world.say(f"{file} is fine")


@app.command(name="list")
def list_(*, limit: Most = 50, asking: Asking = USUALLY, world: InWorld) -> None:
    """The graphs that are stored, the newest first."""
    with _public(asking, world) as plane:
        found = plane.pages("graphs", "graphs", limit=limit)
    if asking.as_json:
        print_json(found, world)
    else:
        none = "no graph is stored: comfyfleet graph run FILE stores one and runs it"
        print_rows(found, GRAPH_COLUMNS, world, none=none)


@app.command
def runs(
    *,
    graph: Annotated[str | None, Parameter(help="Only of this one, by its id or name.")] = None,
    status: Annotated[str | None, Parameter(help="Only those, such as running or failed.")] = None,
    limit: Most = 50,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Your runs, the newest first."""
    with _public(asking, world) as plane:
        graph_id = plane.get("graphs", graph)["id"] if graph else None
        found = plane.pages("runs", "graph-runs", limit=limit, graph_id=graph_id, status=status)
    if asking.as_json:
        print_json(found, world)
    else:
        print_rows(found, RUN_COLUMNS, world, none="there are no such runs")


@app.command
def quote(
    graph: GraphName, /, *, input: Inputs = (), asking: Asking = USUALLY, world: InWorld
) -> None:
    """Tell what a run would cost and how long it would take, at least and at most.

    Without inputs, lists are taken to be as long as they may be. A file is stored first.
    """
    with _public(asking, world) as plane:
        inputs = {name: _value(plane, text) for name, text in map(_named, input)}
        if Path(graph).is_file():
            graph = plane.post("graphs", document=_read(Path(graph)))["id"]
        found = plane.post("graphs", graph, "quote", inputs=inputs)
    if asking.as_json:
        print_json(found, world)
        return
    fields = {
        "tokens": _span(found["tokens_min"], found["tokens_max"]),
        "jobs": _span(found["jobs_min"], found["jobs_max"]),
        "seconds": _span(round(found["seconds_min"]), round(found["seconds_max"])),
        "never_timed": ", ".join(found["unknown_durations"]),
    }
    print_fields(fields, world)


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


@app.command
def run(
    graph: GraphName,
    /,
    *,
    input: Inputs = (),
    max_tokens: Annotated[
        int | None, Parameter(help="Nothing starts that could cost more.")
    ] = None,
    watch: Annotated[bool, Parameter(help="Follow it to its end, as a live tree.")] = False,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"], metavar="DIR", help="Follow it, then save its files there."
        ),
    ] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Run a graph; prints the run's id. A file is stored with its first run."""
    with _public(asking, world) as plane:
        inputs = {name: _value(plane, text) for name, text in map(_named, input)}
        started = _started(plane, graph, inputs=inputs, max_tokens=max_tokens)
        if not asking.as_json:
            world.say(f"graph {started['graph_id']} ({started['name']})")
            world.print_line(started["id"])
        if watch or output:
            started = _watched(plane, started["id"], world)
        if output:
            save_files(plane, started, output, world)
    if asking.as_json:
        print_json(started, world)
    if (watch or output) and started["status"] != "completed":
        raise RunFailed(_reason(started))


def _started(plane: Control, graph: str, **body: Any) -> dict[str, Any]:
    if Path(graph).is_file():
        return plane.post("graph-runs", document=_read(Path(graph)), **body)
    return plane.post("graphs", graph, "runs", **body)


@app.command
def cancel(run_id: RunId, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Stop a run and its jobs; what was not made is not paid."""
    with _public(asking, world) as plane:
        seen = plane.post("graph-runs", run_id, "cancel")
    _told(seen, asking, world)


@app.command
def download(
    run_id: RunId,
    /,
    *,
    output: Annotated[
        Path, Parameter(name=["--output", "-o"], metavar="DIR", help="Where the files go.")
    ] = Path("output"),
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Save the files that a run made, in their order; prints the paths. Nothing is overwritten."""
    with _public(asking, world) as plane:
        seen = plane.get("graph-runs", run_id, executions=0)
        saved = save_files(plane, seen, output, world)
    if not saved:
        raise RunFailed(f"the run is {seen['status']} and has no files")


@app.command
def delete(graph: StoredName, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Delete a graph of yours; its runs stay."""
    with _public(asking, world) as plane:
        plane.delete("graphs", graph)
    world.say(f"{graph} is deleted; its runs stay")


def _reason(seen: dict[str, Any]) -> str:
    return seen["error"]["message"] if seen["error"] else f"the run is {seen['status']}"


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"--input {text}: it must be NAME=VALUE")
    return name, value


def _value(plane: Control, text: str) -> Any:
    if text.startswith("@"):
        names = [each.removeprefix("@") for each in text.split(",")]
        files = [_uploaded(plane, Path(name)) for name in names if name]
        return files if len(names) > 1 else files[0]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _uploaded(plane: Control, path: Path) -> str:
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}")
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    size = path.stat().st_size
    slot = plane.post("videos", "uploads", filename=path.name, content_type=kind, size=size)
    plane.upload(slot["upload"], path)
    return str(slot["file_id"])


def _watched(plane: Control, run_id: str, world: World) -> dict[str, Any]:
    """Until it is over. Ctrl-C only stops watching: the run goes on."""
    seen = _looked(plane, run_id, world)
    changes = RunChanges(run_id, world)
    with live_on(world.err, tree(seen)) as live:
        while seen["status"] not in OVER:
            for told in _heard(plane, run_id, seen):
                seen = told
                live.update(tree(seen))
                changes.tell(seen)
            if seen["status"] not in OVER:  # the stream broke, or none came through
                time.sleep(LOOK_SECONDS)
                seen = _looked(plane, run_id, world)
                changes.tell(seen)
        seen = _looked(plane, run_id, world)
        live.update(tree(seen))
    return seen


def _looked(plane: Control, run_id: str, world: World) -> dict[str, Any]:
    """The run, even if its control plane is away for a while: the run doesn't end by that."""
    get = partial(plane.get, "graph-runs", run_id)
    return outlasted(get, world, "the run goes on", time.sleep)


class RunChanges:
    """Tells what changed, a line each, where no live tree can be shown: in a pipe or in CI."""

    def __init__(self, run_id: str, world: World) -> None:
        self._run_id, self._world = run_id, world
        self._told: set[tuple[str, ...]] = set()

    def tell(self, seen: dict[str, Any]) -> None:
        if self._world.err.is_terminal:
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
            self._world.say(line)


def _heard(plane: Control, run_id: str, seen: dict[str, Any]) -> Iterator[dict[str, Any]]:
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
    mermaid: Annotated[bool, Parameter(help="Draw it, in Mermaid's language.")] = False,
    watch: Annotated[bool, Parameter(help="Follow a run to its end.")] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Show a run as a tree, or draw a graph (from a file, or as it is stored)."""
    if Path(what).is_file():
        world.out.print(draw(parse_graph(_read(Path(what))).graph), markup=False, soft_wrap=True)
        return
    with _public(asking, world) as plane:
        seen, graph = _found(plane, what)
        if watch and seen:
            seen = _watched(plane, what, world)
    if asking.as_json:
        print_json(seen or graph, world)
    elif mermaid or seen is None:
        world.out.print(graph["mermaid"], markup=False, soft_wrap=True)
    elif not watch:
        world.out.print(tree(seen))
    if seen and seen["status"] == "failed":
        world.say(_reason(seen))


def _found(plane: Control, what: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
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
        str | None, Parameter(metavar="WHO", help="Run what failed there: worker:ID.")
    ] = None,
    max_tokens: Annotated[
        int | None, Parameter(help="Let the whole run spend so much, if that is more than before.")
    ] = None,
    watch: Annotated[bool, Parameter(help="Follow it to its end.")] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Go on from where a run failed; what was done is used again."""
    with _public(asking, world) as plane:
        seen = plane.post("graph-runs", run_id, "retry", backend=backend, max_tokens=max_tokens)
        seen = _watched(plane, str(run_id), world) if watch else seen
    _told(seen, asking, world)


@app.command
def answer(
    run_id: RunId,
    choice: Annotated[
        Literal["backend", "retry", "skip", "fail"], Parameter(help="What is to be done.")
    ],
    /,
    *,
    node: Annotated[str | None, Parameter(help="That asks; needed if several do.")] = None,
    index: Annotated[tuple[int, ...], Parameter(help="Of the item that asks.")] = (),
    backend: Annotated[str | None, Parameter(metavar="WHO", help="worker:ID.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Answer a node whose backend is offline."""
    if choice == "backend" and backend is None:
        raise InvalidInput(
            "the answer backend needs --backend WHO",
            hint=f"comfyfleet graph show {run_id} lists those that could run it.",
        )
    said = {"node": node, "index": list(index), "choice": choice, "backend": backend}
    with _public(asking, world) as plane:
        seen = plane.post("graph-runs", run_id, "answer", **said)
    _told(seen, asking, world)


def _told(seen: dict[str, Any], asking: Asking, world: World) -> None:
    if asking.as_json:
        print_json(seen, world)
    else:
        world.say(summary(seen))


@app.command
def export(
    graph: StoredName,
    /,
    *,
    version: Annotated[int | None, Parameter(help="Else the newest.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Print a stored graph as YAML (or JSON), to be kept in a file."""
    with _public(asking, world) as plane:
        document = plane.get("graphs", graph, version=version)["document"]
    if asking.as_json:
        print_json(document, world)
        return
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    world.out.print(text, markup=False, soft_wrap=True, end="")
