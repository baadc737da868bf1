"""Jobs as waiting pages show them: one, a media's, and all of a user over one connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.integration.http.public.test_public_events import Event, parsed
from tests.support.server.asgi import free_listener, served, url_of
from tests.support.server.customers import PRICE, TOKENS, Customer, EffectSetup

from comfyfleet.client import Client
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.graphs.runner import read_outbox
from comfyfleet.server.http.app import create_app

TITLED = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 64, "height": 64, "color": 0},
        "_meta": {"title": "Canvas"},
    },
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfyfleet.server.http.public.progress.GATHER_SECONDS", 0.0)


class Listener:
    """A page that keeps the newest state of each job that it was told of."""

    def __init__(self, answer: httpx.Response) -> None:
        self._pieces = answer.aiter_text()
        self.events: list[Event] = []
        self._rest = ""

    async def until(self, kind: str, **wanted: Any) -> Event:
        async with asyncio.timeout(20):
            while True:
                for event in self.events:
                    if event.kind == kind and wanted.items() <= event.data.items():
                        return event
                self._rest += await anext(self._pieces)
                whole, _, self._rest = self._rest.rpartition("\n\n")
                self.events += parsed(whole)


@asynccontextmanager
async def listening(
    effect_setup: EffectSetup, customer: Customer, path: str, last: int | None = None, **query: Any
) -> AsyncIterator[Listener]:
    listener = free_listener()
    headers = {"Authorization": f"Bearer {customer.key}"}
    if last is not None:
        headers["Last-Event-ID"] = str(last)
    async with (
        served(create_app(effect_setup.plane), listener),
        httpx.AsyncClient(base_url=url_of(listener), headers=headers, timeout=20) as client,
        client.stream("GET", f"/api/{path}", params=query) as answer,
    ):
        assert answer.status_code == 200
        yield Listener(answer)


async def test_a_job_goes_through_four_stages(effect_setup: EffectSetup, ada: Customer) -> None:
    made = await effect_setup.fleet_setup.register_workflow(
        "titled", document=TITLED, properties=[]
    )
    assert made.status_code == 201, made.text
    await effect_setup.fleet_setup.assign("titled")
    effect = await effect_setup.publish("titled", title="With a title")
    job_id = await ada.job(effect)
    path = f"ai-jobs/{job_id}/progress"
    waiting = await ada.get(path)
    assert (waiting["stage"], waiting["status"]) == ("waiting", "queued")
    assert waiting["why"] == "No worker can run the job at the moment. It waits until one can."
    assert (waiting["effect_slug"], waiting["effect_title"]) == ("titled", "With a title")
    assert [each["name"] for each in waiting["stages"]] == [
        "checked", "waiting", "making", "finishing",
    ]  # fmt: skip
    async with effect_setup.fleet_setup.worker() as worker:
        job = await worker.job()
        await worker.call_for(job, "heartbeat", started=True)
        making = await ada.get(path)
        assert (making["stage"], making["progress"], making["why"]) == ("making", None, None)
        progress = {"percent": 40, "node": "1", "step": 4, "steps": 10}
        await worker.call_for(job, "heartbeat", progress=progress)
        making = await ada.get(path)
        assert (making["progress"], making["node_title"]) == (40.0, "Canvas")
        assert (making["step"], making["steps"], making["expected_progress"]) == (4, 10, None)
        await worker.call_for(job, "heartbeat", progress={"percent": 100, "node": "2"})
        finishing = await ada.get(path)
        assert (finishing["stage"], finishing["node_title"]) == ("finishing", "SaveImage")
        await worker.deliver(job)
    done = await ada.get(path)
    assert (done["status"], done["stage"], done["progress"]) == ("completed", None, 100.0)
    assert (done["refunded_tokens"], done["node"]) == (0, None)


async def test_progress_is_expected_by_the_history(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    async with effect_setup.plane.central.transaction() as tx:
        await catalog.note_durations(tx, effect_setup.draw.id, [1000.0])
    job_id = await ada.job(effect_setup.draw)
    async with effect_setup.fleet_setup.worker() as worker:
        await worker.call_for(await worker.job(), "heartbeat", started=True)
        seen = await ada.get(f"ai-jobs/{job_id}/progress")
    assert 0 <= seen["expected_progress"] < 50
    assert 500 < seen["seconds_left"] <= 1000
    assert [each["seconds"] for each in seen["stages"]][2:] == [950.0, 50.0]


async def test_an_end_tells_its_reason_and_what_came_back(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    failed = await ada.job(effect_setup.draw)
    await effect_setup.fail("RuntimeError: No face was found in this photo")
    seen = await ada.get(f"ai-jobs/{failed}/progress")
    assert (seen["status"], seen["error"]) == ("failed", "No face was found in this photo")
    assert (seen["refunded_tokens"], seen["price_tokens"]) == (PRICE, PRICE)
    cancelled = await ada.job(effect_setup.draw)
    await ada.client.delete(f"/api/ai-jobs/{cancelled}")
    seen = await ada.get(f"ai-jobs/{cancelled}/progress")
    assert (seen["status"], seen["refunded_tokens"]) == ("cancelled", PRICE)


async def test_a_medias_jobs_are_told_until_the_last_has_ended(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video_id = await ada.video()
    first = await ada.job(effect_setup.invert, video_id=video_id)
    second = await ada.job(effect_setup.invert, video_id=video_id)
    found = (await ada.get(f"videos/{video_id}/progress"))["jobs"]
    assert [each["id"] for each in found] == [second, first]
    path = f"/api/videos/{video_id}/events"
    following = asyncio.create_task(ada.client.get(path))
    await effect_setup.work()
    await ada.client.delete(f"/api/ai-jobs/{second}")
    answer = await asyncio.wait_for(following, 20)
    ends = {each.data["id"]: each.data["status"] for each in parsed(answer.text)}
    assert ends == {first: "completed", second: "cancelled"}
    found = (await ada.get(f"videos/{video_id}/progress"))["jobs"]
    assert [each["id"] for each in found] == [second], "of those that ended, the latest"
    last = max(each.id or 0 for each in parsed(answer.text))
    again = await ada.client.get(path, headers={"Last-Event-ID": str(last)})
    assert again.status_code == 204
    fresh = parsed((await ada.client.get(path)).text)
    assert [each.data["status"] for each in fresh] == ["cancelled"]


async def test_all_jobs_of_a_user_come_over_one_connection(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    before = await ada.job(effect_setup.draw)
    async with (
        listening(effect_setup, ada, "account/events", previews=True) as page,
        effect_setup.fleet_setup.worker() as worker,
    ):
        await page.until("job", id=before, status="queued")
        await page.until("wallet", balance=TOKENS - PRICE)
        later = await ada.job(effect_setup.draw)
        await page.until("job", id=later, status="queued")
        job = await worker.job()
        assert job["extra_data"]["preview_method"] == "auto", "somebody looks at all of theirs"
        progress = {"percent": 40, "preview": "data:image/png;base64,AA=="}
        await worker.call_for(job, "heartbeat", started=True, progress=progress)
        await page.until("job", id=before, status="processing", progress=40.0)
        await page.until("preview", job_id=before, preview="data:image/png;base64,AA==")
        await worker.deliver(job)
        await page.until("job", id=before, status="completed")
        await ada.client.delete(f"/api/ai-jobs/{later}")
        await page.until("job", id=later, status="cancelled", refunded_tokens=PRICE)
    told = [each for each in page.events if each.kind == "job"]
    assert all(each.id for each in told)
    assert {each.data["id"] for each in told} == {before, later}


async def test_a_graph_run_tells_previews_of_its_nodes_to_those_who_want_them(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    draw = {"id": "draw", "type": "workflow", "workflow": "draw"}
    graph = {
        "name": "one",
        "nodes": [draw, {"id": "picture", "type": "output"}],
        "connections": [{"from": "draw.output", "to": "picture.value"}],
    }
    run = (await ada.client.post("/api/graph-runs", json={"document": graph})).json()["id"]
    path = f"graph-runs/{run}/events"
    async with (
        listening(effect_setup, ada, path, previews=True) as page,
        listening(effect_setup, ada, path) as other,
        effect_setup.fleet_setup.worker() as worker,
    ):
        await page.until("progress", status="running")
        job = await worker.job()
        assert job["extra_data"]["preview_method"] == "auto"
        progress = {"percent": 40, "preview": "data:image/png;base64,AA=="}
        await worker.call_for(job, "heartbeat", started=True, progress=progress)
        seen = await page.until("preview", node_id="draw")
        assert seen.data == {
            "node_id": "draw",
            "index": [],
            "preview": "data:image/png;base64,AA==",
        }
        await worker.deliver(job)
        await read_outbox(effect_setup.plane.graphs, effect_setup.plane.pools["main"])
        await page.until("end", status="completed")
        await other.until("end", status="completed")
    assert [each.kind for each in page.events].count("preview") == 1
    assert "preview" not in {each.kind for each in other.events}
    assert not effect_setup.plane.context.previews.is_watched(ada.user_id)


async def test_after_a_break_the_ends_that_were_missed_are_told(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = await ada.job(effect_setup.draw)
    async with listening(effect_setup, ada, "account/events") as page:
        last = (await page.until("job", id=job_id, status="queued")).id
    await effect_setup.work()
    async with listening(effect_setup, ada, "account/events", last) as page:
        await page.until("job", id=job_id, status="completed")
    async with listening(effect_setup, ada, "account/events") as page:
        await page.until("wallet", balance=TOKENS - PRICE)
        assert [each for each in page.events if each.kind == "job"] == []


async def test_nobody_hears_of_anothers_jobs(effect_setup: EffectSetup, ada: Customer) -> None:
    colleague = await effect_setup.customer(ada.tenant_id)
    async with listening(effect_setup, colleague, "account/events") as page:
        await page.until("wallet", balance=TOKENS)
        await ada.job(effect_setup.draw)
        own = await colleague.job(effect_setup.draw)
        await page.until("job", id=own)
    assert {each.data["id"] for each in page.events if each.kind == "job"} == {own}
    assert (await colleague.get("account/progress"))["jobs"][0]["id"] == own


async def test_the_client_follows_jobs(effect_setup: EffectSetup, ada: Customer) -> None:
    video_id = await ada.video()
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    async with Client("http://test", ada.key, transport=ada.client._transport) as client:
        assert [str(each.id) for each in await client.progress()] == [job_id]
        assert [str(each.id) for each in await client.progress(video_id)] == [job_id]
        handle = await client.job(job_id)
        assert (await handle.progress()).stage == "waiting"
        await effect_setup.work()
        async with aclosing(client.follow(video_id)) as told:
            seen = [each.status async for each in told]
    assert seen == ["completed"]


GRAPH = {
    "name": "Draw",
    "nodes": [
        {"id": "draw", "type": "workflow", "effect": "draw", "properties": {"width": 32}},
        {"id": "picture", "type": "output"},
    ],
    "connections": [{"from": "draw.output", "to": "picture.value"}],
}


async def test_the_list_of_graph_runs_is_told_as_it_changes(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    colleague = await effect_setup.customer(ada.tenant_id)
    graph_id = (await ada.client.post("/api/graphs", json=GRAPH)).json()["id"]
    other = await ada.client.post("/api/graphs", json={**GRAPH, "name": "Other"})
    async with (
        listening(effect_setup, ada, "graph-runs/events", graph_id=graph_id) as page,
        listening(effect_setup, colleague, "graph-runs/events") as elsewhere,
    ):
        hidden = await ada.client.post(f"/api/graphs/{other.json()['id']}/runs", json={})
        theirs = await colleague.client.post(f"/api/graphs/{graph_id}/runs", json={})
        started = await ada.client.post(f"/api/graphs/{graph_id}/runs", json={})
        run_id = started.json()["id"]
        await page.until("run", id=run_id, status="running", name="Draw", tokens=PRICE)
        await ada.client.post(f"/api/graph-runs/{run_id}/cancel")
        await page.until("run", id=run_id, status="cancelled")
        await elsewhere.until("run", id=theirs.json()["id"], status="running")
    assert hidden.status_code == 201
    assert {each.data["id"] for each in page.events} == {run_id}
    assert {each.data["id"] for each in elsewhere.events} == {theirs.json()["id"]}
