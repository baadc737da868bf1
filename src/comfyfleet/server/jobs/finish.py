"""Ends leases by completing, failing or requeuing jobs. The tenant's database is written first,
guarded by the lease token.
"""

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import UUID

from comfyfleet.api import worker as wire
from comfyfleet.api.worker import Complete
from comfyfleet.errors import (
    FleetError,
    InvalidInput,
    LeaseLost,
    NotFound,
    RunFailed,
    Unavailable,
)
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.dialect import is_sqlite
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import (
    FleetWorker,
    MissingRequirements,
    ModelUse,
    WorkflowRequirements,
)
from comfyfleet.server.jobs import files, service, store
from comfyfleet.server.jobs.ai_marks import warn_of_lost_manifest
from comfyfleet.server.jobs.batches import admit_after_end
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.diagnosis import read_availability, requirements_of_job
from comfyfleet.server.jobs.files import (
    REFUSALS,
    TakenOutputs,
    add_files,
    known_outputs,
    lock_run,
    logged_run,
    remove_files,
    settle,
    take_outputs,
)
from comfyfleet.server.jobs.model import (
    PROMPT_REFUSED,
    Failure,
    Job,
    JobOutput,
    JobResult,
    JobStatus,
    is_metered,
    needs_key,
    tells_results_live,
)
from comfyfleet.server.jobs.outbox import notify, sync_dispatches
from comfyfleet.server.jobs.service import FinishedJob
from comfyfleet.server.jobs.unreported import with_unreported_output
from comfyfleet.server.jobs.user_messages import to_user_message
from comfyfleet.server.media.model import File
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch, DispatchStatus, RequeueReason
from comfyfleet.server.queue.switch_costs import ModelChange, RunKind, TimedRun
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import RunEnd, without_results

log = logging.getLogger(__name__)


async def require_lease(
    context: JobContext, dispatch_id: int, token: UUID, worker_id: str | None = None
) -> Dispatch:
    """Returns the dispatch of a lease that is held or has ended.

    Raises LeaseLost if the token differs or another worker holds the lease. A row without a worker
    was requeued with this token, so it is returned.
    """
    async with context.central.read() as tx:
        row = await dispatch.get(tx, dispatch_id)
    if row.lease_token != token or worker_id not in {None, row.worker_id or worker_id}:
        raise LeaseLost("the lease is no longer held, so nothing was changed")
    return row


async def _log_end(
    tx: Tx,
    context: JobContext,
    job: Job | None,
    token: UUID,
    message: Complete | wire.Fail | None,
    error: str | None = None,
    delivered: TakenOutputs | None = None,
) -> list[File]:
    """Logs the end of a run in the same transaction that ends the job. Returns the replaced files,
    which the caller must delete.

    Logs nothing if the lease is no longer held, which is also the case for repeated reports.
    """
    unheard = message.unheard if message else None
    # `unheard` is an earlier report whose response the worker never received. Its number is passed
    # on to find out whether that report was logged.
    run = logged_run(job, token, unheard.number if unheard else None)
    state = await lock_run(tx, run, token) if run else None
    if run is None or state is None or job is None:
        return []
    delivered = delivered or TakenOutputs()
    done = message if isinstance(message, Complete) else None
    events = message.events if message else ()
    if unheard is not None and not state.is_reported:
        events = (*unheard.events, *events)
    is_shown = done is not None or tells_results_live(job.spec)
    old_ids = await run_log.log_end(
        tx,
        run._replace(report=message.report if message else None),
        RunEnd(_end_status(message), job.spec.prompt, error),
        events if is_shown else without_results(events),
        state=state,
        files=delivered.named(is_result=done is not None),
        history=done.history if done else None,
        now=context.clock(),
    )
    if done is not None:
        return await settle(tx, job, delivered)
    await add_files(tx, job, delivered)
    return await remove_files(tx, job.tenant_id, old_ids)


def _end_status(message: Complete | wire.Fail | None) -> str:
    if isinstance(message, Complete):
        return JobStatus.COMPLETED
    is_interrupted = message is not None and message.interrupted
    return JobStatus.CANCELLED if is_interrupted else JobStatus.FAILED


