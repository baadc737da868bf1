"""`comfyfleet pipeline`: commands for pipelines, which use the public API, and the export of a
run's candidates as files."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from comfyfleet.api.documents import read_document
from comfyfleet.api.pipelines import CandidateSort
from comfyfleet.cli import help_texts
from comfyfleet.cli.context import (
    OPENABLE_SUFFIXES,
    CliContext,
    InjectedContext,
    counted,
    open_file,
    read_text,
)
from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, ApiSession, connect
from comfyfleet.cli.help_texts import NO_WORKER_REMEDY
from comfyfleet.cli.job_waiter import live_display, retry_while_away
from comfyfleet.cli.pipeline_files import ExportFolder, pillow_missing
from comfyfleet.cli.tables import TextTable, print_json, print_rows, table_cell
from comfyfleet.cli.upload import variables_from
from comfyfleet.client import Pipeline, PipelineRun, PipelineRunHandle
from comfyfleet.errors import Forbidden, InvalidInput, NotFound, PersonNeeded, RunFailed

app = App(name="pipeline", help=help_texts.PIPELINE, help_format="markdown")
control = partial(connect, base=PUBLIC_BASE)
DOCUMENT_SUFFIXES = frozenset({".yaml", ".yml", ".json"})
COLUMNS = ("name", "wanted", "made", "approved", "rejected", "in_flight", "failed")
STYLES = {"approved": "green", "winner": "bold yellow", "rejected": "red"}
CANDIDATE_COLUMNS = (
    *("id", "step", "status", "judged_by", "score:judge_score", "rating:score"),
    "note:judge_error",
)
LOOK_SECONDS, LOOK_SECONDS_MAX = 0.5, 5.0
JUDGEMENT = "waiting_for_judgement"
PAGE_MAX = 100  # candidates per request
RUN_COLUMNS = ("id", "pipeline", "status", "reason", "tokens", "created_at")
Run = Annotated[str, Parameter(help="The run's id.")]
Candidates = Annotated[
    tuple[str, ...],
    Parameter(metavar="CANDIDATE", help="The ids of candidates, as listed by `tree`.", negative=()),
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
    """Register a pipeline. Prints its id, or all of its problems."""
    with control(options, context) as plane:
        answer = _made(plane, pipeline_document(plane, document, context))
    for warning in answer.warnings:
        context.warn(warning)
    if options.as_json:
        print_json(answer, context)
    else:
        context.print_line(str(answer.id))


def _made(plane: ApiSession, document: Mapping[str, Any] | str) -> Pipeline:
    try:
        return plane.run(plane.client.pipelines.create(document))
    except InvalidInput as error:
        problems = error.details.get("problems", ())
        if not problems:
            raise
        lines = [
            f"{problem['step']}.{problem['field']}: {problem['message']}" for problem in problems
        ]
        many = counted(len(lines), "problem", "problems")
        listed = "".join(f"\n  {line.lstrip('.: ')}" for line in lines)
        raise InvalidInput(f"the pipeline has {many}:{listed}") from None


@Parameter(name="*")
@dataclass(frozen=True)
class RunStartOptions:
    """The parameters of a new run."""

    base: Annotated[int, Parameter(metavar="N", help="Number of candidates in the first step.")] = 1
    variables: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            metavar="NAME=VALUE",
            help="A variable's value, as JSON or text. @FILE uploads a file. Repeatable.",
        ),
    ] = ()
    folder: Annotated[
        str | None, Parameter(metavar="FOLDER", help="The target folder. Default: runs/ID.")
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
            metavar="TIME",
            help="The local time after which no more jobs are submitted, such as 2026-05-01T06:00.",
        ),
    ] = None

    def body(self, plane: ApiSession) -> dict[str, Any]:
        limits = {
            "concurrent_jobs": self.concurrent,
            "tokens": self.tokens,
            "candidates": self.candidates,
            "until": self.until.astimezone() if self.until else None,
        }
        return {
            "base_candidates": self.base,
            "variables": variables_from(plane, self.variables),
            "target_folder": self.folder,
            "limits": {name: value for name, value in limits.items() if value is not None},
        }


@app.command
def run(
    pipeline: Annotated[
        str, Parameter(help="A pipeline's id or name, or a file to create it from.")
    ],
    /,
    *,
    start: RunStartOptions = RunStartOptions(),  # noqa: B008 - frozen
    wait: Annotated[
        bool, Parameter(help="Show the progress until the run has no more work.")
    ] = False,
    export_to: Annotated[
        Path | None,
        Parameter(
            name=["--export", "--follow"],
            metavar="DIR",
            help="Wait, save each image to this folder when it is finished, and then add an index and a "
            "contact sheet.",
        ),
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Start a run and print its id.

    A step's `workflow` may be the path of a workflow file, relative to the pipeline's file. With
    `comfyfleet up`, its user needs no key and doesn't have to register anything."""
    with control(options, context) as plane:
        body = start.body(plane)
        if Path(pipeline).is_file():
            pipeline = str(_made(plane, pipeline_document(plane, Path(pipeline), context)).id)
        elif Path(pipeline).suffix in DOCUMENT_SUFFIXES:
            raise NotFound(f"file {pipeline} was not found")
        handle = plane.run(plane.client.pipelines.run(pipeline, **body))
        if not options.as_json:
            context.print_line(str(handle.id))
        folder = ExportFolder(plane, handle, export_to) if export_to else None
        needed = _watch(plane, handle, context, folder) if wait or folder else None
        if folder and (_made_count(handle.run) or not needed):
            _export(folder, context)
    if options.as_json:
        print_json(handle.run, context)
    if needed:
        raise needed


