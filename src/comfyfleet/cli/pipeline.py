"""`comfyfleet pipeline`: make one, run it, watch its board, take the results."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from comfyfleet.cli import helps
from comfyfleet.cli.admin.client import PUBLIC_BASE, USUALLY, Asking, Control
from comfyfleet.cli.admin.client import control as control_of
from comfyfleet.cli.admin.showing import cell, print_json, print_rows
from comfyfleet.cli.exporting import exported
from comfyfleet.cli.files import read_text
from comfyfleet.cli.listing import Listing
from comfyfleet.cli.live import live_on
from comfyfleet.cli.world import InWorld, World, counted
from comfyfleet.kernel.errors import InvalidInput, RunFailed

app = App(name="pipeline", help=helps.PIPELINE, help_format="markdown")
control = partial(control_of, base=PUBLIC_BASE)
LOOK_SECONDS = 1.0
# Reasons that time alone does not change.
RESTING = ("complete", "failed", "waiting_for_judgement", "candidates_limit", "tokens_limit")
OVER = (*RESTING, "time_up", "cancelled", "paused")
COLUMNS = ("name", "wanted", "made", "approved", "rejected", "in_flight", "failed")
STYLES = {"approved": "green", "winner": "bold yellow", "rejected": "red"}
RUN_COLUMNS = ("id", "pipeline", "status", "reason", "tokens", "created_at")
Run = Annotated[str, Parameter(help="The run's id.")]
Candidates = Annotated[
    tuple[str, ...], Parameter(metavar="CANDIDATE", help="Ids, as tree shows them.", negative=())
]
Most = Annotated[int, Parameter(help="At most so many.")]


@app.command
def create(
    document: Annotated[Path, Parameter(help="A pipeline in YAML or JSON.")],
    /,
    *,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Register a pipeline. Prints its id; all that is wrong with it is told at once."""
    text = read_text(document)
    with control(asking, world) as plane:
        answer = _made(plane, text)
    if asking.as_json:
        print_json(answer, world)
    else:
        world.stdout.write(f"{answer['id']}\n".encode())


def _made(plane: Control, text: str) -> dict[str, Any]:
    try:
        return plane.post("pipelines", document=text)
    except InvalidInput as error:
        problems = error.details.get("problems", ())
        if not problems:
            raise
        lines = [f"{each['step']}.{each['field']}: {each['message']}" for each in problems]
        many = counted(len(lines), "problem", "problems")
        told = "".join(f"\n  {line.lstrip('.: ')}" for line in lines)
        raise InvalidInput(f"the pipeline has {many}:{told}") from None


@Parameter(name="*")
@dataclass(frozen=True)
class Given:
    """What a run is started with."""

    base: Annotated[int, Parameter(metavar="N", help="Candidates of the first step.")] = 1
    variables: Annotated[
        tuple[str, ...],
        Parameter(name="--set", metavar="NAME=VALUE", help="A variable; values are read as JSON."),
    ] = ()
    folder: Annotated[
        str | None, Parameter(metavar="FOLDER", help="The target folder; else runs/ID.")
    ] = None
    concurrent: Annotated[int | None, Parameter(metavar="N", help="Jobs in flight at once.")] = None
    tokens: Annotated[int | None, Parameter(metavar="N", help="Spend no more.")] = None
    candidates: Annotated[int | None, Parameter(metavar="N", help="Make no more.")] = None
    until: Annotated[
        datetime | None,
        Parameter(metavar="TIME", help="Submit nothing later: 2026-05-01T06:00, in local time."),
    ] = None

    def body(self) -> dict[str, Any]:
        limits = {
            "concurrent_jobs": self.concurrent,
            "tokens": self.tokens,
            "candidates": self.candidates,
            "until": self.until.astimezone().isoformat() if self.until else None,
        }
        return {
            "base_candidates": self.base,
            "variables": _variables(self.variables),
            "target_folder": self.folder,
            "limits": {name: value for name, value in limits.items() if value is not None},
        }


