"""A worker's heartbeat: the lease goes on, files get fresh URLs, and orders go back."""

import asyncio
from uuid import UUID

from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Dispatch, Extended, Status
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Worker
from comfyfleet.jobs import attempts, service
from comfyfleet.jobs.ending import held
from comfyfleet.jobs.handing import assets, output_slot
from comfyfleet.jobs.sides import Sides
from comfyfleet.jobs.submitting import get
from comfyfleet.kernel.errors import LeaseLost
from comfyfleet.wire.files import Asset
from comfyfleet.wire.messages import Heartbeat, HeartbeatAnswer

CANCELLED = HeartbeatAnswer(cancelled=True)


async def heartbeat(
    sides: Sides, said: Heartbeat, *, worker: Worker | None = None
) -> HeartbeatAnswer:
    """Without a worker, it is whoever holds the lease."""
    with sides.queue.pushes.waiting(said.dispatch_id, worker.worker_id if worker else "") as news:
        answer = await _beat(sides, said, worker)
        if said.wait_seconds and answer.is_without_orders:
            try:
                async with asyncio.timeout(said.wait_seconds):
                    await news.wait()
            except TimeoutError:
                return answer
            answer = await _beat(sides, said, await _again(sides, worker))
    return answer


async def _again(sides: Sides, worker: Worker | None) -> Worker | None:
    if worker is None:
        return None
    async with sides.central.look() as tx:
        return await fleets.still_known(tx, worker.worker_id, worker.key_hash)


async def _beat(sides: Sides, said: Heartbeat, worker: Worker | None) -> HeartbeatAnswer:
    worker_id = worker.worker_id if worker else None
    try:
        beat = await sides.queue.extend(
            said.dispatch_id, said.lease_token, started=said.started, worker_id=worker_id
        )
    except LeaseLost:
        return await _cancelled_before(sides, said, worker_id)
    if beat.begins:
        await _begin(sides, beat, said.lease_token)
    await attempts.note(sides, said, beat)
    if said.progress:
        sides.progresses.note(said.lease_token, said.progress)
        sides.news.tell(beat.job_id)
    if beat.cancel_requested:
        return await _end_cancelled(sides, said)
    answer = HeartbeatAnswer(
        lease_expires_at=beat.expires_at,
        drain=worker is not None and worker.is_draining,
        recall=beat.recall_requested,
        new_token=worker.next_key if worker else None,
    )
    return await _with_files(sides, said, answer)


async def _begin(sides: Sides, beat: Extended, token: UUID) -> None:
    pool = await sides.pool_of(beat.tenant_id)
    async with pool.begin() as tx:
        await service.begin(tx, beat.tenant_id, beat.job_id, token, now=sides.clock())
    sides.news.tell(beat.job_id)


async def _end_cancelled(sides: Sides, said: Heartbeat) -> HeartbeatAnswer:
    """Now the worker knows; nothing is left to wait for."""
    sides.progresses.forget(said.lease_token)
    async with sides.central.begin() as tx:
        await dispatch.end(
            tx, said.dispatch_id, said.lease_token, Status.CANCELLED, now=sides.clock()
        )
    return CANCELLED


async def _cancelled_before(
    sides: Sides, said: Heartbeat, worker_id: str | None
) -> HeartbeatAnswer:
    """The answer that said so may have been lost on its way."""
    row = await held(sides, said.dispatch_id, said.lease_token, worker_id)
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
