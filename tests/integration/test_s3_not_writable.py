"""A bucket that can be read and rejects writes, as `rclone serve s3` does on a full disk: 500 InternalError."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.gateway import clients_of

from comfyfleet.clock import utc_now
from comfyfleet.errors import StoreFull, Unavailable
from comfyfleet.server.maintenance.checks import Situation, decide_alerts
from comfyfleet.server.metrics import RollupPoint
from comfyfleet.server.storage import ObjectStore, open_store, outage, s3

ERROR = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>no space</Message></Error>"


class Bucket:
    def __init__(self) -> None:
        self.rejects_writes = False
        self.objects: dict[str, int] = {}
        self.url = ""

    def respond(self, request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        size, key = int(request.headers.get("content-length") or 0), request.path.partition("?")[0]
        request.rfile.read(size)
        if request.command == "PUT" and self.rejects_writes:
            return 500, ERROR
        if request.command == "PUT":
            self.objects[key] = size
        elif request.command == "DELETE":
            self.objects.pop(key, None)
        return 200, b""


@contextmanager
def serving(bucket: Bucket) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            status, body = bucket.respond(self)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    bucket.url = f"s3://bucket?endpoint=http://127.0.0.1:{server.server_address[1]}"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(s3, "TRIES_MAX", 1)
    monkeypatch.setattr(outage, "SETTLE_SECONDS", 0.0)
    bucket = Bucket()
    with serving(bucket):
        yield bucket


@pytest.fixture
async def store(bucket: Bucket) -> AsyncIterator[ObjectStore]:
    store = open_store(bucket.url, public_url="", secret=b"", clock=utc_now)
    yield store
    await store.aclose()


async def read_in_all_ways(store: ObjectStore) -> None:
    await store.check()
    await store.head("a/b")
    await store.get("a/b")
    await store.url_to_get("a/b", seconds=60)
    await store.url_to_put("a/b", content_type="text/plain", seconds=60)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


async def test_reads_do_not_end_an_outage_of_writes(
    bucket: Bucket, store: ObjectStore, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    bucket.rejects_writes = True
    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(Unavailable):
        await store.put_file("a/b", tmp_path / "a", "text/plain")
    await read_in_all_ways(store)
    assert store.outage.rejects_writes
    assert not store.outage.is_full
    bucket.rejects_writes = False
    await store.put_file("a/b", tmp_path / "a", "text/plain")
    assert not store.outage.rejects_writes
    assert [line.partition(":")[0] for line in lines(caplog)] == [
        "the bucket bucket is unavailable",
        "the bucket bucket is available again",
    ]


async def test_signing_a_url_ends_no_outage(bucket: Bucket, store: ObjectStore) -> None:
    store.outage.note_failure(Unavailable("S3 can't be reached"), is_write=False)
    assert await store.url_to_get("a/b", seconds=60)
    changed = asyncio.Event()
    store.outage.on_change = changed.set
    await store.get("a/b")
    assert changed.is_set()


async def test_writes_are_tried_until_one_succeeds(
    bucket: Bucket, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PROBE_SECONDS", 0.0)
    failures, ended = 0, asyncio.Event()

    def count() -> None:
        nonlocal failures
        failures += 1
        bucket.rejects_writes = failures < 3
        if not store.outage.rejects_writes:
            ended.set()

    store.outage.on_change = count
    bucket.rejects_writes = True
    with pytest.raises(Unavailable):
        await store.put("a/b", b"1", "text/plain")
    probing = store._probing  # type: ignore[attr-defined]
    await ended.wait()
    await probing
    assert failures == 4
    assert bucket.objects == {}, "the probe is deleted"


async def test_uploads_get_503_and_the_plane_stays_in_service(
    bucket: Bucket, sqlite_databases: Databases, tmp_path: Path
) -> None:
    opened = plane_on(sqlite_databases, tmp_path, storage_url=bucket.url)
    async with opened as plane, clients_of(plane) as clients:
        ada = await clients.new_client()
        bucket.rejects_writes = True
        answer = await ada.post("/upload/image", files={"image": ("a.png", b"1", "image/png")})
        assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5")
        assert answer.headers["content-type"].startswith("application/json")
        ready = await ada.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["store"]) == (200, "store_not_writable")


@pytest.mark.parametrize("is_full", [True, False])
def test_a_store_that_rejects_writes_is_one_alert(is_full: bool) -> None:
    now = utc_now()
    lately = RollupPoint(now, 900.0, {})
    (alert,) = decide_alerts(
        Situation(lately=lately, is_store_full=is_full, rejects_store_writes=True)
    )
    assert ("is full" in alert.message) == is_full


async def test_a_full_store_stays_full_when_writes_fail_in_another_way(store: ObjectStore) -> None:
    store.outage.note_failure(StoreFull("full"))
    store.outage.note_failure(Unavailable("InternalError"))
    assert store.outage.is_full
