"""Who may call the gateway: keys in all their places, programs of this machine, and nobody's web page."""

import base64
import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import URL, client_of, plane_on
from tests.support.server.customers import effect_setup_on
from tests.support.server.gateway import PROMPT, GatewayProcess, GatewayUser
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.local_access import LocalAccess
from comfyfleet.server.http.middleware import WrongKeyThrottle
from comfyfleet.server.maintenance.embedded_fleet import local_user_key
from comfyfleet.server.sign_in_links import SignInLinks
from comfyfleet.server.tenants.model import Scope

WRONG = "cf_" + "0" * 64
LOCAL = "http://127.0.0.1:8000"


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def signed_in(user: GatewayUser) -> str:
    """The cookie of a browser."""
    answer = httpx.post(f"{user.url}/api/session", json={"key": user.key})
    return answer.headers["set-cookie"].partition(";")[0]


def opened(
    gateway: GatewayProcess, path: str, headers: Mapping[str, str] | None = None
) -> ClientConnection:
    url = gateway.url.replace("http", "ws", 1) + path
    return connect(url, additional_headers=headers, open_timeout=10)


def test_a_key_counts_wherever_it_stands(gateway: GatewayProcess, user: GatewayUser) -> None:
    places: list[tuple[str, dict[str, str]]] = [
        ("/queue", {"Authorization": f"Bearer {user.key}"}),
        ("/queue", {"Authorization": f"bearer  {user.key}"}),
        (f"/queue?token={user.key}", {}),
        ("/queue", {"Cookie": f"other=1; {signed_in(user)}"}),
        ("/queue", basic("anybody", user.key)),
        ("/queue", basic(user.key, "")),
        ("/queue", basic(user.key, "not-a-key")),
        (f"/k/{user.key}/queue", {}),
        (f"/k/{user.key}/api/queue", {"Authorization": f"Bearer {WRONG}"}),
    ]
    with user.open_engine_client() as talk:
        talk.submit(PROMPT, prompt_id="11111111-1111-4111-8111-111111111111")
        talk.wait_idle()
    for path, headers in places:
        found = httpx.get(gateway.url + path.replace("queue", "history"), headers=headers)
        assert list(found.json()) == ["11111111-1111-4111-8111-111111111111"], path
        with opened(gateway, path.replace("queue", "ws"), headers) as socket:
            assert json.loads(socket.recv(timeout=10))["type"] == "status"


