"""A request that waits for long keeps its socket, and nothing of what the server had made for it.

The server's connection, its parser, the request and its task are some 20 KB; ten thousand workers wait.
While one waits its transport has another protocol, and when it is answered a new connection, as when a
server upgrades to another protocol.
"""

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response
from starlette.types import Scope

if TYPE_CHECKING:
    from comfyfleet.http.connections import Connection

# In a scope's state: who may be parked, and who was.
CONNECTION, PARKED = "connection", "parked"
# What comes before the answer is kept for after it, and no more than this is read.
EARLY_BYTES_MAX = 64 * 1024


class Waiting(Protocol):
    """Whose answer is waited for."""

    def lost(self) -> None: ...

    def stopped(self) -> None: ...


class Log(Protocol):
    def note_parked(self, parked: "Parked", status: int | None) -> None: ...


class Parked(asyncio.Protocol):
    """The protocol of a transport meanwhile."""

    __slots__ = (
        "_early",
        "_like",
        "begun",
        "closes",
        "is_lost",
        "log",
        "request_id",
        "transport",
        "waiting",
    )

    def __init__(self, connection: "Connection", *, early: bytes, closes: bool) -> None:
        self.transport = connection.transport
        # What a connection is made with: the same of all.
        self._like = connection.made_with
        self._early = early
        self.closes = closes
        self.is_lost = False
        self.waiting: Waiting | None = None
        self.log: Log | None = None
        self.begun = 0.0
        self.request_id = ""

    def data_received(self, data: bytes) -> None:
        self._early += data
        if len(self._early) > EARLY_BYTES_MAX:
            self.transport.pause_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        self._like.server_state.connections.discard(self)
        self.is_lost = True
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.lost()
            self._note(None)

    def shutdown(self) -> None:
        """The server stops: it is answered, and not listened to any more."""
        self.closes = True
        if self.waiting is not None:
            self.waiting.stopped()

    def run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """The server waits for it when it stops."""
        working, those = asyncio.create_task(work), self._like.server_state.tasks
        those.add(working)
        working.add_done_callback(those.discard)
        return working

    def answer(self, response: Response) -> None:
        self.waiting = None
        self._note(response.status_code)
        if self.transport.is_closing():
            return
        self._like.server_state.total_requests += 1
        self.transport.write(self._head(response) + bytes(response.body))
        if self.closes:
            self.transport.close()
            return
        self._like.server_state.connections.discard(self)
        self._like.connection().take_over(self.transport, self._early)

    def _head(self, response: Response) -> bytes:
        phrase = HTTPStatus(response.status_code).phrase
        lines = [f"HTTP/1.1 {response.status_code} {phrase}".encode()]
        headers = [*self._like.server_state.default_headers, *response.raw_headers]
        headers.append((b"x-request-id", self.request_id.encode()))
        if self.closes:
            headers.append((b"connection", b"close"))
        lines += [name + b": " + text for name, text in headers]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _note(self, status: int | None) -> None:
        log, self.log = self.log, None
        if log is not None:
            log.note_parked(self, status)


def connection_of(scope: Scope) -> "Connection | None":
    """None under another server, which knows nothing of this."""
    found: Connection | None = scope.get("state", {}).get(CONNECTION)
    return found


def parked_in(scope: Scope) -> Parked | None:
    found: Parked | None = scope.get("state", {}).get(PARKED)
    return found
