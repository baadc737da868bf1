"""Server-sent events end with the key that opened them, and are not without number."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on
from tests.support.server.sessions import BrowserClient, browser_at

from comfyfleet.server.http import middleware, streams
from comfyfleet.server.http.admin import overview
from comfyfleet.server.http.public import progress
from comfyfleet.server.tenants import service as tenants

GRAPH = {
    "name": "Draw",
    "nodes": [
        {"id": "draw", "type": "workflow", "effect": "draw", "properties": {"width": 32}},
        {"id": "picture", "type": "output"},
    ],
    "connections": [{"from": "draw.output", "to": "picture.value"}],
}
PIPELINE = {"name": "Draw", "steps": [{"name": "draw", "effect": "draw", "properties": {"width": 32}}]}  # fmt: skip


@pytest.fixture
async def effect_setup(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EffectSetup]:
    monkeypatch.setattr(streams, "KEY_SECONDS", 0.05)
    monkeypatch.setattr(progress, "IDLE_REREAD_SECONDS", 0.05)
    async with (
        plane_on(databases, tmp_path, max_streams_per_key=1) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        yield effect_setup


async def made(ada: Customer, path: str, body: Mapping[str, object]) -> str:
    answer = await ada.client.post(f"/api/{path}", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def test_streams_of_all_kinds_are_counted_and_end_with_their_key(
    effect_setup: EffectSetup,
) -> None:
    ada = await effect_setup.customer()
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    video_id = await ada.video()
    await ada.job(effect_setup.invert, video_id=video_id)
    graph_id = await made(ada, "graphs", GRAPH)
    run_id = await made(ada, f"graphs/{graph_id}/runs", {})
    pipeline_id = await made(ada, "pipelines", PIPELINE)
    loop_id = await made(ada, f"pipelines/{pipeline_id}/runs", {"base_candidates": 1})
    paths = ["account", "graph-runs", f"ai-jobs/{job_id}", f"videos/{video_id}"]
    for path in (*paths, f"graph-runs/{run_id}", f"pipeline-runs/{loop_id}"):
        await _is_watched(effect_setup, ada, f"/api/{path}/events")


async def _is_watched(effect_setup: EffectSetup, ada: Customer, path: str) -> None:
    text, key = await effect_setup.key(ada.tenant_id, ada.user_id)
    headers = {"Authorization": f"Bearer {text}"}
    async with asyncio.timeout(60):
        both = [asyncio.create_task(ada.client.get(path, headers=headers)) for _ in range(2)]
        done, open_still = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert [each.result().status_code for each in done] == [429]
        async with effect_setup.plane.central.transaction() as tx:
            await tenants.revoke_key(
                tx, ada.tenant_id, ada.user_id, key.id, now=effect_setup.plane.clock()
            )
        (ended,) = await asyncio.gather(*open_still)
    assert ended.status_code == 200
    assert (await ada.client.get(path, headers=headers)).status_code == 401


async def test_what_one_control_plane_ends_closes_streams_at_the_other(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not databases.server_url:
        pytest.skip("SQLite means one process")
    for module in (streams, overview):
        monkeypatch.setattr(module, "KEY_SECONDS", 0.05)
    monkeypatch.setattr(progress, "IDLE_REREAD_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(plane_on(databases, tmp_path / "a"))
        names = ("central_database_url", "tenant_database_urls")
        places = {name: getattr(a.settings, name) for name in names}
        b = await stack.enter_async_context(plane_on(databases, tmp_path / "b", **places))
        setup = await stack.enter_async_context(effect_setup_on(a))
        admin = await stack.enter_async_context(client_of(b))
        for end in (sign_out, revoke, deactivate, erase, revoke_operator):
            browser = await stack.enter_async_context(browser_at(a))
            at_b = await stack.enter_async_context(browser_at(b))
            await ends(await setup.customer(), browser, at_b, admin, end)


async def ends(
    ada: Customer,
    browser: BrowserClient,
    at_b: BrowserClient,
    admin: httpx.AsyncClient,
    end: Callable[[BrowserClient, httpx.AsyncClient, str], Awaitable[None]],
) -> None:
    """All streams of a user, by key and by sign-in, or of an operator, end by what happens at the other plane."""
    if end is revoke_operator:
        made_one = await admin.post("/api/admin/operators", json={"name": "eve", "role": "viewer"})
        await browser.sign_in(made_one.json()["key"])
        paths, others = ["/api/admin/events"], []
    else:
        await browser.sign_in(ada.key)
        run_id = await made(ada, f"graphs/{await made(ada, 'graphs', GRAPH)}/runs", {})
        paths = [f"/api/{each}/events" for each in ("account", f"graph-runs/{run_id}")]
        others = [] if end is sign_out else paths
    opened = [asyncio.create_task(browser.call("GET", each)) for each in paths]
    opened += [asyncio.create_task(ada.client.get(each)) for each in others]
    async with asyncio.timeout(30):
        apps = (browser.app, ada.client._transport.app)  # type: ignore[attr-defined]
        while sum(map(open_streams, apps)) < len(opened):  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.01)
        assert not any(each.done() for each in opened)
        at_b.client.cookies, at_b.csrf = browser.client.cookies, browser.csrf
        await end(at_b, admin, f"/api/admin/tenants/{ada.tenant_id}/users/{ada.user_id}")
        await asyncio.gather(*opened, return_exceptions=True)


def open_streams(app: Any) -> int:
    feed = getattr(app.state, "console_feed", None)
    return int(app.state.streams._of_users.total() + (feed._watchers.total() if feed else 0))


async def sign_out(at_b: BrowserClient, _admin: httpx.AsyncClient, _user: str) -> None:
    await at_b.sign_out()


async def revoke(_at_b: BrowserClient, admin: httpx.AsyncClient, user: str) -> None:
    (key,) = (await admin.get(f"{user}/keys")).json()["keys"]
    assert (await admin.post(f"{user}/keys/{key['id']}/revoke")).status_code == 200


async def deactivate(_at_b: BrowserClient, admin: httpx.AsyncClient, user: str) -> None:
    assert (await admin.post(f"{user}/deactivate")).status_code == 200


async def erase(_at_b: BrowserClient, admin: httpx.AsyncClient, user: str) -> None:
    tenant = user.rpartition("/users/")[0]
    assert (await admin.post(f"{tenant}/erase")).status_code == 202


async def revoke_operator(_at_b: BrowserClient, admin: httpx.AsyncClient, _user: str) -> None:
    assert (await admin.post("/api/admin/operators/eve/revoke")).status_code == 200


@pytest.mark.parametrize("end", [deactivate, erase, revoke])
async def test_a_key_that_is_made_while_its_makers_are_taken_away_is_worth_nothing(
    effect_setup: EffectSetup, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    """Whoever keeps calls under way, each with a body that comes a little late, has one when it happens."""
    monkeypatch.setattr(middleware, "SLOW_SECONDS", 1000)
    ada, admin = await effect_setup.customer(), effect_setup.fleet_setup.admin
    user = f"/api/admin/tenants/{ada.tenant_id}/users/{ada.user_id}"
    async with browser_at(effect_setup.plane) as nobody:
        await is_refused(ada.client, "/api/keys", end(nobody, admin, user))
    left = (await admin.get(f"{user}/keys")).json().get("keys", [])
    assert [each for each in left if each["revoked_at"] is None] == []


async def is_refused(
    client: httpx.AsyncClient, path: str, end: Awaitable[None], **others: str
) -> None:
    """Begins a call, lets something happen, and goes on with the call."""
    begun, may_go_on = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        begun.set()
        await may_go_on.wait()
        yield json.dumps({"name": "mine", **others}).encode()

    headers = {"Content-Type": "application/json"}
    making = asyncio.create_task(client.post(path, content=body(), headers=headers))
    async with asyncio.timeout(30):
        await begun.wait()
        await end
        may_go_on.set()
        answer = await making
    assert answer.status_code == 401
    assert "key" not in answer.json()


async def test_an_operator_who_is_made_by_one_who_is_just_revoked_is_so_too(
    effect_setup: EffectSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "SLOW_SECONDS", 1000)
    admin = effect_setup.fleet_setup.admin
    eve = (await admin.post("/api/admin/operators", json={"name": "eve", "role": "owner"})).json()
    async with (
        client_of(effect_setup.plane, eve["key"]) as client,
        browser_at(effect_setup.plane) as nobody,
    ):
        end = revoke_operator(nobody, admin, "")
        await is_refused(client, "/api/admin/operators", end, role="owner")
    all_of_them = (await admin.get("/api/admin/operators")).json()["operators"]
    assert {each["name"] for each in all_of_them} == {"eve", "mine"}
    assert all(each["revoked_at"] for each in all_of_them)
