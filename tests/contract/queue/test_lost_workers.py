"""Workers that fall silent lose their leases after three heartbeats; jobs that silence them end."""

from datetime import timedelta
from uuid import uuid4

import pytest
from tests.support.jobs.dispatches import lane, leased, new, opened, seen, submit, waiter
from tests.support.jobs.fleets import NOW, a_fleet, a_worker

from comfyfleet.errors import LeaseLost
from comfyfleet.server.db import Database
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import FleetWorker
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import Dispatch, RequeueReason
from comfyfleet.settings import Settings


@pytest.fixture
async def worker(central: Database) -> FleetWorker:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        await fleets.assign(tx, fleet, [1], now=NOW)
        return await a_worker(tx, fleet, "gpu-1")


async def taken(central: Database, *, after_seconds: int) -> list[Dispatch]:
    async with central.transaction() as tx:
        unseen_since = NOW + timedelta(seconds=after_seconds - Settings().lost_after_seconds)
        return await service.take_expired(
            tx, token=uuid4(), now=NOW, limit=10, unseen_since=unseen_since
        )


async def test_a_worker_that_missed_three_heartbeats_loses_its_leases_and_is_fenced(
    central: Database, worker: FleetWorker
) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue, waiter("gpu-1", key_hash=worker.key_hash))
        assert await taken(central, after_seconds=89) == []
        [row] = await taken(central, after_seconds=91)
        assert (row.id, row.worker_id) == (lease.dispatch_id, "gpu-1")
        with pytest.raises(LeaseLost):
            await queue.extend(lease.dispatch_id, lease.token, started=True)


async def test_a_revoked_workers_lease_is_taken_though_it_was_given_at_the_same_moment(
    central: Database, worker: FleetWorker
) -> None:
    await submit(central, new())
    async with opened(central) as queue:
        lease = await leased(queue, waiter("gpu-1", key_hash=worker.key_hash))
        async with central.transaction() as tx:
            await fleets.revoke_worker(tx, worker, now=NOW)
        [row] = await taken(central, after_seconds=0)
        assert row.id == lease.dispatch_id


async def test_a_job_that_takes_its_workers_down_before_it_starts_is_poisoned_soon(
    central: Database,
) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        for number in range(1, 6):
            lease = await leased(queue, waiter())
            async with central.transaction() as tx:
                back = await service.requeue(
                    tx, job.id, lease.token, RequeueReason.EXPIRED, now=NOW
                )
            assert (back.lost_leases, back.is_poisoned) == (number, number == 5)
        assert (back.status, back.attempts) == ("leased", 0), "for the caller to end"


async def test_one_that_only_waited_behind_another_job_is_not_blamed(central: Database) -> None:
    [job] = await submit(central, new(to=lane()))
    async with opened(central, prefetch_after_seconds=0.001) as queue:
        lease = await leased(queue, waiter(is_prefetch=True))
        async with central.transaction() as tx:
            await service.requeue(tx, job.id, lease.token, RequeueReason.EXPIRED, now=NOW)
    assert (await seen(central, job.id)).lost_leases == 0
