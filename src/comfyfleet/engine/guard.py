"""Who may talk to an engine at all: asked before anything else is looked at."""

import base64
import hmac
import ipaddress
import socket
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.engine.origin import is_local_name

USER = "engine"


@dataclass(frozen=True)
class Guard:
    """`is_local`: names of this machine only, or a page could rebind its own name to it.

    `key`: without it nobody is let in.
    """

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


def _is_key(given: str, key: str) -> bool:
    wanted = base64.b64encode(f"{USER}:{key}".encode()).decode()
    return hmac.compare_digest(given.encode(), f"Basic {wanted}".encode())
