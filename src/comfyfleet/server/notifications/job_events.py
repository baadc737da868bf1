"""Events of jobs, written in the transaction of what happened and read by event streams."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.server.db import Tx
from comfyfleet.server.db.driver import StatementCall
from comfyfleet.server.notifications import store
from comfyfleet.server.notifications.model import (
    EventKind,
    NewJobEvent,
    StoredJobEvent,
)

EVENTS_PER_PAGE_MAX = 500


async def record_event(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    kind: EventKind,
    data: Mapping[str, Any],
    *,
    now: datetime,
) -> StoredJobEvent:
    row: dict[str, Any] = {
        "tenant_id": tenant_id,
        "job_id": job_id,
        "kind": kind,
        "data": dict(data),
        "created_at": now,
    }
    return StoredJobEvent(id=await store.add_event(tx, row), **row)


async def record_events(tx: Tx, new: Sequence[NewJobEvent], *, now: datetime) -> None:
    """Adds events in this order."""
    if len(new) == 1:
        await record_event(tx, *new[0], now=now)
        return
    await store.add_events(tx, [{**each._asdict(), "created_at": now} for each in new])


def record_call(new: Sequence[NewJobEvent], *, now: datetime) -> StatementCall:
    """Like `record_events`, as a call to be sent together with other writes."""
    return store.add_events_call([{**each._asdict(), "created_at": now} for each in new])


async def events_after(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int = 0, limit: int = EVENTS_PER_PAGE_MAX
) -> list[StoredJobEvent]:
    """Returns events, the oldest first; `after_id` is a reader's Last-Event-ID."""
    return await store.events_after(
        tx, tenant_id, job_id, after_id=after_id, limit=min(limit, EVENTS_PER_PAGE_MAX)
    )


async def prune_events(tx: Tx, *, before: datetime, limit: int) -> int:
    return await store.prune_events(tx, before=before, limit=limit)
