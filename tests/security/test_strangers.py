"""Callers without a key: they cost nothing but a refusal, however much or slowly they send."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock
from tests.support.server.asgi import free_listener, url_of
from tests.support.server.control_plane import ADMIN_KEY, plane_on

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.connections import (
    HAS_HTTPTOOLS,
    H11Connection,
    HttpConnection,
    HttptoolsConnection,
    with_limits,
)
from comfyfleet.server.http.listener import serve
from comfyfleet.server.http.public.auth import STRANGERS_AT_ONCE
from comfyfleet.server.http.request_body import (
    SMALL_BYTES,
    VALUES_MAX,
    BodyLimits,
    parse,
    read_json,
)

MIB = 1024**2
KINDS = pytest.mark.parametrize(
    "kind", [H11Connection, *([HttptoolsConnection] if HAS_HTTPTOOLS else [])]
)
DOORS = ("/api/worker/register", "/api/worker/poll", "/api/admin/workflows", "/api/ai-jobs")


@pytest.fixture
async def plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        yield plane


@asynccontextmanager
async def listening(app: Any, connection: type[HttpConnection] | None = None) -> AsyncIterator[str]:
    listener, stop = free_listener(), asyncio.Event()
    serving = asyncio.create_task(serve(app, listener, stop, connection=connection))
    try:
        yield url_of(listener)
    finally:
        stop.set()
        await serving


class Upload:
    """A body of 20 MiB, and how much of it was asked for."""

    def __init__(self, path: str, *headers: tuple[bytes, bytes]) -> None:
        self.read = 0
        self.status = 0
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
        }

    async def receive(self) -> Message:
        self.read += MIB
        return {
            "type": "http.request",
            "body": b"[]," * (MIB // 3),
            "more_body": self.read < 20 * MIB,
        }

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)


@pytest.mark.parametrize("path", DOORS)
async def test_nothing_of_a_body_is_read_before_the_key_is_known(
    plane: ControlPlane, path: str
) -> None:
    for headers in (
        [],
        [(b"authorization", b"Bearer wrong"), (b"x-fleet-secret", b"wrong")],
        [(b"content-length", str(20 * MIB).encode())],
    ):
        upload = Upload(path, *headers)
        await create_app(plane)(upload.scope, upload.receive, upload.send)
        assert (upload.status, upload.read) == (401, 0)


async def test_a_path_without_a_key_takes_no_more_than_64_kib(plane: ControlPlane) -> None:
    upload = Upload("/healthz", (b"content-length", str(65 * 1024).encode()))
    await create_app(plane)(upload.scope, upload.receive, upload.send)
    assert (upload.status, upload.read) == (413, 0)


async def test_others_are_answered_while_a_stranger_sends_20_mib(plane: ControlPlane) -> None:
    body = b"[[]" + b",[]" * (20 * MIB // 3) + b"]"
    async with (
        listening(create_app(plane)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as stranger,
        httpx.AsyncClient(base_url=url, timeout=60) as other,
    ):
        headers = {"Content-Type": "application/json"}
        large = asyncio.create_task(
            stranger.post("/api/worker/register", content=body, headers=headers)
        )
        for _ in range(5):
            assert (await other.get("/healthz")).status_code == 200
        assert (await large).status_code == 401


async def closed(url: str, *sent: bytes, every_seconds: float = 0.05) -> bytes:
    """What comes back until the server hangs up, while the last bytes are sent again and again."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"".join(sent))

    async def trickle() -> None:
        while sent:
            await asyncio.sleep(every_seconds)
            writer.write(sent[-1])

    trickling = asyncio.create_task(trickle())
    came = b""
    try:
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(30):
                while more := await reader.read(65536):
                    came += more
        return came
    finally:
        trickling.cancel()
        writer.close()


@KINDS
async def test_headers_that_never_end_end_the_connection(
    plane: ControlPlane, kind: type[HttpConnection]
) -> None:
    short = with_limits(kind, header_seconds_max=0.3)
    async with listening(create_app(plane), short) as url:
        assert await closed(url) == b""
        assert await closed(url, b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"A: b\r\n") == b""


@KINDS
async def test_a_refused_body_that_still_trickles_in_ends_the_connection(
    plane: ControlPlane, kind: type[HttpConnection]
) -> None:
    short = with_limits(kind, linger_seconds=0.3)
    head = b"POST /api/ai-jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n"
    async with listening(create_app(plane), short) as url:
        assert b" 401 " in (await closed(url, head, b"[")).splitlines()[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [("203.0.113.5", "203.0.113.6"), ("2001:db8:0:1::5", "2001:db8:0:2::5")],
)
async def test_strangers_behind_a_proxy_are_told_apart_and_ipv6_by_subscriber(
    sqlite_databases: Databases, tmp_path: Path, one: str, other: str
) -> None:
    async with (
        plane_on(sqlite_databases, tmp_path, clock=ManualClock()) as plane,
        listening(create_app(plane)) as url,
        httpx.AsyncClient(base_url=url) as proxy,
    ):

        async def status(address: str) -> int:
            headers = {"X-Forwarded-For": f"198.51.100.1, {address}"}
            return (await proxy.get("/api/shared/nothing", headers=headers)).status_code

        for number in range(STRANGERS_AT_ONCE):
            # An address of IPv6 changes as often as its owner likes.
            assert await status(f"{one}{number:x}" if ":" in one else one) == 404
        assert await status(one) == 429
        assert await status(other) == 404


async def test_a_connection_beyond_the_limit_is_told_to_come_again(plane: ControlPlane) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        listening(create_app(plane), with_limits(connections_max=1)) as url,
        httpx.AsyncClient(base_url=url, headers=headers) as first,
        httpx.AsyncClient(base_url=url) as second,
    ):
        assert (await first.get("/api/admin/fleets")).status_code == 200
        refused = await second.get("/healthz")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert (await first.get("/api/admin/fleets")).status_code == 200


async def test_a_body_that_does_not_arrive_in_time_is_given_up() -> None:
    async def read_all(_scope: Scope, receive: Receive, _send: Send) -> None:
        while (await receive()).get("more_body"):
            pass

    async def trickle() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(_message: Message) -> None: ...

    upload = Upload("/api/ai-jobs")
    with pytest.raises(HTTPException) as given_up:
        await BodyLimits(read_all, 10**6, seconds_max=0.1)(upload.scope, trickle, send)
    assert given_up.value.status_code == 408


async def test_a_large_body_with_a_key_is_parsed_beside_the_loop() -> None:
    body = json.dumps([{"a": [each]} for each in range(30_000)]).encode()
    assert len(body) > SMALL_BYTES
    reading = asyncio.create_task(read_json(body, parse))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert await reading == json.loads(body)
    assert turns > 10


async def test_a_body_of_very_many_values_is_refused_unparsed(plane: ControlPlane) -> None:
    body = b"[" + b"0," * VALUES_MAX + b"0]"
    transport = httpx.ASGITransport(create_app(plane))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
        answer = await client.post("/api/admin/workflows", content=body, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "a request can have at most 200,000 values"
