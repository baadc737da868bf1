"""Limits the time of every request body: one that is no file must arrive within a minute, a file must
keep arriving."""

import asyncio
import re

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.server.http.errors import error_response
from comfyfleet.server.storage.local import OBJECTS_PATH

# From the end of the headers to the last byte of a body that is no file.
BODY_SECONDS_MAX = 60.0
# The longest silence of a file, and the window in which its rate is measured.
FILE_SECONDS_MAX = 60.0
FILE_BYTES_PER_SECOND_MIN = 1024
# Files are received here: in signed URLs and in ComfyUI's routes, also below the editor.
_FILE_PATH = re.compile(rf"{OBJECTS_PATH}/|(?:/editor)?(?:/api)?/(?:upload/|userdata/|v2/assets)")


class BodyTooSlow(HTTPException):
    """FastAPI lets only HTTPException through while it reads a body."""

    def __init__(self, message: str) -> None:
        super().__init__(408, message, {"Connection": "close"})
        self.message = message


class BodyTimes:
    """ASGI middleware around all routes. A body that is too slow is answered with 408, whatever the
    route makes of the error, and the connection closes."""

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
        if scope["type"] != "http" or not _has_body(scope):
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


def _has_body(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    return b"content-length" in names or b"transfer-encoding" in names


class _TimedBody:
    """A body with a deadline for all of it."""

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
    """A body with a lowest rate. Only the time that we wait for the client counts."""

    def __init__(self, receive: Receive, seconds_max: float) -> None:
        super().__init__(receive, seconds_max)
        self._waited = 0.0
        self._bytes = 0

    async def _receive_in_time(self) -> Message:
        begun = self._clock()
        try:
            async with asyncio.timeout(self._seconds_max):
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow(
                f"no byte of the file arrived for {self._seconds_max:g} seconds"
            ) from None
        self._waited += self._clock() - begun
        self._bytes += len(message.get("body", b""))
        if self._waited >= self._seconds_max:
            if self._bytes < self._waited * FILE_BYTES_PER_SECOND_MIN:
                raise self._too_slow(
                    f"the file arrived at less than {FILE_BYTES_PER_SECOND_MIN} bytes a second"
                )
            self._waited, self._bytes = 0.0, 0
        return message
