"""Middleware that adds a request id, a log line and metrics to every request, authenticates callers
before their bodies are read, and delays addresses that send wrong keys."""

import asyncio
import logging
import re
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.errors import (
    FleetError,
    TooManyCalls,
    Unauthenticated,
    Unavailable,
    said_to_customers,
)
from comfyfleet.log_context import bind_ids
from comfyfleet.server.app import ProcessMetrics
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.db.outages import as_unavailable
from comfyfleet.server.http.connections import (
    PARKED,
    ParkedConnection,
    connection_of,
    note_valid_key,
    release_request,
)
from comfyfleet.server.http.deps import local_access_of, plane_of
from comfyfleet.server.http.errors import (
    error_response,
    headers_of,
    response_to_error,
    status_of,
)
from comfyfleet.server.http.request_body import CALLER_GONE
from comfyfleet.server.http.tallies import holders_of
from comfyfleet.server.secrets import hash_key

logger = logging.getLogger("comfyfleet.access")
REQUEST_ID = "X-Request-Id"
# A client's own request id is used only if it matches this pattern, so that it is safe to log.
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")
# Machines call these routes every few seconds, and one page may load hundreds of editor files, so
# successful requests are logged at DEBUG only.
POLL = "/api/worker/poll"
ROUTE_POLL = "/api/worker/routes"
EDITOR_FILE = "/editor/{path:path}"
_WORKER_POLLS = (POLL, ROUTE_POLL, "/api/worker/heartbeat")
_DEBUG_ROUTES = ("/healthz", "/readyz", "/metrics", *_WORKER_POLLS, EDITOR_FILE)
UNKNOWN_ROUTE = "unknown"
# The API and the page of shared results. The rest of such a path is secret and hidden in logs.
SHARED_PATH = "/api/shared"
_SHARED = re.compile(r"((?:/api)?/+shared)/.*", re.I | re.S)
# Finds a key after /k/, even in a mistyped path (`//k/KEY`, `/api/k/KEY`, `/K/KEY`), and our own
# keys anywhere in a path.
_KEY = re.compile(r"(?i:/+k/+)[^/]+|[a-z]{2,3}_[0-9a-fA-F]{64}")
HIDDEN_KEY = "/k/hidden"
# None means that the client disconnected. Workers do this for almost every job, because they close
# polls that they no longer need.
_NORMAL_STATUSES = (200, 304, None)
# Methods used as metric labels. Clients can send arbitrary methods, which would each create a new
# series.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER_METHOD = "OTHER"
# Default cache headers are added for these methods only, because caches never store responses to
# other methods.
_READING = ("GET", "HEAD")


