"""`comfyfleet graph`: graphs over the customers' API."""

import json
import mimetypes
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import yaml
from cyclopts import App, Parameter

from comfyfleet.cli import helps
from comfyfleet.cli.admin.client import PUBLIC_BASE, USUALLY, Asking, Control, control
from comfyfleet.cli.admin.showing import print_json
from comfyfleet.cli.graph_tree import summary, tree
from comfyfleet.cli.live import live_on
from comfyfleet.cli.world import InWorld, World
from comfyfleet.graphs.documents import read_document
from comfyfleet.graphs.mermaid import draw
from comfyfleet.graphs.parsing import parse_graph
from comfyfleet.kernel.errors import (
    InvalidInput,
    LimitExceeded,
    NotFound,
    RunFailed,
    ServerUnavailable,
    UnexpectedAnswer,
)

app = App(name="graph", help=helps.GRAPH, help_format="markdown")
LOOK_SECONDS = 0.5
OVER = ("completed", "failed", "cancelled")
PROGRESS = ("weighted_percent", "completed_nodes", "total_nodes", "running_nodes")
TOLD = ("status", "nodes", "questions")
File = Annotated[Path, Parameter(metavar="FILE", help="A graph, as JSON or YAML.")]
RunId = Annotated[UUID, Parameter(metavar="RUN", help="The run's id.")]
Which = Annotated[str, Parameter(metavar="WHAT", help="A file, a graph's id, or a run's id.")]


def _public(asking: Asking, world: World) -> AbstractContextManager[Control]:
    return control(asking, world, base=PUBLIC_BASE)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_document(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} can't be read: {error}") from None
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
        raise InvalidInput(f"{file} has {len(verdict['problems'])} problem(s)")
    world.say(f"{file} is fine")


@app.command
def run(
    file: File,
    /,
    *,
    input: Annotated[
        tuple[str, ...],
        Parameter(
            name=["--input", "-i"],
            metavar="NAME=VALUE",
            help="Of an input node: JSON or a text; @FILE uploads a file; a,b for lists of files.",
        ),
    ] = (),
    max_tokens: Annotated[
        int | None, Parameter(help="Nothing starts that could cost more.")
    ] = None,
    watch: Annotated[bool, Parameter(help="Follow it to its end, as a live tree.")] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Store a graph and run it; prints the run's id."""
    document = _read(file)
    with _public(asking, world) as plane:
        inputs = {name: _value(plane, text) for name, text in map(_named, input)}
        graph = plane.post("graphs", document=document)
        started = plane.post("graphs", graph["id"], "runs", inputs=inputs, max_tokens=max_tokens)
        if not asking.as_json:
            world.out.print(started["id"])
        if watch:
            started = _watched(plane, started["id"], world)
    if asking.as_json:
        print_json(started, world)
    if watch and started["status"] != "completed":
        raise RunFailed(_reason(started))


def _reason(seen: dict[str, Any]) -> str:
    return seen["error"]["message"] if seen["error"] else f"the run is {seen['status']}"


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"--input {text}: it must be NAME=VALUE")
    return name, value


def _value(plane: Control, text: str) -> Any:
    if text.startswith("@"):
        files = [_uploaded(plane, Path(each[1:])) for each in text.split(",")]
        return files if len(files) > 1 else files[0]
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
    seen = plane.get("graph-runs", run_id)
    with live_on(world.err, tree(seen)) as live:
        while seen["status"] not in OVER:
            for told in _heard(plane, run_id, seen):
                seen = told
                live.update(tree(seen))
            if seen["status"] not in OVER:  # the stream broke, or none came through
                time.sleep(LOOK_SECONDS)
                seen = plane.get("graph-runs", run_id)
                live.update(tree(seen))
        seen = plane.get("graph-runs", run_id)
        live.update(tree(seen))
    return seen


def _heard(plane: Control, run_id: str, seen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The run as its events tell it, until it is over or they break off."""
    try:
        for event in plane.events("graph-runs", run_id, "events"):
            told = _read_event(event.data)
            if told:
                seen = {**seen, **told}
                yield seen
    except (LimitExceeded, ServerUnavailable, UnexpectedAnswer):
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
    """A run with its graph, or a graph."""
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
    watch: Annotated[bool, Parameter(help="Follow it to its end.")] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Go on from where a run failed; what was done is used again."""
    with _public(asking, world) as plane:
        seen = plane.post("graph-runs", run_id, "retry", backend=backend)
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
    graph_id: Annotated[UUID, Parameter(metavar="GRAPH", help="The graph's id.")],
    /,
    *,
    version: Annotated[int | None, Parameter(help="Else the newest.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Print a stored graph as YAML (or JSON), to be kept in a file."""
    with _public(asking, world) as plane:
        document = plane.get("graphs", graph_id, version=version)["document"]
    if asking.as_json:
        print_json(document, world)
        return
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    world.out.print(text, markup=False, soft_wrap=True, end="")
