"""What every object store does, whether it is a folder that we serve or a bucket on S3."""

import asyncio
import contextlib
import hashlib
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from fastapi import FastAPI
from tests.support.databases.s3 import RunningS3, running_s3
from tests.support.server.asgi import free_listener, served, url_of

from comfyfleet.clock import utc_now
from comfyfleet.errors import InvalidInput, NotFound
from comfyfleet.server.http.objects import objects_routes
from comfyfleet.server.http.tallies import limit_transfers
from comfyfleet.server.storage import LocalStore, ObjectFacts, ObjectStore, open_store

SECRET = b"s" * 32
PNG = {"Content-Type": "image/png"}
MEGABYTE = 1024 * 1024
READS_MAX = 50
EXPIRY_SECONDS_MAX = 60  # on a busy machine


@dataclass(frozen=True)
class Stage:
    store: ObjectStore
    http: httpx.AsyncClient
    folder: Path  # what the store writes to, to see what is left there

    def files(self) -> list[str]:
        return [each.name for each in self.folder.rglob("*") if each.is_file()]

    def refused(self, answer: httpx.Response) -> bool:
        # AWS says 403, and 400 to a URL that makes no sense; rclone also to one that has expired.
        return answer.status_code in ((403,) if self.store.disk == "local" else (400, 403))

    async def put(self, key: str, data: bytes, content_type: str = "image/png") -> httpx.Response:
        slot = await self.store.url_to_put(key, content_type=content_type, seconds=60)
        return await self.http.request(slot.method, slot.url, content=data, headers=slot.headers)

    async def get(self, key: str, **headers: str) -> httpx.Response:
        url = await self.store.url_to_get(key, seconds=60)
        return await self.http.get(url, headers=headers)


@pytest.fixture(scope="module")
def s3() -> Iterator[RunningS3]:
    with running_s3() as running:
        yield running


@contextlib.asynccontextmanager
async def on_s3(running: RunningS3) -> AsyncIterator[Stage]:
    prefix = f"some where/{uuid.uuid4().hex}"
    store = open_store(running.url_of(prefix), public_url="", secret=SECRET, clock=utc_now)
    async with httpx.AsyncClient(timeout=30) as http:
        yield Stage(store, http, running.folder / running.bucket / prefix)
    await store.aclose()


@contextlib.asynccontextmanager
async def on_folder(folder: Path) -> AsyncIterator[Stage]:
    listener = free_listener()
    url = folder.as_uri()
    store = open_store(url, public_url=url_of(listener) + "/", secret=SECRET, clock=utc_now)
    assert isinstance(store, LocalStore)
    app = FastAPI()
    app.router.routes.extend(objects_routes(store))
    limit_transfers(app)
    async with served(app, listener), httpx.AsyncClient(timeout=30) as http:
        yield Stage(store, http, folder / "objects")


@pytest.fixture(params=["local", "s3"])
async def stage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    if request.param == "local":
        opening = on_folder(tmp_path / "a folder")
    else:
        running: RunningS3 = request.getfixturevalue("s3")
        for name, value in running.env.items():
            monkeypatch.setenv(name, value)
        opening = on_s3(running)
    async with opening as stage:
        yield stage


async def test_what_was_put_is_got(stage: Stage) -> None:
    await stage.store.put("a/b.json", b"{}", "application/json")
    assert await stage.store.get("a/b.json") == b"{}"
    assert await stage.store.head("a/b.json") == ObjectFacts(2, "application/json")


async def test_the_start_of_an_object_is_read_alone(stage: Stage) -> None:
    await stage.store.put("a/long", bytes(range(200)), "image/png")
    await stage.store.put("a/empty", b"", "image/png")
    assert await stage.store.get_start("a/long", 3) == b"\0\1\2"
    assert await stage.store.get_start("a/long", 500) == bytes(range(200))
    assert await stage.store.get_start("a/empty", 500) == b""
    with pytest.raises(NotFound):
        await stage.store.get_start("a/missing", 3)


