"""`comfyfleet triggers`: schedules and incoming webhooks that start runs. The commands use the
public API."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from cyclopts import App, Parameter

from comfyfleet.cli import help_texts
from comfyfleet.cli.context import (
    CliContext,
    InjectedContext,
    counted,
    read_structure,
    require_file,
)
from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, ApiSession, connect
from comfyfleet.cli.tables import print_json, print_rows
from comfyfleet.client import Firing, Trigger
from comfyfleet.errors import InvalidInput, NotFound, RunFailed

app = App(name="triggers", help=help_texts.TRIGGERS, help_format="markdown")
control = partial(connect, base=PUBLIC_BASE)
COLUMNS = ("id", "name", "kind", "cron", "next_at", "used_tokens", "tokens_per_day", "is_paused")
FIRING_COLUMNS = ("created_at", "cause", "status", "run_id", "run:run_status", "error")
FIRINGS_SHOWN = 10
TRIGGERS_MAX = 1_000  # page size that exceeds the number of triggers a user can have
TriggerName = Annotated[str, Parameter(metavar="TRIGGER", help="The trigger's id or name.")]
Most = Annotated[int, Parameter(help="Maximum number of rows.")]


@Parameter(name="*")
@dataclass(frozen=True)
class TriggerOptions:
    """The target and the schedule of a trigger."""

    tokens_per_day: Annotated[
        int, Parameter(metavar="N", help="Spending limit for all runs of a day.")
    ]
    graph: Annotated[str | None, Parameter(help="The graph to run, given by id or name.")] = None
    version: Annotated[
        int | None, Parameter(metavar="N", help="The graph's version. Default: the newest.")
    ] = None
    pipeline: Annotated[str | None, Parameter(help="The pipeline to run, given by id or name.")] = (
        None
    )
    base: Annotated[
        int | None,
        Parameter(metavar="N", help="Number of candidates in the pipeline's first step."),
    ] = None
    inputs: Annotated[
        tuple[str, ...],
        Parameter(
            name=["--input", "-i"],
            metavar="NAME=VALUE",
            help="An input, as JSON or text. @FILE uploads a file as media. @a.png,@b.png is a list "
            "of files, and @a.png, (with a comma) is a list with one file. For a webhook, "
            "body.order.photo is a path in the request body.",
        ),
    ] = ()
    schedule: Annotated[
        str | None,
        Parameter(
            name="--cron",
            metavar="FIELDS",
            help="The schedule. Without one, the trigger is a webhook.",
        ),
    ] = None
    timezone: Annotated[
        str,
        Parameter(
            metavar="NAME",
            help="Time zone of the schedule and of the daily limit, such as Europe/Berlin.",
        ),
    ] = "UTC"
    catch_up: Annotated[
        bool, Parameter(help="After downtime, fire once for the latest missed time.")
    ] = False
    max_tokens: Annotated[int | None, Parameter(metavar="N", help="Spending limit of a run.")] = (
        None
    )

    def fields(self, plane: ApiSession) -> dict[str, Any]:
        return {
            "tokens_per_day": self.tokens_per_day,
            "graph": self.graph,
            "version": self.version,
            "pipeline": self.pipeline,
            "base_candidates": self.base,
            "inputs": _inputs(plane, self.inputs),
            "cron": self.schedule,
            "timezone": self.timezone,
            "catch_up": self.catch_up,
            "max_tokens": self.max_tokens,
        }


def _inputs(plane: ApiSession, texts: Sequence[str]) -> dict[str, Any]:
    """Returns the inputs. All files are checked before the first upload."""
    inputs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(f"--input {text} is invalid; use NAME=VALUE")
        inputs[name] = value
    for value in inputs.values():
        for path in _files(value):
            require_file(path)
    return {name: _value(plane, value) for name, value in inputs.items()}


def _files(text: str) -> list[Path]:
    if not text.startswith("@"):
        return []
    return [Path(part.removeprefix("@")) for part in text.split(",") if part]


def _value(plane: ApiSession, text: str) -> Any:
    """Returns a value. Files are uploaded as media, so that their owner can see them, and they are
    kept as long as other media."""
    if files := _files(text):
        ids = [str(plane.run(plane.client.upload(path)).id) for path in files]
        return ids if "," in text else ids[0]
    try:
        return json.loads(text)
    except ValueError:
        return text


@app.command
def create(
    name: Annotated[str, Parameter(help="A display name.")],
    /,
    *,
    fields: TriggerOptions,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Create a trigger and print its id. For a webhook, print its address and secret as well.
    The secret is shown only once."""
    with control(options, context) as plane:
        created = plane.run(plane.client.triggers.create(name, **fields.fields(plane)))
        address = plane.public_address(created.path) if created.path else ""
    if options.as_json:
        print_json(created, context)
        return
    context.print_line(str(created.id))
    if address:
        context.print_line(address)
        context.print_line(created.secret or "")


