"""A client's WebSocket connection, which shows the client's prompts one after another."""

from collections import deque
from enum import Enum, auto
from uuid import UUID

from comfyfleet.protocol import sockets as frames
from comfyfleet.protocol.sockets import Frame, Socket
from comfyfleet.server.run_log.model import Cursor, LoggedEvents

# Maximum number of frames that wait for a client. Above this limit, no more log rows are sent.
UNSENT_FRAMES_MAX = 1_000


class LogState(Enum):
    """Indicates whether a socket has sent all rows of prompts that are shown one after another."""

    CURRENT = auto()  # All rows have been sent.
    HOLDING = auto()  # All rows of the shown prompt have been sent. Rows of others are waiting.
    READING = auto()  # The log may contain more rows of the shown prompt.


class GatewaySocket(Socket):
    """A socket that shows its client one attempt of a prompt at a time. When the attempt ends, the
    socket shows the one that started next.

    A client's prompts may run in parallel. Rows that the socket doesn't show yet stay in the log.
    """

    def __init__(self, client_id: str, cursor: Cursor) -> None:
        super().__init__()
        self.client_id = client_id
        self.seen, self.start_id, self.row, self.floor = cursor
        self.job_id: UUID | None = None  # the job of the shown prompt, or None if not yet known
        self.state = LogState.READING
        self.is_live = False
        self.is_replaced = False  # True if a newer socket uses the same client id
        self._has_ended = not self.start_id
        self._pushed = self._taken = 0  # numbers of frames pushed and taken so far
        self._taken_cursor = cursor
        # Cursors of the rows whose frames haven't all been passed to the connection, each with the
        # total number of frames up to that row.
        self._pending: deque[tuple[int, Cursor]] = deque()

    @property
    def cursor(self) -> Cursor:
        """Returns this socket's position in the run log."""
        return Cursor(self.seen, self.start_id, self.row, self.floor)

    @property
    def taken_cursor(self) -> Cursor:
        """Returns the position up to which all frames were passed to the connection.

        A client that reconnects continues from there.
        """
        while self._pending and self._pending[0][0] <= self._taken:
            _, self._taken_cursor = self._pending.popleft()
        return self._taken_cursor

    def push(self, frame: Frame) -> None:
        super().push(frame)
        self._pushed += 1

    def note_taken(self) -> None:
        """Records that the connection has taken the frame that `next_frame` returned last."""
        self._taken += 1

    @property
    def wants_metadata(self) -> bool:
        return self.features.get("supports_preview_metadata") is True

    @property
    def is_full(self) -> bool:
        return self.is_behind or self.frames_unsent > UNSENT_FRAMES_MAX

    def tell(self, event: str, data: object) -> None:
        self.push(frames.json_frame(event, data))

    def is_due(self, row: LoggedEvents) -> bool:
        """Checks whether to send a new row now. If not, a later read of the log sends it."""
        if row.start_id is None or row.client_id != self.client_id:
            return True
        if self.state is LogState.READING:
            return False
        if self.holds_back(row):
            self.state = LogState.HOLDING
            return False
        return True

    def holds_back(self, row: LoggedEvents) -> bool:
        """Checks whether the row must wait, because its attempt started after the shown attempt,
        which hasn't ended yet."""
        return (row.start_id or 0) > self.start_id and not self._has_ended

    def note_sent(self, row: LoggedEvents) -> None:
        """Updates the shown attempt and the cursor after the row was sent."""
        start_id = row.start_id
        # Control planes of an older version don't know which attempt a socket shows, so rows of
        # earlier attempts can arrive late.
        if start_id is None or row.client_id != self.client_id or start_id < self.start_id:
            return
        self.start_id, self.row, self.job_id = start_id, row.id, row.job_id
        self._has_ended = row.is_last
        if row.is_last and self.state is LogState.HOLDING:
            self.state = LogState.READING
        self._note_cursor()

    def note_read(self, row_id: int) -> None:
        """Records that all rows up to this one were read. Each was either sent or held back."""
        self.seen = max(self.seen, row_id)
        if self.state is LogState.CURRENT:
            self.floor = self.seen
        self._note_cursor()

    def _note_cursor(self) -> None:
        if self._taken == self._pushed:
            self._pending.clear()
            self._taken_cursor = self.cursor
            return
        if self._pending and self._pending[-1][0] == self._pushed:
            self._pending.pop()
        self._pending.append((self._pushed, self.cursor))

    def end_shown(self) -> None:
        """Ends the shown attempt, whose last row is missing because the prompt was requeued or
        deleted.
        """
        self._has_ended = True
        self.state = LogState.READING
