"""`comfyfleet effects`, `jobs` and `wallet`: the commands for customers, which use the public
API."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from cyclopts import App, Parameter, validators

from comfyfleet.cli import help_texts
from comfyfleet.cli.context import CliContext, InjectedContext, require_file
from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, ApiSession, connect
from comfyfleet.cli.graph_inputs import json_or_text
from comfyfleet.cli.job_waiter import (
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    person_needed_if_refused,
    retry_while_away,
)
from comfyfleet.cli.tables import print_fields, print_json, print_rows
from comfyfleet.client import Job, JobHandle
from comfyfleet.errors import InvalidInput, PersonNeeded, RunFailed

app = App(name="effects", help=help_texts.EFFECTS, help_format="markdown")
jobs_app = App(name="jobs", help=help_texts.JOBS, help_format="markdown")
control = partial(connect, base=PUBLIC_BASE)
EFFECT_COLUMNS = ("slug", "price:price_tokens", "takes", "typical_seconds", "title")
JOB_COLUMNS = ("id", "effect", "status", "price:price_tokens", "submitted:submitted_at", "error")
JOB_FIELDS = ("id", "effect", "status", "why", "price_tokens", "submitted_at", "completed_at", "properties", "text", "files", "error")  # fmt: skip
EffectName = Annotated[str, Parameter(metavar="EFFECT", help="The effect's slug or id.")]
JobId = Annotated[UUID, Parameter(metavar="JOB", help="The job's id.")]


@app.command(name="list")
def list_effects(
    text: Annotated[str | None, Parameter(help="Only effects that contain this text.")] = None,
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List the published effects with their prices."""
    with control(options, context) as plane:
        effects = plane.run(plane.client.effects(text))
    rows = [effect.model_dump(mode="json") for effect in effects]
    if options.as_json:
        print_json({"effects": rows}, context)
        return
    shown = [{**row, "takes": (row["takes"] or {}).get("kind")} for row in rows]
    print_rows(shown, EFFECT_COLUMNS, context, none="there are no matching published effects")


