"""How large a picture is, from its first bytes: no picture is decoded for that."""

from pathlib import Path
from struct import unpack
from typing import BinaryIO

HEAD_BYTES = 32
SEGMENTS_MAX = 500
# Start-of-frame markers of JPEG; the others of this row are tables.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def size_of(path: Path) -> tuple[int, int] | None:
    """Width and height of a PNG, GIF, WebP or JPEG; None for anything else, or a broken one."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        if head[:2] == b"\xff\xd8":
            return _jpeg(file)
    if len(head) < HEAD_BYTES:
        return None
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        return unpack(">II", head[16:24])
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return unpack("<HH", head[6:10])
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _webp(head)
    return None


def _webp(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X":
        width, height = int.from_bytes(head[24:27], "little"), int.from_bytes(head[27:30], "little")
        return width + 1, height + 1
    if kind == b"VP8 ":
        width, height = unpack("<HH", head[26:30])
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1
    return None


def _jpeg(file: BinaryIO) -> tuple[int, int] | None:
    file.seek(2)
    for _ in range(SEGMENTS_MAX):
        head = file.read(4)
        if len(head) < 4 or head[0] != 0xFF:
            return None
        marker, length = head[1], int.from_bytes(head[2:4], "big")
        if marker in _FRAMES:
            body = file.read(5)
            if len(body) < 5:
                return None
            height, width = unpack(">HH", body[1:5])
            return width, height
        file.seek(max(0, length - 2), 1)
    return None
