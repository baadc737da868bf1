"""Calls of the customers' API by a front end on another origin, as a browser sends them."""

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on

from comfyfleet.errors import InvalidInput
from comfyfleet.settings import parse_origins, read_settings

SHOP = "https://shop.example"
ASKING = {"Origin": SHOP, "Access-Control-Request-Method": "POST"}
ALLOW = "access-control-allow-origin"


@pytest.fixture
async def effects(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    origins = f"{SHOP}, http://localhost:3000"
    async with (
        plane_on(sqlite_databases, tmp_path, cors_origins=origins) as plane,
        effect_setup_on(plane) as setup,
    ):
        yield setup


def is_refused(answer: httpx.Response) -> bool:
    return not any(name.startswith("access-control-") for name in answer.headers)


async def test_a_preflight_is_answered_before_authentication(effects: EffectSetup) -> None:
    async with client_of(effects.plane, None) as stranger:
        for path in ("/api/videos", "/api/ai-jobs/x/events", "/api/effects", "/api/graph-runs"):
            answer = await stranger.options(path, headers=ASKING)
            assert answer.status_code == 204, path
            assert answer.headers[ALLOW] == SHOP
            assert "authorization" in answer.headers["access-control-allow-headers"]
            assert "DELETE" in answer.headers["access-control-allow-methods"]
            assert "access-control-allow-credentials" not in answer.headers


async def test_the_log_says_once_how_to_allow_an_origin(
    effects: EffectSetup, caplog: pytest.LogCaptureFixture
) -> None:
    asking = {**ASKING, "Origin": "https://other.example"}
    async with client_of(effects.plane, None) as stranger:
        answers = [await stranger.options("/api/videos", headers=asking) for _ in range(3)]
    assert all("COMFYFLEET" not in answer.text and is_refused(answer) for answer in answers)
    (message,) = [
        record.getMessage() for record in caplog.records if "CORS_ORIGINS" in record.getMessage()
    ]
    assert "'https://other.example'" in message


async def test_results_and_errors_can_be_read(effects: EffectSetup) -> None:
    ada = await effects.customer()
    headers = {"Origin": SHOP}
    shown = await ada.client.get("/api/effects", headers=headers)
    unknown = await ada.client.get(f"/api/ai-jobs/{uuid4()}", headers=headers)
    broken = await ada.client.post("/api/videos", content=b"{", headers=headers)
    async with client_of(effects.plane, None) as stranger:
        refused = await stranger.get("/api/effects", headers=headers)
    statuses = [each.status_code for each in (shown, unknown, broken, refused)]
    assert statuses == [200, 404, 422, 401]
    for answer in (shown, unknown, broken, refused):
        assert answer.headers[ALLOW] == SHOP
        assert "Origin" in answer.headers["vary"]
        assert "retry-after" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


async def test_an_event_stream_can_be_read(effects: EffectSetup) -> None:
    ada = await effects.customer()
    job_id = await ada.job(effects.draw)
    await ada.client.delete(f"/api/ai-jobs/{job_id}")
    answer = await ada.client.get(f"/api/ai-jobs/{job_id}/events", headers={"Origin": SHOP})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers[ALLOW] == SHOP


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", f"{SHOP}:8443", "http://shop.example"]
)
async def test_other_origins_are_not_allowed(effects: EffectSetup, origin: str) -> None:
    ada = await effects.customer()
    answer = await ada.client.options("/api/videos", headers={**ASKING, "Origin": origin})
    assert is_refused(answer)
    answer = await ada.client.get("/api/effects", headers={"Origin": origin})
    assert is_refused(answer)
    assert "Origin" in answer.headers["vary"], "no cache may give it to an allowed origin"


@pytest.mark.parametrize(
    "path",
    [
        "/api/admin/workflows",
        "/api/worker/poll",
        "/api/session",
        "/api/session/local",
        "/hooks/x",
        "/metrics",
        "/prompt",
        "/api/prompt",
        "/api/effects/../admin/workflows",
        "//api/admin/workflows",
    ],
)
async def test_other_routes_never_allow_cross_origin_calls(effects: EffectSetup, path: str) -> None:
    admin = effects.fleet_setup.admin
    assert is_refused(await admin.options(path, headers=ASKING))
    assert is_refused(await admin.get(path, headers={"Origin": SHOP}))


async def test_a_cookie_does_not_count(effects: EffectSetup, customer_cookie: str) -> None:
    async with client_of(effects.plane, None) as browser:
        own = await browser.get("/api/effects", headers={"Cookie": customer_cookie})
        assert own.status_code == 200, own.text
        other = await browser.get(
            "/api/effects", headers={"Cookie": customer_cookie, "Origin": SHOP}
        )
        assert other.status_code == 401


@pytest.fixture
async def customer_cookie(effects: EffectSetup) -> str:
    ada: Customer = await effects.customer()
    async with client_of(effects.plane, None) as browser:
        signed_in = await browser.post("/api/session", json={"key": ada.key})
        assert signed_in.status_code in (200, 201), signed_in.text
        return "; ".join(f"{name}={value}" for name, value in browser.cookies.items())


async def test_without_the_setting_nothing_is_allowed(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(sqlite_databases, tmp_path) as plane, client_of(plane, None) as stranger:
        assert is_refused(await stranger.options("/api/videos", headers=ASKING))


@pytest.mark.parametrize(
    "text",
    ["*", "shop.example", "https://shop.example/", "https://*.example", "null", "https://a b"],
)
def test_what_is_no_origin_is_refused_at_start(text: str) -> None:
    with pytest.raises(InvalidInput, match="COMFYFLEET_CORS_ORIGINS"):
        read_settings({"COMFYFLEET_CORS_ORIGINS": text})


def test_usual_ports_are_left_out_as_browsers_do() -> None:
    parsed = parse_origins("https://A.example:443 ,http://b:80,http://c:8080,,http://[::1]:3000")
    assert parsed == ("https://a.example", "http://b", "http://c:8080", "http://[::1]:3000")