@app.command(name="show")
def show_effect(
    effect: EffectName, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Show an effect and its properties."""
    with control(options, context) as plane:
        fields = plane.run(plane.client.effect(effect)).model_dump(mode="json")
    if options.as_json:
        print_json(fields, context)
        return
    properties = (fields.get("properties") or {}).get("properties") or {}
    print_fields({key: fields[key] for key in ("slug", "title", "description", "price_tokens")}, context)  # fmt: skip
    rows = [{"property": name, **entry} for name, entry in properties.items()]
    print_rows(
        rows,
        ("property", "kind:x-kind", "default", "minimum", "maximum", "description"),
        context,
        none="the effect has no properties",
    )


@app.command(name="run")
def run_effect(
    effect: EffectName,
    media: Annotated[
        str | None,
        Parameter(metavar="FILE", help="The input file, or the id of uploaded media."),
    ] = None,
    /,
    *,
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            metavar="NAME=VALUE",
            help="A property's value, as JSON or text. @FILE uploads a file. Repeatable.",
            allow_leading_hyphen=True,
        ),
    ] = (),
    wait: Annotated[bool, Parameter(help="Wait until the job has ended.")] = False,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            metavar="DIR",
            help="Wait, and save the results in this folder.",
        ),
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Submit a job. Prints its id or, with -o, the paths of the results.

    With --wait, exits with 3 if a person must help, for example because no worker can run the
    job."""
    with control(options, context) as plane:
        with person_needed_if_refused(waits=wait or output is not None):
            handle = _submitted(plane, effect, media, set_)
        if wait or output is not None:
            _finish(plane, handle, output, context)
        else:
            plane.tell(
                handle.job.model_dump(mode="json"),
                line=str(handle.id),
                then=f"Follow it with: comfyfleet jobs wait {handle.id}",
            )


def _submitted(
    plane: ApiSession, effect: str, media: str | None, texts: Sequence[str]
) -> JobHandle:
    source, values = _checked(media, texts)
    client = plane.client
    uploaded = {
        name: str(plane.run(client.upload(value)).id) if isinstance(value, Path) else value
        for name, value in values.items()
    }
    item = (
        plane.run(client.upload(source, effect=effect)).id if isinstance(source, Path) else source
    )
    key = plane.context.new_id()
    return plane.run(client.apply(effect, item, uploaded, idempotency_key=key))


def _checked(media: str | None, texts: Sequence[str]) -> tuple[Path | UUID | None, dict[str, Any]]:
    """Parses all values and checks all files before the first upload."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InvalidInput(f"--set {text!r} is invalid; use --set NAME=VALUE")
        is_file = value.startswith("@")
        values[name.strip()] = require_file(Path(value[1:])) if is_file else json_or_text(value)
    return (None if media is None else _media(media)), values


def _media(text: str) -> Path | UUID:
    try:
        return UUID(text)
    except ValueError:
        return require_file(Path(text.removeprefix("@")))


def _finish(plane: ApiSession, handle: JobHandle, output: Path | None, context: CliContext) -> None:
    job = JobWait(plane, handle, context).until_ended()
    if plane.options.as_json:
        print_json(job.model_dump(mode="json"), context)
    if job.status != "completed":
        raise RunFailed(f"job {job.id} {job.status}" + (f": {job.error}" if job.error else ""))
    if output is not None:
        for path in plane.run(handle.download(output)):
            if not plane.options.as_json:
                context.print_line(str(path))
    elif not plane.options.as_json:
        context.print_line(str(job.id))
    if job.text and not plane.options.as_json:
        context.say(job.text)


class JobWait:
    """Waits for a job until it has ended or a person must help."""

    def __init__(
        self,
        plane: ApiSession,
        handle: JobHandle,
        context: CliContext,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._plane = plane
        self._handle = handle
        self._context = context
        self._sleep = sleep
        self._stuck_since: float | None = None
        self._said = ""

    def until_ended(self) -> Job:
        pause = PAUSE_SECONDS
        while not self._look().has_ended:
            self._sleep(pause)
            pause = min(pause * 1.2, PAUSE_SECONDS_MAX)
        return self._handle.job

    def _look(self) -> Job:
        return retry_while_away(self._state, self._context, "the job continues", self._sleep)

    def _state(self) -> Job:
        job = self._plane.run(self._handle.refresh())
        if job.status == "queued":
            self._explain()
        else:
            self._stuck_since = None
        return job

    def _explain(self) -> None:
        answer = self._plane.run(self._handle.explain())
        if answer.why != self._said:
            self._said = answer.why
            self._context.say(answer.why)
        if answer.person_needed_after is None:
            self._stuck_since = None
            return
        now = self._context.clock()
        self._stuck_since = now if self._stuck_since is None else self._stuck_since
        if now - self._stuck_since >= answer.person_needed_after:
            raise PersonNeeded(
                f"job {self._handle.id} can't run: {answer.why} {answer.required_action}",
                hint=f"Follow it with: comfyfleet jobs wait {self._handle.id}. "
                f"Cancel it with: comfyfleet jobs cancel {self._handle.id}",
            )


@jobs_app.command(name="list")
def list_jobs(
    *,
    status: Annotated[str | None, Parameter(help="Only jobs with this status.")] = None,
    limit: Annotated[
        int,
        Parameter(validator=validators.Number(gte=1, lte=10_000), help="Maximum number of jobs."),
    ] = 50,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List your jobs, newest first."""
    with control(options, context) as plane:
        source = plane.client.jobs(status=status, page_size=min(limit, 100))
        jobs = [handle.job for handle in islice(plane.iterate(source), limit)]
        effects = {} if options.as_json else _effect_names(plane, jobs)
    rows = [job.model_dump(mode="json") for job in jobs]
    if options.as_json:
        print_json({"jobs": rows}, context)
    else:
        rows = [
            {**row, "effect": effects.get(job.effect_id)}
            for job, row in zip(jobs, rows, strict=True)
        ]
        print_rows(rows, JOB_COLUMNS, context, none="there are no matching jobs")


def _effect_names(plane: ApiSession, jobs: Sequence[Job]) -> dict[UUID | None, str]:
    """Returns the slugs of the jobs' effects. A withdrawn effect is shown with its id, because
    customers can't see its slug."""
    names: dict[UUID | None, str] = {
        job.effect_id: str(job.effect_id) for job in jobs if job.effect_id
    }
    if names:
        names |= {effect.id: effect.slug for effect in plane.run(plane.client.effects())}
    return names


@jobs_app.command(name="show")
def show_job(
    job: JobId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Show a job, its results, and why it is not running."""
    with control(options, context) as plane:
        handle = plane.run(plane.client.job(job))
        fields = handle.job.model_dump(mode="json")
        if handle.job.status == "queued":
            fields["why"] = plane.run(handle.why())
        effects = {} if options.as_json else _effect_names(plane, [handle.job])
    if options.as_json:
        print_json(fields, context)
        return
    fields["effect"] = effects.get(handle.job.effect_id)
    fields["files"] = [
        output["download_name"] or output["filename"] for output in fields["outputs"]
    ]
    print_fields({name: fields.get(name) for name in JOB_FIELDS}, context)


@jobs_app.command(name="wait")
def wait_for_job(
    job: JobId,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], metavar="DIR", help="Save the results in this folder."),
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Wait until a job has ended. Exits with code 3 if a person must help."""
    with control(options, context) as plane:
        _finish(plane, plane.run(plane.client.job(job)), output, context)


@jobs_app.command(name="cancel")
def cancel_job(
    job: JobId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Cancel a job and refund it."""
    with control(options, context) as plane:
        handle = plane.run(plane.client.job(job))
        answer = plane.run(handle.cancel())
        plane.tell(answer.model_dump(mode="json"), f"job {answer.id} is {answer.status}")


def wallet(*, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """Show your balance, and the tokens added and spent in the last 30 days."""
    with control(options, context) as plane:
        summary = plane.run(plane.client.wallet_summary()).model_dump(mode="json")
    if options.as_json:
        print_json(summary, context)
    else:
        print_fields(summary, context)
