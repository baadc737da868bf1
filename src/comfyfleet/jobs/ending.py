"""How a lease ends: complete, fail, requeue. The tenant's side first, guarded by the token."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from comfyfleet.db import Database
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Dispatch, Requeue, Status
from comfyfleet.dispatch.switch_costs import Change, Run, RunKind
from comfyfleet.files.model import File
from comfyfleet.jobs import delivery, service, store
from comfyfleet.jobs.admitting import admit_after
from comfyfleet.jobs.arrival import REFUSALS
from comfyfleet.jobs.model import Failure, Job, JobStatus
from comfyfleet.jobs.service import Ended
from comfyfleet.jobs.settling import align, tell
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import InvalidInput, LeaseLost, NotFound
from comfyfleet.wire.messages import Complete

log = logging.getLogger(__name__)


async def held(
    sides: Sides, dispatch_id: int, token: UUID, worker_id: str | None = None
) -> Dispatch:
    """The dispatch that this token speaks for, whether its lease goes on or has ended.

    Of a worker's token, only that worker may make use; a row without one has gone back.
    """
    async with sides.central.look() as tx:
        row = await dispatch.get(tx, dispatch_id)
    if row.lease_token != token or worker_id not in {None, row.worker_id or worker_id}:
        raise LeaseLost("the lease is no longer held; nothing was changed")
    return row


async def complete(
    sides: Sides, said: Complete, *, worker_id: str | None = None, fleet_id: int | None = None
) -> Job:
    row = await held(sides, said.dispatch_id, said.lease_token, worker_id)
    pool = await sides.pool_of(row.tenant_id)
    taken = await _taken(sides, pool, row, said)
    try:
        ended = await _completed(sides, pool, row, said, [each.file for each in taken])
    except (NotFound, *REFUSALS) as error:
        # Of anything else nobody knows whether it was committed: the sweep of leftovers finds out.
        await delivery.drop(sides, taken)
        if isinstance(error, LeaseLost):
            await _end_if_cancelled(sides, pool, row, said.lease_token)
        raise
    job = ended.job
    tell(sides, job)
    await _complete_centrally(sides, row, said, job)
    if ended.words and fleet_id is not None:
        _note_run(sides, row, said, fleet_id)
    if ended.words:
        delivery.settle(sides, taken)
    else:  # it was said before, and these are copies that nothing names
        await delivery.drop(sides, taken)
    await _after_end(sides, pool, ended, said.lease_token)
    return job


async def _after_end(sides: Sides, pool: Database, ended: Ended, token: UUID) -> None:
    sides.progresses.forget(token)
    sides.deferred.forget_words(pool, ended.words)
    if ended.has_held:
        await admit_after(sides, pool, ended.job)


async def _taken(
    sides: Sides, pool: Database, row: Dispatch, said: Complete
) -> list[delivery.Delivered]:
    try:
        return await delivery.take(sides, row, said)
    except (InvalidInput, NotFound):
        async with pool.look() as tx:
            job = await store.get(tx, row.tenant_id, row.job_id)
        # Said before, and the answer was lost: what was delivered lies elsewhere since.
        if job and job.status == JobStatus.COMPLETED and job.lease_token == said.lease_token:
            return []
        raise


async def _completed(
    sides: Sides, pool: Database, row: Dispatch, said: Complete, stored: Sequence[File]
) -> Ended:
    one = (row.tenant_id, row.job_id, said.lease_token, _result(said, stored))
    now = sides.clock()
    if not pool.is_sqlite:
        async with pool.say() as tx:
            ended = await service.complete_at_once(tx, *one, files=stored, now=now)
        if ended:
            return ended
    async with pool.begin() as tx:
        return await service.complete(tx, *one, files=stored, new_id=sides.new_id, now=now)


async def _complete_centrally(sides: Sides, row: Dispatch, said: Complete, job: Job) -> None:
    started = row.started_at or row.leased_at
    duration = (sides.clock() - started).total_seconds() if started else None
    try:
        await sides.queue.complete(row.id, said.lease_token, duration=duration)
    except LeaseLost:
        # A sweep took the lease while the tenant's side was told; that side decides.
        await align(sides, [job])
    else:
        if job.asked.effect_id and duration is not None:
            sides.deferred.note_duration(sides.central, job.asked.effect_id, duration)


async def _end_if_cancelled(sides: Sides, pool: Database, row: Dispatch, token: UUID) -> None:
    """A worker whose last word was refused sends no heartbeat that could tell it of the cancel."""
    async with pool.look() as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    if job is None or job.status != JobStatus.CANCELLED:
        return
    sides.progresses.forget(token)
    with suppress(LeaseLost):
        async with sides.central.begin() as tx:
            await dispatch.end(tx, row.id, token, Status.CANCELLED, now=sides.clock())


def _note_run(sides: Sides, row: Dispatch, said: Complete, fleet_id: int) -> None:
    """For learning what switches of models cost."""
    if row.model_key and said.model_change and said.execution_seconds is not None:
        kind = RunKind(fleet_id, row.model_key, row.lane.workflow_id)
        run = Run(kind, Change(said.model_change), said.execution_seconds)
        sides.queue.switch_costs.note(run)


def _result(said: Complete, stored: Sequence[File]) -> dict[str, Any]:
    return {
        "provider_job_id": said.provider_job_id,
        "output_file_id": stored[0].id if stored else None,
        "result_metadata": {
            "outputs": [
                {
                    "name": output.name,
                    "file_id": str(file.id),
                    "node_id": output.node_id,
                    "kind": output.kind,
                    "width": output.width,
                    "height": output.height,
                }
                for output, file in zip(said.outputs, stored, strict=bool(stored))
            ],
            "execution_seconds": said.execution_seconds,
            "values": [each.model_dump() for each in said.values],
        },
    }


async def fail(
    sides: Sides, dispatch_id: int, token: UUID, why: Failure, *, worker_id: str | None = None
) -> Job:
    """The application's fault: ended at once, whatever attempts remain."""
    row = await held(sides, dispatch_id, token, worker_id)
    pool = await sides.pool_of(row.tenant_id)
    try:
        async with pool.begin() as tx:
            ended = await service.fail(
                tx,
                row.tenant_id,
                row.job_id,
                token,
                why,
                new_id=sides.new_id,
                now=sides.clock(),
            )
    except LeaseLost:
        await _end_if_cancelled(sides, pool, row, token)
        raise
    tell(sides, ended.job)
    await _fail_centrally(sides, row, token, ended.job, why)
    await _after_end(sides, pool, ended, token)
    return ended.job