class AccessLog:
    """Logs and counts requests.

    This is plain ASGI middleware, so that a long poll notices when its client disconnects.
    """

    def __init__(
        self,
        app: ASGIApp,
        meters: ProcessMetrics,
        clock: Callable[[], float] = time.monotonic,
        stopping: asyncio.Event | None = None,
    ) -> None:
        self._app = app
        self._meters = meters
        self._stopping = stopping
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            with self._cancelled_at_stop():
                await self._app(scope, receive, send)
            return
        request_id = _client_request_id(scope) or uuid.uuid4().hex
        reply = _Reply(send, request_id, is_reading=scope["method"] in _READING)
        started = self._clock()
        with bind_ids(request_id=request_id):
            try:
                with self._cancelled_at_stop():
                    await self._app(scope, receive, reply.send)
                    return
                if reply.status is None:
                    await stopping_response()(scope, receive, reply.send)
            except ClientDisconnect:
                if reply.status is not None:
                    raise
                reply.status = CALLER_GONE
            except Exception as error:
                if reply.status is not None and await _is_cut_off(scope, error):
                    return
                response = response_to_failure(error, scope["method"], _path(scope), request_id)
                if reply.status is not None:
                    raise  # part of the response was sent, so the server must close the connection
                await response(scope, receive, reply.send)
            finally:
                parked: ParkedConnection | None = scope.get("state", {}).get(PARKED)
                if parked is not None:
                    parked.log, parked.begun, parked.request_id = self, started, request_id
                else:
                    method = scope["method"] if scope["method"] in _METHODS else OTHER_METHOD
                    seconds = self._clock() - started
                    self._note(method, _route(scope), _path(scope), reply.status, seconds)

    @contextmanager
    def _cancelled_at_stop(self) -> Iterator[None]:
        """Suppresses the cancellation of a request if the server is stopping."""
        try:
            yield
        except asyncio.CancelledError:
            if self._stopping is None or not self._stopping.is_set():
                raise

    def note_parked(self, parked: ParkedConnection, status: int | None) -> None:
        """Logs and counts a parked request. Only polls are parked."""
        self._note("POST", POLL, POLL, status, self._clock() - parked.begun)

    def _note(self, method: str, route: str, path: str, status: int | None, seconds: float) -> None:
        status = None if status == CALLER_GONE else status
        self._meters.calls.labels(method, route, str(status or "gone")).inc()
        self._meters.call_seconds.labels(method, route).observe(seconds)
        logger.log(
            logging.DEBUG
            if route in _DEBUG_ROUTES and status in _NORMAL_STATUSES
            else logging.INFO,
            "%s %s %s %.0f ms",
            method,
            path,
            status or "gone",
            seconds * 1000,
            extra={"method": method, "path": path, "status": status, "route": route},
        )


class _Reply:
    def __init__(self, send: Send, request_id: str, *, is_reading: bool) -> None:
        self._send = send
        self._is_reading = is_reading
        self.request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers: list[Any] = list(message.get("headers", ()))
            headers.append((REQUEST_ID.lower().encode(), self.request_id.encode()))
            if self._is_reading:
                headers += _default_headers({name.lower() for name, _ in headers})
            message = {**message, "headers": headers}
        await self._send(message)


