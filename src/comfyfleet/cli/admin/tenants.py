"""`comfyfleet admin tenants`."""

import time
from typing import Annotated, Any

from cyclopts import App, Parameter

from comfyfleet.cli.admin import keys
from comfyfleet.cli.admin.client import USUALLY, Asking, Control, control
from comfyfleet.cli.admin.people import TenantId, UserId, user_of
from comfyfleet.cli.admin.showing import print_fields, print_json, print_rows
from comfyfleet.cli.world import InWorld, World
from comfyfleet.kernel.errors import InvalidInput, RunTimedOut, Unavailable

app = App(name="tenants", help="Who owns jobs and pays for them: make, limit, credit, erase.")
app.command(keys.app)
COLUMNS = ("id", "name", "pool", "retention_days", "max_queued", "created:created_at", "erased_at")
USER_COLUMNS = ("id", "email", "name", "is_active", "balance", "created:created_at")
PAUSE_SECONDS = 1.0
WAIT_SECONDS_MAX = 600.0


@app.command(name="list")
def list_tenants(*, asking: Asking = USUALLY, world: InWorld) -> None:
    """All tenants."""
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
    email: Annotated[str | None, Parameter(help="Of its first user.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Make a tenant with its first user, in the pool with the fewest. The key is shown this once."""
    body = {} if email is None else {"email": email}
    with control(asking, world) as plane:
        answer = plane.post("tenants", name=name, **body)
    if asking.as_json:
        print_json(answer, world)
        return
    world.say(f"tenant {answer['id']} ({name}) with user {answer['user_id']}")
    world.say("the user's key, shown this once:")
    world.stdout.write(f"{answer['key']}\n".encode())
    world.stdout.flush()


@app.command
def show(tenant: TenantId, /, *, asking: Asking = USUALLY, world: InWorld) -> None:
    """A tenant, its limits, and its users with their balances."""
    with control(asking, world) as plane:
        answer = plane.get("tenants", tenant)
        users, problem = _users(plane, tenant)
    if asking.as_json:
        print_json({**answer, "users": users}, world)
    else:
        print_fields(answer, world)
    if problem is not None:
        raise Unavailable(
            f"its users and balances are in the pool {answer['pool']}: {problem.message}",
            hint="The control plane's log says why.",
        )
    if not asking.as_json:
        world.out.print()
        print_rows(users or (), USER_COLUMNS, world, none="it has no users")


def _users(plane: Control, tenant: str) -> tuple[list[dict[str, Any]] | None, Unavailable | None]:
    """With their balances; or None, and why their pool can't be read."""
    try:
        users = plane.get("tenants", tenant, "users")["users"]
        wallets = [plane.get("tenants", tenant, "wallets", each["id"]) for each in users]
    except Unavailable as error:
        return None, error
    pairs = zip(users, wallets, strict=True)
    return [{**user, "balance": wallet["balance"]} for user, wallet in pairs], None


@app.command
def limits(
    tenant: TenantId,
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
    wanted = {
        "min_priority": min_priority,
        "max_priority": max_priority,
        "max_queued": max_queued,
    }
    with control(asking, world) as plane:
        answer = plane.put("tenants", tenant, "limits", **wanted)
    most = "as many jobs as the settings say" if max_queued is None else f"{max_queued} jobs"
    said = f"tenant {tenant}: priorities {min_priority} to {max_priority}, at most {most} may wait"
    _done(answer, said, asking, world)


@app.command
def retention(
    tenant: TenantId,
    days: Annotated[int | None, Parameter(help="Without it, as the settings say.")] = None,
    /,
    *,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Set after how many days a tenant's media and files go. The ledger stays."""
    with control(asking, world) as plane:
        answer = plane.put("tenants", tenant, "retention", retention_days=days)
    kept = "as the settings say" if days is None else f"for {days} days"
    _done(answer, f"tenant {tenant}: media and files are kept {kept}", asking, world)


@app.command
def quota(
    tenant: TenantId,
    most_bytes: Annotated[
        int | None, Parameter(help="Without it, only look; 0 lets nothing in.")
    ] = None,
    /,
    *,
    as_settings: Annotated[bool, Parameter(help="No quota of its own any more.")] = False,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """How many bytes a tenant stores, and how many it may; or set that."""
    with control(asking, world) as plane:
        if as_settings or most_bytes is not None:
            given = None if as_settings else most_bytes
            plane.put("tenants", tenant, "quota", max_storage_bytes=given)
        answer = plane.get("tenants", tenant, "storage")
    said = f"{answer['used_bytes']:,} of {answer['max_storage_bytes']:,} bytes are used"
    _done(answer, f"tenant {tenant}: {said}", asking, world)


@app.command
def credit(
    tenant: TenantId,
    amount: Annotated[int, Parameter(help="In tokens.")],
    /,
    *,
    payment: Annotated[
        str, Parameter(metavar="ID", help="The payment provider's id: the same one counts once.")
    ],
    user: UserId = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Credit a payment to a user's wallet, once however often it is told."""
    with control(asking, world) as plane:
        owner = user_of(plane, tenant, user)
        answer = plane.post(
            "tenants",
            tenant,
            "wallets",
            owner,
            "credits",
            amount=amount,
            provider_transaction_id=payment,
        )
    _done(answer, f"user {owner} has {answer['balance']} tokens", asking, world)


@app.command
def erase(
    tenant: TenantId,
    /,
    *,
    yes: Annotated[
        bool, Parameter(help="There is no way back; without it nothing happens.")
    ] = False,
    wait: Annotated[
        bool, Parameter(negative="--no-wait", help="Come back when all is gone.")
    ] = True,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Remove a tenant's private data: files, media, prompts, properties, events, webhooks, keys.

    Active jobs are cancelled and refunded. The ledger stays. Asked again, it goes on where it was.
    """
    with control(asking, world) as plane:
        answer = plane.get("tenants", tenant)
        if not yes:
            raise InvalidInput(
                f"tenant {tenant} ({answer['name']}) would be erased, and there is no way back",
                hint=f"comfyfleet admin tenants erase {tenant} --yes",
            )
        answer = plane.post("tenants", tenant, "erase")
        if wait:
            answer = _erased(plane, tenant)
    said = "is erased; its ledger is kept" if answer["erased_at"] else "is being erased"
    _done(answer, f"tenant {tenant} {said}", asking, world)


def _erased(plane: Control, tenant: str) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < deadline:
        answer = plane.get("tenants", tenant)
        if answer["erased_at"]:
            return answer
        time.sleep(PAUSE_SECONDS)
    raise RunTimedOut(
        f"tenant {tenant} is still being erased after {WAIT_SECONDS_MAX:g} s; it goes on",
        hint=f"comfyfleet admin tenants show {tenant} tells when it is done.",
    )


def _done(answer: dict[str, Any], said: str, asking: Asking, world: World) -> None:
    if asking.as_json:
        print_json(answer, world)
    else:
        world.say(said)
