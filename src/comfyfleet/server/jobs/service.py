"""Changes job rows. All functions use the caller's transaction on the tenant's database and never
commit.

A change that also affects the central database adds an outbox row in the same transaction. The
`outbox` module delivers it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from comfyfleet.errors import InvalidInput, LeaseLost, NotFound, TooManyActive
from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import is_sqlite
from comfyfleet.server.db.driver import StatementCall, execute_together
from comfyfleet.server.jobs import store, store_followed, store_prompts, store_statements
from comfyfleet.server.jobs.caches import UNLIMITED, ActiveJobLimits
from comfyfleet.server.jobs.model import (
    AWAITS_BACKEND,
    EndedPrompt,
    Failure,
    Job,
    JobSpec,
    JobStatus,
    added_job,
    charged_tokens,
    is_metered,
    new_job_row,
    sees_in_order,
)
from comfyfleet.server.jobs.stages import WaitingJob
from comfyfleet.server.jobs.store_statements import NewJobRows
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, ids_beginning
from comfyfleet.server.notifications import store as events
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import EndOfJob, EventKind, NewJobEvent, WebhookEvent
from comfyfleet.server.queue.model import DispatchLease
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import LoggedRun, LoggedState, RunEnd
from comfyfleet.server.tenants import wallet as ledger

NewId: TypeAlias = Callable[[], UUID]
_WEBHOOK_EVENTS = {
    JobStatus.COMPLETED: WebhookEvent.COMPLETED,
    JobStatus.FAILED: WebhookEvent.FAILED,
    JobStatus.CANCELLED: WebhookEvent.CANCELLED,
}


async def after_submit(tx: Tx, jobs: Sequence[Job], *, now: datetime) -> None:
    """Attaches new jobs to their media items and adds status events. The caller reserves tokens."""
    for job in jobs:
        await attach_media(tx, job)
    # Jobs without a user belong to operators, who don't follow job events.
    await events.add_events(tx, [status_event(job) for job in jobs if job.spec.user_id], now=now)


async def attach_media(tx: Tx, job: Job) -> None:
    if job.spec.video_id and job.spec.user_id:
        await media.attach_job(tx, job.tenant_id, job.spec.user_id, job.spec.video_id, job.id)


async def after_status_change(tx: Tx, job: Job, *, now: datetime) -> None:
    if job.spec.user_id:
        await events.add_events(tx, [status_event(job)], now=now)


def status_event(job: Job) -> NewJobEvent:
    return NewJobEvent(job.tenant_id, job.id, EventKind.STATUS, event_data(job))


async def after_end(
    tx: Tx,
    ended: store.EndedJob,
    files: Sequence[File],
    *,
    run_seconds: float | None = None,
    new_id: NewId,
    now: datetime,
) -> list[int]:
    """Settles an ended job and returns the ids of the new outbox rows. The ledger's unique keys
    prevent a second settlement.

    All inserts are sent together. `files` are the job's outputs, which now belong to the user.
    `run_seconds` is the billable duration of a metered run. None means that no time is billed.
    """
    job = ended.job
    is_done = job.status == JobStatus.COMPLETED
    await _settle(tx, job, run_seconds, now=now)
    if job.spec.video_id:
        await media.end_job(
            tx,
            job.tenant_id,
            job.id,
            processed_file_id=job.output_file_id if is_done else None,
            details=event_data(job),
        )
    if job.spec.user_id and ended.has_webhooks:
        await webhooks.enqueue(
            tx,
            job.tenant_id,
            job.spec.user_id,
            _end_of(job),
            new_id=new_id,
            now=now,
        )
    inserts = list(_inserts_after_end(job, files, now=now))
    if job.spec.reused_from is None:
        inserts.append(store.outbox_insert(job, now=now))
    added = await execute_together(tx, *inserts) if inserts else []
    return [row[0] for row in added] if job.spec.reused_from is None else []


async def _settle(tx: Tx, job: Job, run_seconds: float | None, *, now: datetime) -> None:
    """Makes the settlements that need more than an insert: refunds and the payment of metered
    jobs.
    """
    if not job.reserved_tokens:
        return
    is_done = job.status == JobStatus.COMPLETED
    if is_metered(job.spec) and (is_done or run_seconds is not None):
        charged = charged_tokens(job, run_seconds or 0.0)
        if is_done or charged:
            unused = job.reserved_tokens - charged
            await ledger.consume(tx, job.tenant_id, job.id, unused=unused, now=now)
            return
    if not is_done:
        await ledger.refund(tx, job.tenant_id, job.id, now=now)


def _end_of(job: Job) -> EndOfJob:
    """Returns the webhook event of an ended job. The event of a gateway prompt also contains the
    client's prompt id.
    """
    data = job.spec.gateway or {}
    prompt_id = {"prompt_id": data["prompt_id"]} if "prompt_id" in data else {}
    payload = {**event_data(job), **prompt_id}
    return EndOfJob(job.id, _WEBHOOK_EVENTS[job.status], payload, data.get("webhook_url"))


def _inserts_after_end(
    job: Job, files: Sequence[File], *, now: datetime
) -> Iterator[StatementCall]:
    if job.reserved_tokens and job.status == JobStatus.COMPLETED and not is_metered(job.spec):
        yield ledger.consume_call(job.tenant_id, job.id, now=now)
    if job.spec.run_id:
        yield store.outbox_insert_for_run(job, now=now)
    if job.spec.user_id:
        yield events.add_events_call([*_output_events(job), status_event(job)], now=now)
    for file in files:
        yield media.add_call(replace(file, user_id=job.spec.user_id))


def _output_events(job: Job) -> Iterator[NewJobEvent]:
    if job.status == JobStatus.COMPLETED and job.result_metadata:
        yield NewJobEvent(job.tenant_id, job.id, EventKind.OUTPUTS, job.result.event_data)


def event_data(job: Job) -> Mapping[str, Any]:
    """Returns the data of a job that customers may see. It never includes the prompt or the raw
    error.
    """
    return {
        "job_id": str(job.id),
        "status": job.shown_status,
        "error": job.error_message,
        "video_id": str(job.spec.video_id) if job.spec.video_id else None,
        "effect_id": str(job.spec.effect_id) if job.spec.effect_id else None,
        "reserved_tokens": job.reserved_tokens,
    }


ROWS_PER_STATEMENT_MAX = 500
RETRY_SECONDS = 10


async def list_of_media(tx: Tx, tenant_id: UUID, media_id: UUID, *, limit: int) -> list[Job]:
    """Returns the latest jobs of a media item, the newest first."""
    return await store.list_of_media(tx, tenant_id, media_id, limit=limit)


async def waiting_by_id(
    tx: Tx, tenant_id: UUID, job_ids: Collection[UUID]
) -> dict[UUID, WaitingJob]:
    """Returns jobs by id, without their prompts. Ids of missing jobs are left out."""
    jobs = await store_followed.waiting_by_id(tx, tenant_id, list(job_ids))
    return {job.id: job for job in jobs}


async def reserved_tokens(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    """Returns the tokens that are reserved for the user's active jobs."""
    return await store_followed.reserved_tokens(tx, tenant_id, user_id)


