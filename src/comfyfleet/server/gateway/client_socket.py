"""One connection of a client, which sees its prompts one after another."""

from collections import deque
from enum import Enum, auto
from uuid import UUID

from comfyfleet.protocol import sockets as frames
from comfyfleet.protocol.sockets import Frame, Socket
from comfyfleet.server.run_log.model import Cursor, LoggedEvents

# A socket whose client hasn't taken so many frames is sent no more from the log until it has.
UNSENT_FRAMES_MAX = 1_000


class LogState(Enum):
    """How far a socket has come in the rows that its client sees in order."""

    CURRENT = auto()  # everything was sent
    HOLDING = auto()  # everything of the shown prompt was sent, and rows of others wait in the log
    READING = auto()  # rows of the shown prompt may wait in the log


class GatewaySocket(Socket):
    """Prompts of a client may run in parallel. A socket shows one attempt of a prompt until it is over, and then the
    next one that has started. What it doesn't show yet stays in the log."""

    def __init__(self, client_id: str, cursor: Cursor) -> None:
        super().__init__()
        self.client_id = client_id
        self.seen, self.start_id, self.row, self.floor = cursor
        self.job_id: UUID | None = None  # whose attempt it shows, once that is known
        self.state = LogState.READING
        self.is_live = False
        self.is_replaced = False  # another one has its client id
        self._has_ended = not self.start_id
        self._pushed = self._taken = 0  # frames
        self._taken_cursor = cursor
        # Cursors of rows with frames that the connection has yet to take, each with the number of frames up to there.
        self._pending: deque[tuple[int, Cursor]] = deque()

    @property
    def cursor(self) -> Cursor:
        """The place up to which rows were sent to this socket."""
        return Cursor(self.seen, self.start_id, self.row, self.floor)

    @property
    def taken_cursor(self) -> Cursor:
        """The place up to which the connection has taken all frames. A client that returns continues there."""
        while self._pending and self._pending[0][0] <= self._taken:
            _, self._taken_cursor = self._pending.popleft()
        return self._taken_cursor

    def push(self, frame: Frame) -> None:
        super().push(frame)
        self._pushed += 1

    async def next_frame(self) -> Frame:
        frame = await super().next_frame()
        self._taken += 1
        return frame

    @property
    def wants_metadata(self) -> bool:
        return self.features.get("supports_preview_metadata") is True

    @property
    def is_full(self) -> bool:
        return self.is_behind or self.frames_unsent > UNSENT_FRAMES_MAX

    def tell(self, event: str, data: object) -> None:
        self.push(frames.json_frame(event, data))

    def is_due(self, row: LoggedEvents) -> bool:
        """Whether a new row of the log goes out now. A later read of the log brings it otherwise."""
        if row.start_id is None or row.client_id != self.client_id:
            return True
        if self.state is LogState.READING:
            return False
        if self.holds_back(row):
            self.state = LogState.HOLDING
            return False
        return True

    def holds_back(self, row: LoggedEvents) -> bool:
        """Whether the row is of a later attempt than the shown one, which isn't over."""
        return (row.start_id or 0) > self.start_id and not self._has_ended

    def note_sent(self, row: LoggedEvents) -> None:
        """The row was sent."""
        start_id = row.start_id
        # An older control plane doesn't know which attempt a socket shows. Rows of earlier ones come late then.
        if start_id is None or row.client_id != self.client_id or start_id < self.start_id:
            return
        self.start_id, self.row, self.job_id = start_id, row.id, row.job_id
        self._has_ended = row.is_last
        if row.is_last and self.state is LogState.HOLDING:
            self.state = LogState.READING
        self._note_cursor()

    def note_read(self, row_id: int) -> None:
        """Everything in the log up to this row was sent, or waits there."""
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
        """The shown attempt is over without an end: its prompt was requeued, or is gone."""
        self._has_ended = True
        self.state = LogState.READING
