"""A full object store: 507 with Retry-After, one line in the log, an alert, and an end without a restart."""

import errno
import io
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from comfyfleet.clock import utc_now
from comfyfleet.errors import StoreFull
from comfyfleet.server.http.objects import objects_routes
from comfyfleet.server.http.tallies import limit_transfers
from comfyfleet.server.storage import LocalStore, local, outage

LARGE = b"x" * 3_000_000
URL = "http://fleet.test"


class FullFile(io.FileIO):
    """A file on a disk with room for nothing more."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    @contextmanager
    def full(self) -> Iterator[None]:
        """Buffered writes fail when the buffer is written, which may be when the file is closed."""
        opened = Path.open

        def open_full(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if mode != "xb":
                return opened(path, mode, *arguments, **options)
            return io.BufferedWriter(FullFile(path, mode))

        with self._monkeypatch.context() as patched:
            patched.setattr(Path, "open", open_full)
            yield


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(outage, "SETTLE_SECONDS", 0.0)
    return Disk(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path, public_url=URL, secret=b"s" * 32, clock=utc_now)


@pytest.fixture
async def client(store: LocalStore) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=objects_routes(store))
    limit_transfers(app)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
        yield client


async def upload(store: LocalStore, client: httpx.AsyncClient, data: bytes) -> httpx.Response:
    granted = await store.url_to_put(
        "a/b.png", content_type="image/png", size=len(data), seconds=60
    )
    return await client.put(granted.url, content=data, headers=granted.headers)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("data", [b"small", LARGE], ids=["small", "large"])
async def test_uploads_get_507_and_the_log_one_line(
    store: LocalStore,
    client: httpx.AsyncClient,
    disk: Disk,
    data: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with disk.full():
        for _ in range(5):
            answer = await upload(store, client, data)
            assert answer.status_code == 507, answer.text
            assert answer.json()["error"]["code"] == "store_full"
            assert int(answer.headers["retry-after"]) > 0
        with pytest.raises(StoreFull):
            await store.put("c/d.bin", b"x" * 100, "application/octet-stream")
        assert store.outage.is_full
    (line,) = lines(caplog)
    assert "is full" in line
    assert (await upload(store, client, data)).status_code < 300
    assert not store.outage.is_full
    assert lines(caplog)[1:] == [f"the object store {store._folder.root} is available again"]
    assert "Traceback" not in caplog.text
    assert not any(local.ObjectFolder(store._folder.root)._incoming.iterdir())


async def test_small_files_that_still_fit_do_not_end_the_outage(
    store: LocalStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "SETTLE_SECONDS", 60.0)
    with disk.full(), pytest.raises(StoreFull):
        await store.put("c/d.bin", b"x" * 100, "application/octet-stream")
    await store.put("c/e.bin", b"x", "application/octet-stream")
    assert store.outage.is_full
