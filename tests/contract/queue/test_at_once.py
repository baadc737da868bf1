"""Many at once, on purpose: each job is leased once at a time, and none is lost."""

import asyncio
import random
from collections import Counter

from tests.support.jobs.dispatches import ADA, BOB, lane, new, opened, outcome, submit, waiter

from comfyfleet.clock import utc_now
from comfyfleet.server.db import Database
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import DispatchLease, DispatchStatus, RequeueReason
from comfyfleet.server.queue.queue import DispatchQueue

LANES = [lane(1), lane(2), lane(3)]


async def test_64_workers_of_one_process_lease_each_job_once_at_a_time(central: Database) -> None:
    jobs = [new(random.choice([ADA, BOB]), to=LANES[n % 3], priority=n % 4) for n in range(600)]
    await submit(central, *jobs)
    held: set[int] = set()
    done: Counter[int] = Counter()
    chance = random.Random(7)

    async def work(queue: DispatchQueue, number: int) -> None:
        me = waiter(f"gpu-{number}", lanes=chance.sample(LANES, chance.randint(2, 3)))
        while (lease := await queue.lease(me, wait_seconds=0)) is not None:
            assert lease.dispatch_id not in held, "leased twice at a time"
            held.add(lease.dispatch_id)
            await asyncio.sleep(chance.random() / 500)
            held.discard(lease.dispatch_id)
            if chance.random() < 0.1:
                await back(central, lease)
            else:
                await queue.complete(lease.dispatch_id, lease.token, duration=0.1)
                done[lease.dispatch_id] += 1

    async with opened(central) as queue:
        await asyncio.gather(*(work(queue, number) for number in range(64)))
        await asyncio.gather(*(work(queue, number) for number in range(3)))
    assert set(done.values()) == {1}
    by_status, made, noted = await outcome(central)
    assert by_status == {DispatchStatus.COMPLETED: 600}
    assert made == noted >= 600


async def back(db: Database, lease: DispatchLease) -> None:
    async with db.transaction() as tx:
        await service.requeue(tx, lease.dispatch_id, lease.token, RequeueReason.SPOT, now=utc_now())
