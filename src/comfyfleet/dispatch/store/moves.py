"""Writing rows of the queue, each guarded: no row back means that the world had moved."""

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
    bindparam,
    case,
    cast,
    func,
    literal,
    select,
    text,
    update,
)

from comfyfleet.db import Tx
from comfyfleet.db.central import audit_log
from comfyfleet.db.central import dispatches as d
from comfyfleet.db.dialect import is_sqlite
from comfyfleet.db.statement import Insert, Statement
from comfyfleet.dispatch.model import Dispatch, Lane, NewDispatch, Status
from comfyfleet.dispatch.store.rows import WHOLE, as_dispatch, in_lane

# Databases take some 32,000 values in one statement.
ROWS_PER_STATEMENT_MAX = 500


class Share(NamedTuple):
    """Inside one, a tenant's jobs follow each other, one per round."""

    tenant_id: UUID
    lane: Lane
    priority: int


async def change(
    tx: Tx, dispatch_id: int, values: Mapping[str, Any], *, status: Status, token: UUID | None
) -> Dispatch | None:
    bound: dict[str, Any] = {"of_id": dispatch_id, "of_status": status}
    bound |= {f"new_{name}": value for name, value in values.items()}
    if token is not None:
        bound["of_token"] = token
    rows = await _change(tuple(sorted(values)), has_token=token is not None).tuples(tx, bound)
    return as_dispatch(rows[0]) if rows else None


async def take(
    tx: Tx, dispatch_id: int, token: UUID, moment: ColumnElement[datetime], *, seconds: int
) -> Dispatch | None:
    """A lease goes to nobody but who has this token, for so long by the database's clock."""
    leased = update(d).where(d.c.id == dispatch_id, d.c.status == Status.LEASED)
    ends = later(tx, moment, seconds=seconds)
    taken = leased.values(lease_token=token, lease_expires_at=ends, worker_id=None)
    row = (await tx.execute(taken.returning(*WHOLE))).first()
    return None if row is None else as_dispatch(row)


@cache
def _change(names: tuple[str, ...], *, has_token: bool) -> Statement:
    """Of what changes together there are few kinds: each is compiled once."""
    of = [d.c.id == bindparam("of_id"), d.c.status == bindparam("of_status")]
    if has_token:
        of.append(d.c.lease_token == bindparam("of_token"))
    new = {name: bindparam(f"new_{name}", type_=d.c[name].type) for name in names}
    return Statement(lambda tx: update(d).where(*of).values(new).returning(*WHOLE))


async def head_rank(tx: Tx, lane: Lane, priority: int) -> int | None:
    """The virtual time of a lane at a priority: the smallest rank that waits there."""
    workflow_id, stage, provider = lane
    values = {
        "of_workflow": workflow_id,
        "of_stage": stage,
        "of_provider": provider,
        "of_priority": priority,
    }
    ((rank,),) = await _HEAD_RANK.tuples(tx, values)
    return None if rank is None else int(rank)


def _head_rank(lane: Lane, priority: int) -> Any:
    waiting = (
        d.c.status == Status.QUEUED,
        d.c.not_before.is_(None),
        d.c.backend_affinity.is_(None),
    )
    query = select(func.min(d.c.rank)).where(*waiting, in_lane(lane), d.c.priority == priority)
    return query.scalar_subquery()


def _last_rank(share: Share) -> Any:
    mine = (d.c.status == Status.QUEUED, d.c.tenant_id == share.tenant_id)
    query = select(func.max(d.c.rank)).where(
        *mine, in_lane(share.lane), d.c.priority == share.priority
    )
    return query.scalar_subquery()


_TAKE_TURNS = Statement(
    lambda tx: text("SELECT pg_advisory_xact_lock(key) FROM unnest(CAST(:keys AS bigint[])) AS key")
)


async def take_turns(tx: Tx, shares: Sequence[Share]) -> None:
    """A tenant's submits into one lane follow each other: at once, all would get the same rank.

    A statement of its own: one that waited for the lock would not see what was added meanwhile.
    """
    await _TAKE_TURNS.tuples(tx, {"keys": lock_keys(shares)})


def lock_keys(shares: Iterable[Share]) -> list[int]:
    """In one order, so that no two who submit can wait for each other."""
    return sorted({_lock_key(share) for share in shares})


def _lock_key(share: Share) -> int:
    told = f"{share.tenant_id}/{'/'.join(map(str, share.lane))}/{share.priority}"
    return int.from_bytes(blake2b(told.encode(), digest_size=8).digest(), signed=True)


_OF_ONE = Share(
    bindparam("of_tenant"),  # type: ignore[arg-type]
    Lane(bindparam("of_workflow"), bindparam("of_stage"), bindparam("of_provider")),  # type: ignore[arg-type]
    bindparam("of_priority"),  # type: ignore[arg-type]
)
_HEAD_RANK = Statement(lambda tx: select(_head_rank(_OF_ONE.lane, _OF_ONE.priority).label("head")))
_FLOOR = Statement(
    lambda tx: select(
        _head_rank(_OF_ONE.lane, _OF_ONE.priority).label("head"), _last_rank(_OF_ONE).label("last")
    )
)


async def _floor(tx: Tx, share: Share) -> int:
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


async def floors(tx: Tx, shares: Sequence[Share]) -> dict[Share, int]:
    """After which rank a tenant's next job stands: virtual time, or its own last that still waits.

    For SQLite, where a statement costs no round trip; PostgreSQL does it while it adds.
    """
    return {share: await _floor(tx, share) for share in shares}


_ADD = Insert(
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
        "status",
        "created_at",
        "queued_at",
        "ended_at",
        "last_error",
    ),
    returning=WHOLE,
)


async def add(
    tx: Tx, rows: Sequence[tuple[NewDispatch, int]], values: Mapping[str, Any]
) -> list[Dispatch]:
    """Those that are new: a job has one dispatch, however often its submit is repeated."""
    added = []
    for start in range(0, len(rows), ROWS_PER_STATEMENT_MAX):
        part = rows[start : start + ROWS_PER_STATEMENT_MAX]
        new = [{**_columns(*each), "ended_at": None, "last_error": None, **values} for each in part]
        added += [as_dispatch(tuple(row.values())) for row in await _ADD.add(tx, new)]
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
    }


_NOTE = Insert(
    audit_log,
    ("at", "actor", "action", "subject", "tenant_id", "details"),
    returning=[audit_log.c.id],
)


async def note(
    tx: Tx,
    noted: Sequence[Dispatch],
    *,
    actor: str | None,
    action: str,
    now: datetime,
    details: Mapping[str, Any],
) -> None:
    """One audit row each; without an actor it is the tenant's own act."""
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
        await _NOTE.add(tx, rows[start : start + ROWS_PER_STATEMENT_MAX])


async def extend_all(tx: Tx, moment: ColumnElement[datetime], *, seconds: int) -> int:
    """Whole leases, counted from now where they had run out while we were away."""
    ends = d.c.lease_expires_at
    since = case((ends < moment, moment), else_=ends)
    longer = later(tx, since, seconds=seconds)
    leased = update(d).where(d.c.status == Status.LEASED)
    return int((await tx.execute(leased.values(lease_expires_at=longer))).rowcount)


def later(tx: Tx, moment: ColumnElement[datetime], *, seconds: int) -> ColumnElement[Any]:
    if is_sqlite(tx):
        return cast(moment, BigInteger) + seconds * 1_000_000
    return moment + literal(timedelta(seconds=seconds), Interval())
