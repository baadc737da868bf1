"""Leads each request to its handler. Every route exists twice: `/x` and `/api/x`."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from comfyfleet.engine import replies
from comfyfleet.engine.jobs import InvalidQuery
from comfyfleet.engine.origin import is_foreign
from comfyfleet.engine.requests import BODY_BYTES_MAX, BodyTooLarge, limited
from comfyfleet.engine.submission import RefusedPrompt
from comfyfleet.engine.trouble import Trouble

# What handlers work with: the engine, or whatever has one.
T = TypeVar("T")
Handler = Callable[[T, Request], Awaitable[Response]]
SocketHandler = Callable[[T, WebSocket], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route(Generic[T]):
    """`path` may hold `{name}` for one part of it and `{name:path}` for all the rest."""

    method: str
    path: str
    handler: Handler[T]
    prefixes: tuple[str, ...] = ("", "/api")


@dataclass(frozen=True, slots=True)
class _Pattern(Generic[T]):
    expression: re.Pattern[str]
    handlers: dict[str, Handler[T]] = field(default_factory=dict)


class Alive(Protocol):
    """What is started and stopped with the server."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def stop(self) -> None: ...


class Door(Generic[T]):
    """The ASGI application. `served` is what handlers get, `alive` what runs meanwhile."""

    def __init__(
        self,
        served: T,
        alive: Alive,
        routes: Iterable[Route[T]],
        sockets: Mapping[str, SocketHandler[T]],
    ) -> None:
        self._served = served
        self._alive = alive
        self._sockets = sockets
        self._fixed: dict[str, dict[str, Handler[T]]] = {}
        self._patterns: dict[str, _Pattern[T]] = {}
        for route in routes:
            for prefix in route.prefixes:
                self._add(prefix + route.path, route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope, limited(receive))
            response = await self._answer(request)
            await response(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._talk(WebSocket(scope, receive, send))
        else:
            await self._live(receive, send)

    def _add(self, path: str, route: Route[T]) -> None:
        if "{" in path:
            handlers = self._patterns.setdefault(path, _Pattern(_expression(path))).handlers
        else:
            handlers = self._fixed.setdefault(path, {})
        handlers[route.method] = route.handler

    async def _answer(self, request: Request) -> Response:
        if is_foreign(request.headers):
            return replies.empty(403)
        if request.method == "OPTIONS":
            return replies.empty()
        try:
            return await self._dispatch(request)
        except RefusedPrompt as refused:
            return replies.json_reply(refused.body, 400)
        except InvalidQuery as error:
            return replies.json_reply({"error": error.message}, 400)
        except BodyTooLarge:
            return replies.too_large(BODY_BYTES_MAX)
        except Trouble as error:
            log.info("%s %s: %s", request.method, request.url.path, error.message)
            return replies.trouble()
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            return replies.trouble()

    async def _dispatch(self, request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        allowed: set[str] = set()
        for handlers in self._matching(request):
            if handler := handlers.get(method):
                return await handler(self._served, request)
            allowed |= handlers.keys()
        if method == "GET":
            return replies.empty(404)
        return replies.not_allowed(allowed)

    def _matching(self, request: Request) -> Iterator[dict[str, Handler[T]]]:
        path = request.scope["path"]
        if path in self._fixed:
            yield self._fixed[path]
        for pattern in self._patterns.values():
            if found := pattern.expression.fullmatch(path):
                request.scope["path_params"] = found.groupdict()
                yield pattern.handlers

    async def _talk(self, socket: WebSocket) -> None:
        handler = self._sockets.get(socket.scope["path"])
        if handler is None or is_foreign(socket.headers):
            await socket.close()
        else:
            await handler(self._served, socket)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._alive.start(asyncio.get_running_loop())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.to_thread(self._alive.stop)
        await send({"type": "lifespan.shutdown.complete"})


def _expression(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)(:path)?\}", path)
    text = re.escape(parts[0])
    for name, rest, literal in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text += f"(?P<{name}>{'.+' if rest else '[^/]+'}){re.escape(literal)}"
    return re.compile(text)
