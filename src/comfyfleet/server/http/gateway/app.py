"""The gateway in front of the control plane's own routes: it answers what is ComfyUI's, and passes on the rest."""

import logging
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from comfyfleet.errors import FleetError, Unauthenticated
from comfyfleet.protocol.http import Router, is_foreign, json_reply
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.gateway.feed import GatewayFeeds
from comfyfleet.server.gateway.history import EntryCache
from comfyfleet.server.gateway.inventory import InventoryCache
from comfyfleet.server.http.errors import status_of
from comfyfleet.server.http.gateway.auth import authenticate
from comfyfleet.server.tenants.model import Caller

logger = logging.getLogger(__name__)


@dataclass
class Gateway:
    """What all calls share. `local_key`: of programs of this machine that have none."""

    plane: ControlPlane
    local_key: str | None = None
    entries: EntryCache = field(default_factory=EntryCache)
    numbers: dict[UUID, "count[int]"] = field(default_factory=dict)
    inventories: InventoryCache = field(default_factory=InventoryCache)

    def __post_init__(self) -> None:
        self.feeds = GatewayFeeds(self.plane)

    def next_number(self, caller: Caller) -> int:
        return next(self.numbers.setdefault(caller.user_id, count()))


@dataclass(frozen=True)
class GatewayCall:
    """One request, and who makes it."""

    gateway: Gateway
    caller: Caller

    @property
    def plane(self) -> ControlPlane:
        return self.gateway.plane


def error_reply(error: FleetError) -> Response:
    body = {"error": {"code": error.code, "message": error.message, "details": {}}}
    response = json_reply(body, status_of(error))
    if isinstance(error, Unauthenticated):
        response.headers["www-authenticate"] = "Bearer"
    return response


class GatewayRouter(Router[GatewayCall]):
    def __init__(self, gateway: Gateway, routes: Any, sockets: Any) -> None:
        super().__init__(None, None, routes, sockets)  # type: ignore[arg-type]
        self.gateway = gateway

    async def served_to(self, request: Request) -> GatewayCall:
        gateway = self.gateway
        return GatewayCall(gateway, await authenticate(gateway.plane, request, gateway.local_key))

    async def answer(self, request: Request) -> Response:
        try:
            return await super().answer(request)
        except FleetError as error:
            return error_reply(error)

    async def talk(self, socket: WebSocket) -> None:
        handler = self._sockets.get(socket.scope["path"])
        if handler is None or is_foreign(socket.headers):
            await socket.close()
            return
        gateway = self.gateway
        try:
            caller = await authenticate(gateway.plane, socket, gateway.local_key)
        except FleetError:
            await socket.close()
            return
        await handler(GatewayCall(gateway, caller), socket)


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
