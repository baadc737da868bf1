"""Connections that say nothing, or a byte now and then, are closed; and there are only so many."""

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)
# From the first byte of a request, or the begin of a connection, to the end of the headers.
HEADER_SECONDS_MAX = 20.0
# What still comes of a body that was refused is dropped for so long, that its sender may read why.
LINGER_SECONDS = 5.0
CONNECTIONS_MAX = 20_000
WARN_SECONDS = 60.0
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n"
    b"content-length: 0\r\n\r\n"
)


class Connection(H11Protocol):
    header_seconds_max = HEADER_SECONDS_MAX
    linger_seconds = LINGER_SECONDS
    connections_max = CONNECTIONS_MAX
    _warned_at = -WARN_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.connections_max:
            self._turn_away()
        else:
            self._close_in(self.header_seconds_max)

    def data_received(self, data: bytes) -> None:
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

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_lingering:
            self._close_in(self.linger_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

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
    """The same with other limits."""
    return type("Connection", (Connection,), dict(limits))