def test_a_wrong_key_is_not_this_machines_user(gateway: GatewayProcess) -> None:
    for path, headers in [
        ("/queue", {"Authorization": f"Bearer {WRONG}"}),
        (f"/queue?token={WRONG}", {}),
        (f"/k/{WRONG}/queue", {}),
        ("/queue", basic("anybody", WRONG)),
    ]:
        refused = httpx.get(gateway.url + path, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "unauthenticated"
        with pytest.raises(InvalidStatus) as closed:
            opened(gateway, path.replace("queue", "ws"), headers)
        assert closed.value.response.status_code == 401


@pytest.mark.parametrize("pair", [("undefined", ""), ("ada", "hunter2")])
def test_basic_auth_that_is_no_key_counts_as_none(
    gateway: GatewayProcess, pair: tuple[str, str]
) -> None:
    headers = basic(*pair)
    assert httpx.post(f"{gateway.url}/interrupt", headers=headers).status_code == 200
    with opened(gateway, "/ws", headers) as socket:
        assert json.loads(socket.recv(timeout=10))["type"] == "status"
    from_elsewhere = {**headers, "X-Forwarded-For": "203.0.113.9"}
    refused = httpx.post(f"{gateway.url}/interrupt", headers=from_elsewhere)
    assert refused.status_code == 401
    of_a_page = {**headers, "Origin": "https://elsewhere.example"}
    assert httpx.post(f"{gateway.url}/interrupt", headers=of_a_page).status_code in (401, 403)


def test_a_browser_whose_sign_in_has_ended_is_this_machines_user_again(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    cookie = signed_in(user)
    with user.open_engine_client() as talk:
        talk.submit(PROMPT, prompt_id="22222222-2222-4222-8222-222222222222")
        talk.wait_idle()
    headers = {"Cookie": cookie}
    mine = httpx.get(f"{gateway.url}/history", headers=headers).json()
    assert list(mine) == ["22222222-2222-4222-8222-222222222222"]
    csrf = httpx.get(f"{gateway.url}/api/session", headers=headers).json()["csrf"]
    out = httpx.delete(f"{gateway.url}/api/session", headers={**headers, "X-CSRF-Token": csrf})
    assert out.status_code == 204
    assert httpx.get(f"{gateway.url}/history", headers=headers).json() == {}
    behind_a_proxy = {**headers, "X-Forwarded-For": "203.0.113.9"}
    assert httpx.get(f"{gateway.url}/history", headers=behind_a_proxy).status_code == 401


def test_only_programs_of_this_machine_are_told_what_does_not_exist(
    gateway: GatewayProcess,
) -> None:
    unknown, known = f"{gateway.url}/api/nowhere/at/all", f"{gateway.url}/api/wallet"
    for call in (httpx.get, httpx.post):
        assert call(unknown).status_code == 404
    # The user who started `up` needs no key here; elsewhere nothing is told without one.
    assert httpx.get(known).status_code == 200
    assert httpx.post(known).status_code == 405
    for headers in (
        {"X-Forwarded-For": "203.0.113.9"},
        {"Host": "fleet.example"},
        {"Authorization": "Bearer cf_wrong"},
    ):
        assert httpx.get(unknown, headers=headers).status_code in (400, 401, 403), headers


def test_keys_are_in_no_log_line_and_no_metric(gateway: GatewayProcess, user: GatewayUser) -> None:
    for path in (f"/k/{user.key}/queue", f"/queue?token={user.key}", f"/k/{user.key}/nowhere"):
        httpx.get(gateway.url + path, headers={"Referer": f"{gateway.url}/k/{user.key}/editor/"})
        with contextlib.suppress(InvalidStatus), opened(gateway, path.replace("queue", "ws")):
            pass
    httpx.post(f"{gateway.url}/k/{user.key}/prompt", content=b"{")
    httpx.get(f"{gateway.url}/k/{user.key}%2Fqueue")
    httpx.get(f"{gateway.url}/%6b/{user.key}/queue")
    secret = user.key.removeprefix("cf_")
    mistyped = [
        "//k/KEY/queue",
        "/api/k/KEY/queue",
        "/K/KEY/queue",
        "/editor/k/KEY/",
        "/api//K//KEY",
    ]
    mistyped += ["/api/%6B/KEY/queue", "/k%2FKEY%2Fqueue"]
    for path in mistyped:
        for key in (user.key, secret):
            httpx.get(gateway.url + path.replace("KEY", key))
    for path in ("/KEY/queue", "/api/jobs/KEY/cancel"):
        httpx.get(gateway.url + path.replace("KEY", user.key))
    marker = "0a1b2c3d-marker"
    httpx.get(f"{gateway.url}/history/{marker}")
    gateway.running.wait_for_line(marker)
    assert not [line for line in gateway.running.said if secret in line]
    metrics = httpx.get(f"{gateway.url}/metrics").text
    assert "/history/{prompt_id}" in metrics
    assert user.key not in metrics


@pytest.mark.parametrize("path", ["/k/", "/k", "/k/x", "/k/x?y", "/k//", "/k/x%2Fy", "/k/%2F"])
def test_an_address_without_a_path_after_the_key_is_no_error(
    gateway: GatewayProcess, path: str
) -> None:
    answer = httpx.get(gateway.url + path)
    assert answer.status_code < 500, answer.text


def test_a_page_under_a_key_tells_no_other_site_of_it(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    for path in ("/queue", "/", "/nowhere"):
        found = httpx.get(f"{gateway.url}/k/{user.key}{path}")
        assert found.headers["referrer-policy"] == "no-referrer"


@contextlib.contextmanager
def raw(url: str) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        yield connection
    finally:
        connection.close()


def asked(url: str, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> int:
    """With whatever `Host`, which clients would set themselves."""
    with raw(url) as connection:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        return connection.getresponse().status


def test_programs_of_this_machine_need_no_key_by_any_of_its_names(gateway: GatewayProcess) -> None:
    port = urlsplit(gateway.url).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert asked(gateway.url, "GET", "/queue", {"Host": host}) == 200, host


STRANGE_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "localhost.:8000",
    "0.0.0.0:8000",
    "127.1:8000",
    "2130706433",
    "0x7f.0.0.1",
    "[::ffff:7f00:1]x",
    "evil.example:80@127.0.0.1.evil.example",
    "",
]


def test_a_name_that_was_rebound_to_this_machine_needs_a_key(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    for host in STRANGE_HOSTS:
        for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
            status = asked(gateway.url, "GET", "/queue", headers)
            assert status in (400, 401, 403), host
            status = asked(gateway.url, "POST", "/interrupt", headers)
            assert status in (400, 401, 403), host
    given = {"Host": "fleet.example", **user.headers}
    assert asked(gateway.url, "GET", "/queue", given) == 200


FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "http://127.0.0.1.evil.example"},
    {"Origin": "file://"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
]


def test_no_page_of_another_site_uses_this_machines_rights(gateway: GatewayProcess) -> None:
    form = json.dumps({"prompt": PROMPT, "x": "="})
    for headers in FOREIGN:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            sent = httpx.post(
                f"{gateway.url}/prompt", content=form, headers={"Content-Type": kind, **headers}
            )
            assert sent.status_code == 403, headers
        assert httpx.get(f"{gateway.url}/history", headers=headers).status_code == 403
        asked_first = httpx.options(f"{gateway.url}/prompt", headers=headers)
        assert "access-control-allow-origin" not in asked_first.headers
        with pytest.raises(InvalidStatus) as closed:
            opened(gateway, "/ws", headers)
        assert closed.value.response.status_code == 403
    assert httpx.get(f"{gateway.url}/history").json() == {}


def test_no_page_of_another_site_uses_a_browsers_key(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    port = urlsplit(gateway.url).port
    own = {"Host": f"fleet.example:{port}"}
    for kept in ({"Cookie": signed_in(user)}, basic("a", user.key)):
        good = {**own, **kept, "Origin": f"https://fleet.example:{port}"}
        assert asked(gateway.url, "POST", "/interrupt", good) == 200
        for foreign in (
            {"Origin": "https://evil.example"},
            {"Origin": "https://sub.fleet.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "same-site"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            assert asked(gateway.url, "POST", "/interrupt", {**own, **kept, **foreign}) == 403


def test_a_link_to_a_page_may_be_followed_from_another_port(gateway: GatewayProcess) -> None:
    headers = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}
    assert httpx.get(f"{gateway.url}/queue", headers=headers).status_code == 200
    assert httpx.post(f"{gateway.url}/interrupt", headers=headers).status_code == 403


PROXIED = [
    {"X-Forwarded-For": "203.0.113.9"},
    {"X-Forwarded-For": "127.0.0.1"},
    {"X-Forwarded-Proto": "https"},
    {"X-Forwarded-Host": "127.0.0.1"},
    {"Forwarded": "for=127.0.0.1"},
    {"Via": "1.1 proxy"},
    {"X-Real-IP": "127.0.0.1"},
    {"CF-Connecting-IP": "203.0.113.9"},
]


def test_nobody_behind_a_proxy_counts_as_this_machine(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    for headers in PROXIED:
        assert httpx.get(f"{gateway.url}/queue", headers=headers).status_code == 401, headers
        given = {**headers, **user.headers}
        assert httpx.get(f"{gateway.url}/queue", headers=given).status_code == 200, headers
        with pytest.raises(InvalidStatus):
            opened(gateway, "/ws", headers)


def test_a_proxy_that_says_nothing_and_speaks_http_1_0_is_one(gateway: GatewayProcess) -> None:
    with raw(gateway.url) as connection:
        connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
        connection.request("GET", "/queue", headers={"Host": "127.0.0.1:8000"})
        assert connection.getresponse().status == 401


async def local_client(app: Any, address: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(address, 4711))
    return httpx.AsyncClient(transport=transport, base_url=LOCAL)


async def test_only_addresses_of_this_machine_need_no_key_and_only_in_up(
    databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(databases, tmp_path) as plane:
        key = await local_user_key(plane, tmp_path)
        local = LocalAccess(key, SignInLinks(tmp_path), trusts_local_users=True)
        app = create_app(plane, local)
        found = {}
        for address in ("127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "fe80::1",
                        "::ffff:10.0.0.1", "", "unix"):  # fmt: skip
            async with await local_client(app, address) as client:
                found[address] = (await client.get("/queue")).status_code
        here = {"127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"}
        assert {each for each, status in found.items() if status == 200} == here
        async with await local_client(create_app(plane), "127.0.0.1") as client:
            assert (await client.get("/queue")).status_code == 401


async def test_a_key_that_may_only_read_may_look_and_not_submit(
    databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as customers:
        ada = await customers.customer(scopes=[Scope.READ])
        for path in ("/queue", "/history", "/prompt", "/object_info", "/api/jobs"):
            assert (await ada.client.get(path)).status_code == 200, path
        for path in ("/prompt", "/queue", "/history", "/interrupt", "/free", "/upload/image"):
            refused = await ada.client.post(path, json={})
            assert refused.status_code == 403, path
            assert refused.json()["error"]["type"] == "forbidden"


async def test_wrong_keys_are_slowed_down_wherever_they_stand(
    databases: Databases, tmp_path: Path
) -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    async with plane_on(databases, tmp_path) as plane:
        app = create_app(plane)
        app.state.wrong_keys = WrongKeyThrottle(wait)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client:
            for _ in range(8):
                await client.get("/queue", headers={"Authorization": f"Bearer {WRONG}"})
                await client.get(f"/queue?token={WRONG}")
                await client.get(f"/k/{WRONG}/queue")
                wrong = basic("a", "cf_" + "1" * 64)
                assert (await client.get("/queue", headers=wrong)).status_code == 401
    assert waited == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0, 5.0]


async def test_a_client_may_poll_ten_times_a_second_and_not_without_end(
    databases: Databases, tmp_path: Path
) -> None:
    limits: dict[str, Any] = {"gateway_calls_per_second": 12, "gateway_calls_at_once": 20}
    now = [0.0]
    async with (
        plane_on(databases, tmp_path, **limits) as plane,
        effect_setup_on(plane) as customers,
    ):
        start = plane.clock()
        object.__setattr__(plane, "clock", lambda: start + timedelta(seconds=now[0]))
        ada = await customers.customer()
        for _ in range(50):
            now[0] += 0.1
            assert (await ada.client.get("/history")).status_code == 200
        answers = [await ada.client.get("/queue") for _ in range(30)]
        refused = answers[-1]
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "too_many_calls"
        assert int(refused.headers["retry-after"]) >= 1
        async with client_of(plane, (await customers.customer()).key) as other:
            assert (await other.get("/queue")).status_code == 200


def test_a_revoked_key_ends_its_sockets_within_seconds(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    with user.http() as mine:
        made = mine.post("/api/keys", json={"name": "short"}).json()
        with opened(gateway, f"/ws?token={made['key']}") as socket:
            socket.recv(timeout=10)
            assert mine.delete(f"/api/keys/{made['id']}").status_code < 300
            with pytest.raises(ConnectionClosed):
                _read_all(socket)


def _read_all(socket: ClientConnection) -> None:
    while True:
        socket.recv(timeout=10)


def test_a_user_has_at_most_a_hundred_sockets_and_others_are_served(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(opened(gateway, "/ws", user.headers))
        with pytest.raises(InvalidStatus) as refused:
            opened(gateway, "/ws", user.headers)
        assert refused.value.response.status_code == 429
        assert refused.value.response.headers["retry-after"]
        with opened(gateway, "/ws", gateway.user(user.tenant_id).headers) as other:
            assert other.recv(timeout=10)
    assert _opens_again(gateway, user)


def _opens_again(gateway: GatewayProcess, user: GatewayUser) -> bool:
    """The server notices a moment later that sockets were closed."""
    for _ in range(100):
        with contextlib.suppress(InvalidStatus), opened(gateway, "/ws", user.headers):
            return True
        time.sleep(0.05)
    return False
