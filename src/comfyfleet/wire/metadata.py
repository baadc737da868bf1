"""Takes prompts and workflows out of delivered files, without encoding anything anew. Blocking.

Pictures are written again without the parts that hold them; in films and sounds those parts are
overwritten where they lie, so that a large file costs no more than a small one.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias

from comfyfleet.kernel.filetypes import SNIFF_BYTES, sniffed
from comfyfleet.wire.avif import empty_items

PICTURE_BYTES_MAX = 1024**3
PARTS_MAX = 100_000
INDEX_BYTES_MAX = 16 * 1024**2  # of a box that says what a picture has, and where
ZEROS = bytes(1024**2)
# In one piece while it is made: a file may be cut into parts of a few bytes, each of which would be an
# object of its own, ten times as large as the file.
Stripped: TypeAlias = bytearray
_PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"comf"})  # the last: ComfyUI's own
_JPEG_NOTES = frozenset({0xE1, 0xED, 0xFE})  # Exif and XMP, Photoshop's, comments
_WEBP_NOTES = frozenset({b"EXIF", b"XMP "})
_WEBP_HAS_NOTES = 0x08 | 0x04
_MOVIE_BOXES = frozenset({b"trak", b"mdia", b"minf"})
_MOVIE_NOTES = frozenset({b"udta", b"meta"})
_GIF_KEPT = (b"NETSCAPE2.0", b"ANIMEXTS1.0", b"ICCRGBG1012")  # how often it plays, its colours
_SEGMENT, _TAGS, _VOID = 0x18538067, 0x1254C367, b"\xec"
_FLAC_COMMENT, _FLAC_PADDING = 4, 1
_OGG_COMMENTS = (b"\x03vorbis", b"OpusTags")
_SVG_BEGIN = re.compile(rb"<metadata\b", re.IGNORECASE)
_SVG_END = re.compile(rb"</metadata\s*>", re.IGNORECASE)


def strip_metadata(path: Path) -> int:
    """Its size afterwards. What we can't take apart stays as it is."""
    with path.open("r+b") as file:
        head = file.read(SNIFF_BYTES)
        media_type = sniffed(head) or _document(head)
        size = file.seek(0, 2)
        try:
            if media_type in _WITHOUT and size <= PICTURE_BYTES_MAX:
                file.seek(0)
                _replace(file, _WITHOUT[media_type](file.read()))
            elif media_type in _OVERWRITE:
                _OVERWRITE[media_type](file, size)
        except (struct.error, IndexError, ValueError, RecursionError):
            pass  # damaged, or of a kind that nobody has seen yet
        return file.seek(0, 2)


def _document(head: bytes) -> str:
    """Models and drawings that ComfyUI saves: no media that can be uploaded, so not sniffed."""
    if head.startswith(b"glTF"):
        return "model/gltf-binary"
    return "image/svg+xml" if b"<svg" in head.lower() else ""


def _replace(file: BinaryIO, data: Stripped) -> None:
    file.seek(0)
    file.write(data)
    file.truncate()


def _png(data: bytes) -> Stripped:
    kept, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        end = at + 12 + int(struct.unpack_from(">I", data, at)[0])
        if data[at + 4 : at + 8] not in _PNG_TEXTS:
            kept += data[at:end]
        at = end
    return kept + data[at:]


def _jpeg(data: bytes) -> Stripped:
    kept, at = bytearray(data[:2]), 2
    # Up to the first scan: behind it there are pixels.
    while data[at] == 0xFF and data[at + 1] != 0xDA:
        end = at + 2 + int(struct.unpack_from(">H", data, at + 2)[0])
        if data[at + 1] not in _JPEG_NOTES:
            kept += data[at:end]
        at = end
    return kept + data[at:]


def _webp(data: bytes) -> Stripped:
    kept, at = bytearray(b"RIFF----WEBP"), 12
    while at + 8 <= len(data):
        kind, length = data[at : at + 4], int(struct.unpack_from("<I", data, at + 4)[0])
        end = at + 8 + length + length % 2
        part = data[at:end]
        if kind == b"VP8X":
            part = part[:8] + bytes([part[8] & ~_WEBP_HAS_NOTES]) + part[9:]
        if kind not in _WEBP_NOTES:
            kept += part
        at = end
    struct.pack_into("<I", kept, 4, len(kept) - 8)
    return kept


