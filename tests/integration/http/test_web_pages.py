"""The pages for people: one document for all of them, and its files."""

import gzip
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import URL, client_of, plane_on

from comfyfleet.server.http.web import pages
from comfyfleet.server.http.web.pages import FILES_PATH, PAGES, accepts

ROUTES = Path(__file__).parents[3] / "web" / "src" / "app" / "routes.tsx"
BROWSER = {"accept": "text/html,application/xhtml+xml"}
SCRIPT = f"{FILES_PATH}/assets/index-abcd1234.js"
FILES: dict[str, bytes] = {
    "index.html": b'<!doctype html><script type="module" src="/web/assets/index-abcd1234.js"></script>',
    "mark.svg": b"<svg/>",
    "favicon.ico": b"as an icon",
    "manifest.json": b"{}",
    "built-from.sha256": b"0",
    "assets/index-abcd1234.js": b"export {}",
    "assets/index-abcd1234.js.gz": gzip.compress(b"export {}"),
    "assets/index-abcd1234.js.br": b"as brotli",
}


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "static"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    monkeypatch.setattr(pages, "STATIC", folder)
    return folder


@asynccontextmanager
async def stranger(
    databases: Databases, folder: Path, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with plane_on(databases, folder, **settings) as plane, client_of(plane, None) as client:
        yield client


@pytest.fixture
async def client(
    built: Path, sqlite_databases: Databases, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    async with stranger(sqlite_databases, tmp_path) as client:
        yield client


async def test_browsers_get_the_app_and_programs_what_they_got_before(
    client: httpx.AsyncClient,
) -> None:
    page = await client.get("/", headers=BROWSER)
    assert page.content == FILES["index.html"]
    assert page.headers["content-type"].startswith("text/html")
    assert (await client.get("/")).json()["name"] == "comfyfleet"


@pytest.mark.parametrize(
    "path", [*(f"/{each}" for each in PAGES), "/console/jobs/7", "/sign-in?next=/"]
)
async def test_every_page_is_the_same_document(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.content) == (200, FILES["index.html"])


@pytest.mark.parametrize("path", ["/nowhere", "/no/such/page", "/consoles", "/webs/x"])
async def test_what_is_no_page_is_told_to_people_by_the_app_and_to_programs_as_ever(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.get(path, headers=BROWSER)
    assert (answer.status_code, answer.content) == (404, FILES["index.html"])
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    for headers, method in (
        ({}, "GET"),
        ({"accept": "application/json"}, "GET"),
        (BROWSER, "POST"),
    ):
        told = await client.request(method, path, headers=headers)
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/api/nowhere", "/api", "/objects/x", "/web", "/web/", "/web/x"])
async def test_where_programs_ask_nobody_gets_the_app(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path, headers=BROWSER)
    assert answer.status_code in (401, 403, 404)
    assert answer.content != FILES["index.html"]


async def test_browsers_that_look_for_an_icon_find_it(client: httpx.AsyncClient) -> None:
    answer = await client.get("/favicon.ico")
    assert (answer.status_code, answer.content) == (200, FILES["favicon.ico"])
    assert answer.headers["content-type"] == "image/x-icon"


async def test_pages_are_read_only(client: httpx.AsyncClient) -> None:
    assert (await client.post("/console")).status_code == 405
    assert (await client.head("/console")).status_code == 200


async def test_the_policy_allows_our_origin_and_the_stores_only(client: httpx.AsyncClient) -> None:
    answer = await client.get("/console")
    policy = answer.headers["content-security-policy"]
    parts = dict(each.strip().split(" ", 1) for each in policy.split(";"))
    assert parts["default-src"] == "'none'"
    assert parts["script-src"] == "'self'"
    assert parts["style-src"] == "'self'"
    assert parts["connect-src"].split() == ["'self'", URL]
    assert parts["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy
    assert "*" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"


async def test_a_bucket_is_in_the_policy(
    built: Path, sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    bucket = "s3://pictures/fleet?endpoint=http://127.0.0.1:9&region=eu-west-1"
    async with stranger(sqlite_databases, tmp_path, storage_url=bucket) as client:
        policy = (await client.get("/console")).headers["content-security-policy"]
    assert "connect-src 'self' http://127.0.0.1:9;" in policy


@pytest.mark.parametrize(
    ("accepted", "encoding", "content"),
    [
        ("gzip, deflate, br", "br", FILES["assets/index-abcd1234.js.br"]),
        ("gzip;q=1.0, br;q=0", "gzip", FILES["assets/index-abcd1234.js"]),
        ("identity", None, FILES["assets/index-abcd1234.js"]),
        ("", None, FILES["assets/index-abcd1234.js"]),
    ],
)
async def test_files_come_compressed_as_the_client_likes(
    client: httpx.AsyncClient, accepted: str, encoding: str | None, content: bytes
) -> None:
    async with client.stream("GET", SCRIPT, headers={"accept-encoding": accepted}) as answer:
        raw = b"".join([each async for each in answer.aiter_raw()])
    assert answer.headers.get("content-encoding") == encoding
    assert answer.headers["vary"] == "accept-encoding"
    assert (gzip.decompress(raw) if encoding == "gzip" else raw) == content


async def test_files_named_by_their_content_are_kept_for_ever(client: httpx.AsyncClient) -> None:
    assert "immutable" in (await client.get(SCRIPT)).headers["cache-control"]
    for path in ("/console", f"{FILES_PATH}/mark.svg"):
        answer = await client.get(path)
        assert answer.headers["cache-control"] == "no-cache"
        known = {"if-none-match": answer.headers["etag"]}
        again = await client.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "index.html",
        "manifest.json",
        "built-from.sha256",
        "assets/index-abcd1234.js.gz",
        "assets/",
        "../pages.py",
        "%2e%2e/pages.py",
        "..%2fpages.py",
        "assets//index-abcd1234.js",
        "/etc/passwd",
        "%00",
    ],
)
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(f"{FILES_PATH}/{path}")).status_code == 404


async def test_without_a_build_the_pages_say_how_to_make_one(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "STATIC", tmp_path / "nowhere")
    async with stranger(sqlite_databases, tmp_path) as client:
        for path in ("/", "/console"):
            answer = await client.get(path, headers=BROWSER)
            assert "make web" in answer.text
        assert (await client.get("/healthz")).status_code == 200


async def test_they_can_be_turned_off(
    built: Path, sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with stranger(sqlite_databases, tmp_path, web=False) as client:
        assert (await client.get("/console", headers=BROWSER)).status_code == 404
        assert (await client.get(SCRIPT)).status_code == 404
        home = await client.get("/", headers=BROWSER)
    assert "<script" not in home.text


def test_the_control_plane_knows_every_page_of_the_app() -> None:
    paths = re.findall(r'page\("(/[^"]*)"', ROUTES.read_text(encoding="utf-8"))
    first = {path.split("/")[1] for path in paths} - {""}
    assert len(paths) > 10
    assert first == set(PAGES)


@pytest.mark.parametrize(
    ("accepted", "is_wanted"),
    [
        ("br", True),
        ("gzip, BR", True),
        ("br;q=0", False),
        ("br; q=0.5", True),
        ("brotli", False),
        ("", False),
    ],
)
def test_an_encoding_is_wanted_where_it_is_named(accepted: str, is_wanted: bool) -> None:
    assert accepts(accepted, "br") is is_wanted
