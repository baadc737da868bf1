"""Server-sent events, as bytes come in."""

from collections.abc import AsyncIterator
from typing import NamedTuple

DATA_CHARACTERS_MAX = 4 * 1024 * 1024


class ServerEvent(NamedTuple):
    id: str
    name: str
    data: str


class EventLines:
    """`id` stays until another comes, as the standard has it: a reader resumes after it."""

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self._name = ""
        self._data: list[str] = []
        self._characters = 0

    def take(self, line: str) -> ServerEvent | None:
        """The event that this line ends, if it ends one."""
        if not line:
            return self._ended()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._characters += len(value)
            if self._characters <= DATA_CHARACTERS_MAX:
                self._data.append(value)
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self.last_id = value
        return None

    def _ended(self) -> ServerEvent | None:
        event = ServerEvent(self.last_id, self._name or "message", "\n".join(self._data))
        has_data = bool(self._data) and self._characters <= DATA_CHARACTERS_MAX
        self._name, self._data, self._characters = "", [], 0
        return event if has_data else None


async def lines_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Ended by newlines only: Python's own idea of a line would cut a text at U+2028."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode(errors="replace")
        if len(rest) > 2 * DATA_CHARACTERS_MAX:
            return
