"""'Why is my job not running?', asked over the API."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import Yard, yard_on

from comfyfleet.clock import utc_now
from comfyfleet.server.db.central_tables import workers


@pytest.fixture
async def yard(databases: Databases, tmp_path: Path) -> AsyncIterator[Yard]:
    async with plane_on(databases, tmp_path) as plane, yard_on(plane) as yard:
        yield yard


async def why(yard: Yard, **submit: Any) -> str:
    job = await yard.job(await yard.submit(**submit))
    said: str = job["why"]
    return said


async def test_no_fleet_has_the_workflow(yard: Yard) -> None:
    await yard.assign()
    assert await why(yard) == "No fleet of stage production has workflow invert assigned."


async def test_no_worker_is_there(yard: Yard) -> None:
    assert await why(yard) == (
        "No worker has workflow invert: fleet gpu/production has no workers."
    )


async def test_the_provider_is_not_offered(yard: Yard) -> None:
    await yard.register()
    said = await why(yard, provider="cloud")
    assert said == "No worker of fleet gpu/production offers the provider cloud."


async def test_a_capability_is_missing(yard: Yard) -> None:
    await yard.register_workflow("large", required_capabilities=["80gb"])
    await yard.assign("large")
    await yard.register()
    said = await why(yard, slug="large")
    assert said == "No worker of fleet gpu/production has the capabilities 80gb."


async def test_all_workers_drain(yard: Yard) -> None:
    await yard.register()
    await yard.act("workers/w1/drain")
    assert await why(yard) == "All workers of fleet gpu/production drain."


async def test_all_workers_are_offline(yard: Yard) -> None:
    await yard.register()
    async with yard.plane.central.transaction() as tx:
        await tx.execute(update(workers).values(last_seen_at=utc_now() - timedelta(minutes=5)))
    assert await why(yard) == "All workers of fleet gpu/production are offline."


async def test_a_node_is_missing(yard: Yard) -> None:
    await yard.register(backend={"node_types": ["LoadImage", "SaveImage"]})
    assert await why(yard) == "Missing node ImageInvert on fleet gpu/production."


async def test_it_is_bound_to_a_worker_that_is_not_there(yard: Yard) -> None:
    await yard.register()
    said = await why(yard, backend_affinity="worker:w9")
    assert said.startswith("It is bound to worker:w9, which is not there")


async def test_it_is_bound_to_a_worker_that_lacks_a_node_which_others_have(yard: Yard) -> None:
    await yard.register("w0")
    await yard.register(backend={"node_types": ["LoadImage", "SaveImage"]})
    said = await why(yard, backend_affinity="worker:w1")
    assert said == (
        "It is bound to worker:w1, which can't run workflow invert: missing node ImageInvert."
    )


async def test_it_is_bound_to_a_worker_that_drains(yard: Yard) -> None:
    await yard.register("w0")
    await yard.register()
    await yard.act("workers/w1/drain")
    said = await why(yard, backend_affinity="worker:w1")
    assert said == "It is bound to worker:w1, which drains or is not approved."


async def test_others_are_ahead(yard: Yard) -> None:
    await yard.register()
    for _ in range(3):
        await yard.submit()
    assert await why(yard) == "3 jobs ahead."


async def test_it_is_next_and_then_it_runs(yard: Yard) -> None:
    assert (await yard.register("w0")).status_code == 200
    job_id = await yard.submit()
    assert (await yard.job(job_id))["why"].startswith("It is next in line")
    async with yard.worker() as worker:
        job = await worker.job()
        assert (await yard.job(job_id))["why"] == "Worker w1 has it and prepares it (attempt 1)."
        progress = {"percent": 40, "node": "2"}
        await worker.of(job, "heartbeat", started=True, progress=progress)
        assert (await yard.job(job_id))["why"] == "Worker w1 runs it (attempt 1)."
        assert (await yard.job(job_id))["progress"]["percent"] == 40


async def test_maintenance_and_pause_are_told(yard: Yard) -> None:
    await yard.register()
    await yard.act("maintenance", on=True)
    assert "Maintenance" in await why(yard)
    await yard.act("maintenance", on=False)
    await yard.act("workflows/invert/pause")
    assert await why(yard) == "Workflow invert is paused by an operator."
