"""Makes all changes to dispatches. Each function takes a transaction of the central database.

A worker's requests are checked by its lease token. The token stays on the row after the lease has
ended, so that a repeated request is recognized. Any other token raises LeaseLost and changes
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
# Seconds for which a sweep owns the leases that it has taken over, before another sweep may take
# them.
SWEEP_LEASE_SECONDS = 60
SWEEP = "sweep"
RECALL_LOOKED_AT_MAX = 20
SWITCHES_KEPT = timedelta(days=30)


async def enqueue(tx: Tx, new: Sequence[NewDispatch], *, now: datetime) -> list[Dispatch]:
    """Adds dispatches and returns the new ones. The caller wakes their lanes after its commit."""
    return await writes.enqueue(tx, new, now=now) if new else []


async def enqueue_ended(
    tx: Tx, new: NewDispatch, status: DispatchStatus, *, now: datetime, error: str | None = None
) -> Dispatch | None:
    """Adds an ended dispatch for a job that ended without one. The unique key prevents a second
    one.
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
    found = await reads.get(tx, dispatch_id)
    if found is None:
        raise NotFound(f"there is no dispatch {dispatch_id}")
    return found


async def of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> Dispatch | None:
    return await reads.of_job(tx, tenant_id, job_id)


async def list_dispatches(
    tx: Tx, *, before_id: int | None = None, limit: int = 100, **wanted: Any
) -> list[Dispatch]:
    """Returns a page of dispatches, the newest first. `wanted` filters by column: status,
    workflow_id, worker_id, tenant_id, is_poisoned.
    """
    return await reads.list_page(tx, wanted, before_id=before_id, limit=limit)