@asynccontextmanager
async def lease_kept(
    context: JobContext, message: Complete | wire.Fail, worker_id: str
) -> AsyncIterator[None]:
    """Extends the lease if a final report can't be stored because the tenant's database or the
    object store is unavailable. The worker will repeat the report, and sends no heartbeats in the
    meantime.
    """
    try:
        yield
    except Unavailable:
        with suppress(FleetError):
            await context.queue.extend(
                message.dispatch_id, message.lease_token, started=False, worker_id=worker_id
            )
        raise


async def complete(
    context: JobContext,
    message: Complete,
    *,
    worker_id: str | None = None,
    fleet_id: int | None = None,
    lease: Dispatch | None = None,
) -> Job:
    """Completes the job. `lease` is the dispatch, if the caller has already read it for this
    report.
    """
    row = lease or await require_lease(context, message.dispatch_id, message.lease_token, worker_id)
    pool = await context.pool_of(row.tenant_id)
    message = await with_unreported_output(context, pool, row, message)
    delivered = await _take_outputs(context, pool, row, message)
    try:
        ended = await _complete_job(context, pool, row, message, delivered)
    except (NotFound, *REFUSALS) as error:
        # After any other error, it is unknown whether the job was committed. In that case, the
        # sweep of leftover files deletes the outputs if no row refers to them.
        await files.discard_outputs(context, delivered.new)
        if isinstance(error, LeaseLost):
            await _end_if_cancelled(context, pool, row, message.lease_token)
        raise
    job = ended.job
    notify(context, job)
    await _complete_dispatch(context, row, message, job)
    if any(output.lost_manifest for output in delivered.new):
        await warn_of_lost_manifest(context, job)
    if ended.outbox_ids and fleet_id is not None:
        _note_run(context, row, message, fleet_id)
    if ended.outbox_ids:
        files.delete_sources(context, delivered.stored)
    else:  # a repeated report, so no row refers to these copies
        await files.discard_outputs(context, delivered.new)
    await _after_end(context, pool, ended, message.lease_token)
    return job


async def _after_end(context: JobContext, pool: Database, ended: FinishedJob, token: UUID) -> None:
    context.caches.progress.forget(token)
    context.previews.forget(ended.job.id)
    if needs_key(ended.job.spec):
        context.partner_keys.drop(ended.job.id)
    context.deferred.delete_outbox(pool, ended.outbox_ids, context.central)
    if ended.has_held:
        await admit_after_end(context, pool, ended.job)


async def _take_outputs(
    context: JobContext, pool: Database, row: Dispatch, message: Complete | wire.Fail
) -> TakenOutputs:
    key = files.LeaseKey(row.tenant_id, row.job_id, message.lease_token)
    known: dict[str, File] | None = None
    if message.told_outputs or row.lease_number > 1:
        async with pool.read() as tx:
            known = await known_outputs(tx, row.tenant_id, row.job_id)
    try:
        return await take_outputs(context, key, message.outputs, known)
    except (InvalidInput, NotFound):
        async with pool.read() as tx:
            job = await store.get(tx, row.tenant_id, row.job_id)
        # The worker repeats the report, because the response was lost. Its uploads have already
        # been moved.
        if job and job.status == JobStatus.COMPLETED and job.lease_token == message.lease_token:
            return TakenOutputs()
        raise


async def _complete_job(
    context: JobContext, pool: Database, row: Dispatch, message: Complete, delivered: TakenOutputs
) -> FinishedJob:
    values = {**_result(message, delivered.files), "run_seconds": _seconds(context, row, message)}
    one = (row.tenant_id, row.job_id, message.lease_token, values)
    stored = [file.file for file in delivered.new]
    if message.events or message.unheard or message.history is not None:
        async with pool.transaction() as tx:
            job = await store.get(tx, row.tenant_id, row.job_id)
            replaced = await _log_end(
                tx, context, job, message.lease_token, message, delivered=delivered
            )
            is_fixed = job is None or not is_metered(job.spec)
            ended = await _complete_in(tx, context, one, stored, is_fixed=is_fixed)
        context.deferred.delete_objects(context.store, [file.path for file in replaced])
        if job and ended.outbox_ids and message.execution_seconds is not None:
            context.caches.run_seconds.note(row.tenant_id, job.spec, message.execution_seconds)
        return ended
    if not pool.is_sqlite:
        async with pool.execute_one() as tx:
            at_once = await service.complete_at_once(tx, *one, files=stored, now=context.clock())
        if at_once:
            return at_once
    async with pool.transaction() as tx:
        return await service.complete(
            tx, *one, files=stored, new_id=context.new_id, now=context.clock()
        )


