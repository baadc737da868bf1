"""`comfyfleet admin maintenance | poisoned | reconcile`: the control plane as a whole."""

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, Control, control
from comfyfleet.cli.admin.dispatches import print_page
from comfyfleet.cli.admin.showing import print_json
from comfyfleet.cli.world import InWorld, counted


def maintenance(
    wanted: Annotated[Literal["on", "off"] | None, Parameter(help="Without it, only look.")] = None,
    /,
    *,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Stop handing out jobs, or go on. What runs is let end."""
    with control(asking, world) as plane:
        if wanted is None:
            answer = plane.get("maintenance")
        else:
            answer = plane.post("maintenance", on=wanted == "on")
    if asking.as_json:
        print_json(answer, world)
    elif answer["on"]:
        world.say("maintenance is on: running jobs end, and none begins")
    else:
        world.say("maintenance is off: jobs are handed out")


def poisoned(
    *,
    before: Annotated[int | None, Parameter(help="Only older ones than this number.")] = None,
    limit: Annotated[int, Parameter(help="At most so many.")] = 50,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Jobs that were set aside because they came back too often.

    `comfyfleet admin dispatches show ID` tells what happened each time; `retry` tries once more.
    """
    with control(asking, world) as plane:
        answer = plane.get("dispatches", poisoned=True, before=before, limit=limit)
    print_page(answer, asking, world, none="no job is set aside")


def reconcile(*, asking: Asking = USUALLY, world: InWorld) -> None:
    """Look for jobs and dispatches that don't agree, and put them right. Safe at any time."""
    with control(asking, world) as plane:
        answer = _reconciled(plane)
    if asking.as_json:
        print_json(answer, world)
        return
    ended = counted(answer["dispatches_ended"], "dispatch", "dispatches")
    made = counted(answer["dispatches_made"], "dispatch", "dispatches")
    world.say(f"{ended} ended, {made} made")
    if answer.get("pools_skipped"):
        world.warn(f"{counted(answer['pools_skipped'], 'pool', 'pools')} could not be reached")


def _reconciled(plane: Control) -> dict[str, Any]:
    """Each call reads a part of a large queue."""
    answer = plane.post("reconcile")
    while following := answer.get("next"):
        more = plane.post("reconcile", after=following)
        answer = {
            name: more[name] if name == "next" else answer[name] + more[name] for name in answer
        }
    return answer
