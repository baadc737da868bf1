"""Writes dispatches. All updates are guarded: if no row is returned, the row has changed in the
meantime. Assigns fair ranks to new dispatches.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Interval,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    literal,
    select,
    text,
    tuple_,
    update,
)

from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import FREE, QUEUED, audit_log, tenants
from comfyfleet.server.db.central_tables import dispatches as d
from comfyfleet.server.db.central_tables import model_switches as m
from comfyfleet.server.db.database import driver_of
from comfyfleet.server.db.dialect import for_update, insert_if_new, is_sqlite, upsert_each
from comfyfleet.server.db.driver import PreparedInsert, PreparedStatement
from comfyfleet.server.queue.model import Dispatch, DispatchStatus, NewDispatch, QueueLane
from comfyfleet.server.queue.switch_costs import RunKind, Samples, TimedRun

# Maximum number of rows per statement. Databases accept about 32,000 values per statement.
ROWS_PER_STATEMENT_MAX = 500
# The columns in the order of Dispatch's fields. The lane consists of three columns.
FIELDS = (
    "id, tenant_id, tenant_job_id, workflow_id, stage, provider, status, priority, rank, attempts, "
    "max_attempts, requeues, lease_number, lease_token, lease_expires_at, worker_id, not_before, "
    "backend_affinity, model_key, model_set, is_poisoned, cancel_requested, recall_requested, "
    "is_prefetched, duration_seconds, last_error, created_at, queued_at, leased_at, started_at, "
    "ended_at, heard_at, lost_leases"
)
DISPATCH_COLUMNS = tuple(d.c[name] for name in FIELDS.split(", "))


def dispatch_from_row(row: Sequence[Any]) -> Dispatch:
    values = (*row[:3], QueueLane(*row[3:6]), DispatchStatus(row[6]), *row[7:])
    return Dispatch(*values)


def in_lane(lane: QueueLane) -> ColumnElement[bool]:
    return and_(
        d.c.workflow_id == lane.workflow_id, d.c.stage == lane.stage, d.c.provider == lane.provider
    )


class Share(NamedTuple):
    """A tenant's jobs in a lane at one priority. Their ranks increase by one, so that one of them
    runs per round.
    """

    tenant_id: UUID
    lane: QueueLane
    priority: int


async def update_dispatch(
    tx: Tx,
    dispatch_id: int,
    values: Mapping[str, Any],
    *,
    status: DispatchStatus,
    token: UUID | None,
) -> Dispatch | None:
    bound: dict[str, Any] = {"of_id": dispatch_id, "of_status": status}
    bound |= {f"new_{name}": value for name, value in values.items()}
    if token is not None:
        bound["of_token"] = token
    rows = await _change(tuple(sorted(values)), has_token=token is not None).tuples(tx, bound)
    return dispatch_from_row(rows[0]) if rows else None


async def take(
    tx: Tx, dispatch_id: int, token: UUID, moment: ColumnElement[datetime], *, seconds: int
) -> Dispatch | None:
    """Transfers a lease to the holder of this token. The lease then ends `seconds` after
    `moment`.
    """
    leased = update(d).where(d.c.id == dispatch_id, d.c.status == DispatchStatus.LEASED)
    ends = plus_seconds(tx, moment, seconds=seconds)
    transferred = leased.values(lease_token=token, lease_expires_at=ends, worker_id=None)
    row = (await tx.execute(transferred.returning(*DISPATCH_COLUMNS))).first()
    return None if row is None else dispatch_from_row(row)


@cache
def _change(names: tuple[str, ...], *, has_token: bool) -> PreparedStatement:
    """Builds the update of a set of columns. There are few such sets, and each statement is
    compiled once.
    """
    of = [d.c.id == bindparam("of_id"), d.c.status == bindparam("of_status")]
    if has_token:
        of.append(d.c.lease_token == bindparam("of_token"))
    new = {name: bindparam(f"new_{name}", type_=d.c[name].type) for name in names}
    return PreparedStatement(
        lambda tx: update(d).where(*of).values(new).returning(*DISPATCH_COLUMNS)
    )


async def head_rank(tx: Tx, lane: QueueLane, priority: int) -> int | None:
    """Returns the virtual time of a lane at a priority, which is the smallest rank that is queued
    there.
    """
    workflow_id, stage, provider = lane
    values = {
        "of_workflow": workflow_id,
        "of_stage": stage,
        "of_provider": provider,
        "of_priority": priority,
    }
    ((rank,),) = await _HEAD_RANK.tuples(tx, values)
    return None if rank is None else int(rank)


def _head_rank(lane: QueueLane, priority: int) -> Any:
    waiting = (
        d.c.status == DispatchStatus.QUEUED,
        d.c.not_before.is_(None),
        d.c.backend_affinity.is_(None),
    )
    query = select(func.min(d.c.rank)).where(*waiting, in_lane(lane), d.c.priority == priority)
    return query.scalar_subquery()


def _last_rank(share: Share) -> Any:
    mine = (d.c.status == DispatchStatus.QUEUED, d.c.tenant_id == share.tenant_id)
    query = select(func.max(d.c.rank)).where(
        *mine, in_lane(share.lane), d.c.priority == share.priority
    )
    return query.scalar_subquery()


_LOCK_SHARES = PreparedStatement(
    lambda tx: text("SELECT pg_advisory_xact_lock(key) FROM unnest(CAST(:keys AS bigint[])) AS key")
)


async def lock_shares(tx: Tx, shares: Sequence[Share]) -> None:
    """Serializes a tenant's submissions to a lane. Otherwise, concurrent submissions would get the
    same rank.

    This is a separate statement, because a statement that waits for a lock doesn't see the rows
    that are added during the wait.
    """
    await _LOCK_SHARES.tuples(tx, {"keys": lock_keys(shares)})


def lock_keys(shares: Iterable[Share]) -> list[int]:
    """Returns the lock keys in a fixed order, so that submissions can't deadlock."""
    return sorted({_lock_key(share) for share in shares})


