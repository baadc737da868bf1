"""Server-sent events, read line by line."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from comfyfleet.kernel.errors import LimitExceeded

# A preview is a picture in base64; more than this is no event of theirs.
EVENT_CHARS_MAX = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """A named event with its undecoded data."""

    name: str
    data: str


async def server_events(lines: AsyncIterator[str]) -> AsyncIterator[ServerEvent]:
    """Whole events only: one that the cut of a connection left without its blank line is dropped."""
    name, data, chars = "message", list[str](), 0
    async for line in lines:
        if not line:
            if data:
                yield ServerEvent(name, "\n".join(data))
            name, data, chars = "message", [], 0
            continue
        field, value = _field(line)
        chars += len(value)
        if chars > EVENT_CHARS_MAX:
            raise LimitExceeded(f"an event of more than {EVENT_CHARS_MAX} characters")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)


def _field(line: str) -> tuple[str, str]:
    """A line without a colon is a field without a value; one that begins with it is a comment."""
    field, _, value = line.partition(":")
    return field, value.removeprefix(" ")
