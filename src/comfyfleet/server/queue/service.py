"""Reads and changes dispatches. All functions use the caller's transaction on the central database.

A worker's requests are checked by their lease token. The token stays in the row after the lease has
ended, so that repeated requests are recognized. Any other token raises LeaseLost and changes
nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from comfyfleet.errors import LeaseLost, NotFound, Refused
from comfyfleet.server.db import Tx, metrics_queries
from comfyfleet.server.db.dialect import db_now
from comfyfleet.server.db.metrics_queries import MODEL_RUNS, ROLLUP_STEPS
from comfyfleet.server.queue.model import (
    ENDED,
    ActiveDispatch,
    Dispatch,
    DispatchStatus,
    EndedDispatch,
    LaneDepth,
    NewDispatch,
    QueueLane,
    RequeueReason,
    WorkerLoad,
)
from comfyfleet.server.queue.store import reads, writes
from comfyfleet.server.queue.switch_costs import Estimate, ModelOfFleet, Samples, TimedRun, estimate
from comfyfleet.settings import Settings

DEFAULTS = Settings()
# Seconds for which a sweep owns an expired lease that it has taken over. After that, another sweep
# may take over the lease.
SWEEP_LEASE_SECONDS = 60
SWEEP = "sweep"
RECALL_LOOKED_AT_MAX = 20  # maximum number of prefetched jobs that are considered for a recall
SWITCHES_KEPT = timedelta(days=30)  # retention time of timed runs


async def enqueue(tx: Tx, new: Sequence[NewDispatch], *, now: datetime) -> list[Dispatch]:
    """Adds dispatches and returns the new ones. The caller must wake waiters for them after its
    commit.
    """
    return await writes.enqueue(tx, new, now=now) if new else []


async def enqueue_ended(
    tx: Tx, new: NewDispatch, status: DispatchStatus, *, now: datetime, error: str | None = None
) -> Dispatch | None:
    """Adds an ended dispatch for a job that ended before it got one. A unique key prevents
    duplicates.
    """
    values = {
        "status": status,
        "created_at": now,
        "queued_at": now,
        "ended_at": now,
        "last_error": error,
    }
    added = await writes.add(tx, [(new, 0)], values)
    await writes.add_audit(
        tx, added, actor=None, action="submit", now=now, details={"ended": status}
    )
    return added[0] if added else None


async def get(tx: Tx, dispatch_id: int) -> Dispatch:
    row = await reads.get(tx, dispatch_id)
    if row is None:
        raise NotFound(f"dispatch {dispatch_id} was not found")
    return row


async def of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> Dispatch | None:
    return await reads.of_job(tx, tenant_id, job_id)


async def list_dispatches(
    tx: Tx, *, before_id: int | None = None, limit: int = 100, **filters: Any
) -> list[Dispatch]:
    """Returns a page of dispatches, the newest first. `filters` contains values by column: status,
    workflow_id, worker_id, tenant_id or is_poisoned.
    """
    return await reads.list_page(tx, filters, before_id=before_id, limit=limit)


async def of_jobs(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> dict[UUID, Dispatch]:
    """Returns the dispatches of these jobs by job id. Jobs without a dispatch are left out."""
    return {row.job_id: row for row in await reads.of_jobs(tx, tenant_id, job_ids)}


async def newest(tx: Tx, *, limit: int) -> list[Dispatch]:
    """Returns the newest dispatches, regardless of their status."""
    return await reads.newest(tx, limit=limit)


async def get_many(tx: Tx, dispatch_ids: Collection[int]) -> list[Dispatch]:
    """Returns dispatches by their ids. Ids of missing dispatches are left out."""
    return await reads.get_many(tx, dispatch_ids) if dispatch_ids else []


async def of_pairs(tx: Tx, pairs: Sequence[tuple[UUID, UUID]]) -> dict[UUID, Dispatch]:
    """Returns the dispatches of these (tenant, job) pairs by job id. Jobs without a dispatch are
    left out.
    """
    return {row.job_id: row for row in await reads.of_pairs(tx, pairs)} if pairs else {}


async def have_ended(tx: Tx, pairs: Sequence[tuple[UUID, UUID]]) -> dict[UUID, bool]:
    """Returns for each job id whether the job's dispatch has ended. Jobs without a dispatch are
    left out.
    """
    return await reads.have_ended(tx, pairs) if pairs else {}


async def leased_after(
    tx: Tx, after_id: int, *, before: datetime, limit: int
) -> list[ActiveDispatch]:
    """Returns a page of leased dispatches that were created before a point in time."""
    return await reads.leased_page(tx, after_id, before=before, limit=limit)


async def queued_after(
    tx: Tx, after: Sequence[Any] | None, *, before: datetime, limit: int
) -> tuple[list[ActiveDispatch], list[Any] | None]:
    """Returns a page of queued dispatches that were created before a point in time, and the next
    cursor, which is None on the last page.
    """
    return await reads.queued_page(tx, after, before=before, limit=limit)


async def ended_before(
    tx: Tx, before: datetime, *, after: EndedDispatch | None, limit: int
) -> list[EndedDispatch]:
    """Returns a page of dispatches that ended before a point in time, the earliest first."""
    return await reads.ended_before(tx, before, after=after, limit=limit)


async def remove(tx: Tx, dispatch_ids: Sequence[int]) -> int:
    """Deletes ended dispatches. The caller must make sure that their jobs have ended as well."""
    return await reads.remove(tx, dispatch_ids) if dispatch_ids else 0


async def held_by(tx: Tx, worker_id: str) -> list[Dispatch]:
    return await reads.held_by(tx, worker_id)


async def worker_of(tx: Tx, tenant_id: UUID, job_id: UUID) -> str | None:
    """Returns the worker that holds the job's lease or held its last lease."""
    return await reads.worker_of(tx, tenant_id, job_id)


