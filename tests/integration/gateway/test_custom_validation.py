"""Custom nodes whose own check waives the declared ranges, or refuses a value that the declarations allow."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.gateway import GatewayInProcess, gateway_on

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.engine.node import NodeResult
from comfyfleet.engine.nodes import registry
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.gateway import refusals
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE

CUSTOM = "CustomStrength"
CHECK_SECONDS_MAX = 30.0
REASON = "Async validation failed: 15.0 > 10.0"


@pytest.fixture
def checks() -> threading.Event:
    """While it is cleared, checks of the custom node wait."""
    allowed = threading.Event()
    allowed.set()
    return allowed


@pytest.fixture
async def server(
    databases: Databases, tmp_path: Path, checks: threading.Event
) -> AsyncIterator[GatewayInProcess]:
    """A backend with a custom node. Its input declares at most 1.0, and its own check allows 10.0."""
    known = registry()
    blur = known["ImageBlur"]

    def check(folders: Any, values: Any) -> str | None:
        assert checks.wait(CHECK_SECONDS_MAX)
        return REASON if values["strength"] > 10.0 else None

    inputs = {"image": ["IMAGE"], "strength": ["FLOAT", {"default": 0.5, "min": 0.0, "max": 1.0}]}
    custom = replace(
        blur,
        name=CUSTOM,
        info={**blur.info, "name": CUSTOM, "input": {"required": inputs}},
        run=lambda context, image, strength: NodeResult((image,)),
        validated=("strength",),
        validate=check,
    )
    async with gateway_on(databases, tmp_path, nodes={**known, CUSTOM: custom}) as server:
        yield server


def prompt(strength: float) -> dict[str, Any]:
    size = {"width": 8, "height": 8, "batch_size": 1, "color": 0}
    return {
        "1": {"class_type": "EmptyImage", "inputs": size},
        "2": {"class_type": CUSTOM, "inputs": {"image": ["1", 0], "strength": strength}},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "x"}},
    }


async def set_price(server: GatewayInProcess, tokens: int) -> None:
    async with server.plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, FLEET, STAGE)
        terms = FleetPrompts(allows_unknown=True, price_tokens=tokens)
        await catalog.set_prompt_terms(tx, fleet, terms, now=server.plane.clock())
    server.plane.context.caches.gateway.clear()  # kept for a second


async def run(server: GatewayInProcess, strength: float) -> dict[str, Any]:
    user = await server.new_user()

    def work() -> dict[str, Any]:
        with user.open_engine_client() as client:
            prompt_id = client.submit(prompt(strength))
            client.wait_idle()
            return dict(client.history(prompt_id)["status"])

    return await asyncio.to_thread(work)


async def test_a_value_that_the_node_itself_allows_runs(server: GatewayInProcess) -> None:
    assert (await run(server, 5.0))["status_str"] == "success"


async def test_a_client_gets_the_response_of_an_idle_backend_that_refuses_its_prompt(
    server: GatewayInProcess,
) -> None:
    await set_price(server, 5)
    user = await server.new_user(tokens=5)

    def work() -> None:
        body = {"prompt": prompt(15.0), "client_id": "me", "prompt_id": str(uuid4())}
        direct = httpx.post(f"{server.engines[0].url}/prompt", json=body)
        with user.open_engine_client() as client:
            ear = client.listen("me")
            for _ in range(2):  # a retry gets the same response
                refused = client.http.post("/prompt", json=body)
                assert (refused.status_code, refused.json()) == (400, direct.json())
            assert REASON in refused.text
            assert client.http.get("/history").json() == {}
            queue = client.http.get("/queue").json()
            assert queue == {"queue_running": [], "queue_pending": []}
            # All tokens are available for a prompt that runs, of which the socket shows what it shows of the first.
            accepted = client.submit(prompt(5.0), client_id="me")
            ear.wait("executing", {"node": None, "prompt_id": accepted})
            assert list(client.http.get("/history").json()) == [accepted]
            told = {data.get("prompt_id", accepted) for kind, data in ear.events}
            assert told == {accepted}
            assert ear.names().count("execution_start") == 1

    await asyncio.to_thread(work)


async def test_a_client_of_a_busy_backend_reads_the_reason_later(server: GatewayInProcess) -> None:
    user = await server.new_user()
    steps = {"steps": 10, "step_ms": 50, "previews": False}
    slow = {"1": {"class_type": "EmptyImage", "inputs": prompt(0.5)["1"]["inputs"]}}
    slow["2"] = {"class_type": "ComfyfleetSteps", "inputs": {**steps, "image": ["1", 0]}}
    slow["3"] = prompt(0.5)["3"]

    def work() -> dict[str, Any]:
        with user.open_engine_client() as client:
            ear = client.listen("me")
            client.submit(slow, client_id="me")
            ear.wait("execution_start")
            prompt_id = client.submit(prompt(15.0))
            client.wait_idle()
            return dict(client.history(prompt_id)["status"])

    check_error(await asyncio.to_thread(work))


async def test_a_check_that_takes_long_ends_as_an_error_of_the_run(
    server: GatewayInProcess, checks: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "AWAITED_SECONDS_MAX", 0.2)
    monkeypatch.setattr(refusals, "LEASE_SECONDS_MAX", 0.2)
    checks.clear()
    user = await server.new_user()

    def work() -> dict[str, Any]:
        with user.open_engine_client() as client:
            prompt_id = client.submit(prompt(15.0))
            checks.set()
            client.wait_idle()
            return dict(client.history(prompt_id)["status"])

    check_error(await asyncio.to_thread(work))


def check_error(status: dict[str, Any]) -> None:
    assert status["status_str"] == "error"
    messages = [kind for kind, _ in status["messages"]]
    assert messages.count("execution_start") == messages.count("execution_error") == 1
    (error,) = [data for kind, data in status["messages"] if kind == "execution_error"]
    assert (error["node_id"], error["node_type"]) == ("2", CUSTOM)
    assert error["exception_type"] == "custom_validation_failed"
    assert "strength - Async validation failed: 15.0" in error["exception_message"]
