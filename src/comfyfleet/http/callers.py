"""Who calls is known before anything of a request's body is read: one place for every audience.

Without a good key nothing is parsed: neither a large body nor a slow one costs more than a refusal.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.http.errors import answer_to
from comfyfleet.http.given import plane_of
from comfyfleet.http.wrong_keys import WrongKeys
from comfyfleet.kernel.errors import FleetError, Unauthenticated

SECRET_HEADER = "X-Fleet-Secret"  # noqa: S105 - its name
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
        await self._app(scope, receive, send)

    async def _asked(self, check: Check, request: Request) -> object:
        key, address = _key_of(request), request.client.host if request.client else ""
        if key is None:
            return await check(request)
        wrong: WrongKeys = request.app.state.wrong_keys
        wrong.admit(address, key)
        try:
            caller = await check(request)
        except Unauthenticated:
            await wrong.slow_down(address)
            raise
        wrong.note_right(key)
        return caller

    def _check(self, path: str) -> Check | None:
        return next((check for prefix, check in self._checks if path.startswith(prefix)), None)


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
