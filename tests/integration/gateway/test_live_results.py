"""Results as they come: a client hears of a node's files, and can view them, while its run goes on."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from tests.support.backends.engine_client import EngineClient
from tests.support.backends.prompts import node
from tests.support.databases.factory import Databases
from tests.support.server.gateway import PROMPT, GatewayInProcess, GatewayUser, gateway_on

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE
from comfyfleet.transport.sse import EventParser, ServerEvent

T = TypeVar("T")
# Far longer than any test looks at it: each run is stopped.
SLOW = node("ComfyfleetSteps", steps=1000, step_ms=60, previews=False, image=["1", 0])
LONG = {**PROMPT, "3": SLOW, "4": node("PreviewImage", images=["3", 0])}
FAILS = {
    **LONG,
    "3": node("ComfyfleetFail", fail=True, message="no", after_ms=1500, value=["1", 0]),
}
FAILS["4"] = node("PreviewImage", images=["3", 0])
SOON = {**LONG, "3": {**SLOW, "inputs": {**SLOW["inputs"], "steps": 40}}}


@pytest.fixture
async def server(databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    async with gateway_on(databases, tmp_path) as server:
        yield server


async def talk_as(user: GatewayUser, say: Callable[[EngineClient], T]) -> T:
    def run() -> T:
        with user.open_engine_client() as talk:
            return say(talk)

    return await asyncio.to_thread(run)


def view(talk: EngineClient, picture: dict[str, Any]) -> httpx.Response:
    return talk.http.get("/view", params=picture)


def pictures_in(entry: dict[str, Any], node_id: str = "2") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = entry["outputs"].get(node_id, {}).get("images", [])
    return found


async def test_a_file_can_be_viewed_when_its_node_has_ended(server: GatewayInProcess) -> None:
    def say(talk: EngineClient) -> None:
        ear = talk.listen("me")
        prompt_id = talk.submit(SOON, client_id="me")
        (told,) = ear.wait("executed", {"node": "2"})["output"]["images"]
        assert talk.http.get(f"/history/{prompt_id}").json() == {}, "the run goes on"
        first = view(talk, told)
        assert first.content.startswith(b"\x89PNG")
        job = talk.http.get(f"/api/v2/jobs/{prompt_id}").json()
        assert (job["status"], [each["name"] for each in job["outputs"]]) == (
            "running",
            [told["filename"]],
        )
        ear.wait("execution_success", {"prompt_id": prompt_id})
        executed = [each[1]["node"] for each in ear.events if each[0] == "executed"]
        assert sorted(executed) == sorted({*executed}), "each is told once"
        assert pictures_in(talk.history(prompt_id)) == [told]
        assert view(talk, told).content == first.content
        ended = talk.http.get(f"/api/v2/jobs/{prompt_id}").json()
        assert ended["outputs"][0]["id"] == job["outputs"][0]["id"], "it is the same file"
        assert len(ended["outputs"]) == 2

    await talk_as(await server.new_user(), say)


async def test_equal_pictures_of_several_nodes_are_several_files(server: GatewayInProcess) -> None:
    steps = {"steps": 10, "step_ms": 60, "previews": False}
    prompt = {
        "1": PROMPT["1"],
        "2": node("PreviewImage", images=["1", 0]),
        "3": node("ComfyfleetSteps", image=["1", 0], **steps),
        "4": node("PreviewImage", images=["3", 0]),
        "5": node("ComfyfleetSteps", image=["3", 0], **steps),
        "6": node("PreviewImage", images=["5", 0]),
    }

    def say(talk: EngineClient) -> None:
        ear = talk.listen("me")
        prompt_id = talk.submit(prompt, client_id="me")
        ear.wait("executing", {"node": None, "prompt_id": prompt_id})
        entry = talk.history(prompt_id)
        assert entry["status"]["status_str"] == "success"
        executed = [data for kind, data in ear.events if kind == "executed"]
        told = {data["node"]: data["output"].get("images", []) for data in executed}
        pictures = [pictures_in(entry, node_id) for node_id in ("2", "4", "6")]
        assert pictures == [told[node_id] for node_id in ("2", "4", "6")]
        assert len({picture["filename"] for (picture,) in pictures}) == 3
        contents = {view(talk, picture).content for (picture,) in pictures}
        assert len(contents) == 1

    await talk_as(await server.new_user(), say)


@pytest.mark.parametrize("how", ["fails", "interrupted", "cancelled by an operator"])
async def test_a_run_that_is_not_completed_keeps_what_it_has_made(
    server: GatewayInProcess, how: str
) -> None:
    def say(talk: EngineClient) -> None:
        ear = talk.listen("me")
        prompt_id = talk.submit(FAILS if how == "fails" else LONG, client_id="me")
        (told,) = ear.wait("executed", {"node": "2"})["output"]["images"]
        if how == "interrupted":
            talk.http.post("/interrupt", json={"prompt_id": prompt_id})
        elif how != "fails":
            cancel_running(server)
        end = "execution_error" if how == "fails" else "execution_interrupted"
        ear.wait(end, {"prompt_id": prompt_id})
        ear.wait("executing", {"node": None, "prompt_id": prompt_id})
        entry = talk.history(prompt_id)
        assert entry["status"]["status_str"] == "error"
        assert entry["status"]["messages"][-1][0] == end
        assert pictures_in(entry) == [told]
        assert view(talk, told).content.startswith(b"\x89PNG")
        job = talk.http.get(f"/api/v2/jobs/{prompt_id}").json()
        assert [each["name"] for each in job["outputs"]] == [told["filename"]]
        assert job["status"] == ("failed" if how == "fails" else "canceled")
        assert talk.http.get(job["outputs"][0]["url"]).content.startswith(b"\x89PNG")

    await talk_as(await server.new_user(), say)


def cancel_running(server: GatewayInProcess) -> None:
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    path = f"{server.url}/api/admin/dispatches?status=leased"
    (row,) = httpx.get(path, headers=headers).json()["dispatches"]
    server.admin(f"/dispatches/{row['id']}/cancel")


async def set_terms(server: GatewayInProcess, **terms: Any) -> None:
    async with server.plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, FLEET, STAGE)
        await catalog.set_prompt_terms(
            tx, fleet, FleetPrompts(allows_unknown=True, **terms), now=server.plane.clock()
        )
    server.plane.context.caches.gateway.clear()  # kept for a second


@pytest.mark.parametrize("terms", [{"price_tokens": 5}, {"price_per_second": 1}])
async def test_what_costs_something_is_not_shown_before_it_is_paid(
    server: GatewayInProcess, terms: dict[str, Any]
) -> None:
    await set_terms(server, **terms)
    user = await server.new_user(tokens=1000)

    def say(talk: EngineClient) -> None:
        ear = talk.listen("me")
        # Its pictures come by the socket alone.
        sent = {**FAILS, "5": node("SaveImageWebsocket", images=["1", 0])}
        prompt_id = talk.submit(sent, client_id="me")
        ear.wait("execution_error", {"prompt_id": prompt_id})
        ear.wait("executing", {"node": None, "prompt_id": prompt_id})
        assert "executed" not in ear.names()
        assert not [each for each in ear.events if isinstance(each, dict)], "no picture"
        assert talk.history(prompt_id)["outputs"] == {}
        shown = {"filename": "ComfyUI_00001_.png", "type": "output"}
        assert view(talk, shown).status_code == 404
        assert talk.http.get("/api/v2/assets").status_code in (404, 405)
        # One that is paid for shows what it has made.
        paid = talk.submit(PROMPT, client_id="me")
        (told,) = ear.wait("executed", {"prompt_id": paid})["output"]["images"]
        assert view(talk, told).content.startswith(b"\x89PNG")

    await talk_as(user, say)


async def test_a_run_that_takes_too_long_is_told_as_an_interruption(
    server: GatewayInProcess,
) -> None:
    await set_terms(server, run_limit_seconds=2)

    def say(talk: EngineClient) -> None:
        ear = talk.listen("me")
        prompt_id = talk.submit(LONG, client_id="me")
        ear.wait("execution_interrupted", {"prompt_id": prompt_id, "node_id": "3"})
        ear.wait("executing", {"node": None, "prompt_id": prompt_id})
        entry = talk.history(prompt_id)
        assert entry["status"]["messages"][-1][0] == "execution_interrupted"
        assert len(pictures_in(entry)) == 1
        job = talk.http.get(f"/api/v2/jobs/{prompt_id}").json()
        assert job["status"] == "expired"
        assert "longer than its limit" in job["error"]["message"]
        for status, found in (("expired", [prompt_id]), ("succeeded", []), ("failed", [])):
            listed = talk.http.get("/api/v2/jobs", params={"status": status}).json()["jobs"]
            assert [each["id"] for each in listed] == found

    await talk_as(await server.new_user(), say)


def read_events(
    http: httpx.Client,
    prompt_id: str,
    is_enough: Callable[[list[ServerEvent]], bool],
    **headers: str,
) -> list[ServerEvent]:
    parser, found = EventParser(), list[ServerEvent]()
    with http.stream("GET", f"/api/v2/jobs/{prompt_id}/events", headers=headers) as stream:
        for piece in stream.iter_bytes():
            found += parser.feed(piece)
            if is_enough(found):
                break
    return found


def names_of(events: list[ServerEvent]) -> list[str]:
    return [event.name for event in events]


async def test_events_of_v2_tell_an_output_when_its_node_has_ended(
    server: GatewayInProcess,
) -> None:
    def say(talk: EngineClient) -> None:
        prompt_id = talk.submit(LONG, client_id="me")
        first = read_events(talk.http, prompt_id, lambda told: "output" in names_of(told))
        output = json.loads(first[names_of(first).index("output")].data)
        assert output["name"] == "ComfyUI_00001_.png"
        assert talk.http.get(output["url"]).content.startswith(b"\x89PNG")
        ended = talk.http.post(f"/api/v2/jobs/{prompt_id}/cancel").json()
        assert ended["status"] in ("canceling", "canceled")
        again = read_events(talk.http, prompt_id, lambda told: False)
        assert names_of(again).count("output") == 1
        assert json.loads(again[-1].data) == {"status": "canceled"}
        after = [event.id for event in again[: names_of(again).index("output") + 2] if event.id]
        rest = read_events(talk.http, prompt_id, lambda told: False, **{"Last-Event-ID": after[-1]})
        assert "output" not in names_of(rest), "it was told before"

    await talk_as(await server.new_user(), say)


async def test_a_job_is_canceling_until_its_worker_has_stopped_it(
    server: GatewayInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the worker hears of it only after it was looked at."""
    pushed: list[Any] = []
    monkeypatch.setattr(server.plane.queue, "push", pushed.append)
    user = await server.new_user()

    def say(talk: EngineClient) -> str:
        ear = talk.listen("me")
        prompt_id = talk.submit(LONG, client_id="me")
        ear.wait("executed", {"node": "2"})
        answer = talk.http.post(f"/api/v2/jobs/{prompt_id}/cancel").json()
        assert answer["status"] in ("canceling", "canceled")
        events = read_events(talk.http, prompt_id, lambda told: False)
        statuses = [json.loads(each.data)["status"] for each in events if each.name == "status"]
        assert statuses[-1] == "canceled"
        return str(answer["status"])

    assert await talk_as(user, say) == "canceling"
