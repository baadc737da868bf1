"""A transport of httpx: HTTP/1.1 by h11 on asyncio's own connections, for half of the CPU of httpx's own transport.

Its errors tell whether a request may have been heard: ConnectError, ConnectTimeout and PoolTimeout mean that not
a byte of it has left. Nothing is ever sent twice. No proxies, and no HTTP/2.
"""

import asyncio
import contextlib
import errno
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator
from typing import NamedTuple, TypeAlias, cast

import h11
import httpx

from comfyfleet.transport.ssrf import parse_address

CONNECTIONS_MAX = 100
IDLE_CONNECTIONS_MAX = 20
HEAD_BYTES_MAX = 100 * 1024
# What has come and was not read yet. Above it the other side has to wait.
UNREAD_BYTES_MAX = 256 * 1024
# After that long the next address of a host is tried, too.
NEXT_ADDRESS_SECONDS = 0.25
# An address that took a request and didn't answer is the last choice for so long.
SILENT_SECONDS = 60.0


class ServerOrigin(NamedTuple):
    scheme: str
    host: str
    port: int


class Timeouts(NamedTuple):
    """Seconds for one step each: a place, a connection, a write, a read. None: any."""

    pool: float | None = None
    connect: float | None = None
    write: float | None = None
    read: float | None = None


Event: TypeAlias = h11.Response | h11.InformationalResponse | h11.Data | h11.EndOfMessage


class Http1Transport(httpx.AsyncBaseTransport):
    """Keeps idle connections for `keep_alive_seconds`. `verify` as of httpx."""

    def __init__(self, *, verify: ssl.SSLContext | bool, keep_alive_seconds: float) -> None:
        self._verify = verify
        self._keep_alive_seconds = keep_alive_seconds
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        self._connections: set[Connection] = set()
        self._idle: dict[ServerOrigin, list[Connection]] = {}
        self._silent: dict[str, float] = {}  # addresses, and until when they are avoided

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeouts = Timeouts(**request.extensions.get("timeout", {}))
        await self._take_place(timeouts.pool)
        connection: Connection | None = None
        try:
            origin = _origin(request.url)
            connection = self._idle_connection(origin) or await self._open(origin, timeouts)
            head = await connection.exchange(request, timeouts)
        except httpx.ReadTimeout:
            self._note_silent(connection)
            self._release(connection)
            raise
        except BaseException:
            self._release(connection)
            raise
        return httpx.Response(
            head.status_code,
            headers=head.headers.raw_items(),
            stream=ResponseBody(self, connection, timeouts.read),
            extensions={
                "http_version": b"HTTP/" + head.http_version,
                "reason_phrase": bytes(head.reason),
            },
        )

    async def aclose(self) -> None:
        for connection in self._connections:
            connection.abort()
        self._connections.clear()
        self._idle.clear()
        # The loop closes what was aborted in its next round.
        await asyncio.sleep(0)

    async def _take_place(self, seconds: float | None) -> None:
        if self._places.locked():
            try:
                async with asyncio.timeout(seconds):
                    await self._places.acquire()
            except TimeoutError as error:
                raise httpx.PoolTimeout(f"{CONNECTIONS_MAX} calls are under way") from error
        else:
            await self._places.acquire()

    def _idle_connection(self, origin: ServerOrigin) -> "Connection | None":
        """The one that was used last; what has waited for too long is closed."""
        since = time.monotonic() - self._keep_alive_seconds
        for each in [each for all_of in self._idle.values() for each in all_of]:
            if each.is_closed or each.idle_since < since:
                self._idle[each.origin].remove(each)
                self._discard(each)
        found = self._idle.get(origin, [])
        while found:
            connection = found.pop()
            if not connection.is_readable():
                return connection
            self._discard(connection)
        return None

    def _note_silent(self, connection: "Connection | None") -> None:
        """A host may be hung as a whole: the next call takes a new connection, to another address if there is one."""
        if connection is None:
            return
        self._silent[connection.address] = time.monotonic() + SILENT_SECONDS
        for idle in self._idle.pop(connection.origin, []):
            self._discard(idle)

    async def _answering_address(self, origin: ServerOrigin) -> str:
        """Returns the host, or one of its addresses if another of them was silent lately."""
        now = time.monotonic()
        self._silent = {address: until for address, until in self._silent.items() if until > now}
        if not self._silent or parse_address(origin.host):
            return origin.host
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        others = [each for each in addresses if each not in self._silent]
        return others[0] if others and len(others) < len(addresses) else origin.host

    async def _open(self, origin: ServerOrigin, timeouts: Timeouts) -> "Connection":
        secure = self._ssl_context() if origin.scheme == "https" else None
        # Only for names: a call that is given up while asyncio races may leave a socket to the collector.
        delay = None if parse_address(origin.host) else NEXT_ADDRESS_SECONDS
        try:
            async with asyncio.timeout(timeouts.connect):
                host = await self._answering_address(origin)
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(origin),
                    host,
                    origin.port,
                    ssl=secure,
                    server_hostname=origin.host if secure else None,
                    happy_eyeballs_delay=delay,
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(str(error)) from _cause_of(error)
        self._connections.add(connection)
        return connection

    def _ssl_context(self) -> ssl.SSLContext:
        """Made for the first connection that wants one: the certificates take time to read."""
        if not isinstance(self._verify, ssl.SSLContext):
            self._verify = httpx.create_ssl_context(verify=self._verify)
        self._verify.set_alpn_protocols(["http/1.1"])
        return self._verify

    def give_back(self, connection: "Connection") -> None:
        """After an answer: it is kept if the whole of it was read and both sides allow for it."""
        idle = sum(map(len, self._idle.values()))
        if idle < IDLE_CONNECTIONS_MAX and connection.start_next():
            self._idle.setdefault(connection.origin, []).append(connection)
            self._places.release()
        else:
            self._release(connection)

    def _release(self, connection: "Connection | None") -> None:
        self._places.release()
        if connection is not None:
            self._discard(connection)

    def _discard(self, connection: "Connection") -> None:
        connection.abort()
        self._connections.discard(connection)


