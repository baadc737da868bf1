"""`comfyfleet admin effects`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, Control, control
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.admin.values import parse_values
from comfyfleet.cli.world import InWorld, World
from comfyfleet.kernel.errors import InvalidInput

app = App(
    name="effects", help="What customers pick: a workflow with a price and values of its own."
)
Slug = Annotated[str, Parameter(help="The effect's slug.")]
COLUMNS = (
    "slug",
    "workflow:workflow_slug",
    "price:price_tokens",
    "published",
    "typical_seconds",
    "title",
)


@Parameter(name="*")
@dataclass(frozen=True)
class Face:
    """All that customers see of an effect; what is left out stays as it is."""

    title: Annotated[str | None, Parameter(help="For people; else the slug.")] = None
    description: Annotated[str | None, Parameter(help="For people.")] = None
    preview_url: Annotated[
        str | None, Parameter(metavar="URL", help="A picture or video of the result.")
    ] = None
    price: Annotated[int | None, Parameter(metavar="TOKENS", help="What a job costs.")] = None
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            metavar="NAME=VALUE",
            help="In place of the workflow's default. Repeatable.",
        ),
    ] = ()
    lock: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="NAME", help="A property that customers neither see nor set. Repeatable."
        ),
    ] = ()
    stage: Annotated[str | None, Parameter(help="Of the fleets that run it.")] = None
    provider: Annotated[
        Literal["self_hosted", "cloud"] | None, Parameter(help="Which kind of backend runs it.")
    ] = None
    max_upload: Annotated[
        int | None, Parameter(metavar="BYTES", help="Of the media sent to it.")
    ] = None
    media_type: Annotated[
        tuple[str, ...], Parameter(help="Such as image/png; else all of its kind. Repeatable.")
    ] = ()

    keep_metadata: Annotated[
        bool | None, Parameter(help="Results carry the prompt and workflow that made them.")
    ] = None

    def body(self, plane: Control, workflow: str) -> dict[str, Any]:
        wanted: dict[str, Any] = {
            "title": self.title,
            "description": self.description,
            "preview_url": self.preview_url,
            "price_tokens": self.price,
            "locked": list(self.lock) or None,
            "stage": self.stage,
            "provider": self.provider,
            "max_upload_bytes": self.max_upload,
            "media_types": list(self.media_type) or None,
            "keep_metadata": self.keep_metadata,
        }
        if self.set_:
            properties = plane.get("workflows", workflow)["properties"]
            wanted["overrides"] = parse_values(self.set_, properties, workflow)
        return {name: value for name, value in wanted.items() if value is not None}


NO_FACE = Face()


@app.command(name="list")
def list_effects(
    *,
    workflow: Annotated[str | None, Parameter(help="Only of this one.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """All effects, published or not."""
    with control(asking, world) as plane:
        answer = plane.get("effects", workflow=workflow)
    if asking.as_json:
        print_json(answer, world)
        return
    none = "there are no effects yet: comfyfleet admin effects create SLUG WORKFLOW"
    print_rows(answer["effects"], COLUMNS, world, none=none)


@app.command
def show(slug: Slug, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """One effect: its price, its values, how long it takes."""
    with control(asking, world) as plane:
        answer = plane.get("effects", slug)
    if asking.as_json:
        print_json(answer, world)
    else:
        print_fields(answer, world)


@app.command
def create(
    slug: Slug,
    workflow: Annotated[str, Parameter(help="The slug of the workflow behind it.")],
    /,
    *,
    publish_: Annotated[
        bool, Parameter(name="--publish", help="Let customers see it at once.")
    ] = False,
    face: Face = NO_FACE,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Make an effect of a registered workflow."""
    with control(asking, world) as plane:
        body = face.body(plane, workflow)
        answer = plane.post(
            "effects", slug=slug, workflow_slug=workflow, published=publish_, **body
        )
    seen = "is published" if publish_ else f"is made: comfyfleet admin effects publish {slug}"
    _done(answer, f"effect {slug} ({answer['id']}) {seen}", asking, world)


@app.command
def change(
    slug: Slug, /, *, face: Face = NO_FACE, asking: Asking = USUALLY, world: InWorld
) -> None:
    """Change what is named, and nothing else. --set replaces all values of its own."""
    if face == NO_FACE:
        raise InvalidInput(
            "nothing is named that is to change", hint="comfyfleet admin effects change --help"
        )
    with control(asking, world) as plane:
        workflow = plane.get("effects", slug)["workflow_slug"]
        answer = plane.patch("effects", slug, **face.body(plane, workflow))
    _done(answer, f"effect {slug} is changed; jobs that were submitted are not", asking, world)


@app.command
def publish(slug: Slug, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Let customers see and use an effect."""
    with control(asking, world) as plane:
        answer = plane.post("effects", slug, "publish")
    _done(answer, f"effect {slug} is published", asking, world)


@app.command
def withdraw(slug: Slug, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Take an effect out of the catalogue; jobs that were submitted go on."""
    with control(asking, world) as plane:
        answer = plane.post("effects", slug, "withdraw")
    _done(answer, f"effect {slug} is withdrawn", asking, world)


def _done(answer: dict[str, Any], said: str, asking: Asking, world: World) -> None:
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(said)
