"""Measures the peers without HTTP as well: their own fetch and finish, with the concurrency that is
best for them."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
from pgqueuer.adapters.drivers.asyncpg import AsyncpgPoolDriver
from pgqueuer.core.qm import QueueManager
from pgqueuer.domain.types import QueueExecutionMode, QueueManagerId
from pgqueuer.ports.repository import EntrypointExecutionParameter
from pgqueuer.queries import Queries
from procrastinate import App, PsycopgConnector
from procrastinate.jobs import Status

CONNECTIONS = 8
BATCH = 10
ENTRYPOINTS = [f"workflow_{number}" for number in range(10)]
FILL_PROCRASTINATE = """
INSERT INTO procrastinate_jobs (queue_name, task_name, priority, args)
SELECT 'workflow_' || n % 10, 'render', n % 3, '{}' FROM generate_series(1, $1::int) AS n
"""


@asynccontextmanager
async def pgqueuer_queries(url: str) -> AsyncIterator[Queries]:
    async with asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
        yield Queries(AsyncpgPoolDriver(pool))


async def prepare_pgqueuer(url: str) -> None:
    async with pgqueuer_queries(url) as queries:
        await queries.install()


async def fill_pgqueuer(url: str, rows: int) -> None:
    async with pgqueuer_queries(url) as queries:
        for start in range(0, rows, 1_000):
            numbers = range(start, min(start + 1_000, rows))
            names = [ENTRYPOINTS[number % 10] for number in numbers]
            await queries.enqueue(names, [b""] * len(numbers), [n % 3 for n in numbers])


async def pgqueuer_cycles(url: str, *, jobs: int, loops: int = CONNECTIONS) -> float:
    """Returns the jobs per second of this many concurrent loops that fetch batches of ten."""
    entrypoints: dict[Any, Any] = {
        name: EntrypointExecutionParameter(concurrency_limit=0) for name in ENTRYPOINTS
    }
    done = 0
    async with pgqueuer_queries(url) as queries:

        async def work() -> None:
            nonlocal done
            while done < jobs:
                batch = await queries.dequeue(
                    batch_size=BATCH,
                    entrypoints=entrypoints,
                    queue_manager_id=QueueManagerId(uuid.uuid4()),
                    global_concurrency_limit=None,
                    heartbeat_timeout=timedelta(seconds=30),
                )
                if not batch:
                    break
                await queries.log_jobs([(job, "successful", None) for job in batch])
                done += len(batch)

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(loops)))
        return done / (time.perf_counter() - start)


async def pgqueuer_drained(url: str, *, jobs: int) -> float:
    """Returns the jobs per second of pgqueuer's own QueueManager, which runs all queued jobs."""
    async with pgqueuer_queries(url) as queries:
        queue = QueueManager(queries)

        async def nothing(job: Any) -> None:
            pass

        for name in ENTRYPOINTS:
            queue.entrypoint(name)(nothing)
        start = time.perf_counter()
        await queue.run(batch_size=BATCH, mode=QueueExecutionMode.drain)
        return jobs / (time.perf_counter() - start)


@asynccontextmanager
async def procrastinate_app(url: str) -> AsyncIterator[App]:
    connector = PsycopgConnector(conninfo=url, min_size=CONNECTIONS, max_size=CONNECTIONS)
    async with App(connector=connector).open_async() as app:
        yield app


async def prepare_procrastinate(url: str) -> None:
    async with procrastinate_app(url) as app:
        await app.schema_manager.apply_schema_async()


async def fill_procrastinate(url: str, rows: int) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(FILL_PROCRASTINATE, rows)
    await connection.close()


async def procrastinate_cycles(url: str, *, jobs: int, loops: int = CONNECTIONS) -> float:
    numbers = iter(range(jobs))
    async with procrastinate_app(url) as app:
        worker_id = await app.job_manager.register_worker()

        async def work() -> None:
            for _ in numbers:
                job = await app.job_manager.fetch_job(queues=None, worker_id=worker_id)
                assert job
                await app.job_manager.finish_job(job, Status.SUCCEEDED, delete_job=False)

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(loops)))
        return jobs / (time.perf_counter() - start)


async def pgqueuer_waiting(url: str) -> int:
    async with pgqueuer_queries(url) as queries:
        return sum(size.count for size in await queries.queue_size())
