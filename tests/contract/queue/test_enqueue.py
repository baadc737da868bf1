"""New jobs by the queue itself: committed, coalesced, and known to whoever waits for them."""

import asyncio
import uuid

from tests.support.jobs.dispatches import audited, lane, new, opened, seen, submit, waiter

from comfyfleet.server.db import Database


async def test_what_is_enqueued_is_there_and_wakes_who_waits(central: Database) -> None:
    async with opened(central) as queue:
        wait = asyncio.create_task(queue.lease(waiter(), wait_seconds=20))
        await asyncio.sleep(0.05)
        [job] = await queue.enqueue([new(priority=2, model_key="sdxl", model_set="abc")])
        async with asyncio.timeout(3):
            lease = await wait
    assert lease
    assert (lease.dispatch_id, lease.job_id, lease.model_key) == (job.id, job.job_id, "sdxl")
    assert (job.priority, job.rank, job.attempts, job.model_set) == (2, 1, 0, "abc")
    assert await audited(central, job.id) == ["submit", "lease"]


async def test_a_bound_job_wakes_its_worker(central: Database) -> None:
    async with opened(central) as queue:
        wait = asyncio.create_task(queue.lease(waiter("gpu-7"), wait_seconds=20))
        await asyncio.sleep(0.05)
        [job] = await queue.enqueue([new(backend_affinity="worker:gpu-7")])
        async with asyncio.timeout(3):
            lease = await wait
    assert lease
    assert lease.dispatch_id == job.id


async def test_jobs_of_one_tenant_at_once_stand_one_per_round(central: Database) -> None:
    tenant, other = uuid.uuid4(), uuid.uuid4()
    async with opened(central) as one, opened(central) as two:
        added = await asyncio.gather(
            *(queue.enqueue([new(tenant), new(tenant)]) for queue in (one, two) for _ in range(10)),
            one.enqueue([new(other), new(other, to=lane(2)), new(tenant, priority=1)]),
        )
    jobs = [job for each in added[:-1] for job in each]
    assert sorted(job.rank for job in jobs) == list(range(1, 41))
    first, elsewhere, urgent = added[-1]
    assert (elsewhere.rank, urgent.rank) == (1, 1)
    assert first.rank <= 40


async def test_the_same_job_again_adds_nothing(central: Database) -> None:
    job = new()
    async with opened(central) as queue:
        [added] = await queue.enqueue([job])
        assert await queue.enqueue([job]) == []
        assert await queue.enqueue([]) == []
    assert await seen(central, added.id) == added
    assert await submit(central, job) == []


async def test_one_that_cannot_be_added_harms_no_other(central: Database) -> None:
    async with opened(central) as queue:
        answers = await asyncio.gather(
            queue.enqueue([new()]),
            queue.enqueue([new(to=lane(404))]),
            queue.enqueue([new(), new()]),
            return_exceptions=True,
        )
    assert [isinstance(each, Exception) for each in answers] == [False, True, False]
    assert [len(each) for each in answers if not isinstance(each, BaseException)] == [1, 2]
