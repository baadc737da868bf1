"""Workers that fall silent, lose their state, or wait for approval, as the control plane treats them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on

from comfyfleet.server.jobs.reconcile import expire_due_leases
from comfyfleet.server.maintenance.sweeps import remove_lost_workers


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fleet_setup(
    databases: Databases, tmp_path: Path, clock: ManualClock
) -> AsyncIterator[FleetSetup]:
    async with (
        plane_on(databases, tmp_path, clock=clock) as plane,
        fleet_setup_on(plane) as fleet_setup,
    ):
        yield fleet_setup


async def test_jobs_of_a_silent_worker_are_given_to_others_after_three_heartbeats(
    fleet_setup: FleetSetup, clock: ManualClock
) -> None:
    await fleet_setup.submit()
    async with fleet_setup.worker("silent") as silent, fleet_setup.worker("other") as other:
        job = await silent.job()
        await silent.call_for(job, "heartbeat", started=True)
        clock.advance(seconds=80)
        assert await expire_due_leases(fleet_setup.plane.context, last_pass=clock()) == 0
        clock.advance(seconds=11)
        assert await expire_due_leases(fleet_setup.plane.context, last_pass=clock()) == 1
        again = await other.job()
        assert (again["job_id"], again["attempt"]) == (job["job_id"], 2)
        assert (await silent.call_for(job, "heartbeat")).status_code == 409
        assert (await silent.deliver(job)).status_code == 409
        assert (await silent.poll())["job"] is None, "it may come back"
        assert (await other.deliver(again)).status_code == 200


async def test_nobody_passes_for_silent_because_we_were_away(
    fleet_setup: FleetSetup, clock: ManualClock
) -> None:
    await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        before = clock()
        clock.advance(seconds=300)
        assert await expire_due_leases(fleet_setup.plane.context, last_pass=before) == 0, (
            "we were away"
        )
        assert await expire_due_leases(fleet_setup.plane.context, last_pass=clock()) == 0
        clock.advance(seconds=60)
        assert await expire_due_leases(fleet_setup.plane.context, last_pass=clock()) == 0
        assert (await worker.call_for(job, "heartbeat")).status_code == 200
        clock.advance(seconds=60)
        assert await expire_due_leases(fleet_setup.plane.context, last_pass=clock()) == 0, (
            "it has called since"
        )
        clock.advance(seconds=60)
        assert await expire_due_leases(fleet_setup.plane.context, last_pass=clock()) == 1


async def test_a_worker_that_lost_its_state_has_its_id_again_after_three_heartbeats(
    fleet_setup: FleetSetup, clock: ManualClock
) -> None:
    await fleet_setup.submit()
    async with fleet_setup.worker("gpu-7") as before:
        job = await before.job()
        clock.advance(seconds=60)
        assert (await fleet_setup.register("gpu-7")).status_code == 409, "it may well live"
        clock.advance(seconds=31)
        async with fleet_setup.worker("gpu-7") as anew:
            assert (await before.call("poll", worker_id="gpu-7")).status_code == 401
            again = await anew.job()
            assert again["job_id"] == job["job_id"]
            assert again["lease_token"] != job["lease_token"]


async def test_a_revoked_worker_is_never_removed_and_never_joins_again(
    fleet_setup: FleetSetup, clock: ManualClock
) -> None:
    async with fleet_setup.worker("gpu-7"):
        answer = await fleet_setup.act("workers/gpu-7/revoke")
        assert "rotate" in answer["hint"]
        clock.advance(days=30)
        await remove_lost_workers(fleet_setup.plane)
        shown = (await fleet_setup.admin.get("/api/admin/workers/gpu-7")).json()
        assert shown["state"] == "revoked"
        assert (await fleet_setup.register("gpu-7")).status_code == 401
        await fleet_setup.act("workers/gpu-7/approve")
        assert (await fleet_setup.register("gpu-7")).status_code == 200


async def test_a_fleet_with_manual_approval_gives_nothing_before_it(
    fleet_setup: FleetSetup,
) -> None:
    path = "/api/admin/fleets/gpu/production/approval"
    assert (await fleet_setup.admin.put(path, json={"approval": "perhaps"})).status_code == 422
    fleet = (await fleet_setup.admin.put(path, json={"approval": "manual"})).json()
    assert fleet["approval"] == "manual"
    assert [entry["details"] for entry in await fleet_setup.audited("set_approval")] == [
        {"approval": "manual"}
    ]
    await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        polled = await worker.poll()
        assert polled["job"] is None
        assert "approval" in polled["reason"]
        assert (await fleet_setup.admin.get("/api/admin/workers/w1")).json()["state"] == "pending"
        await fleet_setup.act("workers/w1/approve")
        assert (await worker.job())["attempt"] == 1