class ResponseBody(httpx.AsyncByteStream):
    def __init__(
        self, transport: Http1Transport, connection: "Connection", read_seconds: float | None
    ) -> None:
        self._transport = transport
        self._connection: Connection | None = connection
        self._read_seconds = read_seconds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._connection is not None:
            event = await self._connection.next_event(self._read_seconds)
            if not isinstance(event, h11.Data):
                return
            yield bytes(event.data)

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(connection)


class Connection(asyncio.Protocol):
    """One request and its answer at a time."""

    def __init__(self, origin: ServerOrigin) -> None:
        self.origin = origin
        self.is_closed = False
        self.idle_since = 0.0
        self._is_idle = False
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._transport: asyncio.Transport
        self._loss: Exception | None = None
        self._unread_bytes = 0
        self._is_full = False  # what was written is still here, and more would only wait here, too
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def abort(self) -> None:
        self.is_closed = True
        self._loss = self._loss or ConnectionAbortedError("the connection was closed on this side")
        self._transport.abort()

    @property
    def address(self) -> str:
        """The address of the server, without its port."""
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else self.origin.host

    def is_readable(self) -> bool:
        """Of an idle one: it was closed by the server, though the loop has not told us yet."""
        sock = self._transport.get_extra_info("socket")
        if not hasattr(select, "poll"):  # Windows
            return bool(select.select([sock], [], [], 0)[0])
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))

    def start_next(self) -> bool:
        """Whether it may be used again."""
        is_done = self._state.our_state is h11.DONE and self._state.their_state is h11.DONE
        # Bytes after the end of an answer answer nothing that was asked.
        if self.is_closed or not is_done or self._state.trailing_data[0]:
            return False
        self._state.start_next_cycle()
        self._transport.resume_reading()  # else nobody would see that it is closed
        self.idle_since, self._is_idle = time.monotonic(), True
        return True

    async def exchange(self, request: httpx.Request, timeouts: Timeouts) -> h11.Response:
        """Sends a request, and gives the head of its answer."""
        self._is_idle = False
        # One that closes while we write has often answered before, such as "too large".
        with contextlib.suppress(httpx.WriteError):
            await self._send(request, timeouts.write)
        while True:
            event = await self.next_event(timeouts.read)
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise httpx.RemoteProtocolError(f"no answer, but {type(event).__name__}")

    async def next_event(self, seconds: float | None) -> Event:
        """Raises ReadError, ReadTimeout and RemoteProtocolError."""
        try:
            while (event := self._state.next_event()) is h11.NEED_DATA:
                await self._wait_for_bytes(seconds)
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        return cast(Event, event)

    async def _wait_for_bytes(self, seconds: float | None) -> None:
        self._unread_bytes = 0
        if self.is_closed:
            self._take_end()
            return
        self._transport.resume_reading()
        self._reader = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._reader
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no bytes within {seconds} s") from error

    def _take_end(self) -> None:
        """All that came was read. A body without a length ends here, unless it was cut."""
        if self._loss is not None:
            raise httpx.ReadError(str(self._loss)) from self._loss
        if self._state.their_state is h11.SEND_RESPONSE:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        self._state.receive_data(b"")

    async def _send(self, request: httpx.Request, seconds: float | None) -> None:
        try:
            unsent = self._bytes_of(_request_head(request))
            # The head goes with what is first of the body, in one packet.
            async for chunk in cast(httpx.AsyncByteStream, request.stream):
                await self._write(unsent + self._bytes_of(h11.Data(data=chunk)), seconds)
                unsent = b""
            await self._write(unsent + self._bytes_of(h11.EndOfMessage()), seconds)
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error

    def _bytes_of(self, event: h11.Event) -> bytes:
        return self._state.send(event) or b""

    async def _write(self, data: bytes, seconds: float | None) -> None:
        if self.is_closed:
            raise httpx.WriteError("the connection was closed") from self._loss
        if data:
            self._transport.write(data)
        if not self._is_full:
            return
        self._writer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._writer
        except TimeoutError as error:
            raise httpx.WriteTimeout(f"no bytes were taken within {seconds} s") from error

    # Called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            # Nobody has asked: it must not be taken for the answer to what is asked next.
            self.abort()
            return
        self._state.receive_data(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > UNREAD_BYTES_MAX:
            self._transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> None:
        self.is_closed = True
        _wake(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed, self._loss = True, self._loss or exc
        _wake(self._reader)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        _wake(self._writer)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


def _origin(url: httpx.URL) -> ServerOrigin:
    if url.scheme not in ("http", "https"):
        raise httpx.UnsupportedProtocol(f"the URL must begin with http:// or https://: {url}")
    default_port = 443 if url.scheme == "https" else 80
    return ServerOrigin(url.scheme, url.raw_host.decode("ascii"), url.port or default_port)


def _request_head(request: httpx.Request) -> h11.Request:
    return h11.Request(
        method=request.method, target=request.url.raw_path, headers=request.headers.raw
    )


def _cause_of(error: Exception) -> Exception:
    """Of a host with several addresses asyncio tells only in words that they have refused."""
    is_refusal = f"[Errno {errno.ECONNREFUSED}]" in str(error)
    return ConnectionRefusedError(str(error)) if is_refusal else error
