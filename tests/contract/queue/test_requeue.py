"""Leases that are handed back, and what that costs."""

import uuid
from datetime import timedelta

import pytest
from sqlalchemy import event
from tests.support.jobs.dispatches import (
    ADA,
    BOB,
    audited,
    leased,
    new,
    opened,
    seen,
    set_columns,
    submit,
    waiter,
)

from comfyfleet.clock import utc_now
from comfyfleet.errors import LeaseLost
from comfyfleet.server.db import Database
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import Dispatch, DispatchLease, DispatchStatus, RequeueReason
from comfyfleet.settings import Settings


async def requeued(
    db: Database, lease: DispatchLease, reason: RequeueReason, **more: object
) -> Dispatch:
    async with db.transaction() as tx:
        return await service.requeue(
            tx,
            lease.dispatch_id,
            lease.token,
            reason,
            now=utc_now(),
            **more,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    "reason",
    [
        RequeueReason.SPOT,
        RequeueReason.REBALANCE,
        RequeueReason.SHUTDOWN,
        RequeueReason.DRAIN,
        RequeueReason.REVOKED,
    ],
)
async def test_an_interruption_gives_the_attempt_back(
    central: Database, reason: RequeueReason
) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        row = await requeued(central, await leased(queue), reason)
        assert (row.status, row.attempts, row.requeues) == (DispatchStatus.QUEUED, 0, 1)
        assert row.last_error == f"Requeued: {reason}"
        assert row.worker_id is None
        again = await leased(queue)
    assert (again.attempt, again.number) == (1, 2)


@pytest.mark.parametrize(
    "reason", [RequeueReason.BACKEND_DOWN, RequeueReason.BACKEND_FAULT, RequeueReason.OUT_OF_MEMORY]
)
async def test_a_broken_backend_uses_the_attempt(central: Database, reason: RequeueReason) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        row = await requeued(central, await leased(queue), reason, detail="CUDA error")
        assert (row.status, row.attempts, row.requeues) == (DispatchStatus.QUEUED, 1, 1)
        assert row.last_error == f"Requeued: {reason} (CUDA error)"


@pytest.mark.parametrize(
    "reason", [RequeueReason.RECALL, RequeueReason.WAITER_GONE, RequeueReason.PAYLOAD_DELAYED]
)
async def test_our_own_doings_count_as_nothing(central: Database, reason: RequeueReason) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        row = await requeued(central, await leased(queue), reason)
    assert (row.attempts, row.requeues) == (0, 0)


async def test_the_same_requeue_again_is_answered_as_before(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue)
        first = await requeued(central, lease, RequeueReason.SPOT)
        assert await requeued(central, lease, RequeueReason.SPOT) == first
        with pytest.raises(LeaseLost):
            await queue.complete(job.id, lease.token)
        with pytest.raises(LeaseLost):
            await queue.extend(job.id, lease.token, started=True)
        await leased(queue)
    with pytest.raises(LeaseLost):
        await requeued(central, lease, RequeueReason.SPOT)
    assert (await audited(central, job.id)).count("requeue") == 1


