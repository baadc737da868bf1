"""Forwards calls to custom nodes' routes to a backend if an operator allows the route's prefix.

`comfyfleet up` calls its own backends directly. Other backends get the calls from their workers,
which poll for them. The state behind such a route belongs to a backend and not to a user, so
everyone who may use the fleet shares it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode
from uuid import uuid4

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.api.route_calls import (
    METHODS,
    READING,
    REQUEST_HEADERS,
    RESPONSE_HEADERS,
    ROUTE_BYTES_MAX,
    TARGET_CHARACTERS_MAX,
    RouteAnswer,
    is_below,
    is_plain,
    passed_headers,
)
from comfyfleet.errors import FleetError, NotFound, ServerUnavailable, Unavailable
from comfyfleet.protocol.http import BODY_BYTES_MAX, BodyTooLarge, is_foreign, too_large_reply
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.fleets.route_calls import NewRouteCall, NoWorker
from comfyfleet.server.gateway.previous_backends import find_route_targets
from comfyfleet.server.http.gateway.app import (
    CONTENT_POLICY,
    SAFE_HEADERS,
    Gateway,
    NamedRoute,
    error_reply,
    limited,
)
from comfyfleet.server.http.gateway.auth import authenticate
from comfyfleet.server.http.request_body import CALLER_GONE, content_length
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE
from comfyfleet.server.tenants.model import Caller

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)
# Content types that browsers may display. All others, such as pages, SVG images and scripts, can
# only be downloaded.
SHOWN_TYPES = ("application/json", "text/plain", "application/octet-stream")
SHOWN_KINDS = ("image/", "audio/", "video/")
DRAWINGS = "image/svg"
# Seconds for which the prefixes read from the database are cached.
PREFIXES_SECONDS = 2.0
# Timeout for a backend's response.
ANSWER_SECONDS = 60.0
# Seconds to wait until a specific worker takes a call. A worker that polls for calls takes it
# immediately.
TARGET_PICKUP_SECONDS = 1.0
# Seconds to wait for the responses of other backends after the first response.
OTHERS_SECONDS = 5.0
NOT_FOUND = 404
ERRORS_FROM = 400


class OpenPrefix(NamedTuple):
    """A route prefix, and a fleet that accepts calls with this prefix."""

    prefix: str
    fleet: Fleet


class PassThrough:
    """ASGI middleware that forwards calls to custom nodes' routes to backends.

    `backends` maps worker ids to the backend URLs that this process can call directly.
    """

    def __init__(
        self,
        app: ASGIApp,
        gateway: Gateway,
        backends: Mapping[str, str],
        own: Sequence[BaseRoute],
    ) -> None:
        self._app = app
        self._gateway = gateway
        self._backends = backends
        self._own = own
        self._own_heads = {_head(path) for path in paths_of(own)}
        self._open: list[OpenPrefix] = []
        self._read_at = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Most requests are for our own routes. They are passed on without reading the database.
        if scope["type"] != "http" or _head(scope["path"]) in self._own_heads:
            await self._app(scope, receive, send)
            return
        prefixes = await self._open_for(scope["path"])
        if not prefixes or any(route.matches(scope)[0] is not Match.NONE for route in self._own):
            await self._app(scope, receive, send)
            return
        scope["route"] = NamedRoute(f"{prefixes[0].prefix}/…")
        most = min(self._gateway.plane.settings.max_body_bytes, ROUTE_BYTES_MAX)
        body = limited(receive, declared=content_length(scope), bytes_max=most, is_file=False)
        response = await self._answer(Request(scope, body), prefixes)
        await response(scope, receive, send)

    async def _open_for(self, path: str) -> list[OpenPrefix]:
        if monotonic() - self._read_at > PREFIXES_SECONDS:
            self._read_at = monotonic()
            # If the database is down, the last known prefixes are used. Callers can't be
            # authenticated in that case anyway.
            with contextlib.suppress(Unavailable):
                async with self._gateway.plane.central.read() as tx:
                    self._open = open_prefixes(await fleets.list_fleets(tx))
        return [prefix for prefix in self._open if is_below(prefix.prefix, path)]

    async def _answer(self, request: Request, prefixes: Sequence[OpenPrefix]) -> Response:
        path = request.scope["path"]
        if is_foreign(request.headers):
            return Response(status_code=403)
        try:
            gateway = self._gateway
            caller = await authenticate(gateway.plane, request, gateway.local)
            usable = _usable(caller, prefixes)
            target = f"{quote(path)}{_query(request)}"
            if request.method not in METHODS or not is_plain(path) or len(target) > TARGET_CHARACTERS_MAX:  # fmt: skip
                raise NotFound("this route doesn't exist")
            call = _route_call(request, caller, usable, target, await request.body())
            routed = RoutedCall(gateway.plane, self._backends, caller, usable, call)
            response = await _unless_gone(request, routed.response())
            return Response(status_code=CALLER_GONE) if response is None else response
        except BodyTooLarge as error:
            return too_large_reply(error.details["bytes_max"])
        except FleetError as error:
            return error_reply(error, path)


@dataclass(frozen=True)
class RoutedCall:
    """A call and the backends that may receive it. `backends` maps worker ids to the URLs of
    backends that can be called directly."""

    plane: ControlPlane
    backends: Mapping[str, str]
    caller: Caller
    usable: Sequence[Fleet]
    call: NewRouteCall

    async def response(self) -> Response:
        targets = await find_route_targets(self.plane, self.caller, self.usable)
        if self.call.method in READING:
            return await self._read(targets.to_read)
        return await self._change(targets.to_change)

    async def _read(self, worker_ids: Sequence[str]) -> Response:
        """Sends the call to one backend after another until a response isn't 404."""
        missing: Response | None = None
        for worker_id in worker_ids:
            response = await self._ask(worker_id)
            if response is not None and response.status_code != NOT_FOUND:
                return response
            missing = response or missing
        return missing or (await self._ask_any())[1]

    async def _change(self, worker_ids: Sequence[str]) -> Response:
        """Sends the call to the backends of all these workers, and returns the response of the
        first one that accepted it."""
        results = await self._ask_all(worker_ids)
        if not results:
            worker_id, response = await self._ask_any()
            results = {worker_id: response}
        await self._note_accepted(results)
        first = next(iter(results.values()))
        if isinstance(first, BaseException):
            raise first
        return first

    async def _ask_all(self, worker_ids: Sequence[str]) -> dict[str, Response | BaseException]:
        """Sends the call to several backends concurrently, and returns the results of the
        backends that accepted it.

        After the first response, waits a few more seconds for the others.
        """
        asking = {
            worker_id: asyncio.create_task(self._ask(worker_id, is_copy=place > 0))
            for place, worker_id in enumerate(worker_ids)
        }
        try:
            for task in asking.values():
                await asyncio.wait({task})
                if task.exception() is not None or task.result() is not None:
                    await asyncio.wait(asking.values(), timeout=OTHERS_SECONDS)
                    break
        finally:
            for task in asking.values():
                task.cancel()
            ended = await asyncio.gather(*asking.values(), return_exceptions=True)
        return {
            worker_id: answer
            for worker_id, answer in zip(asking, ended, strict=True)
            if answer is not None and not isinstance(answer, asyncio.CancelledError)
        }

    async def _note_accepted(self, answers: Mapping[str, Response | BaseException]) -> None:
        accepted = [
            worker_id
            for worker_id, answer in answers.items()
            if isinstance(answer, Response) and answer.status_code < ERRORS_FROM
        ]
        if accepted:
            self.plane.queue.facts.note_change([fleet.id for fleet in self.usable])
            tenant_id, user_id = self.caller.tenant.id, self.caller.user_id
            await self.plane.routes.note_upload(tenant_id, user_id, accepted)

    async def _ask(self, worker_id: str, *, is_copy: bool = False) -> Response | None:
        """Sends the call to a worker's backend and returns the response.

        Returns None if the backend certainly hasn't received the call.
        """
        url = self.backends.get(worker_id)
        if url is not None:
            return await self._ask_directly(url)
        call = replace(
            self.call,
            id=uuid4(),
            for_worker_id=worker_id,
            is_copy=is_copy,
            pickup_seconds=TARGET_PICKUP_SECONDS,
        )
        try:
            return _reply_of(await self.plane.routes.send(call))
        except NoWorker:
            return None

    async def _ask_any(self) -> tuple[str, Response]:
        """Sends the call to the first backend that this process can call directly.

        If there is none, sends it to any worker that forwards calls to the route.
        """
        if self.backends and any(fleet.name == f"{FLEET}/{STAGE}" for fleet in self.usable):
            for worker_id, url in self.backends.items():
                response = await self._ask_directly(url)
                if response is not None:
                    return worker_id, response
            raise ServerUnavailable("no backend can be reached")
        answer = await self.plane.routes.send(self.call)
        return answer.worker_id, _reply_of(answer)

    async def _ask_directly(self, url: str) -> Response | None:
        import httpx  # imported here because it is slow and large, and most processes don't need it

        from comfyfleet.transport.http import open_client

        call = self.call
        client = open_client(url, answer_seconds=ANSWER_SECONDS)
        sent = client.build_request(
            call.method, call.target, headers=call.headers, content=call.body
        )
        try:
            answer = await client.send(sent, stream=True, follow_redirects=False)
        except httpx.ConnectError as error:
            await client.aclose()
            logger.warning("can't reach a backend for a route call: %s", type(error).__name__)
            return None
        except httpx.HTTPError as error:
            await client.aclose()
            raise ServerUnavailable("the backend didn't respond") from error
        except BaseException:
            await client.aclose()
            raise
        if call.method in READING and answer.status_code != NOT_FOUND:
            return _streamed(client, answer)
        return await _whole(client, answer)


