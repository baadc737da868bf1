"""A worker's heartbeat: the lease goes on, files get fresh URLs, and orders go back."""

from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Dispatch, Status
from comfyfleet.jobs.ending import held
from comfyfleet.jobs.handing import assets, output_slot
from comfyfleet.jobs.sides import Sides
from comfyfleet.jobs.submitting import get
from comfyfleet.kernel.errors import LeaseLost
from comfyfleet.wire.files import Asset
from comfyfleet.wire.messages import Heartbeat, HeartbeatAnswer

CANCELLED = HeartbeatAnswer(cancelled=True)


async def heartbeat(sides: Sides, said: Heartbeat, *, drain: bool = False) -> HeartbeatAnswer:
    try:
        beat = await sides.queue.extend(said.dispatch_id, said.lease_token, started=said.started)
    except LeaseLost:
        return await _cancelled_before(sides, said)
    if said.progress:
        sides.progresses.note(said.lease_token, said.progress)
        sides.news.tell(beat.job_id)
    if beat.cancel_requested:
        return await _end_cancelled(sides, said)
    answer = HeartbeatAnswer(
        lease_expires_at=beat.expires_at, drain=drain, recall=beat.recall_requested
    )
    return await _with_files(sides, said, answer)


async def _end_cancelled(sides: Sides, said: Heartbeat) -> HeartbeatAnswer:
    """Now the worker knows; nothing is left to wait for."""
    async with sides.central.begin() as tx:
        await dispatch.end(
            tx, said.dispatch_id, said.lease_token, Status.CANCELLED, now=sides.clock()
        )
    return CANCELLED


async def _cancelled_before(sides: Sides, said: Heartbeat) -> HeartbeatAnswer:
    """The answer that said so may have been lost on its way."""
    row = await held(sides, said.dispatch_id, said.lease_token)
    if row.status != Status.CANCELLED:
        raise LeaseLost("the lease is no longer held; nothing was changed")
    return CANCELLED


async def _with_files(sides: Sides, said: Heartbeat, answer: HeartbeatAnswer) -> HeartbeatAnswer:
    if not said.want_outputs and not said.want_assets:
        return answer
    row: Dispatch = await held(sides, said.dispatch_id, said.lease_token)
    job = await get(sides, row.tenant_id, row.job_id)
    slots = tuple(
        [await output_slot(sides, job, said.lease_token, each) for each in said.want_outputs]
    )
    fresh: tuple[Asset, ...] = ()
    if said.want_assets:
        pool = await sides.pool_of(row.tenant_id)
        fresh = await assets(sides, pool, job, frozenset(said.want_assets))
    return answer.model_copy(update={"outputs": slots, "assets": fresh})
