"""'Why is my job not running?', asked over the API."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on

from comfyfleet.clock import utc_now
from comfyfleet.server.db.central_tables import workers
from comfyfleet.server.fleets import store
from comfyfleet.server.fleets.service import WORKERS_PAGE


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


async def why(fleet_setup: FleetSetup, **submit: Any) -> str:
    job = await fleet_setup.job(await fleet_setup.submit(**submit))
    said: str = job["why"]
    return said


async def test_no_fleet_has_the_workflow(fleet_setup: FleetSetup) -> None:
    await fleet_setup.assign()
    assert await why(fleet_setup) == "No fleet of stage production has workflow invert assigned."


async def test_no_worker_is_there(fleet_setup: FleetSetup) -> None:
    assert await why(fleet_setup) == (
        "No worker has workflow invert: fleet gpu/production has no workers."
    )


async def test_the_provider_is_not_offered(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register()
    said = await why(fleet_setup, provider="cloud")
    assert said == "No worker of fleet gpu/production offers the provider cloud."


async def test_a_capability_is_missing(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register_workflow("large", required_capabilities=["80gb"])
    await fleet_setup.assign("large")
    await fleet_setup.register()
    said = await why(fleet_setup, slug="large")
    assert said == "No worker of fleet gpu/production has the capabilities 80gb."


async def test_all_workers_drain(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register()
    await fleet_setup.act("workers/w1/drain")
    assert await why(fleet_setup) == "All workers of fleet gpu/production are draining."


async def test_all_workers_are_offline(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register()
    async with fleet_setup.plane.central.transaction() as tx:
        await tx.execute(update(workers).values(last_seen_at=utc_now() - timedelta(minutes=5)))
    assert await why(fleet_setup) == "All workers of fleet gpu/production are offline."


async def test_a_node_is_missing(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register(backend={"node_types": ["LoadImage", "SaveImage"]})
    assert await why(fleet_setup) == "Missing node ImageInvert on fleet gpu/production."


async def test_it_is_bound_to_a_worker_that_is_not_there(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register()
    said = await why(fleet_setup, backend_affinity="worker:w9")
    assert said.startswith("The job is bound to worker:w9, which doesn't exist")


async def test_it_is_bound_to_a_worker_that_lacks_a_node_which_others_have(
    fleet_setup: FleetSetup,
) -> None:
    await fleet_setup.register("w0")
    await fleet_setup.register(backend={"node_types": ["LoadImage", "SaveImage"]})
    said = await why(fleet_setup, backend_affinity="worker:w1")
    assert said == (
        "The job is bound to worker:w1, which can't run workflow invert: missing node ImageInvert."
    )


async def test_it_is_bound_to_a_worker_that_drains(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register("w0")
    await fleet_setup.register()
    await fleet_setup.act("workers/w1/drain")
    said = await why(fleet_setup, backend_affinity="worker:w1")
    assert said == "The job is bound to worker:w1, which is draining or not approved."


async def test_others_are_ahead(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register()
    for _ in range(3):
        await fleet_setup.submit()
    assert await why(fleet_setup) == "3 jobs ahead."


async def test_it_is_next_and_then_it_runs(fleet_setup: FleetSetup) -> None:
    assert (await fleet_setup.register("w0")).status_code == 200
    job_id = await fleet_setup.submit()
    assert (await fleet_setup.job(job_id))["why"].startswith("The job is next in the queue")
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        assert (await fleet_setup.job(job_id))[
            "why"
        ] == "Worker w1 is preparing the job (attempt 1)."
        progress = {"percent": 40, "node": "2"}
        await worker.call_for(job, "heartbeat", started=True, progress=progress)
        assert (await fleet_setup.job(job_id))["why"] == "Worker w1 is running the job (attempt 1)."
        assert (await fleet_setup.job(job_id))["progress"]["percent"] == 40


async def test_maintenance_and_pause_are_told(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register()
    await fleet_setup.act("maintenance", on=True)
    assert "Maintenance" in await why(fleet_setup)
    await fleet_setup.act("maintenance", on=False)
    await fleet_setup.act("workflows/invert/pause")
    assert await why(fleet_setup) == "Workflow invert is paused by an operator."


async def test_a_submit_reads_only_some_of_many_workers(
    fleet_setup: FleetSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first online worker can run the job, so the others don't matter."""
    for number in range(30):
        await fleet_setup.register(f"w{number:02}")
    rows = 0
    worker_of = store.worker_of

    def count(row: Any) -> Any:
        nonlocal rows
        rows += 1
        return worker_of(row)

    monkeypatch.setattr(store, "worker_of", count)
    await fleet_setup.assign("invert")
    rows = 0
    await fleet_setup.submit()
    assert 0 < rows <= WORKERS_PAGE
