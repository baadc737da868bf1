"""`comfyfleet pipeline`: pipelines over the customers' API, and a run's candidates exported as files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import App, Parameter
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from comfyfleet.api.pipelines import CandidateSort
from comfyfleet.cli import help_texts
from comfyfleet.cli.context import CliContext, InjectedContext, counted, read_text
from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, ApiSession, connect
from comfyfleet.cli.job_waiter import live_display
from comfyfleet.cli.tables import TextTable, json_text, print_json, print_rows, table_cell
from comfyfleet.cli.upload import download
from comfyfleet.client import Candidate, Pipeline, PipelineRun, PipelineRunHandle
from comfyfleet.client.pipelines import candidate_path
from comfyfleet.errors import InvalidInput, RunFailed, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image


INDEX, SHEET = "index.json", "contact-sheet.png"
CELL_PIXELS, GAP_PIXELS, LABEL_PIXELS = 192, 8, 14
COLUMNS_MAX = 8
PICTURES_MAX = 2000  # on one sheet
PAPER, INK = (24, 24, 27), (228, 228, 231)


class ExportedFiles(NamedTuple):
    candidates: int
    index_file: Path
    sheet_file: Path


def export_candidates(
    plane: ApiSession, handle: PipelineRunHandle, folder: Path, *, status: str | None = None
) -> ExportedFiles:
    """Files that are there in their size already are not fetched again."""
    require_pillow()
    rows, pictures = [], []
    for each in plane.iterate(handle.candidates(status=status)):
        path = candidate_path(folder, each.path)
        if each.url and not (path.exists() and path.stat().st_size == each.size):
            download(plane, each.url, path)
        file = each.path if path.exists() else None
        rows.append({**each.model_dump(mode="json"), "url": None, "file": file})
        pictures.append((each, path))
    folder.mkdir(parents=True, exist_ok=True)
    index, sheet = folder / INDEX, folder / SHEET
    index.write_text(json_text({"run": handle.run, "candidates": rows}), "utf-8")
    if rows:
        write_sheet(pictures, [each.name for each in handle.run.steps], sheet)
    return ExportedFiles(len(rows), index, sheet)


def require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise missing_extra("the contact sheet", "Pillow", "engine") from None


def write_sheet(
    pictures: Sequence[tuple[Candidate, Path]], steps: Sequence[str], sheet: Path
) -> None:
    """Step by step, each picture small, with its score and how it was judged."""
    from PIL import Image, ImageDraw

    rows = [row for number in range(len(steps)) for row in _rows(pictures, number)]
    widest = max(len(row) for _, row in rows)
    height = CELL_PIXELS + LABEL_PIXELS + GAP_PIXELS
    size = (widest * (CELL_PIXELS + GAP_PIXELS) + GAP_PIXELS, len(rows) * height + GAP_PIXELS)
    paper = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(paper)
    for y, (number, row) in enumerate(rows):
        for x, (candidate, path) in enumerate(row):
            corner = (GAP_PIXELS + x * (CELL_PIXELS + GAP_PIXELS), GAP_PIXELS + y * height)
            small = _small(path)
            if small:
                paper.paste(small, corner)
            label = f"{steps[number]}  {candidate.score:.0f}  {candidate.status}"
            if candidate.judge_score is not None:
                label += f"  {candidate.judge_score:.3g}"
            below = (corner[0], corner[1] + CELL_PIXELS)
            draw.text(below, _plain(label), INK)
    paper.save(sheet)


def _plain(label: str) -> str:
    """The font that comes with Pillow has no more letters."""
    return label.encode("latin-1", "replace").decode("latin-1")


def _rows(
    pictures: Sequence[tuple[Candidate, Path]], number: int
) -> Iterator[tuple[int, list[tuple[Candidate, Path]]]]:
    mine = [each for each in pictures[:PICTURES_MAX] if each[0].step == number]
    for start in range(0, len(mine), COLUMNS_MAX):
        yield number, mine[start : start + COLUMNS_MAX]


def _small(path: Path) -> "Image | None":
    from PIL import Image

    try:
        with Image.open(path) as picture:
            small = picture.convert("RGB")
    except (OSError, ValueError):
        return None
    small.thumbnail((CELL_PIXELS, CELL_PIXELS))
    return small


app = App(name="pipeline", help=help_texts.PIPELINE, help_format="markdown")
control = partial(connect, base=PUBLIC_BASE)
COLUMNS = ("name", "wanted", "made", "approved", "rejected", "in_flight", "failed")
STYLES = {"approved": "green", "winner": "bold yellow", "rejected": "red"}
CANDIDATE_COLUMNS = (
    *("id", "step", "status", "judged_by", "score:judge_score", "rating:score"),
    "note:judge_error",
)
PAGE_MAX = 100  # candidates that are asked for at once
RUN_COLUMNS = ("id", "pipeline", "status", "reason", "tokens", "created_at")
Run = Annotated[str, Parameter(help="The run's id.")]
Candidates = Annotated[
    tuple[str, ...], Parameter(metavar="CANDIDATE", help="Ids, as tree shows them.", negative=())
]
Most = Annotated[int, Parameter(help="Maximum number of rows.")]


@app.command
def create(
    document: Annotated[Path, Parameter(help="A pipeline in YAML or JSON.")],
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Register a pipeline. Prints its id, or all of its problems at once."""
    text = read_text(document)
    with control(options, context) as plane:
        answer = _made(plane, text)
    for warning in answer.warnings:
        context.warn(warning)
    if options.as_json:
        print_json(answer, context)
    else:
        context.print_line(str(answer.id))


