"""Effects at work, as a customer sees it."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import (
    PRICE,
    TOKENS,
    Customer,
    EffectSetup,
    effect_setup_on,
    png,
)

from comfyfleet.clock import utc_now

# What a busy machine may add to all that is measured.
SLOW_SECONDS = 30.0


async def test_media_goes_up_is_processed_and_comes_back(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video_id = await ada.video()
    before = await ada.get(f"videos/{video_id}")
    assert (before["status"], before["kind"], before["progress"]) == ("uploaded", "image", None)
    assert (await ada.client.get(before["original_file_url"])).content == png()

    made = await ada.submit(effect_setup.invert, video_id=video_id)
    assert made.status_code == 201
    assert made.json()["price_tokens"] == PRICE
    assert (await ada.get(f"videos/{video_id}"))["status"] == "queued"
    assert await ada.balance() == TOKENS - PRICE

    await effect_setup.work(b"inverted")
    after = await ada.get(f"videos/{video_id}")
    assert (after["status"], after["progress"], after["error"]) == ("completed", 100.0, None)
    assert (await ada.client.get(after["processed_file_url"])).content == b"inverted"
    job = await ada.get(f"ai-jobs/{made.json()['id']}")
    assert job["status"] == "completed"
    assert (await ada.client.get(job["outputs"][0]["url"])).content == b"inverted"
    assert (await ada.client.get(job["processed_file_url"])).content == b"inverted"
    assert await ada.balance() == TOKENS - PRICE


async def test_texts_numbers_and_json_are_results_without_any_file(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video_id = await ada.video()
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    values: list[dict[str, Any]] = [
        {"node_id": "7", "name": "text", "value": "a cat"},
        {"node_id": "7", "name": "text", "value": "on a \0 mat"},
        {"node_id": "8", "name": "score", "value": 0.5},
        {"node_id": "8", "name": "facts", "value": {"cats": [1, True, None]}},
        {"node_id": "9", "name": "text", "value": "of another node"},
    ]
    async with effect_setup.fleet_setup.worker() as worker:
        done = await worker.call_for(await worker.job(), "complete", outputs=[], values=values)
    assert done.status_code == 200, done.text
    values[1]["value"] = "on a \ufffd mat"
    job = await ada.get(f"ai-jobs/{job_id}")
    assert (job["status"], job["outputs"], job["processed_file_url"]) == ("completed", [], None)
    assert job["values"] == values
    assert job["text"] == "a cat\non a \ufffd mat"
    video = await ada.get(f"videos/{video_id}")
    assert (video["status"], video["values"], video["text"]) == ("completed", values, job["text"])
    assert await ada.balance() == TOKENS - PRICE


async def test_a_failure_is_told_in_words_and_refunded(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video_id = await ada.video()
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    await effect_setup.fail("RuntimeError: out of memory at /srv/secret.py")
    job = await ada.get(f"ai-jobs/{job_id}")
    assert job["status"] == "failed"
    assert job["error"] == "Out of memory."
    assert (await ada.get(f"videos/{video_id}"))["error"] == job["error"]
    assert await ada.balance() == TOKENS

    again = await ada.client.post(f"/api/ai-jobs/{job_id}/retry")
    assert (again.status_code, again.json()["retry_of"]) == (201, job_id)
    twice = await ada.client.post(f"/api/ai-jobs/{job_id}/retry")
    assert (twice.status_code, twice.json()["id"]) == (200, again.json()["id"])
    assert await ada.balance() == TOKENS - PRICE
    assert (await ada.client.post(f"/api/ai-jobs/{again.json()['id']}/retry")).status_code == 409


async def test_the_same_key_is_the_same_job_and_another_body_a_conflict(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    first = await ada.submit(effect_setup.draw, idempotency_key="k", properties={"width": 32})
    again = await ada.submit(effect_setup.draw, idempotency_key="k", properties={"width": 32})
    other = await ada.submit(effect_setup.draw, idempotency_key="k", properties={"width": 33})
    assert [each.status_code for each in (first, again, other)] == [201, 200, 409]
    assert first.json()["id"] == again.json()["id"]
    assert other.json()["error"]["code"] == "conflict"
    assert await ada.balance() == TOKENS - PRICE


async def test_the_usual_header_is_a_key_too(effect_setup: EffectSetup, ada: Customer) -> None:
    body: dict[str, object] = {
        "effect_id": str(effect_setup.draw.id),
        "properties": {"width": 32},
    }
    batch = {"effect_id": str(effect_setup.draw.id), "items": [{"properties": {"width": 32}}]}
    for path, sent in (("ai-jobs", body), ("ai-jobs?wait=0", body), ("ai-jobs/batches", batch)):
        key = {"Idempotency-Key": f"of {path.partition('?')[0]}"}
        answers = [await ada.client.post(f"/api/{path}", json=sent, headers=key) for _ in range(2)]
        assert answers[0].json()["id"] == answers[1].json()["id"]
        assert answers[1].status_code == 200
    both = {**body, "idempotency_key": "a"}
    refused = await ada.client.post("/api/ai-jobs", json=both, headers={"Idempotency-Key": "b"})
    assert (refused.status_code, refused.json()["error"]["details"]["field"]) == (
        422,
        "idempotency_key",
    )
    assert await ada.balance() == TOKENS - 2 * PRICE


async def test_a_key_is_its_users_own(effect_setup: EffectSetup, ada: Customer) -> None:
    bob = await effect_setup.customer(ada.tenant_id)
    wanted = {"idempotency_key": "order-1", "properties": {"width": 32}}
    batch = {"effect_id": str(effect_setup.draw.id), "items": [{}], "idempotency_key": "order-1"}
    jobs, batches = [], []
    for each in (ada, bob, ada, bob):
        jobs.append(await each.submit(effect_setup.draw, **wanted))
        batches.append(await each.client.post("/api/ai-jobs/batches", json=batch))
    for made in (jobs, batches):
        assert [each.status_code for each in made] == [201, 201, 200, 200]
        hers, his = made[0].json()["id"], made[1].json()["id"]
        assert hers != his
        assert [each.json()["id"] for each in made[2:]] == [hers, his]
    assert await ada.balance() == await bob.balance() == TOKENS - 2 * PRICE


async def test_a_repeated_request_is_answered_as_before_whatever_has_changed(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    wanted = {"idempotency_key": "k", "properties": {"width": 32}}
    first = await ada.submit(effect_setup.draw, **wanted)
    for _ in range(4):
        await ada.job(effect_setup.draw)
    assert (await ada.submit(effect_setup.draw, **wanted)).json()["id"] == first.json()["id"]
    await effect_setup.change(effect_setup.draw, is_published=False)
    again = await ada.submit(effect_setup.draw, **wanted)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    other = await ada.submit(effect_setup.draw, idempotency_key="k", properties={"width": 33})
    assert other.status_code == 409
    unknown = await ada.submit(effect_setup.draw, idempotency_key="new", properties={"width": 32})
    assert unknown.status_code == 404


async def test_too_few_tokens_are_told_and_nothing_is_written(effect_setup: EffectSetup) -> None:
    poor = await effect_setup.customer(tokens=PRICE - 1)
    refused = await poor.submit(effect_setup.draw, properties={"width": 32})
    assert refused.status_code == 422
    assert refused.json()["error"] == {
        "code": "insufficient_tokens",
        "message": "Insufficient token balance.",
        "details": {"required_tokens": PRICE, "balance": PRICE - 1},
    }
    assert (await poor.get("ai-jobs"))["jobs"] == []


async def test_a_user_has_so_many_active_jobs_at_most(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    for _ in range(5):
        await ada.job(effect_setup.draw, properties={"width": 32})
    refused = await ada.submit(effect_setup.draw, properties={"width": 32})
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "too_many_active_jobs"
    assert "retry-after" in refused.headers


async def test_cancelling_refunds_and_can_be_repeated(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    for _ in range(2):
        cancelled = await ada.client.delete(f"/api/ai-jobs/{job_id}")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        again = await ada.client.post(f"/api/ai-jobs/{job_id}/cancel")
        assert (again.status_code, again.json()) == (200, cancelled.json())
    assert await ada.balance() == TOKENS


async def test_a_job_that_has_ended_can_not_be_cancelled_and_keeps_its_result(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    async with effect_setup.fleet_setup.worker("w1") as worker:
        polled = await worker.poll(wait_seconds=0)
        assert (await worker.deliver(polled["job"], png())).status_code == 200
    for _ in range(2):
        refused = await ada.client.delete(f"/api/ai-jobs/{job_id}")
        assert refused.status_code == 409, refused.text
        error = refused.json()["error"]
        assert error["code"] == "job_ended"
        assert error["details"]["status"] == "completed"
        assert "Its results are unchanged" in error["message"]
        # Errors name only routes that exist.
        assert "DELETE" not in error["message"]
    shown = await ada.get(f"ai-jobs/{job_id}")
    assert (shown["status"], len(shown["outputs"])) == ("completed", 1)


async def test_each_property_is_checked(effect_setup: EffectSetup, ada: Customer) -> None:
    wrong: list[dict[str, Any]] = [
        {"width": 15},
        {"width": 32.5},
        {"width": "wide"},
        {"width": 32, "prefix": 7},
        {"width": 32, "height": 1},
        {"width": 10**300},
    ]
    for properties in wrong:
        refused = await ada.submit(effect_setup.draw, properties=properties)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_value")
    assert await ada.balance() == TOKENS


async def test_media_must_fit_the_effect(effect_setup: EffectSetup, ada: Customer) -> None:
    video_id = await ada.video()
    missing = await ada.submit(effect_setup.invert)
    unwanted = await ada.submit(effect_setup.draw, video_id=video_id, properties={"width": 32})
    unknown = await ada.submit(effect_setup.invert, video_id=str(uuid4()))
    assert [each.status_code for each in (missing, unwanted, unknown)] == [422, 422, 404]
    small = await effect_setup.publish("small", "invert", max_upload_bytes=10)
    assert (await ada.submit(small, video_id=video_id)).status_code == 413
    jpegs = await effect_setup.publish("jpegs", "invert", media_types=("image/jpeg",))
    assert (await ada.submit(jpegs, video_id=video_id)).status_code == 422


async def test_whoever_waits_is_answered_at_the_end_or_in_time(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    queued = await ada.submit(effect_setup.draw, properties={"width": 32}, wait=0.1)
    assert (queued.status_code, queued.json()["status"]) == (201, "queued")
    await effect_setup.work()
    job_id = queued.json()["id"]
    assert (await ada.get(f"ai-jobs/{job_id}", wait=30))["status"] == "completed"
    assert (await ada.client.get(f"/api/ai-jobs/{job_id}", params={"wait": 61})).status_code == 422


async def test_polling_with_the_etag_costs_nothing_until_something_changes(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    path = f"/api/ai-jobs/{job_id}"
    etag = (await ada.client.get(path)).headers["etag"]
    unchanged = await ada.client.get(path, headers={"If-None-Match": f'"x", {etag}'})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    async with effect_setup.fleet_setup.worker() as worker:
        job = await worker.job()
        leased = await ada.client.get(path, headers={"If-None-Match": etag})
        assert (leased.status_code, leased.json()["status"]) == (200, "processing")
        await worker.call_for(job, "heartbeat", started=True, progress={"percent": 40})
        further = await ada.client.get(path, headers={"If-None-Match": leased.headers["etag"]})
        assert (further.status_code, further.json()["progress"]) == (200, 40.0)


async def test_jobs_are_listed_page_by_page(effect_setup: EffectSetup, ada: Customer) -> None:
    made = [await ada.job(effect_setup.draw, properties={"width": 32}) for _ in range(3)]
    await ada.client.delete(f"/api/ai-jobs/{made[0]}")
    first = await ada.get("ai-jobs", limit=2)
    assert [each["id"] for each in first["jobs"]] == made[:0:-1]
    rest = await ada.get("ai-jobs", limit=2, before=first["next"])
    assert ([each["id"] for each in rest["jobs"]], rest["next"]) == ([made[0]], None)
    cancelled = await ada.get("ai-jobs", status="cancelled")
    assert [each["id"] for each in cancelled["jobs"]] == [made[0]]


async def test_why_a_job_waits_is_told(effect_setup: EffectSetup, ada: Customer) -> None:
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    assert (await ada.get(f"ai-jobs/{job_id}/why"))["why"].startswith("No worker can run the job")


class Hurried:
    """The real time, which the database has too, and what is added to it."""

    added_seconds = 0.0

    def __call__(self) -> datetime:
        return utc_now() + timedelta(seconds=self.added_seconds)


async def test_what_is_left_is_estimated_from_the_effects_history(
    databases: Databases, tmp_path: Path
) -> None:
    clock = Hurried()
    async with (
        plane_on(databases, tmp_path, clock=clock) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        ada = await effect_setup.customer()
        video_id = await ada.video()

        async def left() -> float | None:
            job = (await ada.get("ai-jobs", limit=1))["jobs"][0]
            told = (await ada.get(f"ai-jobs/{job['id']}"))["estimated_seconds_left"]
            assert (await ada.get(f"videos/{video_id}"))["estimated_seconds_left"] == (
                pytest.approx(told, abs=SLOW_SECONDS)
            )
            return None if told is None else float(told)

        async def run(seconds: float) -> None:
            async with effect_setup.fleet_setup.worker(f"w-{uuid4().hex[:8]}") as worker:
                job = await worker.job()
                await worker.call_for(job, "heartbeat", started=True)
                assert await left() == pytest.approx(typical, abs=SLOW_SECONDS)
                clock.added_seconds = seconds
                is_longer = typical is not None and seconds >= typical
                expected = None if typical is None or is_longer else typical - seconds
                assert await left() == pytest.approx(expected, abs=SLOW_SECONDS)
                assert (await worker.deliver(job)).status_code == 200
            await plane.context.deferred.flush()
            assert await left() is None
            clock.added_seconds = 0.0

        # The first tells how long it takes; then it is the median of all.
        for seconds, typical in ((600.0, None), (400.0, 600.0), (700.0, 500.0)):
            made = await ada.submit(effect_setup.invert, video_id=video_id)
            assert made.status_code == 201, made.text
            assert await left() == pytest.approx(typical, abs=SLOW_SECONDS)
            await run(seconds)


async def test_an_effect_that_is_not_published_is_not_there(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    hidden = await effect_setup.publish("hidden", "draw", is_published=False)
    assert (await ada.submit(hidden, properties={"width": 32})).status_code == 404
    assert (await ada.client.get(f"/api/effects/{hidden.id}")).status_code == 404
    listed = (await ada.get("effects"))["effects"]
    assert [each["slug"] for each in listed] == ["draw", "invert"]


async def test_a_job_keeps_the_price_that_it_was_submitted_at(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    await effect_setup.change(effect_setup.draw, price_tokens=50)
    await ada.client.delete(f"/api/ai-jobs/{job_id}")
    assert await ada.balance() == TOKENS
