"""Failures of prompts: customers read the node and a message, but no paths, tracebacks or inputs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.backends.prompts import node
from tests.support.databases.factory import Databases
from tests.support.server.gateway import PROMPT, GatewayInProcess, GatewayUser, gateway_on

SECRETS = ("/srv/comfy", "gpu-7", "10.0.0.7", "Traceback", "File ")
MESSAGE = "Can't open '/srv/comfy/My Models/a.bin' on gpu-7 (10.0.0.7:8188)"
FAILS = {
    **PROMPT,
    "3": node("ComfyfleetFail", fail=True, message=MESSAGE, after_ms=0, value=["1", 0]),
    "4": node("PreviewImage", images=["3", 0]),
}


@pytest.fixture
async def server(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    async with gateway_on(sqlite_databases, tmp_path) as server:
        yield server


def read_failure(user: GatewayUser) -> dict[str, Any]:
    """Runs a prompt that fails, and returns everything that its user can read about it."""
    with user.open_engine_client() as talk:
        ear = talk.listen("me")
        prompt_id = talk.submit(FAILS, client_id="me")
        live = ear.wait("execution_error", {"prompt_id": prompt_id})
        ear.wait("executing", {"node": None, "prompt_id": prompt_id})
        return {"live": live, **read_answers(talk.http, prompt_id)}


def read_answers(http: httpx.Client, prompt_id: str) -> dict[str, Any]:
    entry = http.get(f"/history/{prompt_id}").json()[prompt_id]
    return {
        "id": prompt_id,
        "entry": entry["status"]["messages"][-1][1],
        "history": http.get("/history").json()[prompt_id]["status"]["messages"][-1][1],
        "job": http.get(f"/api/jobs/{prompt_id}").json()["execution_error"],
        "jobs": http.get("/api/jobs").json()["jobs"][0]["execution_error"],
        "v2": http.get(f"/api/v2/jobs/{prompt_id}").json()["error"],
        "events": http.get(f"/api/v2/jobs/{prompt_id}/events").text,
    }


async def show(server: GatewayInProcess, user: GatewayUser, value: bool) -> None:
    path = f"{server.url}/api/admin/tenants/{user.tenant_id}/show-backends"
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    async with httpx.AsyncClient(headers=headers) as admin:
        answer = await admin.put(path, json={"show_backends": value})
        assert answer.status_code == 200, answer.text


async def test_a_failed_prompt_names_its_node_and_type_but_no_machine(
    server: GatewayInProcess,
) -> None:
    user = await server.new_user()
    seen = await asyncio.to_thread(read_failure, user)
    for where, told in seen.items():
        assert not [each for each in SECRETS if each in json.dumps(told)], where
    for where in ("live", "entry", "history", "job", "jobs"):
        failure = seen[where]
        assert (failure["node_id"], failure["node_type"]) == ("3", "ComfyfleetFail"), where
        assert failure["exception_type"], where
        assert failure["exception_message"] == "Can't open … on …", where
        assert (failure["traceback"], failure["current_inputs"]) == ([], {}), where
    assert seen["v2"]["message"] == "Can't open … on …"
    assert (seen["v2"]["node_id"], seen["v2"]["traceback"]) == ("3", None)


async def test_where_backends_are_shown_a_failure_is_shown_as_the_backend_reported_it(
    server: GatewayInProcess,
) -> None:
    user = await server.new_user()
    await show(server, user, True)
    seen = await asyncio.to_thread(read_failure, user)
    for where in ("live", "entry", "history", "job", "jobs"):
        assert MESSAGE in seen[where]["exception_message"], where
        assert seen[where]["traceback"], where
        assert seen[where]["current_inputs"], where
    assert seen["v2"]["traceback"]
    # What is stored stays whole. Each answer follows the tenant's current setting.
    await show(server, user, False)

    def read_again() -> dict[str, Any]:
        with user.http() as http:
            return read_answers(http, seen["id"])

    for where, told in (await asyncio.to_thread(read_again)).items():
        assert not [each for each in SECRETS if each in json.dumps(told)], where
