"""Connections without a valid key are limited by address, bodies by time, and both stay within the limit of open
files."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener
from tests.support.server.control_plane import ADMIN_KEY, plane_on
from tests.support.server.instant_time import run_instantly

from comfyfleet.cli import serve as serve_command
from comfyfleet.protocol.http import Handler, Route, Router, json_reply, read_json
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http import acceptor, body_times
from comfyfleet.server.http.acceptor import (
    FILES_PER_UPLOAD,
    OTHER_FILES,
    Acceptor,
    FileShares,
    divide_files,
    raise_files_limit,
)
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.body_times import BodyTimes
from comfyfleet.server.http.listener import serve
from comfyfleet.server.http.strangers import PER_ADDRESS_MAX, AddressLimiter, trusted_proxies

PATIENCE_SECONDS = 20
HALF_A_REQUEST = b"POST /editor/login HTTP/1.1\r\nHost: control.test\r\nContent-Length: 9\r\n\r\n"


@pytest.fixture
async def plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        yield plane


def of_all(per_address: int = PER_ADDRESS_MAX) -> AddressLimiter:
    """Counts clients of this machine, too."""
    return AddressLimiter(per_address, is_exempt=lambda _: False)


@asynccontextmanager
async def listening(
    plane: ControlPlane, limits: AddressLimiter | None = None
) -> AsyncIterator[tuple[str, int]]:
    listener, stop = free_listener(), asyncio.Event()
    serving = asyncio.create_task(
        serve(create_app(plane), listener, stop, at_stop=plane.end_waits, strangers=limits)
    )
    try:
        yield listener.getsockname()
    finally:
        stop.set()
        await serving


class Clients:
    """Raw connections that are closed at the end."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(self, request: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*self._address)
        self.open.append((reader, writer))
        writer.write(request)
        return reader

    async def status(self, *headers: str, path: str = "/healthz") -> int:
        lines = [f"GET {path} HTTP/1.1", "Host: control.test", *headers, "", ""]
        return await status_of(await self.connect("\r\n".join(lines).encode()))

    async def close(self) -> None:
        for _, writer in self.open:
            writer.close()
        for _, writer in self.open:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self.open.clear()


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(PATIENCE_SECONDS):
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1])


