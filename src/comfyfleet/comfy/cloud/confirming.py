"""Making sure that a run has ended after it was told to."""

from comfyfleet.comfy.backend import Cancellation
from comfyfleet.comfy.calls import Calls
from comfyfleet.comfy.cloud.following import Look
from comfyfleet.comfy.events import Cancelled
from comfyfleet.comfy.places import Absent, Ended, Place
from comfyfleet.kernel.errors import CancelUnconfirmed

PAUSE_FIRST_SECONDS = 0.02
PAUSE_SECONDS_MAX = 1.0


async def confirmed(calls: Calls, run_id: str, look: Look) -> Cancellation:
    clock, pause = calls.surroundings.clock, PAUSE_FIRST_SECONDS
    deadline = clock() + calls.limits.cancel_seconds
    while clock() < deadline:
        if (certain := certainty(await look())) is not None:
            return certain
        await calls.surroundings.sleep(pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)
    raise CancelUnconfirmed(
        f"run {run_id} was told to stop and had not ended after {calls.limits.cancel_seconds:g} s",
        run_id=run_id,
    )


def certainty(place: Place) -> Cancellation | None:
    """Of a run that was there: one that is gone without an end was taken out of the queue."""
    match place:
        case Ended(end=Cancelled()) | Absent():
            return Cancellation.CANCELLED
        case Ended():
            return Cancellation.ENDED_BEFORE
    return None
