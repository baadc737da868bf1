"""Results whose files a worker uploads without naming them in its report. On both databases and both stores."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.databases.s3 import RunningS3, running_s3
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on, png, put_object
from tests.support.server.fleet import PICTURE, WorkerClient
from tests.unit import saved_files

DRAWN_TEXT = {"1": {"class_type": "PreviewAny", "inputs": {"source": "hello"}}}


@pytest.fixture(scope="module")
def s3() -> Iterator[RunningS3]:
    with running_s3() as running:
        yield running


@pytest.fixture(params=["folder", "s3"])
async def effects(
    request: pytest.FixtureRequest,
    databases: Databases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[EffectSetup]:
    settings: dict[str, Any] = {}
    if request.param == "s3":
        running: RunningS3 = request.getfixturevalue("s3")
        for name, value in running.env.items():
            monkeypatch.setitem(os.environ, name, value)
        settings["storage_url"] = running.url_of(tmp_path.name)
    async with (
        plane_on(databases, tmp_path, max_output_bytes=100_000, **settings) as plane,
        effect_setup_on(plane) as setup,
    ):
        changed = await setup.fleet_setup.admin.patch(
            "/api/admin/workflows/invert", json={"output": "required"}
        )
        assert changed.json()["output"] == "required"
        yield setup


async def put(worker: WorkerClient, url: str, headers: dict[str, str], data: bytes) -> None:
    await put_object(worker.client, url, headers, data)


async def submit(setup: EffectSetup, ada: Customer) -> str:
    return await ada.job(setup.invert, video_id=await ada.video())


async def test_the_file_at_the_jobs_output_url_is_the_result(effects: EffectSetup) -> None:
    ada = await effects.customer()
    job_id = await submit(effects, ada)
    before = await ada.balance()
    async with effects.fleet_setup.worker() as worker:
        job = await worker.job()
        await put(worker, job["output_url"], job["output_headers"], PICTURE)
        for _ in range(2):  # the second time because the first response may have been lost
            done = await worker.call_for(job, "complete")
            assert done.status_code == 200, done.text
    found = await effects.fleet_setup.job(UUID(job_id))
    (output,) = found["outputs"]
    assert (found["status"], output["content_type"], output["size"]) == (
        "completed",
        "image/png",
        len(PICTURE),
    )
    assert output["filename"] == "output.png"
    assert await ada.balance() == before
    (video,) = (await ada.get("videos"))["videos"]
    assert video["status"] == "completed"
    assert (await ada.get(f"videos/{video['id']}"))["processed_file_url"]


async def test_a_file_that_is_not_reported_loses_its_prompt(effects: EffectSetup) -> None:
    ada = await effects.customer()
    job_id = await submit(effects, ada)
    async with effects.fleet_setup.worker() as worker:
        job = await worker.job()
        data = saved_files.png({"prompt": "a secret prompt"})
        await put(worker, job["output_url"], job["output_headers"], data)
        assert (await worker.call_for(job, "complete")).status_code == 200
    url = (await ada.get(f"ai-jobs/{job_id}"))["processed_file_url"]
    async with httpx.AsyncClient() as direct:
        is_ours = url.startswith(str(ada.client.base_url))
        found = (await (ada.client if is_ours else direct).get(url)).content
    assert found.startswith(data[:8])
    assert b"secret" not in found


async def test_without_a_file_nothing_changes_until_it_was_uploaded(effects: EffectSetup) -> None:
    ada = await effects.customer()
    job_id = await submit(effects, ada)
    async with effects.fleet_setup.worker() as worker:
        job = await worker.job()
        refused = await worker.call_for(job, "complete")
        assert refused.status_code == 422
        error = refused.json()["error"]
        assert error["code"] == "output_missing"
        assert "output_url" in error["message"]
        running = await ada.get(f"ai-jobs/{job_id}")
        assert running["status"] == "processing"
        kinds = [each["type"] for each in (await ada.get("wallet/transactions"))["transactions"]]
        assert "JOB_CONSUME" not in kinds
        slot = error["details"]
        await put(worker, slot["output_url"], slot["output_headers"], PICTURE)
        assert (await worker.call_for(job, "complete")).status_code == 200
    assert (await ada.get(f"ai-jobs/{job_id}"))["status"] == "completed"


async def test_a_value_is_a_result_and_an_optional_output_needs_none(effects: EffectSetup) -> None:
    ada = await effects.customer()
    first = await submit(effects, ada)
    async with effects.fleet_setup.worker() as worker:
        values = [{"node_id": "3", "name": "text", "value": "hello"}]
        done = await worker.call_for(await worker.job(), "complete", values=values)
        assert done.status_code == 200, done.text
        await effects.fleet_setup.admin.patch(
            "/api/admin/workflows/invert", json={"output": "optional"}
        )
        second = await submit(effects, ada)
        assert (await worker.call_for(await worker.job(), "complete")).status_code == 200
    for job_id in (first, second):
        assert (await ada.get(f"ai-jobs/{job_id}"))["status"] == "completed"


@pytest.mark.parametrize("more", [{"events": [["executing", {"node": "1"}]]}, {"history": {}}])
async def test_messages_of_the_run_are_no_result(
    effects: EffectSetup, more: dict[str, Any]
) -> None:
    ada = await effects.customer()
    job_id = await submit(effects, ada)
    async with effects.fleet_setup.worker() as worker:
        job = await worker.job()
        refused = await worker.call_for(job, "complete", **more)
        assert refused.json()["error"]["code"] == "output_missing"
        await put(worker, job["output_url"], job["output_headers"], PICTURE)
        assert (await worker.call_for(job, "complete", **more)).status_code == 200
    assert (await ada.get(f"ai-jobs/{job_id}"))["outputs"]


async def test_the_file_of_an_earlier_lease_is_not_used(effects: EffectSetup) -> None:
    ada = await effects.customer()
    await submit(effects, ada)
    async with effects.fleet_setup.worker("first") as first:
        job = await first.job()
        await put(first, job["output_url"], job["output_headers"], PICTURE)
        await first.call_for(job, "requeue", reason="rebalance")
        again = await first.job()
        assert again["job_id"] == job["job_id"]
        refused = await first.call_for(again, "complete")
        assert refused.json()["error"]["code"] == "output_missing"
        late = await first.call_for(job, "complete")
        assert late.json()["error"]["code"] == "lease_lost"


@pytest.mark.parametrize("is_uploaded", [False, True])
async def test_a_worker_that_has_requeued_its_job_has_no_lease(
    effects: EffectSetup, is_uploaded: bool
) -> None:
    ada = await effects.customer()
    job_id = await submit(effects, ada)
    async with effects.fleet_setup.worker() as worker:
        job = await worker.job()
        if is_uploaded:
            await put(worker, job["output_url"], job["output_headers"], PICTURE)
        requeued = await worker.call_for(job, "requeue", reason="rebalance")
        assert requeued.status_code == 200, requeued.text
        refused = await worker.call_for(job, "complete")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "lease_lost")
        assert "output_url" not in refused.text
    assert (await ada.get(f"ai-jobs/{job_id}"))["status"] == "queued"


async def test_limits_hold_for_a_file_that_is_not_reported(effects: EffectSetup) -> None:
    ada = await effects.customer()
    job_id = await submit(effects, ada)
    async with effects.fleet_setup.worker() as worker:
        job = await worker.job()
        await put(worker, job["output_url"], job["output_headers"], PICTURE + bytes(100_000))
        refused = await worker.call_for(job, "complete")
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_input")
        await put(worker, job["output_url"], job["output_headers"], png())
        assert (await worker.call_for(job, "complete")).status_code == 200
    assert (await ada.get(f"ai-jobs/{job_id}"))["status"] == "completed"


@pytest.mark.parametrize(("document", "expected"), [(DRAWN_TEXT, "optional"), (None, "required")])
async def test_only_workflows_that_show_text_need_no_file(
    effects: EffectSetup, document: dict[str, Any] | None, expected: str
) -> None:
    given = {"document": document, "properties": []} if document else {}
    made = await effects.fleet_setup.register_workflow("new", output=None, **given)
    assert made.status_code == 201, made.text
    shown = await effects.fleet_setup.admin.get("/api/admin/workflows/new")
    assert shown.json()["output"] == expected


async def test_names_of_other_workers_are_accepted(effects: EffectSetup) -> None:
    ada = await effects.customer()
    file_id = await ada.upload()
    linked = await ada.client.post("/api/videos", json={"original_file_id": file_id})
    assert linked.status_code == 201, linked.text
    job_id = await ada.job(effects.invert, video_id=linked.json()["id"])
    async with effects.fleet_setup.worker() as worker:
        job = await worker.job()
        failed = await worker.call_for(job, "fail", error_message="CUDA is unhappy")
        assert failed.status_code == 200, failed.text
        assert (await worker.call("deregister")).status_code == 200
        assert (await worker.call("poll", worker_id=worker.worker_id)).status_code == 401
    assert (await ada.get(f"ai-jobs/{job_id}"))["error"] == "CUDA is unhappy"


@pytest.mark.parametrize(
    ("body", "shown", "ignored"),
    [
        ({}, "Processing failed.", []),
        ({"error": None}, "Processing failed.", []),
        ({"message": "no face was found"}, "no face was found", []),
        ({"exception_message": "no face was found"}, "no face was found", []),
        ({"mesage": "no face was found"}, "Processing failed.", ["mesage"]),
    ],
)
async def test_a_failure_needs_no_text_and_names_unknown_fields(
    effects: EffectSetup, body: dict[str, Any], shown: str, ignored: list[str]
) -> None:
    ada = await effects.customer()
    job_id = await submit(effects, ada)
    async with effects.fleet_setup.worker() as worker:
        failed = await worker.call_for(await worker.job(), "fail", **body)
        assert failed.status_code == 200, failed.text
        assert failed.json()["ignored_fields"] == ignored
    assert (await ada.get(f"ai-jobs/{job_id}"))["error"] == shown


async def test_effects_show_how_long_the_last_job_took(effects: EffectSetup) -> None:
    ada = await effects.customer()
    shown = await ada.get(f"effects/{effects.invert.slug}")
    assert shown["last_processing_time_seconds"] is None
    await submit(effects, ada)
    await effects.work(PICTURE)
    await effects.plane.context.deferred.flush()
    shown = await ada.get(f"effects/{effects.invert.slug}")
    assert shown["last_processing_time_seconds"] >= 0


async def test_a_prompt_can_be_filled_by_its_placeholders_or_by_its_bindings(
    effects: EffectSetup,
) -> None:
    ada = await effects.customer()
    await submit(effects, ada)
    async with effects.fleet_setup.worker() as worker:
        job = await worker.job()
        (asset,) = job["input_payload"]["assets"]
        prompt = job["input_payload"]["workflow"]
        assert asset["binding"] == "1.image"
        assert prompt["1"]["inputs"]["image"] == asset["placeholder"]
        assert asset["placeholder"] == "{{input}}"
        brief = (await worker.call_for(job, "requeue", reason="rebalance")).status_code
        assert brief == 200
        job = await worker.job(is_brief=True)
        assert job["assets"][0]["placeholder"] is None, "our own workers use bindings"
