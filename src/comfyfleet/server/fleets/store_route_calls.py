"""SQL for calls to routes of custom nodes, and for the workers that accepted uploads."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Interval,
    bindparam,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from comfyfleet.api.route_calls import RouteAnswer, RouteCall
from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import backend_uploads, route_calls, workers
from comfyfleet.server.db.dialect import Moment, db_now, is_sqlite, upsert
from comfyfleet.server.db.driver import PreparedStatement

CHANNEL = "comfyfleet_routes"
NEW = "new"  # the hint for a new call; other hints are the ids of answered calls
WAITING, TAKEN, ANSWERED = "waiting", "taken", "answered"
MATCHED_AT_ONCE_MAX = 1_000  # calls per matching pass


class WaitingCall(NamedTuple):
    id: UUID
    fleet_ids: Sequence[int]
    path: str
    for_worker_id: str | None = None  # None means any worker of the fleets


def _moment(tx: Tx, now: datetime, seconds: float) -> ColumnElement[Any]:
    """Returns the time `seconds` from now. On PostgreSQL, which several control planes may share,
    the database's clock is used.
    """
    if is_sqlite(tx):
        return literal(now + timedelta(seconds=seconds), Moment())
    return func.clock_timestamp() + literal(timedelta(seconds=seconds), Interval())


def _lock_number(tenant_id: UUID) -> int:
    return int.from_bytes(
        hashlib.sha256(b"routes" + tenant_id.bytes).digest()[:8], "big", signed=True
    )


async def hint(tx: Tx, payload: str) -> None:
    """Sends a hint to all control planes when the transaction is committed."""
    if not is_sqlite(tx):
        await tx.execute(select(func.pg_notify(CHANNEL, payload)))


async def add(tx: Tx, row: Mapping[str, Any], *, now: datetime, seconds: float) -> None:
    values = {**row, "status": WAITING, "created_at": now, "expires_at": _moment(tx, now, seconds)}
    await tx.execute(insert(route_calls).values(values))


async def count_of(tx: Tx, tenant_id: UUID, *, now: datetime) -> int:
    """Counts the tenant's current calls at all control planes. Copies for additional workers don't
    count.

    Holds a lock until the transaction ends, so that other transactions can't count at the same time
    and exceed the limit together.
    """
    if not is_sqlite(tx):
        await tx.execute(select(func.pg_advisory_xact_lock(_lock_number(tenant_id))))
    query = select(func.count()).where(
        route_calls.c.tenant_id == tenant_id,
        route_calls.c.is_copy.is_(False),
        route_calls.c.expires_at > db_now(tx, now),
    )
    return int((await tx.execute(query)).scalar_one())


async def waiting(tx: Tx, *, now: datetime) -> list[WaitingCall]:
    """Returns the waiting calls, the oldest first."""
    query = (
        select(
            route_calls.c.id,
            route_calls.c.fleet_ids,
            route_calls.c.path,
            route_calls.c.for_worker_id,
        )
        .where(route_calls.c.status == WAITING, route_calls.c.expires_at > db_now(tx, now))
        .order_by(route_calls.c.created_at, route_calls.c.id)
        .limit(MATCHED_AT_ONCE_MAX)
    )
    return [WaitingCall(*row) for row in await tx.execute(query)]


async def is_serving(tx: Tx, worker_row_id: int) -> bool:
    """Whether the worker may currently serve calls."""
    query = select(workers.c.id).where(
        workers.c.id == worker_row_id,
        workers.c.is_approved,
        ~workers.c.is_draining,
        workers.c.backend_problem.is_(None),
        workers.c.revoked_at.is_(None),
    )
    return (await tx.execute(query)).first() is not None


async def take(
    tx: Tx, call_id: UUID, worker_id: str, *, now: datetime, seconds: float
) -> RouteCall | None:
    """Assigns a call to a worker. Returns None if another worker has taken it or its caller is no
    longer waiting.
    """
    updated = await tx.execute(
        update(route_calls)
        .where(
            route_calls.c.id == call_id,
            route_calls.c.status == WAITING,
            or_(route_calls.c.for_worker_id.is_(None), route_calls.c.for_worker_id == worker_id),
            route_calls.c.expires_at > db_now(tx, now),
        )
        .values(status=TAKEN, worker_id=worker_id, expires_at=_moment(tx, now, seconds))
        .returning(*(route_calls.c[name] for name in ("id", "method", "target", "headers", "body")))
    )
    row = updated.mappings().first()
    return RouteCall(**row, answer_seconds=seconds) if row else None


async def put_back(tx: Tx, call_id: UUID, worker_id: str) -> None:
    """Makes a taken call available again. The call must not have been sent to the worker."""
    await tx.execute(
        update(route_calls)
        .where(
            route_calls.c.id == call_id,
            route_calls.c.status == TAKEN,
            route_calls.c.worker_id == worker_id,
        )
        .values(status=WAITING, worker_id=None)
    )


async def withdraw(tx: Tx, call_id: UUID) -> bool:
    """Deletes a call if no worker has taken it. Returns True if the call was deleted, so that no
    worker can take it anymore.
    """
    deleted = await tx.execute(
        delete(route_calls)
        .where(route_calls.c.id == call_id, route_calls.c.status == WAITING)
        .returning(route_calls.c.id)
    )
    return deleted.first() is not None


async def answer(tx: Tx, answered: RouteAnswer) -> bool:
    """Stores the response of the worker that has the call. Returns False if the worker no longer
    has the call or has already responded.
    """
    content = answered.model_dump(mode="json", include={"status", "headers", "error"})
    stored = await tx.execute(
        update(route_calls)
        .where(
            route_calls.c.id == answered.call_id,
            route_calls.c.status == TAKEN,
            route_calls.c.worker_id == answered.worker_id,
        )
        .values(status=ANSWERED, answer=content, answer_body=answered.body)
        .returning(route_calls.c.id)
    )
    return stored.first() is not None


async def status(tx: Tx, call_id: UUID) -> str | None:
    query = select(route_calls.c.status).where(route_calls.c.id == call_id)
    return (await tx.execute(query)).scalar_one_or_none()


async def get_answer(tx: Tx, call_id: UUID) -> RouteAnswer | None:
    query = select(route_calls.c.worker_id, route_calls.c.answer, route_calls.c.answer_body).where(
        route_calls.c.id == call_id, route_calls.c.status == ANSWERED
    )
    row = (await tx.execute(query)).first()
    if row is None:
        return None
    return RouteAnswer(worker_id=row.worker_id, call_id=call_id, body=row.answer_body, **row.answer)


async def remove(tx: Tx, call_id: UUID) -> None:
    await tx.execute(delete(route_calls).where(route_calls.c.id == call_id))


async def remove_expired(tx: Tx, *, now: datetime) -> int:
    """Deletes expired calls, which control planes left behind when they stopped. Returns their
    number.
    """
    deleted = await tx.execute(
        delete(route_calls).where(route_calls.c.expires_at <= db_now(tx, now))
    )
    return int(deleted.rowcount)


async def put_upload(
    tx: Tx, tenant_id: UUID, user_id: UUID, worker_ids: Sequence[str], *, now: datetime
) -> None:
    """Records which workers accepted the user's last upload."""
    row = {
        "tenant_id": tenant_id,
        "user_id": user_id,
        "worker_ids": list(worker_ids),
        "accepted_at": now,
    }
    await tx.execute(upsert(tx, backend_uploads, row, key=("tenant_id", "user_id")))


_UPLOAD = PreparedStatement(
    lambda tx: select(backend_uploads.c.worker_ids).where(
        backend_uploads.c.tenant_id == bindparam("of_tenant"),
        backend_uploads.c.user_id == bindparam("of_user"),
        backend_uploads.c.accepted_at >= bindparam("since", type_=Moment()),
    )
)


async def get_upload(tx: Tx, tenant_id: UUID, user_id: UUID, *, since: datetime) -> Sequence[str]:
    """Returns the ids of the workers that accepted the user's last upload, or none if that was
    before `since`.
    """
    values = {"of_tenant": tenant_id, "of_user": user_id, "since": since}
    rows = await _UPLOAD.tuples(tx, values)
    return rows[0][0] if rows else ()


async def remove_old_uploads(tx: Tx, *, before: datetime) -> None:
    await tx.execute(delete(backend_uploads).where(backend_uploads.c.accepted_at < before))
