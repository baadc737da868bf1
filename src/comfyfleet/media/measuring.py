"""How large a picture is, told by its header; how long a film is, where PyAV is installed.

Headers are read by a few lines of our own: no decoder is let at bytes that a stranger chose.
"""

import io
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Size: TypeAlias = tuple[int, int]
HEADER_BYTES = 64 * 1024
JPEG_SEGMENTS_MAX = 200
# All markers that begin a frame; the gaps are tables of other kinds.
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})


def picture_size(media_type: str | None, first: bytes) -> Size | None:
    """Width and height; none if the header is not within these bytes."""
    read = _READERS.get(media_type or "")
    try:
        found = read(first) if read else None
    except IndexError:
        return None
    return found if found and all(found) else None


def film_facts(data: bytes) -> Mapping[str, Any]:
    """Nothing without PyAV, and nothing of what it can't read. Blocking."""
    try:
        import av
    except ImportError:
        return {}
    try:
        with av.open(io.BytesIO(data), "r") as container:
            facts: dict[str, Any] = {}
            if container.duration is not None:
                facts["duration_seconds"] = round(container.duration / av.time_base, 3)
            for stream in container.streams.video[:1]:
                facts |= {"width": stream.width, "height": stream.height}
            return facts
    except (av.FFmpegError, ValueError, EOFError):
        return {}


def _png(first: bytes) -> Size | None:
    return (_big(first, 16, 4), _big(first, 20, 4)) if first[12:16] == b"IHDR" else None


def _gif(first: bytes) -> Size:
    return _little(first, 6, 2), _little(first, 8, 2)


def _jpeg(first: bytes) -> Size | None:
    at = 2
    for _ in range(JPEG_SEGMENTS_MAX):
        if first[at] != 0xFF:
            return None
        if first[at + 1] in _JPEG_FRAMES:
            return _big(first, at + 7, 2), _big(first, at + 5, 2)
        at += 2 + _big(first, at + 2, 2)
    return None


def _webp(first: bytes) -> Size | None:
    kind = first[12:16]
    if kind == b"VP8X":
        return _little(first, 24, 3) + 1, _little(first, 27, 3) + 1
    if kind == b"VP8L":
        bits = _little(first, 21, 4)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _little(first, 26, 2) & 0x3FFF, _little(first, 28, 2) & 0x3FFF
    return None


_READERS: Mapping[str, Callable[[bytes], Size | None]] = {
    "image/png": _png,
    "image/gif": _gif,
    "image/jpeg": _jpeg,
    "image/webp": _webp,
}


def _big(first: bytes, at: int, size: int) -> int:
    return _number(first, at, size, big=True)


def _little(first: bytes, at: int, size: int) -> int:
    return _number(first, at, size, big=False)


def _number(first: bytes, at: int, size: int, *, big: bool) -> int:
    if at + size > len(first):
        raise IndexError(at)
    return int.from_bytes(first[at : at + size], "big" if big else "little")
