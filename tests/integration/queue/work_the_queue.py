"""One of several processes that work the same queue; prints the ids that it completed."""

import asyncio
import random
import sys
import uuid

from comfyfleet.clock import utc_now
from comfyfleet.server.db import open_database
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import QueueLane, RequeueReason, Waiter
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.settings import Settings

LANES = frozenset(QueueLane(number, "production", "self_hosted") for number in (1, 2, 3))
EMPTY_IN_A_ROW = 3


async def main(url: str, number: str) -> None:
    db = open_database(url)
    queue = DispatchQueue(db, settings=Settings(), clock=utc_now, new_token=uuid.uuid4)
    chance = random.Random(number)

    async def work(place: int) -> None:
        me = Waiter(f"gpu-{number}-{place}", LANES)
        empty = 0
        while empty < EMPTY_IN_A_ROW:
            lease = await queue.lease(me, wait_seconds=0.3)
            if lease is None:
                empty += 1
                continue
            empty = 0
            if chance.random() < 0.05:
                async with db.transaction() as tx:
                    back = await service.requeue(
                        tx, lease.dispatch_id, lease.token, RequeueReason.SPOT, now=utc_now()
                    )
                queue.arrived([back])
                continue
            await queue.complete(lease.dispatch_id, lease.token, duration=0.1)
            sys.stdout.write(f"{lease.dispatch_id}\n")

    await asyncio.gather(*(work(place) for place in range(8)))
    await queue.close()
    await db.close()


asyncio.run(main(sys.argv[1], sys.argv[2]))
