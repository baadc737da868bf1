"""`complete` may carry a poll, and then answers with the next job."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.dispatches import parked
from tests.support.jobs.fuse import Fuse, fused
from tests.support.server.control_plane import URL, plane_on
from tests.support.server.fleet import FleetSetup, WorkerClient, fleet_setup_on

from comfyfleet.server.http.app import create_app
from comfyfleet.server.queue import service as dispatch

STEPS_MAX = 80


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


async def finish(worker: WorkerClient, job: dict[str, Any], **more: Any) -> httpx.Response:
    slot = job["outputs"][0]
    await worker.client.put(slot["url"], content=b"made", headers=slot["headers"])
    outputs = [{"name": slot["name"], "size": 4}]
    return await worker.call_for(job, "complete", outputs=outputs, **more)


async def statuses(fleet_setup: FleetSetup, *job_ids: UUID) -> list[str]:
    return [(await fleet_setup.job(job_id))["status"] for job_id in job_ids]


async def test_the_answer_to_complete_has_the_next_job(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker() as worker:
        first, second = await fleet_setup.submit(), await fleet_setup.submit()
        job = await worker.job(held=[])
        poll = {"worker_id": "w1", "held": []}
        answer = (await finish(worker, job, poll=poll)).json()
        assert answer["ok"] is True
        assert answer["next"]["job"]["job_id"] == str(second)
        # As a brief poll would be answered, and as one that is not.
        assert answer["next"]["job"]["output_url"] is not None
        brief = {**poll, "is_brief": True}
        ended = (await finish(worker, answer["next"]["job"], poll=brief)).json()
        assert ended["next"]["job"] is None
        assert ended["next"]["reason"] == "no job is queued for this worker"
    assert await statuses(fleet_setup, first, second) == ["completed", "completed"]


async def test_without_a_poll_complete_is_answered_as_ever(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker() as worker:
        await fleet_setup.submit()
        assert (await finish(worker, await worker.job())).json() == {"ok": True}


async def test_the_poll_of_a_complete_may_wait(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker() as worker:
        await fleet_setup.submit()
        job = await worker.job(held=[])
        poll = {"worker_id": "w1", "held": [], "wait_seconds": 30}
        ending = asyncio.create_task(finish(worker, job, poll=poll))
        await parked(fleet_setup.plane.queue, 1)
        later = await fleet_setup.submit()
        assert (await ending).json()["next"]["job"]["job_id"] == str(later)


def lease_of(job: dict[str, Any]) -> dict[str, Any]:
    return {name: job[name] for name in ("dispatch_id", "lease_token")}


async def prefetched(fleet_setup: FleetSetup) -> bool:
    async with fleet_setup.plane.central.read() as tx:
        return await dispatch.has_prefetched(tx, not_of="nobody")


async def test_a_poll_that_waits_to_prefetch_is_that_of_an_idle_worker_once_its_lease_has_ended(
    fleet_setup: FleetSetup,
) -> None:
    async with fleet_setup.worker() as worker:
        await fleet_setup.submit()
        job = await worker.job(held=[])
        said = {"held": [lease_of(job)], "current_load": 1, "wait_seconds": 30}
        waiting = asyncio.create_task(worker.poll(**said))
        await parked(fleet_setup.plane.queue, 1)
        assert (await finish(worker, job)).json()["polls_on"] is True
        await parked(fleet_setup.plane.queue, 1)
        later = await fleet_setup.submit()
        assert (await waiting)["job"]["job_id"] == str(later)
        assert not await prefetched(fleet_setup)


async def test_a_poll_waits_on_to_prefetch_while_the_worker_has_another_lease(
    fleet_setup: FleetSetup,
) -> None:
    async with fleet_setup.worker() as worker:
        await fleet_setup.submit()
        delivered = await worker.job(held=[])
        await fleet_setup.submit()
        runs = await worker.job(held=[lease_of(delivered)], current_load=0)
        said = {"held": [lease_of(delivered), lease_of(runs)], "current_load": 1}
        waiting = asyncio.create_task(worker.poll(**said, wait_seconds=30))
        await parked(fleet_setup.plane.queue, 1)
        assert (await finish(worker, delivered)).json()["polls_on"] is True
        await parked(fleet_setup.plane.queue, 1)
        later = await fleet_setup.submit()
        assert (await waiting)["job"]["job_id"] == str(later)
        assert await prefetched(fleet_setup)


@pytest.mark.parametrize(
    "poll",
    [
        {"worker_id": "another"},
        {"worker_id": "w1", "max_concurrency": "many"},
        {"wait_seconds": -1},
        "nonsense",
        [],
        7,
    ],
)
async def test_a_poll_that_fails_takes_nothing_from_the_result(
    fleet_setup: FleetSetup, poll: Any
) -> None:
    async with fleet_setup.worker() as worker:
        job_id, waits = await fleet_setup.submit(), await fleet_setup.submit()
        answer = await finish(worker, await worker.job(), poll=poll)
        assert answer.status_code == 200
        assert answer.json().get("next") is None
        assert await statuses(fleet_setup, job_id, waits) == ["completed", "queued"]


async def test_a_lost_lease_is_told_whatever_is_asked_for_besides(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker() as worker, fleet_setup.worker("w2") as other:
        await fleet_setup.submit()
        job = await worker.job()
        await fleet_setup.submit()
        answer = await finish(other, job, poll={"worker_id": "w2", "held": []})
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "lease_lost"


@asynccontextmanager
async def cut_worker(
    fleet_setup: FleetSetup, fuse: Fuse, worker: WorkerClient
) -> AsyncIterator[WorkerClient]:
    """The same worker at a process that dies."""
    context = fused(fleet_setup.plane.context, fuse)
    plane = replace(fleet_setup.plane, context=context, central=context.central)
    transport = httpx.ASGITransport(create_app(plane), raise_app_exceptions=False)
    headers = worker.client.headers
    async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
        yield WorkerClient(client, worker.worker_id)


async def test_complete_with_a_poll_can_be_cut_anywhere(fleet_setup: FleetSetup) -> None:
    """Said again, it is answered with the next job, once, wherever the process died."""
    fuse, poll = Fuse(), {"worker_id": "w1", "held": []}
    async with fleet_setup.worker() as worker, cut_worker(fleet_setup, fuse, worker) as cut:
        file_id = await fleet_setup.upload()
        for after in range(STEPS_MAX):
            ids = [await fleet_setup.submit(file_id=file_id) for _ in range(2)]
            job = await worker.job(held=[])
            slot = job["outputs"][0]
            await worker.client.put(slot["url"], content=b"made", headers=slot["headers"])
            said = {"outputs": [{"name": slot["name"], "size": 4}], "poll": poll}
            fuse.left = after
            was_cut = (await cut.call_for(job, "complete", **said)).json().get("next") is None
            fuse.left = None
            answer = (await worker.call_for(job, "complete", **said)).json()
            handed = answer["next"]["job"]
            assert (handed["job_id"], handed["attempt"]) == (str(ids[1]), 1), f"cut after {after}"
            assert (await finish(worker, handed)).json() == {"ok": True}
            assert (await worker.poll(held=[]))["job"] is None
            assert await statuses(fleet_setup, *ids) == ["completed", "completed"]
            if not was_cut:
                assert after > 15
                return
    pytest.fail("it never came to its end")