async def load_of(tx: Tx, worker_id: str) -> WorkerLoad | None:
    """Returns a worker's load. Returns None if the worker doesn't exist or accepts no jobs."""
    return await reads.load_of(tx, worker_id)


async def held_by_any(
    tx: Tx, worker_ids: Collection[str], *, limit: int
) -> dict[str, list[Dispatch]]:
    """Returns the dispatches that these workers hold, by worker."""
    rows_by_worker: dict[str, list[Dispatch]] = defaultdict(list)
    for row in await reads.held_by_any(tx, worker_ids, limit=limit) if worker_ids else ():
        rows_by_worker[row.worker_id or ""].append(row)
    return rows_by_worker


async def count_queued(tx: Tx, tenant_id: UUID | None = None) -> int:
    """Counts the queued jobs of a tenant, or of all tenants."""
    return await reads.count_queued(tx, tenant_id)


async def depths(tx: Tx) -> dict[QueueLane, LaneDepth]:
    return await reads.depths(tx)


async def count_held(tx: Tx) -> dict[QueueLane, int]:
    """Counts the leased jobs that have not started yet, by lane."""
    return await reads.count_held(tx)


async def count_leases(tx: Tx, worker_ids: Collection[str] | None = None) -> dict[str, int]:
    """Counts the jobs that these workers, or all workers, hold. Workers without jobs are left
    out.
    """
    return await reads.count_leases(tx, worker_ids)


async def count_bound(tx: Tx) -> dict[str, int]:
    """Counts the jobs that each worker holds and the queued jobs that are bound to it, by
    `worker:ID`.
    """
    return await reads.count_bound(tx)


async def count_ahead(tx: Tx, dispatch: Dispatch) -> int:
    return await reads.count_ahead(tx, dispatch)


async def typical_seconds(tx: Tx, workflow_id: int) -> float | None:
    return await reads.typical_seconds(tx, workflow_id)


async def add_runs(tx: Tx, runs: Sequence[TimedRun], *, now: datetime) -> None:
    """Stores timed runs, which are used to estimate switch costs, and counts them for operators'
    charts. Deletes the samples of models that have not run for a long time.
    """
    await writes.add_runs(tx, runs, now=now)
    changes = Counter(f"{MODEL_RUNS}{run.change}" for run in runs)
    await metrics_queries.add_sums(tx, now, changes, steps=ROLLUP_STEPS)
    await writes.delete_before(tx, before=now - SWITCHES_KEPT)


async def switches_changed_at(tx: Tx) -> datetime | None:
    return await writes.last_changed_at(tx)


async def switch_costs(tx: Tx, *, fleet_id: int | None = None) -> dict[ModelOfFleet, Estimate]:
    """Estimates the costs of switching to each model on each fleet from stored runs."""
    by_model: dict[ModelOfFleet, list[Samples]] = defaultdict(list)
    for kind, samples in (await writes.all_samples(tx, fleet_id=fleet_id)).items():
        by_model[kind.fleet_id, kind.model_key].append(samples)
    estimates = ((key, estimate(samples)) for key, samples in by_model.items())
    return {key: costs for key, costs in estimates if costs is not None}


