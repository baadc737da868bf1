"""Events of a job: written in the transaction of what happened, read from where a reader stopped.

Whoever writes holds the job's row, so the numbers of one job grow in the order of its commits.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.db.statement import Call
from comfyfleet.events import store
from comfyfleet.events.model import EventKind, JobEvent, NewEvent

PAGE_MAX = 500


async def record(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    kind: EventKind,
    data: Mapping[str, Any],
    *,
    now: datetime,
) -> JobEvent:
    row: dict[str, Any] = {
        "tenant_id": tenant_id,
        "job_id": job_id,
        "kind": kind,
        "data": dict(data),
        "created_at": now,
    }
    return JobEvent(id=await store.add(tx, row), **row)


async def record_all(tx: Tx, new: Sequence[NewEvent], *, now: datetime) -> None:
    """In this order."""
    if len(new) == 1:
        await record(tx, *new[0], now=now)
        return
    await store.add_all(tx, [{**each._asdict(), "created_at": now} for each in new])


def recording(new: Sequence[NewEvent], *, now: datetime) -> Call:
    """The same as `record_all`, to be sent together with what else happens; in this order."""
    return store.adding([{**each._asdict(), "created_at": now} for each in new])


async def after(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int = 0, limit: int = PAGE_MAX
) -> list[JobEvent]:
    """The oldest first; `after_id` is what a reader sends as Last-Event-ID."""
    return await store.after(tx, tenant_id, job_id, after_id=after_id, limit=min(limit, PAGE_MAX))


async def prune(tx: Tx, *, before: datetime, limit: int) -> int:
    return await store.prune(tx, before=before, limit=limit)