async def _complete_in(
    tx: Tx,
    context: JobContext,
    one: tuple[UUID, UUID, UUID, dict[str, Any]],
    stored: Sequence[File],
    *,
    is_fixed: bool,
) -> FinishedJob:
    """Completes the job in the caller's transaction. `is_fixed` means that the price isn't metered,
    so a single statement can make all changes.
    """
    now = context.clock()
    if is_fixed and not is_sqlite(tx):
        ended = await service.complete_at_once(tx, *one, files=stored, now=now)
        if ended:
            return ended
    return await service.complete(tx, *one, files=stored, new_id=context.new_id, now=now)


def _seconds(context: JobContext, row: Dispatch, message: Complete) -> float:
    """Returns the duration of the run in seconds as measured by the worker. Without a measurement,
    returns the time since the run's start or, if no start was reported, since its lease.
    """
    if message.execution_seconds is not None:
        return message.execution_seconds
    started = row.started_at or row.leased_at
    return (context.clock() - started).total_seconds() if started else 0.0


RUN_LIMIT = "run_limit"  # the worker's error code for a run that exceeded its time limit


def _seconds_to_pay(context: JobContext, row: Dispatch, message: wire.Fail | None) -> float | None:
    """Returns the seconds that a metered job must pay for although its run didn't succeed: the run
    was interrupted, stopped at its time limit, or failed in one of its nodes. Returns None if the
    run failed for another reason or never started.
    """
    if message is None or not (
        message.interrupted or _is_at_limit(message) or _is_own_failure(message)
    ):
        return None
    if message.execution_seconds is not None:
        return message.execution_seconds
    return (context.clock() - row.started_at).total_seconds() if row.started_at else None


def _is_at_limit(message: wire.Fail) -> bool:
    return isinstance(message.error, dict) and message.error.get("code") == RUN_LIMIT


def _is_own_failure(message: wire.Fail) -> bool:
    """Checks whether a node of the prompt raised an error. Such a run must be paid for, because the
    backend caches the results of earlier nodes, and a second run would otherwise get them free of
    charge.
    """
    error = message.error
    if not isinstance(error, dict) or error.get("code") != RunFailed.code:
        return False
    return error.get("node_id") is not None


async def _complete_dispatch(
    context: JobContext, row: Dispatch, message: Complete, job: Job
) -> None:
    started = row.started_at or row.leased_at
    duration = (context.clock() - started).total_seconds() if started else None
    try:
        await context.queue.complete(row.id, message.lease_token, duration=duration)
    except LeaseLost:
        # A sweep has ended the lease in the meantime. The tenant's database decides the outcome.
        await sync_dispatches(context, [job])
    else:
        if job.spec.effect_id and duration is not None:
            context.deferred.note_duration(context.central, job.spec.effect_id, duration)


async def _end_if_cancelled(
    context: JobContext, pool: Database, row: Dispatch, token: UUID
) -> None:
    """Ends the dispatch of a cancelled job after its final report was refused. No heartbeat follows
    that could end it.
    """
    async with pool.read() as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    if job is None or job.status != JobStatus.CANCELLED:
        return
    context.caches.progress.forget(token)
    context.previews.forget(job.id)
    with suppress(LeaseLost):
        async with context.central.transaction() as tx:
            await dispatch.end(tx, row.id, token, DispatchStatus.CANCELLED, now=context.clock())


def _note_run(context: JobContext, row: Dispatch, message: Complete, fleet_id: int) -> None:
    """Records the duration of a run. Durations are used to estimate the costs of model switches."""
    if row.model_key and message.model_change and message.execution_seconds is not None:
        kind = RunKind(fleet_id, row.model_key, row.lane.workflow_id)
        run = TimedRun(kind, ModelChange(message.model_change), message.execution_seconds)
        context.queue.switch_costs.note(run)


def _result(message: Complete, stored: Sequence[File]) -> dict[str, Any]:
    outputs = tuple(
        JobOutput(output.name, file.id, output.node_id, output.kind, output.width, output.height)
        for output, file in zip(message.outputs, stored, strict=bool(stored))
    )
    result = JobResult(outputs, message.execution_seconds, message.values)
    return {
        "provider_job_id": message.provider_job_id,
        "output_file_id": stored[0].id if stored else None,
        "result_metadata": result.as_row(),
    }