async def require_holder(tx: Tx, dispatch_id: int, worker_id: str) -> None:
    """Raises LeaseLost if another worker holds the dispatch. A dispatch without a worker was
    requeued, and is accepted.
    """
    row = await _get_locked(tx, dispatch_id)
    if row.worker_id not in (None, worker_id):
        raise _not_held(row)


async def requeue(
    tx: Tx,
    dispatch_id: int,
    token: UUID,
    reason: RequeueReason,
    *,
    now: datetime,
    detail: str | None = None,
    not_before: datetime | None = None,
    settings: Settings = DEFAULTS,
) -> Dispatch:
    """Returns a dispatch to the queue. If the result is still leased, no attempts remain, and the
    caller must end the dispatch as failed.
    """
    row = await _get_locked(tx, dispatch_id)
    if row.status is DispatchStatus.QUEUED and row.lease_token == token:
        return row
    _require_held(row, token)
    after = _after_requeue(row, reason, settings)
    message = f"Requeued: {reason}" + (f" ({detail})" if detail else "")
    if reason is RequeueReason.OTHER and detail:
        message = f"Requeued: {detail}"
    values: dict[str, Any] = {
        "attempts": after.attempts,
        "requeues": after.requeues,
        "lost_leases": after.lost_leases,
        "is_poisoned": after.is_poisoned,
        "last_error": message,
    }
    if not after.is_used_up:
        values |= await _requeue_values(tx, row, row.priority, now) | {"not_before": not_before}
        if reason is RequeueReason.RECALL:
            # A recalled job keeps its rank, unless the lane has already advanced past it.
            values["rank"] = max(values["rank"], row.rank)
        if reason.prefers_others:
            until = now + timedelta(seconds=settings.avoid_worker_seconds)
            values |= {"avoid_worker_id": row.worker_id, "avoid_until": until}
    moved = await _update(tx, row, values, token)
    details = {"reason": reason, "worker": row.worker_id, "detail": detail}
    await _add_audit(tx, moved, "requeue", now, actor=_holder(row), details=details)
    return moved


def _after_requeue(row: Dispatch, reason: RequeueReason, settings: Settings) -> Dispatch:
    """Returns the row with its updated counters after a requeue.

    An expired lease uses up the attempt if the worker had reported the start of the job. Otherwise,
    the job probably isn't the cause. But if that happens repeatedly, the job may crash its workers
    while they prepare it, so these lost leases are counted. A prefetched job can't crash its
    worker.
    """
    is_counted = reason.counts
    if reason is RequeueReason.EXPIRED:
        is_counted = row.started_at is not None
    elif reason is RequeueReason.BACKEND_DOWN and row.is_prefetched:
        # The job waited behind another one and never used the backend that failed.
        is_counted = row.started_at is not None
    is_lost = reason is RequeueReason.EXPIRED and not is_counted and not row.is_prefetched
    requeues = row.requeues + int(reason.is_interruption)
    lost_leases = row.lost_leases + int(is_lost)
    return replace(
        row,
        attempts=row.attempts if is_counted else max(0, row.attempts - 1),
        requeues=requeues,
        lost_leases=lost_leases,
        is_poisoned=requeues > settings.max_requeues or lost_leases >= settings.max_lost_leases,
    )


async def end(
    tx: Tx,
    dispatch_id: int,
    token: UUID,
    status: DispatchStatus,
    *,
    now: datetime,
    error: str | None = None,
    duration: float | None = None,
) -> Dispatch:
    row = await _get_locked(tx, dispatch_id)
    if row.status is status and row.lease_token == token:
        return row
    _require_held(row, token)
    values = _end_values(status, now, error) | {"duration_seconds": duration}
    ended = await _update(tx, row, values, token)
    details = {"worker": row.worker_id, "error": error}
    await _add_audit(tx, ended, ACTIONS[status], now, actor=_holder(row), details=details)
    return ended


async def force_end(
    tx: Tx, dispatch_id: int, status: DispatchStatus, *, now: datetime, error: str | None = None
) -> Dispatch:
    """Ends the dispatch of an ended job regardless of its lease, because the job's row in the
    tenant's database is authoritative.
    """
    row = await _get_locked(tx, dispatch_id)
    if row.status in ENDED:
        return row
    ended = await _update(tx, row, _end_values(status, now, error))
    details = {"in_line": True, "worker": row.worker_id, "error": error}
    await _add_audit(tx, ended, ACTIONS[status], now, actor="system", details=details)
    return ended


