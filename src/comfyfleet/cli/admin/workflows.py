"""`comfyfleet admin workflows`."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.files import FILE_HELP, open_file, read_file, read_structure
from comfyfleet.cli.world import InWorld, World
from comfyfleet.effects.model import PROPERTY_TYPES
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
WORKER_COLUMNS = (
    "worker:worker_id",
    "fleet",
    "can run:can_run",
    "missing nodes:node_types",
    "missing models:models",
    "missing capabilities:capabilities",
)
PROPERTY_COLUMNS = ("name", "type", "binding", "placeholder", "default", "required", "description")
PROPERTY_HELP = (
    "NAME:TYPE=NODE.INPUT, such as prompt:text=6.text or input:image=10.image. "
    "TYPE is text, number, integer, boolean, choice, seed, image, video or audio. Repeatable."
)

FROM_HELP = (
    "A file (YAML or JSON) that says it all for several workflows: a slug each, with its file, properties, "
    "output_node_id, price_tokens. With SLUG only that one is taken."
)
FROM_FIELDS = frozenset(
    {
        "file",  # else workflows/SLUG.json or SLUG.json, beside it
        "properties",
        "output_node_id",
        "required_capabilities",
        "run_limit_seconds",
        "price_tokens",
        "fleet",
        "break_effects",
    }
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

    def body(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "output_node_id": self.output,
            "required_capabilities": sorted(self.capability) or None,
            "run_limit_seconds": self.run_limit,
            "price_tokens": self.price,
            "break_effects": self.break_effects or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


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
def workers(slug: Slug, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Which workers of its fleets can run it, and what is missing where."""
    with control(asking, world) as plane:
        answer = plane.get("workflows", slug, "workers")
    if asking.as_json:
        print_json(answer, world)
        return
    rows = [{**each, **each["missing"]} for each in answer["workers"]]
    none = f"no worker is in a fleet that runs {slug}: comfyfleet admin fleets assign"
    print_rows(rows, WORKER_COLUMNS, world, none=none)


@app.command
def register(
    slug: Annotated[str | None, Parameter(help="The workflow's slug.")] = None,
    file: Annotated[str | None, Parameter(help=FILE_HELP, allow_leading_hyphen=True)] = None,
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
    from_: Annotated[
        Path | None,
        Parameter(name="--from", metavar="YAML", help=FROM_HELP),
    ] = None,
    needs: Needs = NO_NEEDS,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Register a workflow, or a new version of one, from any file that ComfyUI saved.

    ```
    comfyfleet admin workflows register soften soften.json --property input:image=1.image
    comfyfleet admin workflows register --from examples/properties.yaml
    ```
    """
    if from_ is not None:
        if file or property_ or properties or needs != NO_NEEDS:
            raise InvalidInput("--from says all of a workflow: leave out what else is given")
        bodies = read_registrations(from_, slug, world)
    elif slug is None or file is None:
        raise InvalidInput("name the workflow's slug and its file, or --from a file of several")
    else:
        named = [*_from_file(properties), *map(parse_property, property_)]
        bodies = [{"slug": slug, **needs.body(), **_document(file, world), "properties": named}]
    with control(asking, world) as plane:
        answers = [plane.post("workflows", **body) for body in bodies]
    if asking.as_json:
        print_json(answers[0] if from_ is None else {"workflows": answers}, world)
        return
    for answer in answers:
        _registered(answer, world)


def _document(file: str, world: World) -> dict[str, Any]:
    opened = open_file(file, world.stdin)
    for note in opened.notes:
        world.warn(note)
    return {"document": opened.workflow or opened.prompt}


def read_registrations(path: Path, only: str | None, world: World) -> list[dict[str, Any]]:
    """What a file says of each workflow, or of one: slug, document, properties and terms."""
    found = read_structure(path)
    if not isinstance(found, dict) or not found:
        raise InvalidInput(f"{path} must map the slugs of workflows to what they are")
    if only is not None and only not in found:
        close = difflib.get_close_matches(only, map(str, found)) or sorted(map(str, found))
        raise InvalidInput(f"{path} has no workflow {only}; it has {', '.join(close)}")
    return [
        _registration(path, str(slug), entry, world)
        for slug, entry in found.items()
        if only in (None, slug)
    ]


def _registration(path: Path, slug: str, entry: Any, world: World) -> dict[str, Any]:
    fields = {} if entry is None else entry
    if not isinstance(fields, dict):
        raise InvalidInput(f"{path}: {slug} must be an object with properties")
    unknown = sorted(map(str, fields.keys() - FROM_FIELDS))
    if unknown:
        known = ", ".join(sorted(FROM_FIELDS))
        raise InvalidInput(f"{path}: {slug} has {unknown[0]}, which is none of {known}")
    named = (
        [str(fields["file"])] if "file" in fields else [f"workflows/{slug}.json", f"{slug}.json"]
    )
    beside = [path.parent / name for name in named]
    file = next((each for each in beside if each.is_file()), beside[0])
    rest = {name: value for name, value in fields.items() if name != "file"}
    return {"slug": slug, **rest, **_document(str(file), world)}


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
    if kind.strip() not in PROPERTY_TYPES:
        close = difflib.get_close_matches(kind.strip(), PROPERTY_TYPES, n=1)
        raise InvalidInput(
            f"--property {text!r}: there is no type {kind.strip()}; there are {', '.join(PROPERTY_TYPES)}",
            **({"hint": f"Did you mean {close[0]}?"} if close else {}),
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


def _registered(answer: dict[str, Any], world: World) -> None:
    for warning in answer.get("warnings", ()):
        world.warn(warning)
    for note in answer.get("notes", ()):
        world.say(note)
    world.say(f"workflow {answer['slug']} has version {answer['version']}")


def _done(answer: dict[str, Any], said: str, asking: Asking, world: World) -> None:
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(said)
