"""One suite for httpx's own transport and for ours: whoever calls can't tell them apart, but by CPU."""

import asyncio
import gc
import gzip
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from tests.support.server.certificate import certificate

from comfyfleet.transport.http import NOT_SENT, describe_network_error, open_client
from comfyfleet.transport.http1 import CONNECTIONS_MAX, Http1Transport

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
KEEP_ALIVE_SECONDS = 4.0


@pytest.fixture(params=["httpx", "http1"])
def make(request: pytest.FixtureRequest) -> Callable[..., httpx.AsyncClient]:
    def client(
        verify: ssl.SSLContext | bool = True, keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    ) -> httpx.AsyncClient:
        if request.param == "http1":
            ours = Http1Transport(verify=verify, keep_alive_seconds=keep_alive_seconds)
            return httpx.AsyncClient(transport=ours)
        limits = httpx.Limits(max_connections=100, keepalive_expiry=keep_alive_seconds)
        return httpx.AsyncClient(verify=verify, limits=limits)

    return client


@pytest.fixture
async def client(make: Callable[..., httpx.AsyncClient]) -> AsyncIterator[httpx.AsyncClient]:
    async with make() as client:
        yield client


class Server:
    """Runs a handler for each connection; counts connections, and the heads of requests."""

    def __init__(self, handler: Handler) -> None:
        self.connections = 0
        self.heads: list[bytes] = []
        self.port = 0
        self.closed = asyncio.Event()  # a connection was
        self._handler = handler
        self._hearing = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def secure_url(self) -> str:
        return f"https://localhost:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._handler(reader, writer)
        writer.close()
        self.closed.set()

    async def head(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        async with self._hearing:
            self.heads.append(head)
            self._hearing.notify_all()
        return head

    async def heard(self, requests: int) -> None:
        async with self._hearing:
            await self._hearing.wait_for(lambda: len(self.heads) >= requests)


@asynccontextmanager
async def serving(
    handler: Callable[[Server], Handler], secure: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    server: Server = Server(lambda reader, writer: handler(server)(reader, writer))
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=secure)
    server.port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield server


def answering(*answers: bytes) -> Callable[[Server], Handler]:
    """One answer for each request without a body; then the connection is closed."""

    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for answer in answers:
                await server.head(reader)
                writer.write(answer)
                await writer.drain()

        return handle

    return of


def hanging(server: Server) -> Handler:
    """Reads, and never answers."""

    async def handle(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await server.head(reader)
        await reader.read()

    return handle


def reset(writer: asyncio.StreamWriter) -> None:
    found: socket.socket = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# Connections


async def test_a_connection_serves_one_call_after_the_other(client: httpx.AsyncClient) -> None:
    async with serving(answering(OK, NO_CONTENT, OK)) as server:
        texts = [(await client.get(server.url)).text for _ in range(3)]
    assert texts == ["ok", "", "ok"]
    assert server.connections == 1


async def test_one_that_the_server_has_closed_is_not_used_again(client: httpx.AsyncClient) -> None:
    async with serving(answering(OK)) as server:
        await client.post(server.url)
        await server.closed.wait()
        assert (await client.post(server.url)).text == "ok"
    assert server.connections == 2


async def test_one_that_was_idle_for_long_is_not_used_again(
    make: Callable[..., httpx.AsyncClient],
) -> None:
    async with make(keep_alive_seconds=0.0) as client, serving(answering(OK, OK)) as server:
        await client.post(server.url)
        await client.post(server.url)
    assert server.connections == 2


async def test_bytes_that_nobody_has_asked_for_answer_no_later_call(
    client: httpx.AsyncClient,
) -> None:
    async with serving(answering(OK + OK.replace(b"ok", b"no"))) as server:
        assert (await client.get(server.url)).text == "ok"
        assert (await client.get(server.url)).text == "ok"
    assert server.connections == 2


async def test_bytes_that_come_later_answer_no_later_call(client: httpx.AsyncClient) -> None:
    said = asyncio.Event()

    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(OK)
            await said.wait()
            writer.write(OK.replace(b"ok", b"no"))
            await writer.drain()
            await reader.read()

        return handle

    async with serving(of) as server:
        assert (await client.get(server.url)).text == "ok"
        said.set()
        for _ in range(20):  # rounds of the loop, in which they arrive
            await asyncio.sleep(0)
        assert (await client.get(server.url)).text == "ok"
    assert server.connections == 2


async def test_a_call_that_was_given_up_leaves_no_connection(client: httpx.AsyncClient) -> None:
    async with serving(hanging) as server:
        call = asyncio.create_task(client.post(server.url))
        await server.heard(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.closed.wait()


async def test_calls_given_up_at_any_moment_leave_their_places_to_others(
    client: httpx.AsyncClient,
) -> None:
    """And no socket: the collector would warn of it."""
    async with serving(answering(NO_CONTENT)) as server:
        for steps in range(CONNECTIONS_MAX + 10):
            call = asyncio.create_task(client.post(server.url))
            for _ in range(steps % 40):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        timeout = httpx.Timeout(60, pool=0.01)
        assert (await client.post(server.url, timeout=timeout)).status_code == 204
    gc.collect()


async def test_a_body_that_was_not_read_to_its_end_leaves_no_connection(
    client: httpx.AsyncClient,
) -> None:
    half = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nok"

    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(half)
            await reader.read()

        return handle

    async with serving(of) as server:
        async with client.stream("GET", server.url) as response:
            assert response.status_code == 200
        await server.closed.wait()


async def test_more_calls_than_allowed_wait_for_a_place(client: httpx.AsyncClient) -> None:
    async with serving(hanging) as server:
        calls = [
            asyncio.create_task(client.get(server.url, timeout=60)) for _ in range(CONNECTIONS_MAX)
        ]
        await server.heard(CONNECTIONS_MAX)
        with pytest.raises(httpx.PoolTimeout):
            await client.post(server.url, timeout=httpx.Timeout(60, pool=0.01))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


# Errors: was it sent?


async def test_a_refused_connection_has_sent_nothing(client: httpx.AsyncClient) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(httpx.ConnectError) as failed:
            await client.post(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert describe_network_error(failed.value) == "connection refused"


async def test_an_unknown_host_has_heard_nothing(client: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.ConnectError) as failed:
        await client.post("http://nobody.invalid/")
    assert describe_network_error(failed.value) == "the host name can't be resolved"


async def test_a_handshake_that_takes_too_long_has_sent_nothing(client: httpx.AsyncClient) -> None:
    async with serving(hanging) as server:
        with pytest.raises(httpx.ConnectTimeout):
            await client.post(server.secure_url, timeout=httpx.Timeout(60, connect=0.05))


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
@pytest.mark.parametrize("is_reused", [False, True])
async def test_a_connection_that_is_closed_after_the_request_may_have_been_heard_and_is_not_called_again(
    client: httpx.AsyncClient, method: str, *, is_reused: bool
) -> None:
    """The call that was cut is sent once: who repeats it is for the caller to say."""

    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if is_reused:
                await server.head(reader)
                writer.write(OK)
            await server.head(reader)

        return handle

    async with serving(of) as server:
        if is_reused:
            await client.get(f"{server.url}/first")
        with pytest.raises(httpx.TransportError) as failed:
            await client.request(method, f"{server.url}/cut")
    assert not isinstance(failed.value, NOT_SENT)
    assert [each for each in server.heads if b"/cut" in each] == [server.heads[-1]]
    assert server.connections == 1


@pytest.mark.parametrize("method", ["GET", "PUT", "POST"])
async def test_a_reset_after_the_request_may_have_been_heard(
    client: httpx.AsyncClient, method: str
) -> None:
    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            reset(writer)

        return handle

    async with serving(of) as server:
        with pytest.raises(httpx.ReadError):
            await client.request(method, server.url)
    assert len(server.heads) == 1


async def test_an_answer_that_takes_too_long_may_have_been_heard(client: httpx.AsyncClient) -> None:
    async with serving(hanging) as server:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(server.url, timeout=httpx.Timeout(60, read=0.02))
        await server.closed.wait()


async def test_a_body_that_is_not_taken_ends_in_time(client: httpx.AsyncClient) -> None:
    done = asyncio.Event()

    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            await done.wait()

        return handle

    async with serving(of) as server:
        with pytest.raises(httpx.WriteTimeout):
            await client.put(
                server.url, content=bytes(32_000_000), timeout=httpx.Timeout(60, write=0.05)
            )
        done.set()


async def test_what_is_no_http_may_have_been_heard(client: httpx.AsyncClient) -> None:
    async with serving(answering(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")) as server:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(server.url)


async def test_a_head_without_end_is_not_kept(client: httpx.AsyncClient) -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 1_000_000)) as server:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(server.url)


async def test_a_header_that_would_be_two_is_refused(client: httpx.AsyncClient) -> None:
    async with serving(answering(OK)) as server:
        with pytest.raises(httpx.LocalProtocolError):
            await client.get(server.url, headers={"x": "a\r\ny: b"})
        assert server.heads == []


async def test_another_scheme_is_refused(client: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.UnsupportedProtocol):
        await client.get("ftp://127.0.0.1/")


# Bodies


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nto its close", b"to its close"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nin\r\n5\r\n two \r\n0\r\n\r\n",
            b"in two ",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", b""),
    ],
)
async def test_a_body_ends_where_the_answer_says(
    client: httpx.AsyncClient, answer: bytes, body: bytes
) -> None:
    async with serving(answering(answer)) as server:
        assert (await client.get(server.url)).content == body


async def test_a_packed_body_is_unpacked(client: httpx.AsyncClient) -> None:
    packed = gzip.compress(b"a text")
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
    async with serving(answering(head.encode() + packed)) as server:
        assert (await client.get(server.url)).text == "a text"


async def test_status_and_headers_are_told_as_they_came(client: httpx.AsyncClient) -> None:
    answer = b"HTTP/1.1 418 Of Clay\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX: 1\r\ncontent-length: 0\r\n\r\n"
    async with serving(answering(answer)) as server:
        found = await client.get(server.url)
    assert (found.status_code, found.reason_phrase, found.http_version) == (418, "Of Clay", "HTTP/1.1")  # fmt: skip
    assert found.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert dict(client.cookies) == {"a": "1", "b": "2"}


async def test_head_has_no_body(client: httpx.AsyncClient) -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n", OK)) as server:
        assert (await client.head(server.url)).content == b""
        assert (await client.get(server.url)).text == "ok"
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
async def test_a_body_that_was_cut_is_no_body(client: httpx.AsyncClient, answer: bytes) -> None:
    async with serving(answering(answer)) as server:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url)


async def test_a_reset_does_not_end_a_body_without_length(client: httpx.AsyncClient) -> None:
    read = asyncio.Event()

    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
            await read.wait()
            reset(writer)

        return handle

    async with serving(of) as server, client.stream("GET", server.url) as response:
        body = response.aiter_raw()
        assert await anext(body) == b"half"
        read.set()
        with pytest.raises(httpx.ReadError):
            await anext(body)


SIZE = 5_000_000


async def chunks() -> AsyncIterator[bytes]:
    for _ in range(5):
        await asyncio.sleep(0)
        yield b"x" * (SIZE // 5)


@pytest.mark.parametrize("headers", [{}, {"content-length": str(SIZE)}])
async def test_a_streamed_body_arrives_whole(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    arrived = 0

    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal arrived
            head = (await server.head(reader)).lower()
            if b"content-length" in head:
                arrived += len(await reader.readexactly(SIZE))
            else:
                assert b"transfer-encoding: chunked" in head
                while size := int(await reader.readline(), 16):
                    arrived += len((await reader.readexactly(size + 2))[:-2])
            writer.write(OK)

        return handle

    async with serving(of) as server:
        assert (await client.put(server.url, content=chunks(), headers=headers)).text == "ok"
    assert arrived == SIZE


async def test_a_body_that_breaks_off_on_this_side_is_no_body(client: httpx.AsyncClient) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise OSError("the disk is gone")

    async with serving(hanging) as server:
        with pytest.raises(OSError, match="the disk is gone"):
            await client.put(server.url, content=broken(), headers={"content-length": "8"})
        await server.closed.wait()


async def test_an_answer_before_the_end_of_the_body_is_heard(client: httpx.AsyncClient) -> None:
    answer = b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n"

    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(answer)
            while await reader.read(1_000_000):
                pass

        return handle

    async with serving(of) as server:
        found = await client.put(server.url, content=chunks())
    assert found.status_code == 413


async def test_a_body_that_is_not_read_makes_the_server_wait(client: httpx.AsyncClient) -> None:
    waits, size = asyncio.Event(), 64_000_000

    def of(server: Server) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode())
            for _ in range(64):
                writer.write(bytes(1_000_000))
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(writer.drain()), 0.1)
                    continue
                waits.set()
                await writer.drain()

        return handle

    async with serving(of) as server, client.stream("GET", server.url) as response:
        await waits.wait()
        assert sum([len(each) async for each in response.aiter_raw()]) == size


# TLS and proxies


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.fixture
def secure(pem: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    return context


async def test_a_certificate_that_is_trusted_is_taken(
    make: Callable[..., httpx.AsyncClient], pem: Path, secure: ssl.SSLContext
) -> None:
    trust = ssl.create_default_context(cafile=str(pem))
    async with make(verify=trust) as client, serving(answering(OK, OK), secure) as server:
        url = server.secure_url
        assert [(await client.get(url)).text for _ in range(2)] == ["ok", "ok"]
    assert server.connections == 1


async def test_a_certificate_that_is_not_trusted_is_refused_and_nothing_sent(
    client: httpx.AsyncClient, secure: ssl.SSLContext
) -> None:
    async with serving(answering(OK), secure) as server:
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await client.post(server.secure_url)
    assert server.heads == []


async def test_one_that_the_environment_names_is_trusted(
    make: Callable[..., httpx.AsyncClient],
    pem: Path,
    secure: ssl.SSLContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    async with make() as client, serving(answering(OK), secure) as server:
        assert (await client.get(server.secure_url)).text == "ok"


async def test_a_certificate_need_not_be_trusted_if_so_told(
    make: Callable[..., httpx.AsyncClient], secure: ssl.SSLContext
) -> None:
    async with make(verify=False) as client, serving(answering(OK), secure) as server:
        assert (await client.get(server.secure_url)).text == "ok"


async def test_a_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(answering(OK)) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        async with open_client("http://fleet.invalid") as client:
            assert (await client.get("/here")).text == "ok"
    assert proxy.heads[0].startswith(b"GET http://fleet.invalid/here ")


async def test_a_host_with_two_addresses_that_refuse_is_told_as_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

        async def two(*_: object, **__: object) -> list[object]:
            kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            return [(*kind, ("127.0.0.1", port)), (*kind, ("127.0.0.2", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two)
        async with open_client(f"http://two.test:{port}") as client:
            with pytest.raises(httpx.ConnectError) as failed:
                await client.get("/")
    assert describe_network_error(failed.value) == "connection refused"
