"""WebSockets of clients: small frames, and few of them."""

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.protocol import State

# Clients of ComfyUI send a few words. Compressed frames would be parsed at a thousand times their size.
FRAME_BYTES_MAX = 16 * 1024
FRAMES_AT_ONCE_MAX = 20
FRAMES_PER_SECOND_MAX = 1.0
# RFC 6455's "policy violation".
REFUSED_CODE = 1008
REFUSED_REASON = f"a websocket accepts {FRAMES_AT_ONCE_MAX} frames at once and {FRAMES_PER_SECOND_MAX:g} per second"
# A frame has at least six bytes, so this is as many frames as are parsed before the limit is checked again.
PART_BYTES = 1024
# The client may read why it was closed; what it still sends is dropped unparsed.
CLOSE_SECONDS = 2.0
# Programs that use `websocket-client` answer pings only while they read, and ComfyUI never pings. So a missing
# answer closes nothing: a lost machine is noticed by TCP, and a full buffer by the limit of slow readers.
PING_SECONDS = 20.0
UNANSWERED_PINGS_MAX = 60


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """Closes a connection that sends more frames than the limit, counting pings and parts of messages."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._allowed = float(FRAMES_AT_ONCE_MAX)
        self._counted_at = self.loop.time()
        self._is_refused = False
        self._unanswered_pings = 0

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
        """A client that reads again after a long time answers all pings at once: these answers don't count."""
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
            # Unread bytes would reset the connection, and the client would not see the reason.
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(CLOSE_SECONDS, self.transport.close)