@app.command
def run(
    pipeline: Annotated[
        str, Parameter(help="A pipeline's id or name, or a file, which is created first.")
    ],
    /,
    *,
    given: Given = Given(),  # noqa: B008 - frozen
    wait: Annotated[bool, Parameter(help="Show the board until nothing is left to do.")] = False,
    export_to: Annotated[
        Path | None, Parameter(name="--export", metavar="DIR", help="Wait, then export.")
    ] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Start a run. Prints its id."""
    with control(asking, world) as plane:
        file = Path(pipeline)
        if file.is_file():
            pipeline = _made(plane, read_text(file))["id"]
        key = world.new_id()
        answer = plane.post("pipelines", pipeline, "runs", **given.body(), idempotency_key=key)
        if wait or export_to:
            answer = _watched(plane, answer["id"], world)
        if export_to:
            _export(plane, answer, export_to, world)
    if asking.as_json:
        print_json(answer, world)
    else:
        world.stdout.write(f"{answer['id']}\n".encode())


def _variables(texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InvalidInput(f"--set {text!r} sets nothing: write --set name=value")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value
    return found


@app.command
def status(
    run: Run,
    /,
    *,
    follow: Annotated[
        bool, Parameter(help="Stay, and show what changes until nothing is left to do.")
    ] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """The board of a run: per step how many are wanted, made, approved, in flight and failed."""
    with control(asking, world) as plane:
        if follow:
            _watched(plane, run, world)
            return
        answer = plane.get("pipeline-runs", run)
    if asking.as_json:
        print_json(answer, world)
    else:
        world.out.print(board_of(answer), soft_wrap=True)


def _watched(plane: Control, run_id: str, world: World) -> dict[str, Any]:
    """The run when nothing is left that it could do by itself."""
    with live_on(world.err) as live:
        while True:
            answer = plane.get("pipeline-runs", run_id)
            live.update(board_of(answer))
            is_busy = any(each["in_flight"] for each in answer["steps"])
            if answer["reason"] in OVER and not is_busy:
                return answer
            time.sleep(LOOK_SECONDS)


def board_of(answer: Mapping[str, Any]) -> Group:
    headings = [name.replace("_", " ") for name in COLUMNS]
    listing = Listing(headings, right=[heading for heading in headings if heading != "name"])
    for step in answer["steps"]:
        listing.add(*(cell(step[name]) for name in COLUMNS))
    return Group(listing, Text(" · ".join(_figures(answer)), style="dim"))


def _figures(answer: Mapping[str, Any]) -> Iterator[str]:
    yield f"{answer['status']}{': ' + answer['reason'] if answer['reason'] else ''}"
    if answer["pause_reason"]:
        yield f"paused because: {answer['pause_reason']}"
    if answer["trouble"]:
        yield f"trouble: {answer['trouble']}"
    if answer["success_rate"] is not None:
        yield f"{answer['success_rate']:.0%} succeeded"
    yield counted(answer["tokens"], "token", "tokens")
    yield f"{answer['bytes'] / 1e6:.1f} MB"
    if answer["seconds_left"]:
        yield f"about {answer['seconds_left']:.0f} s left"


@app.command(name="list")
def list_(*, limit: Most = 50, asking: Asking = USUALLY, world: InWorld) -> None:
    """The pipelines that are registered, the newest first."""
    with control(asking, world) as plane:
        found = plane.pages("pipelines", "pipelines", limit=limit)
    if asking.as_json:
        print_json(found, world)
    else:
        none = "no pipeline is registered: comfyfleet pipeline create FILE"
        print_rows(found, ("id", "name", "created_at"), world, none=none)


@app.command
def runs(
    *,
    pipeline: Annotated[str | None, Parameter(help="Only of this one, by its id or name.")] = None,
    limit: Most = 50,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Your runs, the newest first."""
    with control(asking, world) as plane:
        found = plane.pages("runs", "pipeline-runs", limit=limit, pipeline_id=pipeline)
    if asking.as_json:
        print_json(found, world)
    else:
        print_rows(found, RUN_COLUMNS, world, none="there are no such runs")


@app.command
def delete(
    pipeline: Annotated[str, Parameter(help="The pipeline's id or name.")],
    /,
    *,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Delete a pipeline; its runs stay, and go on."""
    with control(asking, world) as plane:
        plane.delete("pipelines", pipeline)
    world.say(f"{pipeline} is deleted; its runs stay")


@app.command
def approve(
    run: Run, candidates: Candidates, /, *, asking: Asking = USUALLY, world: InWorld
) -> None:
    """Approve candidates: they get their children in the next step."""
    _judge(run, candidates, "approve", asking, world)


@app.command
def reject(
    run: Run, candidates: Candidates, /, *, asking: Asking = USUALLY, world: InWorld
) -> None:
    """Reject candidates: nothing more is made of them."""
    _judge(run, candidates, "reject", asking, world)


@app.command
def winner(
    run: Run, candidates: Candidates, /, *, asking: Asking = USUALLY, world: InWorld
) -> None:
    """Mark candidates as winners."""
    _judge(run, candidates, "winner", asking, world)


@app.command
def undo(run: Run, candidates: Candidates, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Take judgements of candidates back."""
    _judge(run, candidates, "undo", asking, world)


def _judge(run_id: str, candidates: Sequence[str], act: str, asking: Asking, world: World) -> None:
    with control(asking, world) as plane:
        for each in candidates:
            answer = plane.post("pipeline-runs", run_id, "candidates", each, act)
            if asking.as_json:
                print_json(answer, world)
            else:
                world.say(f"{each} is {answer['status']}")


@app.command
def pair(
    run: Run,
    /,
    *,
    step: Annotated[int | None, Parameter(help="Only of this step; the first is 0.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Show two candidates to compare; `vote` says which is better."""
    with control(asking, world) as plane:
        answer = plane.get("pipeline-runs", run, "pair", step=step)
    if asking.as_json:
        print_json(answer, world)
        return
    found = answer["candidates"]
    print_rows(found, ("id", "step", "score", "path"), world, none="there are no two to compare")
    if found:
        world.say(
            f"comfyfleet pipeline vote {run} {found[0]['id']} {found[1]['id']}: the first won"
        )


@app.command
def vote(
    run: Run,
    winner: Annotated[str, Parameter(help="The better candidate's id.")],
    loser: Annotated[str, Parameter(help="The other candidate's id.")],
    /,
    *,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Say which of two candidates of a step is better."""
    with control(asking, world) as plane:
        answer = plane.post(
            "pipeline-runs", run, "vote", winner=winner, loser=loser, id=world.new_id()
        )
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(f"{winner} won")


@app.command
def cancel(run: Run, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Stop a run and its jobs for good; its candidates stay."""
    _act(run, "cancel", asking, world)


@app.command
def pause(run: Run, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Submit nothing more; what was submitted goes on."""
    _act(run, "pause", asking, world)


@app.command
def resume(run: Run, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Go on with a paused run."""
    _act(run, "resume", asking, world)


def _act(run_id: str, act: str, asking: Asking, world: World) -> None:
    with control(asking, world) as plane:
        answer = plane.post("pipeline-runs", run_id, act)
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(f"The run is {answer['status']}")


@app.command
def retry(
    run: Run,
    /,
    *,
    job: Annotated[str | None, Parameter(metavar="ID", help="One job; else all.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Make failed jobs again: they hold their places until somebody says so."""
    with control(asking, world) as plane:
        answer = plane.post("pipeline-runs", run, "retry", job_id=job)
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(f"{counted(len(answer['jobs']), 'job is', 'jobs are')} made again")


@app.command
def tree(run: Run, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Who came out of whom, with scores and judgements."""
    with control(asking, world) as plane:
        answer = plane.get("pipeline-runs", run, "tree")
    if asking.as_json:
        print_json(answer, world)
        return
    root = Tree(run)
    for branch in answer["tree"]:
        _grow(root, branch)
    world.out.print(root)


def _grow(tree: Tree, branch: Mapping[str, Any]) -> None:
    status = branch["status"]
    text = Text.assemble(
        branch["id"], f"  {branch['score']:.0f}  ", (status, STYLES.get(status, ""))
    )
    grown = tree.add(text)
    for child in branch["children"]:
        _grow(grown, child)


@app.command(name=["export", "download"])
def export(
    run: Run,
    /,
    folder: Annotated[
        Path, Parameter(name=["--output", "-o"], metavar="DIR", help="Where the files go.")
    ],
    *,
    status: Annotated[
        str | None, Parameter(metavar="STATUS", help="Only approved, winner, active or rejected.")
    ] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Copy the candidates out, with a JSON index and a contact sheet."""
    with control(asking, world) as plane:
        _export(plane, plane.get("pipeline-runs", run), folder, world, status)


def _export(
    plane: Control, answer: Mapping[str, Any], folder: Path, world: World, status: str | None = None
) -> None:
    done = exported(plane, answer, folder, status=status)
    if not done.candidates:
        made = sum(step["made"] for step in answer["steps"])
        which = f"none of its {counted(made, 'candidate', 'candidates')} has the status {status}"
        raise RunFailed(
            f"nothing to export: {which if status and made else 'the run has no candidates yet'}"
        )
    world.say(f"{counted(done.candidates, 'candidate', 'candidates')} in {folder}")
    world.say(f"Index: {done.index_file}")
    world.say(f"Contact sheet: {done.sheet_file}")
