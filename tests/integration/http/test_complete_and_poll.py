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
from tests.support.server.fleet import Calling, Yard, yard_on

from comfyfleet.server.http.app import create_app
from comfyfleet.server.queue import service as dispatch

STEPS_MAX = 80


@pytest.fixture
async def yard(databases: Databases, tmp_path: Path) -> AsyncIterator[Yard]:
    async with plane_on(databases, tmp_path) as plane, yard_on(plane) as yard:
        yield yard


async def finish(worker: Calling, job: dict[str, Any], **more: Any) -> httpx.Response:
    slot = job["outputs"][0]
    await worker.client.put(slot["url"], content=b"made", headers=slot["headers"])
    outputs = [{"name": slot["name"], "size": 4}]
    return await worker.of(job, "complete", outputs=outputs, **more)


async def statuses(yard: Yard, *job_ids: UUID) -> list[str]:
    return [(await yard.job(job_id))["status"] for job_id in job_ids]


async def test_the_answer_to_complete_has_the_next_job(yard: Yard) -> None:
    async with yard.worker() as worker:
        first, second = await yard.submit(), await yard.submit()
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
    assert await statuses(yard, first, second) == ["completed", "completed"]


async def test_without_a_poll_complete_is_answered_as_ever(yard: Yard) -> None:
    async with yard.worker() as worker:
        await yard.submit()
        assert (await finish(worker, await worker.job())).json() == {"ok": True}


async def test_the_poll_of_a_complete_may_wait(yard: Yard) -> None:
    async with yard.worker() as worker:
        await yard.submit()
        job = await worker.job(held=[])
        poll = {"worker_id": "w1", "held": [], "wait_seconds": 30}
        ending = asyncio.create_task(finish(worker, job, poll=poll))
        await parked(yard.plane.queue, 1)
        later = await yard.submit()
        assert (await ending).json()["next"]["job"]["job_id"] == str(later)


def lease_of(job: dict[str, Any]) -> dict[str, Any]:
    return {name: job[name] for name in ("dispatch_id", "lease_token")}


async def prefetched(yard: Yard) -> bool:
    async with yard.plane.central.read() as tx:
        return await dispatch.has_prefetched(tx, not_of="nobody")


async def test_a_poll_that_waits_to_prefetch_is_that_of_an_idle_worker_once_its_lease_has_ended(
    yard: Yard,
) -> None:
    async with yard.worker() as worker:
        await yard.submit()
        job = await worker.job(held=[])
        said = {"held": [lease_of(job)], "current_load": 1, "wait_seconds": 30}
        waiting = asyncio.create_task(worker.poll(**said))
        await parked(yard.plane.queue, 1)
        assert (await finish(worker, job)).json()["polls_on"] is True
        await parked(yard.plane.queue, 1)
        later = await yard.submit()
        assert (await waiting)["job"]["job_id"] == str(later)
        assert not await prefetched(yard)


async def test_a_poll_waits_on_to_prefetch_while_the_worker_has_another_lease(yard: Yard) -> None:
    async with yard.worker() as worker:
        await yard.submit()
        delivered = await worker.job(held=[])
        await yard.submit()
        runs = await worker.job(held=[lease_of(delivered)], current_load=0)
        said = {"held": [lease_of(delivered), lease_of(runs)], "current_load": 1}
        waiting = asyncio.create_task(worker.poll(**said, wait_seconds=30))
        await parked(yard.plane.queue, 1)
        assert (await finish(worker, delivered)).json()["polls_on"] is True
        await parked(yard.plane.queue, 1)
        later = await yard.submit()
        assert (await waiting)["job"]["job_id"] == str(later)
        assert await prefetched(yard)


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
async def test_a_poll_that_fails_takes_nothing_from_the_result(yard: Yard, poll: Any) -> None:
    async with yard.worker() as worker:
        job_id, waits = await yard.submit(), await yard.submit()
        answer = await finish(worker, await worker.job(), poll=poll)
        assert answer.status_code == 200
        assert answer.json().get("next") is None
        assert await statuses(yard, job_id, waits) == ["completed", "queued"]


async def test_a_lost_lease_is_told_whatever_is_asked_for_besides(yard: Yard) -> None:
    async with yard.worker() as worker, yard.worker("w2") as other:
        await yard.submit()
        job = await worker.job()
        await yard.submit()
        answer = await finish(other, job, poll={"worker_id": "w2", "held": []})
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "lease_lost"


@asynccontextmanager
async def cut_worker(yard: Yard, fuse: Fuse, worker: Calling) -> AsyncIterator[Calling]:
    """The same worker at a process that dies."""
    context = fused(yard.plane.context, fuse)
    plane = replace(yard.plane, context=context, central=context.central)
    transport = httpx.ASGITransport(create_app(plane), raise_app_exceptions=False)
    headers = worker.client.headers
    async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
        yield Calling(client, worker.worker_id)


async def test_complete_with_a_poll_can_be_cut_anywhere(yard: Yard) -> None:
    """Said again, it is answered with the next job, once, wherever the process died."""
    fuse, poll = Fuse(), {"worker_id": "w1", "held": []}
    async with yard.worker() as worker, cut_worker(yard, fuse, worker) as cut:
        file_id = await yard.upload()
        for after in range(STEPS_MAX):
            ids = [await yard.submit(file_id=file_id) for _ in range(2)]
            job = await worker.job(held=[])
            slot = job["outputs"][0]
            await worker.client.put(slot["url"], content=b"made", headers=slot["headers"])
            said = {"outputs": [{"name": slot["name"], "size": 4}], "poll": poll}
            fuse.left = after
            was_cut = (await cut.of(job, "complete", **said)).json().get("next") is None
            fuse.left = None
            answer = (await worker.of(job, "complete", **said)).json()
            handed = answer["next"]["job"]
            assert (handed["job_id"], handed["attempt"]) == (str(ids[1]), 1), f"cut after {after}"
            assert (await finish(worker, handed)).json() == {"ok": True}
            assert (await worker.poll(held=[]))["job"] is None
            assert await statuses(yard, *ids) == ["completed", "completed"]
            if not was_cut:
                assert after > 15
                return
    pytest.fail("it never came to its end")
