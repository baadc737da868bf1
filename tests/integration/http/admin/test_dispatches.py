"""The queue as operators see it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


async def listed(fleet_setup: FleetSetup, **query: Any) -> dict[str, Any]:
    found = await fleet_setup.admin.get("/api/admin/dispatches", params=query)
    assert found.status_code == 200, found.text
    page: dict[str, Any] = found.json()
    return page


async def test_dispatches_are_listed_by_status_workflow_and_page(fleet_setup: FleetSetup) -> None:
    for _ in range(3):
        await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        await worker.job()
        assert len((await listed(fleet_setup, status="queued"))["dispatches"]) == 2
        (leased,) = (await listed(fleet_setup, status="leased", worker="w1"))["dispatches"]
    assert (leased["workflow"], leased["worker_id"]) == ("invert", "w1")
    first = await listed(fleet_setup, limit=2, workflow="invert")
    rest = await listed(fleet_setup, limit=2, before=first["next"])
    ids = [each["id"] for each in (*first["dispatches"], *rest["dispatches"])]
    assert ids == sorted(ids, reverse=True)
    assert len(ids) == 3


async def test_one_is_shown_with_all_its_attempts(fleet_setup: FleetSetup) -> None:
    await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        await worker.call_for(job, "requeue", reason="spot")
        await worker.deliver(await worker.job())
    found = (await fleet_setup.admin.get(f"/api/admin/dispatches/{job['dispatch_id']}")).json()
    actions = [each["action"] for each in found["attempts"]]
    assert actions == ["submit", "lease", "requeue", "lease", "complete"]
    assert found["why"] == "The job has ended: completed."
    assert job["lease_token"] not in str(found)


async def test_a_failed_one_is_retried_as_a_new_job(fleet_setup: FleetSetup) -> None:
    await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        await worker.call_for(job, "fail", error="no")
        made = await fleet_setup.act(f"dispatches/{job['dispatch_id']}/retry")
        again = await worker.job()
    assert again["job_id"] == made["job_id"] != job["job_id"]
    assert again["prompt"] == job["prompt"]
    assert [each["actor"] for each in await fleet_setup.audited("retry")] == ["admin"]


async def test_one_that_waits_is_cancelled_or_moved_ahead(fleet_setup: FleetSetup) -> None:
    first, second, third = [await fleet_setup.submit() for _ in range(3)]
    ids = {each: (await fleet_setup.job(each))["dispatch"]["id"] for each in (first, second, third)}
    assert (await fleet_setup.act(f"dispatches/{ids[first]}/cancel"))["status"] == "cancelled"
    moved = await fleet_setup.act(f"dispatches/{ids[third]}/reprioritise", priority=5)
    assert moved["priority"] == 5
    async with fleet_setup.worker() as worker:
        assert (await worker.job())["job_id"] == str(third)
        assert (await worker.job(current_load=1, wait_seconds=5))["job_id"] == str(second)


@pytest.mark.parametrize("path", ["dispatches/99", "dispatches/99/why", f"jobs/{UUID(int=1)}"])
async def test_what_is_not_there_is_not_found(fleet_setup: FleetSetup, path: str) -> None:
    assert (await fleet_setup.admin.get(f"/api/admin/{path}")).status_code == 404


async def test_reconcile_tells_what_it_repaired(fleet_setup: FleetSetup) -> None:
    assert (await fleet_setup.act("reconcile"))["dispatches_made"] == 0
