"""A job's events as they happen, and batches."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
import pytest
from tests.support.server.asgi import free_listener, served, url_of
from tests.support.server.customers import PRICE, TOKENS, Customer, EffectSetup

from comfyfleet.server.http.app import create_app

PATIENCE_SECONDS = 60


@dataclass
class Event:
    id: int | None
    kind: str
    data: dict[str, Any]


def parsed(text: str) -> list[Event]:
    """As a browser reads them."""
    found = []
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines()]
        fields = {name: value for name, _, value in lines if name}
        if "event" in fields:
            number = int(fields["id"]) if "id" in fields else None
            found.append(Event(number, fields["event"], json.loads(fields["data"])))
    return found


def statuses(events: list[Event]) -> list[str]:
    return [each.data["status"] for each in events if each.kind == "status"]


@asynccontextmanager
async def reader_of(
    effect_setup: EffectSetup, customer: Customer
) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose streams can be read while they go on."""
    listener = free_listener()
    headers = {"Authorization": f"Bearer {customer.key}"}
    async with (
        served(create_app(effect_setup.plane), listener),
        httpx.AsyncClient(
            base_url=url_of(listener), headers=headers, timeout=PATIENCE_SECONDS
        ) as reader,
    ):
        yield reader


async def test_a_job_is_followed_to_its_end(effect_setup: EffectSetup, ada: Customer) -> None:
    job_id = await ada.job(effect_setup.draw)
    async with (
        effect_setup.fleet_setup.worker() as worker,
        reader_of(effect_setup, ada) as reader,
        reader.stream("GET", f"/api/ai-jobs/{job_id}/events") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        job, pieces = await worker.job(), answer.aiter_text()
        await worker.call_for(
            job, "heartbeat", started=True, progress={"percent": 40, "preview": "x"}
        )
        text = await read_until(pieces, "event: progress")
        await worker.deliver(job)
        text += "".join([piece async for piece in pieces])
    events = parsed(text)
    assert statuses(events) == ["queued", "processing", "completed"]
    assert [each.data for each in events if each.kind == "progress"] == [{"percent": 40.0}]
    assert [each.kind for each in events][-2:] == ["outputs", "status"]
    numbers = [each.id for each in events if each.id]
    assert numbers == sorted(numbers)


PREVIEW = {"node_id": "3", "content_type": "image/png", "base64": "AAAA"}


async def test_previews_are_wanted_from_a_worker_while_somebody_looks(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = await ada.job(effect_setup.draw)
    previews, listener = effect_setup.plane.context.previews, free_listener()
    headers = {"Authorization": f"Bearer {ada.key}"}
    async with (
        effect_setup.fleet_setup.worker() as worker,
        served(create_app(effect_setup.plane), listener),
        httpx.AsyncClient(base_url=url_of(listener), headers=headers, timeout=10) as client,
    ):
        job = await worker.job()
        assert job["extra_data"] == {}, "nobody looks: none are made"
        told = await worker.call_for(job, "heartbeat", started=True, preview=PREVIEW)
        assert told.json()["previews"] is False
        path = f"/api/ai-jobs/{job_id}/events"
        async with client.stream("GET", path, params={"previews": True}) as answer:
            pieces = answer.aiter_text()
            await read_until(pieces, "processing")
            told = await worker.call_for(job, "heartbeat", progress={"percent": 1}, preview=PREVIEW)
            assert told.json()["previews"] is True
            assert '"data:image/png;base64,AAAA"' in await read_until(pieces, "base64")
        await worker.deliver(job)
    assert not previews.is_watched(UUID(job_id))
    assert not previews._latest


async def test_a_job_that_is_looked_at_is_run_with_previews(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = UUID(await ada.job(effect_setup.draw))
    effect_setup.plane.context.previews.expect(job_id)
    async with effect_setup.fleet_setup.worker() as worker:
        job = await worker.job()
        assert job["extra_data"] == {"preview_method": "auto"}
        await worker.deliver(job)
    assert not effect_setup.plane.context.previews.is_watched(job_id)


async def test_a_reader_goes_on_where_it_stopped(effect_setup: EffectSetup, ada: Customer) -> None:
    job_id = await ada.job(effect_setup.draw)
    await effect_setup.work()
    path = f"/api/ai-jobs/{job_id}/events"
    events = parsed((await ada.client.get(path)).text)
    for known in range(len(events) - 1):
        last = {"Last-Event-ID": str(events[known].id)}
        assert parsed((await ada.client.get(path, headers=last)).text) == events[known + 1 :]
    end = str(events[-1].id)
    # 204 tells a browser not to come again.
    assert (await ada.client.get(path, headers={"Last-Event-ID": end})).status_code == 204
    assert (await ada.client.get(path, params={"after": end})).status_code == 204
    for wrong in ("x", "-1", str(2**64)):
        refused = await ada.client.get(path, headers={"Last-Event-ID": wrong})
        assert refused.status_code == 422, wrong


async def test_a_broken_connection_loses_nothing(effect_setup: EffectSetup, ada: Customer) -> None:
    job_id = await ada.job(effect_setup.draw)
    listener = free_listener()
    headers = {"Authorization": f"Bearer {ada.key}"}
    async with (
        served(create_app(effect_setup.plane), listener),
        httpx.AsyncClient(base_url=url_of(listener), headers=headers, timeout=10) as client,
    ):
        path = f"/api/ai-jobs/{job_id}/events"
        async with client.stream("GET", path) as answer:
            first = parsed(await until(answer, "data: "))
        assert statuses(first) == ["queued"]
        await effect_setup.work()
        rest = await client.get(path, headers={"Last-Event-ID": str(first[0].id)})
    assert statuses(parsed(rest.text)) == ["processing", "completed"]


async def until(answer: httpx.Response, wanted: str) -> str:
    return await read_until(answer.aiter_text(), wanted)


async def read_until(pieces: AsyncIterator[str], wanted: str) -> str:
    text = ""
    async for piece in pieces:
        text += piece
        if wanted in text and text.endswith("\n\n"):
            return text
    return text


async def test_a_reader_that_goes_away_breaks_no_connection_to_the_database(
    effect_setup: EffectSetup,
    ada: Customer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However often it goes, also in the middle of a look."""
    monkeypatch.setattr("comfyfleet.server.http.public.jobs.REREAD_SECONDS", 0.0)
    job_id = await ada.job(effect_setup.draw)
    listener = free_listener()
    headers = {"Authorization": f"Bearer {ada.key}"}
    async with served(create_app(effect_setup.plane), listener):
        for number in range(20):
            async with (
                httpx.AsyncClient(base_url=url_of(listener), headers=headers) as reader,
                reader.stream("GET", f"/api/ai-jobs/{job_id}/events") as answer,
            ):
                await anext(answer.aiter_text())
                await asyncio.sleep(number / 1_000)
        await asyncio.sleep(0.2)
    said = [each.getMessage() for each in caplog.records if each.name.startswith("sqlalchemy")]
    assert said == []


async def test_silence_is_filled_with_comments(
    effect_setup: EffectSetup, ada: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.server.http.public.jobs.HEARTBEAT_SECONDS", 0.0)
    job_id = await ada.job(effect_setup.draw)
    async with (
        reader_of(effect_setup, ada) as reader,
        reader.stream("GET", f"/api/ai-jobs/{job_id}/events") as answer,
    ):
        pieces = answer.aiter_text()
        text = await read_until(pieces, ": still there\n\n")
        await ada.client.delete(f"/api/ai-jobs/{job_id}")
        text += "".join([piece async for piece in pieces])
    assert statuses(parsed(text)) == ["queued", "cancelled"]


async def test_a_batch_is_one_price_and_admitted_bit_by_bit(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    items = [{"properties": {"width": 16 + each}} for each in range(7)]
    body = {"effect_id": str(effect_setup.draw.id), "items": items, "idempotency_key": "b"}
    made = await ada.client.post("/api/ai-jobs/batches", json=body)
    again = await ada.client.post("/api/ai-jobs/batches", json=body)
    other = await ada.client.post("/api/ai-jobs/batches", json={**body, "items": items[1:]})
    assert [each.status_code for each in (made, again, other)] == [201, 200, 409]
    batch = made.json()
    assert (batch["total"], batch["held"], batch["counts"]) == (7, 2, {"queued": 5})
    assert (batch["reserved_tokens"], await ada.balance()) == (7 * PRICE, TOKENS - 7 * PRICE)

    await effect_setup.work()
    path = f"ai-jobs/batches/{batch['id']}"
    seen = await ada.get(path, limit=3)
    assert (seen["held"], seen["counts"]) == (1, {"completed": 1, "queued": 5})
    assert (seen["progress"], seen["consumed_tokens"]) == (14.3, PRICE)
    rest = await ada.get(path, start=seen["next"])
    assert [len(seen["jobs"]), len(rest["jobs"]), rest["next"]] == [3, 4, None]

    cancelled = await ada.client.delete(f"/api/{path}")
    assert cancelled.json()["is_ended"]
    assert cancelled.json()["refunded_tokens"] == 6 * PRICE
    assert await ada.balance() == TOKENS - PRICE


async def test_a_batch_is_taken_as_a_whole_or_not_at_all(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    async def submit(items: list[Any]) -> httpx.Response:
        body = {"effect_id": str(effect_setup.draw.id), "items": items}
        return await ada.client.post("/api/ai-jobs/batches", json=body)

    wrong = await submit([{}, {"properties": {"width": 1}}])
    assert (wrong.status_code, wrong.json()["error"]["message"][:6]) == (422, "set 2:")
    dear = await submit([{}] * (TOKENS // PRICE + 1))
    assert dear.json()["error"]["code"] == "insufficient_tokens"
    assert (await submit([])).status_code == 422
    assert (await submit([{}] * 1001)).status_code == 422
    assert (await ada.get("ai-jobs"))["jobs"] == []
