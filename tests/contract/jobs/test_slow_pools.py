"""A tenant's database that hangs holds up one worker at most, and no job of another database."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock, asked, job_context_on, waiter

from comfyfleet.server.db import Pools, Tx, open_database
from comfyfleet.server.jobs import context as job_context
from comfyfleet.server.jobs import service, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import DispatchLease
from comfyfleet.server.tenants import service as tenants

SECONDS_MAX = 60.0


@dataclass
class TwoPools:
    context: JobContext
    slow: UUID
    other: UUID
    clock: ManualClock
    started: list[UUID] = field(default_factory=list)  # tenants
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, tenant_id: UUID) -> UUID:
        job, _ = await submit.submit(self.context, tenant_id, asked())
        return job.id

    async def lease(self, worker_id: str) -> UUID | None:
        leasing = asyncio.create_task(lease_next(self.context, waiter(worker_id), wait_seconds=0))
        done, _ = await asyncio.wait({leasing}, timeout=SECONDS_MAX)
        if not done:
            self.released.set()  # a read is never canceled, so this test would wait for ever
        handed = await leasing
        assert done, "the worker waited for the slow pool"
        return None if handed is None else handed.job_id

    async def wake_due(self) -> None:
        self.clock.advance(hours=1)
        async with self.context.central.transaction() as tx:
            await dispatch.wake_due(tx, now=self.clock(), limit=100)


@pytest.fixture
async def two(
    postgres_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TwoPools]:
    monkeypatch.setattr(job_context, "PAYLOAD_SECONDS_MAX", 0.1)
    clock, other_tenant = ManualClock(), uuid4()
    url = await postgres_databases.url("tenant")
    other = open_database(url)
    async with job_context_on(postgres_databases, tmp_path, clock) as (context, tenant_id):
        async with context.central.transaction() as tx:
            await tenants.create_tenant(
                tx, tenant_id=other_tenant, name="Bob", pool="other", now=clock()
            )
        pools = Pools({"main": context.pools["main"], "other": other})
        two = TwoPools(replace(context, pools=pools), tenant_id, other_tenant, clock)
        start = service.start

        async def hanging_start(tx: Tx, lease: DispatchLease, **options: object) -> Job | None:
            two.started.append(lease.tenant_id)
            if lease.tenant_id == two.slow:
                await two.released.wait()
            return await start(tx, lease, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(service, "start", hanging_start)
        yield two
        two.released.set()
        await two.context.deferred.flush()
    await other.close()
    await postgres_databases.give_back(url)


async def test_a_worker_gets_the_job_of_another_pool_instead(two: TwoPools) -> None:
    await two.submit(two.slow)
    job_id = await two.submit(two.other)
    assert await two.lease("w") == job_id
    assert await two.lease("w") is None


async def test_a_pool_that_hangs_is_read_by_nobody_else(two: TwoPools) -> None:
    for _ in range(3):
        await two.submit(two.slow)
    assert await two.lease("w1") is None
    assert two.started == [two.slow], "the first read goes on, and shows when the pool is back"
    job_id = await two.submit(two.other)
    assert await two.lease("w2") == job_id
    assert two.started.count(two.slow) == 1


async def test_the_jobs_of_a_pool_that_responds_again_are_leased(two: TwoPools) -> None:
    job_ids = {await two.submit(two.slow) for _ in range(2)}
    assert await two.lease("w1") is None
    two.released.set()
    leased: set[UUID | None] = set()
    async with asyncio.timeout(SECONDS_MAX):
        while not leased >= job_ids:
            await two.wake_due()
            leased.add(await two.lease("w2"))
