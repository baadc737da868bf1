"""Reads requests within limits, routes them to handlers, and replies like ComfyUI's web server.

Also refuses foreign origins. Every route exists as `/x` and as `/api/x`."""

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, Generic, Protocol, TypeVar, cast
from urllib.parse import urlsplit

from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from comfyfleet.errors import FleetError, LimitExceeded
from comfyfleet.protocol.payloads import InvalidQuery, MalformedBody, RefusedPrompt, UnforeseenInput


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Checks whether a browser sent the request on behalf of another site's page."""
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    host, origin = headers.get("host"), headers.get("origin")
    # Browsers send this for pages without an origin, such as sandboxed ones.
    if origin == "null":
        return True
    if not host or not origin:
        return False
    return _is_other_site(host.lower(), origin.lower())


def _is_other_site(host: str, origin: str) -> bool:
    try:
        own, other = urlsplit(f"//{host}"), urlsplit(origin)
        ports = own.port, other.port
    except ValueError:
        return True
    if not own.hostname or not other.hostname or not _is_loopback(own.hostname):
        # If the host isn't a loopback address, the browser itself keeps foreign pages from reading
        # responses.
        return False
    # Compare only the host names if one of the two addresses has no port.
    if None in ports:
        return own.hostname != other.hostname
    return own.netloc != other.netloc


def is_local_name(host: str | None) -> bool:
    """Checks whether the Host header is a local name, which no other site's page can have as its
    origin."""
    try:
        hostname = urlsplit(f"//{host or ''}".lower()).hostname
    except ValueError:
        return False
    return bool(hostname) and _is_loopback(hostname or "")


def _is_loopback(hostname: str) -> bool:
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        return hostname == "localhost" or hostname.endswith(".localhost")


JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
NOTHING = "application/octet-stream"


def json_text(value: Any) -> str:
    # Non-ASCII characters are escaped. Otherwise, a lone surrogate from a request couldn't be
    # encoded.
    return json.dumps(value, separators=(",", ":"))


def json_reply(body: Any, status: int = 200) -> Response:
    return Response(json_text(body), status, {"content-type": JSON})


def names_etag(header: str, etag: str) -> bool:
    """Checks whether an `If-None-Match` header contains the ETag."""
    etags = (item.strip().removeprefix("W/") for item in header.split(","))
    return any(item in (etag, "*") for item in etags)


def empty_reply(status: int = 200) -> Response:
    return Response(b"", status, {"content-type": NOTHING})


def text_reply(text: str, status: int = 200) -> Response:
    return Response(text, status, {"content-type": TEXT})


NO_UPGRADE = 'No WebSocket UPGRADE hdr: None\n Can "Upgrade" only to "WebSocket".'


def internal_error() -> Response:
    return text_reply("500 Internal Server Error\n\nServer got itself in trouble", 500)


def too_large_reply(limit_bytes: int) -> Response:
    return text_reply(f"Maximum request body size {limit_bytes} exceeded", 413)


def not_allowed_reply(methods: Iterable[str]) -> Response:
    """Returns a 405. GET and HEAD are always allowed, because ComfyUI's static files match every
    path for them."""
    allowed = ",".join(sorted({"GET", "HEAD", *methods}))
    headers = {"content-type": TEXT, "allow": allowed}
    return Response("405: Method Not Allowed", 405, headers)


BODY_BYTES_MAX = 100 * 1024 * 1024
FIELD_BYTES_MAX = 1024 * 1024
PARTS_MAX = 100
MULTIPART = "multipart/form-data"
# The status that proxies log when the client has disconnected. The response is never received.
CLIENT_GONE = 499


class BodyTooLarge(LimitExceeded):
    code = "body_too_large"


def limit_body(receive: Receive, bytes_max: int = BODY_BYTES_MAX) -> Receive:
    """Wraps `receive` so that a body above the limit raises BodyTooLarge. The declared length is
    not trusted."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > bytes_max:
            raise BodyTooLarge(f"the body is larger than {bytes_max} bytes", bytes_max=bytes_max)
        return message

    return receive_limited


async def read_json(request: Request) -> object:
    """Parses the body as JSON, regardless of its content type."""
    body = await request.body()
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the body is not valid JSON: {error}") from error


@contextlib.asynccontextmanager
async def open_form(request: Request, folder: Path | None = None) -> AsyncIterator[FormData]:
    """Opens the form. Its files exist until the end of the block.

    `folder` is the directory for large files in the meantime. None means the system's temporary
    directory.
    """
    try:
        form = await _read_form(request, folder)
    except (MultiPartException, HTTPException) as error:
        raise UnforeseenInput(f"the form can't be read: {error}") from error
    try:
        yield form
    finally:
        await form.close()


async def _read_form(request: Request, folder: Path | None) -> FormData:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != MULTIPART:
        return await request.form(max_files=PARTS_MAX, max_fields=PARTS_MAX)
    parser = _FormParser(
        request.headers,
        request.stream(),
        max_files=PARTS_MAX,
        max_fields=PARTS_MAX,
        max_part_size=FIELD_BYTES_MAX,
    )
    parser.folder = folder
    return await parser.parse()


class _FormParser(MultiPartParser):
    """Stores temporary files in a specific folder."""

    folder: Path | None = None

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        upload = self._current_part.file
        if upload is not None:
            upload.file.close()
            folder = None if self.folder is None else str(self.folder)
            file = SpooledTemporaryFile(max_size=self.spool_max_size, dir=folder)  # noqa: SIM115
            upload.file = cast("BinaryIO", file)
            self._files_to_close_on_error[-1] = file


# The object that handlers work with: the engine, or an object that contains it.
T = TypeVar("T")
Handler = Callable[[T, Request], Awaitable[Response]]
SocketHandler = Callable[[T, WebSocket], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route(Generic[T]):
    """A route. `path` may contain `{name}` for one segment, and `{name:path}` for the rest of the
    path."""

    method: str
    path: str
    handler: Handler[T]
    prefixes: tuple[str, ...] = ("", "/api")


@dataclass(frozen=True, slots=True)
class _Pattern(Generic[T]):
    expression: re.Pattern[str]
    handlers: dict[str, Handler[T]] = field(default_factory=dict)


class Lifespan(Protocol):
    """An object that is started and stopped with the server."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def stop(self) -> None: ...