async def fail(
    context: JobContext,
    dispatch_id: int,
    token: UUID,
    why: Failure,
    *,
    worker_id: str | None = None,
    message: wire.Fail | None = None,
) -> Job:
    """Fails the job, regardless of remaining attempts, because the job itself is the cause."""
    row = await require_lease(context, dispatch_id, token, worker_id)
    pool = await context.pool_of(row.tenant_id)
    delivered = await _take_partial(context, pool, row, message)
    if message is not None and message.interrupted and row.cancel_requested:
        return await _end_interrupted(context, pool, row, message, delivered)
    try:
        async with pool.transaction() as tx:
            job = await store.get(tx, row.tenant_id, row.job_id)
            if job and _is_refusal(row, message) and await service.is_awaited(tx, job):
                ended = await service.refuse(
                    tx,
                    row.tenant_id,
                    row.job_id,
                    token,
                    why,
                    new_id=context.new_id,
                    now=context.clock(),
                )
            else:
                await _log_end(tx, context, job, token, message, why.message, delivered)
                ended = await service.fail(
                    tx,
                    row.tenant_id,
                    row.job_id,
                    token,
                    why,
                    run_seconds=_seconds_to_pay(context, row, message),
                    new_id=context.new_id,
                    now=context.clock(),
                )
    except LeaseLost:
        await files.discard_outputs(context, delivered.new)
        await _end_if_cancelled(context, pool, row, token)
        raise
    notify(context, ended.job)
    files.delete_sources(context, delivered.stored)
    await _fail_dispatch(context, row, token, ended.job, why)
    await _after_end(context, pool, ended, token)
    return ended.job


def _is_refusal(row: Dispatch, message: wire.Fail | None) -> bool:
    """Whether the first backend that received the prompt refused it."""
    error = message.error if message else None
    is_refused = isinstance(error, dict) and error.get("code") == PROMPT_REFUSED
    return is_refused and row.lease_number == 1


async def _take_partial(
    context: JobContext, pool: Database, row: Dispatch, message: wire.Fail | None
) -> TakenOutputs:
    """Stores the outputs of a run that failed or was interrupted, if its results are shown during
    the run.
    """
    if message is None or not message.outputs:
        return TakenOutputs()
    async with pool.read() as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    if logged_run(job, message.lease_token) is None or job is None:
        return TakenOutputs()
    if not tells_results_live(job.spec):
        return TakenOutputs()
    try:
        return await _take_outputs(context, pool, row, message)
    except (NotFound, *REFUSALS) as error:
        log.warning("outputs of a failed run could not be stored: %s", error.message)
        return TakenOutputs()


async def _end_interrupted(
    context: JobContext, pool: Database, row: Dispatch, message: wire.Fail, delivered: TakenOutputs
) -> Job:
    """Ends a run that was interrupted at the client's request. Its job counts as cancelled, not as
    failed.
    """
    now, token = context.clock(), message.lease_token
    async with pool.transaction() as tx:
        running = await store.get(tx, row.tenant_id, row.job_id)
        await _log_end(tx, context, running, token, message, delivered=delivered)
        job, outbox_ids = await service.cancel(
            tx,
            row.tenant_id,
            row.job_id,
            run_seconds=_seconds_to_pay(context, row, message) or 0.0,
            new_id=context.new_id,
            now=now,
        )
    notify(context, job)
    files.delete_sources(context, delivered.stored)
    await _end_if_cancelled(context, pool, row, token)
    await _after_end(context, pool, FinishedJob(job, outbox_ids, False), token)
    return job


async def _fail_dispatch(
    context: JobContext, row: Dispatch, token: UUID, job: Job, why: Failure
) -> None:
    try:
        async with context.central.transaction() as tx:
            await dispatch.end(
                tx, row.id, token, DispatchStatus.FAILED, now=context.clock(), error=why.message
            )
    except LeaseLost:
        await sync_dispatches(context, [job])


