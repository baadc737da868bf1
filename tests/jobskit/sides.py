"""Sides for tests: a tenant, two workflows, and a clock that is moved by hand."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import insert, update
from tests.dbkit.databases import Databases

from comfyfleet.db import Database, Pools, open_database
from comfyfleet.db.central import dispatches, workflows
from comfyfleet.dispatch.model import Lane, Waiter
from comfyfleet.dispatch.queue import Queue
from comfyfleet.jobs.model import Job, Submission
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.settings import Settings
from comfyfleet.ledger import service as ledger
from comfyfleet.ledger.model import JobFacts
from comfyfleet.storage import LocalStore
from comfyfleet.tenants import service as tenants

START = datetime(2026, 11, 15, 12, tzinfo=UTC)
PROMPT = {"1": {"class_type": "ComfyfleetSteps", "inputs": {"steps": 1}}}
WORKFLOWS = (1, 2)
LANES = frozenset(Lane(number, "production", "self_hosted") for number in WORKFLOWS)


class ByHand:
    """A clock."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def go_on(self, **time: float) -> None:
        self.now += timedelta(**time)


@asynccontextmanager
async def sides_on(
    databases: Databases, folder: Path, clock: ByHand, **settings: Any
) -> AsyncIterator[tuple[Sides, UUID]]:
    """With a tenant in it."""
    urls = await databases.url("central"), await databases.url("tenant")
    central, pool = map(open_database, urls)
    # Caps are for those tests that are about them.
    given = Settings(**{"max_active_jobs_per_user": 1000, **settings})
    queue = Queue(central, settings=given, clock=clock, new_token=uuid4)
    store = LocalStore(folder, public_url="http://c.test", secret=b"s" * 32, clock=clock)
    tenant_id = uuid4()
    await _seed(central, tenant_id, clock())
    sides = Sides(
        central=central,
        pools=Pools({"main": pool}),
        store=store,
        queue=queue,
        settings=given,
        clock=clock,
        new_id=uuid4,
    )
    try:
        yield sides, tenant_id
    finally:
        await sides.deferred.flush()
        await queue.close()
        await central.close()
        await pool.close()
        await databases.give_back(*urls)


async def _seed(central: Database, tenant_id: UUID, now: datetime) -> None:
    async with central.begin() as tx:
        await tenants.create(tx, tenant_id=tenant_id, name="Ada", pool="main", now=now)
        for number in WORKFLOWS:
            row = {
                "id": number,
                "slug": f"workflow-{number}",
                "version": 1,
                "required_capabilities": [],
                "is_active": True,
                "created_at": now,
            }
            await tx.execute(insert(workflows).values(row))


def asked(workflow_id: int = 1, **changes: Any) -> Submission:
    return Submission(
        workflow_id=workflow_id,
        workflow_slug=f"workflow-{workflow_id}",
        workflow_version=1,
        prompt=PROMPT,
        **changes,
    )


def waiter(worker_id: str = "w1", **changes: Any) -> Waiter:
    return Waiter(worker_id=worker_id, lanes=LANES, is_alone=True, **changes)


async def give_tokens(sides: Sides, tenant_id: UUID, amount: int) -> UUID:
    """A user with a full wallet."""
    user_id = uuid4()
    async with sides.pools["main"].begin() as tx:
        await ledger.credit(tx, tenant_id, user_id, amount, f"paid-{user_id}", now=sides.clock())
    return user_id


async def require_sound_ledger(sides: Sides, tenant_id: UUID, jobs: Sequence[Job]) -> None:
    """It adds up, and every job that has ended is settled as it ended."""
    facts = [
        JobFacts(job.id, job.reserved_tokens, not job.status.is_active, job.status == "completed")
        for job in jobs
    ]
    async with sides.pools["main"].look() as tx:
        assert await ledger.verify(tx) == []
        assert await ledger.verify_jobs(tx, tenant_id, facts) == []


async def let_expire(sides: Sides, dispatch_id: int | None = None) -> None:
    """The time of this lease, or of all, is up; PostgreSQL would not look at our clock."""
    statement = update(dispatches).where(dispatches.c.status == "leased")
    if dispatch_id is not None:
        statement = statement.where(dispatches.c.id == dispatch_id)
    async with sides.central.begin() as tx:
        await tx.execute(statement.values(lease_expires_at=START - timedelta(days=1)))
