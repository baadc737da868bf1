"""Which backends get the calls of custom nodes' routes, and what runs where after an upload."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from tests.support.backends.custom_node import FILES, PREFIX, CustomNode
from tests.support.backends.prompts import node as prompt_node
from tests.support.databases.factory import Databases
from tests.support.server.gateway import (
    PROMPT,
    GatewayInProcess,
    GatewayUser,
    gateway_on,
    history_entry,
    until,
    worker_settings,
)
from tests.support.workers.workers import running_worker

from comfyfleet.server.gateway import previous_backends
from comfyfleet.server.gateway.offers import offer_cache
from comfyfleet.server.gateway.previous_backends import RouteTargets
from comfyfleet.server.http.gateway import passthrough
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE, embedded_fleet_secret

FILE = f"{FILES}lora.safetensors"
SOON = timedelta(seconds=60)


@dataclass
class Stage:
    gateway: GatewayInProcess
    nodes: dict[str, CustomNode]  # by worker
    user: GatewayUser

    async def run(self, http: httpx.AsyncClient, worker_id: str) -> None:
        """Runs a prompt on this worker: it is the only one that may take it."""
        others = [each for each in self.nodes if each != worker_id]
        for other in others:
            await self.order(f"/workers/{other}/drain")
        await run(http)
        for other in others:
            await self.order(f"/workers/{other}/undrain")
        await until(self.all_poll)
        offer_cache(self.gateway.plane).forget()  # it may have been read while they were drained

    async def order(self, path: str) -> None:
        await asyncio.to_thread(self.gateway.admin, path)

    async def all_poll(self) -> bool:
        queue, routes = self.gateway.plane.queue, self.gateway.plane.routes
        is_ready = queue.parked() == len(self.nodes)
        return is_ready and len(routes._waiters) in (0, len(self.nodes))

    def calls(self) -> dict[str, list[str]]:
        return {worker_id: node.methods() for worker_id, node in self.nodes.items()}

    def forget_calls(self) -> None:
        for node in self.nodes.values():
            node.asked.clear()


async def run(http: httpx.AsyncClient, **more: object) -> None:
    answer = await http.post("/prompt", json={"prompt": PROMPT, **more})
    assert answer.status_code == 200, answer.text
    await until(lambda: history_entry(http, answer.json()["prompt_id"]))


@contextlib.asynccontextmanager
async def stage_on(
    databases: Databases, folder: Path, *, is_reached: bool = False
) -> AsyncIterator[Stage]:
    """Two backends, which the control plane reaches itself or by their workers."""
    nodes = {name: CustomNode(name=name) for name in ("w1", "w2")}
    async with contextlib.AsyncExitStack() as stack:
        urls = {name: stack.enter_context(node.served()).url for name, node in nodes.items()}
        reached = urls if is_reached else None
        gateway = await stack.enter_async_context(
            gateway_on(databases, folder, engines=0, reached=reached)
        )
        secret = await embedded_fleet_secret(gateway.plane, folder)
        for name, url in urls.items():
            settings = worker_settings(gateway.url, secret, url, folder, name)
            if not is_reached:
                settings = replace(settings, passthrough=(PREFIX,))
            await stack.enter_async_context(running_worker(settings))
        stage = Stage(gateway, nodes, await gateway.new_user())
        await until(stage.all_poll)
        offer_cache(gateway.plane).forget()  # it may have been read before both were there
        path = f"{gateway.url}/api/admin/fleets/{FLEET}/{STAGE}/prompts"
        headers = {"Authorization": f"Bearer {gateway.admin_key}"}
        async with httpx.AsyncClient(headers=headers) as admin:
            done = await admin.put(path, json={"passthrough": [PREFIX], "allows_unknown": True})
        assert done.status_code == 200, done.text
        matcher = gateway.plane.queue._matcher
        matcher._rules = replace(matcher._rules, preferred_max_wait=SOON)
        yield stage


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators' changes count at once, and slow machines change nothing."""
    monkeypatch.setattr(passthrough, "PREFIXES_SECONDS", -1.0)
    monkeypatch.setattr(passthrough, "TARGET_PICKUP_SECONDS", 30.0)
    monkeypatch.setattr(passthrough, "OTHERS_SECONDS", 30.0)


@pytest.fixture(params=["by workers", "directly"])
async def stage(
    request: pytest.FixtureRequest, databases: Databases, tmp_path: Path
) -> AsyncIterator[Stage]:
    async with stage_on(databases, tmp_path, is_reached=request.param == "directly") as stage:
        yield stage


async def test_a_get_goes_to_the_backend_of_the_last_prompt_and_then_to_earlier_ones(
    stage: Stage,
) -> None:
    async with stage.user.http_async() as http:
        await stage.run(http, "w1")
        await stage.run(http, "w2")
        stage.nodes["w1"].files[FILE] = b"one"
        answer = await http.get(FILE)
        assert (answer.status_code, answer.content) == (200, b"one")
        assert stage.calls() == {"w1": ["GET"], "w2": ["GET"]}
        stage.forget_calls()
        stage.nodes["w2"].files[FILE] = b"two"
        assert (await http.get(FILE)).content == b"two"
        assert stage.calls() == {"w1": [], "w2": ["GET"]}
        assert (await http.get(f"{FILES}none")).status_code == 404


