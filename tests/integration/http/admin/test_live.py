"""Operators watch what changes, as long as their key is valid, and not without number."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener, served, url_of
from tests.support.server.control_plane import ADMIN_KEY, plane_on
from tests.support.server.customers import EffectSetup, effect_setup_on
from tests.support.workers.memory_plane import eventually

from comfyfleet.server.http.admin import overview
from comfyfleet.server.http.admin.overview import ConsoleSnapshot, events_between
from comfyfleet.server.http.app import create_app

PATIENCE_SECONDS = 60


class Scene:
    def __init__(self, setup: EffectSetup, url: str, app: Any) -> None:
        self.setup, self.url, self.app = setup, url, app

    @asynccontextmanager
    async def watching(self, key: str = ADMIN_KEY) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            httpx.AsyncClient(base_url=self.url, headers=headers, timeout=None) as client,  # noqa: S113
            client.stream("GET", "/api/admin/events") as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield events_in(answer)


async def events_in(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    kind = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


async def until_job(events: AsyncIterator[tuple[str, Any]], job_id: str, **wanted: Any) -> Any:
    async for kind, data in events:
        for job in data["jobs"] if kind == "jobs" else ():
            if job["id"] == job_id and wanted.items() <= job.items():
                return job
    raise AssertionError("the stream has ended")


@pytest.fixture
async def scene(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    monkeypatch.setattr(overview, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(overview, "COUNT_SECONDS", 0.02)
    monkeypatch.setattr(overview, "KEY_SECONDS", 0.05)
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as setup:
        listener, app = free_listener(), create_app(plane)
        async with served(app, listener):
            yield Scene(setup, url_of(listener), app)


async def test_a_job_is_followed_from_its_submit_to_its_end(scene: Scene) -> None:
    ada = await scene.setup.customer()
    async with scene.watching() as events, scene.setup.fleet_setup.worker("gpu-7") as worker:
        job_id = await ada.job(scene.setup.draw)
        assert (await until_job(events, job_id, status="queued"))["workflow"] == "draw"
        job = await worker.job()
        await worker.call_for(job, "heartbeat", started=True, progress={"percent": 40, "node": "2"})
        leased = await until_job(events, job_id, status="leased", percent=40)
        assert (leased["worker_id"], leased["node"]) == ("gpu-7", "2")
        await worker.deliver(job)
        assert (await until_job(events, job_id, status="completed"))["ended_at"]


async def test_counts_workers_and_alerts_are_told_first_and_when_they_change(scene: Scene) -> None:
    ada = await scene.setup.customer()
    async with scene.watching() as events:
        await ada.job(scene.setup.draw)
        seen: dict[str, Any] = {}
        async for kind, data in events:
            seen[kind] = data
            if {"alerts", "counts"} <= seen.keys() and seen["counts"]["queued"] == 1:
                break
        await scene.setup.fleet_setup.register("gpu-9")
        async for kind, data in events:
            if kind == "workers" and data["workers"]:
                break
        else:
            raise AssertionError("the stream has ended")
    (worker,) = data["workers"]
    assert (worker["worker_id"], worker["state"]) == ("gpu-9", "online")


async def test_what_is_audited_is_told_by_the_newest_entry(scene: Scene) -> None:
    admin = scene.setup.fleet_setup.admin
    async with scene.watching() as events:
        await admin.post("/api/admin/tenants", json={"name": "Ada's films"})
        entries = (await admin.get("/api/admin/audit?action=create_tenant")).json()["entries"]
        async for kind, data in events:
            if kind == "audit" and data["newest"] >= entries[0]["id"]:
                break
        else:
            raise AssertionError("the stream has ended")


async def test_a_stream_ends_with_the_key_that_opened_it(scene: Scene) -> None:
    admin = scene.setup.fleet_setup.admin
    made = await admin.post("/api/admin/operators", json={"name": "ada", "role": "viewer"})
    async with scene.watching(made.json()["key"]) as events:
        await anext(events)
        await admin.post("/api/admin/operators/ada/revoke")
        async for _ in events:
            pass


async def test_a_browsers_stream_ends_with_its_operator(scene: Scene) -> None:
    admin = scene.setup.fleet_setup.admin
    made = await admin.post("/api/admin/operators", json={"name": "bob", "role": "owner"})
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        httpx.AsyncClient(base_url=scene.url, timeout=None) as browser,  # noqa: S113
    ):
        signed_in = await browser.post("/api/session", json={"key": made.json()["key"]})
        assert signed_in.json()["operator"] == "operator:bob"
        async with browser.stream("GET", "/api/admin/events") as answer:
            assert answer.status_code == 200, await answer.aread()
            events = events_in(answer)
            await anext(events)
            await admin.post("/api/admin/operators/bob/revoke")
            async for _ in events:
                pass
        assert (await browser.get("/api/admin/tenants")).status_code == 401


async def test_nothing_is_read_when_nobody_watches_and_streams_are_bounded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "STREAMS_PER_OPERATOR_MAX", 1)
    async with scene.watching() as events:
        await anext(events)
        feed = scene.app.state.console_feed
        assert feed._task is not None
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=scene.url, headers=headers) as client:
            assert (await client.get("/api/admin/events")).status_code == 429
    await eventually(lambda: feed._task is None)
    assert feed.snapshot == ConsoleSnapshot()


def test_a_slow_reader_is_told_the_newest_state_only() -> None:
    first = ConsoleSnapshot(
        jobs={"a": {"id": "a", "percent": 1}}, workers={"w": {"state": "online"}}
    )
    last = ConsoleSnapshot(
        jobs={"a": {"id": "a", "percent": 90}, "b": {"id": "b"}},
        counts={"queued": 1},
        newest_audit=7,
    )
    assert list(events_between(first, first)) == []
    assert list(events_between(first, last)) == [
        ("counts", {"queued": 1}),
        ("jobs", {"jobs": [{"id": "a", "percent": 90}, {"id": "b"}]}),
        ("workers", {"workers": [], "gone": ["w"]}),
        ("audit", {"newest": 7}),
    ]