def pipeline_document(plane: ApiSession, file: Path, context: CliContext) -> dict[str, Any] | str:
    """Returns a pipeline's document. Registers the workflow files in it for this user, and replaces
    their paths."""
    text = read_text(file)
    document = read_document(text)
    works = list(_works_of(document))
    if not any(is_workflow_file(work.get("workflow")) for work in works):
        return text  # return the original text, so that problems refer to it
    slugs: dict[str, str] = {}
    for work in works:
        name = work.get("workflow")
        if isinstance(name, str) and is_workflow_file(name):
            if name not in slugs:
                slugs[name] = _registered(plane, file.parent / name, context)
            work["workflow"] = slugs[name]
    return dict(document)


def _works_of(document: Any) -> Iterator[dict[str, Any]]:
    steps = document.get("steps") if isinstance(document, dict) else None
    for step in steps if isinstance(steps, list) else ():
        if isinstance(step, dict):
            yield step
            if isinstance(step.get("judge"), dict):
                yield step["judge"]


def is_workflow_file(name: object) -> bool:
    """Checks whether a name is a file path. Slugs have no slash, and no file extension used by
    ComfyUI."""
    return isinstance(name, str) and ("/" in name or name.lower().endswith(OPENABLE_SUFFIXES))


def _registered(plane: ApiSession, file: Path, context: CliContext) -> str:
    opened = open_file(str(file), context.stdin)
    document = opened.workflow if opened.workflow is not None else opened.prompt
    answer = plane.post("local", "workflows", name=file.stem, document=document)
    properties = ", ".join(answer["properties"])
    context.say(
        f"{file} is registered as workflow {answer['slug']}, with the properties {properties}"
    )
    return str(answer["slug"])