class Router(Generic[T]):
    """The ASGI application. Handlers get `app_state`. `lifespan` is started and stopped with the
    server."""

    def __init__(
        self,
        app_state: T,
        lifespan: Lifespan | None,
        routes: Iterable[Route[T]],
        sockets: Mapping[str, SocketHandler[T]],
    ) -> None:
        self._app_state = app_state
        self._lifespan = lifespan
        self._sockets = sockets
        self._fixed: dict[str, dict[str, Handler[T]]] = {}
        self._patterns: dict[str, _Pattern[T]] = {}
        for route in routes:
            for prefix in route.prefixes:
                self._add(prefix + route.path, route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope, limit_body(receive, self.body_bytes_max(scope["path"])))
            response = await self.answer(request)
            await response(scope, receive, send)
        elif scope["type"] == "websocket":
            await self.talk(WebSocket(scope, receive, send))
        else:
            await self._run_lifespan(receive, send)

    def _add(self, path: str, route: Route[T]) -> None:
        if "{" in path:
            handlers = self._patterns.setdefault(path, _Pattern(_expression(path))).handlers
        else:
            handlers = self._fixed.setdefault(path, {})
        handlers[route.method] = route.handler

    async def answer(self, request: Request) -> Response:
        if is_foreign(request.headers):
            return empty_reply(403)
        if request.method == "OPTIONS":
            return empty_reply()
        try:
            return await self._dispatch(request)
        except RefusedPrompt as refused:
            return json_reply(refused.body, 400)
        except InvalidQuery as error:
            return json_reply({"error": error.message}, 400)
        except BodyTooLarge as error:
            return too_large_reply(error.details["bytes_max"])
        except UnforeseenInput as error:
            log.info("%s %s: %s", request.method, request.url.path, error.message)
            return internal_error()
        except FleetError:
            raise
        except ClientDisconnect:
            return empty_reply(CLIENT_GONE)
        except Exception as error:  # noqa: BLE001 — logged there, unless its cause is known
            return self.reply_to_failure(request, error)

    def reply_to_failure(self, request: Request, error: Exception) -> Response:
        """Returns the response to an error that no handler expected."""
        # The request caused this error, for example because its body arrived too slowly.
        if isinstance(error, HTTPException):
            return text_reply(error.detail, error.status_code)
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return internal_error()

    def body_bytes_max(self, path: str) -> int:
        return BODY_BYTES_MAX

    async def served_to(self, request: Request) -> T:
        """Returns the object that is passed to the handler of this request."""
        return self._app_state

    def route_of(self, path: str) -> str | None:
        """Returns the route that a path belongs to, or None."""
        if path in self._fixed or path in self._sockets:
            return path
        return next(
            (
                name
                for name, pattern in self._patterns.items()
                if pattern.expression.fullmatch(path)
            ),
            None,
        )

    async def _dispatch(self, request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        allowed: set[str] = set()
        for handlers in self._matching(request):
            if handler := handlers.get(request.method) or handlers.get(method):
                return await handler(await self.served_to(request), request)
            allowed |= handlers.keys()
        if method == "GET" and request.scope["path"] in self._sockets:
            return text_reply(NO_UPGRADE, 400)
        if method == "GET":
            return empty_reply(404)
        return not_allowed_reply(allowed)

    def _matching(self, request: Request) -> Iterator[dict[str, Handler[T]]]:
        path = request.scope["path"]
        if path in self._fixed:
            yield self._fixed[path]
        for pattern in self._patterns.values():
            if match := pattern.expression.fullmatch(path):
                request.scope["path_params"] = match.groupdict()
                yield pattern.handlers

    async def talk(self, socket: WebSocket) -> None:
        handler = self._sockets.get(socket.scope["path"])
        if handler is None or is_foreign(socket.headers):
            await socket.close()
        else:
            await handler(self._app_state, socket)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        if self._lifespan:
            self._lifespan.start(asyncio.get_running_loop())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._lifespan:
            await asyncio.to_thread(self._lifespan.stop)
        await send({"type": "lifespan.shutdown.complete"})


def _expression(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)(:path)?\}", path)
    text = re.escape(parts[0])
    for name, rest, literal in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text += f"(?P<{name}>{'.+' if rest else '[^/]+'}){re.escape(literal)}"
    return re.compile(text)
