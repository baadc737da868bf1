"""Splits PNG, JPEG, WebP, GIF and SVG files into parts. Distinguishes the parts needed for
decoding, color and animation from those to remove.

Only parts of known kinds are preserved. All others count as notes: unknown kinds, fill bytes, and
data after the end. Damaged files raise ValueError, IndexError or struct.error.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias

from comfyfleet.media import picture_size


class PartRole(Enum):
    KEPT = 0
    NOTE = 1  # text, Exif, comments, and everything that isn't known to be needed
    COMPRESSED = 2  # compressed text, which can't be searched
    XMP = 3
    MANIFEST = 4  # a C2PA manifest


class Part(NamedTuple):
    role: PartRole
    start: int
    end: int


# A single bytearray, because a file may consist of many tiny parts. As separate objects, they would
# take ten times the size of the file.
Built: TypeAlias = bytearray


class PictureFormat(NamedTuple):
    parts: Callable[[bytes], Iterator[Part]]
    build: Callable[[bytes, Iterator[Part], bytes | None, bool], Built]


def in_both_encodings(*words: bytes) -> tuple[bytes, ...]:
    """Returns the words, and the words in UTF-16, which Exif uses."""
    return (*words, *(b"\0".join(bytes([letter]) for letter in word) for word in words))


PRIVATE = in_both_encodings(b"prompt", b"workflow", b"class_type")
ICC_BYTES_MAX = 4 * 1024**2
ICC_HEADER_BYTES = 128


def icc_size(profile: bytes) -> int:
    """Returns the size that a color profile's header states, or 0 if it isn't a color profile."""
    if len(profile) < ICC_HEADER_BYTES or profile[36:40] != b"acsp":
        return 0
    return int.from_bytes(profile[:4], "big")


def is_icc(profile: bytes) -> bool:
    """Checks whether this is a color profile and nothing else. Up to 3 bytes of padding may follow
    it."""
    return 0 <= len(profile) - icc_size(profile) <= 3 and not has_words(profile)


def has_words(text: bytes) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in PRIVATE)


# PNG

# Chunks that are preserved, with their maximum size in bytes. None means no limit.
_PNG_KEPT: Mapping[bytes, int | None] = {
    b"IHDR": 13, b"PLTE": 768, b"IDAT": None, b"IEND": 0, b"tRNS": 256,
    b"acTL": 8, b"fcTL": 26, b"fdAT": None,
    b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"cICP": 4, b"mDCV": 24, b"mDCv": 24, b"cLLI": 8, b"cLLi": 8,
    b"bKGD": 6, b"pHYs": 9, b"sBIT": 4,
}  # fmt: skip
_PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
_PNG_XMP = b"XML:com.adobe.xmp\0"
_PNG_MANIFEST, _PNG_PROFILE, _PNG_END = b"caBX", b"iCCP", b"IEND"
PNG_KEYWORD_BYTES_MAX = 80  # including its terminator


def png_parts(data: bytes) -> Iterator[Part]:
    at, has_profile = 8, False
    while at + 12 <= len(data):
        kind = data[at + 4 : at + 8]
        if not kind.isalpha():
            raise ValueError(kind)
        end = min(at + 12 + int(struct.unpack_from(">I", data, at)[0]), len(data))
        role = _png_role(data, at, end)
        if kind == _PNG_PROFILE and not has_profile:
            # Only the first one counts, because unpacking many of them would take long.
            has_profile = True
            is_profile = _is_png_profile(data[at + 8 : end - 4])
            role = PartRole.KEPT if is_profile else PartRole.COMPRESSED
        yield Part(role, at, end)
        at = end
        if kind == _PNG_END:
            break
    if at < len(data):
        yield Part(PartRole.NOTE, at, len(data))


def _png_role(data: bytes, at: int, end: int) -> PartRole:
    kind = data[at + 4 : at + 8]
    if kind == _PNG_MANIFEST:
        return PartRole.MANIFEST
    if kind not in _PNG_TEXTS:
        most = _PNG_KEPT.get(kind, -1)
        return PartRole.KEPT if most is None or end - at - 12 <= most else PartRole.NOTE
    keyword_end = data.find(b"\0", at + 8, at + 8 + PNG_KEYWORD_BYTES_MAX)
    is_compressed = kind == b"iTXt" and data[keyword_end + 1 : keyword_end + 2] == b"\1"
    if kind == b"zTXt" or (is_compressed and keyword_end >= 0):
        return PartRole.COMPRESSED
    is_xmp = kind == b"iTXt" and data.startswith(_PNG_XMP, at + 8)
    return PartRole.XMP if is_xmp else PartRole.NOTE


def _is_png_profile(content: bytes) -> bool:
    name, _, packed = content.partition(b"\0")
    unpacker = zlib.decompressobj()
    try:
        profile = unpacker.decompress(packed[1:], ICC_BYTES_MAX)
    except zlib.error:
        return False
    return unpacker.eof and not unpacker.unused_data and is_icc(profile) and not has_words(name)


def packed_xmp(data: bytes, part: Part, bytes_max: int) -> bytes:
    """Returns the beginning of a compressed XMP packet, or b"" if the part is a different text."""
    if not data.startswith(_PNG_XMP, part.start + 8):
        return b""
    # flags, an empty language and an empty translated keyword
    start = part.start + 8 + len(_PNG_XMP) + 4
    packed = data[start : min(part.end - 4, start + bytes_max)]
    try:
        return zlib.decompressobj().decompress(packed, bytes_max)
    except zlib.error:
        return b""


def build_png(data: bytes, parts: Iterator[Part], xmp: bytes | None, strips: bool) -> Built:
    built = bytearray(data[:8])
    for part in parts:
        if part.role is PartRole.KEPT or not strips:
            built += data[part.start : part.end]
        if xmp is not None and part.start == 8:  # after the header
            chunk = b"iTXt" + _PNG_XMP + bytes(4) + xmp
            built += (
                struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
            )
    return built


# JPEG

_JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_JPEG_ICC = b"ICC_PROFILE\0"
_JPEG_APP0, _JPEG_APP1, _JPEG_APP2, _JPEG_APP11, _JPEG_APP14 = 0xE0, 0xE1, 0xE2, 0xEB, 0xEE
_JPEG_SCAN, _JPEG_END = 0xDA, 0xD9
# Frames, tables, restart intervals and scans.
_JPEG_KEPT = frozenset({*range(0xC0, 0xD0), *range(0xDA, 0xE0)})
_JPEG_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_SCAN_END = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# A regular expression blocks all threads of the process, so only one piece is searched at a time.
SEARCH_BYTES = 4 * 1024**2


def jpeg_parts(data: bytes) -> Iterator[Part]:
    at, profile_left, has_scan = 2, 0, False
    while at < len(data):
        start = _find(_MARKER, data, at)
        if start > at:
            yield Part(PartRole.NOTE, at, start)  # fill bytes, or damage
        marker = data[start + 1] if start + 1 < len(data) else _JPEG_END
        if marker == _JPEG_END:
            at = min(start + 2, len(data))
            yield Part(PartRole.KEPT, start, at)
            break
        at = _segment_end(data, start, marker)
        role = _jpeg_role(data, start, at)
        if marker == _JPEG_APP2 and data.startswith(_JPEG_ICC, start + 4):
            profile_left = icc_size(data[start + 18 : at]) or profile_left
            role = _profile_role(data[start:at], profile_left)
            profile_left -= at - start - 18
        if marker == _JPEG_SCAN:
            at, has_scan = _find(_SCAN_END, data, at), True
        yield Part(role, start, at)
    if not has_scan:
        raise ValueError("the file has no scan")
    if at < len(data):
        yield Part(PartRole.NOTE, at, len(data))


def _find(marker: re.Pattern[bytes], data: bytes, at: int) -> int:
    """Returns the position of the next marker, or the end of the data."""
    while at < len(data):
        if match := marker.search(data, at, at + SEARCH_BYTES + 1):
            return match.start()
        at += SEARCH_BYTES
    return len(data)


def _segment_end(data: bytes, start: int, marker: int) -> int:
    if marker in _JPEG_WITHOUT_LENGTH:
        return start + 2
    length = int(struct.unpack_from(">H", data, start + 2)[0])
    if length < 2:
        raise ValueError(length)
    return min(start + 2 + length, len(data))


def _jpeg_role(data: bytes, start: int, end: int) -> PartRole:
    marker = data[start + 1]
    if marker == _JPEG_APP1 and data.startswith(_JPEG_XMP, start + 4):
        return PartRole.XMP
    # This is a segment of a JUMBF box. Each of its segments repeats the header of the box.
    if (
        marker == _JPEG_APP11
        and data[start + 4 : start + 6] == b"JP"
        and data[start + 16 : start + 20] == b"jumb"
    ):
        return PartRole.MANIFEST
    # A JFIF segment contains the density (this one has no thumbnail). An Adobe segment contains the
    # color space of the components.
    is_plain = (marker == _JPEG_APP0 and data.startswith(b"\0\x10JFIF\0", start + 2)) or (
        marker == _JPEG_APP14 and data.startswith(b"\0\x0eAdobe", start + 2)
    )
    return PartRole.KEPT if is_plain or marker in _JPEG_KEPT else PartRole.NOTE


def _profile_role(segment: bytes, left: int) -> PartRole:
    """Returns the role of a color profile's segment. `left` is the number of profile bytes that
    haven't been found yet."""
    is_whole = 0 < len(segment) - 18 <= left + 3
    return PartRole.KEPT if is_whole and not has_words(segment) else PartRole.NOTE