def _lock_key(share: Share) -> int:
    name = f"{share.tenant_id}/{'/'.join(map(str, share.lane))}/{share.priority}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), signed=True)


_OF_ONE = Share(
    bindparam("of_tenant"),  # type: ignore[arg-type]
    QueueLane(bindparam("of_workflow"), bindparam("of_stage"), bindparam("of_provider")),  # type: ignore[arg-type]
    bindparam("of_priority"),  # type: ignore[arg-type]
)
_HEAD_RANK = PreparedStatement(
    lambda tx: select(_head_rank(_OF_ONE.lane, _OF_ONE.priority).label("head"))
)
_FLOOR = PreparedStatement(
    lambda tx: select(
        _head_rank(_OF_ONE.lane, _OF_ONE.priority).label("head"), _last_rank(_OF_ONE).label("last")
    )
)


async def _rank_floor(tx: Tx, share: Share) -> int:
    workflow_id, stage, provider = share.lane
    values = {
        "of_tenant": share.tenant_id,
        "of_workflow": workflow_id,
        "of_stage": stage,
        "of_provider": provider,
        "of_priority": share.priority,
    }
    (ranks,) = await _FLOOR.rows(tx, values)
    return max(ranks["head"] or 0, ranks["last"] or 0)


async def rank_floors(tx: Tx, shares: Sequence[Share]) -> dict[Share, int]:
    """Returns the rank after which a tenant's next job is placed: the lane's virtual time or the
    rank of the tenant's last queued job, whichever is larger.

    Only used on SQLite, where statements need no round trip. On PostgreSQL, the insert computes the
    rank.
    """
    return {share: await _rank_floor(tx, share) for share in shares}


_ADD = PreparedInsert(
    d,
    (
        "tenant_id",
        "tenant_job_id",
        "workflow_id",
        "stage",
        "provider",
        "priority",
        "rank",
        "max_attempts",
        "model_key",
        "model_set",
        "backend_affinity",
        "preferred_worker_id",
        "status",
        "created_at",
        "queued_at",
        "ended_at",
        "last_error",
    ),
    returning=DISPATCH_COLUMNS,
)


async def add(
    tx: Tx, rows: Sequence[tuple[NewDispatch, int]], values: Mapping[str, Any]
) -> list[Dispatch]:
    """Inserts rows and returns the new ones. A job that already has a dispatch doesn't get another
    one.
    """
    added = []
    for start in range(0, len(rows), ROWS_PER_STATEMENT_MAX):
        part = rows[start : start + ROWS_PER_STATEMENT_MAX]
        new = [{**_columns(*row), "ended_at": None, "last_error": None, **values} for row in part]
        added += [dispatch_from_row(tuple(row.values())) for row in await _ADD.add(tx, new)]
    return added


def _columns(new: NewDispatch, rank: int) -> dict[str, Any]:
    return {
        "tenant_id": new.tenant_id,
        "tenant_job_id": new.job_id,
        **new.lane._asdict(),
        "priority": new.priority,
        "rank": rank,
        "max_attempts": new.max_attempts,
        "model_key": new.model_key,
        "model_set": new.model_set,
        "backend_affinity": new.backend_affinity,
        "preferred_worker_id": new.preferred_worker_id,
    }


_ADD_AUDIT = PreparedInsert(
    audit_log,
    ("at", "actor", "action", "subject", "tenant_id", "details"),
    returning=[audit_log.c.id],
)


