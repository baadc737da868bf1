"""ComfyUI's editor as the server gives it: page, files, templates, log-in; without a browser."""

import gzip
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import URL, client_of, plane_on
from tests.support.server.gateway import PROMPT

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http import gateway
from comfyfleet.server.http.sessions import COOKIE

ELSEWHERE = {"Origin": "https://elsewhere.test"}


@pytest.fixture
async def plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        yield plane


@pytest.fixture
async def visitor(plane: ControlPlane) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that nobody has logged in with."""
    async with client_of(plane, None) as client:
        yield client


@pytest.fixture
async def key(plane: ControlPlane) -> str:
    async with client_of(plane) as admin:
        made: str = (await admin.post("/api/admin/tenants", json={"name": "Ada"})).json()["key"]
        return made


async def log_in(visitor: httpx.AsyncClient, key: str, **headers: str) -> httpx.Response:
    return await visitor.post("/editor/login", data={"key": key}, headers=headers)


async def test_who_has_no_key_is_asked_for_one(visitor: httpx.AsyncClient) -> None:
    answer = await visitor.get("/editor/")
    assert (answer.status_code, answer.headers["location"]) == (303, "login")
    form = await visitor.get("/editor/login")
    assert 'type="password"' in form.text
    assert form.headers["cache-control"] == "no-store"


async def test_the_address_without_a_slash_leads_to_the_page(visitor: httpx.AsyncClient) -> None:
    answer = await visitor.get("/editor")
    assert (answer.status_code, answer.headers["location"]) == (303, "editor/")


async def test_a_key_logs_in_by_a_cookie_that_no_script_and_no_other_site_has(
    visitor: httpx.AsyncClient, key: str
) -> None:
    answer = await log_in(visitor, key, Origin=URL)
    cookies = SimpleCookie("; ".join(answer.headers.get_list("set-cookie")))
    assert key not in cookies[COOKIE].value
    said = next(each for each in answer.headers.get_list("set-cookie") if COOKIE in each)
    assert "HttpOnly" in said
    assert "SameSite=strict" in said
    assert "Secure" not in said
    assert (await visitor.get("/editor/")).status_code == 200
    assert (await visitor.get("/editor/api/queue")).status_code == 200
    assert (await visitor.get("/editor/session")).json() == {"by_cookie": True}


async def test_behind_tls_the_cookie_is_for_tls_only(visitor: httpx.AsyncClient, key: str) -> None:
    answer = await log_in(visitor, key, **{"X-Forwarded-Proto": "https"})
    assert all("Secure" in each for each in answer.headers.get_list("set-cookie"))


async def test_an_address_with_a_key_in_it_needs_no_log_in(
    visitor: httpx.AsyncClient, key: str
) -> None:
    answer = await visitor.get(f"/k/{key}/editor/")
    assert answer.status_code == 200
    assert answer.headers["referrer-policy"] == "same-origin"
    assert (await visitor.get(f"/k/{key}/editor/api/queue")).status_code == 200


async def test_a_wrong_key_is_told_and_sets_nothing(visitor: httpx.AsyncClient) -> None:
    answer = await log_in(visitor, "wrong")
    assert answer.status_code == 401
    assert "This key is invalid" in answer.text
    assert "set-cookie" not in answer.headers


async def test_a_page_of_another_site_can_neither_log_in_nor_out(
    visitor: httpx.AsyncClient, key: str
) -> None:
    for headers in (ELSEWHERE, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}):
        assert (await log_in(visitor, key, **headers)).status_code == 403
        assert (await visitor.post("/editor/logout", headers=headers)).status_code == 403


async def test_a_form_that_is_too_long_is_refused(visitor: httpx.AsyncClient) -> None:
    assert (await log_in(visitor, "k" * 100_000)).status_code == 413


async def test_a_cookie_changes_nothing_from_a_page_of_another_site(
    visitor: httpx.AsyncClient, key: str
) -> None:
    await log_in(visitor, key)
    for prefix in ("", "/api", "/editor/api"):
        for headers in (ELSEWHERE, {"Sec-Fetch-Site": "same-site"}):
            answer = await visitor.post(
                f"{prefix}/prompt", json={"prompt": PROMPT}, headers=headers
            )
            assert answer.status_code == 403, (prefix, headers, answer.text)
        own = await visitor.post(f"{prefix}/queue", json={"clear": True}, headers={"Origin": URL})
        assert own.status_code == 200


async def test_a_key_in_a_header_counts_from_everywhere(
    visitor: httpx.AsyncClient, key: str
) -> None:
    headers = {**ELSEWHERE, "Authorization": f"Bearer {key}"}
    answer = await visitor.post("/queue", json={"clear": True}, headers=headers)
    assert answer.status_code == 200


async def test_who_logs_out_leaves_nothing_behind(visitor: httpx.AsyncClient, key: str) -> None:
    await log_in(visitor, key)
    answer = await visitor.post("/editor/logout")
    assert answer.headers["clear-site-data"] == '"storage"'
    assert "localStorage.clear()" in answer.text
    assert (await visitor.get("/editor/")).status_code == 303
    assert (await visitor.get("/editor/api/queue")).status_code == 401


async def test_drafts_of_whoever_was_here_before_are_cleared_and_ones_own_are_not(
    plane: ControlPlane, visitor: httpx.AsyncClient, key: str
) -> None:
    async with client_of(plane) as admin:
        other = (await admin.post("/api/admin/tenants", json={"name": "Grace"})).json()["key"]
    assert "clear-site-data" in (await log_in(visitor, key)).headers
    assert "clear-site-data" not in (await log_in(visitor, key)).headers
    assert "clear-site-data" in (await log_in(visitor, other)).headers


async def test_a_link_of_another_site_leads_to_the_editor_by_a_page_of_ours(
    visitor: httpx.AsyncClient,
) -> None:
    """A strict cookie does not come with such a link."""
    answer = await visitor.get("/editor/", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200
    assert 'http-equiv="refresh"' in answer.text


async def test_the_page_may_reach_this_server_only(visitor: httpx.AsyncClient, key: str) -> None:
    await log_in(visitor, key)
    answer = await visitor.get("/editor/")
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'self'"
    assert policy["connect-src"] == "'self' data: blob:"
    assert "unsafe" not in policy["script-src"].replace("'wasm-unsafe-eval'", "")
    assert policy["frame-ancestors"] == "'none'"
    assert "://" not in answer.headers["content-security-policy"]


async def test_files_are_sent_compressed_and_for_ever(visitor: httpx.AsyncClient, key: str) -> None:
    await log_in(visitor, key)
    index = (await visitor.get("/editor/")).text
    script = index.partition('src="./')[2].partition('"')[0]
    async with visitor.stream(
        "GET", f"/editor/{script}", headers={"Accept-Encoding": "gzip"}
    ) as answer:
        packed = b"".join([chunk async for chunk in answer.aiter_raw()])
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["content-type"].startswith("text/javascript")
    plain = await visitor.get(f"/editor/{script}", headers={"Accept-Encoding": "identity"})
    assert gzip.decompress(packed) == plain.content
    assert len(packed) < len(plain.content) * 0.6
    again = await visitor.get(
        f"/editor/{script}", headers={"If-None-Match": answer.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "nothing.js",
        "../auth.py",
        "%2e%2e/auth.py",
        "assets/../../__init__.py",
        "/etc/passwd",
        "assets",
        "templates/..%2f..%2fauth.json",
    ],
)
async def test_no_other_file_is_sent(visitor: httpx.AsyncClient, path: str) -> None:
    assert (await visitor.get(f"/editor/{path}")).status_code == 404


async def test_below_the_editor_is_comfyuis_api_and_not_ours(
    visitor: httpx.AsyncClient, key: str
) -> None:
    await log_in(visitor, key)
    assert (await visitor.get("/editor/api/features")).status_code == 200
    assert (await visitor.get("/editor/internal/folder_paths")).status_code == 200
    for path in ("admin/tenants", "worker/poll", "wallet"):
        assert (await visitor.get(f"/editor/api/{path}")).status_code == 404


async def test_some_settings_are_not_the_users(visitor: httpx.AsyncClient, key: str) -> None:
    await log_in(visitor, key)
    wanted = {"Comfy.VueNodes.Enabled": True, "Comfy.Locale": "de"}
    assert (await visitor.post("/editor/api/settings", json=wanted)).status_code == 200
    found = (await visitor.get("/editor/api/settings")).json()
    assert found["Comfy.VueNodes.Enabled"] is False
    assert found["Comfy.Notification.ShowVersionUpdates"] is False
    assert found["Comfy.Locale"] == "de"


async def test_what_was_never_saved_is_empty_and_what_was_is_sent(
    visitor: httpx.AsyncClient, key: str
) -> None:
    await log_in(visitor, key)
    folder = "/editor/api/userdata?dir=workflows&recurse=true&split=false&full_info=true"
    assert (await visitor.get(folder)).json() == []
    assert (await visitor.get("/editor/api/userdata/user.css")).text == ""
    saved = await visitor.post("/editor/api/userdata/workflows%2Fa.json", content=b"{}")
    assert saved.status_code == 200
    assert [each["path"] for each in (await visitor.get(folder)).json()] == ["a.json"]


async def test_without_the_extra_the_page_says_what_to_install(
    plane: ControlPlane, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "installed_files", lambda: None)
    async with client_of(plane, key) as client:
        answer = await client.get("/editor/")
    assert answer.status_code == 404
    assert "pip install 'comfyfleet[editor]'" in answer.text
