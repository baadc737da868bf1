"""Operators find any job by its id alone, list those of all tenants, and see what was sent."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.bulk import add_dispatches, add_jobs, dispatch_row, job_row
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.fleet import FleetSetup

from comfyfleet.clock import utc_now
from comfyfleet.server.db import open_database
from comfyfleet.server.maintenance.sweeps import check_ledger


class Scene(FleetSetup):
    tenants: list[UUID]
    jobs: list[UUID]


@pytest.fixture
async def scene(databases: Databases, tmp_path: Path) -> AsyncIterator[Scene]:
    """Two tenants in two pools, with three jobs each, one a minute."""
    pools = ",".join([f"{name}={await databases.url('tenant')}" for name in ("main", "other")])
    async with (
        plane_on(databases, tmp_path, tenant_database_urls=pools) as plane,
        client_of(plane) as admin,
    ):
        scene = Scene(plane, admin)
        await scene.set_up()
        made = [
            (await admin.post("/api/admin/tenants", json={"name": name})).json()
            for name in ("one", "two")
        ]
        assert len({each["pool"] for each in made}) == 2
        scene.tenants = [UUID(each["id"]) for each in made]
        scene.jobs = []
        for number in range(6):
            tenant = made[number % 2]
            at = utc_now() - timedelta(minutes=10 - number)
            job = job_row(UUID(tenant["id"]), at, status="failed", completed_at=at)
            job["workflow_slug"] = f"workflow-{number // 2}"
            await add_jobs(plane.pools[tenant["pool"]], [job])
            row = dispatch_row(
                job, number, status="failed", ended_at=at, worker_id=f"w{number % 3}"
            )
            await add_dispatches(plane.central, [row])
            scene.jobs.append(job["id"])
        yield scene


async def listed(scene: Scene, **query: Any) -> list[int]:
    answer = await scene.admin.get("/api/admin/jobs", params=query)
    assert answer.status_code == 200, answer.text
    return [scene.jobs.index(UUID(each["id"])) for each in answer.json()["jobs"]]


async def test_a_job_is_shown_by_its_id_alone(scene: Scene) -> None:
    for number, job_id in enumerate(scene.jobs):
        shown = await scene.admin.get(f"/api/admin/jobs/{job_id}")
        assert shown.status_code == 200, shown.text
        assert UUID(shown.json()["tenant_id"]) == scene.tenants[number % 2]
    wrong = {"tenant_id": str(scene.tenants[1])}
    assert (
        await scene.admin.get(f"/api/admin/jobs/{scene.jobs[0]}", params=wrong)
    ).status_code == 404
    assert (await scene.admin.get(f"/api/admin/jobs/{uuid4()}")).status_code == 404


async def test_jobs_of_all_tenants_are_listed_by_what_is_asked_for(scene: Scene) -> None:
    assert await listed(scene) == [5, 4, 3, 2, 1, 0]
    assert await listed(scene, tenant=str(scene.tenants[0])) == [4, 2, 0]
    assert await listed(scene, workflow="workflow-1") == [3, 2]
    assert await listed(scene, worker="w2") == [5, 2]
    assert await listed(scene, status="failed", limit=2) == [5, 4]
    assert await listed(scene, status="completed") == []
    since = (utc_now() - timedelta(minutes=7, seconds=30)).isoformat()
    assert await listed(scene, since=since) == [5, 4, 3]


@pytest.mark.parametrize("query", [{}, {"worker": "w1"}, {"status": "failed"}])
async def test_pages_go_on_where_the_last_has_ended(scene: Scene, query: dict[str, str]) -> None:
    whole, seen, after = await listed(scene, **query), [], None
    for _ in range(10):
        params: dict[str, Any] = {**query, "limit": 1, **({"after": after} if after else {})}
        answer = (await scene.admin.get("/api/admin/jobs", params=params)).json()
        seen += [scene.jobs.index(UUID(each["id"])) for each in answer["jobs"]]
        after = answer["next"]
        if after is None:
            break
    assert seen == whole
    bad = await scene.admin.get("/api/admin/jobs", params={**query, "after": "no place"})
    assert bad.status_code == 422


async def test_dispatches_and_the_audit_are_filtered_by_tenant(scene: Scene) -> None:
    tenant = {"tenant": str(scene.tenants[0])}
    rows = (await scene.admin.get("/api/admin/dispatches", params=tenant)).json()["dispatches"]
    assert [UUID(row["job_id"]) for row in rows] == [scene.jobs[number] for number in (4, 2, 0)]
    lines = (await scene.admin.get("/api/admin/audit", params=tenant)).json()["entries"]
    assert {line["action"] for line in lines} == {"create_tenant"}


async def test_the_prompt_is_shown_as_it_was_sent_in_each_attempt_without_rights(
    scene: Scene,
) -> None:
    made = await scene.admin.post("/api/admin/workflows", json=PLAIN)
    assert made.status_code == 201, made.text
    await scene.assign("invert", "plain")
    answer = await scene.admin.post("/api/admin/jobs", json={"workflow_slug": "plain"})
    (job_id,) = answer.json()["ids"]
    signed = "https://user:pw@store.test/a.png?X-Signature=abc"
    async with scene.worker("gpu-7") as worker:
        job = await worker.job()
        filled = {"1": {"text": "cf-1/photo.png", "url": signed}}
        told = await worker.call_for(job, "heartbeat", filled_in=filled)
        assert told.status_code == 200, told.text
        await worker.call_for(job, "requeue", reason="spot")
        again = await worker.job()
        failed = await worker.call_for(
            again, "fail", error="no", filled_in={"1": {"text": "cf-2/photo.png"}}
        )
        assert failed.status_code == 200, failed.text
    shown = (await scene.admin.get(f"/api/admin/jobs/{job_id}/attempts")).json()
    first, second = shown["attempts"]
    assert first["prompt"]["1"]["inputs"] == {
        "text": "cf-1/photo.png",
        "url": "https://store.test/a.png",
    }
    assert second["prompt"]["1"]["inputs"]["text"] == "cf-2/photo.png"
    assert (first["worker_id"], first["lease_number"], second["lease_number"]) == ("gpu-7", 1, 2)
    assert shown["prompt"]["1"]["inputs"] == {"text": "a", "url": ""}
    assert "Signature" not in str(shown)


PLAIN = {
    "slug": "plain",
    "document": {
        "1": {"class_type": "Shown", "inputs": {"text": "a", "url": ""}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    },
    "properties": [],
    "output_node_id": "2",
}


async def test_a_list_says_which_pools_it_leaves_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (await scene.admin.get("/api/admin/jobs")).json()
    assert (len(whole["jobs"]), whole["pools_left_out"]) == (6, [])
    away = open_database("postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setitem(scene.plane.pools._databases, "other", away)
    some = (await scene.admin.get("/api/admin/jobs")).json()
    of_worker = (await scene.admin.get("/api/admin/jobs?worker=w0")).json()
    await away.close()
    assert (len(some["jobs"]), some["pools_left_out"]) == (3, ["other"])
    assert (len(of_worker["jobs"]), of_worker["pools_left_out"]) == (1, ["other"])


async def test_a_pool_that_is_down_keeps_no_other_from_being_verified(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (await scene.admin.get("/api/admin/ledger")).json()
    assert (whole["is_sound"], whole["pools_left_out"]) == (True, [])
    paths = []
    for tenant_id in scene.tenants:
        users = await scene.admin.get(f"/api/admin/tenants/{tenant_id}/users")
        wallet = f"tenants/{tenant_id}/wallets/{users.json()['users'][0]['id']}"
        body = {"amount": 5, "provider_transaction_id": wallet}
        await scene.admin.post(f"/api/admin/{wallet}/credits", json=body)
        pool = await scene.plane.context.pool_of(tenant_id)
        async with pool.transaction() as tx:
            await tx.exec_driver_sql("UPDATE token_wallets SET balance = balance + 1")
        paths.append(f"/api/admin/ledger?tenant_id={tenant_id}")
    away = open_database("postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setitem(scene.plane.pools._databases, "other", away)
    some = (await scene.admin.get("/api/admin/ledger")).json()
    alone = [(await scene.admin.get(path)).json() for path in paths]
    await check_ledger(scene.plane)  # the sweep reports what it sees
    await away.close()
    assert (some["is_sound"], some["pools_left_out"]) == (False, ["other"])
    assert some["found"] == 1
    assert sorted(each["pools_left_out"] for each in alone) == [[], ["other"]]
    assert not any(each["is_sound"] for each in alone)
    assert scene.plane.meters.drifts._value.get() == 1
