"""Pickup: from the submit of one job to the moment a waiting worker has it, one at a time."""

import asyncio
import statistics
import time
import uuid
from datetime import timedelta
from typing import Any

from pgqueuer.core.qm import QueueManager

from comfyfleet.db import Database
from comfyfleet.dispatch import service
from comfyfleet.dispatch.model import Lane, NewDispatch
from comfyfleet.kernel.clock import utc_now
from queueing import ours
from queueing.peers import ENTRYPOINTS, pgqueuer_queries

PAUSE_SECONDS = 0.01


async def of_ours(database: Database, *, jobs: int) -> float:
    """Median milliseconds; the submit is the whole enqueue, ranks and audit row included."""
    times = []
    async with ours.opened(database) as queue:
        for number in range(jobs):
            wait = asyncio.create_task(queue.lease(ours.worker(number), wait_seconds=10))
            await asyncio.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            job = NewDispatch(uuid.uuid4(), uuid.uuid4(), Lane(1, "production", "self_hosted"))
            async with database.begin() as tx:
                await service.enqueue(tx, [job], now=utc_now())
            queue.wake([job.lane])
            lease = await wait
            times.append(time.perf_counter() - start)
            assert lease
            await queue.complete(lease.dispatch_id, lease.token)
    return statistics.median(times) * 1000


async def of_pgqueuer(url: str, *, jobs: int) -> float:
    """Its own QueueManager waits, woken by its own notify."""
    times: list[float] = []
    picked = asyncio.Event()
    async with pgqueuer_queries(url) as queries, pgqueuer_queries(url) as submitting:
        manager = QueueManager(queries)

        async def take(job: Any) -> None:
            picked.set()

        manager.entrypoint(ENTRYPOINTS[0])(take)
        running = asyncio.create_task(manager.run(dequeue_timeout=timedelta(seconds=5)))
        await asyncio.sleep(1)
        for _ in range(jobs):
            await asyncio.sleep(PAUSE_SECONDS)
            picked.clear()
            start = time.perf_counter()
            await submitting.enqueue(ENTRYPOINTS[0], b"")
            await picked.wait()
            times.append(time.perf_counter() - start)
        manager.shutdown.set()
        await running
    return statistics.median(times) * 1000
