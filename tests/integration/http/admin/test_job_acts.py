"""Operators filter, count and act on many jobs, and see a whole job."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.bulk import add_jobs, job_row
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import PRICE, Customer, EffectSetup, effect_setup_on

from comfyfleet.clock import utc_now
from comfyfleet.server.jobs import store_lists


@pytest.fixture
async def setup(databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with (
        plane_on(databases, tmp_path, max_active_jobs_per_user=50) as plane,
        effect_setup_on(plane) as setup,
    ):
        yield setup


async def get(setup: EffectSetup, path: str, **query: Any) -> dict[str, Any]:
    answer = await setup.fleet_setup.admin.get(f"/api/admin/{path}", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def listed(setup: EffectSetup, **query: Any) -> set[str]:
    return {each["id"] for each in (await get(setup, "jobs", **query))["jobs"]}


async def failed_job(
    setup: EffectSetup, customer: Customer, error: str, worker_id: str = "w1"
) -> str:
    job_id = await customer.job(setup.draw)
    async with setup.fleet_setup.worker(worker_id) as worker:
        job = await worker.job()
        done = await worker.call_for(job, "fail", error=error)
        assert done.status_code == 200, done.text
    return job_id


async def bulk(setup: EffectSetup, **body: Any) -> dict[str, Any]:
    return await setup.fleet_setup.act("jobs/bulk", **body)


async def test_jobs_are_filtered_by_effect_error_time_and_several_statuses(
    setup: EffectSetup,
) -> None:
    ada = await setup.customer(tokens=1000)
    broken = await failed_job(setup, ada, "CUDA out of MEMORY at node 3")
    other = await failed_job(setup, ada, "100% strange_thing", "w2")
    waiting = await ada.job(setup.draw)
    inverted = await ada.job(setup.invert, video_id=await ada.video())
    assert await listed(setup, effect="draw") == {broken, other, waiting}
    assert await listed(setup, effect="draw", status="failed") == {broken, other}
    assert await listed(setup, error="cuda Out") == {broken}
    assert await listed(setup, error="100%") == {other}
    assert await listed(setup, error="_of_") == set()
    assert await listed(setup, error="cuda", worker="w1") == {broken}
    assert await listed(setup, status=["failed", "queued"]) == {broken, other, waiting, inverted}
    assert await listed(setup, until=(utc_now() - timedelta(hours=1)).isoformat()) == set()
    missing = await setup.fleet_setup.admin.get("/api/admin/jobs", params={"effect": "none"})
    assert missing.status_code == 404
    (row,) = (await get(setup, "jobs", effect="invert"))["jobs"]
    assert (row["effect"], row["status"], row["worker_id"]) == ("invert", "queued", None)
    (row,) = (await get(setup, "jobs", error="cuda"))["jobs"]
    assert (row["worker_id"], row["reserved_tokens"]) == ("w1", PRICE)


async def test_a_text_that_few_errors_have_is_found_page_by_page(
    setup: EffectSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many have another error, a page looks at a bounded number of them."""
    monkeypatch.setattr(store_lists, "LOOKED_AT_MAX", 4)
    tenant_id, now = (await setup.customer()).tenant_id, utc_now()
    rows = [
        job_row(
            tenant_id,
            now - timedelta(minutes=number),
            status="failed",
            completed_at=now,
            raw_error="rare" if number in (3, 9) else "usual",
        )
        for number in range(11)
    ]
    await add_jobs(await setup.plane.context.pool_of(tenant_id), rows)
    seen, sizes, after = [], [], None
    for _ in range(10):
        page = await get(
            setup, "jobs", error="RARE", limit=3, **({"after": after} if after else {})
        )
        seen += [each["id"] for each in page["jobs"]]
        sizes.append(len(page["jobs"]))
        after = page["next"]
        if after is None:
            break
    assert seen == [str(rows[3]["id"]), str(rows[9]["id"])]
    assert sizes == [1, 0, 1]


