"""Serves an engine on a port, until the process ends or inside a `with` block, and controls access
to it."""

import base64
import contextlib
import hmac
import ipaddress
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.engine import file_routes, info_routes, prompt_routes
from comfyfleet.engine.engine import DataFolder, Engine
from comfyfleet.engine.node import EngineNodeType
from comfyfleet.engine.nodes import registry
from comfyfleet.engine.prompt_routes import serve_socket
from comfyfleet.errors import ServerUnavailable
from comfyfleet.protocol.http import Router, is_local_name

SOCKETS = {"/ws": serve_socket, "/api/ws": serve_socket}
ROUTES = (
    *prompt_routes.ROUTES,
    *file_routes.ROUTES,
    *info_routes.INFO_ROUTES,
    *info_routes.ROUTES,
    *info_routes.INTERNAL_ROUTES,
)


def create_app(engine: Engine) -> Router[Engine]:
    return Router(engine, engine, ROUTES, SOCKETS)


USER = "engine"


@dataclass(frozen=True)
class AccessGuard:
    """Refuses unauthorized requests. If `is_local` is set, the host name must be local. Otherwise,
    a web page could reach this machine by DNS rebinding. If `key` is set, requests must contain
    it."""

    app: ASGIApp
    is_local: bool
    key: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = self._refusal(scope)
        if status is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await Response(status_code=status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> int | None:
        if scope["type"] == "lifespan":
            return None
        headers = Headers(scope=scope)
        if self.is_local and not is_local_name(headers.get("host")):
            return 403
        if self.key is not None and not _is_key(headers.get("authorization", ""), self.key):
            return 401
        return None


def is_local(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _is_key(header: str, key: str) -> bool:
    expected = base64.b64encode(f"{USER}:{key}".encode()).decode()
    return hmac.compare_digest(header.encode(), f"Basic {expected}".encode())


START_SECONDS_MAX = 10.0
STOP_SECONDS_MAX = 10.0
GRACE_SECONDS = 3
# Seconds until an idle connection is closed. ComfyUI uses the same time, and clients that reuse
# connections rely on it.
KEEP_ALIVE_SECONDS = 75
LISTEN_BACKLOG = 128

AppOf = Callable[[Engine], ASGIApp]


@dataclass(frozen=True, slots=True)
class Served:
    """A running engine and its address."""

    url: str
    engine: Engine


@contextlib.contextmanager
def serve_in_thread(
    *,
    data: Path | None = None,
    nodes: Mapping[str, EngineNodeType] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    dies_like_comfyui: bool = False,
    app_of: AppOf = create_app,
) -> Iterator[Served]:
    """Serves an engine in a thread of this process. Port 0 chooses any free port.

    Without `data`, the engine's files are deleted afterwards. `dies_like_comfyui` lets its executor
    thread die in the cases in which ComfyUI's does.
    """
    with contextlib.ExitStack() as stack:
        root = data or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = Engine(
            DataFolder(root),
            registry() if nodes is None else nodes,
            dies_like_comfyui=dies_like_comfyui,
        )
        listener = stack.enter_context(listen(host, port))
        server = uvicorn.Server(_config(AccessGuard(app_of(engine), is_local(listener))))
        stack.enter_context(_in_thread(server, listener))
        yield Served(url_of(listener), engine)


def serve(engine: Engine, listener: socket.socket, *, key: str | None = None) -> None:
    """Serves until SIGINT or SIGTERM. Both stop the server gracefully, with exit code 0."""
    guarded = AccessGuard(create_app(engine), is_local(listener), key)
    _StoppableServer(_config(guarded)).run(sockets=[listener])


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
    # The protocol must be given, because asyncio disables Nagle's algorithm only for sockets that
    # are explicitly TCP. The algorithm would delay each request by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, REUSE, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ws="websockets-sansio",
        # No pings, because a node that blocks the interpreter would look like a dead connection.
        ws_ping_interval=None,
        # No compression, because most clients are nearby, so that sending uncompressed messages is
        # faster.
        ws_per_message_deflate=False,
    )


class _StoppableServer(uvicorn.Server):
    """A server that exits normally on a signal. uvicorn would raise the signal again after its
    shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:
            self.should_exit = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _in_thread(server: uvicorn.Server, listener: socket.socket) -> Iterator[None]:
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="engine-server", daemon=True
    )
    thread.start()
    try:
        _wait_until_started(server, thread)
        yield
    finally:
        server.should_exit = True
        thread.join(STOP_SECONDS_MAX)


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    pause = threading.Event()
    for _ in range(int(START_SECONDS_MAX / 0.01)):
        if server.started:
            return
        if not thread.is_alive():
            break
        pause.wait(0.01)
    raise ServerUnavailable("the engine did not start")
