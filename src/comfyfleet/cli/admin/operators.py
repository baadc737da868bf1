"""`comfyfleet admin operators`."""

from typing import Annotated, Literal

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_json, print_rows
from comfyfleet.cli.world import InWorld

app = App(name="operators", help="People who run the fleet, each with a key and a role.")
COLUMNS = (
    "name",
    "role",
    "prefix",
    "created:created_at",
    "by:created_by",
    "used:last_used_at",
    "revoked:revoked_at",
)
Name = Annotated[str, Parameter(help="Their name; the audit tells it.")]


@app.command
def add(
    name: Name,
    /,
    *,
    role: Annotated[
        Literal["viewer", "operator", "owner"],
        Parameter(help="viewer reads; operator also acts; owner also has operators and money."),
    ] = "operator",
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Give a person a key of their own. It is shown this once."""
    with control(asking, world) as plane:
        answer = plane.post("operators", name=name, role=role)
    if asking.as_json:
        print_json(answer, world)
        return
    world.say(f"{answer['role']} {answer['name']}; the key, shown this once:")
    world.stdout.write(f"{answer['key']}\n".encode())
    world.stdout.flush()


@app.command(name="list")
def list_operators(*, asking: Asking = USUALLY, world: InWorld) -> None:
    """Operators with their roles, revoked ones among them."""
    with control(asking, world) as plane:
        answer = plane.get("operators")
    if asking.as_json:
        print_json(answer, world)
        return
    print_rows(answer["operators"], COLUMNS, world, none="there is nobody but the admin key")


@app.command
def revoke(name: Name, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """End a person's key, at once and on every control plane."""
    with control(asking, world) as plane:
        answer = plane.post("operators", name, "revoke")
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(f"the key of {answer['name']} is revoked")