async def cancel(tx: Tx, dispatch_id: int, *, now: datetime, actor: str | None = None) -> Dispatch:
    """Cancels a dispatch. A queued dispatch ends immediately. The worker of a leased dispatch is
    notified by the response to its next heartbeat. An ended dispatch isn't changed.
    """
    row = await _get_locked(tx, dispatch_id)
    if row.status in ENDED or row.cancel_requested:
        return row
    is_queued = row.status is DispatchStatus.QUEUED
    values = (
        _end_values(DispatchStatus.CANCELLED, now, None)
        if is_queued
        else {"cancel_requested": True}
    )
    moved = await _update(tx, row, values)
    await _add_audit(tx, moved, "cancel", now, actor=actor, details={"asked": not is_queued})
    return moved


async def take_expired(
    tx: Tx,
    *,
    token: UUID,
    now: datetime,
    limit: int,
    seconds: int = SWEEP_LEASE_SECONDS,
    unseen_since: datetime | None = None,
) -> list[Dispatch]:
    """Takes over leases that have expired, or whose workers were revoked or have not been seen
    since `unseen_since`.

    The sweep becomes the holder of the leases, so that late heartbeats can't extend them.

    Each dispatch is returned with the worker that lost it. The row itself no longer contains that
    worker. Otherwise, the worker's next poll would return the job with the sweep's token.
    """
    moment = db_now(tx, now)
    lost = await reads.lock_expired(tx, moment, limit=limit)
    if unseen_since is not None:
        expired_ids = {row.id for row in lost}
        abandoned = await reads.lock_abandoned(tx, unseen_since=unseen_since, limit=limit)
        lost += [row for row in abandoned if row.id not in expired_ids]
    taken_over = []
    for row in lost:
        moved = _require_moved(row, await writes.take(tx, row.id, token, moment, seconds=seconds))
        taken_over.append(replace(moved, worker_id=row.worker_id))
        details = {"worker": row.worker_id, "started": row.started_at is not None}
        await _add_audit(tx, moved, "expire", now, actor=SWEEP, details=details)
    return taken_over


async def extend_all(tx: Tx, *, seconds: int, now: datetime) -> int:
    """Extends all leases after an outage of the control plane, during which no worker could send
    heartbeats.
    """
    return await writes.extend_all(tx, db_now(tx, now), seconds=seconds)


async def postpone_all(tx: Tx, *, seconds: int) -> int:
    """Postpones the expiry of all leases by `seconds`, because no worker could send heartbeats
    during that time.
    """
    return await writes.postpone_all(tx, seconds=seconds)


async def is_any_due(tx: Tx, now: datetime) -> bool:
    """Whether the `not_before` of any dispatch has passed. This cheap check is made every second,
    before `wake_due`.
    """
    return await reads.is_any_due(tx, now)


async def end_delays(tx: Tx, pool: str, *, now: datetime) -> None:
    """Ends the delays of a pool's jobs, because its database is available again."""
    await writes.end_delays(tx, pool, now=now)


async def wake_due(tx: Tx, *, now: datetime, limit: int) -> list[Dispatch]:
    """Clears each `not_before` that has passed. Returns the affected dispatches. The caller must
    wake waiters for them.
    """
    woken = []
    for row in await reads.list_due(tx, now, limit=limit):
        values = await _requeue_values(tx, row, row.priority, row.queued_at) | {"not_before": None}
        woken.append(await _update(tx, row, values))
    return woken


async def has_prefetched(tx: Tx, *, not_of: str) -> bool:
    """Whether another worker holds a prefetched job. Usually none does, so this check saves a
    transaction.
    """
    return await reads.has_prefetched(tx, not_of=not_of)


async def is_any_prefetched(tx: Tx, lanes: Collection[QueueLane], *, not_of: str) -> bool:
    """Whether there may be a job to recall in these lanes. This check is cheaper than a
    transaction.
    """
    return bool(lanes) and await reads.is_any_prefetched(tx, lanes, not_of=not_of)


async def recall(
    tx: Tx,
    lanes: Collection[QueueLane],
    *,
    not_of: str,
    limit: int = 1,
    is_wanted: Callable[[Dispatch], bool] = lambda row: True,
) -> list[Dispatch]:
    """Requests that other workers return prefetched jobs, so that an idle worker can run them."""
    if not lanes:
        return []
    prefetched = await reads.list_prefetched(tx, lanes, not_of=not_of, limit=RECALL_LOOKED_AT_MAX)
    chosen = [row for row in prefetched if is_wanted(row)][:limit]
    return [await _update(tx, row, {"recall_requested": True}) for row in chosen]