async def requeue(
    context: JobContext,
    dispatch_id: int,
    token: UUID,
    reason: RequeueReason,
    *,
    detail: str | None = None,
    worker_id: str | None = None,
) -> None:
    """Returns a dispatch to the queue. Fails its job instead if no attempts remain or it was
    requeued too often.

    The central database is written first. If the dispatch is leased again immediately, the new
    lease has a higher number, so it takes precedence in the tenant's database as well.
    """
    async with context.central.transaction() as tx:
        if worker_id is not None:
            await dispatch.require_holder(tx, dispatch_id, worker_id)
        row = await dispatch.requeue(
            tx,
            dispatch_id,
            token,
            reason,
            now=context.clock(),
            detail=detail,
            settings=context.settings,
        )
    if row.status == DispatchStatus.LEASED:
        await fail(context, dispatch_id, token, attempts_exhausted(row))
        return
    context.queue.arrived([row])
    await requeue_job(context, row, token)


def attempts_exhausted(row: Dispatch) -> Failure:
    times = f"{row.requeues if row.is_poisoned else row.attempts} times"
    what = "Processing was interrupted" if row.is_poisoned else "Processing failed"
    return Failure(f"{what} {times}.", row.last_error)


async def requeue_job(context: JobContext, row: Dispatch, token: UUID) -> None:
    """Sets the job's row in the tenant's database to queued. If this is interrupted, the next lease
    corrects the row.
    """
    context.caches.progress.forget(token)
    context.previews.withdraw(row.job_id)
    try:
        async with context.tenant_transaction(row.tenant_id) as tx:
            waiting = await service.requeue(
                tx, row.tenant_id, row.job_id, token, now=context.clock()
            )
        notify(context, waiting)
    except LeaseLost as error:
        # The job has been leased again or has ended, so the tenant's row is already up to date.
        log.debug(
            "job %s was leased or ended while it was being requeued: %s", row.job_id, error.message
        )


async def requeue_worker(context: JobContext, worker_id: str, reason: RequeueReason) -> int:
    """Requeues all jobs of a worker that is offline or no longer trusted. Returns the number of
    requeued jobs.
    """
    async with context.central.read() as tx:
        rows = await dispatch.held_by(tx, worker_id)
    requeued = 0
    for row in rows:
        if row.lease_token is None:
            continue
        try:
            await requeue(context, row.id, row.lease_token, reason)
            requeued += 1
        except LeaseLost:
            log.info("dispatch %s ended while it was being requeued", row.id)
    return requeued


NOT_AVAILABLE = "not_available"
NOT_AVAILABLE_MESSAGE = "This is not available at the moment."


async def requeue_elsewhere(
    context: JobContext, worker: FleetWorker, message: wire.Requeue
) -> None:
    """Records the requirements that a worker lacks, so that it gets no more such jobs. Requeues the
    job, or fails it if no other worker could run it.
    """
    row = await require_lease(context, message.dispatch_id, message.lease_token, worker.worker_id)
    if row.status == DispatchStatus.QUEUED:
        return  # a repeated request
    missing = _missing(message)
    async with context.central.transaction() as tx:
        known = await fleets.get_worker(tx, worker.worker_id)
        await fleets.record_refusal(tx, known, missing, now=context.clock())
    context.queue.order([worker.worker_id])
    if await _can_another_run(context, row, worker):
        reason = RequeueReason.BACKEND_LACKS
        await requeue(context, row.id, message.lease_token, reason, detail=message.detail)
        return
    error = {
        "code": NOT_AVAILABLE,
        "exception_message": NOT_AVAILABLE_MESSAGE,
        "worker": worker.worker_id,
        "missing": missing.in_words(),
        "refusal": message.detail,
    }
    await fail(context, row.id, message.lease_token, to_user_message(json.dumps(error)))


async def _can_another_run(context: JobContext, row: Dispatch, worker: FleetWorker) -> bool:
    """Whether another worker could run the job. Offline and busy workers count, because they may
    become available again. Revoked workers don't count.
    """
    async with context.tenant(row.tenant_id) as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    needs = WorkflowRequirements() if job is None else job.spec.needs
    version = None if job is None else job.spec.workflow_version
    async with context.central.read() as tx:
        ground = await read_availability(
            tx, context, await requirements_of_job(tx, row.lane, needs, version)
        )
    bound = row.backend_affinity
    return any(
        ground.can_run(candidate)
        and candidate.is_approved
        and (bound is None or bound in candidate.affinities)
        for candidate in ground.workers
        if candidate.worker_id != worker.worker_id
    )


def _missing(message: wire.Requeue) -> MissingRequirements:
    if message.lacking is None:
        return MissingRequirements()
    models = tuple(ModelUse(*model) for model in message.lacking.models)
    return MissingRequirements(tuple(message.lacking.node_types), models)
