"""Limits connections, closes idle ones, and admits polls in order.

While a long poll waits, its connection is parked: the socket stays open, but the memory of the
server's connection object is freed.
"""

import asyncio
import logging
import random
import select
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import h11
from starlette.responses import Response
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from comfyfleet.errors import TooManyCalls
from comfyfleet.server.http.tallies import Holder, Tally

# Maximum number of polls that are processed concurrently. Polls that wait for a job don't count.
POLLS_AT_ONCE = 32


class PollAdmission:
    """Limits how many polls are processed concurrently, and admits the others in order."""

    def __init__(self) -> None:
        self._inside = 0
        # Polls admitted in this iteration of the event loop whose requests haven't been read
        # completely.
        self._begun = 0
        self._held: deque[Callable[[], None]] = deque()
        self._is_due = False

    def ask(self, begin: Callable[[], None]) -> bool:
        """Returns True if a poll may begin now. Otherwise, `begin` is called later."""
        if self._held or not self._has_room:
            self._held.append(begin)
            return False
        self._count_begun()
        return True

    def enter(self) -> None:
        self._inside += 1

    def leave(self) -> None:
        self._inside -= 1
        if self._held:
            self._schedule()

    @property
    def _has_room(self) -> bool:
        return self._inside + self._begun < POLLS_AT_ONCE

    def _count_begun(self) -> None:
        self._begun += 1
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._admit_held)

    def _admit_held(self) -> None:
        self._is_due, self._begun = False, 0
        while self._held and self._has_room:
            begin = self._held.popleft()
            self._count_begun()
            begin()


# Keys in an ASGI scope's state. The values are the connection, the parked connection, the tally of
# a forwarded request, whether the request had a valid key, and the limits per caller.
CONNECTION, PARKED, REQUEST_TALLY = "connection", "parked", "request_tally"
HAS_VALID_KEY, CALLER_LIMITS = "has_valid_key", "caller_limits"
# Maximum number of bytes to buffer if a client sends data before it has received its response.
EARLY_BYTES_MAX = 64 * 1024


class ParkedHandler(Protocol):
    """The handler of a poll that is waiting on a parked connection."""

    def lost(self) -> None: ...

    def stopped(self) -> None: ...


class ParkedLog(Protocol):
    def note_parked(self, parked: "ParkedConnection", status: int | None) -> None: ...


class ParkedConnection(asyncio.Protocol):
    """The transport's protocol while a request waits. It replaces the HttpConnection, which needs
    more memory."""

    __slots__ = (
        "_arguments",
        "_early",
        "begun",
        "closes",
        "is_lost",
        "is_stopping",
        "is_write_paused",
        "log",
        "request_id",
        "tally",
        "transport",
        "waiting",
    )

    def __init__(self, connection: "HttpConnection", *, early: bytes, closes: bool) -> None:
        self.transport = connection.transport
        self.tally = connection.tally
        # Shared by all connections of a server.
        self._arguments = connection.arguments
        self._early = early
        self.closes = closes  # whether the connection closes after the response
        self.is_stopping = False
        self.is_lost = False
        self.is_write_paused = False
        self.waiting: ParkedHandler | None = None
        self.log: ParkedLog | None = None
        self.begun = 0.0
        self.request_id = ""

    def data_received(self, data: bytes) -> None:
        self._early += data
        if len(self._early) > EARLY_BYTES_MAX:
            self.transport.pause_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        self._arguments.server_state.connections.discard(self)
        self.tally.close()
        self.is_lost = True
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.lost()
            self._note(None)

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False

    def shutdown(self) -> None:
        """Answers the request and closes the connection. Called when the server stops."""
        self.closes = self.is_stopping = True
        if self.waiting is not None:
            self.waiting.stopped()

    def close_soon(self) -> None:
        self.closes = True

    def run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs work as a task that the server waits for when it stops."""
        task, tasks = asyncio.create_task(work), self._arguments.server_state.tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def answer(self, response: Response) -> None:
        self.waiting = None
        self._note(response.status_code)
        if self.transport.is_closing():
            return
        self._arguments.server_state.total_requests += 1
        self.transport.write(self._head(response) + bytes(response.body))
        if self.closes:
            self.transport.close()
            return
        self._arguments.server_state.connections.discard(self)
        self._arguments.connection().take_over(self, self._early)

    def _head(self, response: Response) -> bytes:
        phrase = HTTPStatus(response.status_code).phrase
        lines = [f"HTTP/1.1 {response.status_code} {phrase}".encode()]
        headers = [*self._arguments.server_state.default_headers, *response.raw_headers]
        headers.append((b"x-request-id", self.request_id.encode()))
        if self.closes:
            headers.append((b"connection", b"close"))
        lines += [name + b": " + text for name, text in headers]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _note(self, status: int | None) -> None:
        log, self.log = self.log, None
        if log is not None:
            log.note_parked(self, status)


def note_valid_key(scope: Scope, *holders: Holder) -> None:
    """Counts a request and its connection toward the limits of its callers, not of its address.

    If a caller has too many connections, raises TooManyCalls and closes this connection after the
    response. A proxy shares its connections among callers, so each forwarded request counts
    individually.
    """
    state = scope.setdefault("state", {})
    state[HAS_VALID_KEY] = True
    request: Tally | None = state.get(REQUEST_TALLY)
    connection = connection_of(scope)
    try:
        if request is not None:
            request.count_for(holders)
            holders = ()
        if connection is not None:
            connection.tally.count_for(holders)
    except TooManyCalls:
        if connection is not None:
            connection.close_soon()
        raise


def has_valid_key(scope: Scope) -> bool:
    """Checks whether `note_valid_key` was called for a request."""
    return bool(scope.get("state", {}).get(HAS_VALID_KEY))


def release_request(scope: Scope) -> None:
    """Stops counting a request toward its address's limit, because its key was checked."""
    request: Tally | None = scope.get("state", {}).get(REQUEST_TALLY)
    if request is not None:
        request.release_address()


