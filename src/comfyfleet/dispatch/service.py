"""What may happen to a dispatch. Every function takes a transaction of the central database.

A worker's words are fenced by its token. The token stays on the row when the lease ends, so that
the same word said again is known; any other token is answered LeaseLost, and nothing changes.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.db.dialect import db_now
from comfyfleet.dispatch.model import (
    ENDED,
    ActiveRow,
    Depth,
    Dispatch,
    EndedRow,
    Lane,
    NewDispatch,
    Requeue,
    Status,
)
from comfyfleet.dispatch.store import adding, lists, moves, rows, switches, upkeep
from comfyfleet.dispatch.switch_costs import Estimate, ModelOfFleet, Run, Samples, estimate
from comfyfleet.kernel.errors import LeaseLost, NotFound, Refused
from comfyfleet.kernel.settings import Settings

DEFAULTS = Settings()
# How long a sweep may take to end what it has taken, before another sweep may take it.
SWEEP_LEASE_SECONDS = 60
SWEEP = "sweep"
RECALL_LOOKED_AT_MAX = 20
SWITCHES_KEPT = timedelta(days=30)


async def enqueue(tx: Tx, new: Sequence[NewDispatch], *, now: datetime) -> list[Dispatch]:
    """Those that are new; the caller wakes their lanes after it has committed."""
    return await adding.enqueue(tx, new, now=now) if new else []


async def enqueue_ended(
    tx: Tx, new: NewDispatch, status: Status, *, now: datetime, error: str | None = None
) -> Dispatch | None:
    """For a job that ended before its dispatch was made: the unique key then bars a second."""
    values = {
        "status": status,
        "created_at": now,
        "queued_at": now,
        "ended_at": now,
        "last_error": error,
    }
    added = await moves.add(tx, [(new, 0)], values)
    await moves.note(tx, added, actor=None, action="submit", now=now, details={"ended": status})
    return added[0] if added else None


async def get(tx: Tx, dispatch_id: int) -> Dispatch:
    found = await rows.one(tx, dispatch_id)
    if found is None:
        raise NotFound(f"there is no dispatch {dispatch_id}")
    return found


async def of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> Dispatch | None:
    return await rows.of_job(tx, tenant_id, job_id)


async def list_(
    tx: Tx, *, before_id: int | None = None, limit: int = 100, **wanted: Any
) -> list[Dispatch]:
    """The newest first; `wanted` is by column: status, workflow_id, worker_id, tenant_id, is_poisoned."""
    return await lists.page(tx, wanted, before_id=before_id, limit=limit)


async def of_jobs(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> dict[UUID, Dispatch]:
    """By job, of those that have one."""
    return {row.job_id: row for row in await rows.of_jobs(tx, tenant_id, job_ids)}


async def have_ended(tx: Tx, pairs: Sequence[tuple[UUID, UUID]]) -> dict[UUID, bool]:
    """Of those (tenant, job) that have a dispatch, whether it has ended; by job."""
    return await upkeep.have_ended(tx, pairs) if pairs else {}


async def leased_after(tx: Tx, after_id: int, *, before: datetime, limit: int) -> list[ActiveRow]:
    """Page by page, those that were made before then."""
    return await upkeep.leased(tx, after_id, before=before, limit=limit)


async def queued_after(
    tx: Tx, after: Sequence[Any] | None, *, before: datetime, limit: int
) -> tuple[list[ActiveRow], list[Any] | None]:
    """Page by page, those that were made before then, and where to go on; None: that was all."""
    return await upkeep.queued(tx, after, before=before, limit=limit)


async def ended_before(
    tx: Tx, before: datetime, *, after: EndedRow | None, limit: int
) -> list[EndedRow]:
    """Page by page, the longest ended first."""
    return await upkeep.ended_before(tx, before, after=after, limit=limit)


async def remove(tx: Tx, dispatch_ids: Sequence[int]) -> int:
    """Those of them that have ended. Whoever removes one makes sure that its job has ended too."""
    return await upkeep.remove(tx, dispatch_ids) if dispatch_ids else 0


async def held_by(tx: Tx, worker_id: str) -> list[Dispatch]:
    return await rows.held_by(tx, worker_id)


async def queued(tx: Tx, tenant_id: UUID | None = None) -> int:
    """How many jobs wait, of one tenant or of all."""
    return await rows.queued(tx, tenant_id)


async def depths(tx: Tx) -> dict[Lane, Depth]:
    return await rows.depths(tx)


async def bound(tx: Tx) -> dict[str, int]:
    """How many jobs each worker holds or has waiting for it alone, by `worker:ID`."""
    return await rows.bound(tx)


async def ahead(tx: Tx, dispatch: Dispatch) -> int:
    return await rows.ahead(tx, dispatch)


async def typical_seconds(tx: Tx, workflow_id: int) -> float | None:
    return await rows.typical_seconds(tx, workflow_id)


async def add_runs(tx: Tx, runs: Sequence[Run], *, now: datetime) -> None:
    """For learning what switches of models cost. Of what nobody runs any more nothing is kept."""
    await switches.add_runs(tx, runs, now=now)
    await switches.forget(tx, before=now - SWITCHES_KEPT)


async def switches_changed_at(tx: Tx) -> datetime | None:
    return await switches.newest_change(tx)


async def switch_costs(tx: Tx, *, fleet_id: int | None = None) -> dict[ModelOfFleet, Estimate]:
    """What a switch to a model costs a fleet, as far as its runs tell."""
    by_model: dict[ModelOfFleet, list[Samples]] = defaultdict(list)
    for kind, samples in (await switches.all_samples(tx, fleet_id=fleet_id)).items():
        by_model[kind.fleet_id, kind.model_key].append(samples)
    found = ((key, estimate(each)) for key, each in by_model.items())
    return {key: each for key, each in found if each is not None}


async def report_start(tx: Tx, dispatch_id: int, token: UUID, *, now: datetime) -> Dispatch:
    """The prompt runs: from now on, an expiry uses up the attempt."""
    row = await _held(tx, dispatch_id, token)
    if row.started_at is not None:
        return row
    started = {"started_at": now, "is_prefetched": False, "recall_requested": False}
    return await _changed(tx, row, started, token)


async def require_holder(tx: Tx, dispatch_id: int, worker_id: str) -> None:
    """Raises LeaseLost if another worker holds it. A row without a worker has gone back."""
    row = await _known(tx, dispatch_id)
    if row.worker_id not in (None, worker_id):
        raise _not_held(row)


async def requeue(
    tx: Tx,
    dispatch_id: int,
    token: UUID,
    reason: Requeue,
    *,
    now: datetime,
    detail: str | None = None,
    not_before: datetime | None = None,
    settings: Settings = DEFAULTS,
) -> Dispatch:
    """Back into the queue. What comes back still leased is used up: the caller ends it as failed."""
    row = await _known(tx, dispatch_id)
    if row.status is Status.QUEUED and row.lease_token == token:
        return row
    _require_held(row, token)
    after = _after_requeue(row, reason, settings)
    told = f"Requeued: {reason}" + (f" ({detail})" if detail else "")
    if reason is Requeue.OTHER and detail:
        told = f"Requeued: {detail}"
    values: dict[str, Any] = {
        "attempts": after.attempts,
        "requeues": after.requeues,
        "lost_leases": after.lost_leases,
        "is_poisoned": after.is_poisoned,
        "last_error": told,
    }
    if not after.is_used_up:
        values |= await _queued_again(tx, row, row.priority, now) | {"not_before": not_before}
        if reason.prefers_others:
            until = now + timedelta(seconds=settings.avoid_worker_seconds)
            values |= {"avoid_worker_id": row.worker_id, "avoid_until": until}
    moved = await _changed(tx, row, values, token)
    details = {"reason": reason, "worker": row.worker_id, "detail": detail}
    await _note(tx, moved, "requeue", now, actor=_holder(row), details=details)
    return moved


def _after_requeue(row: Dispatch, reason: Requeue, settings: Settings) -> Dispatch:
    """An expired lease has used its attempt once the worker had reported a start.

    One that had not is no fault of the job's, unless that happens again and again: it may be what
    takes its workers down while they prepare it. Behind another job it can't have been.
    """
    is_counted = row.started_at is not None if reason is Requeue.EXPIRED else reason.counts
    is_lost = reason is Requeue.EXPIRED and not is_counted and not row.is_prefetched
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
    status: Status,
    *,
    now: datetime,
    error: str | None = None,
    duration: float | None = None,
) -> Dispatch:
    row = await _known(tx, dispatch_id)
    if row.status is status and row.lease_token == token:
        return row
    _require_held(row, token)
    values = _ended(status, now, error) | {"duration_seconds": duration}
    ended = await _changed(tx, row, values, token)
    details = {"worker": row.worker_id, "error": error}
    await _note(tx, ended, ACTIONS[status], now, actor=_holder(row), details=details)
    return ended


async def bring_in_line(
    tx: Tx, dispatch_id: int, status: Status, *, now: datetime, error: str | None = None
) -> Dispatch:
    """The job has ended, and the tenant's row decides: whatever the lease, the dispatch ends too."""
    row = await _known(tx, dispatch_id)
    if row.status in ENDED:
        return row
    ended = await _changed(tx, row, _ended(status, now, error))
    details = {"in_line": True, "worker": row.worker_id, "error": error}
    await _note(tx, ended, ACTIONS[status], now, actor="system", details=details)
    return ended


