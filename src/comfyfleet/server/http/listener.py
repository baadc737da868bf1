"""Serves an application on a port until the process is told to stop."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from comfyfleet.errors import ServerUnavailable
from comfyfleet.server.http.connections import HttpConnection, with_limits
from comfyfleet.server.http.websockets import FRAME_BYTES_MAX, LimitedWebSocket
from comfyfleet.signals import on_ending_signals

# Long polls that wait at the stop get so long to be answered; then they are cut off.
GRACE_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
# Ten thousand workers may come back at the same moment.
LISTEN_BACKLOG = 4096
# A process that hands over leaves connections so long to be used once more; then idle ones are closed.
HAND_OVER_SECONDS = 5.0
HAND_OVER_LOOK_SECONDS = 0.05
# How often an answer's date is renewed.
DATE_SECONDS = 1.0
_CLOSE = (b"connection", b"close")
ANYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, not listened on


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return _bound(family, host, port)
    except OSError as error:
        raise ServerUnavailable(
            f"{host}:{port} can't be listened on: {error.strerror or error}",
            hint="Another process may have that port: choose one with --port, or 0 for any.",
        ) from error


# On Windows, SO_REUSEADDR would let another program take over the port.
REUSE = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    # asyncio turns Nagle's delay off only for sockets that say they are TCP.
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
    """Listens on a Unix socket; replaces a previous listener's path atomically."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_suffix(f".{os.getpid()}")
    listener.bind(str(new))
    listener.listen(LISTEN_BACKLOG)
    new.rename(path)
    return listener


def listener_url(listener: socket.socket) -> str:
    """Returns the URL for clients on this machine."""
    host, port = listener.getsockname()[:2]
    name = "127.0.0.1" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


@dataclass(frozen=True)
class SharedSocket:
    """Additional arguments for a process that shares its socket with others."""

    at_ready: Callable[[], object]
    hand_over: asyncio.Event  # set: the others are to get what comes
    more: Sequence[socket.socket] = ()  # that only this one listens on


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    at_stop: Callable[[], object] = lambda: None,
    connection: type[HttpConnection] | None = None,
    shared: SharedSocket | None = None,
) -> None:
    """Serves until `stop` is set; `at_stop` ends waiting requests."""
    server = _Server(
        uvicorn.Config(
            app,
            # So many connections are accepted at a time: of a shared socket one, or a process that is
            # quick would take all that the others are to serve.
            backlog=1 if shared else LISTEN_BACKLOG,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ws=LimitedWebSocket,
            ws_max_size=FRAME_BYTES_MAX,
            ws_per_message_deflate=False,
            http=connection or with_limits(),
        ),
        shared.at_ready if shared else lambda: None,
    )
    listeners = [listener, *shared.more] if shared else [listener]
    work = asyncio.create_task(server.serve(sockets=listeners), name="http")
    waiting = {asyncio.create_task(stop.wait())}
    if shared:
        waiting.add(asyncio.create_task(shared.hand_over.wait()))
    await asyncio.wait({work, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()
    if shared and shared.hand_over.is_set():
        await server.hand_over(stop, at_stop)
    at_stop()
    server.exit()
    await work


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to us, so that API, sweeps and workers stop in order."""

    def __init__(self, config: uvicorn.Config, at_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._at_ready = at_ready
        self._is_to_exit = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)
        self._at_ready()

    def exit(self) -> None:
        self.should_exit = True
        self._is_to_exit.set()

    async def main_loop(self) -> None:
        """The server's own looks ten times a second whether it is to exit: a sixth of what an idle one does."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_SECONDS):
                    await self._is_to_exit.wait()

    async def hand_over(self, stop: asyncio.Event, at_stop: Callable[[], object]) -> None:
        """Stops accepting connections; responses to open ones have `Connection: close`, so that
        clients reconnect to another process."""
        for server in self.servers:
            server.close()
        self.config.encoded_headers.append(_CLOSE)
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        deadline = asyncio.get_running_loop().time() + HAND_OVER_SECONDS
        while self.server_state.connections and not stop.is_set():
            if asyncio.get_running_loop().time() > deadline:
                return
            at_stop()
            await asyncio.sleep(HAND_OVER_LOOK_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yields an event that SIGINT or SIGTERM sets; a second signal has its default effect."""
    stop = asyncio.Event()
    with contextlib.ExitStack() as handlers:

        def ask() -> None:
            stop.set()
            handlers.close()

        handlers.enter_context(on_ending_signals(ask))
        yield stop
