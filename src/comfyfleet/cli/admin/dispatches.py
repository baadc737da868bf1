"""`comfyfleet admin dispatches`."""

from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.world import InWorld, World

app = App(name="dispatches", help="The queue: look, understand, put right.")
DispatchId = Annotated[int, Parameter(help="The dispatch's number.")]
COLUMNS = (
    "id",
    "status",
    "workflow",
    "priority",
    "attempts",
    "worker:worker_id",
    "queued:queued_at",
    "seconds:duration_seconds",
    "last_error",
)
ATTEMPT_COLUMNS = ("at", "actor", "action", "details")


@app.command(name="list")
def list_dispatches(
    *,
    status: Annotated[
        Literal["queued", "leased", "completed", "failed", "cancelled"] | None,
        Parameter(help="Only these."),
    ] = None,
    workflow: Annotated[str | None, Parameter(help="Only of this workflow.")] = None,
    worker: Annotated[str | None, Parameter(help="Only of this worker.")] = None,
    tenant: Annotated[str | None, Parameter(metavar="ID", help="Only of this tenant.")] = None,
    before: Annotated[int | None, Parameter(help="Only older ones than this number.")] = None,
    limit: Annotated[int, Parameter(help="At most so many.")] = 50,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Dispatches, the newest first."""
    with control(asking, world) as plane:
        answer = plane.get(
            "dispatches",
            status=status,
            workflow=workflow,
            worker=worker,
            tenant=tenant,
            before=before,
            limit=limit,
        )
    print_page(answer, asking, world, none="there are no such dispatches")


@app.command
def show(dispatch: DispatchId, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """One dispatch with all its attempts, and why it isn't running if it isn't."""
    with control(asking, world) as plane:
        answer = plane.get("dispatches", dispatch)
    if asking.as_json:
        print_json(answer, world)
        return
    print_fields({**answer["dispatch"], "why": answer.get("why")}, world)
    world.out.print()
    print_rows(answer["attempts"], ATTEMPT_COLUMNS, world, none="nothing is known of its attempts")


@app.command
def why(dispatch: DispatchId, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Why a job is not running, in one sentence."""
    with control(asking, world) as plane:
        answer = plane.get("dispatches", dispatch, "why")
    if asking.as_json:
        print_json(answer, world)
        return
    world.stdout.write(f"{answer['why']}\n".encode())
    world.stdout.flush()


@app.command
def retry(dispatch: DispatchId, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """Submit the same prompt and files again, as a new job."""
    with control(asking, world) as plane:
        answer = plane.post("dispatches", dispatch, "retry")
    if asking.as_json:
        print_json(answer, world)
        return
    world.say("submitted again; the new job:")
    world.stdout.write(f"{answer['job_id']}\n".encode())
    world.stdout.flush()


@app.command
def cancel(dispatch: DispatchId, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """End a job that waits; one that runs is told with its worker's next heartbeat."""
    with control(asking, world) as plane:
        answer = plane.post("dispatches", dispatch, "cancel")
    told = "its worker will be told" if answer.get("cancel_requested") else answer.get("status")
    _done(answer, f"dispatch {dispatch}: {told}", asking, world)


@app.command
def reprioritise(
    dispatch: DispatchId,
    priority: Annotated[int, Parameter(help="Higher goes first.", allow_leading_hyphen=True)],
    /,
    *,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Give a job that waits another priority."""
    with control(asking, world) as plane:
        answer = plane.post("dispatches", dispatch, "reprioritise", priority=priority)
    _done(answer, f"dispatch {dispatch} has priority {priority}", asking, world)


def print_page(answer: dict[str, Any], asking: Asking, world: World, *, none: str) -> None:
    if asking.as_json:
        print_json(answer, world)
        return
    print_rows(answer["dispatches"], COLUMNS, world, none=none)
    if answer.get("next"):
        world.say(f"older ones: --before {answer['next']}")


def _done(answer: dict[str, Any], said: str, asking: Asking, world: World) -> None:
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(said)
