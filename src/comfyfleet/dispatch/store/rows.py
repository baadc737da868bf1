"""Reading rows of the queue."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, and_, bindparam, case, func, or_, select, text

from comfyfleet.db import Tx
from comfyfleet.db.central import PREFETCHED, QUEUED, workers
from comfyfleet.db.central import dispatches as d
from comfyfleet.db.dialect import is_one_of, locked
from comfyfleet.db.statement import OfSeveral, Statement
from comfyfleet.dispatch.model import Depth, Dispatch, Lane, Status

# In the order of Dispatch's fields, but that a lane stands as its three columns.
FIELDS = (
    "id, tenant_id, tenant_job_id, workflow_id, stage, provider, status, priority, rank, attempts, "
    "max_attempts, requeues, lease_number, lease_token, lease_expires_at, worker_id, not_before, "
    "backend_affinity, model_key, model_set, is_poisoned, cancel_requested, recall_requested, "
    "is_prefetched, duration_seconds, last_error, created_at, queued_at, leased_at, started_at, "
    "ended_at, heard_at, lost_leases"
)
AHEAD_COUNTED_MAX = 10_000
ENDED_LOOKED_AT_MAX = 2_000
WHOLE = tuple(d.c[name] for name in FIELDS.split(", "))
# Built once: that takes longer than SQLite takes to answer.
_ALL = select(*WHOLE)


def as_dispatch(row: Sequence[Any]) -> Dispatch:
    values = (*row[:3], Lane(*row[3:6]), Status(row[6]), *row[7:])
    return Dispatch(*values)


def in_lane(lane: Lane) -> ColumnElement[bool]:
    return and_(
        d.c.workflow_id == lane.workflow_id, d.c.stage == lane.stage, d.c.provider == lane.provider
    )


async def found(tx: Tx, query: Select[Any]) -> list[Dispatch]:
    return [as_dispatch(row) for row in await tx.execute(query)]


_ONE = Statement(lambda tx: _ALL.where(d.c.id == bindparam("of_id")))
_ONE_LOCKED = Statement(lambda tx: locked(tx, _ALL.where(d.c.id == bindparam("of_id"))))


async def one(tx: Tx, dispatch_id: int, *, lock: bool = False) -> Dispatch | None:
    rows = await (_ONE_LOCKED if lock else _ONE).tuples(tx, {"of_id": dispatch_id})
    return as_dispatch(rows[0]) if rows else None


async def some(tx: Tx, dispatch_ids: Iterable[int]) -> list[Dispatch]:
    return await found(tx, _ALL.where(is_one_of(tx, d.c.id, dispatch_ids)))


_OF_JOB = Statement(
    lambda tx: _ALL.where(
        d.c.tenant_id == bindparam("of_tenant"), d.c.tenant_job_id == bindparam("of_job")
    )
)


async def of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> Dispatch | None:
    rows = await _OF_JOB.tuples(tx, {"of_tenant": tenant_id, "of_job": job_id})
    return as_dispatch(rows[0]) if rows else None


_OF_JOBS = OfSeveral(
    d.c.tenant_job_id,
    lambda tx, is_one: _ALL.where(d.c.tenant_id == bindparam("of_tenant"), is_one),
)


async def of_jobs(tx: Tx, tenant_id: UUID, job_ids: Iterable[UUID]) -> list[Dispatch]:
    rows = await _OF_JOBS.of(tx, job_ids, {"of_tenant": tenant_id})
    return [as_dispatch(tuple(row.values())) for row in rows]


async def held_by(tx: Tx, worker_id: str) -> list[Dispatch]:
    held = (d.c.worker_id == worker_id) & (d.c.status == Status.LEASED)
    return await found(tx, _ALL.where(held).order_by(d.c.id))


async def queued(tx: Tx, tenant_id: UUID | None) -> int:
    """How many wait. As the index says it: SQLite would count by one over all there ever were."""
    mine = [] if tenant_id is None else [d.c.tenant_id == tenant_id]
    query = select(func.count()).select_from(d).where(text(QUEUED), *mine)
    return int(await tx.scalar(query) or 0)


async def depths(tx: Tx) -> dict[Lane, Depth]:
    waiting = d.c.status == Status.QUEUED
    lane = (d.c.workflow_id, d.c.stage, d.c.provider)
    query = (
        select(
            *lane,
            func.count().filter(waiting),
            func.count().filter(~waiting),
            func.min(d.c.queued_at).filter(waiting),
        )
        .where(d.c.status.in_([Status.QUEUED, Status.LEASED]))
        .group_by(*lane)
    )
    return {Lane(*row[:3]): Depth(*row[3:]) for row in await tx.execute(query)}


async def bound(tx: Tx) -> dict[str, int]:
    """How many jobs each worker holds or has waiting for it alone, by `worker:ID`."""
    holder = func.coalesce("worker:" + d.c.worker_id, "")
    bound_to = case((d.c.status == Status.LEASED, holder), else_=d.c.backend_affinity)
    query = (
        select(bound_to, func.count())
        .where(d.c.status.in_([Status.QUEUED, Status.LEASED]))
        .where(or_(d.c.status == Status.LEASED, d.c.backend_affinity.is_not(None)))
        .group_by(bound_to)
    )
    return {row[0]: row[1] for row in await tx.execute(query)}


async def ahead(tx: Tx, dispatch: Dispatch) -> int:
    """Queued rows of its lane that come before it; counted up to a bound, it is for people."""
    before = or_(
        d.c.priority > dispatch.priority,
        and_(d.c.priority == dispatch.priority, d.c.rank < dispatch.rank),
        and_(d.c.priority == dispatch.priority, d.c.rank == dispatch.rank, d.c.id < dispatch.id),
    )
    some = (
        select(d.c.id)
        .where(
            d.c.status == Status.QUEUED, d.c.not_before.is_(None), in_lane(dispatch.lane), before
        )
        .limit(AHEAD_COUNTED_MAX)
        .subquery()
    )
    return int(await tx.scalar(select(func.count()).select_from(some)) or 0)


async def typical_seconds(tx: Tx, workflow_id: int) -> float | None:
    """The mean of what ended lately; the whole history is not read for it."""
    lately = (
        select(d.c.workflow_id, d.c.duration_seconds)
        .where(d.c.ended_at.is_not(None))
        .order_by(d.c.ended_at.desc())
        .limit(ENDED_LOOKED_AT_MAX)
        .subquery()
    )
    mean = select(func.avg(lately.c.duration_seconds)).where(lately.c.workflow_id == workflow_id)
    value = await tx.scalar(mean)
    return None if value is None else float(value)


async def expired(tx: Tx, moment: ColumnElement[datetime], *, limit: int) -> list[Dispatch]:
    """Locked, and only those that nobody else has in hand."""
    query = (
        _ALL.where(d.c.status == Status.LEASED, d.c.lease_expires_at < moment)
        .order_by(d.c.lease_expires_at)
        .limit(limit)
    )
    return await found(tx, locked(tx, query, skip_locked=True))


async def abandoned(tx: Tx, *, unseen_since: datetime, limit: int) -> list[Dispatch]:
    """Held by workers that are not heard of any more, or that were revoked; locked as above."""
    gone = select(workers.c.worker_id).where(
        or_(workers.c.last_seen_at < unseen_since, workers.c.revoked_at.is_not(None))
    )
    query = _ALL.where(d.c.status == Status.LEASED, d.c.worker_id.in_(gone)).limit(limit)
    return await found(tx, locked(tx, query, skip_locked=True))


_ANY_DUE = Statement(
    lambda _: (
        select(d.c.id)
        .where(d.c.status == Status.QUEUED, d.c.not_before <= bindparam("by_now"))
        .limit(1)
    )
)


async def is_any_due(tx: Tx, now: datetime) -> bool:
    return await _ANY_DUE.first(tx, {"by_now": now}) is not None


async def due(tx: Tx, now: datetime, *, limit: int) -> list[Dispatch]:
    query = (
        _ALL.where(d.c.status == Status.QUEUED, d.c.not_before <= now)
        .order_by(d.c.not_before)
        .limit(limit)
    )
    return await found(tx, locked(tx, query, skip_locked=True))


_HAS_PREFETCHED = Statement(
    lambda tx: (
        select(d.c.id)
        .where(text(PREFETCHED), d.c.worker_id != bindparam("not_of"))  # as the index says it
        .limit(1)
    )
)


async def has_prefetched(tx: Tx, *, not_of: str) -> bool:
    """Whether any other worker holds something that waits for its turn."""
    return bool(await _HAS_PREFETCHED.tuples(tx, {"not_of": not_of}))


async def prefetched(tx: Tx, lanes: Iterable[Lane], *, not_of: str, limit: int) -> list[Dispatch]:
    """Leases that wait for their turn behind another job, and could be run elsewhere now."""
    query = _ALL.where(_is_prefetched(lanes, not_of)).order_by(d.c.leased_at).limit(limit)
    return await found(tx, locked(tx, query, skip_locked=True))


async def is_any_prefetched(tx: Tx, lanes: Iterable[Lane], *, not_of: str) -> bool:
    query = select(d.c.id).where(_is_prefetched(lanes, not_of)).limit(1)
    return await tx.scalar(query) is not None


def _is_prefetched(lanes: Iterable[Lane], not_of: str) -> ColumnElement[bool]:
    return and_(
        text(PREFETCHED),
        d.c.worker_id != not_of,
        or_(*(in_lane(lane) for lane in lanes)),
    )
