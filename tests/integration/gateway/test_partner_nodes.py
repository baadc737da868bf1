"""Nodes that call paid services run with the caller's own key, which is never stored, logged or shown."""

import asyncio
import json
import logging
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

from comfyfleet.engine import serve_in_thread
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.node import Context, EngineNodeType, NodeResult
from comfyfleet.engine.nodes import registry
from comfyfleet.errors import NodeFailed
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE, embedded_fleet_secret

PAID = "PaidPicture"
KEY = "comfyui-0123456789-secret"
TOKEN = "eyJhbGciOi.0123456789.secret"
FIELD = "api_key_comfy_org"


def paid(context: Context, words: str) -> NodeResult:
    if words == "fail":
        raise NodeFailed(f"the key {KEY} has no credits")
    return NodeResult(())


def nodes() -> dict[str, EngineNodeType]:
    made = node_type(PAID, paid, {"words": ["STRING", {}]}, outputs=(), output_node=True)
    info = {**made.info, "api_node": True, "category": "partner/image"}
    return {**registry(), PAID: EngineNodeType(name=PAID, info=info, run=made.run)}


def body(words: str = "ok", **extra_data: str) -> dict[str, Any]:
    node = {"class_type": PAID, "inputs": {"words": words}}
    return {"prompt": {"1": node}, "client_id": "c", "extra_data": extra_data}


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bodies of prompts as backends get them."""
    found: list[dict[str, Any]] = []
    submit = Engine.submit

    def noted(engine: Engine, given: Any, *more: Any, **named: Any) -> Any:
        found.append(dict(given))
        return submit(engine, given, *more, **named)

    monkeypatch.setattr(Engine, "submit", noted)
    return found


async def allow(server: GatewayInProcess, *types: str) -> None:
    path = f"{server.url}/api/admin/fleets/{FLEET}/{STAGE}/prompts"
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    async with httpx.AsyncClient(headers=headers) as admin:
        done = await admin.put(path, json={"allow": list(types), "allows_unknown": True})
    assert done.status_code == 200, done.text


@pytest.fixture
async def server(databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    async with gateway_on(databases, tmp_path, nodes=nodes()) as server:
        yield server


async def post(http: httpx.AsyncClient, sent: dict[str, Any]) -> dict[str, Any]:
    """Runs a prompt to its end, and returns its entry in the history."""
    answer = await http.post("/prompt", json=sent)
    assert answer.status_code == 200, answer.text
    prompt_id = answer.json()["prompt_id"]
    await until(lambda: history_entry(http, prompt_id))
    entry: dict[str, Any] = await history_entry(http, prompt_id)
    return entry


async def test_they_are_off_until_an_operator_turns_them_on(server: GatewayInProcess) -> None:
    async with (await server.new_user()).http_async() as http:
        refused = await http.post("/prompt", json=body(**{FIELD: KEY}))
        assert refused.status_code == 400
        assert "comfyfleet admin fleets prompts FLEET --allow" in refused.json()["error"]["message"]


async def test_without_a_key_the_prompt_is_refused_and_the_field_is_named(
    server: GatewayInProcess,
) -> None:
    await allow(server, PAID)
    async with (await server.new_user()).http_async() as http:
        for extra_data in ({}, {FIELD: ""}, {FIELD: "short"}):
            refused = await http.post("/prompt", json=body(**extra_data))
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["type"] == "api_key_missing"
            assert f"extra_data.{FIELD}" in error["message"]
        assert (await http.get("/queue")).json() == {"queue_running": [], "queue_pending": []}


async def test_the_backend_gets_the_key_and_nobody_else(
    server: GatewayInProcess,
    received: list[dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    await allow(server, PAID)
    async with (await server.new_user()).http_async() as http:
        entry = await post(http, body(**{FIELD: KEY, "auth_token_comfy_org": TOKEN}))
        assert entry["status"]["status_str"] == "success"
        assert [(sent["extra_data"][FIELD], sent["extra_data"]["auth_token_comfy_org"]) for sent in received] == [(KEY, TOKEN)]  # fmt: skip
        failed = await post(http, body("fail", **{FIELD: KEY}))
        assert failed["status"]["status_str"] == "error"
        told = [
            entry,
            failed,
            (await http.get("/api/jobs")).json(),
            (await http.get("/queue")).json(),
        ]
        await until(lambda: nothing_is_kept(server))
    stored = await everything_stored(server)
    files = [file for file in (tmp_path / "worker-0").rglob("*") if file.is_file()]
    written = "".join(file.read_text(errors="replace") for file in files)
    for secret in (KEY, TOKEN):
        assert secret not in json.dumps(told)
        assert secret not in stored
        assert secret not in written
        assert secret not in caplog.text
    assert "[hidden]" in stored


async def nothing_is_kept(server: GatewayInProcess) -> bool:
    return not server.plane.context.partner_keys._kept


async def everything_stored(server: GatewayInProcess) -> str:
    """All rows of all tables, as a text."""
    from sqlalchemy import select

    from comfyfleet.server.db.central_tables import central_metadata
    from comfyfleet.server.db.tenant_tables import tenant_metadata

    found: list[str] = []
    for database, metadata in (
        (server.plane.central, central_metadata),
        (server.plane.pools["main"], tenant_metadata),
    ):
        async with database.read() as tx:
            for table in metadata.sorted_tables:
                found += [str(tuple(row)) for row in await tx.execute(select(table))]
    return "\n".join(found)


async def test_a_key_of_a_prompt_without_such_nodes_goes_nowhere(
    server: GatewayInProcess, received: list[dict[str, Any]]
) -> None:
    plain = {"1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
             "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}  # fmt: skip
    async with (await server.new_user()).http_async() as http:
        await post(http, {"prompt": plain, "extra_data": {FIELD: KEY}})
    assert KEY not in json.dumps(received)


async def test_a_key_is_forgotten_however_its_prompt_ends(server: GatewayInProcess) -> None:
    await allow(server, PAID)
    user = await server.new_user()
    kept = server.plane.context.partner_keys
    async with user.http_async() as http:
        steps = {"steps": 100, "step_ms": 50, "previews": False}
        slow = {"1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
                "2": {"class_type": "ComfyfleetSteps", "inputs": {**steps, "image": ["1", 0]}},
                "3": {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}}}  # fmt: skip
        await http.post("/prompt", json={"prompt": slow})
        answers = [await http.post("/prompt", json=body(str(n), **{FIELD: KEY})) for n in range(3)]
        first, second, _ = [answer.json()["prompt_id"] for answer in answers]
        assert len(kept._kept) == 3
        await http.post("/queue", json={"delete": [first]})
        assert len(kept._kept) == 2
        await http.post(f"/api/jobs/{second}/cancel")
        assert len(kept._kept) == 1
        await asyncio.to_thread(
            server.admin, f"/tenants/{user.tenant_id}/users/{user.user_id}/deactivate"
        )
        await until(lambda: nothing_is_kept(server))


async def test_a_prompt_whose_key_is_gone_fails_with_a_reason(
    server: GatewayInProcess, received: list[dict[str, Any]]
) -> None:
    await allow(server, PAID)
    async with (await server.new_user()).http_async() as http:
        # As after a restart of the control plane.
        server.plane.context.partner_keys.keep = lambda tenant_id, job_id, keys: True  # type: ignore[method-assign]
        entry = await post(http, body(**{FIELD: KEY}))
    assert entry["status"]["status_str"] == "error"
    assert "submit the job again" in json.dumps(entry)
    assert received == []


async def test_a_worker_at_another_control_plane_gets_the_key(
    postgres_databases: Databases, tmp_path: Path, received: list[dict[str, Any]]
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
        await allow(server, PAID)
        with serve_in_thread(nodes=nodes()) as engine:
            settings = worker_settings(other.url, secret, engine.url, tmp_path, "w1")
            async with running_worker(settings), user.http_async() as http:
                await asyncio.to_thread(server.wait_until_ready, user)
                entry = await post(http, body(**{FIELD: KEY}))
                assert entry["status"]["status_str"] == "success"
                await until(lambda: nothing_is_kept(server))
    assert [sent["extra_data"][FIELD] for sent in received] == [KEY]
