"""Cancelling on API v1, where an interrupt stops all running jobs of the user."""

from comfyfleet.comfy.backend import Cancellation
from comfyfleet.comfy.calls import Call, Calls
from comfyfleet.comfy.cloud.confirming import certainty, confirmed
from comfyfleet.comfy.cloud.patience import ask
from comfyfleet.comfy.cloud.routes import about
from comfyfleet.comfy.cloud.v1_places import look, queue_of
from comfyfleet.comfy.places import Absent
from comfyfleet.kernel.errors import CancelUnconfirmed

NOT_THERE = frozenset({404, 405, 501})


async def cancel_run(calls: Calls, run_id: str) -> Cancellation:
    place = await look(calls, run_id)
    if isinstance(place, Absent):
        return Cancellation.NOT_FOUND
    if (certain := certainty(place)) is not None:
        return certain
    await _ask_to_stop(calls, run_id)
    return await confirmed(calls, run_id, lambda: look(calls, run_id))


async def _ask_to_stop(calls: Calls, run_id: str) -> None:
    answer = await ask(calls, about("POST", "/jobs/{id}/cancel", run_id))
    if answer.status_code not in NOT_THERE:
        return
    # Without that route: as long as it waits it can be taken out of the queue alone.
    await ask(calls, Call("POST", "/queue", json={"delete": [run_id]}))
    running = [row.run_id for row in (await queue_of(calls)).running]
    if run_id not in running:
        return
    if running != [run_id]:
        raise CancelUnconfirmed(
            f"run {run_id} was not stopped: the cloud can only interrupt all running jobs of the "
            f"account at once, and {len(running) - 1} other(s) would be hit",
            run_id=run_id,
        )
    await ask(calls, Call("POST", "/interrupt"))
