"""The seven endpoints, as a worker meets them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.dispatches import parked
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import PICTURE, FleetSetup, fleet_setup_on


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


def code_of(answer: httpx.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code


async def test_a_worker_joins_by_the_secret_and_gets_a_key(fleet_setup: FleetSetup) -> None:
    joined = (await fleet_setup.register()).json()
    assert joined["worker_id"] == "w1"
    assert len(joined["token"]) == 64
    assert joined["workflows_assigned"] == ["invert"]
    assert [each["subject"] for each in await fleet_setup.audited("register")] == ["worker:w1"]
    assert joined["token"] not in str(await fleet_setup.audited("register"))


@pytest.mark.parametrize(
    ("changes", "status", "word"),
    [
        ({"secret": "wrong"}, 401, "secret"),
        ({"fleet_slug": "nowhere"}, 422, "nowhere"),
        ({"stage": "staging"}, 422, "gpu/staging"),
        ({"workflow_slugs": ["nothing"]}, 422, "nothing"),
        ({"workflow_slugs": ["inver"]}, 422, "invert"),
        ({"workflow_slugs": []}, 422, "workflow_slugs"),
        ({"worker_id": "a b"}, 422, "worker_id"),
        ({"protocol_version": 99}, 422, "protocol"),
    ],
)
async def test_who_may_not_join_is_told_why(
    fleet_setup: FleetSetup, changes: dict[str, Any], status: int, word: str
) -> None:
    answer = await fleet_setup.register(**changes)
    assert answer.status_code == status
    assert word in answer.text
    assert (await fleet_setup.admin.get("/api/admin/workers")).json()["workers"] == []


async def test_an_id_is_given_once_and_a_full_fleet_takes_nobody(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        plane_on(databases, tmp_path) as plane,
        fleet_setup_on(plane, max_workers=1) as fleet_setup,
    ):
        await fleet_setup.register("w1")
        assert (await fleet_setup.register("w1")).status_code == 409
        full = await fleet_setup.register("w2")
        assert (full.status_code, code_of(full)) == (429, "fleet_full")
        assert int(full.headers["Retry-After"]) > 0


async def test_a_job_is_polled_run_and_delivered(fleet_setup: FleetSetup) -> None:
    job_id = await fleet_setup.submit(properties={"prefix": "x"})
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        (asset,) = job["assets"]
        assert (asset["binding"], asset["is_primary_input"]) == ("1.image", True)
        assert (await worker.client.get(asset["url"])).content == PICTURE
        assert job["prompt"]["3"]["inputs"]["filename_prefix"] == "x"
        beat = (await worker.call_for(job, "heartbeat", started=True)).json()
        assert not beat["cancelled"]
        assert (await worker.deliver(job)).status_code == 200
        assert (await worker.deliver(job)).status_code == 200, "the same word again"
    found = await fleet_setup.job(job_id)
    assert found["status"] == "completed"
    (output,) = found["outputs"]
    assert (await fleet_setup.admin.get(output["url"])).content == b"made"


async def test_nothing_to_do_comes_with_the_reason(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker() as worker:
        assert (await worker.poll())["reason"] == "no job is queued for this worker"
        await fleet_setup.assign()
        assert "no workflow is assigned" in (await worker.poll())["reason"]


async def test_a_worker_waits_and_is_woken(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker() as worker:
        polling = asyncio.create_task(worker.job(wait_seconds=20))
        await parked(fleet_setup.plane.queue, 1)
        await fleet_setup.submit()
        await asyncio.wait_for(polling, 5)


async def test_an_assignment_wakes_those_who_wait(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register_workflow("other")
    await fleet_setup.submit("other")
    async with fleet_setup.worker() as worker:
        polling = asyncio.create_task(worker.job(wait_seconds=20))
        await parked(fleet_setup.plane.queue, 1)
        await fleet_setup.assign("invert", "other")
        assert (await asyncio.wait_for(polling, 5))["workflow_slug"] == "other"


async def test_a_worker_gets_only_what_it_serves(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register_workflow("other")
    await fleet_setup.register_workflow("large", required_capabilities=["80gb"])
    await fleet_setup.assign("invert", "other", "large")
    await fleet_setup.submit("other")
    await fleet_setup.submit("large")
    async with fleet_setup.worker("some", workflow_slugs=["invert"]) as some:
        assert (await some.poll())["job"] is None
    async with fleet_setup.worker("all") as every:
        assert (await every.job())["workflow_slug"] == "other"
        assert (await every.poll())["job"] is None
    async with fleet_setup.worker("strong", capabilities=["80gb"]) as strong:
        assert (await strong.job())["workflow_slug"] == "large"


async def test_a_lease_that_was_lost_on_its_way_is_handed_out_again(
    fleet_setup: FleetSetup,
) -> None:
    await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        first = await worker.job(held=[])
        again = await worker.job(held=[])
        assert again["lease_token"] == first["lease_token"]
        assert again["attempt"] == first["attempt"] == 1
        await worker.call_for(first, "heartbeat")
        assert (await worker.poll(held=[]))["job"] is None, "it has spoken of it"


async def test_one_job_is_prefetched_and_no_more(fleet_setup: FleetSetup) -> None:
    for _ in range(3):
        await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        await worker.job(current_load=0)
        await worker.job(current_load=1, wait_seconds=5)
        assert "holds" in (await worker.poll(current_load=2))["reason"]


async def test_a_prefetched_job_is_recalled_for_an_idle_worker(fleet_setup: FleetSetup) -> None:
    for _ in range(2):
        await fleet_setup.submit()
    async with fleet_setup.worker("busy") as busy, fleet_setup.worker("idle") as idle:
        running = await busy.job(current_load=0)
        await busy.call_for(running, "heartbeat", started=True)
        spare = await busy.job(current_load=1, wait_seconds=5)
        polling = asyncio.create_task(idle.job(wait_seconds=10))
        await parked(fleet_setup.plane.queue, 1)
        assert (await busy.call_for(spare, "heartbeat")).json()["recall"]
        assert not (await busy.call_for(running, "heartbeat")).json()["recall"]
        await busy.call_for(spare, "requeue", reason="recall")
        assert (await asyncio.wait_for(polling, 5))["job_id"] == spare["job_id"]


async def test_urls_are_renewed_for_a_held_lease(fleet_setup: FleetSetup) -> None:
    await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        wanted = [{"name": "b.png", "content_type": "image/png"}]
        beat = (
            await worker.call_for(job, "heartbeat", want_outputs=wanted, want_assets=["input"])
        ).json()
        (slot,) = beat["outputs"]
        assert slot["headers"]["Content-Type"] == "image/png"
        assert (await worker.client.get(beat["assets"][0]["url"])).content == PICTURE
        put = await worker.client.put(slot["url"], content=b"12345", headers=slot["headers"])
        assert put.status_code in (200, 201)
        wrong = await worker.call_for(job, "complete", outputs=[{"name": "b.png", "size": 4}])
        assert wrong.status_code == 422
        right = await worker.call_for(job, "complete", outputs=[{"name": "b.png", "size": 5}])
        assert right.status_code == 200


async def test_another_token_is_a_lost_lease(fleet_setup: FleetSetup) -> None:
    await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        job = {**await worker.job(), "lease_token": str(uuid4())}
        for word, body in (
            ("heartbeat", {}),
            ("complete", {}),
            ("fail", {"error": "x"}),
            ("requeue", {"reason": "spot"}),
        ):
            answer = await worker.call_for(job, word, **body)
            assert (answer.status_code, code_of(answer)) == (409, "lease_lost")


async def test_a_failure_is_made_presentable(fleet_setup: FleetSetup) -> None:
    job_id = await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        error = {"exception_message": "Allocation failed", "traceback": ["secret path"]}
        await worker.call_for(await worker.job(), "fail", error=error)
    found = await fleet_setup.job(job_id)
    assert (found["status"], found["error"]) == ("failed", "Allocation failed")
    assert "secret path" in found["raw_error"]


async def test_who_leaves_gives_back_what_it_holds(fleet_setup: FleetSetup) -> None:
    job_id = await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        await worker.job()
        await worker.call("deregister", worker_id="w1")
        assert (await worker.call("poll", worker_id="w1")).status_code == 401
    assert (await fleet_setup.job(job_id))["dispatch"]["status"] == "queued"
    assert (await fleet_setup.job(job_id))["dispatch"]["attempts"] == 0


async def test_a_revoked_key_is_dead_at_once_and_its_leases_go_back(
    fleet_setup: FleetSetup,
) -> None:
    job_id = await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        assert (await fleet_setup.act("workers/w1/revoke"))["requeued"] == 1
        assert (await worker.call_for(job, "heartbeat")).status_code == 401
    assert (await fleet_setup.job(job_id))["dispatch"]["status"] == "queued"


async def test_a_worker_that_drains_hears_of_it_and_gets_nothing(fleet_setup: FleetSetup) -> None:
    for _ in range(2):
        await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        await fleet_setup.act("workers/w1/drain")
        assert (await worker.call_for(job, "heartbeat")).json()["drain"]
        polled = await worker.poll()
        assert (polled["job"], polled["drain"]) == (None, True)
        assert (await worker.deliver(job)).status_code == 200


async def test_maintenance_gives_no_leases_and_lets_jobs_end(fleet_setup: FleetSetup) -> None:
    for _ in range(2):
        await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        job = await worker.job()
        await fleet_setup.act("maintenance", on=True)
        assert "maintenance" in (await worker.poll())["reason"]
        assert (await worker.deliver(job)).status_code == 200
        await fleet_setup.act("maintenance", on=False)
        await worker.job()


async def test_one_worker_can_not_speak_for_another(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker("w1") as one, fleet_setup.worker("w2"):
        assert (await one.call("poll", worker_id="w2")).status_code == 403
        assert (await one.call("deregister", worker_id="w2")).status_code == 403


async def test_a_job_whose_file_is_gone_fails_for_good(fleet_setup: FleetSetup) -> None:
    job_id = await fleet_setup.submit()
    from sqlalchemy import delete

    from comfyfleet.server.db.tenant_tables import files

    async with fleet_setup.plane.pools["main"].transaction() as tx:
        await tx.execute(delete(files))
    async with fleet_setup.worker() as worker:
        assert (await worker.poll())["job"] is None
    found = await fleet_setup.job(job_id)
    assert found["status"] == "failed"
    assert "could not be prepared" in found["error"]


@pytest.mark.parametrize("path", ["poll", "heartbeat", "complete", "fail", "requeue", "deregister"])
async def test_without_a_key_nothing_is_heard(fleet_setup: FleetSetup, path: str) -> None:
    async with fleet_setup.worker() as worker:
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer nonsense"}):
            answer = await worker.client.post(f"/api/worker/{path}", json={}, headers=headers)
            assert answer.status_code == 401


@pytest.mark.parametrize(
    "capabilities", [["big", "video"], {"big": True, "video": "yes", "audio": False, "x": None}]
)
async def test_capabilities_are_a_list_or_an_object_of_what_is_true(
    fleet_setup: FleetSetup, capabilities: Any
) -> None:
    assert (await fleet_setup.register(capabilities=capabilities)).status_code == 200
    (seen,) = (await fleet_setup.admin.get("/api/admin/workers")).json()["workers"]
    assert sorted(seen["capabilities"]) == ["big", "video"]


async def test_the_secret_tells_the_fleet_where_none_is_named(fleet_setup: FleetSetup) -> None:
    body = {"worker_id": "w1", "workflow_slugs": ["invert"]}
    headers = {"X-Fleet-Secret": fleet_setup.secret}
    joined = await fleet_setup.admin.post("/api/worker/register", json=body, headers=headers)
    assert joined.status_code == 200, joined.text
    assert joined.json()["workflows_assigned"] == ["invert"]
    wrong = {"X-Fleet-Secret": "wrong"}
    refused = await fleet_setup.admin.post("/api/worker/register", json=body, headers=wrong)
    assert refused.status_code == 401


async def test_a_reason_in_any_words_is_kept_and_counts_no_attempt(fleet_setup: FleetSetup) -> None:
    await fleet_setup.submit()
    async with fleet_setup.worker() as worker:
        words = "spot_interruption: the machine is taken away"
        said = await worker.call_for(await worker.job(), "requeue", reason=words, detail="at 12:00")
        assert said.status_code == 200, said.text
        (row,) = (await fleet_setup.admin.get("/api/admin/dispatches")).json()["dispatches"]
        assert (row["status"], row["attempts"]) == ("queued", 0)
        assert row["last_error"] == f"Requeued: {words}: at 12:00"
        # What only we may say is but words of a worker.
        await worker.call_for(await worker.job(), "requeue", reason="revoked")
        (row,) = (await fleet_setup.admin.get("/api/admin/dispatches")).json()["dispatches"]
        assert (row["attempts"], row["last_error"]) == (0, "Requeued: revoked")
        empty = await worker.call_for(await worker.job(), "requeue", reason="")
        assert empty.status_code == 422


async def test_a_job_comes_by_plain_fields_too_unless_it_is_to_be_brief(
    fleet_setup: FleetSetup,
) -> None:
    await fleet_setup.submit()
    await fleet_setup.submit()
    async with fleet_setup.worker(max_concurrency=2) as worker:
        job = await worker.job(max_concurrency=2)
        brief = await worker.job(max_concurrency=2, is_brief=True)
    assert job["input_url"] == job["assets"][0]["url"]
    assert job["output_url"] == job["outputs"][0]["url"]
    assert job["output_headers"] == job["outputs"][0]["headers"]
    assert job["input_payload"] == {
        "workflow": job["prompt"],
        "assets": job["assets"],
        "output_node_id": job["output_node_id"],
    }
    assert brief["input_payload"] is None
