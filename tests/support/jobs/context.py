"""A JobContext for tests: a tenant, two workflows, and a clock that the test controls."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import insert, update
from tests.support.databases.factory import Databases

from comfyfleet.server.db import Database, Pools, open_database
from comfyfleet.server.db.central_tables import dispatches, workflows
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Job, JobSpec, is_metered
from comfyfleet.server.queue.model import QueueLane, Waiter
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.server.storage import LocalStore
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import JobLedgerFacts
from comfyfleet.settings import Settings

START = datetime(2026, 11, 15, 12, tzinfo=UTC)
PROMPT = {"1": {"class_type": "ComfyfleetSteps", "inputs": {"steps": 1}}}
WORKFLOWS = (1, 2)
LANES = frozenset(QueueLane(number, "production", "self_hosted") for number in WORKFLOWS)


class ManualClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **time: float) -> None:
        self.now += timedelta(**time)


@asynccontextmanager
async def job_context_on(
    databases: Databases, folder: Path, clock: ManualClock, **settings: Any
) -> AsyncIterator[tuple[JobContext, UUID]]:
    """Yields a JobContext and the id of its tenant."""
    urls = await databases.url("central"), await databases.url("tenant")
    central, pool = map(open_database, urls)
    # Caps are for those tests that are about them.
    given = Settings(**{"max_active_jobs_per_user": 1000, **settings})
    queue = DispatchQueue(central, settings=given, clock=clock, new_token=uuid4)
    store = LocalStore(folder, public_url="http://c.test", secret=b"s" * 32, clock=clock)
    tenant_id = uuid4()
    await _seed(central, tenant_id, clock())
    context = JobContext(
        central=central,
        pools=Pools({"main": pool}),
        store=store,
        queue=queue,
        settings=given,
        clock=clock,
        new_id=uuid4,
    )
    try:
        yield context, tenant_id
    finally:
        await context.deferred.flush()
        await queue.close()
        await central.close()
        await pool.close()
        await databases.give_back(*urls)


async def _seed(central: Database, tenant_id: UUID, now: datetime) -> None:
    async with central.transaction() as tx:
        await tenants.create_tenant(tx, tenant_id=tenant_id, name="Ada", pool="main", now=now)
        for number in WORKFLOWS:
            row = {
                "id": number,
                "slug": f"workflow-{number}",
                "version": 1,
                "required_capabilities": [],
                "is_active": True,
                "created_at": now,
                "output": "optional",
            }
            await tx.execute(insert(workflows).values(row))


def asked(workflow_id: int = 1, **changes: Any) -> JobSpec:
    return JobSpec(
        workflow_id=workflow_id,
        workflow_slug=f"workflow-{workflow_id}",
        workflow_version=1,
        prompt=PROMPT,
        **changes,
    )


def waiter(worker_id: str = "w1", **changes: Any) -> Waiter:
    return Waiter(worker_id=worker_id, lanes=LANES, is_alone=True, **changes)


async def give_tokens(context: JobContext, tenant_id: UUID, amount: int) -> UUID:
    """Creates a user with a full wallet; returns the user's id."""
    user_id = uuid4()
    async with context.pools["main"].transaction() as tx:
        await ledger.credit(tx, tenant_id, user_id, amount, f"paid-{user_id}", now=context.clock())
    return user_id


async def require_sound_ledger(context: JobContext, tenant_id: UUID, jobs: Sequence[Job]) -> None:
    """Asserts that the ledger adds up and every ended job is settled according to its end."""
    facts = [
        JobLedgerFacts(
            job.id,
            job.reserved_tokens,
            not job.status.is_active,
            job.status == "completed",
            is_metered(job.spec),
        )
        for job in jobs
    ]
    async with context.pools["main"].read() as tx:
        assert await ledger.verify(tx) == []
        assert await ledger.verify_jobs(tx, tenant_id, facts) == []


async def let_expire(context: JobContext, dispatch_id: int | None = None) -> None:
    """Makes this lease, or all, expire in the database, because PostgreSQL does not use our clock."""
    statement = update(dispatches).where(dispatches.c.status == "leased")
    if dispatch_id is not None:
        statement = statement.where(dispatches.c.id == dispatch_id)
    async with context.central.transaction() as tx:
        await tx.execute(statement.values(lease_expires_at=START - timedelta(days=1)))
