"""Workers that fall silent, lose their state, or wait for approval, as the control plane treats them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ByHand
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import Yard, yard_on

from comfyfleet.server.jobs.reconcile import expire_due_leases
from comfyfleet.server.maintenance.sweeps import remove_lost_workers


@pytest.fixture
def clock() -> ByHand:
    return ByHand()


@pytest.fixture
async def yard(databases: Databases, tmp_path: Path, clock: ByHand) -> AsyncIterator[Yard]:
    async with plane_on(databases, tmp_path, clock=clock) as plane, yard_on(plane) as yard:
        yield yard


async def test_jobs_of_a_silent_worker_are_given_to_others_after_three_heartbeats(
    yard: Yard, clock: ByHand
) -> None:
    await yard.submit()
    async with yard.worker("silent") as silent, yard.worker("other") as other:
        job = await silent.job()
        await silent.of(job, "heartbeat", started=True)
        clock.go_on(seconds=80)
        assert await expire_due_leases(yard.plane.context, last_pass=clock()) == 0
        clock.go_on(seconds=11)
        assert await expire_due_leases(yard.plane.context, last_pass=clock()) == 1
        again = await other.job()
        assert (again["job_id"], again["attempt"]) == (job["job_id"], 2)
        assert (await silent.of(job, "heartbeat")).status_code == 409
        assert (await silent.deliver(job)).status_code == 409
        assert (await silent.poll())["job"] is None, "it may come back"
        assert (await other.deliver(again)).status_code == 200


async def test_nobody_passes_for_silent_because_we_were_away(yard: Yard, clock: ByHand) -> None:
    await yard.submit()
    async with yard.worker() as worker:
        job = await worker.job()
        before = clock()
        clock.go_on(seconds=300)
        assert await expire_due_leases(yard.plane.context, last_pass=before) == 0, "we were away"
        assert await expire_due_leases(yard.plane.context, last_pass=clock()) == 0
        clock.go_on(seconds=60)
        assert await expire_due_leases(yard.plane.context, last_pass=clock()) == 0
        assert (await worker.of(job, "heartbeat")).status_code == 200
        clock.go_on(seconds=60)
        assert await expire_due_leases(yard.plane.context, last_pass=clock()) == 0, (
            "it has called since"
        )
        clock.go_on(seconds=60)
        assert await expire_due_leases(yard.plane.context, last_pass=clock()) == 1


async def test_a_worker_that_lost_its_state_has_its_id_again_after_three_heartbeats(
    yard: Yard, clock: ByHand
) -> None:
    await yard.submit()
    async with yard.worker("gpu-7") as before:
        job = await before.job()
        clock.go_on(seconds=60)
        assert (await yard.register("gpu-7")).status_code == 409, "it may well live"
        clock.go_on(seconds=31)
        async with yard.worker("gpu-7") as anew:
            assert (await before.say("poll", worker_id="gpu-7")).status_code == 401
            again = await anew.job()
            assert again["job_id"] == job["job_id"]
            assert again["lease_token"] != job["lease_token"]


async def test_a_revoked_worker_is_never_removed_and_never_joins_again(
    yard: Yard, clock: ByHand
) -> None:
    async with yard.worker("gpu-7"):
        answer = await yard.act("workers/gpu-7/revoke")
        assert "rotate" in answer["hint"]
        clock.go_on(days=30)
        await remove_lost_workers(yard.plane)
        shown = (await yard.admin.get("/api/admin/workers/gpu-7")).json()
        assert shown["state"] == "revoked"
        assert (await yard.register("gpu-7")).status_code == 401
        await yard.act("workers/gpu-7/approve")
        assert (await yard.register("gpu-7")).status_code == 200


async def test_a_fleet_with_manual_approval_gives_nothing_before_it(yard: Yard) -> None:
    path = "/api/admin/fleets/gpu/production/approval"
    assert (await yard.admin.put(path, json={"approval": "perhaps"})).status_code == 422
    fleet = (await yard.admin.put(path, json={"approval": "manual"})).json()
    assert fleet["approval"] == "manual"
    assert [entry["details"] for entry in await yard.audited("set_approval")] == [
        {"approval": "manual"}
    ]
    await yard.submit()
    async with yard.worker() as worker:
        polled = await worker.poll()
        assert polled["job"] is None
        assert "approval" in polled["reason"]
        assert (await yard.admin.get("/api/admin/workers/w1")).json()["state"] == "pending"
        await yard.act("workers/w1/approve")
        assert (await worker.job())["attempt"] == 1
