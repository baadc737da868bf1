"""`comfyfleet admin tenants`."""

from typing import Annotated

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_json, print_rows
from comfyfleet.cli.world import InWorld

app = App(name="tenants", help="Who owns jobs.")
COLUMNS = ("id", "name", "pool", "min_priority", "max_priority", "max_queued", "created:created_at")


@app.command(name="list")
def list_tenants(*, asking: Asking = USUALLY, world: InWorld) -> None:
    """All tenants, with their limits."""
    with control(asking, world) as plane:
        answer = plane.get("tenants")
    if asking.as_json:
        print_json(answer, world)
        return
    none = "there are no tenants yet: comfyfleet admin tenants create NAME"
    print_rows(answer["tenants"], COLUMNS, world, none=none)


@app.command
def create(
    name: Annotated[str, Parameter(help="For people; the id is what counts.")],
    /,
    *,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Make a tenant, in the pool with the fewest."""
    with control(asking, world) as plane:
        answer = plane.post("tenants", name=name)
    if asking.as_json:
        print_json(answer, world)
        return
    world.say(f"tenant {name}; its id:")
    world.stdout.write(f"{answer['id']}\n".encode())
    world.stdout.flush()


@app.command
def limits(
    tenant: Annotated[str, Parameter(help="The tenant's id.")],
    /,
    *,
    min_priority: Annotated[int, Parameter(help="The lowest priority of its jobs.")] = -10,
    max_priority: Annotated[int, Parameter(help="The highest priority of its jobs.")] = 10,
    max_queued: Annotated[
        int | None, Parameter(help="At most so many jobs may wait; else as the settings say.")
    ] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Set the range of a tenant's priorities, and how many of its jobs may wait."""
    with control(asking, world) as plane:
        answer = plane.put(
            "tenants",
            tenant,
            "limits",
            min_priority=min_priority,
            max_priority=max_priority,
            max_queued=max_queued,
        )
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(f"tenant {tenant}: priorities {min_priority} to {max_priority}")
