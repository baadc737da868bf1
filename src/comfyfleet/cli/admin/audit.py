"""`comfyfleet admin audit`: who did what."""

from typing import Annotated

from cyclopts import Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_json, print_rows
from comfyfleet.cli.world import InWorld

COLUMNS = ("id", "at", "actor", "action", "subject", "details")


def audit(
    *,
    action: Annotated[
        str | None, Parameter(help="Such as submit, lease, complete, requeue.")
    ] = None,
    subject: Annotated[str | None, Parameter(help="Such as dispatch:12 or worker:gpu-7.")] = None,
    actor: Annotated[str | None, Parameter(help="Such as admin, sweep or worker:gpu-7.")] = None,
    before: Annotated[int | None, Parameter(help="Only older ones than this number.")] = None,
    limit: Annotated[int, Parameter(help="At most so many.")] = 50,
    export: Annotated[
        bool, Parameter(help="All that fit, one JSON object per line, however many.")
    ] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """The audit log, the newest first."""
    wanted = {"action": action, "subject": subject, "actor": actor, "before": before}
    with control(asking, world) as plane:
        if export:
            for line in plane.lines("audit", "export", **wanted):
                world.stdout.write(f"{line}\n".encode())
            world.stdout.flush()
            return
        answer = plane.get("audit", **wanted, limit=limit)
    if asking.as_json:
        print_json(answer, world)
        return
    print_rows(answer["entries"], COLUMNS, world, none="nothing of that kind was noted")
    if answer.get("next"):
        world.say(f"older ones: --before {answer['next']}")
