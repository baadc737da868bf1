"""Routes of custom nodes that are passed on: only where allowed, without keys, and not as pages of ours."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.backends.custom_node import CustomNode
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener, served, url_of
from tests.support.server.control_plane import URL, client_of, plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on

from comfyfleet.api.route_calls import is_below, is_plain
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.gateway import passthrough
from comfyfleet.server.maintenance.embedded_fleet import (
    FLEET,
    STAGE,
    embedded_fleet_secret,
    open_embedded_fleet,
)

NOWHERE = "http://127.0.0.1:9"


@dataclass
class Stage:
    setup: EffectSetup
    node: CustomNode
    ada: Customer
    client: httpx.AsyncClient

    async def allow(self, *prefixes: str) -> None:
        path = f"/api/admin/fleets/{FLEET}/{STAGE}/prompts"
        async with client_of(self.setup.plane) as admin:
            done = await admin.put(path, json={"passthrough": list(prefixes)})
            assert done.status_code == 200, done.text


@pytest.fixture
async def stage(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    monkeypatch.setattr(passthrough, "PREFIXES_SECONDS", -1.0)
    node, listener = CustomNode(), free_listener()
    async with (
        served(node, listener),
        plane_on(databases, tmp_path) as plane,
        effect_setup_on(plane) as setup,
    ):
        await embedded_fleet_secret(plane, tmp_path)
        await open_embedded_fleet(plane)
        ada = await setup.customer()
        transport = httpx.ASGITransport(
            create_app(plane, None, {"away": NOWHERE, "here": url_of(listener)})
        )
        headers = {"Authorization": f"Bearer {ada.key}"}
        async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
            yield Stage(setup, node, ada, client)


async def test_nothing_is_passed_on_unless_an_operator_allows_it(stage: Stage) -> None:
    assert (await stage.client.get("/api/etn/model_info")).status_code == 404
    await stage.allow("/api/etn")
    assert (await stage.client.get("/api/etn/model_info")).status_code == 200
    for path in ("/api/etnx", "/api/other", "/etn/model_info"):
        assert (await stage.client.get(path)).status_code == 404, path
    nobody = {"Authorization": ""}
    assert (await stage.client.get("/api/etn/x", headers=nobody)).status_code == 401
    assert (await stage.client.patch("/api/etn/x")).status_code == 404
    assert len(stage.node.asked) == 1
    await stage.allow()
    assert (await stage.client.get("/api/etn/model_info")).status_code == 404


async def test_our_own_routes_are_never_passed_on(stage: Stage) -> None:
    await stage.allow("/api", "/history", "/api/ai-jobs", "/healthz", "/prompt")
    for path in ("/api/ai-jobs", "/history", "/healthz", "/prompt", "/api/wallet", "/api/keys"):
        await stage.client.get(path)
    assert (await stage.client.get("/api/admin/tenants")).status_code in (401, 403)
    assert stage.node.asked == []


async def test_a_backend_gets_no_key_and_its_answer_is_no_page_of_ours(stage: Stage) -> None:
    await stage.allow("/api/etn")
    key = stage.ada.key
    headers = {"Cookie": f"comfyfleet_session={key}", "X-Secret": key, "Referer": f"{URL}/k/{key}/"}
    answer = await stage.client.post(
        f"/api/etn/upload?token={key}&a=1%262", content=b"body", headers=headers
    )
    ((method, path, got, body),) = stage.node.asked
    assert (method, path, body) == ("POST", "/api/etn/upload?a=1%262", b"body")
    assert key not in json.dumps([path, got])
    assert "control.test" not in json.dumps(got)
    assert answer.headers["content-security-policy"].startswith("sandbox")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-disposition"] == "attachment"
    for name in ("set-cookie", "access-control-allow-origin", "x-inner"):
        assert name not in answer.headers
    away = await stage.client.get("/api/etn/away")
    assert away.status_code == 502
    assert "location" not in away.headers


async def test_bodies_are_bounded_and_pages_of_others_kept_out(stage: Stage) -> None:
    await stage.allow("/api/etn")
    much = b"x" * (stage.setup.plane.settings.max_body_bytes + 1)
    assert (await stage.client.post("/api/etn/x", content=much)).status_code == 413
    foreign: dict[str, Any] = {"Sec-Fetch-Site": "cross-site"}
    assert (await stage.client.post("/api/etn/x", headers=foreign)).status_code == 403
    for path in (
        "/api/etn/../../history",
        "/api/etn/%2e%2e/x",
        "/api/etn//x",
        "/api/etn/a%5c..%5cx",
    ):
        assert (await stage.client.get(path)).status_code in (200, 404)
    assert all(path.startswith("/api/etn/") for _, path, _, _ in stage.node.asked)
    assert not any(".." in path for _, path, _, _ in stage.node.asked)


def test_paths_that_lead_elsewhere_are_not_plain() -> None:
    assert is_below("/api/etn", "/api/etn/x")
    assert not is_below("/api/etn", "/api/etnx")
    assert is_plain("/api/etn/x/")
    for path in (
        "/api/etn/..",
        "/api/etn/../x",
        "/api/etn/./x",
        "//x/y",
        "/a/\\x",
        "/a/x\n",
        "/a/\0",
        "/api/etn/%2e%2e/x",
        "/api/etn/a%2Fb",
        "/api/etn/..;/x",
        "/api/etn/;a/x",
    ):
        assert not is_plain(path), path
