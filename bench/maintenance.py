"""Measures reconcile with 100,000 queued jobs, and leases while 1,000,000 old rows are deleted, on
PostgreSQL.

make bench        or        python bench/maintenance.py [ROWS] [--quick]
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import quantiles
from time import perf_counter

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.databases.factory import Databases
from tests.support.databases.postgres import running_postgres
from tests.support.jobs.context import START, ManualClock, job_context_on, waiter

from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.reconcile import reconcile
from comfyfleet.server.maintenance.retention import delete_expired_rows
from support import is_quick

NUMBERS = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
QUEUED, OLD, ALONE_SECONDS = (
    (1_000, 2_000, 0.5) if is_quick() else (100_000, (NUMBERS or [1_000_000])[0], 10.0)
)
JOBS = """
    INSERT INTO ai_jobs (id, tenant_id, workflow_id, workflow_slug, workflow_version, stage, provider,
        priority, status, prompt, properties, assets, submitted_at)
    SELECT md5(n::text)::uuid, 'TENANT', 1, 'workflow-1', 1, 'production', 'self_hosted', 0, 'queued',
        '{}', '{}', '[]', 'AT' FROM generate_series(1, COUNT) n"""
DISPATCHES = """
    INSERT INTO ai_job_dispatches (tenant_id, tenant_job_id, workflow_id, provider, status, priority,
        rank, created_at, queued_at)
    SELECT 'TENANT', md5(n::text)::uuid, 1, 'self_hosted', 'queued', 0, n, 'AT', 'AT'
    FROM generate_series(1, COUNT) n"""
AUDIT = """
    INSERT INTO audit_log (at, actor, action, subject, tenant_id, details)
    SELECT 'AT'::timestamptz - interval '400 days', 'worker:' || n % 200, 'lease', 'dispatch:' || n,
        'TENANT', '{}' FROM generate_series(1, COUNT) n"""


async def remove_all(context: JobContext) -> int:
    """Repeats the sweep until no old rows remain."""
    total = 0
    while deleted := (await delete_expired_rows(context))["audit"]:
        total += deleted
    return total


async def leases(context: JobContext, goes_on: Callable[[], bool]) -> list[float]:
    """Returns the duration of each lease in milliseconds. Takes as many leases per second as a
    fleet of a thousand workers."""
    durations: list[float] = []
    while goes_on() and len(durations) < QUEUED // 2:
        await asyncio.sleep(0.002)
        begin = perf_counter()
        assert await context.queue.lease(waiter(), wait_seconds=0)
        durations.append((perf_counter() - begin) * 1000)
    return durations


def speed_text(name: str, took: list[float]) -> str:
    if len(took) < 2:
        return f"{name}: {len(took)} leases"
    parts = quantiles(took, n=100)
    return f"{name}: {len(took)} leases, median {parts[49]:.1f} ms, p99 {parts[98]:.1f} ms"


async def main(url: str, folder: Path) -> None:
    clock = ManualClock()
    async with job_context_on(Databases(folder, url), folder, clock) as (context, tenant_id):

        async def fill(statement: str, count: int, *, is_central: bool) -> None:
            for name, value in {"TENANT": tenant_id, "AT": START, "COUNT": count}.items():
                statement = statement.replace(name, str(value))
            database = context.central if is_central else context.pools["main"]
            async with database.transaction() as tx:
                await tx.exec_driver_sql(statement)
                await tx.exec_driver_sql("ANALYZE")  # like autovacuum

        await fill(JOBS, QUEUED, is_central=False)
        await fill(DISPATCHES, QUEUED, is_central=True)
        clock.now = START + timedelta(minutes=5)
        begin = perf_counter()
        repairs = await reconcile(context)
        print(f"reconcile of {repairs.rows_read:,} rows: {perf_counter() - begin:.1f} s")
        await fill(AUDIT, OLD, is_central=True)
        until = perf_counter() + ALONE_SECONDS
        print(speed_text("alone", await leases(context, lambda: perf_counter() < until)))
        begin = perf_counter()
        deletion = asyncio.create_task(remove_all(context))
        print(
            speed_text("while rows are removed", await leases(context, lambda: not deletion.done()))
        )
        print(f"removed: {await deletion:,} in {perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    with running_postgres() as server, tempfile.TemporaryDirectory() as data:
        asyncio.run(main(server, Path(data)))
