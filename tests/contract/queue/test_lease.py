"""Leases: what is given to whom."""

import asyncio
import uuid
from datetime import timedelta

import pytest
from sqlalchemy import select, update
from tests.support.jobs.dispatches import (
    ADA,
    BOB,
    audited,
    lane,
    leased,
    new,
    opened,
    parked,
    seen,
    submit,
    waiter,
)

from comfyfleet.clock import utc_now
from comfyfleet.errors import LeaseLost, NotFound
from comfyfleet.server.db import Database
from comfyfleet.server.db.central_tables import audit_log, workflows
from comfyfleet.server.queue import queue as queue_module
from comfyfleet.server.queue import service
from comfyfleet.server.queue.decide import DEFAULT_RULES
from comfyfleet.server.queue.model import DispatchStatus, RequeueReason


async def test_a_job_is_leased_extended_and_completed(central: Database) -> None:
    [job] = await submit(central, new(model_key="sdxl", model_set="abc"))
    async with opened(central, lease_seconds=60) as queue:
        lease = await leased(queue)
        assert (lease.dispatch_id, lease.attempt, lease.number) == (job.id, 1, 1)
        assert (lease.worker_id, lease.job_id, lease.lane) == ("gpu-1", job.job_id, job.lane)
        assert (lease.model_key, lease.model_set) == ("sdxl", "abc")
        left = lease.expires_at - utc_now()
        assert timedelta(seconds=50) < left < timedelta(seconds=70)
        longer = await queue.extend(job.id, lease.token, started=True)
        assert longer.expires_at >= lease.expires_at
        await queue.complete(job.id, lease.token, duration=1.5)
    done = await seen(central, job.id)
    assert (done.status, done.duration_seconds) == (DispatchStatus.COMPLETED, 1.5)
    assert done.ended_at is not None
    assert done.started_at is not None


async def test_an_empty_queue_gives_nothing(central: Database) -> None:
    async with opened(central) as queue:
        assert await queue.lease(waiter(), wait_seconds=0) is None


async def test_a_job_has_one_dispatch_however_often_it_is_submitted(central: Database) -> None:
    job = new()
    assert len(await submit(central, job)) == 1
    assert await submit(central, job) == []
    assert len(await submit(central, job, new())) == 1


async def test_a_worker_gets_only_what_its_lanes_allow(central: Database) -> None:
    await submit(
        central,
        new(to=lane(2)),
        new(to=lane(1, stage="staging")),
        new(to=lane(1, provider="cloud")),
    )
    async with opened(central) as queue:
        assert await queue.lease(waiter(lanes=[lane(1)]), wait_seconds=0) is None
        assert (await leased(queue, waiter(lanes=[lane(2)]))).lane == lane(2)


async def test_a_worker_without_lanes_gets_nothing(central: Database) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        nobody = waiter(lanes=[])
        assert await queue.lease(nobody, wait_seconds=0.05) is None


async def test_the_highest_priority_goes_first_whatever_its_lane(central: Database) -> None:
    low, high, middle = await submit(
        central,
        new(to=lane(1), priority=-5),
        new(to=lane(2), priority=9),
        new(to=lane(3), priority=3),
    )
    async with opened(central) as queue:
        anywhere = waiter(lanes=[lane(1), lane(2), lane(3)])
        got = [(await leased(queue, anywhere)).dispatch_id for _ in range(3)]
    assert got == [high.id, middle.id, low.id]


async def test_leases_asked_for_at_once_honour_priority_across_lanes(central: Database) -> None:
    jobs = [new(to=lane(1 + n % 3), priority=n % 7) for n in range(60)]
    added = await submit(central, *jobs)
    async with opened(central) as queue:
        lanes = [lane(1), lane(2), lane(3)]
        asked = (queue.lease(waiter(f"gpu-{n}", lanes=lanes), wait_seconds=0) for n in range(20))
        got = {lease.dispatch_id for lease in await asyncio.gather(*asked) if lease}
    best = sorted(added, key=lambda each: -each.priority)[:20]
    assert len(got) == 20
    by_id = {each.id: each for each in added}
    assert sorted(by_id[each].priority for each in got) == sorted(each.priority for each in best)


