"""Time limits for request and response bodies.

A request body that isn't a file must arrive within a minute. Files must keep arriving, and clients
must keep reading their responses: at least one byte per minute, and at least 1 KiB/s over a minute.

The limit for reading applies to every response, stream and WebSocket, even if the connection only
flushes its last data before it closes. Only the time in which data waits for the client counts.
"""

import asyncio
import logging
import re
import sys
from asyncio import Transport
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.server.http.errors import error_response
from comfyfleet.server.storage.local import OBJECTS_PATH

logger = logging.getLogger(__name__)
# Seconds from the end of the headers to the last byte of a body that isn't a file.
BODY_SECONDS_MAX = 60.0
# An upload of a file is rejected after this many seconds without data. Its rate is measured over
# the same number of seconds.
FILE_SECONDS_MAX = 60.0
FILE_BYTES_PER_SECOND_MIN = 1024
# A connection is closed if its client reads nothing for this many seconds. The client's rate is
# measured over the same number of seconds.
UNREAD_SECONDS_MAX = 60.0
CHECK_SECONDS = 5.0
WARN_SECONDS = 60.0
# Paths that receive files: signed URLs, and ComfyUI's upload routes with and without the editor's
# prefix.
_FILE_PATH = re.compile(rf"{OBJECTS_PATH}/|(?:/editor)?(?:/api)?/(?:upload/|userdata/|v2/assets)")


class BodyTooSlow(HTTPException):
    """Raised when a body arrives too slowly.

    It is an HTTPException because FastAPI converts all other errors while it reads a body.
    """

    def __init__(self, message: str) -> None:
        super().__init__(408, message, {"Connection": "close"})
        self.message = message


class BodyTimes:
    """ASGI middleware that answers requests with slow bodies with 408 and closes the connection.

    It replaces any response that the route sends because of the error.
    """

    def __init__(
        self,
        app: ASGIApp,
        seconds_max: float = BODY_SECONDS_MAX,
        file_seconds_max: float = FILE_SECONDS_MAX,
    ) -> None:
        self._app = app
        self._seconds_max = seconds_max
        self._file_seconds_max = file_seconds_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(scope):
            await self._app(scope, receive, send)
            return
        body: _TimedBody = (
            _TimedFile(receive, self._file_seconds_max)
            if _FILE_PATH.match(scope["path"])
            else _TimedBody(receive, self._seconds_max)
        )
        has_started = False

        async def send_in_time(message: Message) -> None:
            nonlocal has_started
            if body.error is None or has_started:
                has_started = True
                await send(message)

        try:
            await self._app(scope, body.receive, send_in_time)
        except Exception:
            if body.error is None or has_started:
                raise
        if body.error is not None and not has_started:
            headers = {"connection": "close"}
            response = error_response(408, "timeout", body.error.message, headers=headers)
            await response(scope, receive, send)


def has_body(scope: Scope) -> bool:
    """Checks whether a request announces a body."""
    names = {name for name, _ in scope["headers"]}
    return b"content-length" in names or b"transfer-encoding" in names


class _TimedBody:
    """A body that must arrive completely before a deadline."""

    def __init__(self, receive: Receive, seconds_max: float) -> None:
        self._receive = receive
        self._seconds_max = seconds_max
        self._is_complete = False
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + seconds_max
        self.error: BodyTooSlow | None = None

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        if self.error is not None:
            raise self.error
        message = await self._receive_in_time()
        self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            raise self._too_slow(
                f"the body did not arrive within {self._seconds_max:g} seconds"
            ) from None

    def _too_slow(self, message: str) -> BodyTooSlow:
        self.error = BodyTooSlow(message)
        return self.error


class _TimedFile(_TimedBody):
    """A body that must arrive at a minimum rate. Only time spent waiting for the client counts."""

    def __init__(self, receive: Receive, seconds_max: float) -> None:
        super().__init__(receive, seconds_max)
        self._waited = 0.0
        self._bytes = 0

    async def _receive_in_time(self) -> Message:
        started = self._clock()
        try:
            async with asyncio.timeout(self._seconds_max):
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow(
                f"no data was received for {self._seconds_max:g} seconds"
            ) from None
        self._waited += self._clock() - started
        self._bytes += len(message.get("body", b""))
        if self._waited >= self._seconds_max:
            if self._bytes < self._waited * FILE_BYTES_PER_SECOND_MIN:
                raise self._too_slow(
                    f"the file arrived at less than {FILE_BYTES_PER_SECOND_MIN} bytes per second"
                )
            self._waited, self._bytes = 0.0, 0
        return message


class CountedSocket(Protocol):
    """A socket that counts the bytes passed to the operating system for sending."""

    sent_bytes: int

    def fileno(self) -> int: ...


@dataclass(slots=True)
class _Reading:
    """Tracks how many bytes a client has read, and when, while more data is waiting for it."""

    since: float
    start_bytes: int
    read_bytes: int
    moved_at: float

    def is_too_slow(self, read_bytes: int, now: float) -> bool:
        if read_bytes > self.read_bytes:
            self.read_bytes, self.moved_at = read_bytes, now
        if now - self.moved_at >= UNREAD_SECONDS_MAX:
            return True
        seconds = now - self.since
        if seconds < UNREAD_SECONDS_MAX:
            return False
        is_slow = read_bytes - self.start_bytes < seconds * FILE_BYTES_PER_SECOND_MIN
        self.since, self.start_bytes = now, read_bytes
        return is_slow


class SlowReaders:
    """Closes connections whose clients read their responses too slowly.

    The time is an argument, so that tests don't have to wait.
    """

    def __init__(self, unsent: Callable[[CountedSocket], int] | None = None) -> None:
        self._unsent = unsent or unsent_bytes
        self._open: dict[CountedSocket, Transport] = {}
        self._waiting: dict[CountedSocket, _Reading] = {}
        self._checked_at = 0.0
        self._warned_at = -WARN_SECONDS

    def add(self, client: CountedSocket, transport: Transport) -> None:
        self._open[client] = transport

    def discard(self, client: CountedSocket) -> None:
        self._open.pop(client, None)
        self._waiting.pop(client, None)

    def check(self, now: float) -> None:
        """Closes connections that are read too slowly. Does nothing if the last check was less than
        `CHECK_SECONDS` ago."""
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        for client, transport in list(self._open.items()):
            # Data in the operating system's buffer doesn't use our memory. A request stays open
            # only while our own buffer contains data.
            if transport.get_write_buffer_size() == 0:
                self._waiting.pop(client, None)
            elif self._is_too_slow(client, now):
                self._end(client, transport, now)

    def _is_too_slow(self, client: CountedSocket, now: float) -> bool:
        read_bytes = client.sent_bytes - self._unsent(client)
        reading = self._waiting.get(client)
        if reading is None:
            self._waiting[client] = _Reading(now, read_bytes, read_bytes, now)
            return False
        return reading.is_too_slow(read_bytes, now)

    def _end(self, client: CountedSocket, transport: Transport, now: float) -> None:
        self.discard(client)
        transport.abort()
        if now - self._warned_at >= WARN_SECONDS:
            self._warned_at = now
            logger.warning("a client didn't read its response in time; its connection was closed")


def unsent_bytes(client: CountedSocket) -> int:
    """Returns the number of bytes that the client hasn't acknowledged yet, or 0 if the operating
    system doesn't report it."""
    if sys.platform == "win32":
        return 0
    import fcntl
    import struct
    import termios

    try:
        answer = fcntl.ioctl(client.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except OSError:
        return 0
    (held,) = struct.unpack("i", answer)
    return int(held)