def _default_headers(names: Collection[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yields headers that restrict caching and content sniffing, unless the response sets them.

    Caches don't know that a response depends on the browser's cookie. Without these headers, they
    could store a response and serve it to the next user who signs in.
    """
    if b"cache-control" not in names:
        yield b"cache-control", b"private, no-cache" if b"etag" in names else b"no-store"
    if b"x-content-type-options" not in names:
        yield b"x-content-type-options", b"nosniff"


def internal_error(request_id: str) -> Response:
    """Returns a 500 with the request id under which the error is logged, and no details."""
    message = "something went wrong on our side; the error is logged under this request id"
    return error_response(500, "internal", message, {"request_id": request_id})


def stopping_response() -> Response:
    """Returns the response to a request that didn't finish before the server had to stop."""
    error = Unavailable("this control plane is stopping; try again", retry_after_seconds=1)
    headers = {**headers_of(error), "connection": "close"}
    return error_response(503, error.code, error.message, headers=headers)


def response_to_failure(error: Exception, method: str, path: str, request_id: str) -> Response:
    """Returns the response to an unexpected error.

    An error that turns out to be a database outage becomes 503. Any other error is a bug, which is
    logged and becomes 500.
    """
    away = as_unavailable(error)
    if away is not None:
        return response_to_error(away, path)
    logger.error("unexpected error in %s %s", method, path, exc_info=error)
    return internal_error(request_id)


async def _is_cut_off(scope: Scope, error: Exception) -> bool:
    """Closes the connection if an expected error has interrupted the response, so that the client
    notices.

    Returns False for a bug. The server then closes the connection and logs a traceback.
    """
    expected = error if isinstance(error, FleetError) else as_unavailable(error)
    connection = connection_of(scope)
    if expected is None or connection is None:
        return False
    level = log_level_of(expected)
    logger.log(level, "%s %s was interrupted: %s", scope["method"], _path(scope), expected.message)
    connection.transport.abort()
    await asyncio.sleep(0)  # lets the event loop call connection_lost
    return True


def _client_request_id(scope: Scope) -> str | None:
    header = REQUEST_ID.lower().encode()
    raw = next((value for name, value in scope["headers"] if name == header), b"")
    text: str = raw.decode("latin-1")
    return text if _SAFE_ID.fullmatch(text) else None


def _route(scope: Scope) -> str:
    """Returns the route's pattern as a metric label, because paths with ids would create a series
    for each id. Unknown paths share one label."""
    return getattr(scope.get("route"), "path", None) or UNKNOWN_ROUTE


def _path(scope: Scope) -> str:
    """Returns the path for logs, without its secrets.

    The path is still percent-encoded, so it can't contain line breaks. The query is removed because
    it may contain a signature. Keys and the secrets of shared links are hidden.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = _KEY.sub(HIDDEN_KEY, raw.partition(b"?")[0].decode("ascii", "backslashreplace"))
    if HIDDEN_KEY not in path and _KEY.search(scope["path"]):
        return HIDDEN_KEY  # part of the path is percent-encoded, such as %6b for k
    hidden = _SHARED.sub(r"\1/hidden", path)
    if hidden == path and _SHARED.search(scope["path"]):
        return f"{SHARED_PATH}/hidden"  # part of the path is percent-encoded, such as %73hared
    return hidden


V = TypeVar("V")
# Number of wrong keys from an address that are answered without a delay.
FREE_TRIES = 20
# The shortest and the longest delay in seconds. The delay doubles with each further wrong key.
FIRST_SECONDS, SECONDS_MAX = 0.05, 5.0
# The count of an address is reset after this many seconds without a wrong key.
FORGET_SECONDS = 600.0
WAITING_PER_ADDRESS_MAX = 100
ADDRESSES_MAX = VALID_KEYS_MAX = 10_000
# The format of all our keys. They have 256 random bits and can't be guessed, so such keys are
# always checked, even if too many wrong keys are waiting.
_OUR_KEY_FORMAT = re.compile(r"(?:bearer +)?(?:[a-z]{2,3}_)?[0-9a-f]{64}", re.I)


class WrongKeyThrottle:
    """Delays the responses to wrong keys. The delay grows with each wrong key from the same
    address."""

    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._sleep = sleep
        self._clock = clock
        self._tries: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._valid: OrderedDict[str, None] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    def admit(self, address: str, key: str) -> None:
        """Raises TooManyCalls if too many requests with wrong keys from this address are being
        delayed, unless this key may be valid."""
        if self._is_full(address) and not self._may_be_valid(key):
            raise _too_many()

    def knows(self, key: str) -> bool:
        """Checks whether the key was valid when this process last checked it."""
        return hash_key(key) in self._valid

    def forget(self, key: str) -> None:
        self._valid.pop(hash_key(key), None)

    def note_valid(self, key: str) -> None:
        _put_limited(self._valid, hash_key(key), None, VALID_KEYS_MAX)

    async def delay(self, address: str) -> None:
        """Delays the response to a wrong key.

        Raises TooManyCalls if too many requests from the address are already being delayed.
        """
        seconds = self._count_try(address)
        if seconds == 0:
            return
        if self._is_full(address):
            raise _too_many()
        self._waiting[address] += 1
        try:
            await self._sleep(seconds)
        finally:
            self._waiting[address] -= 1
            self._waiting += Counter()  # drops zero counts

    def _is_full(self, address: str) -> bool:
        return self._waiting[address] >= WAITING_PER_ADDRESS_MAX

    def _may_be_valid(self, key: str) -> bool:
        return bool(_OUR_KEY_FORMAT.fullmatch(key)) or hash_key(key) in self._valid

    def _count_try(self, address: str) -> float:
        now = self._clock()
        count, last = self._tries.get(address, (0, now))
        count = 1 if now - last > FORGET_SECONDS else count + 1
        _put_limited(self._tries, address, (count, now), ADDRESSES_MAX)
        beyond = count - FREE_TRIES
        return 0.0 if beyond <= 0 else min(SECONDS_MAX, FIRST_SECONDS * 2 ** min(beyond - 1, 20))


def _too_many() -> TooManyCalls:
    return TooManyCalls(
        "too many requests with wrong keys from this address",
        retry_after_seconds=int(SECONDS_MAX),
    )


def _put_limited(cache: OrderedDict[str, V], name: str, value: V, size_max: int) -> None:
    cache[name] = value
    cache.move_to_end(name)
    if len(cache) > size_max:
        cache.popitem(last=False)


SECRET_HEADER = "X-Fleet-Secret"  # noqa: S105 - the header's name, not a secret
# If a body took longer than this many seconds to arrive, its key is checked again.
SLOW_SECONDS = 1.0
T = TypeVar("T")
# A function that returns the caller of a request or raises a FleetError.
Check: TypeAlias = Callable[[Request], Awaitable[object]]


class CallerAuth:
    """Authenticates each request with the first check whose prefix matches the path.

    Paths without a matching check are public.
    """

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
            request.state.caller = await self._authenticate(check, request)
            note_valid_key(scope, *holders_of(request.state.caller))
        except FleetError as error:
            if isinstance(error, Unauthenticated) and await _is_unknown_local_route(request):
                await self._app(scope, receive, send)
                return
            plane_of(request).meters.errors.labels(error.code).inc()
            await response_to_error(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, _RecheckedBody(receive, check, request).receive, send)

    async def _authenticate(self, check: Check, request: Request) -> object:
        key, address = _key_of(request), request.client.host if request.client else ""
        if key is None:
            return await check(request)
        wrong: WrongKeyThrottle = request.app.state.wrong_keys
        wrong.admit(address, key)
        try:
            caller = await check(request)
        except Unauthenticated:
            wrong.forget(key)
            release_request(request.scope)
            if (connection := connection_of(request.scope)) is not None:
                connection.leave_admission()
            await wrong.delay(address)
            raise
        wrong.note_valid(key)
        return caller

    def _check(self, path: str) -> Check | None:
        return check_of(self._checks, path)


def check_of(checks: Sequence[tuple[str, Check | None]], path: str) -> Check | None:
    return next((check for prefix, check in checks if path.startswith(prefix)), None)


async def _is_unknown_local_route(request: Request) -> bool:
    """Checks whether the local user of `comfyfleet up` calls a route that doesn't exist.

    This user needs no key, so the response is 404 instead of 401.
    """
    local = local_access_of(request)
    if local is None or _key_of(request) is not None or not await local.admits(request):
        return False
    routes = request.app.router.routes
    return all(route.matches(request.scope)[0] is Match.NONE for route in routes)


class _RecheckedBody:
    """Checks the key again after a slow upload, because it may have been revoked during the
    upload."""

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
                await self._recheck(self._check)
                self._check = None
        return message

    async def _recheck(self, check: Check) -> None:
        if self._is_empty or monotonic() - self._since < SLOW_SECONDS:
            return
        try:
            self._request.state.caller = await check(self._request)
        except FleetError as error:
            # While FastAPI reads a body, it converts every error except HTTPException.
            raise HTTPException(status_of(error), said_to_customers(error)) from None


def _key_of(request: Request) -> str | None:
    """Returns the bearer key or the fleet's secret, or None if the request has neither."""
    headers = request.headers
    return headers.get("authorization") or headers.get(SECRET_HEADER)


def caller_of(request: Request, kind: type[T]) -> T:
    """Returns the caller that `CallerAuth` authenticated, or raises Unauthenticated if the request
    has none."""
    caller = getattr(request.state, "caller", None)
    if not isinstance(caller, kind):
        raise Unauthenticated("a key is required")
    return caller
