"""`comfyfleet admin fleets`."""

from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.world import InWorld, World

app = App(name="fleets", help="Workers that can stand in for each other: make, cap, assign.")
PRODUCTION = "production"
Slug = Annotated[str, Parameter(help="The fleet's slug.")]
Stage = Annotated[str, Parameter(help="Its stage.")]
COLUMNS = ("slug", "stage", "workers", "max_workers", "approval", "workflows", "created:created_at")

SWITCH_COLUMNS = ("model", "costs_s:seconds", "run_s:run_seconds", "is_free", "runs")


@app.command(name="list")
def list_fleets(*, asking: Asking = USUALLY, world: InWorld) -> None:
    """All fleets, with the workflows that are assigned to them."""
    with control(asking, world) as plane:
        answer = plane.get("fleets")
    if asking.as_json:
        print_json(answer, world)
        return
    none = "there are no fleets yet: comfyfleet admin fleets create SLUG"
    print_rows(answer["fleets"], COLUMNS, world, none=none)


@app.command
def show(
    slug: Slug, /, *, stage: Stage = PRODUCTION, asking: Asking = USUALLY, world: InWorld
) -> None:
    """One fleet, with what a switch to each of its models costs as its runs tell."""
    with control(asking, world) as plane:
        answer = plane.get("fleets", slug, stage)
    if asking.as_json:
        print_json(answer, world)
        return
    switches = answer.pop("model_switches", [])
    print_fields(answer, world)
    world.out.print("\nSwitches of models")
    if switches:
        print_rows(switches, SWITCH_COLUMNS, world, none="")
    else:
        world.out.print("What they cost is not known yet: it takes some tens of runs.")


@app.command
def create(
    slug: Slug,
    /,
    *,
    stage: Stage = PRODUCTION,
    max_workers: Annotated[
        int | None, Parameter(help="At most so many workers; else as the settings say.")
    ] = None,
    approval: Annotated[
        Literal["auto", "manual"],
        Parameter(help="manual: who joins gets no job before `admin workers approve`."),
    ] = "auto",
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Make a fleet. Its secret, with which workers join, is shown this once."""
    body = {} if max_workers is None else {"max_workers": max_workers}
    with control(asking, world) as plane:
        answer = plane.post("fleets", slug=slug, stage=stage, approval=approval, **body)
    _show_secret(answer, asking, world)


@app.command
def rotate_secret(
    slug: Slug, /, *, stage: Stage = PRODUCTION, asking: Asking = USUALLY, world: InWorld
) -> None:
    """Make a new secret. Workers that have joined go on with keys of their own."""
    with control(asking, world) as plane:
        answer = plane.post("fleets", slug, stage, "rotate-secret")
    _show_secret(answer, asking, world)


@app.command
def cap(
    slug: Slug,
    max_workers: Annotated[int, Parameter(help="At most so many workers.")],
    /,
    *,
    stage: Stage = PRODUCTION,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Limit a fleet's workers. A lower cap sends nobody away; it lets nobody else in."""
    with control(asking, world) as plane:
        answer = plane.put("fleets", slug, stage, "cap", max_workers=max_workers)
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(f"fleet {slug}/{stage} takes at most {max_workers} workers")


@app.command
def approval(
    slug: Slug,
    approval: Annotated[Literal["auto", "manual"], Parameter(help="At once, or by an operator.")],
    /,
    *,
    stage: Stage = PRODUCTION,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Set how workers that join from now on are approved: auto or manual."""
    with control(asking, world) as plane:
        answer = plane.put("fleets", slug, stage, "approval", approval=approval)
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(f"workers that join {slug}/{stage} are approved: {approval}")


@app.command
def assign(
    slug: Slug,
    /,
    *workflows: Annotated[str, Parameter(help="Slugs of workflows.")],
    stage: Stage = PRODUCTION,
    add: Annotated[bool, Parameter(help="Keep those that it has.")] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Set which workflows a fleet runs: these and no others, unless --add is given."""
    with control(asking, world) as plane:
        kept = plane.get("fleets", slug, stage)["workflows"] if add else []
        wanted = sorted({*kept, *workflows})
        answer = plane.put("fleets", slug, stage, "workflows", workflow_slugs=wanted)
    if asking.as_json:
        print_json(answer, world)
        return
    for warning in answer.get("warnings", ()):
        world.warn(warning)
    told = f"fleet {slug}/{stage} runs {', '.join(wanted) or 'nothing'}"
    if removed := answer["removed"]:
        told += f", and no longer {', '.join(removed)}"
    world.say(told)


def _show_secret(answer: dict[str, Any], asking: Asking, world: World) -> None:
    if asking.as_json:
        print_json(answer, world)
        return
    world.say(f"fleet {answer['slug']}/{answer['stage']}; its secret, shown this once:")
    world.stdout.write(f"{answer['secret']}\n".encode())
    world.stdout.flush()
    world.say(
        f"workers join with: COMFYFLEET_FLEET_SECRET=… comfyfleet worker --control URL "
        f"--fleet {answer['slug']} --stage {answer['stage']} --backend URL"
    )
