"""The gateway in front of the control plane's own routes: it answers what is ComfyUI's, and passes on the rest."""

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
# Nothing of a user's may be shown in, or read as a script by, a page of another origin.
SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}
# Of files, which users and backends make: whatever a browser takes one for, it must not act as a page of ours.
CONTENT_POLICY = "sandbox; default-src 'none'"
LISTINGS_AT_ONCE_MAX, LISTINGS_WAITING_MAX = 2, 20


@dataclass
class Gateway:
    """What all calls share. `local`: access for programs of this machine without a key."""

    plane: ControlPlane
    local: LocalAccess | None = None
    kept: BoundedCache = field(default_factory=BoundedCache)
    inventories: InventoryCache = field(default_factory=InventoryCache)

    def __post_init__(self) -> None:
        self.feeds = GatewayFeeds(self.plane)
        self.numbers = PromptNumbers(self.plane)
        notifier = self.plane.context.notifier
        self.polls = PollCache(self.kept, notifier.hears_others)
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
    """One request, and who makes it."""

    gateway: Gateway
    caller: Caller

    @property
    def plane(self) -> ControlPlane:
        return self.gateway.plane


# Under these come files; under all others JSON.
USERDATA_PATH = "/userdata/"
FILE_PATHS = ("/upload/", USERDATA_PATH, "/v2/assets")
# A form around a file, and its other fields.
FORM_BYTES_MAX = 1024**2
V2_PATH = "/api/v2/"
# RFC 6455's "policy violation", where the server can't answer a refused handshake in words.
REFUSED_CODE = 1008


# A file may take long, but some bytes of it come all the time.
SILENCE_SECONDS_MAX = 60.0
JSON_SECONDS_MAX = 60.0


class BodyTimeout(InvalidInput):
    """The client stopped sending."""

    code = "timeout"


def limited(receive: Receive, *, declared: int, bytes_max: int, is_file: bool) -> Receive:
    """Limits the size and the time of one body while it is received.

    A file has a limit of silence, any other body one for all of it. `declared`: its size as the client
    told it, which may be a lie.
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
            raise BodyTimeout("the body did not arrive in time") from None
        size += len(message.get("body", b""))
        if size > bytes_max:
            raise _too_large(bytes_max)
        is_complete = not message.get("more_body", False)
        return message

    return receive_limited


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {bytes_max} bytes", bytes_max=bytes_max)


async def read_json(request: Request) -> object:
    """The body as JSON, whatever its content type says. Raises MalformedBody, RefusedPrompt."""
    body = await request.body()
    try:
        return await parsed(body, parse_leniently)
    except (InvalidInput, LimitExceeded) as error:
        raise _refused(error.message) from None
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from error


def _refused(message: str) -> RefusedPrompt:
    """ComfyUI would take it, and fail later or never end."""
    return RefusedPrompt(fault("invalid_body", "The body can't be taken", message))


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
        if _holds_nul(request):
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
        if handler is None or is_foreign(socket.headers) or _holds_nul(socket):
            await socket.close()
            return
        gateway = self.gateway
        try:
            caller = await authenticate(gateway.plane, socket, gateway.local)
            give_back = gateway.sockets.take(caller)
        except FleetError as error:
            await _refuse(socket, error)
            return
        try:
            await handler(GatewayCall(gateway, caller), socket)
        finally:
            give_back()


def error_reply(error: FleetError, path: str) -> Response:
    """One of our errors as ComfyUI tells its own; under v2's paths as v2 does."""
    if isinstance(error, BodyTimeout):
        return Response(b"", 408, {"connection": "close"})
    if path.startswith(V2_PATH):
        return v2_errors.error_reply(error)
    response = response_to_error(error, path)
    said = json.loads(bytes(response.body))["error"]
    hint = said["details"].pop("hint", "")
    body = fault(said["code"], said["message"], hint, **said["details"])
    reply = json_reply({"error": body, "node_errors": {}}, response.status_code)
    kept = ("www-authenticate", "retry-after")
    reply.headers.update(
        {name: response.headers[name] for name in kept if name in response.headers}
    )
    return reply


def _holds_nul(connection: HTTPConnection) -> bool:
    """No name, id or path has one, and databases refuse it."""
    return "\0" in connection.scope["path"] or b"%00" in connection.scope.get("query_string", b"")


async def _refuse(socket: WebSocket, error: FleetError) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(error_reply(error, socket.scope["path"]))
    else:
        await socket.close(REFUSED_CODE)


class NamedRoute:
    """For logs and figures."""

    def __init__(self, path: str) -> None:
        self.path = path


class GatewayRoutes:
    """ASGI middleware."""

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
