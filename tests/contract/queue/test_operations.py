"""What operators and tenants do to a dispatch, and what they are told about the queue."""

import uuid

import pytest
from tests.support.jobs.dispatches import (
    ADA,
    BOB,
    audited,
    lane,
    leased,
    new,
    opened,
    seen,
    submit,
    waiter,
)

from comfyfleet.clock import utc_now
from comfyfleet.errors import LeaseLost, Refused
from comfyfleet.server.db import Database
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import DispatchStatus, RequeueReason


async def test_cancelling_a_queued_job_ends_it(central: Database) -> None:
    [job] = await submit(central, new())
    async with central.transaction() as tx:
        row = await service.cancel(tx, job.id, now=utc_now())
    assert (row.status, row.ended_at is not None) == (DispatchStatus.CANCELLED, True)
    async with opened(central) as queue:
        assert await queue.lease(waiter(), wait_seconds=0) is None
    assert await audited(central, job.id) == ["submit", "cancel"]


async def test_a_leased_job_is_told_with_its_next_heartbeat(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue)
        assert not (await queue.extend(job.id, lease.token, started=True)).cancel_requested
        async with central.transaction() as tx:
            row = await service.cancel(tx, job.id, now=utc_now(), actor="admin")
            assert row.status is DispatchStatus.LEASED
            await service.cancel(tx, job.id, now=utc_now(), actor="admin")
        assert (await queue.extend(job.id, lease.token, started=True)).cancel_requested
        async with central.transaction() as tx:
            await service.end(tx, job.id, lease.token, DispatchStatus.CANCELLED, now=utc_now())
    assert (await seen(central, job.id)).status is DispatchStatus.CANCELLED
    assert await audited(central, job.id) == ["submit", "lease", "cancel", "cancel"]


async def test_a_job_that_ended_takes_its_dispatch_with_it(central: Database) -> None:
    queued, held = await submit(central, new(), new(priority=1))
    async with opened(central) as queue:
        lease = await leased(queue)
        async with central.transaction() as tx:
            for job in (queued, held):
                row = await service.force_end(tx, job.id, DispatchStatus.FAILED, now=utc_now())
                assert row.status is DispatchStatus.FAILED
        with pytest.raises(LeaseLost):
            await queue.extend(held.id, lease.token, started=True)
        assert await queue.lease(waiter(), wait_seconds=0) is None


async def test_a_new_priority_is_joined_at_its_head_round(central: Database) -> None:
    *_, last = await submit(central, *(new(ADA) for _ in range(5)))
    await submit(central, *(new(BOB, priority=7) for _ in range(5)))
    async with opened(central) as queue:
        for _ in range(2):
            await leased(queue)
        async with central.transaction() as tx:
            row = await service.reprioritise(tx, last.id, 7, now=utc_now())
        assert (row.priority, row.rank) == (7, 3)
        await leased(queue)
        assert (await leased(queue)).dispatch_id in {row.id, row.id + 3}
    async with central.transaction() as tx:
        ended = await service.cancel(tx, last.id - 1, now=utc_now())
        with pytest.raises(Refused):
            await service.reprioritise(tx, ended.id, 7, now=utc_now())


async def test_a_prefetched_job_is_asked_back_for_an_idle_worker(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue, waiter("busy", is_prefetch=True))
        assert lease.is_prefetched
        async with central.transaction() as tx:
            assert await service.recall(tx, [lane(2)], not_of="idle") == []
            assert await service.recall(tx, [lane(1)], not_of="busy") == []
            [row] = await service.recall(tx, [lane(1)], not_of="idle")
            assert await service.recall(tx, [lane(1)], not_of="idle") == []
        assert row.recall_requested
        assert (await queue.extend(job.id, lease.token, started=False)).recall_requested
        async with central.transaction() as tx:
            await service.requeue(tx, job.id, lease.token, RequeueReason.RECALL, now=utc_now())
        again = await leased(queue, waiter("idle"))
        assert (again.dispatch_id, again.is_prefetched) == (job.id, False)


async def test_a_prefetched_job_that_the_idle_worker_could_not_run_stays(
    central: Database,
) -> None:
    await submit(central, new(backend_affinity="worker:busy"))
    async with opened(central) as queue:
        await leased(queue, waiter("busy", is_prefetch=True))
    async with central.transaction() as tx:
        assert not await service.recall(
            tx, [lane()], not_of="idle", is_wanted=lambda row: row.backend_affinity is None
        )


async def test_a_prefetched_job_that_has_started_is_not_asked_back(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue, waiter("busy", is_prefetch=True))
        async with central.transaction() as tx:
            await service.recall(tx, [lane(1)], not_of="idle")
        assert not (await queue.extend(job.id, lease.token, started=True)).recall_requested
        async with central.transaction() as tx:
            assert await service.recall(tx, [lane(1)], not_of="idle") == []


async def test_the_queue_is_counted_by_tenant_and_by_lane(central: Database) -> None:
    await submit(central, new(ADA), new(ADA, to=lane(2)), new(BOB))
    async with opened(central) as queue:
        await leased(queue)
    async with central.read() as tx:
        assert await service.count_queued(tx) == 2
        assert await service.count_queued(tx, ADA) == 1
        assert await service.count_queued(tx, uuid.uuid4()) == 0
        depths = await service.depths(tx)
    assert depths[lane(1)][:2] == (1, 1)
    assert depths[lane(2)][:2] == (1, 0)
    assert depths[lane(1)].oldest_queued_at is not None


async def test_a_job_knows_how_many_are_ahead_of_it_and_how_long_they_take(
    central: Database,
) -> None:
    jobs = await submit(central, *(new(ADA) for _ in range(5)), new(BOB), new(to=lane(2)))
    async with opened(central) as queue:
        for duration in (2.0, 4.0):
            lease = await leased(queue)
            await queue.complete(lease.dispatch_id, lease.token, duration=duration)
    async with central.read() as tx:
        assert await service.count_ahead(tx, await service.get(tx, jobs[4].id)) == 3
        assert await service.count_ahead(tx, await service.get(tx, jobs[6].id)) == 0
        assert await service.typical_seconds(tx, 1) == 3.0
        assert await service.typical_seconds(tx, 2) is None


async def test_dispatches_are_listed_newest_first_page_by_page(central: Database) -> None:
    jobs = await submit(central, *(new(to=lane(1 + n % 2)) for n in range(5)))
    async with opened(central) as queue:
        lease = await leased(queue)
    async with central.read() as tx:
        first = await service.list_dispatches(tx, limit=3)
        second = await service.list_dispatches(tx, limit=3, before_id=first[-1].id)
        assert [each.id for each in first + second] == [each.id for each in reversed(jobs)]
        assert len(await service.list_dispatches(tx, status=DispatchStatus.QUEUED)) == 4
        assert len(await service.list_dispatches(tx, workflow_id=2)) == 2
        [held] = await service.list_dispatches(tx, worker_id="gpu-1")
    assert held.id == lease.dispatch_id
