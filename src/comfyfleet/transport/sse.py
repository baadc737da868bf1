"""Parses server-sent events from bytes as they arrive. The client, backends and the CLI all use
this parser."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from comfyfleet.errors import LimitExceeded

EVENT_BYTES_MAX = 32 * 1024 * 1024  # large enough for a preview, which is an image in base64
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ServerEvent(NamedTuple):
    """An event. `id` is the id of the last event that had one, and `data` is not decoded
    further."""

    id: str
    name: str
    data: str


class EventParser:
    """Parses a byte stream into events. An event without its final blank line is dropped.

    `last_id` is preserved until the next id, so that a reader can resume after it. `comments`
    counts the server's keep-alive lines.
    """

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self.comments = 0
        self._name = ""
        self._data: list[str] = []
        self._bytes = 0  # size of the current event
        self._partial: list[bytes] = []  # pieces of the current line
        self._is_new = True
        self._after_cr = False

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """Yields the events that this piece completes. Raises LimitExceeded if an event is too
        large."""
        self._bytes += len(piece)
        *lines, rest = _LINE_END.split(self._without_rest_of_line_end(piece))
        for line in lines:
            event = self._take(b"".join((*self._partial, line)))
            self._partial = []
            if event is not None:
                yield event
        if rest:
            self._partial.append(rest)
        if self._bytes > EVENT_BYTES_MAX:
            raise LimitExceeded(f"a server-sent event is larger than {EVENT_BYTES_MAX} bytes")

    def _without_rest_of_line_end(self, piece: bytes) -> bytes:
        """Drops a line feed that belongs to the previous piece's carriage return."""
        if self._after_cr:
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        return piece

    def _take(self, line: bytes) -> ServerEvent | None:
        if self._is_new:
            line, self._is_new = line.removeprefix(_BYTE_ORDER_MARK), False
        if not line:
            return self._ended()
        name, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self.last_id = value
        elif not name:
            self.comments += 1
        return None

    def _ended(self) -> ServerEvent | None:
        event = ServerEvent(self.last_id, self._name or "message", "\n".join(self._data))
        has_data = bool(self._data)
        self._name, self._data, self._bytes = "", [], 0
        return event if has_data else None