@app.command
def status(
    run: Run,
    /,
    *,
    follow: Annotated[bool, Parameter(help="Show changes until the run has no more work.")] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show the progress of a run: how many candidates of each step are needed, made, approved, in
    flight and failed."""
    with control(options, context) as plane:
        handle = plane.run(plane.client.pipelines.get_run(run))
        if follow:
            if needed := _watch(plane, handle, context):
                raise needed
            return
    if options.as_json:
        print_json(handle.run, context)
    else:
        context.out.print(render_board(handle.run), soft_wrap=True)


def _watch(
    plane: ApiSession,
    handle: PipelineRunHandle,
    context: CliContext,
    folder: ExportFolder | None = None,
) -> PersonNeeded | None:
    """Waits until the run can't continue without a person, and saves each candidate when it is
    finished.

    Returns what a person must do, if that is why the run stopped."""
    look = partial(
        retry_while_away,
        lambda: plane.run(handle.refresh()),
        context,
        "the run continues",
        time.sleep,
    )
    seen: PipelineRun | None = None
    seconds, troubled_at, is_checked = LOOK_SECONDS, 0.0, False
    with live_display(context.err) as live:
        while True:
            run = look()
            if seen is None or run.trouble != seen.trouble:
                troubled_at = context.clock()
            if run != seen:
                if folder and (seen is None or _made_count(run) != _made_count(seen)):
                    folder.write_new()
                live.update(render_board(run))
                _print_changes(run, seen, context)
                seen, seconds = run, LOOK_SECONDS
            needed = person_needed(run, context.clock() - troubled_at)
            if needed and run.trouble and not is_checked:
                # The problem may have been resolved since the control plane's last check.
                is_checked = True
                if _check_again(plane, run):
                    continue
            is_asked = run.reason == JUDGEMENT and context.err.is_terminal
            if not is_asked and (needed or run.is_resting):
                return needed
            time.sleep(seconds)
            seconds = min(seconds * 1.5, LOOK_SECONDS_MAX)


def _check_again(plane: ApiSession, run: PipelineRun) -> bool:
    """Requests an immediate check of the run's problem. Returns False if this key or an older
    control plane doesn't support that."""
    try:
        plane.post("pipeline-runs", str(run.id), "check")
    except (Forbidden, NotFound):
        return False
    return True


def person_needed(run: PipelineRun, troubled_seconds: float) -> PersonNeeded | None:
    """Returns an error that names the action a person must take. Returns None if no action is
    required."""
    seconds = run.trouble_seconds
    if run.trouble and seconds is not None and troubled_seconds >= seconds:
        remedy = NO_WORKER_REMEDY if seconds else "Resolve this problem"
        return PersonNeeded(
            f"run {run.id} can't continue: {run.trouble.rstrip('.')}. {remedy}; the run then continues automatically",
            hint=f"Follow it with: comfyfleet pipeline status {run.id} --follow",
        )
    if not run.is_resting:
        return None
    if run.status == "paused":
        return PersonNeeded(
            f"run {run.id} is paused. Resume it with: comfyfleet pipeline resume {run.id}"
        )
    if run.reason == JUDGEMENT:
        return PersonNeeded(_judgement_line(run))
    if run.reason == "failed":
        failed = counted(sum(step.failed for step in run.steps), "job has", "jobs have")
        return PersonNeeded(
            f"{failed} failed, and failed jobs are not retried automatically. "
            f"Retry with: comfyfleet pipeline retry {run.id}"
        )
    return None


def _judgement_line(run: PipelineRun) -> str:
    waiting = counted(sum(step.waiting for step in run.steps), "candidate waits", "candidates wait")
    return (
        f"{waiting} for your judgment. List them with: comfyfleet pipeline tree {run.id}; "
        f"judge with: comfyfleet pipeline approve|reject {run.id} CANDIDATE"
    )


def _made_count(run: PipelineRun) -> int:
    return sum(step.made for step in run.steps)


def _print_changes(run: PipelineRun, before: PipelineRun | None, context: CliContext) -> None:
    """Prints instructions for judging on a terminal. Elsewhere, prints a new problem, which would
    otherwise appear only at the end."""
    was_told = before is not None and before.trouble == run.trouble
    if run.trouble and not was_told and not context.err.is_terminal:
        context.warn(f"run {run.id} is waiting: {run.trouble}")
    was_asked = before is not None and before.reason == JUDGEMENT
    if run.reason == JUDGEMENT and not was_asked and context.err.is_terminal:
        context.say(_judgement_line(run))


def render_board(run: PipelineRun) -> Group:
    headings = [name.replace("_", " ") for name in COLUMNS]
    listing = TextTable(headings, right=[heading for heading in headings if heading != "name"])
    for step in run.steps:
        listing.add(*(table_cell(getattr(step, name)) for name in COLUMNS))
    judges = [Text(line, style="dim") for line in _judges(run)]
    return Group(listing, *judges, Text(" · ".join(_figures(run)), style="dim"))


def _judges(run: PipelineRun) -> Iterator[str]:
    """Yields each step's judge, with its thresholds and the number of remaining candidates."""
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
        remaining = f"{step.unjudged} left to judge, {step.waiting} need a person"
        yield f"{step.name}: {step.judge.name} {', '.join(decides)}; {remaining}"


def _figures(run: PipelineRun) -> Iterator[str]:
    yield f"{run.status}{': ' + run.reason if run.reason else ''}"
    if run.pause_reason:
        yield f"pause reason: {run.pause_reason}"
    if run.trouble:
        yield f"problem: {run.trouble}"
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
    """List registered pipelines, newest first."""
    with control(options, context) as plane:
        pipelines = plane.pages("pipelines", "pipelines", limit=limit)
    if options.as_json:
        print_json(pipelines, context)
    else:
        none = "there are no pipelines yet: comfyfleet pipeline create FILE"
        print_rows(pipelines, ("id", "name", "created_at"), context, none=none)


@app.command
def runs(
    *,
    pipeline: Annotated[
        str | None, Parameter(help="Only runs of this pipeline, given by id or name.")
    ] = None,
    limit: Most = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List your runs, newest first."""
    with control(options, context) as plane:
        listed = plane.pages("runs", "pipeline-runs", limit=limit, pipeline_id=pipeline)
    if options.as_json:
        print_json(listed, context)
    else:
        print_rows(listed, RUN_COLUMNS, context, none="there are no matching runs")


@app.command
def delete(
    pipeline: Annotated[str, Parameter(help="The pipeline's id or name.")],
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Delete a pipeline. Its runs continue."""
    with control(options, context) as plane:
        plane.run(plane.client.pipelines.delete(pipeline))
    context.say(f"{pipeline} is deleted; its runs continue")


@app.command
def approve(
    run: Run,
    candidates: Candidates,
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Approve candidates, so that they get children in the next step."""
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
    """Reject candidates, so that they get no more children."""
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
    """Undo judgments of candidates."""
    _judge(run, candidates, "undo", options, context)


def _judge(
    run_id: str, candidates: Sequence[str], act: str, options: ApiOptions, context: CliContext
) -> None:
    with control(options, context) as plane:
        for candidate in candidates:
            answer = plane.post("pipeline-runs", run_id, "candidates", candidate, act)
            if options.as_json:
                print_json(answer, context)
            else:
                context.say(f"{candidate} is {answer['status']}")


@app.command
def pair(
    run: Run,
    /,
    *,
    step: Annotated[
        int | None, Parameter(help="Only candidates of this step. The first step is 0.")
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show two candidates to compare. Use `vote` to choose the better one."""
    with control(options, context) as plane:
        answer = plane.get("pipeline-runs", run, "pair", step=step)
    if options.as_json:
        print_json(answer, context)
        return
    compared = answer["candidates"]
    print_rows(
        compared,
        ("id", "step", "score", "path"),
        context,
        none="there are not enough candidates to compare",
    )
    if compared:
        context.say(
            f"comfyfleet pipeline vote {run} {compared[0]['id']} {compared[1]['id']}: the first won"
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
    """Vote for the better of two candidates of the same step."""
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
    """Cancel a run and its queued jobs. Running jobs finish, and all candidates are kept."""
    _act(run, "cancel", options, context)


@app.command
def pause(run: Run, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """Pause a run. It submits no more jobs, but submitted jobs continue."""
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
        context.say(f"the run is {answer['status']}")


@app.command
def retry(
    run: Run,
    /,
    *,
    job: Annotated[str | None, Parameter(metavar="ID", help="Only this job. Default: all.")] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Retry failed jobs. They are not retried automatically."""
    with control(options, context) as plane:
        answer = plane.post("pipeline-runs", run, "retry", job_id=job)
    if options.as_json:
        print_json(answer, context)
    else:
        context.say(f"{counted(len(answer['jobs']), 'job is', 'jobs are')} retried")


@app.command
def candidates(
    run: Run,
    /,
    *,
    step: Annotated[
        int | None, Parameter(help="Only candidates of this step. The first step is 0.")
    ] = None,
    status: Annotated[
        str | None,
        Parameter(help="Only candidates with this status: approved, winner, active or rejected."),
    ] = None,
    sort: Annotated[
        CandidateSort, Parameter(help="Sort by age, by judgment, or by the judge's score.")
    ] = CandidateSort.OLDEST,
    limit: Most = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List candidates with their scores, and who judged them."""
    with control(options, context) as plane:
        handle = plane.run(plane.client.pipelines.get_run(run))
        matching = handle.candidates(
            step=step, status=status, sort=sort, page_size=min(limit, PAGE_MAX)
        )
        listed = [
            candidate.model_dump(mode="json")
            for candidate in islice(plane.iterate(matching), limit)
        ]
    if options.as_json:
        print_json(listed, context)
    else:
        rows = [{**entry, "judge_score": _exact(entry["judge_score"])} for entry in listed]
        print_rows(rows, CANDIDATE_COLUMNS, context, none="there are no matching candidates")


def _exact(score: float | None) -> str | None:
    """Formats a score with the precision of thresholds, so that 0.366 doesn't appear as 0.4."""
    return None if score is None else f"{score:g}"


@app.command
def tree(run: Run, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """Show candidates as a tree of parents and children, with scores and judgments."""
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
            help="Export only candidates with this status: approved, winner, active or rejected.",
        ),
    ] = None,
    follow: Annotated[
        bool,
        Parameter(help="Save each candidate when it is finished, until the run has no more work."),
    ] = False,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Copy the candidates to a folder, with a JSON index and a contact sheet."""
    with control(options, context) as plane:
        handle = plane.run(plane.client.pipelines.get_run(run))
        files = ExportFolder(plane, handle, folder, status)
        needed = _watch(plane, handle, context, files) if follow else None
        if _made_count(handle.run) or not needed:
            _export(files, context)
    if needed:
        raise needed


def _export(files: ExportFolder, context: CliContext) -> None:
    done, status = files.finish(), files.status
    if not done.candidates:
        count = sum(step.made for step in files.handle.run.steps)
        which = f"none of its {counted(count, 'candidate', 'candidates')} has the status {status}"
        raise RunFailed(
            f"nothing to export: {which if status and count else 'the run has no candidates yet'}"
        )
    context.say(f"{counted(done.candidates, 'candidate', 'candidates')} in {files.folder}")
    context.say(f"Index: {done.index_file}")
    if done.sheet_file:
        context.say(f"Contact sheet: {done.sheet_file}")
    else:
        hint = pillow_missing().details["hint"]
        context.warn(f"no contact sheet was created, because Pillow isn't installed. {hint}")


@app.command
def prompt(
    run: Run,
    candidate: Annotated[str, Parameter(help="A candidate's id, as listed by `tree`.")],
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Print the prompt that generated a candidate, as JSON. Only for the user of `comfyfleet
    up`."""
    with control(options, context) as plane:
        details = plane.get("pipeline-runs", run, "candidates", candidate)
        print_json(plane.get("local", "jobs", details["job_id"], "prompt")["prompt"], context)
