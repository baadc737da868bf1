"""Limits the size and rate of WebSocket frames from clients."""

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.protocol import State

# Limits for the frames from a client. ComfyUI clients send only a few short messages. Compression
# is disabled, because a compressed frame could expand to a thousand times its size.
FRAME_BYTES_MAX = 16 * 1024
FRAMES_AT_ONCE_MAX = 20
FRAMES_PER_SECOND_MAX = 1.0
# The WebSocket close code for a policy violation (RFC 6455).
REFUSED_CODE = 1008
REFUSED_REASON = (
    f"rate limit exceeded: {FRAMES_AT_ONCE_MAX} frames in a burst,"
    f" {FRAMES_PER_SECOND_MAX:g} per second"
)
# Received data is parsed in parts of this size, and the limit is checked after each part. A frame
# has at least six bytes, so a part contains a limited number of frames.
PART_BYTES = 1024
# Seconds that a refused client has to read the reason. Any data that it sends in the meantime is
# discarded.
CLOSE_SECONDS = 2.0
# Seconds between pings. Programs that use `websocket-client` answer pings only while they read, so
# a connection isn't closed if a ping stays unanswered. TCP detects lost machines, and the limit for
# slow readers detects full buffers.
PING_SECONDS = 20.0
UNANSWERED_PINGS_MAX = 60


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """Closes a connection that sends frames too quickly. Pings and fragments count as frames."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._allowed = float(FRAMES_AT_ONCE_MAX)
        self._counted_at = self.loop.time()
        self._is_refused = False
        self._unanswered_pings = 0

    @property
    def is_open(self) -> bool:
        return self.handshake_complete and not self.close_sent

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PART_BYTES):
            if self._is_refused or self.transport.is_closing():
                return
            super().data_received(data[start : start + PART_BYTES])

    def handle_text(self, event: Frame) -> None:
        if self._may_take_frame():
            super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        if self._may_take_frame():
            super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        if self._may_take_frame():
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self._may_take_frame():
            super().handle_ping()

    def send_keepalive_ping(self) -> None:
        if self._unanswered_pings < UNANSWERED_PINGS_MAX:
            self._unanswered_pings += 1
            super().send_keepalive_ping()
        else:
            self.schedule_ping()

    def handle_pong(self, event: Frame) -> None:
        """Doesn't count answers to our own pings toward the frame limit, because a client that
        starts reading again answers many pings in a burst."""
        if self._unanswered_pings > 0:
            self._unanswered_pings -= 1
        elif not self._may_take_frame():
            return
        super().handle_pong(event)

    def _may_take_frame(self) -> bool:
        now = self.loop.time()
        earned = (now - self._counted_at) * FRAMES_PER_SECOND_MAX
        self._allowed = min(FRAMES_AT_ONCE_MAX, self._allowed + earned) - 1
        self._counted_at = now
        if self._allowed < 0 and not self._is_refused:
            self._refuse()
        return not self._is_refused

    def _refuse(self) -> None:
        self._is_refused = True
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": REFUSED_CODE, "reason": REFUSED_REASON}
        )
        if self.conn.state is not State.OPEN:
            self.transport.close()
            return
        self.conn.send_close(REFUSED_CODE, REFUSED_REASON)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            # Closing a socket with unread data would reset the connection, and the client would not
            # receive the reason.
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(CLOSE_SECONDS, self.transport.close)
