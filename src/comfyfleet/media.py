"""File formats, detected only from their bytes: types, sizes and defects of images, and the prompt
inside a PNG."""

import contextlib
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias

from comfyfleet.errors import LimitExceeded

# Enough for all formats. The first page of an Ogg file and the header of a Matroska file are the
# longest.
SNIFF_BYTES = 512

_ISO_BRANDS: Mapping[bytes, str] = {
    b"qt  ": "video/quicktime",
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"mif1": "image/heic",
    b"msf1": "image/heic",
    b"M4A ": "audio/mp4",
    b"M4B ": "audio/mp4",
}
# How QuickTime files began before they had a brand.
_OLD_QUICKTIME = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
# The file name extension for each type.
ENDINGS: Mapping[str, str] = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "image/avif": ".avif",
    "image/heic": ".heic",
    "video/mp4": ".mp4",
    "video/quicktime": ".mov",
    "video/webm": ".webm",
    "video/x-matroska": ".mkv",
    "video/x-msvideo": ".avi",
    "video/ogg": ".ogv",
    "audio/mp4": ".m4a",
    "audio/webm": ".weba",
    "audio/x-matroska": ".mka",
    "audio/mpeg": ".mp3",
    "audio/wav": ".wav",
    "audio/flac": ".flac",
    "audio/ogg": ".ogg",
}


def sniff_type(first: bytes) -> str | None:
    """Returns the media type, or None if the format is unknown."""
    types = (look(first) for look in _LOOKS)
    return next((media_type for media_type in types if media_type), None)


def _picture(first: bytes) -> str | None:
    if first.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if first.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if first.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return None


def _riff(first: bytes) -> str | None:
    if not first.startswith((b"RIFF", b"RF64")):
        return None
    forms = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
    return forms.get(first[8:12])


def _iso(first: bytes) -> str | None:
    box = first[4:8]
    if box == b"ftyp" and len(first) >= 12:
        return _ISO_BRANDS.get(first[8:12], "video/mp4")
    # includes its own eight bytes; 1 means that the actual size follows them
    size = int.from_bytes(first[:4], "big")
    return "video/quicktime" if box in _OLD_QUICKTIME and (size == 1 or size >= 8) else None


def _sniff_matroska(first: bytes) -> str | None:
    if not first.startswith(b"\x1a\x45\xdf\xa3"):
        return None
    at = first.find(b"\x42\x82")  # DocType: two bytes of id, one byte of length, then text
    if at < 0 or at + 2 >= len(first):
        return None
    length = first[at + 2] & 0x7F
    document = first[at + 3 : at + 3 + length].rstrip(b"\0")
    return {b"webm": "video/webm", b"matroska": "video/x-matroska"}.get(document)


def _sniff_ogg(first: bytes) -> str | None:
    if not first.startswith(b"OggS"):
        return None
    is_video = b"\x80theora" in first or b"BBCD\0" in first
    return "video/ogg" if is_video else "audio/ogg"


def _sound(first: bytes) -> str | None:
    if first.startswith(b"fLaC"):
        return "audio/flac"
    if first.startswith(b"ID3") and len(first) >= 10:
        return "audio/mpeg"
    return "audio/mpeg" if _is_mpeg_frame(first) else None


def _is_mpeg_frame(first: bytes) -> bool:
    """Checks whether these bytes are a frame header without reserved values. AAC files have a
    different layer value."""
    if len(first) < 4 or first[0] != 0xFF or first[1] & 0xE0 != 0xE0:
        return False
    version, layer = first[1] >> 3 & 3, first[1] >> 1 & 3
    bitrate, rate = first[2] >> 4, first[2] >> 2 & 3
    return version != 1 and layer != 0 and bitrate not in (0, 15) and rate != 3


_LOOKS: tuple[Callable[[bytes], str | None], ...] = (
    _picture,
    _riff,
    _iso,
    _sniff_matroska,
    _sniff_ogg,
    _sound,
)


