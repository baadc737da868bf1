"""Who calls is known before anything of a request's body is read: one place for every audience.

Without a good key nothing is parsed: neither a large body nor a slow one costs more than a refusal. After
a slow one the key is looked at once more: it may have been revoked before the last byte came.
"""

from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TypeAlias, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.http.errors import answer_to, status_of
from comfyfleet.http.given import plane_of
from comfyfleet.http.parked import connection_of
from comfyfleet.http.wrong_keys import WrongKeys
from comfyfleet.kernel.errors import FleetError, Unauthenticated, said_to_customers

SECRET_HEADER = "X-Fleet-Secret"  # noqa: S105 - its name
SLOW_SECONDS = 1.0
T = TypeVar("T")
# Raises one of our errors, or says who it is.
Check: TypeAlias = Callable[[Request], Awaitable[object]]


class Callers:
    """Asks the first check whose prefix the path has; paths of none are everybody's."""

    def __init__(self, app: ASGIApp, checks: Sequence[tuple[str, Check | None]]) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check = self._check(scope["path"]) if scope["type"] == "http" else None
        if check is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            request.state.caller = await self._asked(check, request)
        except FleetError as error:
            plane_of(request).meters.errors.labels(error.code).inc()
            await answer_to(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, _Arrival(receive, check, request).receive, send)

    async def _asked(self, check: Check, request: Request) -> object:
        key, address = _key_of(request), request.client.host if request.client else ""
        if key is None:
            return await check(request)
        wrong: WrongKeys = request.app.state.wrong_keys
        wrong.admit(address, key)
        try:
            caller = await check(request)
        except Unauthenticated:
            if (connection := connection_of(request.scope)) is not None:
                connection.let_go()
            await wrong.slow_down(address)
            raise
        wrong.note_right(key)
        return caller

    def _check(self, path: str) -> Check | None:
        return next((check for prefix, check in self._checks if path.startswith(prefix)), None)


class _Arrival:
    """A body on its way in, of a caller who is known."""

    __slots__ = ("_check", "_is_empty", "_receive", "_request", "_since")

    def __init__(self, receive: Receive, check: Check, request: Request) -> None:
        self._receive, self._request = receive, request
        self._check: Check | None = check
        self._since = monotonic()
        self._is_empty = True

    async def receive(self) -> Message:
        message = await self._receive()
        if self._check is not None and message["type"] == "http.request":
            self._is_empty = self._is_empty and not message.get("body")
            if not message.get("more_body", False):
                await self._arrived(self._check)
                self._check = None
        return message

    async def _arrived(self, check: Check) -> None:
        if self._is_empty or monotonic() - self._since < SLOW_SECONDS:
            return
        try:
            self._request.state.caller = await check(self._request)
        except FleetError as error:
            # The one kind that the framework lets through while it reads a body.
            raise HTTPException(status_of(error), said_to_customers(error)) from None


def _key_of(request: Request) -> str | None:
    """A bearer key or a fleet's secret, whatever is told."""
    headers = request.headers
    return headers.get("authorization") or headers.get(SECRET_HEADER)


def caller_of(request: Request, kind: type[T]) -> T:
    """Whom `Callers` let in; nobody comes past it to a route that asks for a caller."""
    caller = getattr(request.state, "caller", None)
    if not isinstance(caller, kind):
        raise Unauthenticated("a key is needed")
    return caller
