"""What happens though nobody asks."""

import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import delete, select, update
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.server.tenants import AdjustableClock

from comfyfleet.api.worker import object_info_hash
from comfyfleet.clock import utc_now
from comfyfleet.server.db.central_tables import dispatches
from comfyfleet.server.db.tenant_tables import ai_jobs, outbox
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.object_info import object_info_key
from comfyfleet.server.jobs import context
from comfyfleet.server.maintenance import sweeps
from comfyfleet.server.maintenance.sweeps import (
    all_sweeps,
    expire_all,
    expire_leases,
    flush_outboxes,
    reconcile_some,
    remove_lost_workers,
    sync_object_infos,
    wake_due,
)


@pytest.fixture
def clock() -> AdjustableClock:
    return AdjustableClock()


@pytest.fixture
async def fleet_setup(
    databases: Databases, tmp_path: Path, clock: AdjustableClock
) -> AsyncIterator[FleetSetup]:
    async with (
        plane_on(databases, tmp_path, clock=clock) as plane,
        fleet_setup_on(plane) as fleet_setup,
    ):
        yield fleet_setup


async def test_a_worker_unseen_for_long_is_removed_and_its_job_goes_on(
    fleet_setup: FleetSetup, clock: AdjustableClock
) -> None:
    job_id = await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        await worker.job()
        clock.by = timedelta(minutes=9)
        await remove_lost_workers(fleet_setup.plane)
        assert len((await fleet_setup.admin.get("/api/admin/workers")).json()["workers"]) == 1
        clock.by = timedelta(minutes=11)
        await remove_lost_workers(fleet_setup.plane)
    assert (await fleet_setup.admin.get("/api/admin/workers")).json()["workers"] == []
    assert (await fleet_setup.job(job_id))["dispatch"]["status"] == "queued"
    assert (await fleet_setup.register("w1")).status_code == 200, "its id is free"
    (gone,) = await fleet_setup.audited("deregister")
    assert gone["actor"] == "sweep"


async def test_a_word_in_the_outbox_is_delivered(fleet_setup: FleetSetup) -> None:
    job_id = await fleet_setup.submit()
    async with fleet_setup.plane.central.transaction() as tx:
        await tx.execute(delete(dispatches))
    async with fleet_setup.plane.pools["main"].transaction() as tx:
        row = {"job_id": job_id, "kind": "dispatch", "payload": {}}
        now = utc_now()
        tenant_id = UUID((await fleet_setup.job(job_id))["tenant_id"])
        await tx.execute(
            outbox.insert().values(tenant_id=tenant_id, not_before=now, created_at=now, **row)
        )
    await flush_outboxes(fleet_setup.plane)
    assert (await fleet_setup.job(job_id))["dispatch"]["status"] == "queued"
    async with fleet_setup.plane.pools["main"].read() as tx:
        assert (await tx.execute(select(outbox.c.id))).all() == []


async def test_an_expired_lease_is_taken_and_the_job_waits_again(fleet_setup: FleetSetup) -> None:
    job_id = await fleet_setup.submit()
    await expire_leases(fleet_setup.plane)
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        await worker.call_for(job, "heartbeat", started=True)
        async with fleet_setup.plane.central.transaction() as tx:
            past = utc_now() - timedelta(hours=1)
            await tx.execute(update(dispatches).values(lease_expires_at=past))
        await expire_leases(fleet_setup.plane)
        assert (await worker.call_for(job, "heartbeat")).status_code == 409
    found = await fleet_setup.job(job_id)
    assert (found["status"], found["dispatch"]["attempts"]) == ("queued", 1)


async def test_a_job_that_can_not_be_read_stops_no_pass(fleet_setup: FleetSetup) -> None:
    broken, well = await fleet_setup.submit(), await fleet_setup.submit()
    async with fleet_setup.worker("w1") as one, fleet_setup.worker("w2") as two:
        for worker in (one, two):
            await worker.call_for(await worker.job(), "heartbeat", started=True)
    async with fleet_setup.plane.pools["main"].transaction() as tx:
        await tx.execute(update(ai_jobs).where(ai_jobs.c.id == broken).values(assets=[{}]))
    async with fleet_setup.plane.central.transaction() as tx:
        past = utc_now() - timedelta(hours=1)
        await tx.execute(update(dispatches).values(lease_expires_at=past))
    await expire_leases(fleet_setup.plane)
    assert (await fleet_setup.job(well))["status"] == "queued"


