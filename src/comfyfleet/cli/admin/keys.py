"""`comfyfleet admin tenants keys`."""

from typing import Annotated, Any

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.people import TenantId, UserId, user_of
from comfyfleet.cli.admin.showing import print_json, print_rows
from comfyfleet.cli.world import InWorld

app = App(name="keys", help="Keys of a tenant's users, with which they call the API.")
COLUMNS = ("id", "name", "prefix", "scopes", "created:created_at", "expires_at", "revoked_at")


@app.command(name="list")
def list_keys(
    tenant: TenantId, /, *, user: UserId = None, asking: Asking = USUALLY, world: InWorld
) -> None:
    """A user's keys, by their first characters, revoked ones among them."""
    with control(asking, world) as plane:
        answer = plane.get("tenants", tenant, "users", user_of(plane, tenant, user), "keys")
    if asking.as_json:
        print_json(answer, world)
        return
    print_rows(answer["keys"], COLUMNS, world, none="there are no keys")


@app.command
def create(
    tenant: TenantId,
    /,
    *,
    name: Annotated[str, Parameter(help="To tell it from others.")] = "key",
    scope: Annotated[
        tuple[str, ...], Parameter(help="read, write, keys; all unless named. Repeatable.")
    ] = (),
    expires: Annotated[
        str | None, Parameter(metavar="TIME", help="As 2027-01-31T12:00:00Z; else never.")
    ] = None,
    user: UserId = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Make a key for a user. It is shown this once."""
    wanted: dict[str, Any] = {"name": name, "scopes": list(scope), "expires_at": expires}
    given = {field: value for field, value in wanted.items() if value}
    with control(asking, world) as plane:
        owner = user_of(plane, tenant, user)
        answer = plane.post("tenants", tenant, "users", owner, "keys", **given)
    if asking.as_json:
        print_json(answer, world)
        return
    world.say(f"key {answer['id']} of user {owner}, shown this once:")
    world.stdout.write(f"{answer['key']}\n".encode())
    world.stdout.flush()


@app.command
def revoke(
    tenant: TenantId,
    key: Annotated[str, Parameter(help="The key's id, as list shows it.")],
    /,
    *,
    user: UserId = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """End a key at once."""
    with control(asking, world) as plane:
        owner = user_of(plane, tenant, user)
        answer = plane.post("tenants", tenant, "users", owner, "keys", key, "revoke")
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(f"key {answer['prefix']}… is revoked")
