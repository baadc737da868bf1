"""How many statements each route costs on PostgreSQL, BEGIN and COMMIT counted, as they are sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from tests.support.databases.factory import Databases
from tests.support.databases.protocol_relay import Wire, wire_to
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on
from tests.support.server.fleet import WorkerClient

from comfyfleet.clock import utc_now
from comfyfleet.server.db.central_tables import workers
from comfyfleet.server.fleets import service as fleets

SUBMIT_MAX, POLL_MAX, COMPLETE_MAX, HEARTBEAT_MAX = 7, 4, 6, 2
REUSE_MISSED_MAX, REUSE_TAKEN_MAX = 15, 14


@dataclass
class Way:
    """Of a job, with everything that is read once already read."""

    wire: Wire
    effect_setup: EffectSetup
    customer: Customer
    worker: WorkerClient

    async def settled(self) -> None:
        """What nobody waits for is sent now, and so is none of the next route's."""
        await self.effect_setup.plane.context.deferred.flush()


@asynccontextmanager
async def way_on(databases: Databases, data: Path) -> AsyncIterator[Way]:
    assert databases.server_url
    begun = utc_now()  # no time passes: what was read a moment ago is not read again
    async with wire_to(databases.server_url) as wire:
        urls = await databases.url("central"), await databases.url("tenant")
        settings: dict[str, Any] = {
            "central_database_url": wire.through(urls[0]),
            "tenant_database_urls": f"main={wire.through(urls[1])}",
        }
        async with (
            plane_on(databases, data, clock=lambda: begun, **settings) as plane,
            effect_setup_on(plane) as effect_setup,
            effect_setup.fleet_setup.worker() as worker,
        ):
            customer = await effect_setup.customer()
            for _ in range(2):
                await customer.job(effect_setup.draw)
                job = await worker.job()
                await worker.call_for(job, "heartbeat", started=True)
                await worker.deliver(job)
            way = Way(wire, effect_setup, customer, worker)
            await way.settled()
            yield way
        await databases.give_back(*urls)


@pytest.fixture
async def way(postgres_databases: Databases, tmp_path: Path) -> AsyncIterator[Way]:
    async with way_on(postgres_databases, tmp_path) as found:
        yield found


def told(sent: list[str]) -> str:
    return "\n".join(
        f"{number}. {' '.join(text.split())[:150]}" for number, text in enumerate(sent)
    )


async def test_a_job_costs_so_many_statements(way: Way) -> None:
    worker = way.worker
    with way.wire.meanwhile() as submitted:
        await way.customer.job(way.effect_setup.draw)
    await way.settled()
    with way.wire.meanwhile() as polled:
        job = await worker.job()
    with way.wire.meanwhile() as beaten:
        beat = await worker.call_for(job, "heartbeat", started=True)
        assert beat.status_code == 200
    slot = job["outputs"][0]
    with way.wire.meanwhile() as put:
        await worker.client.put(slot["url"], content=b"made", headers=slot["headers"])
    with way.wire.meanwhile() as completed:
        outputs = [{"name": slot["name"], "size": 4}]
        done = await worker.call_for(job, "complete", outputs=outputs)
        assert done.status_code == 200, done.text
    assert len(submitted) <= SUBMIT_MAX, told(submitted)
    assert len(polled) <= POLL_MAX, told(polled)
    assert len(beaten) <= HEARTBEAT_MAX, told(beaten)
    assert len(put) == 0, told(put)
    assert len(completed) <= COMPLETE_MAX, told(completed)


async def test_what_was_sent_to_a_backend_is_noted_aside(way: Way) -> None:
    await way.customer.job(way.effect_setup.draw)
    job = await way.worker.job()
    await way.settled()
    filled = {"1": {"text": "cf-1/photo.png"}}
    with way.wire.meanwhile() as beaten:
        await way.worker.call_for(job, "heartbeat", started=True, filled_in=filled)
    assert len(beaten) <= HEARTBEAT_MAX, told(beaten)


async def test_a_worker_is_noted_as_seen_by_one_statement(way: Way) -> None:
    reading = {"cpu_percent": 7.0}

    async def grown_old() -> None:
        long_ago = way.effect_setup.plane.clock() - timedelta(hours=1)
        async with way.effect_setup.plane.central.transaction() as tx:
            await tx.execute(update(workers).values(last_seen_at=long_ago))

    await way.customer.job(way.effect_setup.draw)
    await way.settled()
    await grown_old()
    with way.wire.meanwhile() as polled:
        job = await way.worker.job(reading=reading)
    await grown_old()
    with way.wire.meanwhile() as beaten:
        await way.worker.call_for(job, "heartbeat", reading=reading)
    assert len(polled) <= POLL_MAX + 1, told(polled)
    assert len(beaten) <= HEARTBEAT_MAX + 1, told(beaten)
    async with way.effect_setup.plane.central.read() as tx:
        worker = await fleets.get_worker(tx, way.worker.worker_id)
        kept = await fleets.readings(tx, worker.worker_id, since=worker.created_at, limit=10)
    assert worker.last_seen_at == way.effect_setup.plane.clock()
    assert [each.reading.cpu_percent for each in kept] == [7.0]


async def test_a_result_that_is_looked_for_costs_so_many_statements(way: Way) -> None:
    """One to look for it, and then those of a submit step by step; to take it is no more than that."""
    draw, given = way.effect_setup.draw, {"width": 64, "colour": 7}
    await way.effect_setup.change(draw, reuse=True)
    await way.customer.job(draw)
    await way.worker.deliver(await way.worker.job())
    await way.settled()
    with way.wire.meanwhile() as missed:
        await way.customer.job(draw, properties=given)
    await way.worker.deliver(await way.worker.job())
    await way.settled()
    with way.wire.meanwhile() as taken:
        again = await way.customer.submit(draw, properties=given)
    assert again.json()["reused_from"]
    assert len(missed) <= REUSE_MISSED_MAX, told(missed)
    assert len(taken) <= REUSE_TAKEN_MAX, told(taken)
