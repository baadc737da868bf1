"""Serves an ASGI application on a port until the process must stop."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from comfyfleet.errors import ServerUnavailable
from comfyfleet.server.http.acceptor import LISTEN_BACKLOG, Acceptor, ClientSocket, refuse
from comfyfleet.server.http.body_times import SlowReaders
from comfyfleet.server.http.connections import (
    CALLER_LIMITS,
    HttpConnection,
    close_some,
    with_limits,
)
from comfyfleet.server.http.strangers import AddressLimiter, trusted_proxies
from comfyfleet.server.http.tallies import CallerLimits, KeylessConnections, StrangerSlot, Tally
from comfyfleet.server.http.websockets import FRAME_BYTES_MAX, PING_SECONDS, LimitedWebSocket
from comfyfleet.signals import on_ending_signals

logger = logging.getLogger(__name__)
# Seconds that a stopping server waits for open requests before it cancels them.
GRACE_SECONDS = 5.0
# Seconds that a stopping server waits for the first request on a new connection.
FIRST_REQUEST_SECONDS = 1.0
# Seconds that the application has to close its WebSockets itself.
WEBSOCKET_SECONDS = 3.0
# Seconds that a canceled request has to answer 503.
CANCEL_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 75
# After a handover to another process, open connections can send one more request within this many
# seconds. Idle ones are closed afterwards.
HAND_OVER_SECONDS = 5.0
# Seconds between two checks of whether all connections are closed.
HAND_OVER_LOOK_SECONDS = 0.05
# Seconds between updates of the date header.
DATE_SECONDS = 1.0
_CLOSE = (b"connection", b"close")
ANYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - only compared, never used to listen


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return _bound(family, host, port)
    except OSError as error:
        raise ServerUnavailable(
            f"can't listen on {host}:{port}: {error.strerror or error}",
            hint="The port may be in use. Use --port with another port, or 0 for any free one.",
        ) from error


# On Windows, SO_REUSEADDR would let another program take over the port.
REUSE = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    # asyncio disables Nagle's algorithm only for sockets with the protocol number of TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, REUSE, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def listen_on_path(path: Path) -> socket.socket:
    """Listens on a Unix socket. If the path exists, it is replaced atomically."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_suffix(f".{os.getpid()}")
    listener.bind(str(new))
    listener.listen(LISTEN_BACKLOG)
    new.rename(path)
    return listener


def listener_url(listener: socket.socket) -> str:
    """Returns the URL of the listener for clients on this machine."""
    host, port = listener.getsockname()[:2]
    name = "127.0.0.1" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


class SocketSource(Protocol):
    """The source of connections for one of several processes."""

    def open(
        self,
        serve: Callable[[ClientSocket, StrangerSlot], None],
        move: Callable[[int], None],
    ) -> None:
        """Starts delivering connections to `serve`. Called when the process is ready.

        The source calls `move` with the number of connections that must move to other processes.
        """

    def take_rest(self) -> None:
        """Receives the connections that are on their way to this process. Called when it stops."""

    @property
    def hand_over(self) -> asyncio.Event:
        """An event that is set when another process takes over."""


@dataclass(frozen=True)
class SharedPort:
    """Additional arguments for a process that shares its port with other processes."""

    source: SocketSource
    more: Sequence[socket.socket] = ()  # further listeners, used by this process only