def _made(plane: ApiSession, text: str) -> Pipeline:
    try:
        return plane.run(plane.client.pipelines.create(text))
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
class RunStartOptions:
    """What a run is started with."""

    base: Annotated[int, Parameter(metavar="N", help="Candidates of the first step.")] = 1
    variables: Annotated[
        tuple[str, ...],
        Parameter(name="--set", metavar="NAME=VALUE", help="A variable; values are read as JSON."),
    ] = ()
    folder: Annotated[
        str | None, Parameter(metavar="FOLDER", help="The target folder; default: runs/ID.")
    ] = None
    concurrent: Annotated[
        int | None, Parameter(metavar="N", help="Maximum number of jobs in flight.")
    ] = None
    tokens: Annotated[int | None, Parameter(metavar="N", help="Maximum tokens to spend.")] = None
    candidates: Annotated[
        int | None, Parameter(metavar="N", help="Maximum number of candidates.")
    ] = None
    until: Annotated[
        datetime | None,
        Parameter(
            metavar="TIME", help="Submit nothing after this time: 2026-05-01T06:00, in local time."
        ),
    ] = None

    def body(self) -> dict[str, Any]:
        limits = {
            "concurrent_jobs": self.concurrent,
            "tokens": self.tokens,
            "candidates": self.candidates,
            "until": self.until.astimezone() if self.until else None,
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
    given: RunStartOptions = RunStartOptions(),  # noqa: B008 - frozen
    wait: Annotated[bool, Parameter(help="Show the progress until nothing is left to do.")] = False,
    export_to: Annotated[
        Path | None, Parameter(name="--export", metavar="DIR", help="Wait, then export.")
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Start a run. Prints its id."""
    with control(options, context) as plane:
        file = Path(pipeline)
        if file.is_file():
            pipeline = str(_made(plane, read_text(file)).id)
        handle = plane.run(plane.client.pipelines.run(pipeline, **given.body()))
        if not options.as_json:
            context.print_line(str(handle.id))
        if wait or export_to:
            _watch(plane, handle, context)
        if export_to:
            _export(plane, handle, export_to, context)
    if options.as_json:
        print_json(handle.run, context)


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
    follow: Annotated[bool, Parameter(help="Show changes until nothing is left to do.")] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """The progress of a run: per step how many are wanted, made, approved, in flight and failed."""
    with control(options, context) as plane:
        handle = plane.run(plane.client.pipelines.get_run(run))
        if follow:
            _watch(plane, handle, context)
            return
    if options.as_json:
        print_json(handle.run, context)
    else:
        context.out.print(render_board(handle.run), soft_wrap=True)


def _watch(plane: ApiSession, handle: PipelineRunHandle, context: CliContext) -> None:
    """Until nothing is left that the run could do by itself."""
    told: str | None = None

    def show(run: PipelineRun) -> None:
        nonlocal told
        live.update(render_board(run))
        # A terminal shows it all the time; a log would show nothing until the end, which may never come.
        if run.trouble and run.trouble != told and not context.err.is_terminal:
            context.warn(f"run {run.id} waits: {run.trouble}")
        told = run.trouble

    with live_display(context.err) as live:
        plane.run(handle.wait(on_change=show))


def render_board(run: PipelineRun) -> Group:
    headings = [name.replace("_", " ") for name in COLUMNS]
    listing = TextTable(headings, right=[heading for heading in headings if heading != "name"])
    for step in run.steps:
        listing.add(*(table_cell(getattr(step, name)) for name in COLUMNS))
    judges = [Text(line, style="dim") for line in _judges(run)]
    return Group(listing, *judges, Text(" · ".join(_figures(run)), style="dim"))


def _judges(run: PipelineRun) -> Iterator[str]:
    """What the judge of each step does, and what is left to it and to people."""
    for step in run.steps:
        if step.judge is None:
            continue
        decides = [
            f"{word} {score:g}"
            for word, score in (
                ("approves from", step.judge.approve_above),
                ("rejects below", step.judge.reject_below),
            )
            if score is not None
        ]
        left = f"{step.unjudged} left to judge, {step.waiting} left to people"
        yield f"{step.name}: {step.judge.name} {', '.join(decides)}; {left}"


def _figures(run: PipelineRun) -> Iterator[str]:
    yield f"{run.status}{': ' + run.reason if run.reason else ''}"
    if run.pause_reason:
        yield f"paused because: {run.pause_reason}"
    if run.trouble:
        yield f"trouble: {run.trouble}"
    if run.success_rate is not None:
        yield f"{run.success_rate:.0%} succeeded"
    yield counted(run.tokens, "token", "tokens")
    yield f"{run.bytes / 1e6:.1f} MB"
    if run.seconds_left and not run.is_resting:
        yield f"about {run.seconds_left:.0f} s left"


@app.command(name="list")
def list_(
    *, limit: Most = 50, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Registered pipelines, the newest first."""
    with control(options, context) as plane:
        found = plane.pages("pipelines", "pipelines", limit=limit)
    if options.as_json:
        print_json(found, context)
    else:
        none = "no pipeline is registered: comfyfleet pipeline create FILE"
        print_rows(found, ("id", "name", "created_at"), context, none=none)


@app.command
def runs(
    *,
    pipeline: Annotated[str | None, Parameter(help="Only its runs; an id or name.")] = None,
    limit: Most = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Your runs, the newest first."""
    with control(options, context) as plane:
        found = plane.pages("runs", "pipeline-runs", limit=limit, pipeline_id=pipeline)
    if options.as_json:
        print_json(found, context)
    else:
        print_rows(found, RUN_COLUMNS, context, none="there are no such runs")


@app.command
def delete(
    pipeline: Annotated[str, Parameter(help="The pipeline's id or name.")],
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Delete a pipeline; its runs continue."""
    with control(options, context) as plane:
        plane.run(plane.client.pipelines.delete(pipeline))
    context.say(f"{pipeline} is deleted; its runs stay")


@app.command
def approve(
    run: Run,
    candidates: Candidates,
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Approve candidates: they get their children in the next step."""
    _judge(run, candidates, "approve", options, context)


@app.command
def reject(
    run: Run,
    candidates: Candidates,
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Reject candidates: they get no more children."""
    _judge(run, candidates, "reject", options, context)


@app.command
def winner(
    run: Run,
    candidates: Candidates,
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Mark candidates as winners."""
    _judge(run, candidates, "winner", options, context)


@app.command
def undo(
    run: Run,
    candidates: Candidates,
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Undo judgements of candidates."""
    _judge(run, candidates, "undo", options, context)


def _judge(
    run_id: str, candidates: Sequence[str], act: str, options: ApiOptions, context: CliContext
) -> None:
    with control(options, context) as plane:
        for each in candidates:
            answer = plane.post("pipeline-runs", run_id, "candidates", each, act)
            if options.as_json:
                print_json(answer, context)
            else:
                context.say(f"{each} is {answer['status']}")


@app.command
def pair(
    run: Run,
    /,
    *,
    step: Annotated[
        int | None, Parameter(help="Only candidates of this step; the first is 0.")
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show two candidates to compare; then use `vote`."""
    with control(options, context) as plane:
        answer = plane.get("pipeline-runs", run, "pair", step=step)
    if options.as_json:
        print_json(answer, context)
        return
    found = answer["candidates"]
    print_rows(found, ("id", "step", "score", "path"), context, none="there are no two to compare")
    if found:
        context.say(
            f"comfyfleet pipeline vote {run} {found[0]['id']} {found[1]['id']}: the first won"
        )


@app.command
def vote(
    run: Run,
    winner: Annotated[str, Parameter(help="The better candidate's id.")],
    loser: Annotated[str, Parameter(help="The other candidate's id.")],
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Vote for the better of two candidates of a step."""
    with control(options, context) as plane:
        answer = plane.post(
            "pipeline-runs", run, "vote", winner=winner, loser=loser, id=context.new_id()
        )
    if options.as_json:
        print_json(answer, context)
    else:
        context.say(f"{winner} won")


@app.command
def cancel(run: Run, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """Cancel a run and its jobs; its candidates stay."""
    _act(run, "cancel", options, context)


@app.command
def pause(run: Run, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """Submit no more jobs; submitted jobs continue."""
    _act(run, "pause", options, context)


@app.command
def resume(run: Run, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """Resume a paused run."""
    _act(run, "resume", options, context)


def _act(run_id: str, act: str, options: ApiOptions, context: CliContext) -> None:
    with control(options, context) as plane:
        answer = plane.post("pipeline-runs", run_id, act)
    if options.as_json:
        print_json(answer, context)
    else:
        context.say(f"The run is {answer['status']}")


@app.command
def retry(
    run: Run,
    /,
    *,
    job: Annotated[str | None, Parameter(metavar="ID", help="Only this job; default: all.")] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Retry failed jobs. They are not retried automatically."""
    with control(options, context) as plane:
        answer = plane.post("pipeline-runs", run, "retry", job_id=job)
    if options.as_json:
        print_json(answer, context)
    else:
        context.say(f"{counted(len(answer['jobs']), 'job is', 'jobs are')} made again")


@app.command
def candidates(
    run: Run,
    /,
    *,
    step: Annotated[
        int | None, Parameter(help="Only candidates of this step; the first is 0.")
    ] = None,
    status: Annotated[
        str | None, Parameter(help="Only those that are approved, winner, active or rejected.")
    ] = None,
    sort: Annotated[
        CandidateSort, Parameter(help="By age, by judgement, or by the score of the judge.")
    ] = CandidateSort.OLDEST,
    limit: Most = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Candidates with their scores, and who judged them."""
    with control(options, context) as plane:
        handle = plane.run(plane.client.pipelines.get_run(run))
        wanted = handle.candidates(
            step=step, status=status, sort=sort, page_size=min(limit, PAGE_MAX)
        )
        found = [each.model_dump(mode="json") for each in islice(plane.iterate(wanted), limit)]
    if options.as_json:
        print_json(found, context)
    else:
        rows = [{**each, "judge_score": _exact(each["judge_score"])} for each in found]
        print_rows(rows, CANDIDATE_COLUMNS, context, none="there are no such candidates")


def _exact(score: float | None) -> str | None:
    """In as many digits as thresholds may have: 0.366 is not 0.4, below which a judge rejects."""
    return None if score is None else f"{score:g}"


@app.command
def tree(run: Run, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """Parents and children, with scores and judgements."""
    with control(options, context) as plane:
        answer = plane.get("pipeline-runs", run, "tree")
    if options.as_json:
        print_json(answer, context)
        return
    root = Tree(run)
    for branch in answer["tree"]:
        _grow(root, branch)
    context.out.print(root)


def _grow(tree: Tree, branch: Mapping[str, Any]) -> None:
    status = branch["status"]
    text = Text.assemble(
        branch["id"],
        f"  {branch['score']:.0f}  ",
        (status, STYLES.get(status, "")),
        " by the judge" if branch["judged_by"] == "judge" else "",
        "" if branch["judge_score"] is None else f"  score {branch['judge_score']:g}",
    )
    grown = tree.add(text)
    for child in branch["children"]:
        _grow(grown, child)


@app.command(name=["export", "download"])
def export(
    run: Run,
    /,
    folder: Annotated[
        Path, Parameter(name=["--output", "-o"], metavar="DIR", help="Folder for the files.")
    ],
    *,
    status: Annotated[
        str | None,
        Parameter(
            metavar="STATUS",
            help="Only candidates with this status: approved, winner, active or rejected.",
        ),
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Copy the candidates to a folder, with a JSON index and a contact sheet."""
    with control(options, context) as plane:
        handle = plane.run(plane.client.pipelines.get_run(run))
        _export(plane, handle, folder, context, status)


def _export(
    plane: ApiSession,
    handle: PipelineRunHandle,
    folder: Path,
    context: CliContext,
    status: str | None = None,
) -> None:
    done = export_candidates(plane, handle, folder, status=status)
    if not done.candidates:
        made = sum(step.made for step in handle.run.steps)
        which = f"none of its {counted(made, 'candidate', 'candidates')} has the status {status}"
        raise RunFailed(
            f"nothing to export: {which if status and made else 'the run has no candidates yet'}"
        )
    context.say(f"{counted(done.candidates, 'candidate', 'candidates')} in {folder}")
    context.say(f"Index: {done.index_file}")
    context.say(f"Contact sheet: {done.sheet_file}")