async def reprioritise(
    tx: Tx, dispatch_id: int, priority: int, *, now: datetime, actor: str = "admin"
) -> Dispatch:
    row = await _get_locked(tx, dispatch_id)
    if row.status in ENDED:
        raise Refused(f"dispatch {dispatch_id} has already ended ({row.status})")
    if row.priority == priority:
        return row
    values: dict[str, Any] = {"priority": priority}
    if row.status is DispatchStatus.QUEUED:
        head = await writes.head_rank(tx, row.lane, priority)
        values["rank"] = row.rank if head is None else head
    moved = await _update(tx, row, values)
    details = {"from": row.priority, "to": priority}
    await _add_audit(tx, moved, "reprioritise", now, actor=actor, details=details)
    return moved


async def reorder(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> list[int]:
    """Reorders a tenant's jobs within the queue positions that they already hold, so that other
    jobs are not affected. Returns the ids of prefetched dispatches that are recalled, because
    another job must now run first.
    """
    row_of_job = await of_jobs(tx, tenant_id, job_ids)
    rows = [
        await _get_locked(tx, row_of_job[job_id].id)
        for job_id in job_ids
        if job_id in row_of_job
        and row_of_job[job_id].status not in ENDED
        and row_of_job[job_id].started_at is None
    ]
    recalled = []
    queued_before = False
    places = sorted(row.rank for row in rows)
    # The ranks must differ, because older jobs come first among those with equal ranks.
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + 1)
    for row, rank in zip(rows, places, strict=True):
        is_leased = row.status is DispatchStatus.LEASED
        is_recalled = is_leased and queued_before and not row.recall_requested
        queued_before |= not is_leased
        values = {"rank": rank} if rank != row.rank else {}
        if is_recalled:
            values["recall_requested"] = True
            recalled.append(row.id)
        if values:
            await _update(tx, row, values)
    return recalled


ACTIONS = {
    DispatchStatus.COMPLETED: "complete",
    DispatchStatus.FAILED: "fail",
    DispatchStatus.CANCELLED: "cancel",
}


def _end_values(status: DispatchStatus, now: datetime, error: str | None) -> dict[str, Any]:
    ended = {"status": status, "ended_at": now, "lease_expires_at": None, "not_before": None}
    return ended | ({"last_error": error} if error is not None else {})


async def _requeue_values(tx: Tx, row: Dispatch, priority: int, now: datetime) -> dict[str, Any]:
    """Returns the new values of a requeued dispatch. It gets the rank of the lane's current round,
    because its old rank would set the lane's virtual time back and give its tenant an advantage.
    """
    head = await writes.head_rank(tx, row.lane, priority)
    return {
        "status": DispatchStatus.QUEUED,
        "rank": row.rank if head is None else head,
        "queued_at": now,
        "lease_expires_at": None,
        "worker_id": None,
        "started_at": None,
        "is_prefetched": False,
        "recall_requested": False,
    }


async def _get_locked(tx: Tx, dispatch_id: int) -> Dispatch:
    """Reads and locks the row, so that it can't change before the transaction ends."""
    row = await reads.get(tx, dispatch_id, lock=True)
    if row is None:
        raise NotFound(f"dispatch {dispatch_id} was not found")
    return row


def _require_held(row: Dispatch, token: UUID) -> None:
    if row.status is not DispatchStatus.LEASED or row.lease_token != token:
        raise _not_held(row)


def _not_held(row: Dispatch) -> LeaseLost:
    return LeaseLost(f"the lease of dispatch {row.id} is no longer held", dispatch_id=row.id)


async def _update(
    tx: Tx, row: Dispatch, values: Mapping[str, Any], token: UUID | None = None
) -> Dispatch:
    """Updates the row if it still has the status that was read. The status is checked in addition
    to the row's lock.
    """
    return _require_moved(
        row, await writes.update_dispatch(tx, row.id, values, status=row.status, token=token)
    )


def _require_moved(row: Dispatch, moved: Dispatch | None) -> Dispatch:
    if moved is None:
        raise LeaseLost(
            f"the status of dispatch {row.id} has changed in the meantime", dispatch_id=row.id
        )
    return moved


def _holder(row: Dispatch) -> str:
    return f"worker:{row.worker_id}" if row.worker_id else SWEEP


async def _add_audit(
    tx: Tx,
    row: Dispatch,
    action: str,
    now: datetime,
    *,
    actor: str | None,
    details: Mapping[str, Any],
) -> None:
    present = {name: value for name, value in details.items() if value is not None}
    await writes.add_audit(tx, [row], actor=actor, action=action, now=now, details=present)
