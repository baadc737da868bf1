"""How large a picture is, told by its header. Pure.

Headers are read by a few lines of our own: no decoder is let at bytes that a stranger chose.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from comfyfleet.kernel.errors import LimitExceeded

Size: TypeAlias = tuple[int, int]
HEADER_BYTES = 64 * 1024
# A JPEG may carry previews and colour profiles before it tells its size.
LONG_HEADER_BYTES = 4 * 1024**2
# Decoded, a picture takes 12 bytes for each of its pixels, and as much again for each copy.
PIXELS_MAX = 64_000_000
JPEG_SEGMENTS_MAX = 200
# All markers that begin a frame; the gaps are tables of other kinds.
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_BEGINNINGS: tuple[tuple[bytes, int, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", 0, "image/png"),
    (b"\xff\xd8\xff", 0, "image/jpeg"),
    (b"GIF8", 0, "image/gif"),
    (b"WEBP", 8, "image/webp"),
    (b"ftypavi", 4, "image/avif"),
    (b"ftyphei", 4, "image/heic"),
    (b"ftypmif1", 4, "image/heic"),
    (b"ftypmsf1", 4, "image/heic"),
)


def picture_size(media_type: str | None, first: bytes) -> Size | None:
    """Width and height; none if the header is not within these bytes."""
    read = _READERS.get(media_type or "")
    try:
        found = read(first) if read else None
    except IndexError:
        return None
    return found if found and all(found) else None


def size_by_header(first: bytes) -> Size | None:
    """The same of whatever picture it is; none of anything else."""
    named = (kind for begins, at, kind in _BEGINNINGS if first.startswith(begins, at))
    return picture_size(next(named, None), first)


def require_pixels(size: Size | None, pixels_max: int = PIXELS_MAX) -> None:
    """Refuses a picture that is too large to decode, before anybody does."""
    if size is not None and size[0] * size[1] > pixels_max:
        raise LimitExceeded(
            f"the picture is {size[0]}x{size[1]}, and at most {pixels_max:,} pixels are taken",
            max_pixels=pixels_max,
        )


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


def _isobmff(first: bytes) -> Size | None:
    """The largest of its parts: tiles and thumbnails have sizes, too."""
    found, at = None, first.find(b"ispe")
    while at >= 0 and at + 16 <= len(first):
        size = _big(first, at + 8, 4), _big(first, at + 12, 4)
        found = max(found or size, size, key=lambda each: each[0] * each[1])
        at = first.find(b"ispe", at + 16)
    return found


_READERS: Mapping[str, Callable[[bytes], Size | None]] = {
    "image/png": _png,
    "image/gif": _gif,
    "image/jpeg": _jpeg,
    "image/webp": _webp,
    "image/avif": _isobmff,
    "image/heic": _isobmff,
}


def _big(first: bytes, at: int, size: int) -> int:
    return _number(first, at, size, big=True)


def _little(first: bytes, at: int, size: int) -> int:
    return _number(first, at, size, big=False)


def _number(first: bytes, at: int, size: int, *, big: bool) -> int:
    if at + size > len(first):
        raise IndexError(at)
    return int.from_bytes(first[at : at + size], "big" if big else "little")
