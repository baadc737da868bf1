"""`comfyfleet triggers`: schedules and incoming webhooks that start runs, over the customers' API."""

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
TRIGGERS_MAX = 1_000  # more than a user can have
TriggerName = Annotated[str, Parameter(metavar="TRIGGER", help="The trigger's id or name.")]
Most = Annotated[int, Parameter(help="Maximum number of rows.")]


@Parameter(name="*")
@dataclass(frozen=True)
class TriggerOptions:
    """What a trigger starts, and when."""

    tokens_per_day: Annotated[
        int, Parameter(metavar="N", help="What all runs of a day may spend together.")
    ]
    graph: Annotated[str | None, Parameter(help="The graph to run; an id or name.")] = None
    version: Annotated[
        int | None, Parameter(metavar="N", help="Of the graph; default: the newest.")
    ] = None
    pipeline: Annotated[str | None, Parameter(help="The pipeline to run; an id or name.")] = None
    base: Annotated[
        int | None, Parameter(metavar="N", help="Candidates of a pipeline's first step.")
    ] = None
    inputs: Annotated[
        tuple[str, ...],
        Parameter(
            name=["--input", "-i"],
            metavar="NAME=VALUE",
            help="JSON or a text; @FILE uploads a file, which is kept as media; @a.png,@b.png is a list of files, and @a.png, (with a comma) a list of one. Of a webhook, body.order.photo is a path in what it is sent.",
        ),
    ] = ()
    schedule: Annotated[
        str | None,
        Parameter(
            name="--cron", metavar="FIELDS", help="A schedule; without it the trigger is a webhook."
        ),
    ] = None
    timezone: Annotated[
        str, Parameter(metavar="NAME", help="Of the schedule and of the day, as Europe/Berlin.")
    ] = "UTC"
    catch_up: Annotated[
        bool, Parameter(help="Fire the newest moment that was missed, once, as soon as possible.")
    ] = False
    max_tokens: Annotated[int | None, Parameter(metavar="N", help="What one run may spend.")] = None

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
    """Looks for all files before one is uploaded."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(f"--input {text}: it must be NAME=VALUE")
        found[name] = value
    for value in found.values():
        for path in _files(value):
            require_file(path)
    return {name: _value(plane, value) for name, value in found.items()}


def _files(text: str) -> list[Path]:
    if not text.startswith("@"):
        return []
    return [Path(each.removeprefix("@")) for each in text.split(",") if each]


def _value(plane: ApiSession, text: str) -> Any:
    """Files become media: their owner sees what the trigger uses, and it stays as long as other media."""
    if files := _files(text):
        ids = [str(plane.run(plane.client.upload(each)).id) for each in files]
        return ids if "," in text else ids[0]
    try:
        return json.loads(text)
    except ValueError:
        return text


@app.command
def create(
    name: Annotated[str, Parameter(help="A name for people.")],
    /,
    *,
    given: TriggerOptions,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Create a trigger. Prints its id; for a webhook also its address and its secret, which is shown only now."""
    with control(options, context) as plane:
        made = plane.run(plane.client.triggers.create(name, **given.fields(plane)))
        address = plane.public_address(made.path) if made.path else ""
    if options.as_json:
        print_json(made, context)
        return
    context.print_line(str(made.id))
    if address:
        context.print_line(address)
        context.print_line(made.secret or "")


def _trigger_id(plane: ApiSession, name: str) -> UUID:
    """Finds a trigger by its id or its name. Raises NotFound or InvalidInput."""
    try:
        return UUID(name)
    except ValueError:
        pass
    found = plane.pages("triggers", "triggers", limit=TRIGGERS_MAX)
    ids = [row["id"] for row in found if row["name"] == name]
    hint = "comfyfleet triggers list shows your triggers"
    if not ids:
        raise NotFound(f"there is no trigger {name!r}", hint=hint)
    if len(ids) > 1:
        raise InvalidInput(f"{len(ids)} triggers are named {name!r}; use an id", hint=hint)
    return UUID(ids[0])


@app.command(name="list")
def list_(
    *, limit: Most = 50, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Your triggers, the newest first."""
    with control(options, context) as plane:
        found = plane.pages("triggers", "triggers", limit=limit)
    if options.as_json:
        print_json(found, context)
    else:
        none = "there are no triggers: comfyfleet triggers create NAME --graph GRAPH"
        print_rows(found, COLUMNS, context, none=none)


@app.command
def show(
    trigger: TriggerName,
    /,
    *,
    limit: Annotated[int, Parameter(help="Maximum number of firings.")] = FIRINGS_SHOWN,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """A trigger, what it has used today, and its last firings with their runs or refusals."""
    with control(options, context) as plane:
        trigger_id = _trigger_id(plane, trigger)
        found = plane.run(plane.client.triggers.get(trigger_id))
        firings = plane.pages("firings", "triggers", trigger_id, "firings", limit=limit)
    if options.as_json:
        print_json({**found.model_dump(mode="json"), "firings": firings}, context)
        return
    context.print_line(f"{found.name}: {' · '.join(_facts(found))}")
    print_rows(firings, FIRING_COLUMNS, context, none="it has not fired yet")


def _facts(found: Trigger) -> Iterator[str]:
    yield f"{found.cron} in {found.timezone}" if found.cron else f"webhook at {found.path}"
    if found.is_paused:
        yield "paused"
    elif found.next_at:
        yield f"next at {found.next_at.isoformat()}"
    yield f"{found.used_tokens:,} of {found.tokens_per_day:,} tokens used today"
    if found.is_spent:
        yield "spent: it starts nothing until the next day"
    if found.missed_at:
        missed = counted(found.missed, "moment", "moments")
        yield f"missed {missed}, the last at {found.missed_at.isoformat()}"


@app.command
def pause(
    trigger: TriggerName, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Pause a trigger; runs that it has started go on."""
    with control(options, context) as plane:
        _tell(plane.run(plane.client.triggers.pause(_trigger_id(plane, trigger))), options, context)


@app.command
def resume(
    trigger: TriggerName, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Resume a trigger, from its next moment on."""
    with control(options, context) as plane:
        _tell(
            plane.run(plane.client.triggers.resume(_trigger_id(plane, trigger))), options, context
        )


def _tell(found: Trigger, options: ApiOptions, context: CliContext) -> None:
    if options.as_json:
        print_json(found, context)
    else:
        context.say(f"{found.name}: {' · '.join(_facts(found))}")


@app.command
def delete(
    trigger: TriggerName, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Delete a trigger; runs that it has started stay."""
    with control(options, context) as plane:
        plane.run(plane.client.triggers.delete(_trigger_id(plane, trigger)))
    context.say(f"{trigger} is deleted; its runs stay")


@app.command
def fire(
    trigger: TriggerName,
    /,
    *,
    body: Annotated[
        str | None, Parameter(metavar="JSON", help="What a webhook would send, or @FILE.")
    ] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Fire a trigger now, within the tokens of its day. Prints the run's id."""
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