async def serve(
    app: ASGIApp,
    listener: socket.socket | None,
    stop: asyncio.Event,
    *,
    at_stop: Callable[[], object] = lambda: None,
    connection: type[HttpConnection] | None = None,
    shared: SharedPort | None = None,
    strangers: AddressLimiter | None = None,
) -> None:
    """Serves the application until `stop` is set, and then calls `at_stop` to end waiting requests.

    Without a listener, all connections come from `shared`. `strangers` limits the connections
    without a valid key per address. Loopback addresses and trusted proxies are exempt by default.
    """
    config = uvicorn.Config(
        app,
        # Only used on Windows. If the process is out of files, asyncio logs this many errors in a
        # row.
        backlog=1,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ws=LimitedWebSocket,
        ws_max_size=FRAME_BYTES_MAX,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=None,
        ws_per_message_deflate=False,
        http=connection or with_limits(),
    )
    server = _Server(config, shared.source if shared else None, strangers or AddressLimiter())
    listeners = [listener] if listener is not None else []
    listeners += shared.more if shared else []
    work = asyncio.create_task(server.serve(sockets=listeners), name="http")
    waiting = {asyncio.create_task(stop.wait())}
    if shared:
        waiting.add(asyncio.create_task(shared.source.hand_over.wait()))
    await asyncio.wait({work, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    if shared and shared.source.hand_over.is_set():
        await server.hand_over(stop, at_stop)
    server.close_listeners()
    server.close_soon()
    at_stop()
    server.exit()
    await work


class _Server(uvicorn.Server):
    """A uvicorn server that doesn't handle signals, so that we can stop the API, sweeps and workers
    in order."""

    def __init__(
        self,
        config: uvicorn.Config,
        source: SocketSource | None,
        strangers: AddressLimiter,
    ) -> None:
        super().__init__(config)
        self._source = source
        self._strangers = strangers.exempting(trusted_proxies(config.forwarded_allow_ips))
        self._acceptors: list[Acceptor] = []
        self._keyless = KeylessConnections()
        self._slow_readers = SlowReaders()
        self._opening: set[asyncio.Task[None]] = set()
        self._must_exit = asyncio.Event()
        self._closes = False  # whether connections close after their next response
        self._shut_down: set[object] = set()  # WebSockets and parked polls that are closing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        kind: Any = self.config.http_protocol_class
        self.lifespan.state[CALLER_LIMITS] = CallerLimits(kind.connections_max)
        if sys.platform == "win32":  # the event loop on Windows can't watch a listener
            await super().startup(sockets)
        else:
            await super().startup([])
            self._acceptors = [Acceptor(listener, self._take) for listener in sockets or ()]
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)
        for acceptor in self._acceptors:
            acceptor.start()
        if self._source is not None:
            self._source.open(self._serve_client, self._move)

    def _move(self, count: int) -> None:
        close_some(self.server_state.connections, count)

    def _take(self, accepted: socket.socket, address: str) -> None:
        slot = self._strangers.enter(address)
        if slot is None:
            refuse(accepted)
        else:
            self._serve_client(ClientSocket(accepted, slot.release), slot)

    def _serve_client(self, client: ClientSocket, slot: StrangerSlot) -> None:
        opening = asyncio.create_task(self._open(client, slot))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, client: ClientSocket, slot: StrangerSlot) -> None:
        def new_connection() -> asyncio.Protocol:
            kind: Any = self.config.http_protocol_class
            connection: HttpConnection = kind(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )
            connection.tally = tally
            connection.closes = self._closes
            return connection

        limits: CallerLimits = self.lifespan.state[CALLER_LIMITS]
        tally = Tally(slot, limits, self._keyless)
        client.add_close_callback(tally.close)
        try:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(new_connection, client)
        except OSError as error:  # the client has already disconnected
            logger.debug("a connection failed while it was opened: %s", error)
            client.close()
            return
        if client.fileno() >= 0:
            self._slow_readers.add(client, transport)
            client.add_close_callback(partial(self._slow_readers.discard, client))

    def exit(self) -> None:
        self.should_exit = True
        self._must_exit.set()

    async def main_loop(self) -> None:
        """Waits until the server must exit.

        uvicorn's own loop checks for this ten times a second, which accounts for a sixth of an idle
        process's CPU time.
        """
        clock = asyncio.get_running_loop().time
        while not await self.on_tick(0):
            self._slow_readers.check(clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_SECONDS):
                    await self._must_exit.wait()

    def close_listeners(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for server in getattr(self, "servers", ()):  # on Windows
            server.close()

    def close_soon(self) -> None:
        """Makes all connections close after their next response, including ones opened later."""
        self._closes = True
        close_some(self.server_state.connections, len(self.server_state.connections))

    async def hand_over(self, stop: asyncio.Event, at_stop: Callable[[], object]) -> None:
        """Stops accepting connections and closes open ones after their next response, so that
        clients connect to another process."""
        self.close_listeners()
        self.close_soon()
        self.config.encoded_headers.append(_CLOSE)
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        deadline = asyncio.get_running_loop().time() + HAND_OVER_SECONDS
        self._take_rest()
        while (self._opening or self.server_state.connections) and not stop.is_set():
            if asyncio.get_running_loop().time() > deadline:
                return
            at_stop()
            await asyncio.sleep(HAND_OVER_LOOK_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers open requests, closes idle connections, and cancels requests that take too long.

        uvicorn's own method isn't used, because it sends a plain-text 500 and logs a traceback when
        it cancels a request.
        """
        self.close_listeners()
        self._take_rest()
        loop = asyncio.get_running_loop()
        new_until = loop.time() + FIRST_REQUEST_SECONDS
        sockets_until = loop.time() + WEBSOCKET_SECONDS
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                while self._opening or self.server_state.connections or self.server_state.tasks:
                    self._close_connections(
                        spares_new=loop.time() < new_until,
                        spares_sockets=loop.time() < sockets_until,
                    )
                    await asyncio.sleep(HAND_OVER_LOOK_SECONDS)
        except TimeoutError:
            await self._cut_off()

    def _take_rest(self) -> None:
        if self._source is not None:
            self._source.take_rest()

    def _close_connections(self, *, spares_new: bool, spares_sockets: bool) -> None:
        """Closes idle connections now, and the others after their response.

        A request that has arrived but hasn't been read yet is still answered. With `spares_new`, so
        is the first request of a new connection. With `spares_sockets`, the application closes
        WebSockets itself.
        """
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpConnection):
                connection.close_if_idle(spares_new=spares_new)
            elif isinstance(connection, LimitedWebSocket) and connection.is_open and spares_sockets:
                continue
            elif connection not in self._shut_down:
                self._shut_down.add(connection)
                connection.shutdown()

    async def _cut_off(self) -> None:
        """Cancels open requests. `AccessLog` answers 503 to requests without a response."""
        connections, tasks = list(self.server_state.connections), list(self.server_state.tasks)
        logger.warning("canceling %d requests that didn't finish in time", len(tasks))
        for connection in connections:
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and cycle.response_started and not cycle.response_complete:
                connection.transport.abort()
        await asyncio.sleep(0)  # lets the event loop call connection_lost
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yields an event that is set on SIGINT or SIGTERM. A second signal has its default effect."""
    stop = asyncio.Event()
    with contextlib.ExitStack() as handlers:

        def request_stop(number: signal.Signals) -> None:
            logger.info("stopping: %s received", number.name)
            stop.set()
            handlers.close()

        handlers.enter_context(on_ending_signals(request_stop))
        yield stop
