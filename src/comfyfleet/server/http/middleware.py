"""Middleware: a request id, a log line and a count for every request; callers are authenticated before a body is read, and
wrong keys are slowed down by address."""

import asyncio
import logging
import re
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.errors import FleetError, TooManyCalls, Unauthenticated, said_to_customers
from comfyfleet.log_context import bind_ids
from comfyfleet.server.app import ProcessMetrics
from comfyfleet.server.http.connections import PARKED, ParkedConnection, connection_of
from comfyfleet.server.http.deps import plane_of
from comfyfleet.server.http.errors import error_response, response_to_error, status_of
from comfyfleet.server.http.request_body import CALLER_GONE
from comfyfleet.server.secrets import hash_key

logger = logging.getLogger("comfyfleet.access")
REQUEST_ID = "X-Request-Id"
# A caller's own id is taken over if it can do no harm in a log.
_HARMLESS = re.compile(r"[A-Za-z0-9._-]{1,100}")
# Asked for every few seconds by machines: said only to those who want to know everything.
POLL = "/api/worker/poll"
_QUIET = ("/healthz", "/readyz", "/metrics", POLL, "/api/worker/heartbeat")
ELSEWHERE = "unknown"
# A worker hangs up as soon as an answer is of no more use to it, with almost every job.
_USUAL = (200, None)
# Anybody can make up others, and each would be a series of its own.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER_METHOD = "OTHER"


class AccessLog:
    """Plain ASGI: it must not stand between a long poll and its caller's disappearance."""

    def __init__(
        self, app: ASGIApp, meters: ProcessMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._meters = meters
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or uuid.uuid4().hex
        reply = _Reply(send, request_id)
        begun = self._clock()
        with bind_ids(request_id=request_id):
            try:
                await self._app(scope, receive, reply.send)
            except Exception:
                logger.exception("unexpected error in %s %s", scope["method"], _path(scope))
                if reply.status is not None:
                    raise  # half an answer is out: the server must close the connection
                await internal_error(request_id)(scope, receive, reply.send)
            finally:
                parked: ParkedConnection | None = scope.get("state", {}).get(PARKED)
                if parked is not None:
                    parked.log, parked.begun, parked.request_id = self, begun, request_id
                else:
                    method = scope["method"] if scope["method"] in _METHODS else OTHER_METHOD
                    seconds = self._clock() - begun
                    self._note(method, _route(scope), _path(scope), reply.status, seconds)

    def note_parked(self, parked: ParkedConnection, status: int | None) -> None:
        """Only polls are."""
        self._note("POST", POLL, POLL, status, self._clock() - parked.begun)

    def _note(self, method: str, route: str, path: str, status: int | None, seconds: float) -> None:
        status = None if status == CALLER_GONE else status
        self._meters.calls.labels(method, route, str(status or "gone")).inc()
        self._meters.call_seconds.labels(method, route).observe(seconds)
        logger.log(
            logging.DEBUG if route in _QUIET and status in _USUAL else logging.INFO,
            "%s %s %s %.0f ms",
            method,
            path,
            status or "gone",
            seconds * 1000,
            extra={"method": method, "path": path, "status": status, "route": route},
        )


class _Reply:
    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers: list[Any] = list(message.get("headers", ()))
            headers.append((REQUEST_ID.lower().encode(), self.request_id.encode()))
            message = {**message, "headers": headers}
        await self._send(message)


def internal_error(request_id: str) -> Response:
    """Nothing of what went wrong is told, but for the id under which the log has it."""
    message = "something went wrong on our side; the log has it under this id"
    return error_response(500, "internal", message, {"request_id": request_id})


def _given_id(scope: Scope) -> str | None:
    wanted = REQUEST_ID.lower().encode()
    found = next((value for name, value in scope["headers"] if name == wanted), b"")
    text: str = found.decode("latin-1")
    return text if _HARMLESS.fullmatch(text) else None


def _route(scope: Scope) -> str:
    """Its pattern: ids would make a new series of each. Paths that lead nowhere are one series."""
    return getattr(scope.get("route"), "path", None) or ELSEWHERE


def _path(scope: Scope) -> str:
    """As it was sent, so without line breaks; and without its query, which may hold a signature."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0].decode("ascii", "backslashreplace")


V = TypeVar("V")
FREE_TRIES = 20
FIRST_SECONDS, SECONDS_MAX = 0.05, 5.0
FORGET_SECONDS = 600.0
WAITING_PER_ADDRESS_MAX = 100
ADDRESSES_MAX = RIGHT_KEYS_MAX = 10_000
# 256 random bits, as all keys and secrets that we make: trying many of them leads nowhere.
_MADE_BY_US = re.compile(r"(?:bearer +)?(?:[a-z]{2,3}_)?[0-9a-f]{64}", re.I)


class WrongKeyThrottle:
    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._sleep = sleep
        self._clock = clock
        self._tries: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._right: OrderedDict[str, None] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    def admit(self, address: str, key: str) -> None:
        """TooManyCalls: there is no telling now whether the key is right."""
        if self._is_full(address) and not self._may_be_right(key):
            raise _too_many()

    def note_right(self, key: str) -> None:
        _keep(self._right, hash_key(key), None, RIGHT_KEYS_MAX)

    async def slow_down(self, address: str) -> None:
        """Before a wrong key is answered; others are served meanwhile. TooManyCalls: at once."""
        seconds = self._noted(address)
        if seconds == 0:
            return
        if self._is_full(address):
            raise _too_many()
        self._waiting[address] += 1
        try:
            await self._sleep(seconds)
        finally:
            self._waiting[address] -= 1
            self._waiting += Counter()  # forgets those where nobody waits

    def _is_full(self, address: str) -> bool:
        return self._waiting[address] >= WAITING_PER_ADDRESS_MAX

    def _may_be_right(self, key: str) -> bool:
        return bool(_MADE_BY_US.fullmatch(key)) or hash_key(key) in self._right

    def _noted(self, address: str) -> float:
        now = self._clock()
        count, last = self._tries.get(address, (0, now))
        count = 1 if now - last > FORGET_SECONDS else count + 1
        _keep(self._tries, address, (count, now), ADDRESSES_MAX)
        beyond = count - FREE_TRIES
        return 0.0 if beyond <= 0 else min(SECONDS_MAX, FIRST_SECONDS * 2 ** min(beyond - 1, 20))


def _too_many() -> TooManyCalls:
    return TooManyCalls(
        "too many wrong keys come from this address", retry_after_seconds=int(SECONDS_MAX)
    )


def _keep(kept: OrderedDict[str, V], name: str, value: V, most: int) -> None:
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > most:
        kept.popitem(last=False)


SECRET_HEADER = "X-Fleet-Secret"  # noqa: S105 - its name
SLOW_SECONDS = 1.0
T = TypeVar("T")
# Raises one of our errors, or says who it is.
Check: TypeAlias = Callable[[Request], Awaitable[object]]


class CallerAuth:
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
            await response_to_error(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, _Arrival(receive, check, request).receive, send)

    async def _asked(self, check: Check, request: Request) -> object:
        key, address = _key_of(request), request.client.host if request.client else ""
        if key is None:
            return await check(request)
        wrong: WrongKeyThrottle = request.app.state.wrong_keys
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