async def add_audit(
    tx: Tx,
    dispatches: Sequence[Dispatch],
    *,
    actor: str | None,
    action: str,
    now: datetime,
    details: Mapping[str, Any],
) -> None:
    """Adds an audit entry for each dispatch. Without an actor, the tenant is recorded as the
    actor.
    """
    rows = [
        {
            "at": now,
            "actor": actor or f"tenant:{dispatch.tenant_id}",
            "action": action,
            "subject": f"dispatch:{dispatch.id}",
            "tenant_id": dispatch.tenant_id,
            "details": {"attempt": dispatch.attempts, "lease": dispatch.lease_number, **details},
        }
        for dispatch in dispatches
    ]
    for start in range(0, len(rows), ROWS_PER_STATEMENT_MAX):
        await _ADD_AUDIT.add(tx, rows[start : start + ROWS_PER_STATEMENT_MAX])


async def extend_all(tx: Tx, moment: ColumnElement[datetime], *, seconds: int) -> int:
    """Extends all leases by `seconds`. Leases that have expired are extended from now."""
    ends = d.c.lease_expires_at
    since = case((ends < moment, moment), else_=ends)
    longer = plus_seconds(tx, since, seconds=seconds)
    leased = update(d).where(d.c.status == DispatchStatus.LEASED)
    return int((await tx.execute(leased.values(lease_expires_at=longer))).rowcount)


async def postpone_all(tx: Tx, *, seconds: int) -> int:
    leased = update(d).where(d.c.status == DispatchStatus.LEASED)
    later = plus_seconds(tx, d.c.lease_expires_at, seconds=seconds)
    return int((await tx.execute(leased.values(lease_expires_at=later))).rowcount)


def plus_seconds(tx: Tx, moment: ColumnElement[datetime], *, seconds: int) -> ColumnElement[Any]:
    if is_sqlite(tx):
        return cast(moment, BigInteger) + seconds * 1_000_000
    return moment + literal(timedelta(seconds=seconds), Interval())


_IN_SHARE = """workflow_id = share.to_workflow AND stage = share.to_stage
        AND provider = share.to_provider AND priority = share.at_priority"""

# A tenant's next job is placed after the lane's virtual time (the smallest rank that is queued in
# the lane) and after the tenant's last queued job. The ORDER BY clauses match the indexes, so that
# each rank needs a single index probe.
ENQUEUE = f"""
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[], $5::text[], $6::int[],
        $7::int[], $8::text[], $9::text[], $10::text[], $11::text[]) WITH ORDINALITY AS each(
        of_tenant, job, to_workflow, to_stage, to_provider, at_priority, attempts_max, heavy, models,
        affinity, preferred, place)
), share AS MATERIALIZED (
    SELECT DISTINCT of_tenant, to_workflow, to_stage, to_provider, at_priority FROM wanted
), floor AS MATERIALIZED (
    SELECT share.*, greatest(coalesce(head.rank, 0), coalesce(last.rank, 0)) AS after FROM share
    LEFT JOIN LATERAL (
        SELECT rank FROM ai_job_dispatches WHERE {FREE} AND {_IN_SHARE}
        ORDER BY workflow_id, stage, provider, priority DESC, rank, id LIMIT 1) AS head ON true
    LEFT JOIN LATERAL (
        SELECT rank FROM ai_job_dispatches
        WHERE {QUEUED} AND tenant_id = share.of_tenant AND {_IN_SHARE}
        ORDER BY tenant_id DESC, workflow_id DESC, stage DESC, provider DESC, priority DESC,
            rank DESC LIMIT 1) AS last ON true
), added AS (
    INSERT INTO ai_job_dispatches (tenant_id, tenant_job_id, workflow_id, stage, provider, status,
        priority, rank, max_attempts, model_key, model_set, backend_affinity, preferred_worker_id,
        created_at, queued_at)
    SELECT of_tenant, job, to_workflow, to_stage, to_provider, 'queued', at_priority,
        after + row_number() OVER (
            PARTITION BY of_tenant, to_workflow, to_stage, to_provider, at_priority ORDER BY place),
        attempts_max, heavy, models, affinity, preferred, $12, $12
    FROM wanted
    JOIN floor USING (of_tenant, to_workflow, to_stage, to_provider, at_priority)
    ORDER BY place
    ON CONFLICT DO NOTHING
    RETURNING {FIELDS}
), noted AS (
    INSERT INTO audit_log (at, actor, action, subject, tenant_id, details)
    SELECT $12, 'tenant:' || tenant_id, 'submit', 'dispatch:' || id, tenant_id,
        jsonb_build_object('attempt', attempts, 'lease', lease_number)
    FROM added
)
SELECT * FROM added
"""


