"""How large a request may be. Files go by URL to the store, which has limits of its own."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.http.errors import answer
from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.storage.signing import OBJECTS_PATH

BODY_BYTES_MAX = 64 * 1024**2
# Operators register workflows, and workers tell of their backends: all else is a customer's.
OURS = ("/api/admin/", "/api/worker/")


class Sizes:
    """Before anything is read into memory, as far as the caller tells; else while it is read."""

    def __init__(self, app: ASGIApp, of_customers: int) -> None:
        self._app = app
        self._of_customers = of_customers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(f"{OBJECTS_PATH}/"):
            await self._app(scope, receive, send)
            return
        most = BODY_BYTES_MAX if scope["path"].startswith(OURS) else self._of_customers
        if _told(scope) > most:
            await answer(413, LimitExceeded.code, _message(most))(scope, receive, send)
        else:
            await self._app(scope, _counted(receive, most), send)


def _message(most: int) -> str:
    return f"a request has at most {most:,} bytes"


def _told(scope: Scope) -> int:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(length) if length.isdigit() else 0


def _counted(receive: Receive, most: int) -> Receive:
    size = 0

    async def counting() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            # The one kind that the framework lets through while it reads a body.
            raise HTTPException(413, _message(most))
        return message

    return counting
