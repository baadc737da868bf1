"""The endpoint behind a local store's URLs: what it adds to what every store does."""

import asyncio
import errno
import logging
import os
import stat
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.support.server.asgi import free_listener, served, url_of

from comfyfleet.errors import InvalidInput, Unavailable
from comfyfleet.server.http import objects
from comfyfleet.server.http.objects import objects_routes
from comfyfleet.server.http.tallies import limit_transfers
from comfyfleet.server.storage import LocalStore, ObjectFacts
from comfyfleet.server.storage.local import (
    INCOMING_SECONDS_MAX,
    UPLOADS_PER_KEY_MAX,
    ObjectFolder,
)

SECRET = b"s" * 32
NOW = datetime(2026, 11, 15, 9, tzinfo=UTC)
PNG = {"Content-Type": "image/png"}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(
        tmp_path / "store",
        public_url="http://control",
        secret=SECRET,
        clock=lambda: NOW,
        object_bytes_max=1000,
    )


@pytest.fixture
async def http(store: LocalStore) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.router.routes.extend(objects_routes(store))
    limit_transfers(app)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport) as http:
        yield http


def files_in(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


async def url_to_put(store: LocalStore, key: str = "a/b") -> str:
    return (await store.url_to_put(key, content_type="image/png", seconds=60)).url


async def test_a_refusal_has_our_shape(store: LocalStore, http: httpx.AsyncClient) -> None:
    url = await store.url_to_get("a/b", seconds=60)
    answer = await http.get(url + "0")
    assert answer.status_code == 403
    assert answer.json() == {
        "error": {
            "code": "forbidden",
            "message": "the signature doesn't match this URL",
            "details": {"key": "a/b"},
        }
    }
    missing = await http.get(url)
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"


async def test_a_url_is_good_until_its_last_second(tmp_path: Path) -> None:
    now = NOW

    def clock() -> datetime:
        return now

    store = LocalStore(tmp_path, public_url="http://c", secret=SECRET, clock=clock)
    app = FastAPI()
    app.router.routes.extend(objects_routes(store))
    limit_transfers(app)
    await store.put("a", b"1", "image/png")
    url = await store.url_to_get("a", seconds=60)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http:
        now = NOW + timedelta(seconds=59)
        assert (await http.get(url)).status_code == 200
        now = NOW + timedelta(seconds=60)
        answer = await http.get(url)
    assert answer.status_code == 403
    assert "expired" in answer.json()["error"]["message"]


async def test_a_store_with_another_secret_refuses(
    store: LocalStore, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path, public_url="http://c", secret=b"o" * 32, clock=lambda: NOW)
    await store.put("a", b"1", "image/png")
    assert (await http.get(await other.url_to_get("a", seconds=60))).status_code == 403


async def test_what_was_uploaded_can_not_act_as_a_page_of_ours(
    store: LocalStore, http: httpx.AsyncClient
) -> None:
    for content_type, shown in (
        ("image/png", "inline"),
        ("video/mp4", "inline"),
        ("text/html", "attachment"),
        ("image/svg+xml", "attachment"),
    ):
        await store.put("a/b", b"<script>", content_type)
        answer = await http.get(await store.url_to_get("a/b", seconds=60))
        assert answer.headers["content-disposition"] == shown
        assert answer.headers["content-type"] == content_type
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("sandbox")
        assert answer.headers["referrer-policy"] == "no-referrer"


async def test_pages_of_others_may_use_the_urls(store: LocalStore, http: httpx.AsyncClient) -> None:
    preflight = await http.options(await url_to_put(store))
    assert preflight.status_code == 204
    assert "PUT" in preflight.headers["access-control-allow-methods"]
    answer = await http.put(await url_to_put(store), content=b"1", headers=PNG)
    assert answer.headers["access-control-allow-origin"] == "*"


async def test_who_has_it_already_is_told_so(store: LocalStore, http: httpx.AsyncClient) -> None:
    await store.put("a/b", b"0123456789", "image/png")
    url = await store.url_to_get("a/b", seconds=60)
    etag = (await http.get(url)).headers["etag"]
    assert (await http.get(url, headers={"If-None-Match": etag})).status_code == 304
    resumed = {"Range": "bytes=5-", "If-Range": etag}
    assert (await http.get(url, headers=resumed)).content == b"56789"
    await store.put("a/b", b"another", "image/png")
    changed = await http.get(url, headers=resumed)
    assert (changed.status_code, changed.content) == (200, b"another")


async def test_more_than_the_limit_is_refused_before_it_is_read(
    store: LocalStore, http: httpx.AsyncClient
) -> None:
    url = await url_to_put(store)
    answer = await http.put(url, content=b"x" * 1001, headers=PNG)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "limit_exceeded"
    assert (await http.put(url, content=b"x" * 1000, headers=PNG)).status_code == 200


async def test_a_client_that_sends_other_than_it_told_leaves_nothing(
    store: LocalStore, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    url = await url_to_put(store)
    for told in ("3", "9"):
        answer = await http.put(url, content=b"12345", headers={**PNG, "Content-Length": told})
        assert answer.status_code == 400
    assert files_in(tmp_path) == []


async def test_a_silent_upload_is_given_up(
    store: LocalStore,
    http: httpx.AsyncClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "IDLE_SECONDS_MAX", 0.05)

    async def body() -> AsyncIterator[bytes]:
        yield b"1"
        await asyncio.sleep(5)

    headers = {**PNG, "Content-Length": "9"}
    answer = await http.put(await url_to_put(store), content=body(), headers=headers)
    assert answer.status_code == 408
    assert files_in(tmp_path) == []


async def test_a_full_disk_is_told_without_its_place(
    store: LocalStore, http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    answer = await http.put(await url_to_put(store), content=b"1", headers=PNG)
    assert answer.status_code == 507
    assert str(tmp_path) not in answer.text
    assert files_in(tmp_path) == []


async def test_no_key_leads_out_of_the_folder(
    store: LocalStore, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    await store.put("a/b", b"1", "image/png")
    inside = tmp_path / "store" / "objects" / "a"
    (inside / "folder").symlink_to(tmp_path / "outside")
    (inside / "file").symlink_to(tmp_path / "outside" / "secret")
    for key in ("a/folder/secret", "a/file"):
        assert (await http.get(await store.url_to_get(key, seconds=60))).status_code == 400
        answer = await http.put(await url_to_put(store, key), content=b"1", headers=PNG)
        assert answer.status_code == 400
        with pytest.raises(InvalidInput):
            await store.delete(key)
    for path in ("../../url-signing.secret", "/etc/passwd", "%2e%2e/%2e%2e/x", "..%2fx"):
        answer = await http.get(f"http://control/api/objects/{path}?expires=9&signature=0")
        assert answer.status_code in (403, 404)
    assert (tmp_path / "outside" / "secret").read_text() == "secret"


async def test_a_reader_keeps_the_version_that_it_began(store: LocalStore) -> None:
    await store.put("a/b", b"old", "image/png")
    opened = await store.open("a/b")
    await store.put("a/b", b"newer", "text/plain")
    await store.delete("a/b")
    with opened.file:
        assert (opened.size, opened.content_type, opened.file.read()) == (3, "image/png", b"old")


async def test_a_key_and_keys_below_it_are_told_apart(store: LocalStore) -> None:
    await store.put("a/b", b"1", "image/png")
    with pytest.raises(InvalidInput, match="below"):
        await store.put("a/b/c", b"1", "image/png")
    await store.put("c/d/e", b"1", "image/png")
    with pytest.raises(InvalidInput, match="below"):
        await store.put("c/d", b"1", "image/png")


async def test_deleting_the_last_object_of_a_folder_never_loses_a_new_one(
    store: LocalStore,
) -> None:
    async def put_and_delete(key: str) -> None:
        for _ in range(10):
            await store.put(key, b"1", "image/png")
            assert await store.head(key) == ObjectFacts(1, "image/png")
            await store.delete(key)

    await asyncio.gather(*(put_and_delete(f"a/b/{number}") for number in range(4)))
    assert [key async for key in store.keys("")] == []


async def test_a_file_put_there_by_hand_is_served_as_its_name_says(
    store: LocalStore, tmp_path: Path
) -> None:
    by_hand = tmp_path / "store" / "objects" / "hand.png"
    by_hand.write_bytes(b"123")
    assert await store.head("hand.png") == ObjectFacts(3, "image/png")
    await store.put("hand.png", b"1", "text/plain")
    by_hand.write_bytes(b"1234")
    assert await store.head("hand.png") == ObjectFacts(4, "image/png")


async def test_what_a_killed_process_left_behind_is_cleared_at_the_next_start(
    tmp_path: Path,
) -> None:
    folder = ObjectFolder(tmp_path)
    folder.prepare(now=NOW.timestamp())
    old, young = tmp_path / "incoming" / "old", tmp_path / "incoming" / "young"
    for path, age in ((old, INCOMING_SECONDS_MAX + 1), (young, INCOMING_SECONDS_MAX - 1)):
        path.write_bytes(b"half")
        os.utime(path, (NOW.timestamp() - age,) * 2)
    folder.prepare(now=NOW.timestamp())
    assert (old.exists(), young.exists()) == (False, True)


async def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"file/store is unavailable"):
        LocalStore(tmp_path / "file" / "store", public_url="", secret=SECRET, clock=lambda: NOW)


async def test_an_upload_is_on_disk_before_it_is_answered(
    store: LocalStore,
    http: httpx.AsyncClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file and each folder that got a new one, in any order, then the folder that names the file; no more."""
    synced: list[str] = []
    fsync, root = os.fsync, tmp_path / "store" / "objects"

    def noticing(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append(path.relative_to(root).as_posix() if is_folder else "the file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noticing)
    for key in ("a/b/1.png", "a/b/2.png"):
        url = await url_to_put(store, key)
        assert (await http.put(url, content=b"1", headers=PNG)).status_code == 200
    assert sorted(synced[:3]) == [".", "a", "the file"]
    assert synced[3:] == ["a/b", "the file", "a/b"]


class CountedThreads(ThreadPoolExecutor):
    calls = 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        return super().submit(*args, **kwargs)


async def test_a_small_upload_changes_threads_once_and_is_one_file(
    store: LocalStore, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    threads = CountedThreads(max_workers=1)
    asyncio.get_running_loop().set_default_executor(threads)
    url = await url_to_put(store, "a/b.png")
    assert (await http.put(url, content=b"1" * 1000, headers=PNG)).status_code == 200
    assert threads.calls == 1
    assert [each.name for each in files_in(tmp_path)] == ["b.png"]
    assert await store.head("a/b.png") == ObjectFacts(1000, "image/png")


async def test_a_type_that_the_name_does_not_tell_is_kept_with_the_version_it_belongs_to(
    store: LocalStore,
) -> None:
    await store.put("source.png", b"1", "image/png")
    for content_type in ("text/plain", "image/png", "text/plain"):
        # Copies share bytes and stamp, so that only the type tells them apart.
        await store.copy("source.png", "a/b.png", content_type)
        assert await store.head("a/b.png") == ObjectFacts(1, content_type)
    await store.put("a/b.png", b"2", "image/png")
    assert await store.head("a/b.png") == ObjectFacts(1, "image/png")


async def test_who_leaves_in_mid_download_leaves_no_open_file(tmp_path: Path) -> None:
    listener = free_listener()
    store = LocalStore(tmp_path, public_url=url_of(listener), secret=SECRET, clock=lambda: NOW)
    app = FastAPI()
    app.router.routes.extend(objects_routes(store))
    limit_transfers(app)
    await store.put("a/b", b"x" * 64 * 1024**2, "video/mp4")
    url = await store.url_to_get("a/b", seconds=60)
    async with served(app, listener), httpx.AsyncClient() as http:
        async with http.stream("GET", url) as answer:
            await anext(answer.aiter_bytes(1000))
            assert open_objects(tmp_path) == 1
        async with asyncio.timeout(5):
            while open_objects(tmp_path):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def open_objects(folder: Path) -> int:
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum(link.is_relative_to(folder / "objects") for link in links)


async def test_a_refusal_reaches_a_client_that_sends_much(tmp_path: Path) -> None:
    listener = free_listener()
    store = LocalStore(
        tmp_path,
        public_url=url_of(listener),
        secret=SECRET,
        clock=lambda: NOW,
        object_bytes_max=1000,
    )
    app = FastAPI()
    app.router.routes.extend(objects_routes(store))
    limit_transfers(app)
    url = await url_to_put(store)
    async with served(app, listener), httpx.AsyncClient() as http:
        body = b"x" * 16 * 1024**2
        assert (await http.put(url + "0", content=body, headers=PNG)).status_code == 403
        assert (await http.put(url, content=body, headers=PNG)).status_code == 413


async def test_no_log_shows_a_signature(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listener = free_listener()
    store = LocalStore(tmp_path, public_url=url_of(listener), secret=SECRET, clock=lambda: NOW)
    app = FastAPI()
    app.router.routes.extend(objects_routes(store))
    limit_transfers(app)
    await store.put("a/b", b"1", "image/png")
    url = await store.url_to_get("a/b", seconds=60)
    async with served(app, listener), httpx.AsyncClient() as http:
        with caplog.at_level(logging.INFO, logger="uvicorn.access"):
            assert (await http.get(url)).status_code == 200
            assert (await http.get(url + "0")).status_code == 403
    logged = [each.getMessage() for each in caplog.records if each.name == "uvicorn.access"]
    assert len(logged) == 2
    assert all("/api/objects/a/b?signature=hidden" in line for line in logged)


async def test_no_other_method_is_taken(store: LocalStore, http: httpx.AsyncClient) -> None:
    await store.put("a/b", b"1", "image/png")
    url = await store.url_to_get("a/b", seconds=60)
    for method in ("HEAD", "POST", "DELETE"):
        assert (await http.request(method, url)).status_code == 405


async def test_one_url_can_not_fill_the_disk_by_many_uploads_at_once(
    store: LocalStore, http: httpx.AsyncClient
) -> None:
    url, finish = await url_to_put(store), asyncio.Event()
    begun = asyncio.Semaphore(0)

    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        begun.release()
        await finish.wait()
        yield b"y"

    def put() -> "asyncio.Task[httpx.Response]":
        sent = http.put(url, content=slow(), headers={**PNG, "Content-Length": "2"})
        return asyncio.create_task(sent)

    uploads = [put() for _ in range(UPLOADS_PER_KEY_MAX)]
    for _ in uploads:
        await begun.acquire()
    refused = await http.put(url, content=b"xy", headers=PNG)
    elsewhere = await http.put(await url_to_put(store, "a/c"), content=b"xy", headers=PNG)
    finish.set()
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "too_many_calls"
    assert elsewhere.status_code == 200
    assert {each.status_code for each in await asyncio.gather(*uploads)} == {200}
    assert (await http.put(url, content=b"xy", headers=PNG)).status_code == 200
