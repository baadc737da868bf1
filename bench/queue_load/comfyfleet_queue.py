"""Measures our queue without HTTP: 64 workers in one process that lease and complete jobs, with
audit rows."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

from sqlalchemy import delete, insert, text

from comfyfleet.clock import utc_now
from comfyfleet.server.db import Database, Tx, open_database
from comfyfleet.server.db.central_tables import (
    audit_log,
    dispatches,
    worker_workflows,
    workflow_fleets,
    workflows,
)
from comfyfleet.server.db.central_tables import fleets as fleets_table
from comfyfleet.server.db.central_tables import workers as workers_table
from comfyfleet.server.db.schema import upgrade_schema
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import WorkerRegistration
from comfyfleet.server.queue.model import QueueLane, Waiter
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.settings import Settings

WORKFLOWS = 10
TENANTS = 50
LANES = frozenset(
    QueueLane(number, "production", "self_hosted") for number in range(1, WORKFLOWS + 1)
)

# Writes rows with the ranks that enqueue would assign: in each lane, a tenant's jobs have
# consecutive ranks.
FILL_POSTGRES = """
INSERT INTO ai_job_dispatches (tenant_id, tenant_job_id, workflow_id, stage, provider, status,
    priority, rank, created_at, queued_at)
SELECT CAST(lpad(to_hex(n % CAST(:tenants AS int)), 32, '0') AS uuid), gen_random_uuid(), n % CAST(:workflows AS int) + 1,
    'production', 'self_hosted', 'queued', n % 3, n / (CAST(:tenants AS int) * 3), now(), now()
FROM generate_series(1, CAST(:rows AS int)) AS n
"""
FILL_SQLITE = """
WITH RECURSIVE counted(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < :rows)
INSERT INTO ai_job_dispatches (tenant_id, tenant_job_id, workflow_id, stage, provider, status,
    priority, rank, created_at, queued_at)
SELECT printf('%032x', n % :tenants), lower(hex(randomblob(16))), n % :workflows + 1,
    'production', 'self_hosted', 'queued', n % 3, n / (:tenants * 3), 0, 0 FROM counted
"""


async def prepare(url: str, rows: int) -> Database:
    database = open_database(url)
    await upgrade_schema(database, "central")
    async with database.transaction() as tx:
        workflow_rows = [
            {
                "id": number,
                "slug": f"workflow-{number}",
                "version": 1,
                "required_capabilities": [],
                "is_active": True,
                "created_at": utc_now(),
                "output": "optional",
            }
            for number in range(1, WORKFLOWS + 1)
        ]
        await tx.execute(insert(workflows), workflow_rows)
    await fill(database, rows)
    return database


async def _add_workers(tx: Tx, number: int) -> list[Waiter]:
    """Adds real workers with keys, because each claim is checked against the worker's orders."""
    for table in (worker_workflows, workers_table, workflow_fleets, fleets_table):
        await tx.execute(delete(table))
    now = utc_now()
    fleet = await fleets.create_fleet(
        tx, slug="a", stage="production", secret_hash="", max_workers=None, now=now
    )
    await fleets.assign(tx, fleet, range(1, WORKFLOWS + 1), now=now)
    waiters = [replace(worker(index), key_hash=f"{index:064x}") for index in range(number)]
    for waiter in waiters:
        joining = WorkerRegistration(waiter.worker_id)
        await fleets.register_worker(tx, fleet, joining, waiter.key_hash or "", cap=number, now=now)
    return waiters


async def fill(database: Database, rows: int) -> None:
    if not rows:
        return
    async with database.transaction() as tx:
        statement = text(FILL_SQLITE if database.is_sqlite else FILL_POSTGRES)
        values = {"rows": rows, "tenants": TENANTS, "workflows": WORKFLOWS}
        await tx.execute(statement, values)


async def empty(database: Database) -> None:
    async with database.transaction() as tx:
        for table in (dispatches, audit_log):
            await tx.execute(delete(table))


@asynccontextmanager
async def opened(database: Database) -> AsyncIterator[DispatchQueue]:
    queue = DispatchQueue(database, settings=Settings(), clock=utc_now, new_token=uuid.uuid4)
    try:
        yield queue
    finally:
        await queue.close()


def worker(number: int) -> Waiter:
    affinities = frozenset({f"worker:gpu-{number}", "fleet:a/production"})
    return Waiter(f"gpu-{number}", LANES, affinities)


async def cycles(database: Database, *, jobs: int, workers: int) -> float:
    """Returns the number of leases and completions per second."""
    async with database.transaction() as tx:
        waiters = await _add_workers(tx, workers)
    async with opened(database) as queue:

        async def work(number: int, numbers: Iterator[int]) -> None:
            waiter = waiters[number]
            for _ in numbers:
                lease = await queue.lease(waiter, wait_seconds=5)
                assert lease is not None
                await queue.complete(lease.dispatch_id, lease.token, duration=1.0)

        await work(0, iter(range(20)))  # opens connections and prepares statements
        numbers = iter(range(jobs))
        start = time.perf_counter()
        await asyncio.gather(*(work(number, numbers) for number in range(workers)))
        return jobs / (time.perf_counter() - start)
