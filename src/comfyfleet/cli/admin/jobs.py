"""`comfyfleet admin jobs`: jobs of all tenants, and what was sent to backends for them."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.world import InWorld
from comfyfleet.kernel.errors import NotFound

app = App(name="jobs", help="Jobs of all tenants: look, understand.")
LIST_COLUMNS = (
    "id",
    "status",
    "workflow",
    "tenant:tenant_id",
    "attempt",
    "submitted:submitted_at",
    "error",
)
OUTPUT_COLUMNS = ("filename", "size", "content_type", "url")
VALUE_COLUMNS = ("node_id", "name", "value")


@app.command
def show(
    job: Annotated[str, Parameter(help="The job's id.")],
    /,
    *,
    tenant: Annotated[
        str | None, Parameter(metavar="ID", help="Only if it is this tenant's.")
    ] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """A job of any tenant, its outputs, and why it isn't running if it isn't."""
    with control(asking, world) as plane:
        answer = plane.get("jobs", job, tenant_id=tenant)
    if asking.as_json:
        print_json(answer, world)
        return
    outputs = answer.pop("outputs", [])
    values = answer.pop("values", [])
    dispatch = answer.pop("dispatch", None) or {}
    keep = ("id", "worker_id", "attempts", "duration_seconds", "last_error")
    print_fields({**answer, **{f"dispatch {name}": dispatch.get(name) for name in keep}}, world)
    if outputs:
        world.out.print()
        print_rows(outputs, OUTPUT_COLUMNS, world, none="")
    if values:
        world.out.print()
        print_rows(values, VALUE_COLUMNS, world, none="")


@Parameter(name="*")
@dataclass(frozen=True)
class Wanted:
    """Which jobs."""

    status: Annotated[
        Literal["queued", "processing", "completed", "failed", "cancelled"] | None,
        Parameter(help="Only these."),
    ] = None
    tenant: Annotated[str | None, Parameter(metavar="ID", help="Only of this tenant.")] = None
    workflow: Annotated[str | None, Parameter(help="Only of this workflow.")] = None
    worker: Annotated[str | None, Parameter(help="Only those that it had last.")] = None
    since: Annotated[
        str | None, Parameter(metavar="TIME", help="Only those submitted since: 2026-11-15.")
    ] = None
    after: Annotated[str | None, Parameter(help="Go on after a page, as it says.")] = None


ALL = Wanted()


@app.command(name="list")
def list_jobs(
    *,
    wanted: Wanted = ALL,
    limit: Annotated[int, Parameter(help="At most so many.")] = 50,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Jobs of all tenants, the newest first."""
    with control(asking, world) as plane:
        answer = plane.get("jobs", **asdict(wanted), limit=limit)
    if asking.as_json:
        print_json(answer, world)
        return
    print_rows(answer["jobs"], LIST_COLUMNS, world, none="there are no such jobs")
    if down := answer.get("pools_left_out"):
        world.warn(f"left out, because they can't be reached: jobs of the pools {', '.join(down)}")
    if answer.get("next"):
        world.say(f"older ones: --after {answer['next']}")


@app.command
def prompt(
    job: Annotated[str, Parameter(help="The job's id.")],
    /,
    *,
    attempt: Annotated[
        int | None, Parameter(help="Which attempt; else the last that was told.")
    ] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """The prompt as it was sent to the backend, as JSON."""
    with control(asking, world) as plane:
        answer = plane.get("jobs", job, "attempts")
    if asking.as_json:
        print_json(answer, world)
        return
    sent = [each for each in answer["attempts"] if attempt in (None, each["attempt"])]
    if sent:
        world.say(f"attempt {sent[-1]['attempt']} on {sent[-1]['worker_id']}")
    else:
        world.say("no worker has told what it sent; as workers get it:")
    found = sent[-1]["prompt"] if sent else answer["prompt"]
    if found is None:
        raise NotFound("the prompt was removed, as the job ended long ago")
    print_json(found, world)