async def test_a_file_is_put_and_read_again_a_piece_at_a_time(stage: Stage, tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    source = tmp_path / "source"
    source.write_bytes(data)
    await stage.store.put_file("a/b.mp4", source, "video/mp4")
    assert await stage.store.head("a/b.mp4") == ObjectFacts(len(data), "video/mp4")
    pieces = [piece async for piece in stage.store.chunks("a/b.mp4")]
    assert (b"".join(pieces), len(pieces) > 1) == (data, True)
    with pytest.raises(NotFound):
        await anext(stage.store.chunks("a/missing"))


async def test_a_part_of_an_object_is_read_alone(stage: Stage) -> None:
    data = bytes(range(256)) * 10_000
    await stage.store.put("a/b.mp4", data, "video/mp4")
    for start, length in ((0, 1), (5, 10), (1_500_000, 1_060_000), (len(data) - 1, 1)):
        pieces = stage.store.chunks("a/b.mp4", start=start, length=length)
        assert b"".join([piece async for piece in pieces]) == data[start : start + length]
    with pytest.raises(NotFound):
        await anext(stage.store.chunks("a/missing", start=1, length=1))


async def test_an_object_may_be_empty(stage: Stage) -> None:
    assert (await stage.put("a/empty", b"")).status_code == 200
    assert await stage.store.head("a/empty") == ObjectFacts(0, "image/png")
    answer = await stage.get("a/empty")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_missing_object_is_not_found(stage: Stage) -> None:
    assert await stage.store.head("a/missing") is None
    with pytest.raises(NotFound, match="missing"):
        await stage.store.get("a/missing")
    assert (await stage.get("a/missing")).status_code == 404


async def test_the_place_of_other_objects_is_no_object(stage: Stage) -> None:
    await stage.store.put("a/b/c", b"1", "text/plain")
    assert await stage.store.head("a/b") is None


async def test_deleting_can_be_repeated_and_leaves_the_neighbours(stage: Stage) -> None:
    await stage.store.put("a/b/c", b"1", "text/plain")
    await stage.store.put("a/d", b"2", "text/plain")
    for _ in range(2):
        await stage.store.delete("a/b/c")
    assert await stage.store.head("a/b/c") is None
    assert await stage.store.get("a/d") == b"2"


async def test_keys_are_listed_by_prefix(stage: Stage) -> None:
    for key in ("a/b", "a/bc/d", "a/c", "e"):
        await stage.store.put(key, b"1", "text/plain")
    assert sorted([key async for key in stage.store.keys("a/b")]) == ["a/b", "a/bc/d"]
    assert sorted([key async for key in stage.store.keys("a/")]) == ["a/b", "a/bc/d", "a/c"]
    assert sorted([key async for key in stage.store.keys("")]) == ["a/b", "a/bc/d", "a/c", "e"]
    assert [key async for key in stage.store.keys("none/at/all/")] == []


async def test_a_round_trip_goes_by_urls_alone(stage: Stage) -> None:
    assert (await stage.put("a/cat.png", b"a cat")).status_code == 200
    answer = await stage.get("a/cat.png")
    assert (answer.status_code, answer.content) == (200, b"a cat")
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["content-length"] == "5"
    assert await stage.store.head("a/cat.png") == ObjectFacts(5, "image/png")


async def test_any_name_makes_the_round_trip(stage: Stage) -> None:
    for key in ("ä/日本語.png", "a b/c+d&e=f?g#h%20i.png", "c/~'()!*;:@,$.png", "😀/\u00e9"):
        assert (await stage.put(key, key.encode())).status_code == 200
        assert (await stage.get(key)).content == key.encode()
        assert await stage.store.get(key) == key.encode()
        assert [each async for each in stage.store.keys(key[:1])] == [key]


async def test_what_can_not_be_a_key_is_refused_everywhere(stage: Stage) -> None:
    store = stage.store
    for key in ("", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\0b", "a\\b", "\ud800", "a" * 256):
        for asking in (
            store.get(key),
            store.head(key),
            store.delete(key),
            store.put(key, b"", "text/plain"),
            store.url_to_get(key, seconds=1),
            store.url_to_put(key, content_type="text/plain", seconds=1),
        ):
            with pytest.raises(InvalidInput):
                await asking


async def test_a_second_put_replaces_the_first(stage: Stage) -> None:
    await stage.put("a/b", b"first and long", "text/plain")
    await stage.put("a/b", b"second", "image/png")
    answer = await stage.get("a/b")
    assert (answer.content, answer.headers["content-type"]) == (b"second", "image/png")


async def test_of_puts_at_once_one_wins_as_a_whole(stage: Stage) -> None:
    bodies = {f"image/x-{number}": bytes([number]) * 300_000 for number in range(12)}
    answers = await asyncio.gather(*(stage.put("a/b", body, kind) for kind, body in bodies.items()))
    statuses = {answer.status_code for answer in answers}
    # rclone now and then answers one of them with 500 InternalError (2 of 720 when measured); a folder
    # receives four at a time.
    busy = 500 if stage.store.disk == "s3" else 429
    assert {200} <= statuses <= {200, busy}
    answer = await stage.get("a/b")
    for _ in range(
        READS_MAX
    ):  # rclone may answer one that comes right after them with an error, too
        if answer.status_code == 200:
            break
        assert stage.store.disk == "s3", answer.text
        await asyncio.sleep(0.1)
        answer = await stage.get("a/b")
    assert bodies[answer.headers["content-type"]] == answer.content


async def test_another_content_type_is_refused(stage: Stage) -> None:
    slot = await stage.store.url_to_put("a/b", content_type="image/png", seconds=60)
    for headers in ({"Content-Type": "text/html"}, {}):
        answer = await stage.http.put(slot.url, content=b"<script>", headers=headers)
        assert stage.refused(answer)
    assert await stage.store.head("a/b") is None


async def test_another_size_is_refused_where_one_was_named(stage: Stage) -> None:
    slot = await stage.store.url_to_put("a/b", content_type="image/png", seconds=60, size=4)
    assert stage.refused(await stage.http.put(slot.url, content=b"12345", headers=slot.headers))
    assert await stage.store.head("a/b") is None
    answer = await stage.http.put(slot.url, content=b"1234", headers=slot.headers)
    assert answer.status_code == 200


async def test_a_body_of_unknown_length_is_refused(stage: Stage) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"12345"

    slot = await stage.store.url_to_put("a/b", content_type="image/png", seconds=60)
    answer = await stage.http.put(slot.url, content=body(), headers=slot.headers)
    assert answer.status_code == 411
    assert await stage.store.head("a/b") is None


async def test_a_url_that_was_tampered_with_is_refused(stage: Stage) -> None:
    await stage.store.put("a/b", b"mine", "image/png")
    await stage.store.put("a/c", b"not yours", "image/png")
    url = await stage.store.url_to_get("a/b", seconds=60, filename="b.png")
    assert (await stage.http.get(url)).status_code == 200
    digit = "0" if url[-1] != "0" else "1"
    expires = re.search(r"xpires=(\d+)", url)
    assert expires
    for tampered in (
        url[:-1] + digit,
        url[:-1],
        url.replace("a/b", "a/c"),
        url.replace(expires[0], f"xpires={int(expires[1]) + 100}"),
        url.replace("b.png", "c.png"),
        re.sub(r"[^&?]*ignature=[^&]*", "", url),
        url.partition("?")[0],
    ):
        assert tampered != url
        assert stage.refused(await stage.http.get(tampered)), tampered


async def test_a_url_is_for_one_method_only(stage: Stage) -> None:
    await stage.store.put("a/b", b"old", "image/png")
    to_get = await stage.store.url_to_get("a/b", seconds=60)
    to_put = await stage.store.url_to_put("a/b", content_type="image/png", seconds=60)
    assert stage.refused(await stage.http.put(to_get, content=b"new", headers=PNG))
    assert stage.refused(await stage.http.get(to_put.url, headers=PNG))
    for method in ("HEAD", "DELETE", "POST"):
        assert (await stage.http.request(method, to_get)).status_code in (403, 405)
    assert await stage.store.get("a/b") == b"old"


async def test_urls_expire(stage: Stage) -> None:
    await stage.store.put("a/b", b"old", "image/png")
    to_put = await stage.store.url_to_put("a/b", content_type="image/png", seconds=1)
    to_get = await stage.store.url_to_get("a/b", seconds=1)  # expires no earlier than the other
    async with asyncio.timeout(EXPIRY_SECONDS_MAX):
        while not stage.refused(await stage.http.get(to_get)):  # noqa: ASYNC110  (nothing signals it)
            await asyncio.sleep(0.05)
    assert stage.refused(await stage.http.put(to_put.url, content=b"new", headers=to_put.headers))
    assert await stage.store.get("a/b") == b"old"


async def test_a_lifetime_that_no_store_has_is_refused(stage: Stage) -> None:
    for seconds in (0, -1, 7 * 24 * 3600 + 1):
        with pytest.raises(InvalidInput, match="seconds"):
            await stage.store.url_to_get("a/b", seconds=seconds)


async def test_what_is_no_content_type_is_refused(stage: Stage) -> None:
    for content_type in ("", "png", "a/b\r\nX: y", "image/ü", "a/" + "b" * 200):
        with pytest.raises(InvalidInput, match="content type"):
            await stage.store.put("a/b", b"", content_type)
        with pytest.raises(InvalidInput, match="content type"):
            await stage.store.url_to_put("a/b", content_type=content_type, seconds=60)


async def test_a_content_type_may_have_parameters(stage: Stage) -> None:
    kind = 'text/plain; charset=utf-8; note="a b"'
    assert (await stage.put("a/b", b"1", kind)).status_code == 200
    assert await stage.store.head("a/b") == ObjectFacts(1, kind)


async def test_a_part_is_served(stage: Stage) -> None:
    await stage.store.put("a/b", b"0123456789", "video/mp4")
    for wanted, content, told in (
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=8-99", b"89", "bytes 8-9/10"),
    ):
        answer = await stage.get("a/b", Range=wanted)
        assert (answer.content, answer.headers["content-range"]) == (content, told)
        assert answer.headers["content-length"] == str(len(content))
        if stage.store.disk == "local":  # rclone says 200
            assert answer.status_code == 206


async def test_a_part_beyond_the_end_is_refused(stage: Stage) -> None:
    await stage.store.put("a/b", b"0123456789", "video/mp4")
    assert (await stage.get("a/b", Range="bytes=10-")).status_code == 416


async def test_a_download_has_a_name(stage: Stage) -> None:
    await stage.store.put("a/b", b"1", "image/png")
    for filename in ("cat.png", 'a "b"\\ c;.png', "猫 é\r\nX-Evil: 1.png"):
        url = await stage.store.url_to_get("a/b", seconds=60, filename=filename)
        answer = await stage.http.get(url)
        told = answer.headers["content-disposition"]
        assert told.startswith("attachment; filename=")
        assert "x-evil" not in answer.headers
        assert (told == 'attachment; filename="cat.png"') == (filename == "cat.png")


async def test_a_large_object_is_streamed_both_ways(stage: Stage) -> None:
    pattern = bytes(range(256)) * 4096
    size = 64 * MEGABYTE

    async def body() -> AsyncIterator[bytes]:
        for _ in range(size // len(pattern)):
            yield pattern

    slot = await stage.store.url_to_put("a/large", content_type="video/mp4", seconds=60)
    headers = {**slot.headers, "Content-Length": str(size)}
    assert (await stage.http.put(slot.url, content=body(), headers=headers)).status_code == 200
    url = await stage.store.url_to_get("a/large", seconds=60)
    digest, received = hashlib.sha256(), 0
    async with stage.http.stream("GET", url) as answer:
        async for chunk in answer.aiter_bytes():
            digest.update(chunk)
            received += len(chunk)
    assert received == size
    assert digest.digest() == hashlib.sha256(pattern * (size // len(pattern))).digest()


async def test_a_killed_upload_leaves_nothing(stage: Stage) -> None:
    await stage.store.put("a/b", b"old", "image/png")
    slot = await stage.store.url_to_put("a/b", content_type="image/png", seconds=60)
    other = await stage.store.url_to_put("a/new", content_type="image/png", seconds=60)
    for url in (slot.url, other.url):
        await send_half(url)
    await asyncio.sleep(0.5)
    assert await stage.store.get("a/b") == b"old"
    assert await stage.store.head("a/new") is None
    assert stage.files() == ["b"]


async def send_half(url: str) -> None:
    """Tells 4 MB, sends 2, and is gone."""
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"PUT {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
    head += f"Content-Type: image/png\r\nContent-Length: {4 * MEGABYTE}\r\n\r\n"
    writer.write(head.encode() + b"x" * 2 * MEGABYTE)
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.transport.abort()


async def test_the_store_tells_that_it_works(stage: Stage) -> None:
    await stage.store.check()


async def test_a_url_holds_no_secret(stage: Stage) -> None:
    url = await stage.store.url_to_get("a/b", seconds=60)
    assert SECRET.decode() not in url
    assert "secret" not in str(parse_qs(urlsplit(url).query)).lower()


async def test_a_listing_tells_when_each_object_was_written(stage: Stage) -> None:
    before = utc_now() - timedelta(seconds=2)
    await stage.store.put("tenants/a/one", b"1", "text/plain")
    await stage.store.put("tenants/b/two", b"2", "text/plain")
    found = {each.key: each.modified_at async for each in stage.store.listed("tenants/a/")}
    assert found.keys() == {"tenants/a/one"}
    assert before < found["tenants/a/one"] < utc_now() + timedelta(seconds=2)
    assert [each async for each in stage.store.listed("tenants/c/")] == []


async def test_a_copy_stays_as_it_was_whatever_happens_to_the_original(stage: Stage) -> None:
    await stage.store.put("a/one.png", b"first", "image/png")
    await stage.store.copy("a/one.png", "b/two.jpg", "image/jpeg")
    await stage.put("a/one.png", b"later")
    assert await stage.store.get("b/two.jpg") == b"first"
    facts = await stage.store.head("b/two.jpg")
    assert facts is not None
    assert (facts.size, facts.content_type) == (5, "image/jpeg")
    await stage.store.delete("a/one.png")
    assert await stage.store.get("b/two.jpg") == b"first"
    with pytest.raises(NotFound):
        await stage.store.copy("a/one.png", "b/three.png", "image/png")
    assert await stage.store.head("b/three.png") is None


async def test_an_object_of_another_size_is_not_copied(stage: Stage) -> None:
    await stage.store.put("a/one.png", b"first", "image/png")
    assert not await stage.store.copy("a/one.png", "b/two.png", "image/png", size=4)
    assert await stage.store.head("b/two.png") is None
    assert await stage.store.copy("a/one.png", "b/two.png", "image/png", size=5)
    assert await stage.store.get("b/two.png") == b"first"
    with pytest.raises(NotFound):
        await stage.store.copy("a", "b/three.png", "image/png", size=5)


async def test_several_are_deleted_at_once_whether_they_are_there_or_not(stage: Stage) -> None:
    for key in ("a/one", "a/two", "b/three"):
        await stage.store.put(key, b"1", "text/plain")
    await stage.store.delete("a/one", "a/none", "b/three")
    assert [key async for key in stage.store.keys("")] == ["a/two"]
