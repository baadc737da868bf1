"""How large a request's body may be, and how long it may take to arrive.

Files go by URL to the store, which has limits of its own.
"""

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.http.errors import answer
from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.storage.signing import OBJECTS_PATH

BODY_BYTES_MAX = 64 * 1024**2
WORKER_BYTES_MAX = 16 * 1024**2
STRANGER_BYTES_MAX = 64 * 1024
# From the end of the headers to the last byte, however the bytes are spread over it.
BODY_SECONDS_MAX = 60.0
# Operators register workflows, and workers tell of their backends; all else is a customer's.
_OURS = (("/api/admin/", BODY_BYTES_MAX), ("/api/worker/", WORKER_BYTES_MAX))
_KEYED = "/api/"


class Bodies:
    """Before anything is read into memory, as far as the caller tells; else while it is read."""

    def __init__(
        self, app: ASGIApp, of_customers: int, seconds_max: float = BODY_SECONDS_MAX
    ) -> None:
        self._app = app
        self._of_customers = of_customers
        self._seconds_max = seconds_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(f"{OBJECTS_PATH}/"):
            await self._app(scope, receive, send)
            return
        most = self._most(scope["path"])
        if _told(scope) > most:
            await answer(413, LimitExceeded.code, _message(most))(scope, receive, send)
        else:
            await self._app(scope, _Arrival(receive, most, self._seconds_max).receive, send)

    def _most(self, path: str) -> int:
        if not path.startswith(_KEYED):
            return STRANGER_BYTES_MAX
        return next((most for prefix, most in _OURS if path.startswith(prefix)), self._of_customers)


def _message(most: int) -> str:
    return f"a request has at most {most:,} bytes"


def _told(scope: Scope) -> int:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(length) if length.isdigit() else 0


class _Arrival:
    """One body while it comes in; afterwards there is nothing to wait for but the caller's leaving."""

    def __init__(self, receive: Receive, most: int, seconds_max: float) -> None:
        self._receive = receive
        self._most = most
        self._size = 0
        self._is_complete = False
        self._seconds_max = seconds_max
        self._deadline = asyncio.get_running_loop().time() + seconds_max

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        message = await self._in_time()
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            # The one kind that the framework lets through while it reads a body.
            raise HTTPException(413, _message(self._most))
        self._is_complete = not message.get("more_body", False)
        return message

    async def _in_time(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            message = f"the body did not arrive within {self._seconds_max:g} seconds"
            raise HTTPException(408, message, {"Connection": "close"}) from None
