"""Reads single dispatches, operators' lists, and pages for sweeps. Also deletes ended
dispatches.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Select,
    TextClause,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    or_,
    select,
    text,
    tuple_,
)

from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import IS_ENDED, IS_RARE, PREFETCHED, QUEUED, workers
from comfyfleet.server.db.central_tables import dispatches as d
from comfyfleet.server.db.dialect import (
    Moment,
    for_update,
    is_one_of,
    is_sqlite,
    pairs_in,
    without_index,
)
from comfyfleet.server.db.driver import PreparedForIds, PreparedStatement
from comfyfleet.server.queue.model import (
    ActiveDispatch,
    Dispatch,
    DispatchStatus,
    EndedDispatch,
    LaneDepth,
    QueueLane,
    WorkerLoad,
)
from comfyfleet.server.queue.store.writes import DISPATCH_COLUMNS, dispatch_from_row, in_lane

AHEAD_COUNTED_MAX = 10_000
ENDED_LOOKED_AT_MAX = 2_000  # recent dispatches from which a typical duration is computed
# This query is built only once, because building it takes longer than its execution on SQLite.
_ALL = select(*DISPATCH_COLUMNS)
IS_LEASED = "status = 'leased'"
_HELD = f"ai_job_dispatches.{IS_LEASED}"


async def fetch(tx: Tx, query: Select[Any]) -> list[Dispatch]:
    return [dispatch_from_row(row) for row in await tx.execute(query)]


_ONE = PreparedStatement(lambda tx: _ALL.where(d.c.id == bindparam("of_id")))
_ONE_LOCKED = PreparedStatement(lambda tx: for_update(tx, _ALL.where(d.c.id == bindparam("of_id"))))


async def get(tx: Tx, dispatch_id: int, *, lock: bool = False) -> Dispatch | None:
    rows = await (_ONE_LOCKED if lock else _ONE).tuples(tx, {"of_id": dispatch_id})
    return dispatch_from_row(rows[0]) if rows else None


async def get_many(tx: Tx, dispatch_ids: Iterable[int]) -> list[Dispatch]:
    return await fetch(tx, _ALL.where(is_one_of(tx, d.c.id, dispatch_ids)))


_OF_JOB = PreparedStatement(
    lambda tx: _ALL.where(
        d.c.tenant_id == bindparam("of_tenant"), d.c.tenant_job_id == bindparam("of_job")
    )
)


async def of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> Dispatch | None:
    rows = await _OF_JOB.tuples(tx, {"of_tenant": tenant_id, "of_job": job_id})
    return dispatch_from_row(rows[0]) if rows else None


_OF_JOBS = PreparedForIds(
    d.c.tenant_job_id,
    lambda tx, is_one: _ALL.where(d.c.tenant_id == bindparam("of_tenant"), is_one),
)


async def of_jobs(tx: Tx, tenant_id: UUID, job_ids: Iterable[UUID]) -> list[Dispatch]:
    rows = await _OF_JOBS.of(tx, job_ids, {"of_tenant": tenant_id})
    return [dispatch_from_row(tuple(row.values())) for row in rows]


async def newest(tx: Tx, *, limit: int) -> list[Dispatch]:
    return await fetch(tx, _ALL.order_by(d.c.id.desc()).limit(limit))


async def of_pairs(tx: Tx, pairs: Sequence[tuple[UUID, UUID]]) -> list[Dispatch]:
    return await fetch(tx, _ALL.where(pairs_in(tx, (d.c.tenant_id, d.c.tenant_job_id), pairs)))


_HELD_BY = PreparedStatement(
    # The text must match the index's condition. Other indexes contain all dispatches that the
    # worker ever had.
    lambda tx: _ALL.where(text(IS_LEASED), d.c.worker_id == bindparam("of_worker")).order_by(d.c.id)
)


async def held_by(tx: Tx, worker_id: str) -> list[Dispatch]:
    return [dispatch_from_row(row) for row in await _HELD_BY.tuples(tx, {"of_worker": worker_id})]


_WORKER_OF = PreparedStatement(
    lambda tx: select(d.c.worker_id).where(
        d.c.tenant_id == bindparam("of_tenant"), d.c.tenant_job_id == bindparam("of_job")
    )
)


async def worker_of(tx: Tx, tenant_id: UUID, job_id: UUID) -> str | None:
    rows = await _WORKER_OF.tuples(tx, {"of_tenant": tenant_id, "of_job": job_id})
    return rows[0][0] if rows else None


_LOAD = PreparedStatement(
    lambda tx: (
        select(workers.c.fleet_id, workers.c.max_concurrency, d.c.tenant_job_id)
        .select_from(workers.outerjoin(d, and_(d.c.worker_id == workers.c.worker_id, text(_HELD))))
        .where(
            workers.c.worker_id == bindparam("of_worker"),
            workers.c.is_approved,
            ~workers.c.is_draining,
            workers.c.backend_problem.is_(None),
        )
    )
)


async def load_of(tx: Tx, worker_id: str) -> WorkerLoad | None:
    rows = await _LOAD.tuples(tx, {"of_worker": worker_id})
    if not rows:
        return None
    fleet_id, max_concurrency, _ = rows[0]
    held = frozenset(job_id for _, _, job_id in rows if job_id is not None)
    return WorkerLoad(fleet_id, max_concurrency, held)


async def held_by_any(tx: Tx, worker_ids: Iterable[str], *, limit: int) -> list[Dispatch]:
    held = text(IS_LEASED), is_one_of(tx, d.c.worker_id, worker_ids)
    return await fetch(tx, _ALL.where(*held).order_by(d.c.id).limit(limit))


async def count_queued(tx: Tx, tenant_id: UUID | None) -> int:
    """Counts queued rows. The condition must match that of the index. Otherwise, SQLite would use
    an index over all rows.
    """
    mine = [] if tenant_id is None else [d.c.tenant_id == tenant_id]
    query = select(func.count()).select_from(d).where(text(QUEUED), *mine)
    return int(await tx.scalar(query) or 0)


async def depths(tx: Tx) -> dict[QueueLane, LaneDepth]:
    waiting = d.c.status == DispatchStatus.QUEUED
    lane = (d.c.workflow_id, d.c.stage, d.c.provider)
    query = (
        select(
            *lane,
            func.count().filter(waiting),
            func.count().filter(~waiting),
            func.min(d.c.queued_at).filter(waiting),
        )
        .where(d.c.status.in_([DispatchStatus.QUEUED, DispatchStatus.LEASED]))
        .group_by(*lane)
    )
    return {QueueLane(*row[:3]): LaneDepth(*row[3:]) for row in await tx.execute(query)}


async def count_held(tx: Tx) -> dict[QueueLane, int]:
    """Counts the leased jobs that have not started yet, by lane."""
    lane = (d.c.workflow_id, d.c.stage, d.c.provider)
    query = (
        select(*lane, func.count())
        .where(d.c.status == DispatchStatus.LEASED, d.c.started_at.is_(None))
        .group_by(*lane)
    )
    return {QueueLane(*row[:3]): int(row[3]) for row in await tx.execute(query)}


async def count_leases(tx: Tx, worker_ids: Collection[str] | None) -> dict[str, int]:
    """Counts the leases of these workers. None means all workers. Workers without leases are left
    out.
    """
    mine = [] if worker_ids is None else [is_one_of(tx, d.c.worker_id, worker_ids)]
    query = select(d.c.worker_id, func.count()).where(text(IS_LEASED), *mine)
    return {row[0]: int(row[1]) for row in await tx.execute(query.group_by(d.c.worker_id))}


async def count_bound(tx: Tx) -> dict[str, int]:
    """Counts the jobs that each worker holds and the queued jobs that are bound to it, by
    `worker:ID`.
    """
    holder = func.coalesce("worker:" + d.c.worker_id, "")
    bound_to = case((d.c.status == DispatchStatus.LEASED, holder), else_=d.c.backend_affinity)
    query = (
        select(bound_to, func.count())
        .where(d.c.status.in_([DispatchStatus.QUEUED, DispatchStatus.LEASED]))
        .where(or_(d.c.status == DispatchStatus.LEASED, d.c.backend_affinity.is_not(None)))
        .group_by(bound_to)
    )
    return {row[0]: row[1] for row in await tx.execute(query)}


async def count_ahead(tx: Tx, dispatch: Dispatch) -> int:
    """Counts the queued rows that precede a dispatch in its lane, up to a limit. The result is only
    used for display.
    """
    before = or_(
        d.c.priority > dispatch.priority,
        and_(d.c.priority == dispatch.priority, d.c.rank < dispatch.rank),
        and_(d.c.priority == dispatch.priority, d.c.rank == dispatch.rank, d.c.id < dispatch.id),
    )
    some = (
        select(d.c.id)
        .where(
            d.c.status == DispatchStatus.QUEUED,
            d.c.not_before.is_(None),
            in_lane(dispatch.lane),
            before,
        )
        .limit(AHEAD_COUNTED_MAX)
        .subquery()
    )
    return int(await tx.scalar(select(func.count()).select_from(some)) or 0)


async def typical_seconds(tx: Tx, workflow_id: int) -> float | None:
    """Returns the mean duration of the workflow's recent runs. Only considers the dispatches that
    ended last.
    """
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


async def lock_expired(tx: Tx, moment: ColumnElement[datetime], *, limit: int) -> list[Dispatch]:
    """Locks and returns expired leases. Skips rows that other transactions have locked."""
    query = (
        _ALL.where(d.c.status == DispatchStatus.LEASED, d.c.lease_expires_at < moment)
        .order_by(d.c.lease_expires_at)
        .limit(limit)
    )
    return await fetch(tx, for_update(tx, query, skip_locked=True))


async def lock_abandoned(tx: Tx, *, unseen_since: datetime, limit: int) -> list[Dispatch]:
    """Locks and returns leases of workers that were revoked or have not been seen recently. Skips
    rows that other transactions have locked.
    """
    lost_workers = select(workers.c.worker_id).where(
        or_(workers.c.last_seen_at < unseen_since, workers.c.revoked_at.is_not(None))
    )
    query = _ALL.where(d.c.status == DispatchStatus.LEASED, d.c.worker_id.in_(lost_workers)).limit(
        limit
    )
    return await fetch(tx, for_update(tx, query, skip_locked=True))


_ANY_DUE = PreparedStatement(
    lambda _: (
        select(d.c.id)
        .where(d.c.status == DispatchStatus.QUEUED, d.c.not_before <= bindparam("by_now"))
        .limit(1)
    )
)


async def is_any_due(tx: Tx, now: datetime) -> bool:
    return await _ANY_DUE.first(tx, {"by_now": now}) is not None


async def list_due(tx: Tx, now: datetime, *, limit: int) -> list[Dispatch]:
    query = (
        _ALL.where(d.c.status == DispatchStatus.QUEUED, d.c.not_before <= now)
        .order_by(d.c.not_before)
        .limit(limit)
    )
    return await fetch(tx, for_update(tx, query, skip_locked=True))


_HAS_PREFETCHED = PreparedStatement(
    lambda tx: (
        select(d.c.id)
        # the text must match the index's condition
        .where(text(PREFETCHED), d.c.worker_id != bindparam("not_of"))
        .limit(1)
    )
)


async def has_prefetched(tx: Tx, *, not_of: str) -> bool:
    """Whether any other worker holds a prefetched job."""
    return bool(await _HAS_PREFETCHED.tuples(tx, {"not_of": not_of}))


async def list_prefetched(
    tx: Tx, lanes: Iterable[QueueLane], *, not_of: str, limit: int
) -> list[Dispatch]:
    """Locks and returns prefetched leases of other workers in these lanes. Skips rows that other
    transactions have locked.
    """
    query = _ALL.where(_is_prefetched(lanes, not_of)).order_by(d.c.leased_at).limit(limit)
    return await fetch(tx, for_update(tx, query, skip_locked=True))


async def is_any_prefetched(tx: Tx, lanes: Iterable[QueueLane], *, not_of: str) -> bool:
    query = select(d.c.id).where(_is_prefetched(lanes, not_of)).limit(1)
    return await tx.scalar(query) is not None


def _is_prefetched(lanes: Iterable[QueueLane], not_of: str) -> ColumnElement[bool]:
    return and_(
        text(PREFETCHED),
        d.c.worker_id != not_of,
        or_(*(in_lane(lane) for lane in lanes)),
    )


# These texts must match the conditions of the indexes. With bound parameters, the planner wouldn't
# use the indexes.
_LEASED, _POISONED = "status = 'leased'", "is_poisoned"
_ACTIVE = (QUEUED, _LEASED)


async def list_page(
    tx: Tx, filters: Mapping[str, Any], *, before_id: int | None, limit: int
) -> list[Dispatch]:
    """Returns a page of dispatches, the newest first. `filters` contains values by column. Columns
    whose value is None are not filtered.
    """
    rows: list[Dispatch] = []
    for part in _parts(tx, filters.get("status")):
        place = without_index(tx, d.c.id) if part[0] in _ACTIVE else d.c.id
        query = select(*DISPATCH_COLUMNS).where(*map(text, part), *_conditions(tx, filters, part))
        if before_id is not None:
            query = query.where(place < before_id)
        rows += await fetch(tx, query.order_by(place.desc()).limit(limit))
    return sorted(rows, key=lambda row: row.id, reverse=True)[:limit]


def _parts(tx: Tx, status: DispatchStatus | None) -> list[tuple[str, ...]]:
    """Splits a query into selects that can each use an index, and returns their conditions."""
    if status is None:
        return [(QUEUED,), (_LEASED,), (IS_ENDED,)]
    own = f"status = '{status.value}'"
    if own in _ACTIVE:
        return [(own,)]
    if status is DispatchStatus.COMPLETED:
        return [(own, IS_ENDED)]
    # The status implies IS_RARE. PostgreSQL doesn't need that condition, and would underestimate
    # the number of rows because of it.
    return [(own, IS_RARE, IS_ENDED)] if is_sqlite(tx) else [(own, IS_ENDED)]


def _conditions(
    tx: Tx, filters: Mapping[str, Any], part: tuple[str, ...]
) -> list[ColumnElement[bool] | TextClause]:
    conditions: list[ColumnElement[bool] | TextClause] = [
        # Few rows are leased. Without this, the planner would use an index on the filtered column.
        (without_index(tx, d.c[name]) if _LEASED in part else d.c[name]) == value
        for name, value in filters.items()
        if value is not None and name not in ("is_poisoned", "status")
    ]
    if filters.get("is_poisoned") is not None:
        conditions.append(text(_POISONED if filters["is_poisoned"] else f"NOT {_POISONED}"))
    return conditions


_ROW: Any = select(d.c.id, d.c.tenant_id, d.c.tenant_job_id, d.c.cancel_requested)
# The columns of the index `share`, and the id, because several rows may have the same rank.
_SHARE = ("tenant_id", "workflow_id", "stage", "provider", "priority", "rank", "id")


async def leased_page(
    tx: Tx, after_id: int, *, before: datetime, limit: int
) -> list[ActiveDispatch]:
    """Returns a page of leased dispatches that were created before a point in time, ordered by
    id.
    """
    query = _ROW.where(text(IS_LEASED), d.c.id > after_id, d.c.created_at < before)
    return [ActiveDispatch(*row) for row in await tx.execute(query.order_by(d.c.id).limit(limit))]


async def queued_page(
    tx: Tx, after: Sequence[Any] | None, *, before: datetime, limit: int
) -> tuple[list[ActiveDispatch], list[Any] | None]:
    """Returns a page of queued dispatches that were created before a point in time, and the next
    cursor, which is None on the last page.
    """
    query = select(
        d.c.id,
        d.c.tenant_id,
        d.c.tenant_job_id,
        d.c.cancel_requested,
        *(d.c[name] for name in _SHARE[1:-1]),
    ).where(text(QUEUED), d.c.created_at < before)
    if after is not None:
        place = tuple_(*(d.c[name] for name in _SHARE))
        values = [literal(value, d.c[name].type) for name, value in zip(_SHARE, after, strict=True)]
        # The first condition lets the planner start at the right position in the index.
        query = query.where(d.c.tenant_id >= values[0], place > tuple_(*values))
    records = (await tx.execute(query.order_by(*(d.c[name] for name in _SHARE)).limit(limit))).all()
    rows = [ActiveDispatch(*row[:4]) for row in records]
    if len(records) < limit:
        return rows, None
    last = records[-1]
    return rows, [last.tenant_id, *last[4:], last.id]


async def have_ended(tx: Tx, pairs: Sequence[tuple[UUID, UUID]]) -> dict[UUID, bool]:
    """Returns for each job id whether the job's dispatch has ended. Jobs without a dispatch are
    left out.
    """
    query = select(d.c.tenant_job_id, d.c.ended_at).where(
        pairs_in(tx, (d.c.tenant_id, d.c.tenant_job_id), pairs)
    )
    return {row.tenant_job_id: row.ended_at is not None for row in await tx.execute(query)}


async def ended_before(
    tx: Tx, before: datetime, *, after: EndedDispatch | None, limit: int
) -> list[EndedDispatch]:
    """Returns a page of dispatches that ended before a point in time, the earliest first.
    `after` is the last one of the previous page.
    """
    query = select(d.c.ended_at, d.c.id, d.c.tenant_id, d.c.tenant_job_id).where(
        text(IS_ENDED), d.c.ended_at < before
    )
    if after is not None:
        place = tuple_(d.c.ended_at, d.c.id)
        query = query.where(
            d.c.ended_at >= after.ended_at,
            place > tuple_(literal(after.ended_at, Moment()), after.id),
        )
    rows = await tx.execute(query.order_by(d.c.ended_at, d.c.id).limit(limit))
    return [EndedDispatch(*row) for row in rows]


async def remove(tx: Tx, dispatch_ids: Sequence[int]) -> int:
    """Deletes the dispatches that have ended. Returns their number."""
    deleted = await tx.execute(delete(d).where(is_one_of(tx, d.c.id, dispatch_ids), text(IS_ENDED)))
    return int(deleted.rowcount)