async def cancel(tx: Tx, dispatch_id: int, *, now: datetime, actor: str | None = None) -> Dispatch:
    """Queued ends at once; leased is told with its next heartbeat; ended stays as it is."""
    row = await _known(tx, dispatch_id)
    if row.status in ENDED or row.cancel_requested:
        return row
    is_queued = row.status is Status.QUEUED
    values = _ended(Status.CANCELLED, now, None) if is_queued else {"cancel_requested": True}
    moved = await _changed(tx, row, values)
    await _note(tx, moved, "cancel", now, actor=actor, details={"asked": not is_queued})
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
    """Leases whose time is up, or whose workers were not seen since then, or were revoked.

    The sweep takes the leases itself, so that a late heartbeat can't overtake what follows.

    Each is answered with the worker that lost it; the row no longer names it, or it would be
    handed to that worker again, with the sweep's token.
    """
    moment = db_now(tx, now)
    lost = await rows.expired(tx, moment, limit=limit)
    if unseen_since is not None:
        known = {row.id for row in lost}
        abandoned = await rows.abandoned(tx, unseen_since=unseen_since, limit=limit)
        lost += [row for row in abandoned if row.id not in known]
    taken = []
    for row in lost:
        moved = _moved(row, await moves.take(tx, row.id, token, moment, seconds=seconds))
        taken.append(replace(moved, worker_id=row.worker_id))
        details = {"worker": row.worker_id, "started": row.started_at is not None}
        await _note(tx, moved, "expire", now, actor=SWEEP, details=details)
    return taken