async def until_status(clients: Clients, header: str, status: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await clients.status(header, path="/") != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_address_opens_at_most_100_connections_without_a_valid_key(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.1")
    async with listening(plane, of_all()) as address:
        clients = Clients(address)
        for _ in range(PER_ADDRESS_MAX - 1):
            await clients.connect(HALF_A_REQUEST)
        assert await clients.status() == 200, "the hundredth is served"
        assert await clients.status() == 429
        await clients.close()
        while await clients.status() != 200:  # closed connections no longer count
            await clients.close()
        await clients.close()


async def test_a_connection_that_has_sent_a_valid_key_no_longer_counts(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.1")
    key = f"Authorization: Bearer {ADMIN_KEY}"
    async with listening(plane, of_all(2)) as address:
        clients = Clients(address)
        for _ in range(5):
            assert await clients.status(key, path="/api/admin/fleets") == 200
        assert await clients.status(f"{key}x", path="/api/admin/fleets") == 401
        assert await clients.status() == 200
        assert await clients.status(key, path="/api/admin/fleets") == 429, "a wrong key counts"
        await clients.close()


async def test_connections_of_this_machine_are_not_limited(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.1")  # not because it is a proxy
    async with listening(plane) as address:
        clients = Clients(address)
        for _ in range(PER_ADDRESS_MAX + 10):
            await clients.connect(HALF_A_REQUEST)
        assert await clients.status() == 200
        await clients.close()


FORWARDED_UPLOAD = (
    b"POST /editor/login HTTP/1.1\r\nHost: control.test\r\nX-Forwarded-For: 203.0.113.7\r\n"
    b"Content-Length: 9\r\nOrigin: http://control.test\r\n\r\n"
)


async def test_clients_without_a_key_lock_out_no_key_and_no_health_check_of_their_address(
    plane: ControlPlane,
) -> None:
    key, of_same = f"Authorization: Bearer {ADMIN_KEY}", "X-Forwarded-For: 203.0.113.7"
    async with listening(plane, of_all(5)) as address:
        clients = Clients(address)
        for _ in range(PER_ADDRESS_MAX):
            await clients.connect(FORWARDED_UPLOAD)
        await until_status(clients, of_same, 429)
        assert await clients.status(of_same) == 200, "a health check"
        assert await clients.status(of_same, f"{key}x", path="/") == 429
        assert await clients.status(of_same, f"{key}x", path="/api/admin/fleets") == 401
        assert await clients.status(of_same, key, path="/") == 429, "a key that was never checked"
        assert await clients.status(of_same, key, path="/api/admin/fleets") == 200
        assert await clients.status(of_same, key, path="/") == 200
        await clients.close()


async def test_requests_through_a_proxy_count_by_their_forwarded_address(
    plane: ControlPlane,
) -> None:
    """The proxy is 127.0.0.1, which is trusted by default; its own connections are not limited."""
    async with listening(plane, of_all(5)) as address:
        clients = Clients(address)
        for _ in range(PER_ADDRESS_MAX):
            await clients.connect(FORWARDED_UPLOAD)
        of_same = "X-Forwarded-For: 203.0.113.7"
        await until_status(clients, of_same, 429)  # all of them were read
        assert await clients.status("X-Forwarded-For: 203.0.113.8", path="/") == 200
        assert await clients.status(path="/") == 200, "requests of the proxy itself"
        await clients.close()
        await until_status(clients, of_same, 200)
        await clients.close()


def test_an_ipv6_subscriber_counts_once_and_ipv4_is_the_same_when_mapped() -> None:
    limits = AddressLimiter(2)
    assert limits.enter("2001:db8:1:2::1") is not None
    assert limits.enter("2001:db8:1:2:ffff::9") is not None
    assert limits.enter("2001:db8:1:2::3") is None
    assert limits.enter("2001:db8:1:3::1") is not None
    assert [bool(limits.enter(each)) for each in ("203.0.113.7", "::ffff:203.0.113.7")] == [
        True
    ] * 2
    assert limits.enter("203.0.113.7") is None
    assert all(limits.enter(each) for each in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "") * 3)


def test_a_slot_is_released_once() -> None:
    limits = AddressLimiter(2)
    first, second = limits.enter("203.0.113.7"), limits.enter("203.0.113.7")
    assert first is not None
    assert second is not None
    first.release()
    first.release()
    assert limits.enter("203.0.113.7") is not None
    assert limits.enter("203.0.113.7") is None


def test_networks_of_proxies_are_trusted() -> None:
    is_trusted = trusted_proxies("10.0.0.0/8,192.0.2.1")
    assert [is_trusted(each) for each in ("10.1.2.3", "192.0.2.1", "192.0.2.2")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("files", [400, 1024, 4096, 65_536, 1_048_576])
def test_connections_and_their_files_stay_below_the_limit_of_open_files(files: int) -> None:
    shares = divide_files(files, 20_000)
    used = shares.connections + shares.downloads + FILES_PER_UPLOAD * shares.uploads
    assert used + OTHER_FILES <= files
    assert shares.connections == 20_000 or used + OTHER_FILES > files - FILES_PER_UPLOAD


async def test_a_control_plane_divides_the_limit_that_it_has_raised(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[FileShares] = []

    async def serve_app(app: Any, *_: object, connection: Any, **others: object) -> None:
        transfers = app.state.downloads, app.state.uploads
        limits = (limit._limit for limit in transfers)
        served.append(FileShares(connection.connections_max, *limits))

    monkeypatch.setattr(serve_command, "limit_collections", lambda: None)
    monkeypatch.setattr(serve_command, "raise_files_limit", lambda: 1024)
    monkeypatch.setattr(serve_command, "serve_app", serve_app)
    await serve_command.serve_plane(plane, None, asyncio.Event())
    assert served == [divide_files(1024, plane.settings.max_connections)]


def test_the_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    code = (
        "import resource as r; from comfyfleet.server.http.acceptor import raise_files_limit;"
        "r.setrlimit(r.RLIMIT_NOFILE, (300, 700)); print(raise_files_limit(),"
        " r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.split() == ["700", "700"]


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Opens files up to a limit close above those that are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_without_files_logs_once_and_accepts_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_SECONDS", 0.01)
    accepted: list[socket.socket] = []
    listener = free_listener()
    client = socket.create_connection(listener.getsockname())
    accepting = Acceptor(listener, lambda found, _: accepted.append(found))
    with caplog.at_level(logging.WARNING):
        with no_more_files():
            accepting.start()
            await asyncio.sleep(0.2)  # about twenty tries
            assert not accepted
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not accepted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert Counter(each.message for each in caplog.records) == {
        "can't accept connections: Too many open files": 1
    }
    accepting.close()
    for each in (client, *accepted):
        each.close()


async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
    """A plain application that knows no deadline, such as a route of the editor."""
    while (await receive()).get("more_body"):
        pass
    await Response("read")(scope, receive, send)


async def swallow(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that takes the error for one of its own."""
    try:
        await read_all(scope, receive, send)
    except HTTPException:
        await Response("wrong", 400)(scope, receive, send)


def status_after(
    app: Any, path: str, chunks: Iterable[bytes], *, seconds_between: float = 0.0, ends: bool
) -> int:
    """Sends the chunks, then nothing more; returns the status. Takes no time."""
    left = list(chunks)
    statuses: list[int] = []

    async def receive() -> Message:
        if left:
            await asyncio.sleep(seconds_between)
            more = len(left) > 1 or not ends
            return {"type": "http.request", "body": left.pop(0), "more_body": more}
        await asyncio.sleep(10 * body_times.FILE_SECONDS_MAX)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-length", b"100")],
    }

    async def call() -> None:
        await BodyTimes(app)(scope, receive, send)

    run_instantly(call())
    (status,) = statuses
    return status


@pytest.mark.parametrize("app", [read_all, swallow])
@pytest.mark.parametrize("path", ["/editor/login", "/api/ai-jobs", "/hooks/x", "/prompt"])
def test_a_body_that_is_no_file_must_be_complete_in_a_minute(app: Any, path: str) -> None:
    assert status_after(app, path, [b"key"], ends=True) == 200
    assert status_after(app, path, [b"key"], ends=False) == 408
    drops = [b"k"] * 60
    assert status_after(app, path, drops, seconds_between=0.99, ends=True) == 200
    assert status_after(app, path, drops, seconds_between=1.01, ends=True) == 408


FILE_PATHS = ("/api/objects/a", "/upload/image", "/editor/api/upload/mask", "/api/v2/assets")


@pytest.mark.parametrize("path", FILE_PATHS)
def test_a_file_must_keep_arriving(path: str) -> None:
    fast, slow = [b"x" * 1024] * 300, [b"x" * 1000] * 300
    assert status_after(read_all, path, fast, seconds_between=1, ends=True) == 200
    assert status_after(read_all, path, slow, seconds_between=1, ends=True) == 408
    assert status_after(read_all, path, [b"x"], ends=False) == 408
    assert status_after(read_all, path, [b"x" * 10**5] * 2, seconds_between=59, ends=True) == 200
    assert status_after(read_all, path, [b"x" * 10**5] * 2, seconds_between=61, ends=True) == 408


async def test_a_half_sent_log_in_ends(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BodyTimes.__init__, "__defaults__", (0.1, 0.1))
    async with listening(plane) as address:
        clients = Clients(address)
        assert await status_of(await clients.connect(HALF_A_REQUEST)) in (403, 408)
        reader = await clients.connect(
            HALF_A_REQUEST.replace(b"Content", b"Origin: http://control.test\r\nContent")
        )
        assert await status_of(reader) == 408
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.read()  # it is closed
        await clients.close()
    assert not errors_in(caplog)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


async def read_in_handler(state: None, request: Request) -> Response:
    return json_reply(len(await request.body()))


async def read_json_in_handler(state: None, request: Request) -> Response:
    return json_reply(await read_json(request))


@pytest.mark.parametrize("handler", [read_in_handler, read_json_in_handler])
@pytest.mark.parametrize("path", ["/prompt", "/upload/image"])
def test_a_slow_body_is_no_error_of_the_routes_of_the_editor_and_the_gateway(
    path: str, handler: Handler[None], caplog: pytest.LogCaptureFixture
) -> None:
    router = Router(None, None, [Route("POST", path, handler)], {})
    assert status_after(router, path, [b"[1"], ends=False) == 408
    assert not errors_in(caplog)


def test_the_default_limit_of_files_is_known() -> None:
    assert raise_files_limit() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0
