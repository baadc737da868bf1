"""The gateway in front of the control plane's own routes.

It handles requests to ComfyUI's routes and passes all other requests on.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from comfyfleet.errors import FleetError, InvalidInput, LimitExceeded
from comfyfleet.protocol.http import BodyTooLarge, Router, empty_reply, is_foreign, json_reply
from comfyfleet.protocol.payloads import MalformedBody, RefusedPrompt
from comfyfleet.protocol.validation import fault
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db.outages import as_unavailable
from comfyfleet.server.gateway import userdata
from comfyfleet.server.gateway.feed import GatewayFeeds
from comfyfleet.server.gateway.history import BoundedCache, PollCache
from comfyfleet.server.gateway.inventory import InventoryCache
from comfyfleet.server.gateway.prompts import PromptNumbers
from comfyfleet.server.gateway.uploads import ArrivingUploads
from comfyfleet.server.http.errors import response_to_error
from comfyfleet.server.http.gateway import v2_errors
from comfyfleet.server.http.gateway.auth import authenticate
from comfyfleet.server.http.local_access import LocalAccess
from comfyfleet.server.http.request_body import content_length, parse_leniently, parsed
from comfyfleet.server.http.streams import StreamLimiter
from comfyfleet.server.tenants.model import Caller
from comfyfleet.server.turns import FairThreads

logger = logging.getLogger(__name__)
# Headers that prevent pages of other origins from embedding users' content or loading it as a
# script.
SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}
# The policy for files from users and backends. A browser must never run them as one of our pages,
# regardless of the content type that it detects.
CONTENT_POLICY = "sandbox; default-src 'none'"
LISTINGS_AT_ONCE_MAX, LISTINGS_WAITING_MAX = 2, 20


@dataclass
class Gateway:
    """The state that all requests share. With `local`, programs on this machine need no key."""

    plane: ControlPlane
    local: LocalAccess | None = None
    cache: BoundedCache = field(default_factory=BoundedCache)
    inventories: InventoryCache = field(default_factory=InventoryCache)

    def __post_init__(self) -> None:
        self.feeds = GatewayFeeds(self.plane)
        self.numbers = PromptNumbers(self.plane)
        notifier = self.plane.context.notifier
        self.polls = PollCache(self.cache, notifier.hears_others)
        notifier.on_change.append(self.polls.forget)
        notifier.on_missed.append(self.polls.forget_all)
        settings = self.plane.settings
        self.sockets = StreamLimiter(
            per_key=settings.max_sockets_per_user, per_user=settings.max_sockets_per_user
        )
        self.listings = FairThreads(
            "listings", LISTINGS_AT_ONCE_MAX, waiting_each_max=LISTINGS_WAITING_MAX
        )
        self.uploads = ArrivingUploads()


@dataclass(frozen=True)
class GatewayCall:
    """A request and its caller."""

    gateway: Gateway
    caller: Caller

    @property
    def plane(self) -> ControlPlane:
        return self.gateway.plane


# Requests to these paths contain files. All others contain JSON.
USERDATA_PATH = "/userdata/"
FILE_PATHS = ("/upload/", USERDATA_PATH, "/v2/assets")
# Bytes allowed for a form's other fields and boundaries, in addition to its file.
FORM_BYTES_MAX = 1024**2
V2_PATH = "/api/v2/"
# The WebSocket close code for a policy violation (RFC 6455). It is used if the server can't send a
# response to a rejected handshake.
REFUSED_CODE = 1008


# An upload may take long, but it is aborted after this many seconds without data.
SILENCE_SECONDS_MAX = 60.0
JSON_SECONDS_MAX = 60.0


class BodyTimeout(InvalidInput):
    """Raised when the client stops sending."""

    code = "timeout"


def limited(receive: Receive, *, declared: int, bytes_max: int, is_file: bool) -> Receive:
    """Limits the size and duration of a request body while it is received.

    A file must not pause for too long, and any other body has a total time limit. `declared` is the
    Content-Length, which may be wrong.
    """
    clock: Callable[[], float] = asyncio.get_running_loop().time
    size, is_complete, deadline = 0, False, clock() + JSON_SECONDS_MAX

    async def receive_limited() -> Message:
        nonlocal size, is_complete
        if is_complete:
            return await receive()
        if declared > bytes_max:
            raise _too_large(bytes_max)
        until = clock() + SILENCE_SECONDS_MAX if is_file else deadline
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError:
            raise BodyTimeout("the request body didn't arrive in time") from None
        size += len(message.get("body", b""))
        if size > bytes_max:
            raise _too_large(bytes_max)
        is_complete = not message.get("more_body", False)
        return message

    return receive_limited


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body exceeds {bytes_max} bytes", bytes_max=bytes_max)


async def read_json(request: Request) -> object:
    """Parses a request body as JSON, regardless of its content type.

    Raises MalformedBody or RefusedPrompt.
    """
    body = await request.body()
    try:
        return await parsed(body, parse_leniently)
    except (InvalidInput, LimitExceeded) as error:
        raise _refused(error.message) from None
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the body is not valid JSON: {error}") from error


def _refused(message: str) -> RefusedPrompt:
    """Returns an error for a body that ComfyUI would accept but that would fail later."""
    return RefusedPrompt(fault("invalid_body", "The request body is invalid", message))


class GatewayRouter(Router[GatewayCall]):
    def __init__(self, gateway: Gateway, routes: Any, sockets: Any) -> None:
        super().__init__(None, None, routes, sockets)  # type: ignore[arg-type]
        self.gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix("/api")
            receive = limited(
                receive,
                declared=content_length(scope),
                bytes_max=self.body_bytes_max(scope["path"]),
                is_file=path.startswith(FILE_PATHS),
            )
        await super().__call__(scope, receive, send)

    def reply_to_failure(self, request: Request, error: Exception) -> Response:
        away = as_unavailable(error)
        if away is None:
            return super().reply_to_failure(request, error)
        self.gateway.plane.meters.errors.labels(away.code).inc()
        return error_reply(away, request.scope["path"])

    def body_bytes_max(self, path: str) -> int:
        settings, path = self.gateway.plane.settings, path.removeprefix("/api")
        if path.startswith(USERDATA_PATH):
            return userdata.FILE_BYTES_MAX
        if path.startswith(FILE_PATHS):
            return settings.max_upload_bytes + FORM_BYTES_MAX
        return settings.max_body_bytes

    async def served_to(self, request: Request) -> GatewayCall:
        gateway = self.gateway
        return GatewayCall(gateway, await authenticate(gateway.plane, request, gateway.local))

    async def answer(self, request: Request) -> Response:
        if _contains_nul(request):
            return empty_reply(404)
        try:
            response = await super().answer(request)
        except FleetError as error:
            response = error_reply(error, request.scope["path"])
            self.gateway.plane.meters.errors.labels(error.code).inc()
        for name, value in SAFE_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def talk(self, socket: WebSocket) -> None:
        handler = self._sockets.get(socket.scope["path"])
        if handler is None or is_foreign(socket.headers) or _contains_nul(socket):
            await socket.close()
            return
        gateway = self.gateway
        try:
            caller = await authenticate(gateway.plane, socket, gateway.local)
            release = gateway.sockets.take(caller)
        except FleetError as error:
            await _refuse(socket, error)
            return
        try:
            await handler(GatewayCall(gateway, caller), socket)
        finally:
            release()


def error_reply(error: FleetError, path: str) -> Response:
    """Formats an error like ComfyUI's own errors, or for v2 paths like the errors of v2."""
    if isinstance(error, BodyTimeout):
        return Response(b"", 408, {"connection": "close"})
    if path.startswith(V2_PATH):
        return v2_errors.error_reply(error)
    response = response_to_error(error, path)
    content = json.loads(bytes(response.body))["error"]
    hint = content["details"].pop("hint", "")
    body = fault(content["code"], content["message"], hint, **content["details"])
    reply = json_reply({"error": body, "node_errors": {}}, response.status_code)
    header_names = ("www-authenticate", "retry-after")
    reply.headers.update(
        {name: response.headers[name] for name in header_names if name in response.headers}
    )
    return reply


def _contains_nul(connection: HTTPConnection) -> bool:
    """Checks whether the path or query contains a NUL character, which databases reject."""
    return "\0" in connection.scope["path"] or b"%00" in connection.scope.get("query_string", b"")


async def _refuse(socket: WebSocket, error: FleetError) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(error_reply(error, socket.scope["path"]))
    else:
        await socket.close(REFUSED_CODE)


class NamedRoute:
    """The path of a matched route, for logs and metrics."""

    def __init__(self, path: str) -> None:
        self.path = path


class GatewayRoutes:
    """ASGI middleware that sends requests for ComfyUI's routes to the gateway."""

    def __init__(self, app: ASGIApp, router: GatewayRouter) -> None:
        self._app = app
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = (
            self._router.route_of(scope["path"]) if scope["type"] in ("http", "websocket") else None
        )
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = NamedRoute(route)
        await self._router(scope, receive, send)