def connection_of(scope: Scope) -> "HttpConnection | None":
    """Returns the connection of a request, or None if another ASGI server runs the application."""
    connection: HttpConnection | None = scope.get("state", {}).get(CONNECTION)
    return connection


try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:
    HAS_HTTPTOOLS = False
    if not TYPE_CHECKING:
        HttpToolsProtocol = object
else:
    HAS_HTTPTOOLS = True

logger = logging.getLogger(__name__)
# Maximum seconds from the first byte of a request, or from the start of a connection, to the end of
# the headers.
HEADER_SECONDS_MAX = 20.0
# Seconds during which the rest of a rejected body is discarded, so that its sender can read the
# response.
LINGER_SECONDS = 5.0
CONNECTIONS_MAX = 20_000
# Minimum seconds between two warnings about the connection limit.
WARN_SECONDS = 60.0
# Maximum bytes of the request line and headers, of the data between a body's chunks, and of its
# trailers.
HEAD_BYTES_MAX = 64 * 1024
# Maximum number of requests that a client may send before it has received the earlier responses.
PIPELINED_MAX = 16
HEADERS_MAX = 200
_POLL_PATH = "/api/worker/poll"
_POLL = f"POST {_POLL_PATH} ".encode()
_TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n"
    b"content-length: 0\r\n\r\n"
)


class _TransportHandedOver(Exception):
    """Passed to `connection_lost` when the transport is still open but now has another protocol."""


class _Refused(Exception):
    """Raised for a request that gets a 400 response and whose connection is then closed."""


@dataclass(frozen=True, slots=True)
class ConnectionArguments:
    """The arguments with which the server creates connections."""

    kind: type["HttpConnection"]
    config: Config
    server_state: ServerState
    app_state: dict[str, Any]

    def connection(self) -> "HttpConnection":
        return self.kind(self.config, self.server_state, self.app_state)


