"""What a worker holds goes back to the queue when an operator no longer trusts it."""

from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Requeue
from comfyfleet.kernel.errors import LeaseLost
from comfyfleet.plane import Plane


async def give_back(plane: Plane, worker_id: str, reason: Requeue) -> int:
    """How many. The tenant's side follows with the next lease, which is newer and so wins."""
    async with plane.central.look() as tx:
        rows = await dispatch.held_by(tx, worker_id)
    count = 0
    for row in rows:
        if row.lease_token is None:
            continue
        try:
            async with plane.central.begin() as tx:
                row = await dispatch.requeue(
                    tx,
                    row.id,
                    row.lease_token,
                    reason,
                    now=plane.clock(),
                    settings=plane.settings,
                )
        except LeaseLost:
            continue
        plane.queue.wake([row.lane])
        count += 1
    return count