async def test_a_burst_of_urgent_jobs_in_one_of_many_lanes_all_go_first(central: Database) -> None:
    """Deeper than one look into each lane reaches."""
    await submit(central, *(new(to=lane(1 + n % 3)) for n in range(90)))
    urgent = await submit(central, *(new(to=lane(2), priority=5) for _ in range(40)))
    async with opened(central) as queue:
        lanes = [lane(1), lane(2), lane(3)]
        asked = (queue.lease(waiter(f"gpu-{n}", lanes=lanes), wait_seconds=0) for n in range(40))
        got = {lease.dispatch_id for lease in await asyncio.gather(*asked) if lease}
    assert got == {each.id for each in urgent}


async def test_waiters_with_different_lanes_are_served_together(central: Database) -> None:
    one, two = await submit(central, new(to=lane(1)), new(to=lane(2)))
    async with opened(central) as queue:
        both, only = await asyncio.gather(
            queue.lease(waiter("both", lanes=[lane(1), lane(2)]), wait_seconds=0),
            queue.lease(waiter("only", lanes=[lane(1)]), wait_seconds=0),
        )
    assert both
    assert only
    assert (only.dispatch_id, both.dispatch_id) == (one.id, two.id)


async def test_a_paused_workflow_gives_nothing_even_to_one_who_waits(central: Database) -> None:
    await submit(central, new())
    async with central.transaction() as tx:
        await tx.execute(update(workflows).values(is_paused=True))
    async with opened(central) as queue:
        assert await queue.lease(waiter(), wait_seconds=0) is None
        async with central.transaction() as tx:
            await tx.execute(update(workflows).values(is_paused=False))
        await leased(queue)


async def test_a_job_bound_to_a_backend_goes_there_only(central: Database) -> None:
    mine, fleets = await submit(
        central,
        new(backend_affinity="worker:gpu-2"),
        new(backend_affinity="fleet:default/production"),
    )
    async with opened(central) as queue:
        assert (await leased(queue, waiter("gpu-1"))).dispatch_id == fleets.id
        assert await queue.lease(waiter("gpu-1"), wait_seconds=0) is None
        assert (await leased(queue, waiter("gpu-2"))).dispatch_id == mine.id


async def test_a_bound_job_does_not_overtake_a_higher_priority(central: Database) -> None:
    await submit(central, new(backend_affinity="worker:gpu-1"))
    [urgent] = await submit(central, new(priority=1))
    async with opened(central) as queue:
        assert (await leased(queue, waiter("gpu-1"))).dispatch_id == urgent.id


async def test_the_same_complete_again_is_answered_as_before(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue)
        await queue.complete(job.id, lease.token, duration=2.0)
        first = await seen(central, job.id)
        await queue.complete(job.id, lease.token, duration=9.0)
        await asyncio.gather(*(queue.complete(job.id, lease.token) for _ in range(3)))
    assert await seen(central, job.id) == first
    assert await audited(central, job.id) == ["submit", "lease", "complete"]


async def test_another_token_changes_nothing(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        await leased(queue)
        before = await seen(central, job.id)
        wrong = uuid.uuid4()
        with pytest.raises(LeaseLost):
            await queue.complete(job.id, wrong)
        with pytest.raises(LeaseLost):
            await queue.extend(job.id, wrong, started=True)
    async with central.transaction() as tx:
        with pytest.raises(LeaseLost):
            await service.end(tx, job.id, wrong, DispatchStatus.FAILED, now=utc_now())
        with pytest.raises(LeaseLost):
            await service.requeue(tx, job.id, wrong, RequeueReason.SPOT, now=utc_now())
    assert await seen(central, job.id) == before


async def test_in_one_batch_the_right_token_counts_and_the_wrong_does_not(
    central: Database,
) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue)
        right, wrong = await asyncio.gather(
            queue.complete(job.id, lease.token),
            queue.complete(job.id, uuid.uuid4()),
            return_exceptions=True,
        )
    assert right is None
    assert isinstance(wrong, LeaseLost)