def _gif(data: bytes) -> Stripped:
    """Without comments, and without what applications have added, as XMP is."""
    at = 13 + _gif_colours(data[10])
    kept = bytearray(data[:at])
    while data[at] in (0x21, 0x2C):
        is_note = data[at] == 0x21 and _is_gif_note(data[at + 1], data[at + 3 : at + 14])
        inner = at + 2 if data[at] == 0x21 else at + 11 + _gif_colours(data[at + 9])
        end = _gif_blocks_end(data, inner)
        if not is_note:
            kept += data[at:end]
        at = end
    return kept + data[at:]


def _gif_colours(flags: int) -> int:
    """Bytes of the table of colours that follows, if one does."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _is_gif_note(label: int, application: bytes) -> bool:
    return label == 0xFE or (label == 0xFF and application not in _GIF_KEPT)


def _gif_blocks_end(data: bytes, at: int) -> int:
    while data[at]:
        at += data[at] + 1
    return at + 1


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int, int]]:
    """Kind, start, start of its content, end."""
    for _ in range(PARTS_MAX):
        if start + 8 > end:
            return
        file.seek(start)
        head = file.read(16)
        length, kind = struct.unpack(">I4s", head[:8])
        inner = start + (16 if length == 1 else 8)
        length = struct.unpack(">Q", head[8:16])[0] if length == 1 else length or end - start
        if length < inner - start or start + length > end:
            raise ValueError(kind)
        yield kind, start, inner, start + length
        start += length


def _movie(file: BinaryIO, size: int) -> None:
    for kind, _, inner, end in list(_boxes(file, 0, size)):
        if kind == b"moov":
            _free_notes(file, inner, end)


def _iso_picture(file: BinaryIO, size: int) -> None:
    """An animation has a film's boxes besides."""
    _movie(file, size)
    meta = next((each for each in _boxes(file, 0, size) if each[0] == b"meta"), None)
    if meta is None:
        return
    parts = {kind: (inner, end) for kind, _, inner, end in _boxes(file, meta[2] + 4, meta[3])}
    iinf, iloc = (_read(file, *parts[name]) for name in (b"iinf", b"iloc") if name in parts)
    empty_items(file, iinf, iloc, parts.get(b"idat", (0, 0))[0])


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    if end - start > INDEX_BYTES_MAX:
        raise ValueError(end - start)
    file.seek(start)
    return file.read(end - start)


def _free_notes(file: BinaryIO, start: int, end: int) -> None:
    """Nothing moves: what the file says about places in it stays true."""
    for kind, at, inner, until in list(_boxes(file, start, end)):
        if kind in _MOVIE_NOTES:
            _fill(file, at + 4, b"free", inner, until)
        elif kind in _MOVIE_BOXES:
            _free_notes(file, inner, until)


def _fill(file: BinaryIO, name_at: int, name: bytes, start: int, end: int) -> None:
    file.seek(name_at)
    file.write(name)
    file.seek(start)
    for at in range(start, end, len(ZEROS)):
        file.write(ZEROS[: end - at])


def _matroska(file: BinaryIO, size: int) -> None:
    for number, _, inner, end in list(_elements(file, 0, size)):
        if number != _SEGMENT:
            continue
        for kind, at, _, until in list(_elements(file, inner, end)):
            if kind == _TAGS and until - at >= 9:
                length = (until - at - 9).to_bytes(7, "big")
                _fill(file, at, _VOID + b"\x01" + length, at + 9, until)


