"""Requests that two readers could understand differently, or that never end; whichever parser reads them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from tests.security.test_strangers import KINDS, closed, listening

from comfyfleet.server.http import connections, listener
from comfyfleet.server.http.connections import (
    HEAD_BYTES_MAX,
    PIPELINED_MAX,
    H11Connection,
    HttpConnection,
    with_limits,
)

GET = b"GET /one HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /one HTTP/1.1\r\nHost: x\r\n"
LAST = b"Connection: close\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
PATIENCE_SECONDS = 10

pytestmark = KINDS


class Echo:
    """Answers with the request's path, and keeps what it has seen."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.scopes: list[Scope] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.begun: list[str] = []
        self.says = 1  # its path, so many times
        self.follows = asyncio.Event()
        self.has_seen_the_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        self.begun.append(scope["path"])
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                self.bodies.append(body)
                self.scopes.append(scope)
                break
        if scope["path"] == "/follow":
            self.follows.set()
            assert (await receive())["type"] == "http.disconnect"
            self.has_seen_the_end.set()
        said = scope["path"].encode() * self.says
        length = (b"content-length", str(len(said)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await self.may_go_on.wait()
        await send({"type": "http.response.body", "body": said})


@pytest.fixture
async def app() -> Echo:
    return Echo()


@pytest.fixture
async def url(app: Echo, kind: type[HttpConnection]) -> AsyncIterator[str]:
    patient = with_limits(kind, header_seconds_max=1000, linger_seconds=1000)
    async with listening(app, patient) as url:
        yield url


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer(url: str, sent: bytes) -> bytes:
    """All that comes back until the server hangs up."""
    reader, writer = await opened(url)
    writer.write(sent)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await reader.read()
    finally:
        writer.close()


async def test_a_body_has_one_length(url: str, app: Echo) -> None:
    both = POST + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\nGET /two HTTP/1.1\r\n\r\n"
    for sent in (both, POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef"):
        told = await answer(url, sent)
        assert told.startswith(b"HTTP/1.1 400 ")
        assert told.count(b"HTTP/1.1") == 1
    assert app.bodies == []


async def test_what_trails_a_body_is_no_header(url: str, app: Echo) -> None:
    sent = POST + CHUNKED + LAST + b"3\r\nabc\r\n0\r\nAuthorization: Bearer k\r\n\r\n"
    assert (await answer(url, sent)).startswith(b"HTTP/1.1 200 ")
    assert app.bodies == [b"abc"]
    assert b"authorization" not in dict(app.scopes[0]["headers"])


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET /one HTTP/1.1\r\nA: " + b"b" * 2 * HEAD_BYTES_MAX, id="header"),
        pytest.param(b"GET /" + b"a" * 2 * HEAD_BYTES_MAX, id="path"),
        pytest.param(GET + b"A: b\r\n" * HEAD_BYTES_MAX, id="many"),
        pytest.param(POST + CHUNKED + b"\r\n0\r\nA: " + b"b" * 2 * HEAD_BYTES_MAX, id="trailer"),
    ],
)
async def test_headers_without_end_are_not_kept(url: str, sent: bytes) -> None:
    """They end the connection, not a clock; who still sends may see no answer."""
    told = await closed(url, sent, b"b" * HEAD_BYTES_MAX)
    assert told == b"" or told.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 200 "))


async def test_a_request_names_its_host_once(url: str, app: Echo) -> None:
    for hosts in (b"", b"Host: x\r\nHost: y\r\n"):
        told = await answer(url, b"GET /one HTTP/1.1\r\n" + hosts + b"\r\n")
        assert told.startswith(b"HTTP/1.1 400 ")
    assert (await answer(url, b"GET /one HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert len(app.scopes) == 1


async def test_requests_that_come_together_are_answered_in_order(url: str) -> None:
    sent = GET + b"\r\n" + GET.replace(b"one", b"two") + b"\r\n" + GET.replace(b"one", b"six")
    told = await answer(url, sent + LAST)
    assert [told.index(path) for path in (b"/one", b"/two", b"/six")] == sorted(
        told.index(path) for path in (b"/one", b"/two", b"/six")
    )


async def test_who_asks_for_another_protocol_is_answered_in_this_one(url: str) -> None:
    told = await answer(url, GET + b"Upgrade: h2c\r\nConnection: close, upgrade\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200 ")
    assert told.count(b"HTTP/1.1") == 1


async def test_an_answer_comes_in_one_piece(url: str) -> None:
    reader, writer = await opened(url)
    for _ in range(3):
        writer.write(GET + b"\r\n")
        told = await asyncio.wait_for(reader.read(HEAD_BYTES_MAX), PATIENCE_SECONDS)
        assert told.startswith(b"HTTP/1.1 200 ")
        assert told.endswith(b"\r\n\r\n/one")
    writer.close()


async def test_a_head_does_not_wait_for_its_body(url: str, app: Echo) -> None:
    app.may_go_on.clear()
    reader, writer = await opened(url)
    writer.write(GET + b"\r\n")
    head: Any = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
    assert head.startswith(b"HTTP/1.1 200 ")
    app.may_go_on.set()
    assert await asyncio.wait_for(reader.readexactly(4), PATIENCE_SECONDS) == b"/one"
    writer.close()


async def test_who_is_to_go_on_is_told_so(url: str, app: Echo) -> None:
    reader, writer = await opened(url)
    writer.write(POST + b"Content-Length: 3\r\nExpect: 100-continue\r\n" + LAST)
    told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
    assert told.startswith(b"HTTP/1.1 100 ")
    writer.write(b"abc")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    assert app.bodies == [b"abc"]
    writer.close()


def numbered(count: int) -> list[bytes]:
    return [GET.replace(b"one", f"{number:03}".encode()) + b"\r\n" for number in range(count)]


def paths(told: bytes) -> list[bytes]:
    """Of the answers, in their order."""
    return [each.partition(b"\r\n\r\n")[2] for each in told.split(b"HTTP/1.1 200 OK")[1:]]


async def test_so_many_requests_wait_behind_one_and_no_more(
    url: str, app: Echo, kind: type[HttpConnection]
) -> None:
    """Those before the first that is refused are answered, in order, and none behind it is begun."""
    app.may_go_on.clear()
    reader, writer = await opened(url)
    sent = [*numbered(PIPELINED_MAX + 10), GET.replace(b"one", b"026") + LAST]
    writer.write(b"".join(sent))
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
    assert app.begun == ["/000"]
    app.may_go_on.set()
    told = b"HTTP/1.1 200 OK\r\n\r\n" + await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()
    answered, _, refusal = told.partition(b"HTTP/1.1 400 ")
    assert paths(answered) == [f"/{number:03}".encode() for number in range(len(app.begun))]
    if kind is H11Connection:  # which parses one request after the other
        assert len(app.begun) == len(sent)
    else:
        assert len(app.begun) == 1 + PIPELINED_MAX
        assert b"connection: close" in refusal


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"nothing of HTTP\r\n\r\n", id="head"),
        pytest.param(POST + CHUNKED + b"\r\nno length\r\n", id="body"),
    ],
)
async def test_who_sends_a_bad_request_behind_good_ones_is_refused_after_their_answers(
    url: str, app: Echo, bad: bytes
) -> None:
    told = await answer(url, b"".join(numbered(3)) + bad)
    answered, _, refusal = told.partition(b"HTTP/1.1 400 ")
    assert paths(answered)[:3] == [b"/000", b"/001", b"/002"]
    assert refusal
    assert app.bodies == [b""] * 3


