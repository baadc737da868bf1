"""Delivers the outbox rows of tenants' databases, so that the dispatches in the central queue match
the job rows.
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.outages import log_failure
from comfyfleet.server.jobs import store
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Job, dispatch_for, dispatch_status_of, needs_key
from comfyfleet.server.jobs.progress import ALL_CHANGED, UserChange
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import ENDED, ActiveDispatch, Dispatch, DispatchStatus

log = logging.getLogger(__name__)
# Time until an outbox row that couldn't be delivered is retried.
RETRY_DELAY = timedelta(seconds=5)


async def flush(
    context: JobContext, pool: Database, jobs: Sequence[Job], outbox_ids: Sequence[int]
) -> None:
    """Delivers outbox rows that have just been committed. If this is interrupted, the sweep
    delivers them.

    When this returns, the tenant's commit is on disk. The dispatches may not be on disk yet, but
    the outbox rows are only deleted once they are.
    """
    for job in jobs:
        notify(context, job)
    _drop_keys(context, jobs)
    pool.persist_soon()
    await sync_dispatches(context, jobs)
    await pool.persist()
    context.deferred.delete_outbox(pool, outbox_ids, context.central)


def notify(context: JobContext, job: Job, change: UserChange = ALL_CHANGED) -> None:
    """Wakes the tasks that follow the job and, if it has ended, the listeners for its run. `change`
    is the kind of change that gateway clients are notified of.
    """
    context.notifier.tell(job.id)
    if job.spec.user_id is not None:
        context.notifier.tell(job.spec.user_id)
    if job.spec.gateway is not None and job.spec.user_id is not None:
        context.notifier.tell_user(job.spec.user_id, change)
    if job.spec.run_kind and not job.status.is_active:
        context.notifier.notify_run(job.spec.run_kind)


def _drop_keys(context: JobContext, jobs: Sequence[Job]) -> None:
    """Removes the keys for paid services of ended jobs from memory."""
    ended = [job.id for job in jobs if needs_key(job.spec) and not job.status.is_active]
    if ended:
        context.partner_keys.drop(*ended)


async def sync_dispatches(context: JobContext, jobs: Sequence[Job]) -> None:
    """Adds dispatches for active jobs and ends the dispatches of ended jobs. Repeated calls change
    nothing.

    Callers must await the central database's `persist` before they delete the outbox rows.
    """
    waiting = [job for job in jobs if job.wants_dispatch]
    _note_models(context, waiting)
    await context.queue.enqueue(
        [dispatch_for(job, context.settings.max_attempts) for job in waiting]
    )
    # A job that reused the result of another job was never in the queue.
    ended = [job for job in jobs if not job.status.is_active and job.spec.reused_from is None]
    if ended:
        async with context.central.transaction() as tx:
            for job in ended:
                await _end_dispatch(tx, context, job)


def _note_models(context: JobContext, jobs: Sequence[Job]) -> None:
    """Registers the requirements of jobs with the queue, so that only workers that meet them get
    the jobs.
    """
    known = context.queue.model_sets
    for job in jobs:
        if job.spec.model_set and job.spec.model_set not in known:
            known.note(job.spec.model_set, job.spec.needs)


async def _end_dispatch(tx: Tx, context: JobContext, job: Job) -> None:
    now, status = context.clock(), dispatch_status_of(job)
    row = await dispatch.of_job(tx, job.tenant_id, job.id)
    if row is None:
        new = dispatch_for(job, context.settings.max_attempts)
        await dispatch.enqueue_ended(tx, new, status, now=now, error=job.error_message)
    elif row.status == DispatchStatus.LEASED and status == DispatchStatus.CANCELLED:
        # The dispatch ends when the response to the worker's next heartbeat has reported the
        # cancellation.
        await dispatch.cancel(tx, row.id, now=now)
    elif row.status not in ENDED:
        await dispatch.force_end(tx, row.id, status, now=now, error=job.error_message)


async def flush_due(context: JobContext, pool: Database, *, limit: int) -> int:
    """Delivers the due outbox rows of a pool. A row that can't be delivered doesn't block the
    others. Returns the number of due rows.
    """
    now = context.clock()
    async with pool.read() as tx:
        due = await store.due_outbox(tx, now=now, limit=limit)
    for outbox_id, tenant_id, job_id in due:
        try:
            await _flush_one(context, pool, outbox_id, tenant_id, job_id)
        except Exception as error:  # noqa: BLE001 — a row must not block the others
            log_failure(
                log, error, "outbox row %s of job %s could not be delivered", outbox_id, job_id
            )
            async with pool.transaction() as tx:
                await store.reschedule_outbox(tx, [outbox_id], until=now + RETRY_DELAY)
    return len(due)


async def _flush_one(
    context: JobContext, pool: Database, outbox_id: int, tenant_id: UUID, job_id: UUID
) -> None:
    async with pool.read() as tx:
        job = await store.get(tx, tenant_id, job_id)
    if job:
        await sync_dispatches(context, [job])
        await context.central.persist()
    async with pool.execute_one() as tx:
        await store.delete_outbox(tx, [outbox_id])


async def end_dispatch(
    context: JobContext, row: Dispatch | ActiveDispatch, job: Job | None
) -> None:
    """Ends the dispatch of a job that has ended or was deleted."""
    status = dispatch_status_of(job) if job else DispatchStatus.FAILED
    error = job.error_message if job else "The job no longer exists."
    async with context.central.transaction() as tx:
        await dispatch.force_end(tx, row.id, status, now=context.clock(), error=error)
