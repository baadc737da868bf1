"""An application on a port, until the process is told to stop."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from comfyfleet.http.connections import Connection
from comfyfleet.kernel.errors import ServerUnavailable

# Long polls that wait at the stop get so long to be answered; then they are cut off.
GRACE_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
# Ten thousand workers may come back at the same moment.
LISTEN_BACKLOG = 4096
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


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    # asyncio turns Nagle's delay off only for sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """As reached from this machine."""
    host, port = listener.getsockname()[:2]
    name = "127.0.0.1" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    at_stop: Callable[[], object] = lambda: None,
    connection: type[Connection] = Connection,
) -> None:
    """Until `stop` is set; `at_stop` lets those go who wait for an answer."""
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ws="none",
            http=connection,
        )
    )
    work = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    at_stop()
    server.should_exit = True
    await work


class _Server(uvicorn.Server):
    """The signals are ours: one stop ends the API, the sweeps and the workers in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[asyncio.Event]:
    """Set by SIGINT or SIGTERM; a second one does what it does by default, for the impatient."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def ask() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        # Outside the main thread, and on Windows, there are no such handlers.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, ask)
    try:
        yield stop
    finally:
        for number in numbers:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(number)