class _JoinedWrites:
    """A transport that sends a response's head together with its body, in one system call.

    The server writes them separately. The head waits for the body until the next iteration of the
    event loop at most.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head: bytes | None = b""  # None after the head has been sent

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._transport.write(data)
        elif not self._head:
            self._head = data
            self._loop.call_soon(self._send_head)
        elif data:
            head, self._head = self._head, None
            self._transport.write(head + data)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _send_head(self) -> None:
        head, self._head = self._head, None
        if head:
            self._transport.write(head)


class HttpConnection(asyncio.Protocol, ABC):
    """Base class for h11 and httptools connections, with limits, poll admission and parking."""

    header_seconds_max = HEADER_SECONDS_MAX
    linger_seconds = LINGER_SECONDS
    connections_max = CONNECTIONS_MAX
    _warned_at = -WARN_SECONDS
    _deadline: asyncio.TimerHandle | None = None
    is_lost = False
    admission = PollAdmission()
    closes = False  # whether the connection closes after its next response
    tally: Tally  # has no limits unless the server sets one
    _is_admitted = False
    _was_parked = False
    _is_held = False  # whether a received poll waits for its admission
    on_lost: Callable[[], object] | None = None
    peer_user: int | None = None  # the client's user id in the operating system; None until read
    # Attributes of uvicorn's protocol.
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    config: Config
    server_state: ServerState
    app_state: dict[str, Any]
    connections: set[Any]
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    cycle: Any
    flow: FlowControl
    scope: Any
    timeout_keep_alive: int
    timeout_keep_alive_task: asyncio.TimerHandle | None

    if TYPE_CHECKING:

        def __init__(
            self, config: Config, server_state: ServerState, app_state: dict[str, Any]
        ) -> None: ...

        def _unset_keepalive_if_required(self) -> None: ...

        def timeout_keep_alive_handler(self) -> None: ...

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not hasattr(self, "tally"):
            self.tally = Tally()
        self.tally.open(transport.abort)
        is_full = len(self.connections) > self.connections_max
        if is_full and not self.tally.end_another():
            self._refuse_connection()
        else:
            self._close_in(self.header_seconds_max)

    def data_received(self, data: bytes) -> None:
        is_poll = self._is_unused and data.startswith(_POLL)
        if is_poll and not self.admission.ask(partial(self._begin, data)):
            # The connection isn't idle, because a poll was received.
            self._is_held = True
            self._cancel_deadline()
            self._unset_keepalive_if_required()
            self.transport.pause_reading()
            return
        self._read(data)

    def _begin(self, data: bytes) -> None:
        self._is_held = False
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self._read(data)

    def leave_admission(self) -> None:
        """Allows another poll to begin, although this poll hasn't finished yet."""
        if self._is_admitted:
            self._is_admitted = False
            self.admission.leave()

    def _read(self, data: bytes) -> None:
        was_lingering = self._is_lingering
        super().data_received(data)
        if self._is_reading_headers:
            if self._deadline is None:
                self._close_in(self.header_seconds_max)
        elif was_lingering and self._is_unused:
            # uvicorn's keep-alive timer was started before the last byte arrived, and was canceled
            # by that byte.
            self._close_in(self.timeout_keep_alive)
        elif not self._is_lingering:
            self._cancel_deadline()

    def _on_headers(self) -> None:
        """Makes the connection available to the request. Called when the headers are complete."""
        self.scope["state"][CONNECTION] = self
        if self.closes:
            self.close_after_response()
        self.cycle.transport = _JoinedWrites(self.transport, self.loop)

    def close_after_response(self) -> None:
        """Adds `Connection: close` to the current response, after which the connection closes."""
        if self.cycle.keep_alive and not self.cycle.response_started:
            self.cycle.keep_alive = False
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def close_soon(self) -> None:
        """Closes the connection after the current response, or after the next one if it is idle."""
        self.closes = True
        if self.cycle is not None:
            self.close_after_response()

    def close_if_idle(self, *, spares_new: bool) -> None:
        """Closes the connection now if it is idle, and otherwise after its response.

        A connection isn't idle if a request is active, partially received, or still in the
        operating system's buffer. With `spares_new`, a connection that has received nothing yet may
        still send its first request.
        """
        is_spared = spares_new and self._is_new
        if self._is_idle and not is_spared and not _has_input(self.transport):
            self.transport.close()
            return
        self.close_soon()
        if self.cycle is not None:
            self.cycle.keep_alive = False

    @property
    def _is_idle(self) -> bool:
        return self._is_lingering or (self._is_unused and not self._is_held)

    @property
    def _is_new(self) -> bool:
        """Checks whether nothing has been received yet."""
        return self.cycle is None and not self._was_parked

    def _on_request(self) -> None:
        if self.scope["path"] == _POLL_PATH and not self._is_admitted:
            self._is_admitted = True
            self.admission.enter()

    @property
    def arguments(self) -> ConnectionArguments:
        return ConnectionArguments(type(self), self.config, self.server_state, self.app_state)

    def park(self) -> ParkedConnection | None:
        """Hands the transport to a ParkedConnection until the request is answered. Returns None if
        the connection can't be parked."""
        is_current = self.scope["http_version"] == "1.1" and not self.cycle.more_body
        early = self._early
        if not is_current or early is None or self.is_lost or self.transport.is_closing():
            return None
        if self.flow.write_paused:  # the client hasn't read all earlier responses yet
            return None
        parked = ParkedConnection(
            self,
            early=early,
            closes=CLOSE_HEADER in self.headers or not self.cycle.keep_alive,
        )
        self.connections.add(parked)
        self.transport.set_protocol(parked)
        self.on_lost = None
        self.connection_lost(_TransportHandedOver())
        return parked

    def take_over(self, parked: ParkedConnection, early: bytes) -> None:
        """Takes the transport back after the response. `early` contains bytes of the next request
        that have already been received.

        The connection limit isn't checked again, because this connection was already accepted.
        """
        transport = parked.transport
        self.tally = parked.tally
        self._was_parked = True
        super().connection_made(transport)
        transport.set_protocol(self)
        if parked.is_write_paused:  # a paused transport doesn't call pause_writing again
            self.flow.pause_writing()
        if not transport.is_reading():
            transport.resume_reading()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if early:
            self.data_received(early)

    def handle_websocket_upgrade(self, *event: object) -> None:
        """Hands the connection to the WebSocket protocol. The connection still counts toward the
        limit."""
        self._cancel_deadline()
        # The handshake is complete. WebSockets count as requests instead, as in ForwardedRequests.
        self.tally.close()
        super().handle_websocket_upgrade(*event)  # type: ignore[misc]

    def on_response_complete(self) -> None:
        self.leave_admission()
        super().on_response_complete()  # type: ignore[misc]
        if self._is_lingering:
            self._close_in(self.linger_seconds)
        elif self._is_reading_headers:
            self._close_in(self.header_seconds_max)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self.leave_admission()
        super().connection_lost(exc)
        if not isinstance(exc, _TransportHandedOver):
            self.tally.close()
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    @property
    @abstractmethod
    def _is_unused(self) -> bool:
        """Checks that no request is active and that no byte of the next one has been received."""

    @property
    @abstractmethod
    def _is_reading_headers(self) -> bool:
        """Checks whether the headers of the next request have been partially received."""

    @property
    @abstractmethod
    def _is_lingering(self) -> bool:
        """Checks whether the request was answered while its body is still being received."""

    @property
    @abstractmethod
    def _early(self) -> bytes | None:
        """Returns the bytes received of the next request, or None if they were already parsed."""

    @property
    def _is_answered(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    def _refuse_connection(self) -> None:
        now = self.loop.time()
        if now - HttpConnection._warned_at >= WARN_SECONDS:
            HttpConnection._warned_at = now
            logger.warning(
                "connection limit of %d reached; refusing new connections", self.connections_max
            )
        self.transport.write(_TOO_MANY_CONNECTIONS)
        self.transport.close()

    def _close_in(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self._close)

    def _close(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class H11Connection(HttpConnection, H11Protocol):
    _seen: object = None  # the latest request whose headers are complete
    _entered: object = None  # the latest request whose body is complete

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is None:
            return
        if self.cycle is not self._seen:
            self._seen = self.cycle
            self._on_headers()
            self._refuse_two_lengths()
        if self.cycle is not self._entered and not self.cycle.more_body:
            self._entered = self.cycle
            self._on_request()

    def _refuse_two_lengths(self) -> None:
        """Refuses requests with both Content-Length and Transfer-Encoding. A proxy in front of us
        may have used the header that we ignore, which allows request smuggling."""
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers}:
            self.cycle.disconnected = True
            self.send_400_response("Content-Length and Transfer-Encoding can't be combined.")

    @property
    def _is_unused(self) -> bool:
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    @property
    def _is_reading_headers(self) -> bool:
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    @property
    def _is_lingering(self) -> bool:
        return self._is_answered and self.conn.their_state is h11.SEND_BODY

    @property
    def _early(self) -> bytes | None:
        return self.conn.trailing_data[0]


class HttptoolsConnection(HttpConnection, HttpToolsProtocol):
    """A connection that uses the httptools parser.

    The parser doesn't limit headers, treats trailers as headers, and parses pipelined requests
    ahead. This class adds the missing limits.
    """

    _reads_head = False
    _reads_body = False
    _unparsed_bytes = 0  # bytes received since the last complete head or part of a body
    _refusal = ""  # the error to send after the responses to all earlier requests

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unanswered: list[Any] = []  # the first request is being processed, the others wait

    def _read(self, data: bytes) -> None:
        if self._refusal:
            return
        self._unparsed_bytes += len(data)
        super()._read(data)
        if self._unparsed_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_head:  # ignores the trailers after a body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        self._unparsed_bytes, self._reads_head, self._reads_body = 0, False, True
        super().on_headers_complete()
        if not self._becomes_websocket:
            self._unanswered.append(self.cycle)
            self._on_headers()

    def _check_head(self) -> None:
        hosts = sum(name == b"host" for name, _ in self.headers)
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        is_long = size > HEAD_BYTES_MAX or len(self.headers) > HEADERS_MAX
        if is_long or len(self.pipeline) >= PIPELINED_MAX:
            raise _Refused
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise _Refused

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes, self._reads_body = 0, False
        super().on_message_complete()
        # A pipelined request doesn't count as a poll in progress while it waits for earlier ones.
        if not self._becomes_websocket and self._unanswered[:1] == [self.cycle]:
            self._on_request()

    def on_response_complete(self) -> None:
        del self._unanswered[0]
        super().on_response_complete()
        if self._refusal and not self._unanswered:
            self.loop.call_soon(self._send_refusal)

    def send_400_response(self, msg: str) -> None:
        """Sends the error after the responses to earlier requests. If it were sent first, the
        client would read it as the response to one of them."""
        if self._refusal:
            return
        # Whether the body belongs to the request that is being processed.
        is_own = self._reads_body and not self.pipeline
        if self._reads_body and self.pipeline:
            self.pipeline.popleft()
            self._unanswered.pop()
        if self._unanswered and not is_own:
            self._refusal = msg
        else:
            super().send_400_response(msg)

    def _send_refusal(self) -> None:
        if not self.transport.is_closing():
            super().send_400_response(self._refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies all unanswered requests of the disconnect. uvicorn only notifies the last
        one."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    @property
    def _becomes_websocket(self) -> bool:
        """Checks whether the WebSocket protocol takes over the connection after this request."""
        return bool(self.parser.should_upgrade() and self._should_upgrade())

    def _unsupported_upgrade_warning(self) -> None:
        """Ignores an unsupported Upgrade header. The connection closes after the response, because
        the parser drops all further data."""
        self.cycle.keep_alive = False

    @property
    def _is_unused(self) -> bool:
        is_free = self.cycle is None or self.cycle.response_complete
        return is_free and not self._reads_head and not self._reads_body

    @property
    def _is_reading_headers(self) -> bool:
        return self._reads_head and (self.cycle is None or self.cycle.response_complete)

    @property
    def _is_lingering(self) -> bool:
        return self._is_answered and self._reads_body

    @property
    def _early(self) -> bytes | None:
        return None if self.pipeline or self._reads_head else b""


def _has_input(transport: asyncio.Transport) -> bool:
    """Checks whether the operating system holds received data that the event loop hasn't read."""
    client = transport.get_extra_info("socket")
    if client is None or client.fileno() < 0 or sys.platform == "win32":
        return False
    poll = select.poll()
    poll.register(client.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def with_limits(
    kind: type[HttpConnection] = HttptoolsConnection if HAS_HTTPTOOLS else H11Connection,
    **limits: float,
) -> type[HttpConnection]:
    """Returns a connection class with the given limits and its own poll admission."""
    return type("Connection", (kind,), {"admission": PollAdmission(), **limits})


def close_some(connections: Iterable[object], count: int) -> None:
    """Makes `count` connections close after their next response.

    Connections that will close anyway are included in the count. The others are chosen at random,
    because the first ones to respond would be the busiest.
    """
    http = [entry for entry in connections if isinstance(entry, HttpConnection | ParkedConnection)]
    open_ones = [connection for connection in http if not connection.closes]
    more = min(len(open_ones), count - (len(http) - len(open_ones)))
    for connection in random.sample(open_ones, max(0, more)):
        connection.close_soon()
