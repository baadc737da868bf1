"""Models and node packs that appear on a backend are known when clients ask for them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.backends.nodes import node_type
from tests.support.databases.factory import Databases
from tests.support.server.gateway import (
    GatewayInProcess,
    gateway_on,
    history_entry,
    until,
    worker_settings,
)
from tests.support.workers.workers import running_worker

from comfyfleet.api.worker import HeartbeatAnswer
from comfyfleet.engine import serve_in_thread
from comfyfleet.engine.node import EngineNodeType, NodeResult
from comfyfleet.engine.nodes import registry
from comfyfleet.server.gateway import freshness
from comfyfleet.server.maintenance.embedded_fleet import embedded_fleet_secret
from comfyfleet.worker import requested_facts, worker

LOADER = "LoraLoader"  # of ComfyUI, so that its list is checked by the gateway
FIRST, SECOND = "first.safetensors", "second.safetensors"


def nodes_with(*models: str) -> dict[str, EngineNodeType]:
    loader = node_type(
        LOADER,
        lambda context, lora_name: NodeResult(()),
        {"lora_name": [list(models), {}]},
        outputs=(),
        output_node=True,
    )
    return {**registry(), LOADER: loader}


def prompt(model: str) -> dict[str, Any]:
    return {"prompt": {"1": {"class_type": LOADER, "inputs": {"lora_name": model}}}}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on how fast this machine is, and nothing is read unless it is wanted."""
    monkeypatch.setattr(worker, "FACTS_SECONDS", 3600.0)
    monkeypatch.setattr(requested_facts, "FACTS_SECONDS_MIN", 0.0)
    monkeypatch.setattr(freshness, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(freshness, "LIST_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(freshness, "QUERY_SECONDS", 60.0)


@pytest.fixture
async def server(databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    async with gateway_on(databases, tmp_path, nodes=nodes_with(FIRST)) as server:
        yield server


def install(server: GatewayInProcess) -> None:
    server.engines[0].engine.nodes = nodes_with(FIRST, SECOND)


async def choices(http: httpx.AsyncClient, path: str = f"/object_info/{LOADER}") -> list[str]:
    info = (await http.get(path)).json()[LOADER]
    return list(info["input"]["required"]["lora_name"][0])


async def test_a_new_model_is_in_the_first_lists_that_are_asked_for(
    server: GatewayInProcess,
) -> None:
    async with (await server.new_user()).http_async() as http:
        assert await choices(http) == [FIRST]
        install(server)
        assert await choices(http) == [FIRST, SECOND]
        server.engines[0].engine.nodes = nodes_with("third.safetensors")
        assert await choices(http, "/object_info") == ["third.safetensors"]
        server.engines[0].engine.nodes = nodes_with(SECOND)
        assert (await http.get("/models/loras")).json() == [SECOND]
        server.engines[0].engine.nodes = nodes_with(FIRST)
        listed = (await http.get("/experiment/models/loras")).json()
        assert listed == [{"name": FIRST, "pathIndex": 0}]


async def test_a_prompt_with_a_new_model_runs_and_one_with_an_unknown_model_is_refused(
    server: GatewayInProcess,
) -> None:
    async with (await server.new_user()).http_async() as http:
        assert await choices(http) == [FIRST]
        install(server)
        accepted = await http.post("/prompt", json=prompt(SECOND))
        assert accepted.status_code == 200, accepted.text
        prompt_id = accepted.json()["prompt_id"]
        await until(lambda: history_entry(http, prompt_id))
        entry = await history_entry(http, prompt_id)
        assert entry["status"]["status_str"] == "success"
        refused = await http.post("/prompt", json=prompt("none.safetensors"))
        assert refused.status_code == 400
        (error,) = refused.json()["node_errors"]["1"]["errors"]
        assert error["type"] == "value_not_in_list"


async def test_a_list_does_not_wait_for_a_worker_that_does_not_answer(
    server: GatewayInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (await server.new_user()).http_async() as http:
        assert await choices(http) == [FIRST]
        # The worker has just asked its backend, and asks again much later.
        monkeypatch.setattr(requested_facts, "FACTS_SECONDS_MIN", 3600.0)
        monkeypatch.setattr(freshness, "LIST_WAIT_SECONDS", 0.1)
        install(server)
        assert await choices(http) == [FIRST]


async def test_a_list_that_was_just_read_is_not_read_again(
    server: GatewayInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (await server.new_user()).http_async() as http:
        assert await choices(http) == [FIRST]
        monkeypatch.setattr(freshness, "FRESH_SECONDS", 3600.0)
        install(server)
        assert await choices(http) == [FIRST]


async def test_a_list_uses_what_workers_have_just_reported_to_another_process(
    server: GatewayInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (await server.new_user()).http_async() as http:
        assert await choices(http) == [FIRST]
        monkeypatch.setattr(freshness, "FRESH_SECONDS", 3600.0)
        queries = freshness.freshness_of(server.plane)._queries
        queries.clear()  # as if another process had made the query
        assert await choices(http) == [FIRST]
        assert not queries


async def test_the_backend_of_a_worker_at_another_control_plane_is_asked(
    postgres_databases: Databases, tmp_path: Path
) -> None:
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
        "storage_url": f"file://{tmp_path / 'objects'}",
    }
    async with (
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as server,
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as other,
    ):
        secret = await embedded_fleet_secret(other.plane, tmp_path)
        user = await server.new_user()
        with serve_in_thread(nodes=nodes_with(FIRST)) as engine:
            settings = worker_settings(other.url, secret, engine.url, tmp_path, "w1")
            async with running_worker(settings), user.http_async() as http:
                await asyncio.to_thread(server.wait_until_ready, user)
                assert await choices(http) == [FIRST]
                engine.engine.nodes = nodes_with(FIRST, SECOND)
                assert await choices(http) == [FIRST, SECOND]


def test_a_heartbeat_that_waits_is_answered_for_such_a_request() -> None:
    wanted = {"tokens": ["a"]}
    assert HeartbeatAnswer().is_without_orders
    assert not HeartbeatAnswer.model_validate({"facts_wanted": wanted}).is_without_orders