async def test_after_a_fault_another_worker_is_preferred(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        await requeued(central, await leased(queue, waiter("gpu-1")), RequeueReason.BACKEND_FAULT)
        assert await queue.lease(waiter("gpu-1"), wait_seconds=0) is None
        assert (await leased(queue, waiter("gpu-2"))).dispatch_id == job.id


async def test_the_avoided_worker_gets_what_stands_behind(central: Database) -> None:
    jobs = await submit(central, *(new() for _ in range(12)))
    async with opened(central) as queue:
        for _ in range(10):
            lease = await leased(queue, waiter("gpu-1"))
            await requeued(central, lease, RequeueReason.BACKEND_FAULT)
        rest = [(await leased(queue, waiter("gpu-1"))).dispatch_id for _ in range(2)]
        assert await queue.lease(waiter("gpu-1"), wait_seconds=0) is None
    assert rest == [jobs[10].id, jobs[11].id]


async def test_a_worker_that_is_alone_is_not_avoided(central: Database) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        await requeued(central, await leased(queue, waiter("gpu-1")), RequeueReason.BACKEND_FAULT)
        await leased(queue, waiter("gpu-1", is_alone=True))


async def test_avoidance_ends(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        await requeued(central, await leased(queue, waiter("gpu-1")), RequeueReason.BACKEND_FAULT)
        await set_columns(central, job.id, avoid_until=utc_now() - timedelta(seconds=1))
        await leased(queue, waiter("gpu-1"))


async def test_the_last_attempt_that_breaks_stays_with_its_holder_to_be_failed(
    central: Database,
) -> None:
    [job] = await submit(central, new(max_attempts=1))
    async with opened(central) as queue:
        lease = await leased(queue)
        row = await requeued(central, lease, RequeueReason.BACKEND_DOWN)
        assert (row.status, row.is_used_up, row.is_poisoned) == (DispatchStatus.LEASED, True, False)
        assert await queue.lease(waiter("gpu-2"), wait_seconds=0) is None
    async with central.transaction() as tx:
        ended = await service.end(
            tx, job.id, lease.token, DispatchStatus.FAILED, now=utc_now(), error=row.last_error
        )
    assert ended.status is DispatchStatus.FAILED


async def test_the_last_attempt_may_be_interrupted_for_ever_but_not_quite(
    central: Database,
) -> None:
    [job] = await submit(central, new(max_attempts=1))
    settings = Settings(max_requeues=3)
    async with opened(central) as queue:
        for _ in range(3):
            row = await requeued(
                central, await leased(queue), RequeueReason.SPOT, settings=settings
            )
            assert row.status is DispatchStatus.QUEUED
        lease = await leased(queue)
        row = await requeued(central, lease, RequeueReason.SPOT, settings=settings)
    assert (row.status, row.is_poisoned, row.requeues) == (DispatchStatus.LEASED, True, 4)
    async with central.transaction() as tx:
        await service.end(
            tx, job.id, lease.token, DispatchStatus.FAILED, now=utc_now(), error="poisoned"
        )
        [found] = await service.list_dispatches(tx, is_poisoned=True)
    assert found.id == job.id


async def test_a_delayed_job_is_invisible_until_it_is_due(central: Database) -> None:
    [job] = await submit(central, new())
    later = utc_now() + timedelta(seconds=30)
    async with opened(central) as queue:
        lease = await leased(queue)
        row = await requeued(central, lease, RequeueReason.PAYLOAD_DELAYED, not_before=later)
        assert (row.attempts, row.not_before) == (0, later)
        assert await queue.lease(waiter(), wait_seconds=0) is None
        async with central.transaction() as tx:
            assert await service.wake_due(tx, now=utc_now(), limit=10) == []
            assert [each.id for each in await service.wake_due(tx, now=later, limit=10)] == [job.id]
        await leased(queue)


async def test_what_comes_back_joins_the_head_round_and_gives_no_credit(central: Database) -> None:
    """Its old rank would pull virtual time back, and the next tenant to come would profit."""
    first, *_ = await submit(central, *(new(ADA) for _ in range(10)))
    async with opened(central) as queue:
        lease = await leased(queue)
        assert lease.dispatch_id == first.id
        for _ in range(4):
            await leased(queue)
        row = await requeued(central, lease, RequeueReason.SPOT)
    assert (first.rank, row.rank) == (1, 6)
    [other] = await submit(central, new(BOB))
    assert other.rank == 7


async def test_what_comes_back_into_an_empty_lane_keeps_its_rank(central: Database) -> None:
    await submit(central, *(new(ADA) for _ in range(3)))
    async with opened(central) as queue:
        lease = [await leased(queue) for _ in range(3)][-1]
        row = await requeued(central, lease, RequeueReason.SPOT)
    assert row.rank == 3


async def test_an_unknown_dispatch_can_not_be_requeued(central: Database) -> None:
    async with opened(central) as queue:
        await submit(central, new())
        lease = await leased(queue)
    async with central.transaction() as tx:
        with pytest.raises(LeaseLost):
            await service.requeue(
                tx, lease.dispatch_id, uuid.uuid4(), RequeueReason.SPOT, now=utc_now()
            )
    assert (await seen(central, lease.dispatch_id)).status is DispatchStatus.LEASED


async def test_requeue_end_and_cancel_are_sent_by_the_driver(central: Database) -> None:
    """Core takes several times as long as the driver to send a statement."""
    await submit(central, new(), new(), new())
    async with opened(central) as queue:
        back, failed, cancelled = [await leased(queue) for _ in range(3)]
    by_core: list[str] = []
    async with central.transaction() as tx:

        def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
            by_core.append(statement)

        event.listen(tx.sync_connection, "before_cursor_execute", note)
        now = utc_now()
        await service.requeue(tx, back.dispatch_id, back.token, RequeueReason.SPOT, now=now)
        await service.end(tx, failed.dispatch_id, failed.token, DispatchStatus.FAILED, now=now)
        await service.cancel(tx, cancelled.dispatch_id, now=now)
        event.remove(tx.sync_connection, "before_cursor_execute", note)
    assert by_core == []
    assert (await seen(central, back.dispatch_id)).status is DispatchStatus.QUEUED
    assert (await seen(central, failed.dispatch_id)).status is DispatchStatus.FAILED
    assert (await seen(central, cancelled.dispatch_id)).cancel_requested
