"""Routes of custom nodes, passed on to a backend: in `comfyfleet up` only, where an operator allows their prefix.

What stands behind such a route is one backend's, not one user's: whoever may use the fleet shares it.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.errors import FleetError, NotFound, ServerUnavailable, Unavailable
from comfyfleet.protocol.http import BODY_BYTES_MAX, BodyTooLarge, is_foreign, too_large_reply
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.http.gateway.app import (
    SAFE_HEADERS,
    Gateway,
    NamedRoute,
    error_reply,
    limited,
)
from comfyfleet.server.http.gateway.auth import authenticate
from comfyfleet.server.http.request_body import content_length
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE
from comfyfleet.server.tenants.model import Caller

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)
METHODS = ("GET", "HEAD", "POST", "PUT")
# Neither keys and cookies, nor what is between two machines only.
REQUEST_HEADERS = ("accept", "accept-language", "content-type", "range", "if-none-match")
RESPONSE_HEADERS = ("content-type", "content-range", "accept-ranges", "etag", "last-modified")
# A page of a backend must not act as one of ours.
CONTENT_POLICY = "sandbox; default-src 'none'"
PREFIXES_SECONDS = 2.0
ANSWER_SECONDS = 60.0


class PassThrough:
    """ASGI middleware. `backends`: URLs that this process can reach; without any it does nothing."""

    def __init__(
        self, app: ASGIApp, gateway: Gateway, backends: Sequence[str], own: Sequence[BaseRoute]
    ) -> None:
        self._app = app
        self._gateway = gateway
        self._backends = backends
        self._own = own
        self._fleet: Fleet | None = None
        self._read_at = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._backends:
            await self._app(scope, receive, send)
            return
        prefix = await self._prefix_of(scope["path"])
        if prefix is None or any(each.matches(scope)[0] is not Match.NONE for each in self._own):
            await self._app(scope, receive, send)
            return
        scope["route"] = NamedRoute(f"{prefix}/…")
        most = self._gateway.plane.settings.max_body_bytes
        body = limited(receive, declared=content_length(scope), bytes_max=most, is_file=False)
        response = await self._answer(Request(scope, body))
        await response(scope, receive, send)

    async def _prefix_of(self, path: str) -> str | None:
        if monotonic() - self._read_at > PREFIXES_SECONDS:
            self._read_at = monotonic()
            # Without the database the last terms go on for a while; nobody is known then anyway.
            with contextlib.suppress(Unavailable):
                async with self._gateway.plane.central.read() as tx:
                    found = await fleets.list_fleets(tx)
                named = (each for each in found if each.name == f"{FLEET}/{STAGE}")
                self._fleet = next(named, None)
        terms = self._fleet.prompts if self._fleet else None
        return next((each for each in terms.passthrough if is_below(each, path)), None) if terms else None  # fmt: skip

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"]
        if is_foreign(request.headers):
            return Response(status_code=403)
        try:
            gateway = self._gateway
            caller = await authenticate(gateway.plane, request, gateway.local_key)
            self._require_access(caller)
            if request.method not in METHODS or not is_plain(path):
                raise NotFound("there is no such route")
            return await self._passed_on(request, await request.body())
        except BodyTooLarge as error:
            return too_large_reply(error.details["bytes_max"])
        except FleetError as error:
            return error_reply(error, path)

    def _require_access(self, caller: Caller) -> None:
        allowed = caller.tenant.prompts.fleets
        if self._fleet is None or (allowed is not None and self._fleet.name not in allowed):
            raise NotFound("there is no such route")

    async def _passed_on(self, request: Request, body: bytes) -> Response:
        """By the first backend that can be reached."""
        import httpx  # takes memory, and time at the start, which most processes need not spend

        from comfyfleet.transport.http import open_client

        headers = {each: request.headers[each] for each in REQUEST_HEADERS if each in request.headers}  # fmt: skip
        target = f"{quote(request.scope['path'])}{_query(request)}"
        for backend in self._backends:
            client = open_client(backend, answer_seconds=ANSWER_SECONDS)
            sent = client.build_request(request.method, target, headers=headers, content=body)
            try:
                answer = await client.send(sent, stream=True, follow_redirects=False)
            except httpx.ConnectError as error:
                await client.aclose()
                logger.warning("a backend can't be reached for a route: %s", type(error).__name__)
                continue
            except httpx.HTTPError as error:
                await client.aclose()
                raise ServerUnavailable("a backend did not answer") from error
            return _reply(client, answer)
        raise ServerUnavailable("no backend can be reached")


def is_below(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def is_plain(path: str) -> bool:
    """Whether no part of it can lead elsewhere, however a backend reads it."""
    *folders, last = path.split("/")[1:]
    leads_on = all(each not in ("", ".", "..") for each in folders) and last not in (".", "..")
    return leads_on and "\\" not in path and path.isprintable()


def _query(request: Request) -> str:
    """Without a key."""
    text = request.scope.get("query_string", b"").decode("latin-1")
    kept = [(name, value) for name, value in parse_qsl(text, keep_blank_values=True) if name != "token"]  # fmt: skip
    return f"?{urlencode(kept)}" if kept else ""


def _reply(client: "httpx.AsyncClient", answer: "httpx.Response") -> Response:
    async def chunks() -> AsyncIterator[bytes]:
        sent = 0
        try:
            async for chunk in answer.aiter_bytes():
                sent += len(chunk)
                if sent > BODY_BYTES_MAX:
                    raise BodyTooLarge("a backend's answer is too large", bytes_max=BODY_BYTES_MAX)
                yield chunk
        finally:
            await answer.aclose()
            await client.aclose()

    kept: Mapping[str, str] = {
        each: answer.headers[each] for each in RESPONSE_HEADERS if each in answer.headers
    }
    headers = {**SAFE_HEADERS, **kept, "content-security-policy": CONTENT_POLICY}
    # A redirect would lead to a backend, or anywhere.
    status = 502 if answer.is_redirect else answer.status_code
    return StreamingResponse(chunks(), status, headers)