def _elements(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, start, start of its content, end; one of unknown length goes on to the end."""
    for _ in range(PARTS_MAX):
        if start + 2 > end:
            return
        file.seek(start)
        head = file.read(12)
        width = 9 - head[0].bit_length()
        first = head[width]
        wide = 9 - first.bit_length()
        value = int.from_bytes(head[width : width + wide], "big") & (1 << 7 * wide) - 1
        inner = start + width + wide
        until = end if value == (1 << 7 * wide) - 1 else inner + value
        if until > end:
            raise ValueError(start)
        yield int.from_bytes(head[:width], "big"), start, inner, until
        start = until


def _flac(file: BinaryIO, size: int) -> None:
    at, is_last = 4, False
    while not is_last and at + 4 <= size:
        file.seek(at)
        head = file.read(4)
        is_last, kind = head[0] >= 0x80, head[0] & 0x7F
        end = at + 4 + int.from_bytes(head[1:], "big")
        if kind == _FLAC_COMMENT and end <= size:
            _fill(file, at, bytes([head[0] & 0x80 | _FLAC_PADDING]), at + 4, end)
        at = end


def _mp3(file: BinaryIO, size: int) -> None:
    """The tag at its beginning becomes padding, that at its end is cut off."""
    file.seek(0)
    head = file.read(10)
    if head[:3] == b"ID3":
        length = sum(
            (byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True)
        )
        _fill(file, 5, b"\0", 10, min(10 + length, size))
    file.seek(max(0, size - 128))
    if file.read(3) == b"TAG":
        file.truncate(size - 128)


def _svg(data: bytes) -> Stripped:
    """In one pass: with one expression for both ends, each begin without an end would read on to the
    end of the file, and all threads of the process wait for an expression."""
    kept, at = bytearray(), 0
    while (begin := _SVG_BEGIN.search(data, at)) and (end := _SVG_END.search(data, begin.end())):
        kept += data[at : begin.start()]
        at = end.end()
    return kept + data[at:]


def _glb(file: BinaryIO, size: int) -> None:
    """`asset.extras` goes out of the JSON, which is filled up with blanks to its length."""
    file.seek(12)
    length, kind = struct.unpack("<I4s", file.read(8))
    if kind != b"JSON" or 20 + length > min(size, PICTURE_BYTES_MAX):
        return
    value = json.loads(file.read(length))
    if not isinstance(value, dict) or not isinstance(value.get("asset"), dict):
        return
    if value["asset"].pop("extras", None) is None:
        return
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) <= length:
        file.seek(20)
        file.write(text.ljust(length))


def _ogg(file: BinaryIO, size: int) -> None:
    """The second packet of a stream holds its comments: their number becomes none, all else of the
    packet zero, and the pages that it lies in get their checksums anew."""
    packet, pages = _second_packet(file, size)
    prefix = next((each for each in _OGG_COMMENTS if packet.startswith(each)), None)
    if prefix is None:
        return
    vendor = int(struct.unpack_from("<I", packet, len(prefix))[0])
    kept = packet[: len(prefix) + 4 + vendor]
    framing = b"\x01" if prefix == b"\x03vorbis" else b""
    emptied = (kept + bytes(4) + framing).ljust(len(packet), b"\0")
    if len(emptied) != len(packet):
        return
    for _, inner, length, done in pages:
        file.seek(inner)
        file.write(emptied[done : done + length])
    # Once each: a page has up to 255 pieces of the packet, and 64 KiB to go over.
    for page in dict.fromkeys(page for page, *_ in pages):
        _sign_page(file, page)


def _second_packet(file: BinaryIO, size: int) -> tuple[bytes, list[tuple[int, int, int, int]]]:
    """Its bytes, and where they lie: start of the page, start there, length, bytes before."""
    packet, places, finished, at = bytearray(), list[tuple[int, int, int, int]](), 0, 0
    while finished < 2 and at + 27 <= size and len(packet) < PICTURE_BYTES_MAX:
        file.seek(at)
        head = file.read(27)
        if head[:4] != b"OggS":
            raise ValueError(at)
        lengths = file.read(head[26])
        inner = at + 27 + len(lengths)
        for length in lengths:
            if finished == 1:
                file.seek(inner)
                places.append((at, inner, length, len(packet)))
                packet += file.read(length)
            inner += length
            finished += length < 255
            if finished == 2:
                break
        at += 27 + len(lengths) + sum(lengths)
    return bytes(packet), places


def _sign_page(file: BinaryIO, at: int) -> None:
    file.seek(at)
    head = file.read(27)
    lengths = file.read(head[26])
    page = head[:22] + bytes(4) + head[26:] + lengths + file.read(sum(lengths))
    checksum = 0
    for byte in page:
        checksum = (checksum << 8 & 0xFFFFFFFF) ^ _OGG_CHECKSUMS[checksum >> 24 ^ byte]
    file.seek(at + 22)
    file.write(struct.pack("<I", checksum))


def _ogg_checksum(byte: int) -> int:
    value = byte << 24
    for _ in range(8):
        value = (value << 1 ^ (0x04C11DB7 if value & 0x80000000 else 0)) & 0xFFFFFFFF
    return value


_OGG_CHECKSUMS = [_ogg_checksum(byte) for byte in range(256)]
_WITHOUT: Mapping[str, Callable[[bytes], Stripped]] = {
    "image/png": _png,
    "image/jpeg": _jpeg,
    "image/webp": _webp,
    "image/gif": _gif,
    "image/svg+xml": _svg,
}
_OVERWRITE: Mapping[str, Callable[[BinaryIO, int], None]] = {
    "image/avif": _iso_picture,
    "image/heic": _iso_picture,
    "video/mp4": _movie,
    "audio/mp4": _movie,
    "video/quicktime": _movie,
    "video/webm": _matroska,
    "video/x-matroska": _matroska,
    "audio/flac": _flac,
    "audio/mpeg": _mp3,
    "audio/ogg": _ogg,
    "model/gltf-binary": _glb,
}
