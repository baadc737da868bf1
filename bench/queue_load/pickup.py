"""Measures how long it takes from a job's submission until a waiting worker has the job, one job at
a time.

There are two results: from the commit of the submission, and from its call. Our submission ranks
the job fairly and writes its audit row. A peer's submission is one insert.
"""

import asyncio
import statistics
import time
import uuid
from datetime import timedelta
from typing import Any, NamedTuple

from comfyfleet.server.db import Database
from comfyfleet.server.queue.model import NewDispatch, QueueLane
from queue_load import comfyfleet_queue

PAUSE_SECONDS = 0.01


class Pickup(NamedTuple):
    """The medians of a measurement, in milliseconds."""

    after_commit: float
    after_call: float


def median(times: list[tuple[float, float, float]]) -> Pickup:
    """Returns the medians of a list of times: called, committed, picked up."""
    return Pickup(
        1000 * statistics.median(picked - committed for _, committed, picked in times),
        1000 * statistics.median(picked - called for called, _, picked in times),
    )


async def of_ours(database: Database, *, jobs: int) -> Pickup:
    times = []
    async with comfyfleet_queue.opened(database) as queue:
        for number in range(jobs):
            wait = asyncio.create_task(
                queue.lease(comfyfleet_queue.worker(number), wait_seconds=10)
            )
            await asyncio.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            job = NewDispatch(uuid.uuid4(), uuid.uuid4(), QueueLane(1, "production", "self_hosted"))
            await queue.enqueue([job])
            committed = time.perf_counter()
            lease = await wait
            times.append((start, committed, time.perf_counter()))
            assert lease
            await queue.complete(lease.dispatch_id, lease.token)
    return median(times)


async def of_pgqueuer(url: str, *, jobs: int) -> Pickup:
    """Measures pgqueuer's own QueueManager, which is woken by its own notification."""
    from pgqueuer.core.qm import QueueManager

    from queue_load.peers import ENTRYPOINTS, pgqueuer_queries

    times = []
    picked: asyncio.Future[float] = asyncio.Future()
    async with pgqueuer_queries(url) as queries, pgqueuer_queries(url) as submitting:
        manager = QueueManager(queries)

        async def take(job: Any) -> None:
            picked.set_result(time.perf_counter())

        manager.entrypoint(ENTRYPOINTS[0])(take)
        running = asyncio.create_task(manager.run(dequeue_timeout=timedelta(seconds=5)))
        await asyncio.sleep(1)
        for _ in range(jobs):
            await asyncio.sleep(PAUSE_SECONDS)
            picked = asyncio.Future()
            start = time.perf_counter()
            await submitting.enqueue(ENTRYPOINTS[0], b"")
            committed = time.perf_counter()
            times.append((start, committed, await picked))
        manager.shutdown.set()
        await running
    return median(times)