def _trigger_id(plane: ApiSession, name: str) -> UUID:
    """Returns the id of a trigger that is given by id or name. Raises NotFound or InvalidInput."""
    try:
        return UUID(name)
    except ValueError:
        pass
    listed = plane.pages("triggers", "triggers", limit=TRIGGERS_MAX)
    ids = [row["id"] for row in listed if row["name"] == name]
    hint = "List your triggers with: comfyfleet triggers list"
    if not ids:
        raise NotFound(f"trigger {name!r} was not found", hint=hint)
    if len(ids) > 1:
        raise InvalidInput(f"{len(ids)} triggers are named {name!r}; use an id", hint=hint)
    return UUID(ids[0])


@app.command(name="list")
def list_(
    *, limit: Most = 50, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """List your triggers, newest first."""
    with control(options, context) as plane:
        listed = plane.pages("triggers", "triggers", limit=limit)
    if options.as_json:
        print_json(listed, context)
    else:
        none = "there are no triggers: comfyfleet triggers create NAME --graph GRAPH"
        print_rows(listed, COLUMNS, context, none=none)


@app.command
def show(
    trigger: TriggerName,
    /,
    *,
    limit: Annotated[int, Parameter(help="Maximum number of firings.")] = FIRINGS_SHOWN,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Show a trigger, its usage today, and its last firings with their runs or refusals."""
    with control(options, context) as plane:
        trigger_id = _trigger_id(plane, trigger)
        details = plane.run(plane.client.triggers.get(trigger_id))
        firings = plane.pages("firings", "triggers", trigger_id, "firings", limit=limit)
    if options.as_json:
        print_json({**details.model_dump(mode="json"), "firings": firings}, context)
        return
    context.print_line(f"{details.name}: {' · '.join(_facts(details))}")
    print_rows(firings, FIRING_COLUMNS, context, none="the trigger has not fired yet")


def _facts(trigger: Trigger) -> Iterator[str]:
    yield f"{trigger.cron} in {trigger.timezone}" if trigger.cron else f"webhook at {trigger.path}"
    if trigger.is_paused:
        yield "paused"
    elif trigger.next_at:
        yield f"next at {trigger.next_at.isoformat()}"
    yield f"{trigger.used_tokens:,} of {trigger.tokens_per_day:,} tokens used today"
    if trigger.is_spent:
        yield "limit reached: it starts no runs until the next day"
    if trigger.missed_at:
        missed = counted(trigger.missed, "scheduled time", "scheduled times")
        yield f"missed {missed}, the last at {trigger.missed_at.isoformat()}"


@app.command
def pause(
    trigger: TriggerName, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Pause a trigger. Its active runs continue."""
    with control(options, context) as plane:
        _tell(plane.run(plane.client.triggers.pause(_trigger_id(plane, trigger))), options, context)


@app.command
def resume(
    trigger: TriggerName, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Resume a trigger. A schedule continues with its next scheduled time."""
    with control(options, context) as plane:
        _tell(
            plane.run(plane.client.triggers.resume(_trigger_id(plane, trigger))), options, context
        )


def _tell(trigger: Trigger, options: ApiOptions, context: CliContext) -> None:
    if options.as_json:
        print_json(trigger, context)
    else:
        context.say(f"{trigger.name}: {' · '.join(_facts(trigger))}")


@app.command
def delete(
    trigger: TriggerName, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Delete a trigger. Its runs are kept."""
    with control(options, context) as plane:
        plane.run(plane.client.triggers.delete(_trigger_id(plane, trigger)))
    context.say(f"{trigger} is deleted; its runs are kept")


@app.command
def fire(
    trigger: TriggerName,
    /,
    *,
    body: Annotated[
        str | None,
        Parameter(metavar="JSON", help="The body that a webhook would receive, or @FILE."),
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Fire a trigger now, within its daily token limit. Prints the run's id."""
    with control(options, context) as plane:
        fired = plane.run(plane.client.triggers.fire(_trigger_id(plane, trigger), body=_body(body)))
    if options.as_json:
        print_json(fired, context)
    elif fired.run_id:
        context.print_line(str(fired.run_id))
    _require_started(fired)


def _body(text: str | None) -> Any:
    if text is None:
        return None
    if text.startswith("@"):
        return read_structure(Path(text.removeprefix("@")))
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidInput("--body is not JSON") from None


def _require_started(fired: Firing) -> None:
    if fired.status == "refused":
        raise RunFailed(fired.error or "the trigger was refused", code=fired.error_code)