def open_prefixes(all_fleets: Sequence[Fleet]) -> list[OpenPrefix]:
    terms = ((fleet, fleet.prompts) for fleet in all_fleets if fleet.gateway is not None)
    return [
        OpenPrefix(prefix, fleet)
        for fleet, prompts in terms
        if prompts is not None
        for prefix in prompts.passthrough
    ]


def paths_of(routes: Iterable[BaseRoute]) -> Iterator[str]:
    """Yields the paths of routes.

    Newer versions of FastAPI keep an included router as one route without a path, so its own routes
    are used. None of our routers is included with a prefix.
    """
    for route in routes:
        included: APIRouter | None = getattr(route, "original_router", None)
        if included is None:
            yield getattr(route, "path", "/")
        else:
            yield from paths_of(included.routes)


def _head(path: str) -> tuple[str, ...]:
    """Returns the part of a path by which our own routes are recognized. This is the first segment
    or, below /api, the first two segments."""
    parts = path.split("/", 3)[1:3]
    return tuple(parts) if parts[:1] == ["api"] else tuple(parts[:1])


def _usable(caller: Caller, prefixes: Sequence[OpenPrefix]) -> list[Fleet]:
    """Returns the fleets of these prefixes that the caller may use.

    Raises NotFound if there are none.
    """
    allowed = caller.tenant.prompts.fleets
    usable = [entry.fleet for entry in prefixes if allowed is None or entry.fleet.name in allowed]
    if not usable:
        raise NotFound("this route doesn't exist")
    return usable