async def enqueue(tx: Tx, new: Sequence[NewDispatch], *, now: datetime) -> list[Dispatch]:
    """Adds dispatches with fair ranks and returns the new ones. A job that already has a dispatch
    doesn't get another one.
    """
    shares = shares_of(new)
    distinct = list(dict.fromkeys(shares.values()))
    if not is_sqlite(tx):
        await lock_shares(tx, distinct)
        rows = await driver_of(tx).fetch(ENQUEUE, *enqueue_columns(new), now)
        return [dispatch_from_row(row) for row in rows]
    last = await rank_floors(tx, distinct)
    ranked = []
    for dispatch in new:
        last[shares[dispatch]] += 1
        ranked.append((dispatch, last[shares[dispatch]]))
    values = {"status": DispatchStatus.QUEUED, "created_at": now, "queued_at": now}
    added = await add(tx, ranked, values)
    await add_audit(tx, added, actor=None, action="submit", now=now, details={})
    return added


def shares_of(new: Iterable[NewDispatch]) -> dict[NewDispatch, Share]:
    return {
        dispatch: Share(dispatch.tenant_id, dispatch.lane, dispatch.priority) for dispatch in new
    }


def enqueue_columns(new: Sequence[NewDispatch]) -> list[list[Any]]:
    rows = (
        (
            dispatch.tenant_id,
            dispatch.job_id,
            *dispatch.lane,
            dispatch.priority,
            dispatch.max_attempts,
            dispatch.model_key,
            dispatch.model_set,
            dispatch.backend_affinity,
            dispatch.preferred_worker_id,
        )
        for dispatch in new
    )
    return [list(column) for column in zip(*rows, strict=True)]


KEY = ("fleet_id", "model_key", "workflow_id")
KINDS_READ_MAX = 10_000
_KEY = tuple(m.c[name] for name in KEY)
_SAMPLES = (*_KEY, m.c.stayed, m.c.switched)


async def add_runs(tx: Tx, runs: Sequence[TimedRun], *, now: datetime) -> None:
    """Adds runs to the stored samples. Rows are locked in a fixed order, so that concurrent control
    planes neither deadlock nor overwrite each other's samples.
    """
    by_kind: dict[RunKind, list[TimedRun]] = defaultdict(list)
    for run in runs:
        by_kind[run.kind].append(run)
    kinds = sorted(by_kind)
    if not kinds:
        return
    empty = {"stayed": [], "switched": [], "updated_at": now}
    await tx.execute(insert_if_new(tx, m), [{**kind._asdict(), **empty} for kind in kinds])
    query = select(*_SAMPLES).where(tuple_(*_KEY).in_(kinds)).order_by(*_KEY)
    samples = _samples(await tx.execute(for_update(tx, query)))
    for kind in kinds:
        for run in by_kind[kind]:
            samples[kind] = samples[kind].with_run(run.change, round(run.seconds, 3))
    rows = [
        {
            **kind._asdict(),
            "stayed": list(samples[kind].stayed),
            "switched": list(samples[kind].switched),
            "updated_at": now,
        }
        for kind in kinds
    ]
    await tx.execute(upsert_each(tx, m, key=KEY), rows)


async def all_samples(tx: Tx, *, fleet_id: int | None = None) -> dict[RunKind, Samples]:
    """Returns the samples of a fleet, or of all fleets. If there are too many, returns the most
    recently changed ones.
    """
    query = select(*_SAMPLES).order_by(m.c.updated_at.desc()).limit(KINDS_READ_MAX)
    if fleet_id is not None:
        query = query.where(m.c.fleet_id == fleet_id)
    return _samples(await tx.execute(query))


async def last_changed_at(tx: Tx) -> datetime | None:
    changed_at: datetime | None = await tx.scalar(
        select(m.c.updated_at).order_by(m.c.updated_at.desc()).limit(1)
    )
    return changed_at


async def delete_before(tx: Tx, *, before: datetime) -> None:
    await tx.execute(delete(m).where(m.c.updated_at < before))


def _samples(rows: Iterable[Any]) -> dict[RunKind, Samples]:
    return {
        RunKind(fleet_id, model_key, workflow_id): Samples(tuple(stayed), tuple(switched))
        for fleet_id, model_key, workflow_id, stayed, switched in rows
    }


async def end_delays(tx: Tx, pool: str, *, now: datetime) -> None:
    of_pool = select(tenants.c.id).where(tenants.c.pool == pool)
    statement = update(d).where(
        d.c.status == DispatchStatus.QUEUED, d.c.not_before > now, d.c.tenant_id.in_(of_pool)
    )
    await tx.execute(statement.values(not_before=now))
