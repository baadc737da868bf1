"""Writes dispatches, each write guarded: no row returned means that the row had changed. Enqueue assigns fair ranks."""

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

# Databases take some 32,000 values in one statement.
ROWS_PER_STATEMENT_MAX = 500
# In the order of Dispatch's fields, but that a lane stands as its three columns.
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
    """What fair ranks are counted in: inside one share a tenant's jobs follow each other, one per
    round.
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
    """Gives the lease to the holder of this token, for that long by the database's clock."""
    leased = update(d).where(d.c.id == dispatch_id, d.c.status == DispatchStatus.LEASED)
    ends = plus_seconds(tx, moment, seconds=seconds)
    taken = leased.values(lease_token=token, lease_expires_at=ends, worker_id=None)
    row = (await tx.execute(taken.returning(*DISPATCH_COLUMNS))).first()
    return None if row is None else dispatch_from_row(row)


@cache
def _change(names: tuple[str, ...], *, has_token: bool) -> PreparedStatement:
    """Builds the update of these columns. There are few such sets, and each is compiled once."""
    of = [d.c.id == bindparam("of_id"), d.c.status == bindparam("of_status")]
    if has_token:
        of.append(d.c.lease_token == bindparam("of_token"))
    new = {name: bindparam(f"new_{name}", type_=d.c[name].type) for name in names}
    return PreparedStatement(
        lambda tx: update(d).where(*of).values(new).returning(*DISPATCH_COLUMNS)
    )


async def head_rank(tx: Tx, lane: QueueLane, priority: int) -> int | None:
    """Returns the virtual time of a lane at a priority: the smallest rank that is queued there."""
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
    """Serialises a tenant's submits into one lane; concurrent ones would all get the same rank.

    A separate statement, because one that waited for the lock would not see rows added meanwhile.
    """
    await _LOCK_SHARES.tuples(tx, {"keys": lock_keys(shares)})


def lock_keys(shares: Iterable[Share]) -> list[int]:
    """Returns the lock keys in one order, so that no two submits can deadlock."""
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
    (found,) = await _FLOOR.rows(tx, values)
    return max(found["head"] or 0, found["last"] or 0)


async def rank_floors(tx: Tx, shares: Sequence[Share]) -> dict[Share, int]:
    """Returns the rank after which a tenant's next job stands: virtual time, or its own last queued
    rank.

    For SQLite, where a statement costs no round trip; PostgreSQL does it in the insert.
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
    """Inserts rows and returns those that are new: a job has one dispatch, however often its submit
    is repeated.
    """
    added = []
    for start in range(0, len(rows), ROWS_PER_STATEMENT_MAX):
        part = rows[start : start + ROWS_PER_STATEMENT_MAX]
        new = [{**_columns(*each), "ended_at": None, "last_error": None, **values} for each in part]
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
    noted: Sequence[Dispatch],
    *,
    actor: str | None,
    action: str,
    now: datetime,
    details: Mapping[str, Any],
) -> None:
    """Adds one audit row for each dispatch; without an actor it is the tenant's own act."""
    rows = [
        {
            "at": now,
            "actor": actor or f"tenant:{each.tenant_id}",
            "action": action,
            "subject": f"dispatch:{each.id}",
            "tenant_id": each.tenant_id,
            "details": {"attempt": each.attempts, "lease": each.lease_number, **details},
        }
        for each in noted
    ]
    for start in range(0, len(rows), ROWS_PER_STATEMENT_MAX):
        await _ADD_AUDIT.add(tx, rows[start : start + ROWS_PER_STATEMENT_MAX])


async def extend_all(tx: Tx, moment: ColumnElement[datetime], *, seconds: int) -> int:
    """Extends all leases by their whole length, counted from now where they had expired meanwhile."""
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

# A tenant's next job stands behind virtual time (the smallest rank that waits in the lane), and behind
# its own last that still waits. The orders are those of the indexes, so that each is one probe.
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
    """Adds ranked dispatches and returns those that are new: a job has one, however often its
    submit is repeated.
    """
    shares = shares_of(new)
    distinct = list(dict.fromkeys(shares.values()))
    if not is_sqlite(tx):
        await lock_shares(tx, distinct)
        rows = await driver_of(tx).fetch(ENQUEUE, *enqueue_columns(new), now)
        return [dispatch_from_row(row) for row in rows]
    last = await rank_floors(tx, distinct)
    ranked = []
    for each in new:
        last[shares[each]] += 1
        ranked.append((each, last[shares[each]]))
    values = {"status": DispatchStatus.QUEUED, "created_at": now, "queued_at": now}
    added = await add(tx, ranked, values)
    await add_audit(tx, added, actor=None, action="submit", now=now, details={})
    return added


def shares_of(new: Iterable[NewDispatch]) -> dict[NewDispatch, Share]:
    return {each: Share(each.tenant_id, each.lane, each.priority) for each in new}


def enqueue_columns(new: Sequence[NewDispatch]) -> list[list[Any]]:
    rows = (
        (
            each.tenant_id,
            each.job_id,
            *each.lane,
            each.priority,
            each.max_attempts,
            each.model_key,
            each.model_set,
            each.backend_affinity,
            each.preferred_worker_id,
        )
        for each in new
    )
    return [list(column) for column in zip(*rows, strict=True)]


KEY = ("fleet_id", "model_key", "workflow_id")
KINDS_READ_MAX = 10_000
_KEY = tuple(m.c[name] for name in KEY)
_SAMPLES = (*_KEY, m.c.stayed, m.c.switched)


async def add_runs(tx: Tx, runs: Sequence[TimedRun], *, now: datetime) -> None:
    """Adds runs to their samples. Rows are locked in one order, so that concurrent control planes
    lose nothing.
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
    found = _samples(await tx.execute(for_update(tx, query)))
    for kind in kinds:
        for run in by_kind[kind]:
            found[kind] = found[kind].with_run(run.change, round(run.seconds, 3))
    rows = [
        {
            **kind._asdict(),
            "stayed": list(found[kind].stayed),
            "switched": list(found[kind].switched),
            "updated_at": now,
        }
        for kind in kinds
    ]
    await tx.execute(upsert_each(tx, m, key=KEY), rows)


async def all_samples(tx: Tx, *, fleet_id: int | None = None) -> dict[RunKind, Samples]:
    """Returns the samples of a fleet, or the most recently changed ones if there are too many."""
    query = select(*_SAMPLES).order_by(m.c.updated_at.desc()).limit(KINDS_READ_MAX)
    if fleet_id is not None:
        query = query.where(m.c.fleet_id == fleet_id)
    return _samples(await tx.execute(query))


async def last_changed_at(tx: Tx) -> datetime | None:
    found: datetime | None = await tx.scalar(
        select(m.c.updated_at).order_by(m.c.updated_at.desc()).limit(1)
    )
    return found


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