DEMUXERS = (
    *("mov", "mp4", "m4a", "3gp", "3g2", "mj2"),  # including AVIF and HEIC
    *("matroska", "webm", "avi", "flv", "mpegts", "mpeg"),
    # Detected only by its name, and limited to a single image. See below.
    *(
        "image2",
        "gif",
        "apng",
        "png_pipe",
        "jpeg_pipe",
        "webp",
        "webp_pipe",
        "bmp_pipe",
        "tiff_pipe",
    ),
    *("mp3", "wav", "w64", "flac", "ogg", "aac", "aiff"),
)
# For every av.open that reads. A name such as `a%d.png` refers to a single file, not to a sequence.
OPEN_OPTIONS: Mapping[str, str] = {"format_whitelist": ",".join(DEMUXERS), "pattern_type": "none"}


Size: TypeAlias = tuple[int, int]
HEADER_BYTES = 64 * 1024
# A JPEG may contain previews and color profiles before its size.
LONG_HEADER_BYTES = 4 * 1024**2
# A decoded image takes 12 bytes per pixel, and each copy takes the same amount.
PIXELS_MAX = 64_000_000
JPEG_SEGMENTS_MAX = 200
# All markers that begin a frame. The gaps are other kinds of tables.
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})


def picture_size(media_type: str | None, first: bytes) -> Size | None:
    """Returns the width and height, or None if these bytes don't contain the header."""
    read = _READERS.get(media_type or "")
    try:
        size = read(first) if read else None
    except IndexError:
        return None
    return size if size and all(size) else None


def measure_picture(source: bytes | Path) -> Size | None:
    """Returns the width and height according to the header. Decodes nothing, and reads only the
    beginning of the file.
    """
    first = _start(source, HEADER_BYTES)
    kind = _picture_type(first)
    size = picture_size(kind, first)
    if size is None and kind in _READERS and len(first) == HEADER_BYTES:
        return picture_size(kind, _start(source, LONG_HEADER_BYTES))
    return size


def _picture_type(first: bytes) -> str | None:
    # Also accepts image brands that are not in the table, because decoders accept them.
    if first.startswith((b"ftypavi", b"ftyphei"), 4):
        return "image/avif"
    return sniff_type(first[:SNIFF_BYTES])


def _start(source: bytes | Path, length: int) -> bytes:
    if isinstance(source, bytes):
        return source[:length]
    with source.open("rb") as file:
        return file.read(length)


def require_pixels(size: Size | None, pixels_max: int = PIXELS_MAX) -> None:
    """Refuses an image that is too large, before it is decoded."""
    if size is not None and size[0] * size[1] > pixels_max:
        raise LimitExceeded(
            f"the image has {size[0]}x{size[1]} pixels; the limit is {pixels_max:,} pixels",
            max_pixels=pixels_max,
        )


def _png_size(first: bytes) -> Size | None:
    return (_big(first, 16, 4), _big(first, 20, 4)) if first[12:16] == b"IHDR" else None


def _gif_size(first: bytes) -> Size:
    return _little(first, 6, 2), _little(first, 8, 2)


def _jpeg_size(first: bytes) -> Size | None:
    at = 2
    for _ in range(JPEG_SEGMENTS_MAX):
        if first[at] != 0xFF:
            return None
        if first[at + 1] in _JPEG_FRAMES:
            return _big(first, at + 7, 2), _big(first, at + 5, 2)
        at += 2 + _big(first, at + 2, 2)
    return None


def _webp_size(first: bytes) -> Size | None:
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
    """Returns the size of the largest part, because tiles and thumbnails have sizes as well."""
    largest, at = None, first.find(b"ispe")
    while at >= 0 and at + 16 <= len(first):
        size = _big(first, at + 8, 4), _big(first, at + 12, 4)
        largest = max(largest or size, size, key=lambda candidate: candidate[0] * candidate[1])
        at = first.find(b"ispe", at + 16)
    return largest