async def _fail_centrally(sides: Sides, row: Dispatch, token: UUID, job: Job, why: Failure) -> None:
    try:
        async with sides.central.begin() as tx:
            await dispatch.end(
                tx, row.id, token, Status.FAILED, now=sides.clock(), error=why.message
            )
    except LeaseLost:
        await align(sides, [job])


async def requeue(
    sides: Sides,
    dispatch_id: int,
    token: UUID,
    reason: Requeue,
    *,
    detail: str | None = None,
    worker_id: str | None = None,
) -> None:
    """Back to the queue; or failed, when the attempts are used up or it came back too often.

    The central side first: a lease that follows at once is newer than this one, and so wins on
    the tenant's side too.
    """
    async with sides.central.begin() as tx:
        if worker_id is not None:
            await dispatch.require_holder(tx, dispatch_id, worker_id)
        row = await dispatch.requeue(
            tx,
            dispatch_id,
            token,
            reason,
            now=sides.clock(),
            detail=detail,
            settings=sides.settings,
        )
    if row.status == Status.LEASED:
        await fail(sides, dispatch_id, token, used_up(row))
        return
    sides.queue.arrived([row])
    await put_back(sides, row, token)


def used_up(row: Dispatch) -> Failure:
    times = f"{row.requeues if row.is_poisoned else row.attempts} times"
    what = "Processing was interrupted" if row.is_poisoned else "Processing failed"
    return Failure(f"{what} {times}.", row.last_error)


async def put_back(sides: Sides, row: Dispatch, token: UUID) -> None:
    """The tenant sees a job that waits; if this is cut off, the next lease puts it right."""
    sides.progresses.forget(token)
    pool = await sides.pool_of(row.tenant_id)
    try:
        async with pool.begin() as tx:
            await service.put_back(tx, row.tenant_id, row.job_id, token, now=sides.clock())
        sides.news.tell(row.job_id)
    except LeaseLost:
        log.info("job %s was leased or ended while it was put back", row.job_id)


async def requeue_all_of(sides: Sides, worker_id: str, reason: Requeue) -> int:
    """A worker that is gone or no longer trusted gives back all it holds."""
    async with sides.central.look() as tx:
        rows = await dispatch.held_by(tx, worker_id)
    given_back = 0
    for row in rows:
        if row.lease_token is None:
            continue
        try:
            await requeue(sides, row.id, row.lease_token, reason)
            given_back += 1
        except LeaseLost:
            log.info("dispatch %s ended while it was given back", row.id)
    return given_back