async def extend_all(tx: Tx, *, seconds: int, now: datetime) -> int:
    """After an outage of ours: nobody could send a heartbeat, so nobody is late."""
    return await moves.extend_all(tx, db_now(tx, now), seconds=seconds)


async def is_any_due(tx: Tx, now: datetime) -> bool:
    """Asked every second, for nothing mostly."""
    return await rows.is_any_due(tx, now)


async def wake_due(tx: Tx, *, now: datetime, limit: int) -> list[Dispatch]:
    """Rows whose `not_before` has come are visible again; whoever waits for them is to be woken."""
    woken = []
    for row in await rows.due(tx, now, limit=limit):
        values = await _queued_again(tx, row, row.priority, row.queued_at) | {"not_before": None}
        woken.append(await _changed(tx, row, values))
    return woken


async def has_prefetched(tx: Tx, *, not_of: str) -> bool:
    """Whether there can be anything to recall: mostly not, and then nothing is begun."""
    return await rows.has_prefetched(tx, not_of=not_of)


async def is_any_prefetched(tx: Tx, lanes: Collection[Lane], *, not_of: str) -> bool:
    """Whether there may be something to recall: mostly not, and to look is cheaper than to begin."""
    return bool(lanes) and await rows.is_any_prefetched(tx, lanes, not_of=not_of)


