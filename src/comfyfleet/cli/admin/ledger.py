"""`comfyfleet admin ledger`."""

from typing import Annotated

from cyclopts import App, Parameter

from comfyfleet.cli.admin.client import USUALLY, Asking, control
from comfyfleet.cli.admin.showing import print_json, print_rows
from comfyfleet.cli.world import InWorld, counted
from comfyfleet.kernel.errors import Conflict, Unavailable

app = App(name="ledger", help="Wallets, their transactions, and whether they add up.")
COLUMNS = ("fault", "tenant:tenant_id", "user:user_id", "job:job_id", "message")


@app.command
def verify(
    *,
    tenant: Annotated[str | None, Parameter(metavar="ID", help="Only this one's.")] = None,
    asking: Asking = USUALLY,
    world: InWorld,
) -> None:
    """Check balances against transactions and transactions against jobs. Changes nothing.

    Ends with 1 if something does not add up, or a pool can't be reached; the others are verified.
    """
    with control(asking, world) as plane:
        answer = plane.get("ledger", tenant_id=tenant)
    if asking.as_json:
        print_json(answer, world)
    elif answer["is_sound"]:
        world.say("all adds up")
    else:
        print_rows(answer["drifts"], COLUMNS, world, none="all that could be read adds up")
    down = ", ".join(answer.get("pools_left_out", ()))
    if down and answer["found"]:
        world.warn(f"not verified, because they can't be reached: the pools {down}")
    elif down:
        raise Unavailable(
            f"not verified, because they can't be reached: the pools {down}",
            hint="The control plane's log says why; verify again when they are back.",
        )
    if not answer["is_sound"]:
        raise Conflict(
            f"{counted(answer['found'], 'thing does', 'things do')} not add up",
            hint="docs/how-to/operate.md says what each fault means, and what to do.",
        )