async def test_a_get_finds_what_a_prompt_has_made_that_still_runs(stage: Stage) -> None:
    slow = {**PROMPT, "3": prompt_node("ComfyfleetSteps", steps=1000, step_ms=60, previews=False)}
    async with stage.user.http_async() as http:
        await stage.run(http, "w2")
        await stage.order("/workers/w2/drain")
        answer = await http.post("/prompt", json={"prompt": slow})
        assert answer.status_code == 200, answer.text
        await until(lambda: is_running(http))
        await stage.order("/workers/w2/undrain")
        stage.nodes["w1"].files[FILE] = b"picture"
        found = await http.get(FILE)
        await http.post("/interrupt", json={})
        await until(lambda: history_entry(http, answer.json()["prompt_id"]))
    assert (found.status_code, found.content) == (200, b"picture")
    assert stage.calls() == {"w1": ["GET"], "w2": ["GET"]}


async def is_running(http: httpx.AsyncClient) -> bool:
    return bool((await http.get("/queue")).json()["queue_running"])


async def test_another_users_prompts_decide_nothing(stage: Stage) -> None:
    other = await stage.gateway.new_user()
    async with stage.user.http_async() as mine, other.http_async() as theirs:
        await stage.run(mine, "w1")
        await stage.run(theirs, "w2")
        await mine.get(FILE)
    assert stage.calls() == {"w1": ["GET"], "w2": []}


async def test_prompts_of_more_than_an_hour_ago_decide_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage.user.http_async() as http:
        await stage.run(http, "w1")
        await stage.run(http, "w2")
        monkeypatch.setattr(previous_backends, "RUNS_COUNT_FOR", timedelta(hours=-1))
        await http.get(FILE)
    assert sum(len(methods) for methods in stage.calls().values()) == 1


async def test_a_change_goes_to_every_backend_and_the_preferred_one_answers(stage: Stage) -> None:
    async with stage.user.http_async() as http:
        for preferred in ("w1", "w2"):
            await stage.run(http, preferred)
            answer = await http.put(FILE, content=b"data")
            assert (answer.status_code, answer.text) == (201, preferred)
            assert all(node.files == {FILE: b"data"} for node in stage.nodes.values())
        stage.nodes["w1"].files[FILE] = b"other"
        assert (await http.delete(FILE)).content == b"data"
        assert not any(node.files for node in stage.nodes.values())


async def test_in_a_large_fleet_only_the_preferred_backend_gets_a_change(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(previous_backends, "TARGETS_MAX", 1)
    async with stage.user.http_async() as http:
        assert (await http.put(FILE, content=b"data")).status_code == 201
        assert sum(len(methods) for methods in stage.calls().values()) == 1
        for preferred in ("w1", "w2"):
            await stage.run(http, preferred)
            stage.forget_calls()
            assert (await http.put(FILE, content=b"data")).text == preferred
            assert stage.calls()[preferred] == ["PUT"]
            assert sum(len(methods) for methods in stage.calls().values()) == 1


async def test_the_next_prompt_runs_on_a_backend_that_accepted_the_upload(stage: Stage) -> None:
    async with stage.user.http_async() as http:
        await stage.run(http, "w1")
        stage.nodes["w1"].refuses_files = True
        assert (await http.put(FILE, content=b"data")).status_code == 507
        await until(stage.all_poll)  # only a free backend is preferred
        await run(http)
        assert await ran_on(stage) == {"w1": 1, "w2": 1}
        stage.nodes["w1"].refuses_files = False
        stage.nodes["w2"].refuses_files = True
        await until(stage.all_poll)
        assert (await http.put(FILE, content=b"data")).status_code == 507
        await until(stage.all_poll)  # only a free backend is preferred
        await run(http)
        assert await ran_on(stage) == {"w1": 2, "w2": 1}


async def ran_on(stage: Stage) -> dict[str, int]:
    found = {}
    for worker_id, node in stage.nodes.items():
        assert node.engine is not None
        found[worker_id] = len(node.engine.history.page())
    return found


async def test_a_worker_that_passes_nothing_on_is_not_waited_for(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passthrough, "TARGET_PICKUP_SECONDS", 0.1)
    async with stage_on(sqlite_databases, tmp_path) as stage, stage.user.http_async() as http:
        secret = await embedded_fleet_secret(stage.gateway.plane, tmp_path)
        node = CustomNode(name="w0")
        with node.served() as served:
            settings = worker_settings(stage.gateway.url, secret, served.url, tmp_path, "w0")
            async with running_worker(settings):
                await until(lambda: is_online(stage, "w0"))
                assert (await http.put(FILE, content=b"data")).text == "w1"
                assert (await http.get(FILE)).content == b"data"
        assert node.asked == []


async def is_online(stage: Stage, worker_id: str) -> bool:
    return stage.gateway.plane.queue.parked() == len(stage.nodes) + 1


def test_all_backends_get_a_change_up_to_the_limit() -> None:
    few = RouteTargets(["b"], ["a", "c"])
    assert few.to_change == ["b", "a", "c"]
    many = [f"w{number}" for number in range(previous_backends.TARGETS_MAX)]
    assert len(RouteTargets([], many).to_change) == previous_backends.TARGETS_MAX
    assert RouteTargets(["b", "a"], many).to_change == ["b"]
    assert RouteTargets([], [*many, "more"]).to_change == []
    assert len(RouteTargets([*many, "more"], []).to_read) == previous_backends.TARGETS_MAX
