"""Cancelling a run on a ComfyUI server until it is certain."""

from comfyfleet.comfy.backend import Cancellation
from comfyfleet.comfy.calls import Call, Calls
from comfyfleet.comfy.events import Cancelled
from comfyfleet.comfy.places import Absent, Ended, Place, Waiting, locate
from comfyfleet.kernel.errors import CancelUnconfirmed

PAUSE_FIRST_SECONDS = 0.02
PAUSE_SECONDS_MAX = 1.0
ATTEMPTS_MAX = 1000


async def cancel_run(calls: Calls, run_id: str) -> Cancellation:
    """Look, ask, look again: an interrupt that comes between two nodes of a run can get lost."""
    clock, before = calls.surroundings.clock, None
    deadline = clock() + calls.limits.cancel_seconds
    for attempt in range(ATTEMPTS_MAX):
        place = await locate(calls, run_id)
        if (certain := _certain(place, before)) is not None:
            return certain
        if clock() >= deadline:
            break
        await _ask(calls, run_id, place, attempt)
        before = place
        await calls.surroundings.sleep(min(PAUSE_FIRST_SECONDS * 2.0**attempt, PAUSE_SECONDS_MAX))
    raise CancelUnconfirmed(
        f"run {run_id} was told to stop and still runs after {calls.limits.cancel_seconds:g} s",
        run_id=run_id,
    )


def _certain(place: Place, before: Place | None) -> Cancellation | None:
    match place:
        case Ended(end=Cancelled()):
            return Cancellation.CANCELLED
        case Ended():
            return Cancellation.ENDED_BEFORE
        case Absent():
            # One that waited leaves no trace when it is deleted.
            deleted = isinstance(before, Waiting)
            return Cancellation.CANCELLED if deleted else Cancellation.NOT_FOUND
    return None


async def _ask(calls: Calls, run_id: str, place: Place, attempt: int) -> None:
    if attempt == 0:
        # Newer servers: one route for both, without a window between the two.
        route = "/api/jobs/{id}/cancel"
        answer = await calls.ask(Call("POST", route, f"/api/jobs/{run_id}/cancel"))
        if answer.status_code == 200:
            return
    if isinstance(place, Waiting):
        await calls.ask(Call("POST", "/queue", json={"delete": [run_id]}))
    else:
        # Never without the id: that would stop whatever runs, of any client.
        await calls.ask(Call("POST", "/interrupt", json={"prompt_id": run_id}))