def _query(request: Request) -> str:
    """Returns the query string without the caller's key."""
    text = request.scope.get("query_string", b"").decode("latin-1")
    parameters = [(name, value) for name, value in parse_qsl(text, keep_blank_values=True) if name != "token"]  # fmt: skip
    return f"?{urlencode(parameters)}" if parameters else ""


def _route_call(
    request: Request, caller: Caller, usable: Sequence[Fleet], target: str, body: bytes
) -> NewRouteCall:
    return NewRouteCall(
        id=uuid4(),
        tenant_id=caller.tenant.id,
        fleet_ids=sorted({fleet.id for fleet in usable}),
        method=request.method,
        path=request.scope["path"],
        target=target,
        headers=passed_headers(request.headers, REQUEST_HEADERS),
        body=body,
    )


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response | None:
    """Runs the work and returns its response, or None if the client disconnects first.

    In that case, the work is canceled, and a call that no worker has taken yet isn't sent.
    """
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        disconnected.cancel()
        working.cancel()
        await asyncio.wait({working, disconnected})


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def confined(backend_headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers for a backend's response, restricted so that browsers never run the
    response as one of our pages."""
    passed = passed_headers(backend_headers, RESPONSE_HEADERS)
    media_type = passed.get("content-type", "").partition(";")[0].strip().lower()
    is_shown = media_type in SHOWN_TYPES or media_type.startswith(SHOWN_KINDS)
    headers = {
        **SAFE_HEADERS,
        "content-type": "application/octet-stream",
        **passed,
        "content-security-policy": CONTENT_POLICY,
        "cache-control": "private, no-cache",
    }
    if not is_shown or media_type.startswith(DRAWINGS):
        headers["content-disposition"] = "attachment"
    return headers


def _status(status: int) -> int:
    """Turns redirects into 502, so that a client is never sent to a backend or an arbitrary
    host."""
    return 502 if 300 <= status < 400 and status != 304 else status


def _reply_of(answer: RouteAnswer) -> Response:
    if answer.error is not None:
        logger.warning("a worker couldn't forward a route call: %s", answer.error)
        raise ServerUnavailable("the backend didn't respond")
    return Response(answer.body, _status(answer.status), confined(answer.headers))


async def _whole(client: "httpx.AsyncClient", answer: "httpx.Response") -> Response:
    """Reads a backend's complete response. It can't be streamed, because other backends may be
    called as well."""
    import httpx

    body = bytearray()
    try:
        async for chunk in answer.aiter_bytes():
            body += chunk
            if len(body) > ROUTE_BYTES_MAX:
                raise ServerUnavailable("the backend's response is too large")
    except httpx.HTTPError as error:
        raise ServerUnavailable("the backend didn't respond") from error
    finally:
        await answer.aclose()
        await client.aclose()
    return Response(bytes(body), _status(answer.status_code), confined(answer.headers))


def _streamed(client: "httpx.AsyncClient", answer: "httpx.Response") -> Response:
    async def chunks() -> AsyncIterator[bytes]:
        sent = 0
        try:
            async for chunk in answer.aiter_bytes():
                sent += len(chunk)
                if sent > BODY_BYTES_MAX:
                    raise BodyTooLarge(
                        "the backend's response is too large", bytes_max=BODY_BYTES_MAX
                    )
                yield chunk
        finally:
            await answer.aclose()
            await client.aclose()

    headers = confined(answer.headers)
    return StreamingResponse(chunks(), _status(answer.status_code), headers)