async def test_what_has_ended_stays_as_it_ended(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue)
        async with central.transaction() as tx:
            failed = await service.end(
                tx, job.id, lease.token, DispatchStatus.FAILED, now=utc_now(), error="no such node"
            )
        with pytest.raises(LeaseLost):
            await queue.complete(job.id, lease.token)
        with pytest.raises(LeaseLost):
            await queue.extend(job.id, lease.token, started=True)
    async with central.transaction() as tx:
        again = await service.end(tx, job.id, lease.token, DispatchStatus.FAILED, now=utc_now())
        assert again == failed
        with pytest.raises(LeaseLost):
            await service.requeue(tx, job.id, lease.token, RequeueReason.SPOT, now=utc_now())
        line = await service.force_end(tx, job.id, DispatchStatus.COMPLETED, now=utc_now())
        assert line == failed
        assert await service.cancel(tx, job.id, now=utc_now()) == failed
    assert failed.last_error == "no such node"


async def test_the_audit_tells_who_did_what_and_never_a_token(central: Database) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue)
        await queue.complete(job.id, lease.token)
    async with central.read() as tx:
        rows = (await tx.execute(select(audit_log).order_by(audit_log.c.id))).all()
    assert [(row.actor, row.action) for row in rows] == [
        (f"tenant:{ADA}", "submit"),
        ("worker:gpu-1", "lease"),
        ("worker:gpu-1", "complete"),
    ]
    assert {(row.subject, row.tenant_id) for row in rows} == {(f"dispatch:{job.id}", ADA)}
    assert rows[1].details == {"attempt": 1, "lease": 1}
    assert str(lease.token) not in str(rows)


async def test_a_job_that_ended_early_bars_its_dispatch(central: Database) -> None:
    job = new(BOB)
    async with central.transaction() as tx:
        made = await service.enqueue_ended(tx, job, DispatchStatus.CANCELLED, now=utc_now())
        assert await service.enqueue_ended(tx, job, DispatchStatus.CANCELLED, now=utc_now()) is None
        assert await service.enqueue(tx, [job], now=utc_now()) == []
        found = await service.of_job(tx, BOB, job.job_id)
    assert made == found
    assert made
    assert made.status is DispatchStatus.CANCELLED


async def test_what_is_not_there_is_said_so(central: Database) -> None:
    async with central.transaction() as tx:
        with pytest.raises(NotFound):
            await service.get(tx, 404)
        assert await service.of_job(tx, ADA, uuid.uuid4()) is None
    async with opened(central) as queue:
        with pytest.raises(LeaseLost):
            await queue.complete(404, uuid.uuid4())


async def test_a_new_job_is_left_to_its_preferred_worker_for_a_moment(central: Database) -> None:
    now = utc_now()
    async with opened(central, clock=lambda: now) as queue:
        (first,) = await queue.enqueue([new(preferred_worker_id="mine")])
        assert await queue.lease(waiter("other"), wait_seconds=0) is None
        assert (await leased(queue, waiter("mine"))).dispatch_id == first.id
        (second,) = await queue.enqueue([new(preferred_worker_id="gone")])
        assert await queue.lease(waiter("other"), wait_seconds=0) is None
        now += DEFAULT_RULES.preferred_max_wait
        assert (await leased(queue, waiter("other"))).dispatch_id == second.id


async def test_a_new_job_wakes_its_preferred_worker_though_another_has_waited_longer(
    central: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "RECHECK_SECONDS", 3600.0)
    now = utc_now()
    async with opened(central, clock=lambda: now) as queue:  # no other worker may ever take it
        other = asyncio.create_task(queue.lease(waiter("other"), wait_seconds=60))
        await parked(queue, 1)
        mine = asyncio.create_task(queue.lease(waiter("mine"), wait_seconds=60))
        await parked(queue, 2)
        (row,) = await queue.enqueue([new(preferred_worker_id="mine")])
        async with asyncio.timeout(30):
            lease = await mine
        assert lease is not None
        assert lease.dispatch_id == row.id
        assert not other.done()
        queue.dismiss()
        assert await other is None


async def test_a_poll_that_waits_gets_the_job_when_it_is_left_to_nobody_else(
    central: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing else looks at the queue again.
    monkeypatch.setattr(queue_module, "RECHECK_SECONDS", 3600.0)
    async with opened(central) as queue:
        polling = asyncio.create_task(queue.lease(waiter("other"), wait_seconds=60))
        await parked(queue, 1)
        (row,) = await queue.enqueue([new(preferred_worker_id="gone")])
        lease = await polling
        assert lease is not None
        assert lease.dispatch_id == row.id
