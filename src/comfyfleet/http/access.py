"""Around every request: an id, a line in the log, a count, and an answer when all else fails."""

import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.http.errors import answer
from comfyfleet.http.json_body import CALLER_GONE
from comfyfleet.http.parked import Parked, parked_in
from comfyfleet.kernel.tracing import bound
from comfyfleet.plane import Meters

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


class Access:
    """Plain ASGI: it must not stand between a long poll and its caller's disappearance."""

    def __init__(
        self, app: ASGIApp, meters: Meters, clock: Callable[[], float] = time.monotonic
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
        with bound(request_id=request_id):
            try:
                await self._app(scope, receive, reply.send)
            except Exception:
                logger.exception("unexpected error in %s %s", scope["method"], _path(scope))
                if reply.status is not None:
                    raise  # half an answer is out: the server must close the connection
                await apology(request_id)(scope, receive, reply.send)
            finally:
                if (parked := parked_in(scope)) is not None:
                    parked.log, parked.begun, parked.request_id = self, begun, request_id
                else:
                    method = scope["method"] if scope["method"] in _METHODS else OTHER_METHOD
                    seconds = self._clock() - begun
                    self._note(method, _route(scope), _path(scope), reply.status, seconds)

    def note_parked(self, parked: Parked, status: int | None) -> None:
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


def apology(request_id: str) -> Response:
    """Nothing of what went wrong is told, but for the id under which the log has it."""
    message = "something went wrong on our side; the log has it under this id"
    return answer(500, "internal", message, {"request_id": request_id})


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
