"""Allows listed origins to call the customers' API from browsers.

Cross-origin calls authenticate with a bearer key only: their cookies are removed, and no response
allows credentials. The routes for operators, workers, sign-in and incoming webhooks never allow
cross-origin calls.
"""

import logging
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = "GET, POST, PUT, PATCH, DELETE"
REQUEST_HEADERS = "authorization, content-type, if-none-match, last-event-id, x-request-id"
RESPONSE_HEADERS = (
    "content-disposition, etag, location, retry-after, www-authenticate, x-request-id"
)
# Seconds for which browsers cache a preflight response.
PREFLIGHT_SECONDS = 600
# Limits for the log of refused origins, which clients can choose freely.
ORIGINS_LOGGED_MAX = 100
ORIGIN_CHARACTERS_MAX = 200
logger = logging.getLogger(__name__)


class CrossOriginCalls:
    """Answers preflight requests before authentication, and adds CORS headers to responses."""

    def __init__(self, app: ASGIApp, origins: Collection[str], areas: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._areas = frozenset(areas)
        self._logged = set[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or area_of(scope["path"]) not in self._areas:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        if origin not in self._origins:
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                self._log_once(origin)
            await self._app(scope, receive, _vary(send))
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight_response(origin)(scope, receive, send)
        else:
            await self._app(_without_cookies(scope), receive, _allow(send, origin))

    def _log_once(self, origin: str) -> None:
        """Logs a refused origin once, with the setting that allows it. The response gives no
        reason."""
        if origin not in self._logged and len(self._logged) < ORIGINS_LOGGED_MAX:
            self._logged.add(origin)
            shown = origin[:ORIGIN_CHARACTERS_MAX]
            message = "refused a cross-origin call from %r; set COMFYFLEET_CORS_ORIGINS to allow it"
            logger.warning(message, shown)


def area_of(path: str) -> str:
    """Returns the first path segment below /api, such as `videos`, or "" for other paths."""
    root, _, rest = path.lstrip("/").partition("/")
    return rest.partition("/")[0] if root == "api" else ""


def areas_of(routes: Iterable[BaseRoute]) -> frozenset[str]:
    paths = (getattr(route, "path", "") for route in routes)
    return frozenset(filter(None, map(area_of, paths)))


def _preflight_response(origin: str) -> Response:
    headers = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": REQUEST_HEADERS,
        "access-control-max-age": str(PREFLIGHT_SECONDS),
        "vary": "Origin",
    }
    return Response(status_code=204, headers=headers)


def _without_cookies(scope: Scope) -> Scope:
    headers = [header for header in scope["headers"] if header[0] != b"cookie"]
    return {**scope, "headers": headers}


def _vary(send: Send) -> Send:
    async def send_varied(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).add_vary_header("Origin")
        await send(message)

    return send_varied


def _allow(send: Send, origin: str) -> Send:
    async def send_allowed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = RESPONSE_HEADERS
            headers.add_vary_header("Origin")
        await send(message)

    return send_allowed
