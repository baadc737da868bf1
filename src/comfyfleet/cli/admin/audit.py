"""`comfyfleet admin audit`: who did what."""

from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_json, print_rows
from comfyfleet.cli.world import InWorld

COLUMNS = ("id", "at", "actor", "action", "subject", "details")


@Parameter(name="*")
@dataclass(frozen=True)
class Wanted:
    """Which lines."""

    action: Annotated[str | None, Parameter(help="Such as submit, lease, complete, requeue.")] = (
        None
    )
    subject: Annotated[str | None, Parameter(help="Such as dispatch:12 or worker:gpu-7.")] = None
    actor: Annotated[
        str | None, Parameter(help="Such as operator:ada, admin, sweep or worker:gpu-7.")
    ] = None
    tenant: Annotated[str | None, Parameter(metavar="ID", help="Only what concerns it.")] = None
    since: Annotated[
        str | None, Parameter(metavar="TIME", help="Not before then: 2026-11-15, or with a time.")
    ] = None
    until: Annotated[str | None, Parameter(metavar="TIME", help="Before then.")] = None
    before: Annotated[int | None, Parameter(help="Only older ones than this number.")] = None


ALL = Wanted()


def audit(
    *,
    wanted: Wanted = ALL,
    limit: Annotated[int, Parameter(help="At most so many.")] = 50,
    export: Annotated[
        bool, Parameter(help="All that fit, one JSON object per line, however many.")
    ] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """The audit log, the newest first."""
    query = asdict(wanted)
    with control(asking, world) as plane:
        if export:
            for line in plane.lines("audit", "export", **query):
                world.stdout.write(f"{line}\n".encode())
            world.stdout.flush()
            return
        answer = plane.get("audit", **query, limit=limit)
    if asking.as_json:
        print_json(answer, world)
        return
    print_rows(answer["entries"], COLUMNS, world, none="nothing of that kind was noted")
    if answer.get("next"):
        world.say(f"older ones: --before {answer['next']}")