async def test_a_job_that_was_put_off_is_seen_when_it_is_due(
    fleet_setup: FleetSetup, clock: AdjustableClock
) -> None:
    job_id = await fleet_setup.submit()
    async with fleet_setup.plane.central.transaction() as tx:
        later = utc_now() + timedelta(seconds=30)
        await tx.execute(update(dispatches).values(not_before=later))
    async with fleet_setup.worker() as worker:
        assert (await worker.poll())["job"] is None
        assert "delayed until" in (await fleet_setup.job(job_id))["why"]
        clock.by = timedelta(minutes=1)
        await wake_due(fleet_setup.plane)
        await worker.job()


async def test_what_a_fleets_backends_can_do_is_learnt_from_its_workers(
    fleet_setup: FleetSetup,
) -> None:
    data = b'{"Invert": {"input": {"required": {}}}}'
    content_hash = object_info_hash(json.loads(data))
    backend = {"object_info_hash": content_hash, "object_info_size": len(data)}
    joined = (await fleet_setup.register(backend=backend)).json()
    slot = joined["object_info_upload"]
    await sync_object_infos(fleet_setup.plane)
    await fleet_setup.admin.put(slot["url"], content=data, headers=slot["headers"])
    await sync_object_infos(fleet_setup.plane)
    async with fleet_setup.plane.central.read() as tx:
        fleet = await fleets.get_fleet(tx, "gpu", "production")
    assert (fleet.object_info_hash, fleet.object_info_key) == (
        content_hash,
        object_info_key(content_hash),
    )
    again = (await fleet_setup.register("w2", backend=backend)).json()
    assert again["object_info_upload"] is None


async def test_an_object_info_that_is_not_what_was_announced_is_not_believed(
    fleet_setup: FleetSetup,
) -> None:
    backend = {"object_info_hash": "0" * 64, "object_info_size": 2}
    joined = (await fleet_setup.register(backend=backend)).json()
    slot = joined["object_info_upload"]
    await fleet_setup.admin.put(slot["url"], content=b"{}", headers=slot["headers"])
    await sync_object_infos(fleet_setup.plane)
    async with fleet_setup.plane.central.read() as tx:
        assert (await fleets.get_fleet(tx, "gpu", "production")).object_info_hash is None


async def test_a_job_outlives_its_files(fleet_setup: FleetSetup, clock: AdjustableClock) -> None:
    job_id = await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        await worker.deliver(await worker.job())
    done = await fleet_setup.job(job_id)
    assert len(done["outputs"]) == 1
    path = f"/api/admin/tenants/{done['tenant_id']}/retention"
    await fleet_setup.admin.put(path, json={"retention_days": 1})
    clock.by = timedelta(days=2)
    await expire_all(fleet_setup.plane)
    found = await fleet_setup.job(job_id)
    assert (found["status"], found["outputs"]) == ("completed", [])


async def test_every_sweep_passes_on_an_idle_system(fleet_setup: FleetSetup) -> None:
    for sweep in all_sweeps(fleet_setup.plane):
        assert await sweep.run() is not True, sweep.name


async def test_reconcile_goes_on_where_the_last_pass_has_ended(
    fleet_setup: FleetSetup, clock: AdjustableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "RECONCILED_PER_PASS_MAX", 1)
    file_id = await fleet_setup.upload()
    jobs = [await fleet_setup.submit(file_id=file_id) for _ in range(3)]
    clock.by = timedelta(minutes=5)
    async with fleet_setup.plane.pools["main"].transaction() as tx:
        await tx.execute(delete(ai_jobs).where(ai_jobs.c.id == jobs[0]))
    places = []
    for _ in range(4):
        await reconcile_some(fleet_setup.plane)
        async with fleet_setup.plane.central.read() as tx:
            places.append(await context.reconcile_cursor(tx))
    assert places[0] != places[1]
    assert None in places, "a round has an end"
    assert len(await fleet_setup.audited("reconcile")) == 1
