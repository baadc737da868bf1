"""Leases: what is given to whom, and how it ends."""

import asyncio

import pytest
from tests.dbkit.dispatches import (
    add_workflows,
    leased,
    new,
    opened,
    parked,
    seen,
    submit,
    waiter,
)

from comfyfleet.db import Database
from comfyfleet.dispatch.model import Status
from comfyfleet.kernel.errors import LeaseLost


@pytest.fixture(autouse=True)
async def _workflows(central: Database) -> None:
    await add_workflows(central)


async def test_a_job_is_leased_extended_and_completed(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central, lease_seconds=60) as queue:
        lease = await leased(queue)
        assert (lease.dispatch_id, lease.attempt, lease.number) == (job.id, 1, 1)
        longer = await queue.extend(job.id, lease.token, started=True)
        assert longer.expires_at >= lease.expires_at
        done = await queue.complete(job.id, lease.token, duration=1.5)
        assert (done.status, done.duration_seconds) == (Status.COMPLETED, 1.5)
        assert await queue.complete(job.id, lease.token, duration=9) == done
        with pytest.raises(LeaseLost):
            await queue.extend(job.id, lease.token, started=True)
    assert (await seen(central, job.id)).started_at is not None


async def test_a_waiter_gets_the_job_that_comes(central: Database) -> None:
    async with opened(central) as queue:
        waiting = asyncio.create_task(queue.lease(waiter(), wait_seconds=10))
        await parked(queue, 1)
        [job] = await submit(central, new())
        queue.wake([job.lane])
        lease = await asyncio.wait_for(waiting, 3)
        assert lease
        assert lease.dispatch_id == job.id