async def test_jobs_are_counted_by_status_up_to_a_bound(
    setup: EffectSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = await setup.customer(tokens=1000)
    await failed_job(setup, ada, "no")
    for _ in range(3):
        await ada.job(setup.draw)
    counted = await get(setup, "jobs/counts", effect="draw", tenant=str(ada.tenant_id))
    assert counted["counts"] == {
        "queued": 3,
        "processing": 0,
        "completed": 0,
        "failed": 1,
        "cancelled": 0,
    }
    assert (await get(setup, "jobs/counts", effect="invert"))["counts"]["queued"] == 0
    monkeypatch.setattr(store_lists, "COUNTED_MAX", 2)
    assert (await get(setup, "jobs/counts"))["counts"]["queued"] == 2


async def test_many_jobs_are_cancelled_by_a_filter_and_the_rest_is_told(setup: EffectSetup) -> None:
    ada = await setup.customer(tokens=1000)
    jobs = [await ada.job(setup.draw) for _ in range(3)]
    other = await ada.job(setup.invert, video_id=await ada.video())
    before = await ada.balance()
    wanted = {"effect": "draw"}
    counted = await bulk(setup, act="cancel", filter=wanted, dry_run=True)
    assert (counted["matched"], counted["done"]) == (3, 0)
    first = await bulk(setup, act="cancel", filter=wanted, limit=2)
    assert (first["matched"], first["done"], first["failed"]) == (2, 2, [])
    rest = await bulk(setup, act="cancel", filter=wanted, after=first["next"])
    assert (rest["done"], rest["next"]) == (1, None)
    assert await listed(setup, status="cancelled") == set(jobs)
    assert await listed(setup, status="queued") == {other}
    assert await ada.balance() == before + 3 * PRICE
    entries = await setup.fleet_setup.audited("cancel")
    operators = [each for each in entries if each["actor"] == "admin"]
    assert {each["subject"] for each in operators} == {f"job:{each}" for each in jobs}
    assert [each["details"]["jobs"] for each in await setup.fleet_setup.audited("bulk_cancel")] == [
        1,
        2,
    ]


async def test_what_can_not_be_done_is_told_for_each_job(setup: EffectSetup) -> None:
    ada = await setup.customer(tokens=2 * PRICE)
    first = await failed_job(setup, ada, "no")
    second = await failed_job(setup, ada, "no", "w2")
    waiting = await ada.job(setup.draw)
    nobody = str(uuid4())
    done = await bulk(setup, act="retry", ids=[first, second, waiting, nobody])
    assert (done["matched"], done["done"]) == (3, 1)
    why = {each["job_id"]: each["code"] for each in done["failed"]}
    assert (why[waiting], why[nobody]) == ("conflict", "not_found")
    assert sorted(why.values()) == ["conflict", "insufficient_tokens", "not_found"]
    ((old, new),) = done["retries"].items()
    assert (await get(setup, f"jobs/{new}/details"))["retry_of"] == old
    again = await bulk(setup, act="cancel", ids=[first, waiting])
    assert (again["done"], [each["code"] for each in again["failed"]]) == (1, ["conflict"])


async def test_queued_jobs_are_reprioritised_together(setup: EffectSetup) -> None:
    ada = await setup.customer(tokens=1000)
    late = [await ada.job(setup.draw) for _ in range(3)][-1]
    done = await bulk(setup, act="reprioritise", ids=[late], priority=7)
    assert (done["done"], done["failed"]) == (1, [])
    async with setup.fleet_setup.worker("w1") as worker:
        assert (await worker.job())["job_id"] == late
    (row,) = [each for each in (await get(setup, "jobs"))["jobs"] if each["id"] == late]
    assert (row["priority"], row["status"]) == (7, "processing")


@pytest.mark.parametrize(
    "body",
    [
        {"act": "cancel"},
        {"act": "cancel", "ids": [str(UUID(int=1))], "filter": {}},
        {"act": "reprioritise", "filter": {}},
        {"act": "cancel", "filter": {}, "priority": 3},
        {"act": "retry", "filter": {"status": ["completed"]}},
        {"act": "erase", "filter": {}},
        {"act": "cancel", "ids": []},
        {"act": "cancel", "filter": {"statuses": ["queued"]}},
    ],
)
async def test_an_order_that_could_mean_something_else_is_refused(
    setup: EffectSetup, body: dict[str, Any]
) -> None:
    answer = await setup.fleet_setup.admin.post("/api/admin/jobs/bulk", json=body)
    assert answer.status_code == 422, answer.text


async def test_a_whole_job_is_one_answer_and_the_look_at_its_files_is_audited(
    setup: EffectSetup,
) -> None:
    ada = await setup.customer(tokens=1000)
    job_id = await ada.job(setup.invert, video_id=await ada.video())
    async with setup.fleet_setup.worker("gpu-7") as worker:
        job = await worker.job()
        await worker.call_for(job, "heartbeat", started=True, filled_in={"1": {"image": "a.png"}})
        await worker.call_for(job, "requeue", reason="spot")
        again = await worker.job()
        assert (await worker.deliver(again)).status_code == 200
    blind = await get(setup, f"jobs/{job_id}/details", files=False)
    assert [each["url"] for each in (*blind["inputs"], *blind["outputs"])] == [None, None]
    assert await setup.fleet_setup.audited("look_at_files") == []
    shown = await get(setup, f"jobs/{job_id}/details")
    await get(setup, f"jobs/{job_id}/details")
    await get(setup, f"jobs/{job_id}")
    (look,) = await setup.fleet_setup.audited("look_at_files")
    assert (look["actor"], look["subject"]) == ("admin", f"job:{job_id}")
    client = setup.fleet_setup.admin
    assert (await client.get(shown["outputs"][0]["url"])).content == b"made"
    assert (await client.get(shown["inputs"][0]["url"])).status_code == 200
    first, second = shown["attempts"]
    assert (first["outcome"], first["message"], first["worker_id"]) == ("requeued", "spot", "gpu-7")
    assert first["prompt"]["1"]["inputs"]["image"] == "a.png"
    assert first["queued_at"] <= first["leased_at"] <= first["started_at"] <= first["ended_at"]
    assert (second["outcome"], second["queued_at"]) == ("completed", first["ended_at"])
    assert (shown["effect"], shown["user_id"]) == ("invert", str(ada.user_id))
    assert shown["prompt"]["2"]["class_type"] == "ImageInvert"
    assert shown["can"] == {
        "cancel": False,
        "retry": False,
        "reprioritise": False,
        "replay": True,
    }
    assert {"submit", "lease", "requeue", "complete"} <= {each["action"] for each in shown["audit"]}


async def test_a_job_is_replayed_for_nobodys_tokens(setup: EffectSetup) -> None:
    ada = await setup.customer(tokens=1000)
    job_id = await failed_job(setup, ada, "no")
    before = await ada.balance()
    made = await setup.fleet_setup.act(f"jobs/{job_id}/replay", backend_affinity="worker:w1")
    details = await get(setup, f"jobs/{made['job_id']}/details")
    assert (details["user_id"], details["reserved_tokens"]) == (None, 0)
    assert (details["retry_of"], details["backend_affinity"]) == (job_id, "worker:w1")
    assert await ada.balance() == before
    active = await setup.fleet_setup.admin.post(f"/api/admin/jobs/{made['job_id']}/replay", json={})
    assert active.status_code == 409
    (entry,) = await setup.fleet_setup.audited("replay")
    assert entry["details"]["new_job"] == made["job_id"]
