"""`comfyfleet admin workflows`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.files import FILE_HELP, open_file, read_file
from comfyfleet.cli.world import InWorld, World
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.workflow.media import parse_json

app = App(name="workflows", help="Workflows that jobs can name: register, pause, activate.")
Slug = Annotated[str, Parameter(help="The workflow's slug.")]
PROPERTIES_BYTES_MAX = 4 * 1024 * 1024
COLUMNS = (
    "slug",
    "version",
    "active:is_active",
    "paused:is_paused",
    "price:price_tokens",
    "fleets",
    "created:created_at",
)
PROPERTY_COLUMNS = ("name", "type", "binding", "placeholder", "default", "required", "description")
PROPERTY_HELP = (
    "NAME:TYPE=NODE.INPUT, such as prompt:text=6.text or input:image=10.image. "
    "TYPE is text, number, integer, boolean, choice, seed, image, video or audio. Repeatable."
)


@Parameter(name="*")
@dataclass(frozen=True)
class Needs:
    """What is said of a workflow as a whole."""

    output: Annotated[
        str | None, Parameter(metavar="NODE", help="The node whose files are the result.")
    ] = None
    capability: Annotated[
        tuple[str, ...], Parameter(help="What a worker must have to run it. Repeatable.")
    ] = ()
    run_limit: Annotated[
        int | None, Parameter(metavar="SECONDS", help="How long a job may run.")
    ] = None
    price: Annotated[
        int | None,
        Parameter(metavar="TOKENS", help="Offer it in graphs and pipelines; 0: for nothing."),
    ] = None
    break_effects: Annotated[
        bool, Parameter(help="Though published effects don't fit it; they refuse jobs then.")
    ] = False


NO_NEEDS = Needs()


@app.command(name="list")
def list_workflows(*, asking: Asking = USUALLY, world: InWorld) -> None:
    """All registered workflows."""
    with control(asking, world) as plane:
        answer = plane.get("workflows")
    if asking.as_json:
        print_json(answer, world)
        return
    none = "there are no workflows yet: comfyfleet admin workflows register SLUG FILE"
    print_rows(answer["workflows"], COLUMNS, world, none=none)


@app.command
def show(slug: Slug, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """One workflow: its versions, its properties, what it needs."""
    with control(asking, world) as plane:
        answer = plane.get("workflows", slug)
    if asking.as_json:
        print_json(answer, world)
        return
    properties = answer.pop("properties", [])
    print_fields(answer, world)
    if properties:
        world.out.print()
        print_rows(properties, PROPERTY_COLUMNS, world, none="")


@app.command
def register(
    slug: Slug,
    file: Annotated[str, Parameter(help=FILE_HELP, allow_leading_hyphen=True)],
    /,
    *,
    property_: Annotated[
        tuple[str, ...],
        Parameter(name="--property", metavar="NAME:TYPE=NODE.INPUT", help=PROPERTY_HELP),
    ] = (),
    properties: Annotated[
        Path | None,
        Parameter(
            metavar="JSON", help="A file with a list of properties, with all that they have."
        ),
    ] = None,
    needs: Needs = NO_NEEDS,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Register a workflow, or a new version of one, from any file that ComfyUI saved."""
    opened = open_file(file, world.stdin)
    for note in opened.notes:
        world.warn(note)
    body: dict[str, Any] = {
        "document": opened.workflow or opened.prompt,
        "properties": [*_from_file(properties), *map(parse_property, property_)],
        "output_node_id": needs.output,
        "required_capabilities": sorted(needs.capability) or None,
        "run_limit_seconds": needs.run_limit,
        "price_tokens": needs.price,
        "break_effects": needs.break_effects or None,
    }
    given = {name: value for name, value in body.items() if value is not None}
    with control(asking, world) as plane:
        answer = plane.post("workflows", slug=slug, **given)
    _registered(answer, asking, world)


@app.command
def offer(
    slug: Slug,
    /,
    *,
    price: Annotated[int, Parameter(metavar="TOKENS", help="What a job costs; 0: nothing.")],
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Let customers use a workflow in graphs and pipelines, at a price."""
    with control(asking, world) as plane:
        answer = plane.patch("workflows", slug, price_tokens=price)
    _done(answer, f"workflow {slug} is offered at {price} tokens", asking, world)


@app.command
def withdraw(slug: Slug, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Offer a workflow no more; effects of it stay, and graph runs that go on."""
    with control(asking, world) as plane:
        answer = plane.patch("workflows", slug, is_withdrawn=True)
    _done(answer, f"workflow {slug} is not offered", asking, world)


@app.command
def activate(
    slug: Slug,
    /,
    *,
    version: Annotated[int | None, Parameter(help="The version that new jobs get.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Let new jobs use a workflow, or another version of it."""
    body = {} if version is None else {"version": version}
    with control(asking, world) as plane:
        answer = plane.post("workflows", slug, "activate", **body)
    _done(answer, f"workflow {slug} is active", asking, world)


@app.command
def deactivate(slug: Slug, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Take a workflow out of use; its jobs that wait stay where they are."""
    with control(asking, world) as plane:
        answer = plane.post("workflows", slug, "deactivate")
    _done(answer, f"workflow {slug} is not active", asking, world)


@app.command
def pause(slug: Slug, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Hand out no more jobs of a workflow; those that run are let end."""
    with control(asking, world) as plane:
        answer = plane.post("workflows", slug, "pause")
    _done(answer, f"workflow {slug} is paused", asking, world)


@app.command
def resume(slug: Slug, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Hand out jobs of a paused workflow again."""
    with control(asking, world) as plane:
        answer = plane.post("workflows", slug, "resume")
    _done(answer, f"workflow {slug} goes on", asking, world)


def parse_property(text: str) -> dict[str, str]:
    name, colon, rest = text.partition(":")
    kind, equals, binding = rest.partition("=")
    if not (name and colon and kind and equals and binding):
        raise InvalidInput(
            f"--property {text!r} must be NAME:TYPE=NODE.INPUT, such as prompt:text=6.text",
            hint="comfyfleet inspect FILE shows what a workflow takes, and under which names.",
        )
    return {"name": name.strip(), "type": kind.strip(), "binding": binding.strip()}


def _from_file(path: Path | None) -> list[Any]:
    if path is None:
        return []
    found = parse_json(read_file(path, bytes_max=PROPERTIES_BYTES_MAX), what=str(path))
    if not isinstance(found, list):
        raise InvalidInput(
            f"{path} must be a list of properties",
            hint=json.dumps([{"name": "prompt", "type": "text", "binding": "6.text"}]),
        )
    return found


def _registered(answer: dict[str, Any], asking: Asking, world: World) -> None:
    if asking.as_json:
        print_json(answer, world)
        return
    for warning in answer.get("warnings", ()):
        world.warn(warning)
    world.say(f"workflow {answer['slug']} has version {answer['version']}")


def _done(answer: dict[str, Any], said: str, asking: Asking, world: World) -> None:
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(said)
