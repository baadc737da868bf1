"""Limits connections: idle ones are closed and polls are admitted in order. A parked long poll
keeps its socket, while the memory of the server's own connection object is freed."""

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

POLLS_AT_ONCE = 32


class PollAdmission:
    def __init__(self) -> None:
        self._inside = 0
        self._begun = (
            0  # in this turn of the event loop: their requests are not read completely yet
        )
        self._held: deque[Callable[[], None]] = deque()
        self._is_due = False

    def ask(self, begin: Callable[[], None]) -> bool:
        """Returns whether a poll may begin now. If not, `begin` is called later."""
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


# Keys in a scope's state: the connection that may be parked, the parked one, what a forwarded request
# counts for, whether it had a valid key, and the limits of callers.
CONNECTION, PARKED, REQUEST_TALLY = "connection", "parked", "request_tally"
HAS_VALID_KEY, CALLER_LIMITS = "has_valid_key", "caller_limits"
# Bytes to buffer if a client sends data before it has received its response.
EARLY_BYTES_MAX = 64 * 1024


class ParkedHandler(Protocol):
    """The poll that a parked connection belongs to."""

    def lost(self) -> None: ...

    def stopped(self) -> None: ...


class ParkedLog(Protocol):
    def note_parked(self, parked: "ParkedConnection", status: int | None) -> None: ...


class ParkedConnection(asyncio.Protocol):
    """The protocol of a transport while its request waits without an HttpConnection."""

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
        # The same for all connections of a server.
        self._arguments = connection.arguments
        self._early = early
        self.closes = closes  # after the response
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
        """Called when the server stops: the request is answered, and the connection closed."""
        self.closes = self.is_stopping = True
        if self.waiting is not None:
            self.waiting.stopped()

    def close_soon(self) -> None:
        self.closes = True

    def run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs work as a task that the server waits for when it stops."""
        working, those = asyncio.create_task(work), self._arguments.server_state.tasks
        those.add(working)
        working.add_done_callback(those.discard)
        return working

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
    """Counts a request and its connection for its callers instead of their address.

    Raises TooManyCalls if a caller has too many connections; this connection then closes. A proxy shares
    its connections among callers, so a forwarded request counts by itself.
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
    """Stops counting a request by its address, because its key was checked."""
    request: Tally | None = scope.get("state", {}).get(REQUEST_TALLY)
    if request is not None:
        request.release_address()


def connection_of(scope: Scope) -> "HttpConnection | None":
    """Returns the connection of a request, or None under another ASGI server."""
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
# From the first byte of a request, or the begin of a connection, to the end of the headers.
HEADER_SECONDS_MAX = 20.0
# Seconds during which the rest of a rejected body is discarded, so that its sender can read the
# response.
LINGER_SECONDS = 5.0
CONNECTIONS_MAX = 20_000
WARN_SECONDS = 60.0
# Limit for a request's line and headers, for the data between a body's chunks, and for its
# trailers.
HEAD_BYTES_MAX = 64 * 1024
# Requests sent without waiting for the response to the one before.
PIPELINED_MAX = 16
HEADERS_MAX = 200
_POLL_PATH = "/api/worker/poll"
_POLL = f"POST {_POLL_PATH} ".encode()
_TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n"
    b"content-length: 0\r\n\r\n"
)


class _TransportHandedOver(Exception):
    """Passed to `connection_lost` when the transport was only handed over."""


