"""A worker is given only what its backend has the nodes and the models for."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.dispatches import parked
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.fleet import FleetSetup, WorkerClient, fleet_setup_on

CHECKPOINTS = "CheckpointLoaderSimple.ckpt_name"
PROMPT = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a.safetensors"}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
}
CHOICE = {"name": "model", "type": "text", "binding": "1.ckpt_name"}
TYPES = ["CheckpointLoaderSimple", "SaveImage"]


def having(*files: str, node_types: list[str] | None = None) -> dict[str, Any]:
    types = TYPES if node_types is None else node_types
    return {"node_types": types, "model_files": {CHECKPOINTS: list(files)}}


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    """With a workflow `paint` whose checkpoint is fixed, and `choose` where a property names it."""
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        for slug, properties in (("paint", []), ("choose", [CHOICE])):
            made = await fleet_setup.register_workflow(slug, document=PROMPT, properties=properties)
            assert made.status_code == 201, made.text
        assert (await fleet_setup.assign("paint", "choose")).status_code == 200
        yield fleet_setup


async def submit(
    fleet_setup: FleetSetup, slug: str = "paint", *, count: int = 1, **values: Any
) -> list[UUID]:
    body = {"workflow_slug": slug, "properties": values, "count": count}
    made = await fleet_setup.admin.post("/api/admin/jobs", json=body)
    assert made.status_code == 201, made.text
    return [UUID(each) for each in made.json()["ids"]]


async def statuses(fleet_setup: FleetSetup, jobs: list[UUID]) -> set[str]:
    return {(await fleet_setup.job(each))["status"] for each in jobs}


async def lacks(worker: WorkerClient, job: dict[str, Any], **lacking: Any) -> None:
    body = {"reason": "backend_lacks", "detail": "Value not in list", "lacking": lacking}
    assert (await worker.call_for(job, "requeue", **body)).status_code == 200


async def test_a_worker_without_the_model_gets_none_of_the_jobs(fleet_setup: FleetSetup) -> None:
    jobs = await submit(fleet_setup, count=16)
    async with (
        fleet_setup.worker("bad", backend=having("other.safetensors")) as bad,
        fleet_setup.worker("good", backend=having("a.safetensors")) as good,
    ):
        for _ in jobs:
            assert (await bad.poll())["job"] is None
            assert (await good.deliver(await good.job())).status_code == 200
    assert await statuses(fleet_setup, jobs) == {"completed"}


@pytest.mark.parametrize("backend", [having(), having("a.safetensors", node_types=["SaveImage"])])
async def test_no_list_entry_and_no_node_type_are_both_a_lack(
    fleet_setup: FleetSetup, backend: dict[str, Any]
) -> None:
    await submit(fleet_setup)
    async with fleet_setup.worker("bad", backend=backend) as bad:
        polled = await bad.poll()
        assert polled["job"] is None


async def test_the_model_that_a_job_chooses_decides(fleet_setup: FleetSetup) -> None:
    await submit(fleet_setup, "choose", count=20)
    (chosen,) = await submit(fleet_setup, "choose", model="b.safetensors")
    async with fleet_setup.worker("w1", backend=having("b.safetensors")) as worker:
        job = await worker.job()
        assert job["job_id"] == str(chosen), "found behind twenty that it can't run"
        assert (await worker.poll())["job"] is None
    async with fleet_setup.worker("w2", backend=having("a.safetensors")) as worker:
        assert (await worker.job())["prompt"]["1"]["inputs"]["ckpt_name"] == "a.safetensors"


async def test_a_control_plane_that_did_not_enqueue_a_job_knows_its_models(
    databases: Databases, tmp_path: Path
) -> None:
    urls: dict[str, Any] = {
        "central_database_url": await databases.url("central"),
        "tenant_database_urls": f"main={await databases.url('tenant')}",
    }
    async with plane_on(databases, tmp_path, **urls) as plane, fleet_setup_on(plane) as fleet_setup:
        await fleet_setup.register_workflow("choose", document=PROMPT, properties=[CHOICE])
        await fleet_setup.assign("choose")
        await submit(fleet_setup, "choose", model="b.safetensors")
        secret = fleet_setup.secret
    async with plane_on(databases, tmp_path, **urls) as plane, client_of(plane) as admin:
        fleet_setup = FleetSetup(plane, admin, secret)
        async with fleet_setup.worker("w1", backend=having("a.safetensors")) as worker:
            assert (await worker.poll())["job"] is None
        async with fleet_setup.worker("w2", backend=having("b.safetensors")) as worker:
            assert await worker.job()


async def test_a_job_that_comes_wakes_the_one_who_can_run_it(fleet_setup: FleetSetup) -> None:
    async with (
        fleet_setup.worker("bad", backend=having("b.safetensors")) as bad,
        fleet_setup.worker("good", backend=having("a.safetensors")) as good,
    ):
        waiting = asyncio.create_task(bad.poll(wait_seconds=2))
        await parked(fleet_setup.plane.queue, 1)
        wanted = asyncio.create_task(good.poll(wait_seconds=30))
        await parked(fleet_setup.plane.queue, 2)
        await submit(fleet_setup, "choose", model="a.safetensors")
        async with asyncio.timeout(4):  # and not when the queue is looked at again
            assert (await wanted)["job"]
        assert (await waiting)["job"] is None


async def test_a_refused_job_goes_elsewhere_and_the_worker_gets_no_more_of_its_kind(
    fleet_setup: FleetSetup,
) -> None:
    jobs = await submit(fleet_setup, count=2)
    async with fleet_setup.worker("bad") as bad, fleet_setup.worker("good") as good:
        refused = await bad.job()
        await lacks(bad, refused, models=[[CHECKPOINTS, "a.safetensors"]])
        await lacks(bad, refused, models=[[CHECKPOINTS, "a.safetensors"]])  # said again
        assert (await bad.poll())["job"] is None
        for _ in jobs:
            job = await good.job()
            assert job["attempt"] == 1, "a refusal uses up no attempt"
            await good.deliver(job)
        assert await statuses(fleet_setup, jobs) == {"completed"}
        # Its lists have changed: it may try again.
        await submit(fleet_setup)
        assert (await bad.poll(backend=having("a.safetensors")))["job"]


async def test_a_refusal_that_nobody_else_could_help_ends_the_job(fleet_setup: FleetSetup) -> None:
    (job_id,) = await submit(fleet_setup)
    async with (
        fleet_setup.worker("bad") as bad,
        fleet_setup.worker("other", backend=having("b.safetensors")),
    ):
        await lacks(bad, await bad.job(), models=[[CHECKPOINTS, "a.safetensors"]])
        job = await fleet_setup.job(job_id)
        assert job["status"] == "failed"
        assert "not available at the moment" in job["error"]
        assert "safetensors" not in job["error"]
        assert "a.safetensors" in job["raw_error"]
        assert "Value not in list" in job["raw_error"]


async def test_why_names_the_model_that_a_job_chose(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register(backend=having("a.safetensors"))
    (job_id,) = await submit(fleet_setup, "choose", model="b.safetensors")
    said = (await fleet_setup.job(job_id))["why"]
    assert said == "Missing model b.safetensors on fleet gpu/production."
