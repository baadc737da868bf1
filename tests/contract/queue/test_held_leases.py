"""A worker that polls several times at once gets no more leases than it may hold."""

import asyncio

import pytest
from tests.support.jobs.dispatches import leased, new, opened, parked, submit, waiter

from comfyfleet.server.db import Database


@pytest.mark.parametrize("held_max", [0, 2])
async def test_polls_at_once_get_no_more_than_the_worker_may_hold(
    central: Database, held_max: int
) -> None:
    await submit(central, *(new() for _ in range(10)))
    async with opened(central) as queue:
        polls = [queue.lease(waiter(held_max=held_max), wait_seconds=0) for _ in range(6)]
        leases = [lease for lease in await asyncio.gather(*polls) if lease]
        assert len(leases) == held_max + 1
        assert await queue.lease(waiter(held_max=held_max), wait_seconds=0) is None
        other = await leased(queue, waiter("gpu-2", held_max=0))
        assert other.worker_id == "gpu-2"


async def test_one_that_waits_is_looked_at_anew_when_its_worker_holds_more_by_then(
    central: Database,
) -> None:
    async with opened(central) as queue:
        waiting = asyncio.create_task(queue.lease(waiter(held_max=0), wait_seconds=30))
        await parked(queue, 1)
        # Another control plane gives this worker a job.
        async with opened(central) as elsewhere:
            await submit(central, new())
            await leased(elsewhere, waiter(held_max=0))
        await queue.enqueue([new()])
        assert await waiting is None, "sent away to be looked at anew, not given a second job"
        assert await leased(queue, waiter(held_max=1))