class _Refused(Exception):
    """Raised for a request that is answered with 400, after which the connection is closed."""


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

    The server writes them separately; the head waits until the next turn of the event loop at most.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head: bytes | None = b""  # None: it was sent

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
    """Limits, poll admission and parking; the base of the h11 and httptools connections."""

    header_seconds_max = HEADER_SECONDS_MAX
    linger_seconds = LINGER_SECONDS
    connections_max = CONNECTIONS_MAX
    _warned_at = -WARN_SECONDS
    _deadline: asyncio.TimerHandle | None = None
    is_lost = False
    admission = PollAdmission()
    closes = False  # after its next response
    tally: Tally  # counts nothing where the server doesn't set it
    _is_admitted = False
    _was_parked = False
    _is_held = False  # a poll was received, and waits until it is admitted
    on_lost: Callable[[], object] | None = None
    peer_user: int | None = None  # the system's id of the client's user, once it was read
    # The server's.
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
            # A poll was received, so this is no idle connection.
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
        """Releases the poll's place in the admission before its work is done."""
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
            # uvicorn has started its keep-alive timer before the last byte came, and then cancelled it.
            self._close_in(self.timeout_keep_alive)
        elif not self._is_lingering:
            self._cancel_deadline()

    def _on_headers(self) -> None:
        """Called when the headers are complete: the request may now use the connection."""
        self.scope["state"][CONNECTION] = self
        if self.closes:
            self.close_after_response()
        self.cycle.transport = _JoinedWrites(self.transport, self.loop)

    def close_after_response(self) -> None:
        """Announces with the current response that the connection closes."""
        if self.cycle.keep_alive and not self.cycle.response_started:
            self.cycle.keep_alive = False
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def close_soon(self) -> None:
        """Closes after the current response if there is one, else after the next."""
        self.closes = True
        if self.cycle is not None:
            self.close_after_response()

    def close_if_idle(self, *, spares_new: bool) -> None:
        """Closes the connection, or lets it close after its response if a request is active, received in part, or
        in the system's buffer. `spares_new`: waits for the first request of a new connection."""
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
        """Hands the transport to a ParkedConnection until the request is answered; None if that is
        not possible."""
        is_current = self.scope["http_version"] == "1.1" and not self.cycle.more_body
        early = self._early
        if not is_current or early is None or self.is_lost or self.transport.is_closing():
            return None
        if self.flow.write_paused:  # the next answer waits until these are read
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
        """Takes the transport back after the response; `early` is what was received of the next
        request.

        The connection limit is not checked again, as this connection was accepted before.
        """
        transport = parked.transport
        self.tally = parked.tally
        self._was_parked = True
        super().connection_made(transport)
        transport.set_protocol(self)
        if parked.is_write_paused:  # a transport says so once
            self.flow.pause_writing()
        if not transport.is_reading():
            transport.resume_reading()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if early:
            self.data_received(early)

    def handle_websocket_upgrade(self, *event: object) -> None:
        """Hands the connection to the WebSocket protocol. It still counts as a connection."""
        self._cancel_deadline()
        # The handshake is complete and counts as a request, see strangers.py.
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
        """Checks whether no request is active and nothing of the next one has been received."""

    @property
    @abstractmethod
    def _is_reading_headers(self) -> bool:
        """Checks whether the headers of the next request were received in part."""

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
                "connection limit of %d reached, new connections are refused", self.connections_max
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
    _seen: object = None  # the request whose headers came last
    _entered: object = None  # the one that came in full last

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
        """Refuses Content-Length together with Transfer-Encoding: a proxy before us may have used
        the other one (request smuggling)."""
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers}:
            self.cycle.disconnected = True
            self.send_400_response("Content-Length beside Transfer-Encoding.")

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
    """The httptools parser has no header limit, treats trailers as headers, and parses pipelined
    requests; this adds limits."""

    _reads_head = False
    _reads_body = False
    _unparsed_bytes = 0  # since a head was read, or some of a body
    _refusal = ""  # said after the answers to all that came before

    def __init__(self, *made_with: Any, **more: Any) -> None:
        super().__init__(*made_with, **more)
        self._unanswered: list[Any] = []  # the first is being answered, the others wait

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
        if self._reads_head:  # what trails a body is no header
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
        # A pipelined request that waits for others doesn't delay polls.
        if not self._becomes_websocket and self._unanswered[:1] == [self.cycle]:
            self._on_request()

    def on_response_complete(self) -> None:
        del self._unanswered[0]
        super().on_response_complete()
        if self._refusal and not self._unanswered:
            self.loop.call_soon(self._say_refusal)

    def send_400_response(self, msg: str) -> None:
        """Sends the error after the responses to earlier requests. Otherwise, it would be read as
        the response to one of them."""
        if self._refusal:
            return
        is_own = self._reads_body and not self.pipeline  # of the request that is being answered
        if self._reads_body and self.pipeline:
            self.pipeline.popleft()
            self._unanswered.pop()
        if self._unanswered and not is_own:
            self._refusal = msg
        else:
            super().send_400_response(msg)

    def _say_refusal(self) -> None:
        if not self.transport.is_closing():
            super().send_400_response(self._refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies all unanswered requests, because the server only notifies the last one."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    @property
    def _becomes_websocket(self) -> bool:
        """Another protocol takes it over: no request is answered here any more."""
        return bool(self.parser.should_upgrade() and self._should_upgrade())

    def _unsupported_upgrade_warning(self) -> None:
        """Answers as without the Upgrade header. The parser drops what follows, so the connection
        closes afterwards."""
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
    """Whether the system has received something for a connection that the event loop has not read yet."""
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
    """Returns a connection class with other limits and its own poll admission."""
    return type("Connection", (kind,), {"admission": PollAdmission(), **limits})


def close_some(connections: Iterable[object], count: int) -> None:
    """Lets so many connections close after their next response, with those that already will. They are
    chosen at random: the next ones to respond would be the busiest."""
    kept = [each for each in connections if isinstance(each, HttpConnection | ParkedConnection)]
    open_ones = [connection for connection in kept if not connection.closes]
    more = min(len(open_ones), count - (len(kept) - len(open_ones)))
    for connection in random.sample(open_ones, max(0, more)):
        connection.close_soon()