async def of_jobs(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> dict[UUID, Dispatch]:
    """Returns the dispatches of these jobs by job id. Jobs without one are left out."""
    return {row.job_id: row for row in await reads.of_jobs(tx, tenant_id, job_ids)}


async def newest(tx: Tx, *, limit: int) -> list[Dispatch]:
    """Returns the dispatches that were created last, in any state."""
    return await reads.newest(tx, limit=limit)


async def get_many(tx: Tx, dispatch_ids: Collection[int]) -> list[Dispatch]:
    """Returns the existing dispatches."""
    return await reads.get_many(tx, dispatch_ids) if dispatch_ids else []


async def of_pairs(tx: Tx, pairs: Sequence[tuple[UUID, UUID]]) -> dict[UUID, Dispatch]:
    """Returns the dispatches of these (tenant, job) pairs by job id. Jobs without one are left out."""
    return {row.job_id: row for row in await reads.of_pairs(tx, pairs)} if pairs else {}


async def have_ended(tx: Tx, pairs: Sequence[tuple[UUID, UUID]]) -> dict[UUID, bool]:
    """Returns by job id whether its dispatch has ended, for those (tenant, job) pairs that have
    one.
    """
    return await reads.have_ended(tx, pairs) if pairs else {}


async def leased_after(
    tx: Tx, after_id: int, *, before: datetime, limit: int
) -> list[ActiveDispatch]:
    """Returns a page of leased dispatches that were created before a moment."""
    return await reads.leased_page(tx, after_id, before=before, limit=limit)


async def queued_after(
    tx: Tx, after: Sequence[Any] | None, *, before: datetime, limit: int
) -> tuple[list[ActiveDispatch], list[Any] | None]:
    """Returns a page of queued dispatches that were created before a moment, and the next cursor
    (None at the end).
    """
    return await reads.queued_page(tx, after, before=before, limit=limit)


async def ended_before(
    tx: Tx, before: datetime, *, after: EndedDispatch | None, limit: int
) -> list[EndedDispatch]:
    """Returns a page of ended dispatches, those that ended first first."""
    return await reads.ended_before(tx, before, after=after, limit=limit)


async def remove(tx: Tx, dispatch_ids: Sequence[int]) -> int:
    """Deletes dispatches that have ended. The caller must know that their jobs have ended as well."""
    return await reads.remove(tx, dispatch_ids) if dispatch_ids else 0


async def held_by(tx: Tx, worker_id: str) -> list[Dispatch]:
    return await reads.held_by(tx, worker_id)


async def worker_of(tx: Tx, tenant_id: UUID, job_id: UUID) -> str | None:
    """Returns the worker that holds the job's lease or held the last one."""
    return await reads.worker_of(tx, tenant_id, job_id)


async def load_of(tx: Tx, worker_id: str) -> WorkerLoad | None:
    """Returns a worker's load, or None if the worker doesn't exist or accepts no jobs."""
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
    """Counts the queued jobs of one tenant, or of all."""
    return await reads.count_queued(tx, tenant_id)


async def depths(tx: Tx) -> dict[QueueLane, LaneDepth]:
    return await reads.depths(tx)


async def count_held(tx: Tx) -> dict[QueueLane, int]:
    """Counts the leased jobs that have not started, which workers hold for later, by lane."""
    return await reads.count_held(tx)


async def count_leases(tx: Tx, worker_ids: Collection[str] | None = None) -> dict[str, int]:
    """Counts the jobs that each of these workers holds, or each worker. Workers without jobs are
    left out.
    """
    return await reads.count_leases(tx, worker_ids)


async def count_bound(tx: Tx) -> dict[str, int]:
    """Counts the jobs that each worker holds or that are bound to it, by `worker:ID`."""
    return await reads.count_bound(tx)


async def count_ahead(tx: Tx, dispatch: Dispatch) -> int:
    return await reads.count_ahead(tx, dispatch)


async def typical_seconds(tx: Tx, workflow_id: int) -> float | None:
    return await reads.typical_seconds(tx, workflow_id)


async def add_runs(tx: Tx, runs: Sequence[TimedRun], *, now: datetime) -> None:
    """Stores timed runs, from which switch costs are estimated, and counts them for operators'
    plots. Deletes old samples that are no longer added to.
    """
    await writes.add_runs(tx, runs, now=now)
    changes = Counter(f"{MODEL_RUNS}{run.change}" for run in runs)
    await metrics_queries.add_sums(tx, now, changes, steps=ROLLUP_STEPS)
    await writes.delete_before(tx, before=now - SWITCHES_KEPT)


async def switches_changed_at(tx: Tx) -> datetime | None:
    return await writes.last_changed_at(tx)


async def switch_costs(tx: Tx, *, fleet_id: int | None = None) -> dict[ModelOfFleet, Estimate]:
    """Estimates the cost of a switch to each model on a fleet from its stored runs."""
    by_model: dict[ModelOfFleet, list[Samples]] = defaultdict(list)
    for kind, samples in (await writes.all_samples(tx, fleet_id=fleet_id)).items():
        by_model[kind.fleet_id, kind.model_key].append(samples)
    found = ((key, estimate(each)) for key, each in by_model.items())
    return {key: each for key, each in found if each is not None}


async def require_holder(tx: Tx, dispatch_id: int, worker_id: str) -> None:
    """Raises LeaseLost if another worker holds the dispatch. A row without a worker was requeued."""
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
    """Returns a dispatch to the queue. If the returned row is still leased, its attempts are used
    up, and the caller ends it as failed.
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
        if reason is RequeueReason.RECALL:  # it keeps its place, unless that place has passed
            values["rank"] = max(values["rank"], row.rank)
        if reason.prefers_others:
            until = now + timedelta(seconds=settings.avoid_worker_seconds)
            values |= {"avoid_worker_id": row.worker_id, "avoid_until": until}
    moved = await _update(tx, row, values, token)
    details = {"reason": reason, "worker": row.worker_id, "detail": detail}
    await _add_audit(tx, moved, "requeue", now, actor=_holder(row), details=details)
    return moved


def _after_requeue(row: Dispatch, reason: RequeueReason, settings: Settings) -> Dispatch:
    """Returns the row with its counters after a requeue.

    An expired lease uses up the attempt if the worker had reported a start. If it had not, the job
    is not to blame, unless that happens repeatedly: then the job may be what takes its workers down
    while they prepare it. A prefetched job cannot have done that.
    """
    is_counted = reason.counts
    if reason is RequeueReason.EXPIRED:
        is_counted = row.started_at is not None
    elif reason is RequeueReason.BACKEND_DOWN and row.is_prefetched:
        # It waited behind another job and never used the backend that failed.
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
    """Ends the dispatch of an ended job regardless of its lease, because the tenant's row decides."""
    row = await _get_locked(tx, dispatch_id)
    if row.status in ENDED:
        return row
    ended = await _update(tx, row, _end_values(status, now, error))
    details = {"in_line": True, "worker": row.worker_id, "error": error}
    await _add_audit(tx, ended, ACTIONS[status], now, actor="system", details=details)
    return ended


async def cancel(tx: Tx, dispatch_id: int, *, now: datetime, actor: str | None = None) -> Dispatch:
    """Cancels a dispatch. A queued one ends at once, and the worker of a leased one is told with
    its next heartbeat. An ended one is not changed.
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
    """Takes over leases that expired, or whose workers were revoked or not seen since
    `unseen_since`.

    The sweep becomes the holder, so that a late heartbeat can't overtake what follows.

    Each dispatch is returned with the worker that lost it. The row itself no longer names that
    worker, which would otherwise be handed the job again with the sweep's token.
    """
    moment = db_now(tx, now)
    lost = await reads.lock_expired(tx, moment, limit=limit)
    if unseen_since is not None:
        known = {row.id for row in lost}
        abandoned = await reads.lock_abandoned(tx, unseen_since=unseen_since, limit=limit)
        lost += [row for row in abandoned if row.id not in known]
    taken = []
    for row in lost:
        moved = _require_moved(row, await writes.take(tx, row.id, token, moment, seconds=seconds))
        taken.append(replace(moved, worker_id=row.worker_id))
        details = {"worker": row.worker_id, "started": row.started_at is not None}
        await _add_audit(tx, moved, "expire", now, actor=SWEEP, details=details)
    return taken


async def extend_all(tx: Tx, *, seconds: int, now: datetime) -> int:
    """Extends all leases after an outage of the control plane, because no worker could send
    heartbeats during it.
    """
    return await writes.extend_all(tx, db_now(tx, now), seconds=seconds)


async def postpone_all(tx: Tx, *, seconds: int) -> int:
    """Postpones the expiry of all leases by the seconds during which no worker could send a
    heartbeat.
    """
    return await writes.postpone_all(tx, seconds=seconds)


async def is_any_due(tx: Tx, now: datetime) -> bool:
    """Whether a `not_before` has passed. This cheap check precedes `wake_due` every second."""
    return await reads.is_any_due(tx, now)


async def end_delays(tx: Tx, pool: str, *, now: datetime) -> None:
    """Makes the delayed jobs of a pool due, because its database is available again."""
    await writes.end_delays(tx, pool, now=now)


async def wake_due(tx: Tx, *, now: datetime, limit: int) -> list[Dispatch]:
    """Clears `not_before` where it has passed and returns these rows, whose waiters must be woken."""
    woken = []
    for row in await reads.list_due(tx, now, limit=limit):
        values = await _requeue_values(tx, row, row.priority, row.queued_at) | {"not_before": None}
        woken.append(await _update(tx, row, values))
    return woken


async def has_prefetched(tx: Tx, *, not_of: str) -> bool:
    """Whether another worker holds a prefetched job. Usually none does, which saves a transaction."""
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
    """Recalls prefetched jobs for an idle worker that could run them."""
    if not lanes:
        return []
    held = await reads.list_prefetched(tx, lanes, not_of=not_of, limit=RECALL_LOOKED_AT_MAX)
    wanted = [row for row in held if is_wanted(row)][:limit]
    return [await _update(tx, row, {"recall_requested": True}) for row in wanted]


async def reprioritise(
    tx: Tx, dispatch_id: int, priority: int, *, now: datetime, actor: str = "admin"
) -> Dispatch:
    row = await _get_locked(tx, dispatch_id)
    if row.status in ENDED:
        raise Refused(f"dispatch {dispatch_id} is {row.status}")
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
    """Assigns the places of these jobs to the same jobs in this order, so that other jobs are not
    affected. Returns prefetched jobs that are recalled, because another one must run first.
    """
    row_of_job = await of_jobs(tx, tenant_id, job_ids)
    rows = [
        await _get_locked(tx, row_of_job[each].id)
        for each in job_ids
        if each in row_of_job
        and row_of_job[each].status not in ENDED
        and row_of_job[each].started_at is None
    ]
    recalled = []
    queued_before = False
    places = sorted(row.rank for row in rows)
    for index in range(1, len(places)):  # for equal ranks, the older job would come first
        places[index] = max(places[index], places[index - 1] + 1)
    for row, rank in zip(rows, places, strict=True):
        is_leased = row.status is DispatchStatus.LEASED
        is_asked_back = is_leased and queued_before and not row.recall_requested
        queued_before |= not is_leased
        values = {"rank": rank} if rank != row.rank else {}
        if is_asked_back:
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
    """Returns the values that rank a requeued job in the current round. Its old rank would set
    virtual time back and give its tenant an advantage.
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
    """Reads the row with a lock, so that a decision based on it holds until the transaction ends."""
    row = await reads.get(tx, dispatch_id, lock=True)
    if row is None:
        raise NotFound(f"there is no dispatch {dispatch_id}")
    return row


def _require_held(row: Dispatch, token: UUID) -> None:
    if row.status is not DispatchStatus.LEASED or row.lease_token != token:
        raise _not_held(row)


def _not_held(row: Dispatch) -> LeaseLost:
    return LeaseLost(f"the lease of dispatch {row.id} is no longer held", dispatch_id=row.id)


async def _update(
    tx: Tx, row: Dispatch, values: Mapping[str, Any], token: UUID | None = None
) -> Dispatch:
    """Updates the row if it still has the status that was read. This is checked although the row is
    locked.
    """
    return _require_moved(
        row, await writes.update_dispatch(tx, row.id, values, status=row.status, token=token)
    )


def _require_moved(row: Dispatch, moved: Dispatch | None) -> Dispatch:
    if moved is None:
        raise LeaseLost(f"dispatch {row.id} has moved on", dispatch_id=row.id)
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
