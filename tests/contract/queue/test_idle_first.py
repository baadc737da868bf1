"""A job that an idle worker could take is never held by a busy one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.support.jobs.dispatches import lane, leased, new, opened, parked, submit, waiter

from comfyfleet.clock import Clock, utc_now
from comfyfleet.server.db import Database
from comfyfleet.server.queue import queue as queue_module
from comfyfleet.server.queue.model import DispatchLease, Waiter
from comfyfleet.server.queue.queue import DispatchQueue

TIMES = 100
LANES = [lane(1), lane(2), lane(3)]


def idle(name: str) -> Waiter:
    return waiter(name, lanes=LANES)


def busy(name: str) -> Waiter:
    return waiter(name, lanes=LANES, load=1, is_prefetch=True)


async def work(queue: DispatchQueue, name: str) -> list[DispatchLease]:
    """As a worker does: with a job in hand, it asks for the one that it might prefetch."""
    first = await queue.lease(idle(name), wait_seconds=60)
    if first is None:
        return []
    second = await queue.lease(busy(name), wait_seconds=60)
    return [each for each in (first, second) if each is not None]


async def test_two_jobs_of_different_workflows_never_go_to_one_worker(central: Database) -> None:
    async with opened(central) as queue:
        for number in range(TIMES):
            at_work = [asyncio.create_task(work(queue, f"gpu-{each}")) for each in range(3)]
            await parked(queue, 3)
            jobs = [new(to=lane(1 + number % 3)), new(to=lane(1 + (number + 1) % 3))]
            if number % 2:
                await queue.enqueue(jobs)
            else:
                await asyncio.gather(*(queue.enqueue([job]) for job in jobs))
            await parked(queue, 3)  # two of them to prefetch
            queue.dismiss()
            taken = await asyncio.gather(*at_work)
            assert sorted(len(each) for each in taken) == [0, 1, 1], f"round {number}"
            for lease in (each for leases in taken for each in leases):
                await queue.complete(lease.dispatch_id, lease.token)


async def test_a_new_job_is_left_to_idle_workers_for_a_moment(central: Database) -> None:
    async with opened(central, prefetch_after_seconds=60) as queue:
        lease_runner = asyncio.create_task(queue.lease(busy("busy"), wait_seconds=60))
        await parked(queue, 1)
        [job] = await queue.enqueue([new()])
        await parked(queue, 1)
        assert not lease_runner.done()
        assert (await leased(queue, idle("idle"))).dispatch_id == job.id
        queue.dismiss()
        assert await lease_runner is None


async def test_a_busy_worker_holds_what_no_idle_one_wants(central: Database) -> None:
    async with opened(central, prefetch_after_seconds=0.05) as queue:
        lease_runner = asyncio.create_task(queue.lease(busy("busy"), wait_seconds=60))
        await parked(queue, 1)
        [job] = await queue.enqueue([new()])
        lease = await asyncio.wait_for(lease_runner, 5)
        assert lease is not None
        assert (lease.dispatch_id, lease.is_prefetched) == (job.id, True)


@asynccontextmanager
async def two_planes(
    central: Database, *, clock: Clock = utc_now
) -> AsyncIterator[tuple[DispatchQueue, DispatchQueue]]:
    """On SQLite it is one."""
    async with AsyncExitStack() as stack:
        opening = opened(central, clock=clock, prefetch_after_seconds=2)
        first = await stack.enter_async_context(opening)
        if central.is_sqlite:
            yield first, first
            return
        opening = opened(central, clock=clock, prefetch_after_seconds=2)
        second = await stack.enter_async_context(opening)
        hearing = asyncio.create_task(second.run())
        await _until_heard(first, second)
        yield first, second
        hearing.cancel()


async def _until_heard(first: DispatchQueue, second: DispatchQueue) -> None:
    """Until hints from the one reach the other."""
    before = second.dismissals
    for _ in range(1_000):
        first.order([])
        await asyncio.sleep(0.01)
        if second.dismissals > before:
            return
    raise AssertionError("no hint was heard")


async def test_an_idle_worker_at_another_control_plane_comes_first(central: Database) -> None:
    async with two_planes(central) as (here, there):
        lease_runner = asyncio.create_task(here.lease(busy("busy"), wait_seconds=60))
        waiting = asyncio.create_task(there.lease(idle("idle"), wait_seconds=60))
        await parked(here, 2 if here is there else 1)
        await parked(there, 2 if here is there else 1)
        [job] = await here.enqueue([new()])
        lease = await asyncio.wait_for(waiting, 10)
        assert lease is not None
        assert lease.dispatch_id == job.id
        here.dismiss()
        assert await lease_runner is None


async def test_a_preferred_worker_at_another_control_plane_is_woken(
    central: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing else looks at the queue again, and nobody else may ever take the job.
    monkeypatch.setattr(queue_module, "RECHECK_SECONDS", 3600.0)
    now = utc_now()
    async with two_planes(central, clock=lambda: now) as (here, there):
        others = [asyncio.create_task(here.lease(waiter("here"), wait_seconds=60))]
        await parked(here, 1)
        others.append(asyncio.create_task(there.lease(waiter("there"), wait_seconds=60)))
        await parked(there, 2 if here is there else 1)
        mine = asyncio.create_task(there.lease(waiter("mine"), wait_seconds=60))
        await parked(there, 3 if here is there else 2)
        [job] = await here.enqueue([new(preferred_worker_id="mine")])
        lease = await asyncio.wait_for(mine, 30)
        assert lease is not None
        assert lease.dispatch_id == job.id
        here.dismiss()
        there.dismiss()
        assert await asyncio.gather(*others) == [None, None]


async def test_a_job_that_waits_already_is_held_by_a_busy_worker_at_once(
    central: Database,
) -> None:
    async with opened(central, prefetch_after_seconds=0.001) as queue:
        await submit(central, new())
        assert (await leased(queue, busy("busy"))).is_prefetched