async def test_a_request_with_others_behind_it_is_told_when_its_caller_hangs_up(
    url: str, app: Echo
) -> None:
    _reader, writer = await opened(url)
    writer.write(GET.replace(b"one", b"follow") + b"\r\n" + GET + b"\r\n")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await app.follows.wait()
        writer.transport.abort()
        await app.has_seen_the_end.wait()


async def test_who_does_not_read_is_answered_no_further(url: str, app: Echo) -> None:
    """What was said and not taken is kept for one answer, not for all that were asked for."""
    app.says = 2**18  # a megabyte, of which the system keeps some
    count = PIPELINED_MAX
    reader, writer = await opened(url)
    writer.write(b"".join(numbered(count)))
    begun = -1
    async with asyncio.timeout(PATIENCE_SECONDS):
        while begun != len(app.begun):
            begun = len(app.begun)
            await asyncio.sleep(0.2)
        assert begun <= count // 2 + 1
        told = b""
        for number in range(count):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            told = await reader.readexactly(4 * app.says)
            assert told.startswith(f"/{number:03}".encode())
    writer.close()


async def test_a_poll_that_waits_behind_another_request_keeps_no_other_poll_out(
    url: str, app: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "POLLS_AT_ONCE", 1)
    poll = b"POST /api/worker/poll HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
    _reader, writer = await opened(url)
    writer.write(GET.replace(b"one", b"follow") + b"\r\n" + poll + b"\r\n")
    await asyncio.wait_for(app.follows.wait(), PATIENCE_SECONDS)
    for _ in range(2):
        assert (await answer(url, poll + LAST)).startswith(b"HTTP/1.1 200 ")
    assert app.begun == ["/follow", *["/api/worker/poll"] * 2]
    writer.transport.abort()


async def test_a_server_that_is_to_stop_does_not_wait_until_it_looks_again(
    app: Echo, kind: type[HttpConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "DATE_SECONDS", 1000.0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        async with listening(app, with_limits(kind)) as url:
            assert b"date: " in await answer(url, GET + LAST)
