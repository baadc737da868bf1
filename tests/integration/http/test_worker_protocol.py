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
from tests.support.server.fleet import PICTURE, Yard, yard_on


@pytest.fixture
async def yard(databases: Databases, tmp_path: Path) -> AsyncIterator[Yard]:
    async with plane_on(databases, tmp_path) as plane, yard_on(plane) as yard:
        yield yard


def code_of(answer: httpx.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code


async def test_a_worker_joins_by_the_secret_and_gets_a_key(yard: Yard) -> None:
    joined = (await yard.register()).json()
    assert joined["worker_id"] == "w1"
    assert len(joined["token"]) == 64
    assert joined["workflows_assigned"] == ["invert"]
    assert [each["subject"] for each in await yard.audited("register")] == ["worker:w1"]
    assert joined["token"] not in str(await yard.audited("register"))


@pytest.mark.parametrize(
    ("changes", "status", "word"),
    [
        ({"secret": "wrong"}, 401, "secret"),
        ({"fleet_slug": "nowhere"}, 422, "nowhere"),
        ({"stage": "staging"}, 422, "gpu/staging"),
        ({"workflow_slugs": ["nothing"]}, 422, "nothing"),
        ({"workflow_slugs": []}, 422, "workflow_slugs"),
        ({"worker_id": "a b"}, 422, "worker_id"),
        ({"protocol_version": 99}, 422, "protocol"),
    ],
)
async def test_who_may_not_join_is_told_why(
    yard: Yard, changes: dict[str, Any], status: int, word: str
) -> None:
    answer = await yard.register(**changes)
    assert answer.status_code == status
    assert word in answer.text
    assert (await yard.admin.get("/api/admin/workers")).json()["workers"] == []


async def test_an_id_is_given_once_and_a_full_fleet_takes_nobody(
    databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(databases, tmp_path) as plane, yard_on(plane, max_workers=1) as yard:
        await yard.register("w1")
        assert (await yard.register("w1")).status_code == 409
        full = await yard.register("w2")
        assert (full.status_code, code_of(full)) == (429, "fleet_full")
        assert int(full.headers["Retry-After"]) > 0


async def test_a_job_is_polled_run_and_delivered(yard: Yard) -> None:
    job_id = await yard.submit(properties={"prefix": "x"})
    async with yard.worker() as worker:
        job = await worker.job()
        (asset,) = job["assets"]
        assert (asset["binding"], asset["is_primary_input"]) == ("1.image", True)
        assert (await worker.client.get(asset["url"])).content == PICTURE
        assert job["prompt"]["3"]["inputs"]["filename_prefix"] == "x"
        beat = (await worker.of(job, "heartbeat", started=True)).json()
        assert not beat["cancelled"]
        assert (await worker.deliver(job)).status_code == 200
        assert (await worker.deliver(job)).status_code == 200, "the same word again"
    found = await yard.job(job_id)
    assert found["status"] == "completed"
    (output,) = found["outputs"]
    assert (await yard.admin.get(output["url"])).content == b"made"


async def test_nothing_to_do_comes_with_the_reason(yard: Yard) -> None:
    async with yard.worker() as worker:
        assert (await worker.poll())["reason"] == "no job is queued for this worker"
        await yard.assign()
        assert "no workflow is assigned" in (await worker.poll())["reason"]


async def test_a_worker_waits_and_is_woken(yard: Yard) -> None:
    async with yard.worker() as worker:
        polling = asyncio.create_task(worker.job(wait_seconds=20))
        await parked(yard.plane.queue, 1)
        await yard.submit()
        await asyncio.wait_for(polling, 5)


async def test_an_assignment_wakes_those_who_wait(yard: Yard) -> None:
    await yard.register_workflow("other")
    await yard.submit("other")
    async with yard.worker() as worker:
        polling = asyncio.create_task(worker.job(wait_seconds=20))
        await parked(yard.plane.queue, 1)
        await yard.assign("invert", "other")
        assert (await asyncio.wait_for(polling, 5))["workflow_slug"] == "other"


async def test_a_worker_gets_only_what_it_serves(yard: Yard) -> None:
    await yard.register_workflow("other")
    await yard.register_workflow("large", required_capabilities=["80gb"])
    await yard.assign("invert", "other", "large")
    await yard.submit("other")
    await yard.submit("large")
    async with yard.worker("some", workflow_slugs=["invert"]) as some:
        assert (await some.poll())["job"] is None
    async with yard.worker("all") as every:
        assert (await every.job())["workflow_slug"] == "other"
        assert (await every.poll())["job"] is None
    async with yard.worker("strong", capabilities=["80gb"]) as strong:
        assert (await strong.job())["workflow_slug"] == "large"


async def test_a_lease_that_was_lost_on_its_way_is_handed_out_again(yard: Yard) -> None:
    await yard.submit()
    async with yard.worker() as worker:
        first = await worker.job(held=[])
        again = await worker.job(held=[])
        assert again["lease_token"] == first["lease_token"]
        assert again["attempt"] == first["attempt"] == 1
        await worker.of(first, "heartbeat")
        assert (await worker.poll(held=[]))["job"] is None, "it has spoken of it"


async def test_one_job_is_prefetched_and_no_more(yard: Yard) -> None:
    for _ in range(3):
        await yard.submit()
    async with yard.worker() as worker:
        await worker.job(current_load=0)
        await worker.job(current_load=1, wait_seconds=5)
        assert "holds" in (await worker.poll(current_load=2))["reason"]


async def test_a_prefetched_job_is_recalled_for_an_idle_worker(yard: Yard) -> None:
    for _ in range(2):
        await yard.submit()
    async with yard.worker("busy") as busy, yard.worker("idle") as idle:
        running = await busy.job(current_load=0)
        await busy.of(running, "heartbeat", started=True)
        spare = await busy.job(current_load=1, wait_seconds=5)
        polling = asyncio.create_task(idle.job(wait_seconds=10))
        await parked(yard.plane.queue, 1)
        assert (await busy.of(spare, "heartbeat")).json()["recall"]
        assert not (await busy.of(running, "heartbeat")).json()["recall"]
        await busy.of(spare, "requeue", reason="recall")
        assert (await asyncio.wait_for(polling, 5))["job_id"] == spare["job_id"]


async def test_urls_are_renewed_for_a_held_lease(yard: Yard) -> None:
    await yard.submit()
    async with yard.worker() as worker:
        job = await worker.job()
        wanted = [{"name": "b.png", "content_type": "image/png"}]
        beat = (
            await worker.of(job, "heartbeat", want_outputs=wanted, want_assets=["input"])
        ).json()
        (slot,) = beat["outputs"]
        assert slot["headers"]["Content-Type"] == "image/png"
        assert (await worker.client.get(beat["assets"][0]["url"])).content == PICTURE
        put = await worker.client.put(slot["url"], content=b"12345", headers=slot["headers"])
        assert put.status_code in (200, 201)
        wrong = await worker.of(job, "complete", outputs=[{"name": "b.png", "size": 4}])
        assert wrong.status_code == 422
        right = await worker.of(job, "complete", outputs=[{"name": "b.png", "size": 5}])
        assert right.status_code == 200


async def test_another_token_is_a_lost_lease(yard: Yard) -> None:
    await yard.submit()
    async with yard.worker() as worker:
        job = {**await worker.job(), "lease_token": str(uuid4())}
        for word, body in (
            ("heartbeat", {}),
            ("complete", {}),
            ("fail", {"error": "x"}),
            ("requeue", {"reason": "spot"}),
        ):
            answer = await worker.of(job, word, **body)
            assert (answer.status_code, code_of(answer)) == (409, "lease_lost")


async def test_a_failure_is_made_presentable(yard: Yard) -> None:
    job_id = await yard.submit()
    async with yard.worker() as worker:
        error = {"exception_message": "Allocation failed", "traceback": ["secret path"]}
        await worker.of(await worker.job(), "fail", error=error)
    found = await yard.job(job_id)
    assert (found["status"], found["error"]) == ("failed", "Allocation failed")
    assert "secret path" in found["raw_error"]


async def test_who_leaves_gives_back_what_it_holds(yard: Yard) -> None:
    job_id = await yard.submit()
    async with yard.worker() as worker:
        await worker.job()
        await worker.say("deregister", worker_id="w1")
        assert (await worker.say("poll", worker_id="w1")).status_code == 401
    assert (await yard.job(job_id))["dispatch"]["status"] == "queued"
    assert (await yard.job(job_id))["dispatch"]["attempts"] == 0


async def test_a_revoked_key_is_dead_at_once_and_its_leases_go_back(yard: Yard) -> None:
    job_id = await yard.submit()
    async with yard.worker() as worker:
        job = await worker.job()
        assert (await yard.act("workers/w1/revoke"))["requeued"] == 1
        assert (await worker.of(job, "heartbeat")).status_code == 401
    assert (await yard.job(job_id))["dispatch"]["status"] == "queued"


async def test_a_worker_that_drains_hears_of_it_and_gets_nothing(yard: Yard) -> None:
    for _ in range(2):
        await yard.submit()
    async with yard.worker() as worker:
        job = await worker.job()
        await yard.act("workers/w1/drain")
        assert (await worker.of(job, "heartbeat")).json()["drain"]
        polled = await worker.poll()
        assert (polled["job"], polled["drain"]) == (None, True)
        assert (await worker.deliver(job)).status_code == 200


async def test_maintenance_gives_no_leases_and_lets_jobs_end(yard: Yard) -> None:
    for _ in range(2):
        await yard.submit()
    async with yard.worker() as worker:
        job = await worker.job()
        await yard.act("maintenance", on=True)
        assert "maintenance" in (await worker.poll())["reason"]
        assert (await worker.deliver(job)).status_code == 200
        await yard.act("maintenance", on=False)
        await worker.job()


async def test_one_worker_can_not_speak_for_another(yard: Yard) -> None:
    async with yard.worker("w1") as one, yard.worker("w2"):
        assert (await one.say("poll", worker_id="w2")).status_code == 403
        assert (await one.say("deregister", worker_id="w2")).status_code == 403


async def test_a_job_whose_file_is_gone_fails_for_good(yard: Yard) -> None:
    job_id = await yard.submit()
    from sqlalchemy import delete

    from comfyfleet.server.db.tenant_tables import files

    async with yard.plane.pools["main"].transaction() as tx:
        await tx.execute(delete(files))
    async with yard.worker() as worker:
        assert (await worker.poll())["job"] is None
    found = await yard.job(job_id)
    assert found["status"] == "failed"
    assert "could not be prepared" in found["error"]


@pytest.mark.parametrize("path", ["poll", "heartbeat", "complete", "fail", "requeue", "deregister"])
async def test_without_a_key_nothing_is_heard(yard: Yard, path: str) -> None:
    async with yard.worker() as worker:
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer nonsense"}):
            answer = await worker.client.post(f"/api/worker/{path}", json={}, headers=headers)
            assert answer.status_code == 401


@pytest.mark.parametrize(
    "capabilities", [["big", "video"], {"big": True, "video": "yes", "audio": False, "x": None}]
)
async def test_capabilities_are_a_list_or_an_object_of_what_is_true(
    yard: Yard, capabilities: Any
) -> None:
    assert (await yard.register(capabilities=capabilities)).status_code == 200
    (seen,) = (await yard.admin.get("/api/admin/workers")).json()["workers"]
    assert sorted(seen["capabilities"]) == ["big", "video"]


async def test_the_secret_tells_the_fleet_where_none_is_named(yard: Yard) -> None:
    body = {"worker_id": "w1", "workflow_slugs": ["invert"]}
    headers = {"X-Fleet-Secret": yard.secret}
    joined = await yard.admin.post("/api/worker/register", json=body, headers=headers)
    assert joined.status_code == 200, joined.text
    assert joined.json()["workflows_assigned"] == ["invert"]
    wrong = {"X-Fleet-Secret": "wrong"}
    refused = await yard.admin.post("/api/worker/register", json=body, headers=wrong)
    assert refused.status_code == 401


async def test_a_reason_in_any_words_is_kept_and_counts_no_attempt(yard: Yard) -> None:
    await yard.submit()
    async with yard.worker() as worker:
        words = "spot_interruption: the machine is taken away"
        said = await worker.of(await worker.job(), "requeue", reason=words, detail="at 12:00")
        assert said.status_code == 200, said.text
        (row,) = (await yard.admin.get("/api/admin/dispatches")).json()["dispatches"]
        assert (row["status"], row["attempts"]) == ("queued", 0)
        assert row["last_error"] == f"Requeued: {words}: at 12:00"
        # What only we may say is but words of a worker.
        await worker.of(await worker.job(), "requeue", reason="revoked")
        (row,) = (await yard.admin.get("/api/admin/dispatches")).json()["dispatches"]
        assert (row["attempts"], row["last_error"]) == (0, "Requeued: revoked")
        empty = await worker.of(await worker.job(), "requeue", reason="")
        assert empty.status_code == 422


async def test_a_job_comes_by_plain_fields_too_unless_it_is_to_be_brief(yard: Yard) -> None:
    await yard.submit()
    await yard.submit()
    async with yard.worker(max_concurrency=2) as worker:
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