async def count_active(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    """Returns the number of the user's active jobs. Held jobs don't count."""
    return (await store.count_active(tx, tenant_id, user_id, most=0))[0]


async def search(
    tx: Tx, tenant_id: UUID, user_id: UUID, text: str, *, effect_ids: Collection[UUID], limit: int
) -> list[WaitingJob]:
    """Finds the user's newest jobs for effects, by effect or by the first digits of the job id."""
    return await store_followed.search(
        tx, tenant_id, user_id, between=ids_beginning(text), effect_ids=effect_ids, limit=limit
    )


async def get(tx: Tx, tenant_id: UUID, job_id: UUID) -> Job:
    job = await store.get(tx, tenant_id, job_id)
    if job is None:
        raise NotFound(f"job {job_id} was not found")
    return job


async def get_many(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> dict[UUID, Job]:
    """Returns jobs by id. Ids of missing jobs are left out."""
    return {job.id: job for job in await store.get_many(tx, tenant_id, job_ids)}


async def get_in_parts(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> AsyncIterator[list[Job]]:
    """Yields the jobs in parts that are small enough to be decoded without a pause. Other tasks can
    run between the parts.
    """
    async for part in store.get_in_parts(tx, tenant_id, job_ids):
        await asyncio.sleep(0)  # lets other tasks run after the documents were decoded
        yield part
        await asyncio.sleep(0)  # lets other tasks run after the caller has processed them


async def lock(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> None:
    """Locks jobs that will be changed together. Must be called before a wallet is locked."""
    await store.lock(tx, tenant_id, job_ids)


async def submit(
    tx: Tx,
    tenant_id: UUID,
    requested: Mapping[UUID, JobSpec],
    *,
    now: datetime,
    active_max: ActiveJobLimits | None = None,
) -> tuple[list[Job], list[int]]:
    """Adds jobs. Returns the new jobs and their outbox ids. Ids of existing jobs are ignored.

    The whole transaction fails if there are too few tokens or too many active jobs, or if a media
    item is busy. Excess jobs of batches and runs are held instead.
    """
    user_id = _payer(requested)
    if user_id:
        # The wallet is locked before jobs are counted, so that two concurrent submissions can't
        # both use the last free place.
        await ledger.lock_wallet(tx, tenant_id, user_id, now=now)
        if active_max:
            requested = await _hold_excess(tx, tenant_id, user_id, requested, active_max)
    added: list[Job] = []
    pairs = list(requested.items())
    for start in range(0, len(pairs), ROWS_PER_STATEMENT_MAX):
        part = dict(pairs[start : start + ROWS_PER_STATEMENT_MAX])
        added += await store.add(tx, tenant_id, part, now=now)
    if user_id and added:
        await _check_active(tx, tenant_id, user_id, added, active_max)
        prices = {job.id: job.reserved_tokens for job in added}
        if any(prices.values()):
            await ledger.reserve_all(tx, tenant_id, user_id, prices, now=now)
    await after_submit(tx, added, now=now)
    outbox_ids = await store.add_outbox(tx, added, now=now) if added else []
    return added, outbox_ids


async def add_reused(
    tx: Tx,
    tenant_id: UUID,
    reused: Mapping[UUID, tuple[JobSpec, Job]],
    *,
    new_id: NewId,
    now: datetime,
) -> list[Job]:
    """Adds jobs as completed, each with the result of another job, free of charge. Ids of existing
    jobs are ignored.

    Media items, events and webhooks are updated as for any other job. The jobs don't enter the
    queue, because no worker runs them.
    """
    free = {
        job_id: replace(
            spec, price_tokens=0, fingerprint=None, reused_from=source.id, is_held=False
        )
        for job_id, (spec, source) in reused.items()
    }
    added = await store.add(tx, tenant_id, free, now=now)
    await after_submit(tx, added, now=now)
    done: list[Job] = []
    for job in added:
        ended = await store.complete_reused(tx, job, reused[job.id][1], now=now)
        if ended:
            await after_end(tx, ended, (), new_id=new_id, now=now)
            done.append(replace(ended.job, spec=job.spec))
    return done


def is_single(new_jobs: Mapping[UUID, JobSpec]) -> bool:
    """Whether there is just one job, which belongs to a user but not to a batch or run, and can't
    reuse a result. Only such a job can be added with `submit_one`.
    """
    one = next(iter(new_jobs.values()))
    is_part = one.is_held or _may_be_held(one) or one.fingerprint is not None
    return len(new_jobs) == 1 and one.user_id is not None and not is_part


async def submit_one(
    tx: Tx,
    tenant_id: UUID,
    new_jobs: Mapping[UUID, JobSpec],
    most: ActiveJobLimits,
    *,
    now: datetime,
) -> tuple[list[Job], list[int]] | None:
    """Adds a single job like `submit`, but in one statement.

    If that fails for any reason, writes nothing and returns None. The caller then calls `submit`,
    which adds the job step by step or raises the error.
    """
    ((job_id, one),) = new_jobs.items()
    job = added_job(tenant_id, job_id, one, now)
    new = NewJobRows(new_job_row(tenant_id, job_id, one, now), status_event(job)._asdict())
    outbox_id = await store_statements.add_single(tx, new, most)
    if outbox_id is None:
        return None
    await attach_media(tx, job)
    return [job], [outbox_id]


def _payer(new_jobs: Mapping[UUID, JobSpec]) -> UUID | None:
    users = {spec.user_id for spec in new_jobs.values()}
    if len(users) > 1:
        raise InvalidInput("jobs of several users can't be submitted together")
    user_id = next(iter(users), None)
    if user_id is None and any(spec.price_tokens for spec in new_jobs.values()):
        raise InvalidInput("user_id is required for a job that costs tokens", field="user_id")
    return user_id


def _may_be_held(spec: JobSpec) -> bool:
    """Whether the job belongs to a batch or run. Only such jobs may be held."""
    return spec.batch_id is not None or spec.run_id is not None


async def _hold_excess(
    tx: Tx, tenant_id: UUID, user_id: UUID, requested: Mapping[UUID, JobSpec], most: ActiveJobLimits
) -> Mapping[UUID, JobSpec]:
    """Holds the jobs that exceed the limit. The jobs before them enter the queue."""
    if not any(map(_may_be_held, requested.values())):
        return requested
    room = await active_room(tx, tenant_id, user_id, most)
    specs: dict[UUID, JobSpec] = {}
    for job_id, spec in requested.items():
        is_held = spec.is_held or (_may_be_held(spec) and room <= 0)
        room -= not is_held
        specs[job_id] = replace(spec, is_held=is_held)
    return specs


async def active_room(tx: Tx, tenant_id: UUID, user_id: UUID, most: ActiveJobLimits) -> int:
    """Returns how many more jobs may become active. The number is negative if too many are
    active.
    """
    of_user, of_tenant = await store.count_active(tx, tenant_id, user_id, most=most.of_tenant)
    return min(most.of_user - of_user, most.of_tenant - of_tenant)


async def _check_active(
    tx: Tx, tenant_id: UUID, user_id: UUID, added: Sequence[Job], most: ActiveJobLimits | None
) -> None:
    if most is None or most == UNLIMITED or all(_may_be_held(job.spec) for job in added):
        return
    of_user, of_tenant = await store.count_active(tx, tenant_id, user_id, most=most.of_tenant)
    for active, limit, whose in (
        (of_user, most.of_user, "user"),
        (of_tenant, most.of_tenant, "tenant"),
    ):
        if active > limit:
            raise TooManyActive(
                f"a {whose} may have at most {limit} active jobs",
                retry_after_seconds=RETRY_SECONDS,
                active=active - len(added),
            )


async def outbox_of_runs(
    tx: Tx, kind: str, *, now: datetime, limit: int, after: int = 0
) -> list[tuple[int, UUID, UUID, UUID]]:
    """Returns the ended jobs that their runs haven't processed yet, as (outbox id, tenant, run,
    job).
    """
    return await store.outbox_of_runs(tx, kind, now=now, limit=limit, after=after)


async def reschedule_outbox(tx: Tx, outbox_ids: Sequence[int], *, until: datetime) -> None:
    await store.reschedule_outbox(tx, outbox_ids, until=until)


async def delete_outbox(tx: Tx, outbox_ids: Sequence[int]) -> None:
    await store.delete_outbox(tx, outbox_ids)


async def start(tx: Tx, lease: DispatchLease, *, now: datetime) -> Job | None:
    """Starts the job. Returns None if the job doesn't exist, has ended or has a newer lease. Uses a
    single statement on PostgreSQL.
    """
    if lease.is_prefetched:
        return await store.start(tx, lease, begun_at=None)
    if not is_sqlite(tx):
        return await store.start(tx, lease, begun_at=now, with_event=True)
    started = await store.start(tx, lease, begun_at=now)
    if started:
        await after_status_change(tx, started, now=now)
    return started


async def begin(tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, *, now: datetime) -> Job | None:
    """Marks a prefetched job as running. Returns None if it was already running or the lease is no
    longer held.
    """
    begun = await store.begin(tx, tenant_id, job_id, token, now=now)
    if begun:
        await after_status_change(tx, begun, now=now)
    return begun


class FinishedJob(NamedTuple):
    """An ended job, its outbox ids, and whether any of its user's jobs are held."""

    job: Job
    outbox_ids: list[int]
    has_held: bool


async def complete_at_once(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    values: Mapping[str, Any],
    *,
    files: Sequence[File],
    now: datetime,
) -> FinishedJob | None:
    """Completes a job like `complete`, but in one statement. For PostgreSQL only.

    If that fails for any reason, writes nothing and returns None. The caller then calls `complete`,
    which works step by step or raises the error.
    """
    done = await store_statements.complete(tx, tenant_id, job_id, token, values, files, now=now)
    return FinishedJob(done.job, [done.outbox_id], done.has_held) if done else None


async def complete(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    values: Mapping[str, Any],
    *,
    files: Sequence[File] = (),
    new_id: NewId,
    now: datetime,
) -> FinishedJob:
    """Completes the job. A repeated request adds no files and returns no outbox ids.

    A metered job is charged for the `run_seconds` in `values`, and the rest of its reservation is
    refunded.
    """
    done = await store.complete(tx, tenant_id, job_id, token, values, now=now)
    if done:
        seconds: float | None = values.get("run_seconds")
        return await _finish(tx, done, files, run_seconds=seconds, new_id=new_id, now=now)
    return await _finished_before(tx, tenant_id, job_id, token, JobStatus.COMPLETED)


async def fail(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    why: Failure,
    *,
    run_seconds: float | None = None,
    new_id: NewId,
    now: datetime,
) -> FinishedJob:
    """Fails the job. A metered job is charged for `run_seconds`, if set."""
    failed = await store.fail(tx, tenant_id, job_id, token, why, now=now)
    if failed:
        return await _finish(tx, failed, run_seconds=run_seconds, new_id=new_id, now=now)
    return await _finished_before(tx, tenant_id, job_id, token, JobStatus.FAILED)


async def refuse(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    why: Failure,
    *,
    new_id: NewId,
    now: datetime,
) -> FinishedJob:
    """Fails a prompt whose client still waits for the response to its submission. The response
    contains the reason, so no webhook or history entry reports the failure.
    """
    failed = await store.fail(tx, tenant_id, job_id, token, why, now=now)
    if failed is None:
        return await _finished_before(tx, tenant_id, job_id, token, JobStatus.FAILED)
    ended = await _finish(tx, failed._replace(has_webhooks=False), new_id=new_id, now=now)
    if failed.job.spec.user_id is not None:
        await hide_prompts(tx, tenant_id, failed.job.spec.user_id, [job_id], now=now)
    return ended


async def is_awaited(tx: Tx, job: Job) -> bool:
    """Whether the prompt's client is waiting for the backend to accept or refuse the prompt. Locks
    the job, so that the client keeps waiting until the transaction ends.
    """
    if job.spec.user_id is None or not (job.spec.gateway or {}).get(AWAITS_BACKEND):
        return False
    await run_log.lock_log(tx, job.spec.user_id)
    await store.lock(tx, job.tenant_id, [job.id])
    locked = await store.get(tx, job.tenant_id, job.id)
    return locked is not None and bool((locked.spec.gateway or {}).get(AWAITS_BACKEND))


async def stop_awaiting(tx: Tx, job: Job) -> None:
    """Records that the client no longer waits for the backend, so that the end of the prompt is
    reported as usual.
    """
    await store_prompts.stop_awaiting(tx, job)


async def _finish(
    tx: Tx,
    ended: store.EndedJob,
    files: Sequence[File] = (),
    *,
    run_seconds: float | None = None,
    new_id: NewId,
    now: datetime,
) -> FinishedJob:
    outbox_ids = await after_end(tx, ended, files, run_seconds=run_seconds, new_id=new_id, now=now)
    return FinishedJob(ended.job, outbox_ids, ended.has_held)


async def _finished_before(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, status: JobStatus
) -> FinishedJob:
    """Returns the job for a repeated request. `has_held` is True, because the first request may
    have been interrupted before it admitted held jobs.
    """
    return FinishedJob(
        await _require_repeated(tx, tenant_id, job_id, token, status), [], has_held=True
    )


async def requeue(tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, *, now: datetime) -> Job:
    """Sets the job to queued. The caller requeues the dispatch. If it is interrupted, the lease
    expires.
    """
    waiting = await store.requeue(tx, tenant_id, job_id, token)
    if waiting:
        await after_status_change(tx, waiting, now=now)
        return waiting
    return await _require_repeated(tx, tenant_id, job_id, token, JobStatus.QUEUED)


async def _require_repeated(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, status: JobStatus
) -> Job:
    """Returns the job for a repeated request with the same token and status. Raises LeaseLost for
    any other request.
    """
    job = await store.get(tx, tenant_id, job_id)
    if job is None or job.lease_token != token or job.status != status:
        raise LeaseLost("the lease is no longer held, so nothing was changed")
    return job


async def cancel(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    *,
    run_seconds: float | None = None,
    new_id: NewId,
    now: datetime,
) -> tuple[Job, list[int]]:
    """Cancels an active job. Returns an ended job unchanged.

    A metered job is charged for the seconds that it ran: `run_seconds` if the worker measured them,
    and otherwise the seconds since it started.
    """
    state = await _lock_run(tx, tenant_id, job_id)
    if run_seconds is None:
        run_seconds = await _metered_seconds(tx, tenant_id, job_id, now)
    cancelled = await store.end_active(tx, tenant_id, job_id, JobStatus.CANCELLED, None, now=now)
    if cancelled:
        job, outbox_ids, _ = await _finish(
            tx, cancelled, run_seconds=run_seconds, new_id=new_id, now=now
        )
        await _log_end(tx, job, state, now=now)
        return job, outbox_ids
    return await get(tx, tenant_id, job_id), []


async def _metered_seconds(tx: Tx, tenant_id: UUID, job_id: UUID, now: datetime) -> float | None:
    """Returns how many seconds a metered job has been running, or None if the job isn't metered or
    isn't running.

    The row is locked first, so that the job can't be requeued before it ends.
    """
    job = await store.get(tx, tenant_id, job_id)
    if job is None or not is_metered(job.spec):
        return None
    await store.lock(tx, tenant_id, [job_id])
    job = await store.get(tx, tenant_id, job_id)
    if job is None or job.status != JobStatus.PROCESSING or job.started_at is None:
        return None
    return max(0.0, (now - job.started_at).total_seconds())


async def _lock_run(tx: Tx, tenant_id: UUID, job_id: UUID) -> LoggedState | None:
    """Locks the run of a gateway prompt and returns its logged state. Returns None for other jobs.
    As in all other code, the user's run log is locked before the job's row.
    """
    job = await store.get(tx, tenant_id, job_id)
    if job is None or job.spec.gateway is None or job.spec.user_id is None:
        return None
    return await run_log.lock_run(tx, tenant_id, job.spec.user_id, job_id)


async def _log_end(tx: Tx, job: Job, state: LoggedState | None, *, now: datetime) -> None:
    """Logs the end of a gateway run for its clients if no worker has reported it, because the run
    was cancelled or its worker was lost.
    """
    data, user_id = job.spec.gateway, job.spec.user_id
    if data is None or user_id is None or job.started_at is None:
        return
    if state is None or state.has_end:
        return
    run = LoggedRun(
        job.tenant_id,
        user_id,
        job.id,
        job.lease_number,
        data.get("client_id"),
        data["prompt_id"],
        start_id=0 if sees_in_order(data) else None,
    )
    end = RunEnd(job.status.value, job.spec.prompt, job.error_message)
    await run_log.log_end(tx, run, end, (), state=state, now=now)


async def force_fail(
    tx: Tx, tenant_id: UUID, job_id: UUID, why: Failure, *, new_id: NewId, now: datetime
) -> tuple[Job | None, list[int]]:
    """Fails an active job regardless of its lease. Returns None instead of the job if it has
    already ended.
    """
    state = await _lock_run(tx, tenant_id, job_id)
    failed = await store.end_active(tx, tenant_id, job_id, JobStatus.FAILED, why, now=now)
    if failed is None:
        return None, []
    job, outbox_ids, _ = await _finish(tx, failed, new_id=new_id, now=now)
    await _log_end(tx, job, state, now=now)
    return job, outbox_ids


PROMPTS_LISTED_MAX = 10_000


async def find_prompt(tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID) -> Job | None:
    """Returns a gateway prompt, or None if it doesn't exist or its client has removed it from the
    history.
    """
    return await store_prompts.find_prompt(tx, tenant_id, user_id, job_id)


async def started_prompts(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[Job]:
    """Returns a user's running gateway prompts in the order of submission."""
    ids = await store_prompts.started_prompt_ids(tx, tenant_id, user_id, limit=PROMPTS_LISTED_MAX)
    jobs_by_id = {job.id: job async for part in get_in_parts(tx, tenant_id, ids) for job in part}
    return [jobs_by_id[job_id] for job_id in ids if job_id in jobs_by_id]


async def is_needed_by_prompts(tx: Tx, tenant_id: UUID, user_id: UUID, file_id: UUID) -> bool:
    """Checks whether an active prompt of the user uses the file as an input."""
    return file_id in await store_prompts.files_of_active_prompts(
        tx, tenant_id, user_id, limit=PROMPTS_LISTED_MAX
    )


async def active_prompt_ids(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[tuple[UUID, bool]]:
    """Returns the ids of a user's active gateway prompts in the order of submission, each with
    whether it is running.
    """
    return await store_prompts.active_prompt_ids(tx, tenant_id, user_id, limit=PROMPTS_LISTED_MAX)


# Prompts per query. The limit is low, because the database parses each prompt's entire document to
# read its id.
NAMES_AT_ONCE_MAX = 4


async def prompt_names(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> dict[UUID, tuple[float, str]]:
    """Returns each prompt's number and client-side prompt id, by job id."""
    names: dict[UUID, tuple[float, str]] = {}
    for start in range(0, len(job_ids), NAMES_AT_ONCE_MAX):
        part = job_ids[start : start + NAMES_AT_ONCE_MAX]
        names |= await store_prompts.names_of(tx, tenant_id, part)
        await asyncio.sleep(0)
    return names


async def ended_prompt_ids(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[UUID]:
    """Returns the ids of a user's ended gateway prompts, the most recently ended first."""
    return await store_prompts.ended_prompt_ids(tx, tenant_id, user_id, limit=limit)


async def last_ended_prompts(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int
) -> list[EndedPrompt]:
    """Returns the user's last ended gateway prompts, the most recently ended first."""
    prompts = await store_prompts.last_ended(tx, tenant_id, user_id, limit=limit)
    return sorted(prompts, key=lambda prompt: prompt.ended_at, reverse=True)


async def is_prompt_ended(tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID) -> bool:
    """Whether the prompt has ended. Returns False if the user has no such prompt or has removed it
    from the history.
    """
    return await store_prompts.is_prompt_ended(tx, tenant_id, user_id, job_id)


async def list_prompts(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    statuses: Sequence[JobStatus],
    before: tuple[datetime, UUID] | None = None,
    limit: int,
) -> list[Job]:
    """Returns a page of a user's gateway prompts, the newest first. `before` is the position of the
    last prompt on the previous page.
    """
    ids = await store_prompts.list_prompt_ids(
        tx, tenant_id, user_id, statuses=statuses, before=before, limit=limit
    )
    jobs_by_id = {job.id: job async for part in get_in_parts(tx, tenant_id, ids) for job in part}
    return [jobs_by_id[job_id] for job_id in ids if job_id in jobs_by_id]


async def count_prompts_ahead(tx: Tx, job: Job) -> int:
    """Returns the number of the user's queued prompts that were submitted before this prompt."""
    return await store_prompts.count_prompts_ahead(tx, job)


async def is_key_used(
    tx: Tx, tenant_id: UUID, user_id: UUID, idempotency_key: str, *, since: datetime
) -> bool:
    """Checks whether an idempotency key has been used since a point in time. Releases a key that
    was only used before that time.
    """
    job = await store.by_idempotency_key(tx, tenant_id, user_id, idempotency_key)
    if job is not None and job.submitted_at < since:
        await store_prompts.release_key(tx, tenant_id, user_id, idempotency_key, used_before=since)
        return False
    return job is not None


async def find(tx: Tx, tenant_id: UUID, job_id: UUID) -> Job | None:
    return await store.get(tx, tenant_id, job_id)


async def hide_prompts(
    tx: Tx, tenant_id: UUID, user_id: UUID, job_ids: Sequence[UUID] | None, *, now: datetime
) -> None:
    """Removes the given ended prompts from the user's history. None stands for all of them."""
    await store_prompts.hide_prompts(tx, tenant_id, user_id, job_ids, now=now)