_READERS: Mapping[str, Callable[[bytes], Size | None]] = {
    "image/png": _png_size,
    "image/gif": _gif_size,
    "image/jpeg": _jpeg_size,
    "image/webp": _webp_size,
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


_PNG_HEAD = 8
_ENDINGS = {"image/jpeg": b"\xff\xd9", "image/gif": b";"}
# Some writers add padding after the end of a JPEG or GIF.
_PADDING = b"\0\n\r "


def picture_problem(data: bytes) -> str | None:
    """Describes why an image can't be displayed, or returns None if its structure is valid."""
    if not data:
        return "it is empty"
    media_type = sniff_type(data[:SNIFF_BYTES])
    if media_type is None:
        return "it isn't a supported image format"
    if not media_type.startswith("image/"):
        return f"it is {media_type}, not an image"
    if media_type == "image/png":
        return _png_problem(data)
    if media_type == "image/webp":
        size = int.from_bytes(data[4:8], "little") + 8
        return "it ends too early" if len(data) < size else None
    ending = _ENDINGS.get(media_type)
    if ending and not data.rstrip(_PADDING).endswith(ending):
        return "it ends too early"
    return None


def _png_problem(data: bytes) -> str | None:
    """Describes how a PNG is damaged. Each chunk has its own checksum, and the last one is IEND."""
    at, has_pixels = _PNG_HEAD, False
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        kind, end = data[at + 4 : at + 8], at + 12 + length
        if end > len(data):
            break
        if zlib.crc32(data[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            return f"its part {kind!r} is damaged"
        has_pixels |= kind == b"IDAT"
        if kind == b"IEND":
            return None if has_pixels else "it has no pixels"
        at = end
    return "it ends too early"


PICTURE_BYTES_MAX = 1024**3
# The maximum number of boxes, elements, chunks or pages on all levels of a file: this number, plus
# one for every 256 bytes of the file. A WebM video has 75 blocks per second. Files with smaller
# parts only waste time.
PARTS_MAX = 100_000
BYTES_PER_PART = 256
_PNG_PLAIN_TEXTS = frozenset({b"tEXt", b"comf"})
_PNG_PROMPT = b"prompt\0"
_PNG_MANIFEST = b"caBX"  # contains a C2PA manifest


class TooManyParts(ValueError):
    """Raised if a file has more parts than any real file of its size."""


class PartCount:
    """Counts the parts of a file while they are read."""

    def __init__(self, size: int) -> None:
        self._left = PARTS_MAX + size // BYTES_PER_PART

    def add(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TooManyParts("too many parts")


def replace_prompt(path: Path, prompt: str) -> int:
    """Replaces the prompt that ComfyUI embedded into a PNG. Returns the new size of the file.

    Other files aren't changed.
    """
    with path.open("r+b") as file:
        if (
            sniff_type(file.read(SNIFF_BYTES)) == "image/png"
            and file.seek(0, 2) <= PICTURE_BYTES_MAX
        ):
            file.seek(0)
            with contextlib.suppress(struct.error):  # the file is damaged
                _replace(file, _png_with_prompt(file.read(), prompt.encode("ascii")))
        return file.seek(0, 2)


def _png_with_prompt(data: bytes, prompt: bytes) -> bytearray:
    result, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        end = at + 12 + int(struct.unpack_from(">I", data, at)[0])
        kind, content = data[at + 4 : at + 8], data[at + 8 : end - 4]
        if kind == _PNG_MANIFEST:
            return bytearray(data)  # any change would invalidate the signature
        if kind in _PNG_PLAIN_TEXTS and content.startswith(_PNG_PROMPT):
            part = kind + _PNG_PROMPT + prompt
            result += struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
        else:
            result += data[at:end]
        at = end
    return result + data[at:]


def _replace(file: BinaryIO, data: bytearray) -> None:
    file.seek(0)
    file.write(data)
    file.truncate()
