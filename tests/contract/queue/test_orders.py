"""Orders to a worker hold for the claim itself, however long the worker has waited for it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import update
from tests.support.jobs.dispatches import lane, new, opened, parked, seen, waiter
from tests.support.jobs.fleets import NOW, a_fleet, a_worker

from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.central_tables import workflows
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import FleetWorker
from comfyfleet.server.jobs.context import set_maintenance
from comfyfleet.server.queue.model import Waiter
from comfyfleet.server.secrets import hash_key

Order = Callable[[Tx, FleetWorker], Awaitable[object]]


async def _unassign(tx: Tx, worker: FleetWorker) -> None:
    await fleets.assign(tx, await fleets.fleet_by_id(tx, worker.fleet_id), [2], now=NOW)


async def _rotate(tx: Tx, worker: FleetWorker) -> None:
    await fleets.rotate_key(tx, worker, key="another key", at_once=True)


async def _use_new_key(tx: Tx, worker: FleetWorker) -> None:
    await fleets.rotate_key(tx, worker, key="another key")
    await fleets.take_next_key(tx, worker, hash_key("another key"))


async def _revoke(tx: Tx, worker: FleetWorker) -> None:
    await fleets.revoke_worker(tx, worker, now=NOW)


async def _pause(tx: Tx, worker: FleetWorker) -> None:
    await tx.execute(update(workflows).where(workflows.c.id == 1).values(is_paused=True))


async def _maintain(tx: Tx, worker: FleetWorker) -> None:
    await set_maintenance(tx, is_on=True)


ORDERS: dict[str, Order] = {
    "revoke": _revoke,
    "drain": fleets.drain_worker,
    "remove": fleets.remove_worker,
    "rotate": _rotate,
    "use of a new key": _use_new_key,
    "unassign": _unassign,
    "pause": _pause,
    "maintenance": _maintain,
}


@pytest.fixture
async def workers(central: Database) -> list[FleetWorker]:
    """Two that may run the workflows 1 and 2."""
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        await fleets.assign(tx, fleet, [1, 2], now=NOW)
        return [await a_worker(tx, fleet, name) for name in ("gpu-1", "gpu-2")]


def asking(worker: FleetWorker, **more: object) -> Waiter:
    lanes = [lane(1), lane(2)]
    return waiter(worker.worker_id, lanes=lanes, key_hash=worker.key_hash, **more)


@pytest.mark.parametrize("order", ORDERS)
async def test_an_order_given_elsewhere_holds_for_one_who_waits(
    central: Database, workers: list[FleetWorker], order: str
) -> None:
    """Nobody told this queue of the order: only the database knows."""
    async with opened(central) as queue:
        waiting = asyncio.create_task(queue.lease(asking(workers[0]), wait_seconds=1.5))
        await parked(queue, 1)
        async with central.transaction() as tx:
            await ORDERS[order](tx, workers[0])
        [job] = await queue.enqueue([new()])
        assert await asyncio.wait_for(waiting, 30) is None
        assert (await seen(central, job.id)).status == "queued"


@pytest.mark.parametrize("order", ["revoke", "drain", "remove", "rotate"])
async def test_what_is_refused_to_one_goes_to_the_next_in_line(
    central: Database, workers: list[FleetWorker], order: str
) -> None:
    async with opened(central) as queue:
        first = asyncio.create_task(queue.lease(asking(workers[0]), wait_seconds=60))
        await parked(queue, 1)
        second = asyncio.create_task(queue.lease(asking(workers[1]), wait_seconds=60))
        await parked(queue, 2)
        async with central.transaction() as tx:
            await ORDERS[order](tx, workers[0])
        await queue.enqueue([new()])
        assert await asyncio.wait_for(first, 30) is None
        lease = await asyncio.wait_for(second, 30)
        assert lease is not None
        assert lease.worker_id == "gpu-2"


async def test_a_worker_without_orders_gets_the_job(
    central: Database, workers: list[FleetWorker]
) -> None:
    async with opened(central) as queue:
        await queue.enqueue([new(), new(to=lane(2)), new(to=lane(3))])
        for worker in workers:
            lease = await queue.lease(asking(worker), wait_seconds=0)
            assert lease is not None
            assert lease.worker_id == worker.worker_id
        assert await queue.lease(asking(workers[0]), wait_seconds=0) is None
