"""Two workers beside two engines, of which one lacks the model: real agents, a real control plane."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.workers.workers import running_worker

from comfyfleet.engine import serve_in_thread
from comfyfleet.engine.node import Context, EngineNodeType, Interface, NodeResult, node
from comfyfleet.engine.nodes import registry
from comfyfleet.engine.nodes.diagnostics import placeholder
from comfyfleet.engine.serve import Served
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.listener import listen, listener_url, serve
from comfyfleet.worker.settings import WorkerSettings

MODEL = "tiny_a.safetensors"
PROMPT = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": MODEL}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
}
JOBS = 16


def loader(files: list[str]) -> EngineNodeType:
    """A checkpoint loader that offers these files, and makes a picture of any."""

    @node(
        Interface(
            "CheckpointLoaderSimple",
            "Load Checkpoint",
            "nodes",
            "loaders",
            inputs={"ckpt_name": [files, {}]},
            outputs=("IMAGE",),
        )
    )
    def load(context: Context, ckpt_name: str) -> NodeResult:
        return NodeResult((placeholder(),))

    return load


@contextlib.contextmanager
def engine_with(files: list[str]) -> Iterator[Served]:
    with serve_in_thread(nodes={**registry(), "CheckpointLoaderSimple": loader(files)}) as served:
        yield served


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    """A control plane on a port, with the workflow `paint`."""
    listener = listen("127.0.0.1", 0)
    stop = asyncio.Event()
    url = listener_url(listener)
    async with plane_on(databases, tmp_path / "plane", public_url=url) as plane:
        serve_it = serve(create_app(plane), listener, stop, at_stop=plane.end_waits)
        served = asyncio.create_task(serve_it)
        async with fleet_setup_on(plane) as fleet_setup:
            made = await fleet_setup.register_workflow("paint", document=PROMPT, properties=[])
            assert made.status_code == 201, made.text
            await fleet_setup.assign("paint")
            yield fleet_setup
        stop.set()
        await served


def settings_of(
    fleet_setup: FleetSetup, worker_id: str, engine: Served, folder: Path
) -> WorkerSettings:
    return WorkerSettings(
        control_url=fleet_setup.plane.settings.public_url,
        fleet_slug="gpu",
        stage="production",
        worker_id=worker_id,
        state=folder / worker_id,
        backend_url=engine.url,
        secret=fleet_setup.secret,
        grace_seconds=5.0,
    )


async def submitted(fleet_setup: FleetSetup, count: int) -> list[UUID]:
    made = await fleet_setup.admin.post(
        "/api/admin/jobs", json={"workflow_slug": "paint", "count": count}
    )
    assert made.status_code == 201, made.text
    return [UUID(each) for each in made.json()["ids"]]


async def ended(
    fleet_setup: FleetSetup, jobs: Sequence[UUID], seconds: float = 60
) -> list[dict[str, Any]]:
    async with asyncio.timeout(seconds):
        while True:
            found = [await fleet_setup.job(each) for each in jobs]
            if all(each["status"] not in ("queued", "processing") for each in found):
                return found
            await asyncio.sleep(0.05)


async def joined(fleet_setup: FleetSetup, worker_id: str, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while True:
            found = await fleet_setup.admin.get(f"/api/admin/workers/{worker_id}")
            if found.status_code == 200:
                return
            await asyncio.sleep(0.02)


async def test_no_job_goes_to_the_worker_whose_engine_lacks_the_model(
    fleet_setup: FleetSetup, tmp_path: Path
) -> None:
    with engine_with([]) as without, engine_with([MODEL]) as having:
        async with (
            running_worker(settings_of(fleet_setup, "bad", without, tmp_path)),
            running_worker(settings_of(fleet_setup, "good", having, tmp_path)),
        ):
            jobs = await ended(fleet_setup, await submitted(fleet_setup, JOBS))
    assert [each["status"] for each in jobs] == ["completed"] * JOBS
    assert {each["dispatch"]["worker_id"] for each in jobs} == {"good"}
    leases = await fleet_setup.audited("lease")
    assert {each["actor"] for each in leases} == {"worker:good"}


async def test_a_model_that_comes_later_is_told_and_its_jobs_are_run(
    fleet_setup: FleetSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.worker.worker.FACTS_SECONDS", 0.05)
    files: list[str] = []
    with engine_with(files) as engine:
        async with running_worker(settings_of(fleet_setup, "w1", engine, tmp_path)):
            jobs = await submitted(fleet_setup, 1)
            await joined(fleet_setup, "w1")
            said = (await fleet_setup.job(jobs[0]))["why"]
            assert said == f"Missing model {MODEL} on fleet gpu/production."
            files.append(MODEL)
            (job,) = await ended(fleet_setup, jobs)
    assert job["status"] == "completed"
    assert not await fleet_setup.audited("requeue")


async def test_a_model_that_went_away_unseen_is_no_failure(
    fleet_setup: FleetSetup, tmp_path: Path
) -> None:
    files = [MODEL]
    with engine_with(files) as losing, engine_with([MODEL]) as having:
        async with running_worker(settings_of(fleet_setup, "losing", losing, tmp_path)):
            await ended(fleet_setup, await submitted(fleet_setup, 1))
            files.clear()
            async with running_worker(settings_of(fleet_setup, "having", having, tmp_path)):
                await joined(fleet_setup, "having")
                jobs = await ended(fleet_setup, await submitted(fleet_setup, JOBS))
    assert [each["status"] for each in jobs] == ["completed"] * JOBS
    assert {each["dispatch"]["worker_id"] for each in jobs} == {"having"}
    # Leases on their way go back, too: the worker tells that it lacks the model, or asks anew.
    refused = await fleet_setup.audited("requeue")
    reasons = {each["details"]["reason"] for each in refused}
    assert reasons <= {"backend_lacks", "recall", "revoked", "waiter_gone"}
