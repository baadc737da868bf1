"""Connections that say nothing, or a byte now and then, are closed; and there are only so many."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from comfyfleet.http.admission import Admission
from comfyfleet.http.parked import CONNECTION, Parked

logger = logging.getLogger(__name__)
# From the first byte of a request, or the begin of a connection, to the end of the headers.
HEADER_SECONDS_MAX = 20.0
# What still comes of a body that was refused is dropped for so long, that its sender may read why.
LINGER_SECONDS = 5.0
CONNECTIONS_MAX = 20_000
WARN_SECONDS = 60.0
_POLL_PATH = "/api/worker/poll"
_POLL = f"POST {_POLL_PATH} ".encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n"
    b"content-length: 0\r\n\r\n"
)


class _Elsewhere(Exception):
    """A connection whose transport was taken over is told that it is lost."""


@dataclass(frozen=True, slots=True)
class MadeWith:
    """What the server makes its connections with."""

    kind: type["Connection"]
    config: Config
    server_state: ServerState
    app_state: dict[str, Any]

    def connection(self) -> "Connection":
        return self.kind(self.config, self.server_state, self.app_state)


class Connection(H11Protocol):
    header_seconds_max = HEADER_SECONDS_MAX
    linger_seconds = LINGER_SECONDS
    connections_max = CONNECTIONS_MAX
    _warned_at = -WARN_SECONDS
    _deadline: asyncio.TimerHandle | None = None
    is_lost = False
    admission = Admission()
    _entered: object = None  # the request that was let in last
    _is_inside = False
    on_lost: Callable[[], object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.connections_max:
            self._turn_away()
        else:
            self._close_in(self.header_seconds_max)

    def data_received(self, data: bytes) -> None:
        if self._is_poll(data) and not self.admission.ask(partial(self._begin, data)):
            # It has said enough to be no idler.
            self._forget_deadline()
            self._unset_keepalive_if_required()
            self.transport.pause_reading()
            return
        self._read(data)

    def _is_poll(self, data: bytes) -> bool:
        is_first = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        return is_first and data.startswith(_POLL)

    def _begin(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self._read(data)

    def let_go(self) -> None:
        """What is still done for the poll keeps no other out."""
        if self._is_inside:
            self._is_inside = False
            self.admission.leave()

    def _read(self, data: bytes) -> None:
        was_lingering = self._is_lingering
        super().data_received(data)
        if self._is_reading_headers:
            if self._deadline is None:
                self._close_in(self.header_seconds_max)
        elif was_lingering and self.conn.their_state is h11.IDLE:
            # The server has begun to count before the last byte came, and then forgot to.
            self._close_in(self.timeout_keep_alive)
        elif not self._is_lingering:
            self._forget_deadline()

    def handle_events(self) -> None:
        """Of which a new request may be one: what answers it may ask for the connection."""
        super().handle_events()
        if self.scope is None:
            return
        self.scope["state"][CONNECTION] = self
        is_new = self.cycle is not self._entered
        if is_new and not self.cycle.more_body and self.scope["path"] == _POLL_PATH:
            self._entered, self._is_inside = self.cycle, True
            self.admission.enter()

    @property
    def made_with(self) -> MadeWith:
        return MadeWith(type(self), self.config, self.server_state, self.app_state)

    def park(self) -> Parked | None:
        """Hands its transport over until the request is answered. None: this one must stay."""
        is_current = self.conn.their_http_version == b"1.1" and not self.cycle.more_body
        if not is_current or self.is_lost or self.transport.is_closing():
            return None
        parked = Parked(
            self,
            early=self.conn.trailing_data[0],
            closes=CLOSE_HEADER in self.headers or not self.cycle.keep_alive,
        )
        self.connections.add(parked)  # type: ignore[arg-type]
        self.transport.set_protocol(parked)
        self.on_lost = None
        self.connection_lost(_Elsewhere())
        return parked

    def take_over(self, transport: asyncio.Transport, early: bytes) -> None:
        """After an answer: what comes next, or has come already, is another request.

        It was let in when it came, and is not turned away now, however many there are.
        """
        super().connection_made(transport)
        transport.set_protocol(self)
        if not transport.is_reading():
            transport.resume_reading()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if early:
            self.data_received(early)

    def on_response_complete(self) -> None:
        self.let_go()
        super().on_response_complete()
        if self._is_lingering:
            self._close_in(self.linger_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self.let_go()
        super().connection_lost(exc)
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    @property
    def _is_reading_headers(self) -> bool:
        """Some of the next request has come, and not all of its headers."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    @property
    def _is_lingering(self) -> bool:
        """It has been answered, and still sends its body."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and self.conn.their_state is h11.SEND_BODY

    def _turn_away(self) -> None:
        now = self.loop.time()
        if now - Connection._warned_at >= WARN_SECONDS:
            Connection._warned_at = now
            logger.warning("more than %d connections: new ones are refused", self.connections_max)
        self.transport.write(_FULL)
        self.transport.close()

    def _close_in(self, seconds: float) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(seconds, self._close)

    def _close(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def with_limits(**limits: float) -> type[Connection]:
    """The same with other limits, and polls of its own."""
    return type("Connection", (Connection,), {"admission": Admission(), **limits})
