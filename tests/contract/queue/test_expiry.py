"""Leases that run out, and the sweep that takes them."""

import asyncio
import uuid
from datetime import timedelta

import pytest
from tests.support.jobs.dispatches import audited, leased, new, opened, seen, set_columns, submit

from comfyfleet.clock import utc_now
from comfyfleet.errors import LeaseLost
from comfyfleet.server.db import Database
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import Dispatch, DispatchStatus, RequeueReason

PAST = timedelta(seconds=-5)


async def taken(db: Database, token: uuid.UUID, *, limit: int = 10) -> list[Dispatch]:
    async with db.transaction() as tx:
        return await service.take_expired(tx, token=token, now=utc_now(), limit=limit)


async def test_the_sweep_takes_what_has_run_out_and_nothing_else(central: Database) -> None:
    await submit(central, new(), new())
    sweep = uuid.uuid4()
    async with opened(central) as queue:
        late, fresh = await leased(queue), await leased(queue)
        await set_columns(central, late.dispatch_id, lease_expires_at=utc_now() + PAST)
        [row] = await taken(central, sweep)
        assert (row.id, row.lease_token, row.worker_id) == (late.dispatch_id, sweep, "gpu-1")
        assert row.lease_expires_at
        assert row.lease_expires_at > utc_now()
        assert await taken(central, uuid.uuid4()) == []
        with pytest.raises(LeaseLost):
            await queue.extend(late.dispatch_id, late.token, started=True)
        with pytest.raises(LeaseLost):
            await queue.complete(late.dispatch_id, late.token)
        await queue.extend(fresh.dispatch_id, fresh.token, started=True)
    assert await audited(central, late.dispatch_id) == ["submit", "lease", "expire"]


async def test_a_heartbeat_that_comes_first_keeps_the_lease(central: Database) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue)
        await set_columns(central, lease.dispatch_id, lease_expires_at=utc_now() + PAST)
        await queue.extend(lease.dispatch_id, lease.token, started=True)
        assert await taken(central, uuid.uuid4()) == []


async def test_heartbeats_and_the_sweep_never_both_win(central: Database) -> None:
    await submit(central, *(new() for _ in range(20)))
    sweep = uuid.uuid4()
    async with opened(central) as queue:
        leases = [await leased(queue) for _ in range(20)]
        for lease in leases:
            await set_columns(central, lease.dispatch_id, lease_expires_at=utc_now() + PAST)
        answers, swept = await asyncio.gather(
            asyncio.gather(
                *(queue.extend(each.dispatch_id, each.token, started=True) for each in leases),
                return_exceptions=True,
            ),
            taken(central, sweep, limit=20),
        )
    lost = {each.id for each in swept}
    for lease, answer in zip(leases, answers, strict=True):
        assert isinstance(answer, LeaseLost) == (lease.dispatch_id in lost)


async def test_what_the_sweep_holds_is_not_the_workers_any_more(central: Database) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue)
        async with central.read() as tx:
            assert [each.id for each in await service.held_by(tx, "gpu-1")] == [lease.dispatch_id]
        await set_columns(central, lease.dispatch_id, lease_expires_at=utc_now() + PAST)
        await taken(central, uuid.uuid4())
    async with central.read() as tx:
        assert await service.held_by(tx, "gpu-1") == []


@pytest.mark.parametrize(("started", "attempts"), [(True, 1), (False, 0)])
async def test_expiry_uses_the_attempt_once_the_work_had_started(
    central: Database, started: bool, attempts: int
) -> None:
    await submit(central, new())
    sweep = uuid.uuid4()
    async with opened(central) as queue:
        lease = await leased(queue)
        if started:
            await queue.extend(lease.dispatch_id, lease.token, started=True)
        await set_columns(central, lease.dispatch_id, lease_expires_at=utc_now() + PAST)
        await taken(central, sweep)
    async with central.transaction() as tx:
        row = await service.requeue(
            tx, lease.dispatch_id, sweep, RequeueReason.EXPIRED, now=utc_now()
        )
    assert (row.status, row.attempts, row.started_at) == (DispatchStatus.QUEUED, attempts, None)


async def test_a_sweep_that_died_leaves_its_leases_to_the_next(central: Database) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue)
        await set_columns(central, lease.dispatch_id, lease_expires_at=utc_now() + PAST)
        async with central.transaction() as tx:
            await service.take_expired(
                tx, token=uuid.uuid4(), now=utc_now() + 2 * PAST, limit=9, seconds=-60
            )
            await service.take_expired(tx, token=uuid.uuid4(), now=utc_now(), limit=9, seconds=-60)
    [row] = await taken(central, second := uuid.uuid4())
    assert row.lease_token == second


async def test_after_an_outage_every_lease_lives_on(central: Database) -> None:
    await submit(central, new(), new())
    async with opened(central, lease_seconds=500) as queue:
        late, fresh = await leased(queue), await leased(queue)
    await set_columns(central, late.dispatch_id, lease_expires_at=utc_now() + 100 * PAST)
    async with central.transaction() as tx:
        assert await service.extend_all(tx, seconds=90, now=utc_now()) == 2
    assert await taken(central, uuid.uuid4()) == []
    for lease, seconds in ((late, 90), (fresh, 590)):
        row = await seen(central, lease.dispatch_id)
        assert row.lease_expires_at
        left = row.lease_expires_at - utc_now()
        assert timedelta(seconds=seconds - 20) < left <= timedelta(seconds=seconds + 5)
