"""Orders given through one control plane hold for a poll that waits at another.

On SQLite there is one control plane, which is told and waited at.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.dispatches import parked
from tests.support.server.control_plane import URL, plane_on
from tests.support.server.fleet import FleetSetup, WorkerClient, fleet_setup_on

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.app import create_app


@dataclass
class Two:
    """`fleet_setup` is told, `waited` is where workers wait."""

    fleet_setup: FleetSetup
    waited: ControlPlane

    @asynccontextmanager
    async def worker(self, worker_id: str = "w1", **changes: Any) -> AsyncIterator[WorkerClient]:
        joined = (await self.fleet_setup.register(worker_id, **changes)).json()
        async with self.with_key(worker_id, joined["token"]) as calling:
            yield calling

    @asynccontextmanager
    async def with_key(self, worker_id: str, key: str) -> AsyncIterator[WorkerClient]:
        headers = {"Authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(create_app(self.waited))
        async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
            yield WorkerClient(client, worker_id)

    def polling(self, worker: WorkerClient, **body: Any) -> "asyncio.Task[httpx.Response]":
        said = {"worker_id": worker.worker_id, "wait_seconds": 1, **body}
        return asyncio.create_task(worker.call("poll", **said))


@pytest.fixture
async def two(databases: Databases, tmp_path: Path) -> AsyncIterator[Two]:
    async with plane_on(databases, tmp_path) as told, fleet_setup_on(told) as fleet_setup:
        if databases.server_url is None:
            yield Two(fleet_setup, told)
            return
        same: dict[str, Any] = {
            "central_database_url": told.settings.central_database_url,
            "tenant_database_urls": told.settings.tenant_database_urls,
        }
        async with plane_on(databases, tmp_path, **same) as other:
            hearing = asyncio.create_task(other.queue.run())
            yield Two(fleet_setup, other)
            hearing.cancel()


async def _act(two: Two, act: str, **body: Any) -> None:
    await two.fleet_setup.act(f"workers/w1/{act}", **body)


ORDERS: dict[str, Callable[[Two], Awaitable[Any]]] = {
    "revoke": lambda two: _act(two, "revoke"),
    "drain": lambda two: _act(two, "drain"),
    "rotate": lambda two: _act(two, "rotate-token", now=True),
    "maintenance": lambda two: two.fleet_setup.act("maintenance", on=True),
    "unassign": lambda two: two.fleet_setup.assign(),
    "pause": lambda two: two.fleet_setup.act("workflows/invert/pause"),
}


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("order", ORDERS)
async def test_an_order_through_one_plane_holds_for_a_poll_that_waits_at_another(
    two: Two, order: str, is_told: bool
) -> None:
    """Also where the hint from one to the other is lost."""
    file_id = await two.fleet_setup.upload()
    expected = {"revoke": 401, "rotate": 401}.get(order, 200)
    async with two.worker() as worker:
        # Who is refused is told before its time; others wait to their end.
        waiting = two.polling(worker, wait_seconds=8 if expected == 401 else 1)
        await parked(two.waited.queue, 1)
        if not is_told:
            two.fleet_setup.plane.queue.order = lambda *_: None  # type: ignore[method-assign]
        await ORDERS[order](two)
        job_id = await two.fleet_setup.submit(file_id=file_id)
        answer = await asyncio.wait_for(waiting, 10)
        assert answer.json().get("job") is None
        assert (await two.fleet_setup.job(job_id))["status"] == "queued"
        assert answer.status_code == expected, answer.text


async def test_maintenance_that_begins_during_a_wait_is_its_reason(two: Two) -> None:
    async with two.worker() as worker:
        waiting = two.polling(worker, wait_seconds=1)
        await parked(two.waited.queue, 1)
        two.fleet_setup.plane.queue.order = lambda *_: None  # type: ignore[method-assign]
        await ORDERS["maintenance"](two)
        assert "maintenance" in (await waiting).json()["reason"]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("drain", "draining"),
        ("maintenance", "maintenance"),
        ("unassign", "no workflow is assigned"),
        ("pause", "paused"),
    ],
)
async def test_the_reason_for_no_job_is_true(two: Two, order: str, words: str) -> None:
    async with two.worker() as worker:
        await ORDERS[order](two)
        assert words in (await worker.poll())["reason"]


async def test_a_worker_that_was_revoked_reads_that_it_was(two: Two) -> None:
    async with two.worker() as worker:
        await _act(two, "revoke")
        answer = await worker.call("poll", worker_id="w1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "worker_revoked")
        again = await two.fleet_setup.register("w1")
        assert (again.status_code, again.json()["error"]["code"]) == (401, "worker_revoked")


async def test_a_new_key_reaches_the_worker_that_waits_and_the_old_one_dies_with_its_use(
    two: Two,
) -> None:
    async with two.worker() as worker:
        waiting = two.polling(worker, wait_seconds=30)
        await parked(two.waited.queue, 1)
        rotated = await two.fleet_setup.act("workers/w1/rotate-token")
        told = (await asyncio.wait_for(waiting, 10)).json()
        assert told["new_token"] == rotated["token"]
        assert (await worker.poll())["new_token"] == rotated["token"], "the old one still opens"
        async with two.with_key("w1", told["new_token"]) as anew:
            assert (await anew.poll())["new_token"] is None
            assert (await worker.call("poll", worker_id="w1")).status_code == 401
            await two.fleet_setup.submit()
            assert (await anew.job())["attempt"] == 1
        assert rotated["token"] not in str(await two.fleet_setup.audited("rotate_key"))


async def test_a_heartbeat_brings_the_new_key_and_the_job_goes_on(two: Two) -> None:
    await two.fleet_setup.submit()
    async with two.worker() as worker:
        job = await worker.job()
        rotated = await two.fleet_setup.act("workers/w1/rotate-token")
        beat = (await worker.call_for(job, "heartbeat", started=True)).json()
        assert beat["new_token"] == rotated["token"]
        async with two.with_key("w1", beat["new_token"]) as anew:
            assert (await anew.call_for(job, "heartbeat")).status_code == 200
            assert (await anew.deliver(job)).status_code == 200


async def test_a_prefetched_job_is_asked_back_from_a_heartbeat_that_waits(two: Two) -> None:
    for _ in range(2):
        await two.fleet_setup.submit()
    async with two.worker("busy") as busy, two.fleet_setup.worker("idle") as idle:
        running = await busy.job(current_load=0)
        await busy.call_for(running, "heartbeat", started=True)
        spare = await busy.job(current_load=1, wait_seconds=5)
        listening = asyncio.create_task(busy.call_for(spare, "heartbeat", wait_seconds=60))
        polling = asyncio.create_task(idle.job(wait_seconds=10))
        beat = (await asyncio.wait_for(listening, 10)).json()
        assert beat["recall"]
        await busy.call_for(spare, "requeue", reason="recall")
        assert (await asyncio.wait_for(polling, 10))["job_id"] == spare["job_id"]


async def test_a_prefetched_job_is_shown_as_queued_until_it_runs(two: Two) -> None:
    for _ in range(2):
        await two.fleet_setup.submit()
    async with two.worker() as worker:
        await worker.job(current_load=0)
        spare = await worker.job(current_load=1, wait_seconds=5)
        shown = await two.fleet_setup.job(spare["job_id"])
        assert (shown["status"], shown["started_at"]) == ("queued", None)
        await worker.call_for(spare, "heartbeat")
        assert (await two.fleet_setup.job(spare["job_id"]))["status"] == "queued"
        await worker.call_for(spare, "heartbeat", started=True)
        shown = await two.fleet_setup.job(spare["job_id"])
        assert shown["status"] == "processing"
        assert shown["started_at"]
        assert (await worker.deliver(spare)).status_code == 200


@pytest.mark.parametrize("word", ["heartbeat", "complete", "fail", "requeue"])
async def test_a_lease_speaks_only_for_the_worker_that_holds_it(two: Two, word: str) -> None:
    more = {"fail": {"error": "no"}, "requeue": {"reason": "spot"}}.get(word, {})
    await two.fleet_setup.submit()
    async with two.worker("w1") as mine, two.fleet_setup.worker("w2") as thief:
        job = await mine.job()
        stolen = await thief.call_for(job, word, **more)
        assert (stolen.status_code, stolen.json()["error"]["code"]) == (409, "lease_lost")
        assert (await mine.call_for(job, "heartbeat")).status_code == 200
        assert (await mine.deliver(job)).status_code == 200