def build_jpeg(data: bytes, parts: Iterator[Part], xmp: bytes | None, strips: bool) -> Built:
    built, is_waiting = bytearray(data[:2]), xmp is not None
    for part in parts:
        is_kept = part.role is PartRole.KEPT or not strips
        if is_waiting and xmp is not None and is_kept and data[part.start + 1] != _JPEG_APP0:
            segment = _JPEG_XMP + xmp
            built += b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment
            is_waiting = False
        if is_kept:
            built += data[part.start : part.end]
    return built


# WebP

_WEBP_ROLES: Mapping[bytes, PartRole] = {
    b"XMP ": PartRole.XMP,
    b"C2PA": PartRole.MANIFEST,
    **dict.fromkeys((b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"), PartRole.KEPT),
}
_WEBP_SIZES: Mapping[bytes, int] = {b"VP8X": 18, b"ANIM": 14}
_WEBP_PIXELS = frozenset({b"VP8 ", b"VP8L", b"ANMF"})
_WEBP_IN_FRAME = frozenset({b"ALPH", b"VP8 ", b"VP8L"})
_WEBP_HAS_PROFILE, _WEBP_HAS_ALPHA, _WEBP_HAS_EXIF, _WEBP_HAS_XMP = 0x20, 0x10, 0x08, 0x04


def _chunks(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields the kind, start and end of each chunk of a RIFF file."""
    while at + 8 <= end:
        length = int(struct.unpack_from("<I", data, at + 4)[0])
        until = min(at + 8 + length + length % 2, end)
        yield data[at : at + 4], at, until
        at = until


def _webp_end(data: bytes) -> int:
    return min(8 + int(struct.unpack_from("<I", data, 4)[0]), len(data))


def webp_parts(data: bytes) -> Iterator[Part]:
    at, has_pixels = min(12, _webp_end(data)), False
    for kind, start, end in _chunks(data, at, _webp_end(data)):
        role = _WEBP_ROLES.get(kind, PartRole.NOTE)
        if kind == b"ICCP":
            role = PartRole.KEPT if _is_webp_profile(data, start, end) else PartRole.NOTE
        if end - start != _WEBP_SIZES.get(kind, end - start):
            raise ValueError(kind)
        has_pixels |= kind in _WEBP_PIXELS
        yield Part(role, start, end)
        at = end
    if not has_pixels:
        raise ValueError("the file has no pixels")
    if at < len(data):
        yield Part(PartRole.NOTE, at, len(data))


def _is_webp_profile(data: bytes, start: int, end: int) -> bool:
    return end - start <= ICC_BYTES_MAX and is_icc(data[start + 8 : end])


def build_webp(data: bytes, parts: Iterator[Part], xmp: bytes | None, strips: bool) -> Built:
    built, has_profile, trailing = bytearray(b"RIFF----WEBP"), False, b""
    extended = data[12:16] == b"VP8X"
    if xmp is not None and not extended:
        header = _webp_header(data)
        xmp = xmp if header else None
        built += header
    for part in parts:
        if part.end > _webp_end(data):
            trailing = b"" if strips else data[part.start :]
        elif part.role is PartRole.KEPT or not strips:
            has_profile |= data[part.start : part.start + 4] == b"ICCP"
            built += _webp_part(data, part, strips)
    if extended and len(built) > 20:
        dropped = (_WEBP_HAS_EXIF | _WEBP_HAS_XMP) if strips else 0
        dropped |= 0 if has_profile else _WEBP_HAS_PROFILE
        built[20] = built[20] & ~dropped | (_WEBP_HAS_XMP if xmp is not None else 0)
    if xmp is not None:
        built += b"XMP " + struct.pack("<I", len(xmp)) + xmp + bytes(len(xmp) % 2)
    struct.pack_into("<I", built, 4, len(built) - 8)
    return built + trailing


def _webp_part(data: bytes, part: Part, strips: bool) -> bytes:
    """Returns a chunk. A frame of an animation is reduced to its chunks with pixels."""
    inner = part.start + 24
    if not strips or data[part.start : part.start + 4] != b"ANMF":
        return data[part.start : part.end]
    pixels = b"".join(
        data[start:end]
        for kind, start, end in _chunks(data, inner, part.end)
        if kind in _WEBP_IN_FRAME
    )
    head = data[part.start + 8 : inner]
    return b"ANMF" + struct.pack("<I", len(head) + len(pixels)) + head + pixels


def _webp_header(data: bytes) -> bytes:
    """Returns the header that a file needs for metadata, with its size and whether it has an alpha
    channel."""
    size = picture_size("image/webp", data[:64])
    if size is None:
        return b""
    has_alpha = data[12:16] == b"VP8L" and bool(data[24] & 0x10)
    flags = _WEBP_HAS_XMP | (_WEBP_HAS_ALPHA if has_alpha else 0)
    width, height = (side - 1 for side in size)
    content = bytes([flags, 0, 0, 0]) + width.to_bytes(3, "little") + height.to_bytes(3, "little")
    return b"VP8X" + struct.pack("<I", len(content)) + content


PICTURE_FORMATS: Mapping[str | None, PictureFormat] = {
    "image/png": PictureFormat(png_parts, build_png),
    "image/jpeg": PictureFormat(jpeg_parts, build_jpeg),
    "image/webp": PictureFormat(webp_parts, build_webp),
}


# GIF

# The names of the blocks with the number of repetitions, and the maximum size of such a block.
_GIF_LOOPS, GIF_LOOP_BYTES_MAX = (b"NETSCAPE2.0", b"ANIMEXTS1.0"), 24
_GIF_PROFILE = b"ICCRGBG1012"
_GIF_CONTROL, _GIF_APPLICATION = 0xF9, 0xFF


def strip_gif(data: bytes) -> Built:
    """Returns the frames and the playback information. Drops all other extensions, and data after
    the end."""
    at = 13 + _gif_colors(data[10])
    result = bytearray(data[:at])
    while data[at] in (0x21, 0x2C):
        inner = at + 2 if data[at] == 0x21 else at + 11 + _gif_colors(data[at + 9])
        end = _gif_blocks_end(data, inner)
        if data[at] == 0x2C or _is_gif_extension(data[at:end]):
            result += data[at:end]
        at = end
    if data[at] != 0x3B:
        raise ValueError(data[at])
    return result + b";"


def _gif_colors(flags: int) -> int:
    """Returns the size of the color table that follows, or 0 if no table follows."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _is_gif_extension(block: bytes) -> bool:
    """Checks whether an extension is needed to display the image."""
    if block[1] == _GIF_CONTROL:
        return len(block) == 8
    if block[1] != _GIF_APPLICATION:
        return False
    if block[3:14] == _GIF_PROFILE:
        return b"acsp" in block[:64] and not has_words(block)
    return block[3:14] in _GIF_LOOPS and len(block) <= GIF_LOOP_BYTES_MAX


def _gif_blocks_end(data: bytes, at: int) -> int:
    while data[at]:
        at += data[at] + 1
    return at + 1


# SVG

# Comments, CDATA sections, and elements whose texts aren't displayed, with any prefix.
_SVG_BEGIN = re.compile(
    rb"<(!--|!\[CDATA\[|(?:[\w.-]+:)?(?:metadata|desc|title)(?=[\s/>]))", re.IGNORECASE
)
_SVG_ENDS: Mapping[bytes, re.Pattern[bytes]] = {
    b"!--": re.compile(rb"-->"),
    b"![cdata[": re.compile(rb"\]\]>"),
    **{
        name: re.compile(rb"</(?:[\w.-]+:)?" + name + rb"\s*>", re.IGNORECASE)
        for name in (b"metadata", b"desc", b"title")
    },
}
_SVG_EMPTY = re.compile(rb"[^<>]*/>")


def strip_svg(data: bytes) -> Built:
    """Removes comments, metadata, descriptions and titles. A start without an end is preserved.

    Works in a single pass. With one expression for both ends, each start without an end would be
    searched up to the end of the file, and a regular expression blocks all threads of the process.
    """
    result, at, searched = bytearray(), 0, 0
    endless: set[bytes] = set()
    while begin := _SVG_BEGIN.search(data, searched):
        name = begin[1].lower().rpartition(b":")[2]
        searched = begin.end()
        if name in endless:
            continue
        end = _SVG_EMPTY.match(data, searched) if name.isalpha() else None
        end = end or _SVG_ENDS[name].search(data, searched)
        if end is None:
            endless.add(name)
            continue
        searched = end.end()
        if name != b"![cdata[":
            result += data[at : begin.start()]
            at = searched
    return result + data[at:]