async def recall(
    tx: Tx,
    lanes: Collection[Lane],
    *,
    not_of: str,
    limit: int = 1,
    is_wanted: Callable[[Dispatch], bool] = lambda row: True,
) -> list[Dispatch]:
    """Asks for prefetched jobs back, for a worker that has nothing to do and could run them."""
    if not lanes:
        return []
    held = await rows.prefetched(tx, lanes, not_of=not_of, limit=RECALL_LOOKED_AT_MAX)
    wanted = [row for row in held if is_wanted(row)][:limit]
    return [await _changed(tx, row, {"recall_requested": True}) for row in wanted]


async def reprioritise(
    tx: Tx, dispatch_id: int, priority: int, *, now: datetime, actor: str = "admin"
) -> Dispatch:
    row = await _known(tx, dispatch_id)
    if row.status in ENDED:
        raise Refused(f"dispatch {dispatch_id} is {row.status}")
    if row.priority == priority:
        return row
    values: dict[str, Any] = {"priority": priority}
    if row.status is Status.QUEUED:
        head = await moves.head_rank(tx, row.lane, priority)
        values["rank"] = row.rank if head is None else head
    moved = await _changed(tx, row, values)
    details = {"from": row.priority, "to": priority}
    await _note(tx, moved, "reprioritise", now, actor=actor, details=details)
    return moved


ACTIONS = {Status.COMPLETED: "complete", Status.FAILED: "fail", Status.CANCELLED: "cancel"}


def _ended(status: Status, now: datetime, error: str | None) -> dict[str, Any]:
    ended = {"status": status, "ended_at": now, "lease_expires_at": None, "not_before": None}
    return ended | ({"last_error": error} if error is not None else {})


async def _queued_again(tx: Tx, row: Dispatch, priority: int, now: datetime) -> dict[str, Any]:
    """Joins the round that is on: its old rank would drag virtual time back, and give credit."""
    head = await moves.head_rank(tx, row.lane, priority)
    return {
        "status": Status.QUEUED,
        "rank": row.rank if head is None else head,
        "queued_at": now,
        "lease_expires_at": None,
        "worker_id": None,
        "started_at": None,
        "is_prefetched": False,
        "recall_requested": False,
    }


async def _known(tx: Tx, dispatch_id: int) -> Dispatch:
    """Locked: what is decided about it holds until the transaction ends."""
    row = await rows.one(tx, dispatch_id, lock=True)
    if row is None:
        raise NotFound(f"there is no dispatch {dispatch_id}")
    return row


async def _held(tx: Tx, dispatch_id: int, token: UUID) -> Dispatch:
    row = await _known(tx, dispatch_id)
    _require_held(row, token)
    return row


def _require_held(row: Dispatch, token: UUID) -> None:
    if row.status is not Status.LEASED or row.lease_token != token:
        raise _not_held(row)


def _not_held(row: Dispatch) -> LeaseLost:
    return LeaseLost(f"the lease of dispatch {row.id} is no longer held", dispatch_id=row.id)


async def _changed(
    tx: Tx, row: Dispatch, values: Mapping[str, Any], token: UUID | None = None
) -> Dispatch:
    """Guarded by what was seen, although the row is locked: the write itself must be safe."""
    return _moved(row, await moves.change(tx, row.id, values, status=row.status, token=token))


def _moved(row: Dispatch, moved: Dispatch | None) -> Dispatch:
    if moved is None:
        raise LeaseLost(f"dispatch {row.id} has moved on", dispatch_id=row.id)
    return moved


def _holder(row: Dispatch) -> str:
    return f"worker:{row.worker_id}" if row.worker_id else SWEEP


async def _note(
    tx: Tx,
    row: Dispatch,
    action: str,
    now: datetime,
    *,
    actor: str | None,
    details: Mapping[str, Any],
) -> None:
    said = {name: value for name, value in details.items() if value is not None}
    await moves.note(tx, [row], actor=actor, action=action, now=now, details=said)
