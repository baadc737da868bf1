"""Jobs, lanes and waiters for tests of the queue."""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, insert, select, update

from comfyfleet.clock import Clock, utc_now
from comfyfleet.server.db import Database
from comfyfleet.server.db.central_tables import audit_log, dispatches, workflows
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import Dispatch, DispatchLease, NewDispatch, QueueLane, Waiter
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.server.queue.waiters import PollRequest
from comfyfleet.settings import Settings

ADA = uuid.UUID(int=0xADA)
BOB = uuid.UUID(int=0xB0B)


def lane(number: int = 1, *, stage: str = "production", provider: str = "self_hosted") -> QueueLane:
    return QueueLane(number, stage, provider)


def new(
    tenant: uuid.UUID = ADA,
    *,
    to: QueueLane | None = None,
    job: uuid.UUID | None = None,
    **more: Any,
) -> NewDispatch:
    return NewDispatch(tenant, job or uuid.uuid4(), to or lane(), **more)


def waiter(name: str = "gpu-1", *, lanes: Sequence[QueueLane] | None = None, **more: Any) -> Waiter:
    affinities = frozenset({f"worker:{name}", "fleet:default/production"})
    return Waiter(name, frozenset([lane()] if lanes is None else lanes), affinities, **more)


async def add_workflows(db: Database, *numbers: int) -> None:
    rows = [
        {
            "id": number,
            "slug": f"workflow-{number}",
            "version": 1,
            "required_capabilities": [],
            "is_active": True,
            "created_at": datetime(2026, 1, 1, tzinfo=UTC),
            "output": "optional",
        }
        for number in numbers or (1, 2, 3)
    ]
    async with db.transaction() as tx:
        await tx.execute(insert(workflows), rows)


async def submit(db: Database, *jobs: NewDispatch, now: datetime | None = None) -> list[Dispatch]:
    async with db.transaction() as tx:
        return await service.enqueue(tx, jobs, now=now or utc_now())


async def seen(db: Database, dispatch_id: int) -> Dispatch:
    async with db.read() as tx:
        return await service.get(tx, dispatch_id)


@asynccontextmanager
async def opened(
    db: Database, *, clock: Clock = utc_now, **settings: Any
) -> AsyncIterator[DispatchQueue]:
    queue = DispatchQueue(db, settings=Settings(**settings), clock=clock, new_token=uuid.uuid4)
    try:
        yield queue
    finally:
        await queue.close()


async def leased(queue: DispatchQueue, who: Waiter | None = None) -> DispatchLease:
    asking = who or waiter()
    # A new job is left to idle workers for a moment.
    lease = await queue.lease(asking, wait_seconds=10 if asking.is_prefetch else 0)
    assert lease is not None, "nothing was leased"
    return lease


async def parked(queue: DispatchQueue, number: int) -> None:
    """Waits until this many polls wait and none of them is being served."""
    for _ in range(1_000):
        if queue.waiting() == queue.parked() == number:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{queue.parked()} wait, not {number}")


async def audited(db: Database, dispatch_id: int) -> list[str]:
    """The audit entries of a dispatch, in order."""
    query = select(audit_log.c.action).where(audit_log.c.subject == f"dispatch:{dispatch_id}")
    async with db.read() as tx:
        return list((await tx.execute(query.order_by(audit_log.c.id))).scalars())


async def set_columns(db: Database, dispatch_id: int, **values: Any) -> None:
    """Changes columns, as time or another process would have done."""
    async with db.transaction() as tx:
        await tx.execute(update(dispatches).where(dispatches.c.id == dispatch_id).values(**values))


async def outcome(db: Database) -> tuple[dict[str, int], int, int]:
    """Rows by status, the number of leases ever made, and of audit entries."""
    async with db.read() as tx:
        by_status = await tx.execute(
            select(dispatches.c.status, func.count()).group_by(dispatches.c.status)
        )
        made = await tx.scalar(select(func.sum(dispatches.c.lease_number)))
        noted = await tx.scalar(select(func.count()).where(audit_log.c.action == "lease"))
    return {row[0]: row[1] for row in by_status}, int(made or 0), int(noted or 0)


def parked_requests(queue: DispatchQueue) -> list[PollRequest]:
    """The requests of all workers that wait for a job."""
    return queue.requests_not_seen_since(math.inf)
