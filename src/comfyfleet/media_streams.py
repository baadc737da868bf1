"""Notes in Matroska and AVI videos, in audio files and in models. They are overwritten in place,
and nothing is encoded again.

Only parts of known kinds are preserved. Data after the end is cut off. Damaged files raise
ValueError, IndexError or struct.error.
"""

import json
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO, NamedTuple

from comfyfleet.media import PartCount
from comfyfleet.media_boxes import blank, fill

# Matroska and WebM

_EBML, _SEGMENT, _CLUSTER, _INFO, _TRACKS, _TRACK = (
    0x1A45DFA3, 0x18538067, 0x1F43B675, 0x1549A966, 0x1654AE6B, 0xAE,
)  # fmt: skip
_SEEK_HEAD, _CUES, _VOID, _CHECKSUM = 0x114D9B74, 0x1C53BB6B, 0xEC, 0xBF
# The elements that are preserved, by their parent. Checksums are removed, because the data that
# they cover may change.
_EBML_KEPT: Mapping[int, frozenset[int]] = {
    _SEGMENT: frozenset({_SEEK_HEAD, _INFO, _TRACKS, _CUES, _CLUSTER}),
    # Scale, duration, application, date, ids.
    _INFO: frozenset({0x2AD7B1, 0x4489, 0x4D80, 0x5741, 0x4461, 0x73A4}),
    _TRACKS: frozenset({_TRACK}),
    # Time, blocks, groups of blocks, and the positions of this and the previous cluster.
    _CLUSTER: frozenset({0xE7, 0xA3, 0xA0, 0xA7, 0xAB}),
}
_TRACK_NOTES = frozenset({0x536E, _VOID, _CHECKSUM})  # the first one is the name
# The elements of a cluster. If a cluster has no length, any other element ends it.
_IN_CLUSTER = frozenset({*_EBML_KEPT[_CLUSTER], 0xAF, 0x5854, _VOID, _CHECKSUM})


class _Element(NamedTuple):
    number: int
    start: int
    inner: int
    end: int
    is_open: bool = False  # the length is unknown, so it extends to the end


def strip_matroska(file: BinaryIO, size: int) -> None:
    at, has_segment, count = 0, False, PartCount(size)
    while at < size:
        count.add()
        element = _element(file, at, size)
        if element is None or element.number not in (_EBML, _SEGMENT, _VOID):
            break
        at = element.end
        if element.number == _SEGMENT:
            has_segment = True
            at = _strip_children(file, element, count)
        elif element.number == _VOID:
            _void(file, element)
    if not has_segment:
        raise ValueError("the file has no segment")
    file.truncate(min(at, size))


def _strip_children(file: BinaryIO, parent: _Element, count: PartCount) -> int:
    """Empties the elements that aren't needed. Returns the end of the last element."""
    at = parent.inner
    for child in _elements(file, parent, count):
        at = child.end
        if not _is_needed(child.number, parent.number):
            _void(file, child)
        elif child.number in _EBML_KEPT or child.number == _TRACK:
            _strip_children(file, child, count)
    return at


def _is_needed(number: int, parent: int) -> bool:
    if parent == _TRACK:
        return number not in _TRACK_NOTES
    return number in _EBML_KEPT[parent]


def _void(file: BinaryIO, element: _Element) -> None:
    """Turns an element into an empty one of the same size."""
    size = element.end - element.start
    if size < 9:
        file.seek(element.start)
        file.write(bytes([_VOID, 0x80 | size - 2]) + bytes(size - 2))
    else:
        length = (size - 9).to_bytes(7, "big")
        fill(file, element.start, bytes([_VOID, 1]) + length, element.start + 9, element.end)


def _elements(file: BinaryIO, parent: _Element, count: PartCount) -> Iterator[_Element]:
    at = parent.inner
    while at < parent.end:
        count.add()
        element = _element(file, at, parent.end)
        if element is None and parent.is_open:
            return  # data after the last element
        if element is None:
            raise ValueError(at)
        if element.is_open:
            element = element._replace(end=_open_end(file, element, count))
        yield element
        at = element.end


def _open_end(file: BinaryIO, element: _Element, count: PartCount) -> int:
    """Returns the end of a cluster of unknown length. The cluster ends before the first
    element that can't be in one.
    """
    if element.number != _CLUSTER:
        raise ValueError(element.number)
    at = element.inner
    while (child := _element(file, at, element.end)) and child.number in _IN_CLUSTER:
        count.add()
        at = child.end
    return at


def _element(file: BinaryIO, start: int, end: int) -> _Element | None:
    """Returns the element at a position, or None. An element that extends beyond the end is
    truncated there."""
    file.seek(start)
    head = file.read(12)
    if len(head) < 2 or not head[0] or start + 2 > end:
        return None
    width = 9 - head[0].bit_length()
    wide = 9 - head[width].bit_length() if width < len(head) else 9
    if width > 4 or wide > 8:
        return None
    value = int.from_bytes(head[width : width + wide], "big") & (1 << 7 * wide) - 1
    inner = start + width + wide
    if inner > end:
        return None
    is_open = value == (1 << 7 * wide) - 1
    until = end if is_open else min(inner + value, end)
    return _Element(int.from_bytes(head[:width], "big"), start, inner, until, is_open)


# WAV and AVI

# The chunks that are preserved, by their list. The keys are lists, which contain chunks.
_RIFF_KEPT: Mapping[bytes, frozenset[bytes]] = {
    b"WAVE": frozenset({b"fmt ", b"data", b"fact", b"ds64", b"PEAK"}),
    b"AVI ": frozenset({b"hdrl", b"movi", b"idx1"}),
    b"AVIX": frozenset({b"movi", b"idx1"}),
    b"hdrl": frozenset({b"avih", b"strl", b"odml"}),
    b"strl": frozenset({b"strh", b"strf", b"indx", b"vprp"}),
}
_RIFF_FILES = frozenset({b"RIFF", b"RF64"})
_STREAMED = (0, 0xFFFFFFFF)  # sizes in files whose writer could not seek


def strip_riff(file: BinaryIO, size: int) -> None:
    at, count = 0, PartCount(size)
    while at + 12 <= size:
        file.seek(at)
        name, length, form = struct.unpack("<4sI4s", file.read(12))
        if name not in _RIFF_FILES or form not in _RIFF_KEPT:
            break
        end = at + 8 + length
        is_known = length not in _STREAMED and end <= size
        at = _strip_chunks(file, at + 12, size, form, end if is_known else size, count)
    if at == 0:
        raise ValueError("the file has no list of chunks")
    file.truncate(at)


def _strip_chunks(
    file: BinaryIO, at: int, size: int, form: bytes, end: int, count: PartCount
) -> int:
    """Empties the chunks of a list that aren't needed. Returns the end of the last chunk."""
    long_bytes = 0
    while at + 8 <= end:
        count.add()
        file.seek(at)
        head = file.read(16)
        kind, length = struct.unpack("<4sI", head[:8])
        if kind == b"ds64":
            file.seek(at + 16)
            long_bytes = int.from_bytes(file.read(8), "little")
        if kind == b"data" and length in _STREAMED:
            length = min(long_bytes or size - at - 8, size - at - 8)
        name = head[8:12] if kind == b"LIST" else kind
        until = at + 8 + length + length % 2
        if name not in _RIFF_KEPT[form]:
            if until > size or kind in _RIFF_FILES:
                return at  # not a chunk, or a truncated one
            fill(file, at, b"JUNK", at + 8, until)
        elif kind == b"LIST" and name in _RIFF_KEPT:
            _strip_chunks(file, at + 12, size, name, min(until, size), count)
        at = min(until, size)
    return at


# Audio

_FLAC_KEPT, _FLAC_PADDING = frozenset({0, 3}), 1  # the format and the seek table
_APE = b"APETAGEX"


def strip_mpeg(file: BinaryIO, size: int) -> None:
    """Empties the tags at the beginning, and removes all data between and after the frames. A tag
    may also be followed by FLAC."""
    start = _empty_tags(file, size)
    file.seek(start)
    if file.read(4) == b"fLaC":
        _strip_flac(file, size, start)
    else:
        file.truncate(_keep_frames(file, start, size))


def strip_flac(file: BinaryIO, size: int) -> None:
    _strip_flac(file, size, 0)


def _strip_flac(file: BinaryIO, size: int, start: int) -> None:
    size = _cut_tags(file, size)
    at, is_last, count = start + 4, False, PartCount(size)
    while not is_last:
        count.add()
        file.seek(at)
        head = file.read(4)
        is_last, kind = head[0] >= 0x80, head[0] & 0x7F
        end = min(at + 4 + int.from_bytes(head[1:], "big"), size)
        if kind not in _FLAC_KEPT:
            fill(file, at, bytes([head[0] & 0x80 | _FLAC_PADDING]), at + 4, end)
        at = end


def _empty_tags(file: BinaryIO, size: int) -> int:
    """Turns ID3 tags at the beginning into padding. Returns the position after them."""
    at, count = 0, PartCount(size)
    while True:
        count.add()
        file.seek(at)
        head = file.read(10)
        if head[:3] != b"ID3" or len(head) < 10:
            return at
        length = sum(
            (byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True)
        )
        end = min(at + 10 + length, size)
        fill(file, at + 5, b"\0", at + 10, end)
        file.seek(end)
        if head[5] & 0x10 and file.read(3) == b"3DI":  # the tag's footer, which repeats the header
            end = min(end + 10, size)
            blank(file, end - 10, end)
        at = end


def _cut_tags(file: BinaryIO, size: int) -> int:
    """Cuts tags off the end of a file. Returns the new size."""
    count = PartCount(size)
    while True:
        count.add()
        file.seek(max(0, size - 128))
        end = file.read(128)
        if end.startswith(b"TAG") and len(end) == 128:
            size -= 128
        elif end[-32:].startswith(_APE) and size > 32:
            length, _, flags = struct.unpack("<III", end[-20:-8])
            size = max(0, size - max(length, 32) - (32 if flags >> 31 else 0))
        else:
            file.truncate(size)
            return size


_SYNC = re.compile(rb"\xff[\xe2-\xff]", re.DOTALL)
SEARCH_BYTES = 4 * 1024**2
RESYNCS_MAX = 100_000
_BITRATES: Mapping[tuple[bool, int], tuple[int, ...]] = {
    (True, 3): tuple(range(32, 449, 32)),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 1): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 3): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 1): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = (44_100, 48_000, 32_000)


def _keep_frames(file: BinaryIO, start: int, size: int) -> int:
    """Overwrites all data between frames. Returns the end of the last frame."""
    if start >= size:
        raise ValueError("the file has no frame")
    file.flush()
    with mmap.mmap(file.fileno(), size) as data:
        at, last = start, start
        while at < size:
            length = _frame_bytes(data[at : at + 4])
            if length:
                at = last = min(at + length, size)
                continue
            next_start = _next_frame(data, at)
            if next_start is None:
                break
            data[at:next_start] = bytes(next_start - at)
            at = next_start
    if last == start:
        raise ValueError("the file has no frame")
    return last


def _next_frame(data: mmap.mmap, at: int) -> int | None:
    """Returns the position of the next frame that is followed by another frame, or None."""
    for _ in range(RESYNCS_MAX):
        match = None
        while match is None and at < len(data):
            match = _SYNC.search(data, at, at + SEARCH_BYTES + 1)
            at += 0 if match else SEARCH_BYTES
        if match is None:
            return None
        place = match.start()
        length = _frame_bytes(data[place : place + 4])
        if length and _frame_bytes(data[place + length : place + length + 4]):
            return place
        at = place + 1
    raise ValueError("too much data between the frames")


def _frame_bytes(head: bytes) -> int:
    """Returns the length of an MPEG frame, or 0 if this isn't a frame header."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return 0
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    bitrate, rate, padding = head[2] >> 4, head[2] >> 2 & 3, head[2] >> 1 & 1
    if version == 1 or layer == 0 or bitrate in (0, 15) or rate == 3:
        return 0
    is_first = version == 3
    bits = _BITRATES[is_first, layer][bitrate - 1] * 1000
    samples_per_second = _RATES[rate] >> (0 if is_first else 1 if version == 2 else 2)
    if layer == 3:
        return (12 * bits // samples_per_second + padding) * 4
    slots = 72 if layer == 1 and not is_first else 144
    return slots * bits // samples_per_second + padding


# Ogg

_OGG_COMMENTS = (b"\x03vorbis", b"OpusTags", b"\x81theora")
COMMENT_BYTES_MAX = 64 * 1024**2  # limit for a stream
_OGG_FLAC = b"\x7fFLAC"


class _Page(NamedTuple):
    start: int
    inner: int
    end: int
    stream: bytes
    lengths: bytes


class _Piece(NamedTuple):
    """A part of a packet: its page and its position."""

    page: int
    start: int
    length: int


class _Stream:
    """The headers of a stream: its first packet and the packet with the comments. For FLAC, all
    packets with metadata are included."""

    def __init__(self) -> None:
        self.packets: list[bytearray] = [bytearray()]
        self.pieces: list[list[_Piece]] = [[]]
        self.is_read = False
        self._bytes = 0

    def add(self, file: BinaryIO, page: _Page) -> None:
        at = page.inner
        for length in page.lengths:
            if self.is_read:
                return
            file.seek(at)
            self.packets[-1] += file.read(length)
            self.pieces[-1].append(_Piece(page.start, at, length))
            self._bytes += 27 + length
            if self._bytes > COMMENT_BYTES_MAX:
                raise ValueError("the comments are too long")
            at += length
            if length < 255:
                self.is_read = self._has_ended()
                self.packets.append(bytearray())
                self.pieces.append([])

    def _has_ended(self) -> bool:
        if not self.packets[0].startswith(_OGG_FLAC):
            return len(self.packets) == 2
        return len(self.packets) > 1 and self.packets[-1][:1] >= b"\x80"

    def empty(self, file: BinaryIO) -> None:
        is_flac = self.packets[0].startswith(_OGG_FLAC)
        for packet, pieces in zip(self.packets[1:], self.pieces[1:], strict=True):
            if packet:
                emptied = _without_block(packet) if is_flac else _without_comments(packet)
                _write_packet(file, emptied, pieces)


def strip_ogg(file: BinaryIO, size: int) -> None:
    """Empties the comments of each stream, and updates the checksums of their pages."""
    streams: dict[bytes, _Stream] = {}
    at = 0
    for page in _pages(file, size):
        at = page.end
        file.seek(page.start + 5)
        if (
            file.read(1)[0] & 2
        ):  # the first page of a stream; a file may contain several streams in sequence
            if page.stream in streams:
                streams.pop(page.stream).empty(file)
            streams[page.stream] = _Stream()
        stream = streams.get(page.stream)
        if stream is None:
            raise ValueError("a page belongs to no stream")
        stream.add(file, page)
    if not streams:
        raise ValueError("the file has no page")
    for stream in streams.values():
        stream.empty(file)
    file.truncate(at)


def _pages(file: BinaryIO, size: int) -> Iterator[_Page]:
    at, count = 0, PartCount(size)
    while True:
        count.add()
        file.seek(at)
        head = file.read(27)
        if head[:4] != b"OggS" or len(head) < 27:
            if at < size and _has_page(file, at, size):
                raise ValueError(at)
            return
        lengths = file.read(head[26])
        inner = at + 27 + len(lengths)
        end = min(inner + sum(lengths), size)
        yield _Page(at, inner, end, head[14:18], lengths)
        at = end


def _has_page(file: BinaryIO, at: int, size: int) -> bool:
    for start in range(at, size, SEARCH_BYTES):
        file.seek(start)
        if b"OggS" in file.read(SEARCH_BYTES + 3):
            return True
    return False


def _without_comments(packet: bytearray) -> bytes:
    prefix = next((prefix for prefix in _OGG_COMMENTS if packet.startswith(prefix)), None)
    if prefix is None:
        raise ValueError("the format of the comments is unknown")
    vendor = int(struct.unpack_from("<I", packet, len(prefix))[0])
    header = packet[: len(prefix) + 4 + vendor]
    framing = b"\x01" if prefix == b"\x03vorbis" else b""
    emptied = (header + bytes(4) + framing).ljust(len(packet), b"\0")
    if len(emptied) != len(packet):
        raise ValueError("the comments are truncated")
    return bytes(emptied)


def _without_block(packet: bytearray) -> bytes:
    """Returns a block of FLAC metadata, or padding of the same size if it isn't needed."""
    if packet[0] & 0x7F in _FLAC_KEPT:
        return bytes(packet)
    return (bytes([packet[0] & 0x80 | _FLAC_PADDING]) + packet[1:4]).ljust(len(packet), b"\0")


def _write_packet(file: BinaryIO, packet: bytes, pieces: list[_Piece]) -> None:
    done = 0
    for piece in pieces:
        file.seek(piece.start)
        file.write(packet[done : done + piece.length])
        done += piece.length
    # Each page only once, because it has up to 255 pieces of the packet, and 64 KiB to process.
    for page in dict.fromkeys(piece.page for piece in pieces):
        _sign_page(file, page)


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


# Models and tensors

_GLB_KEPT = frozenset({b"JSON", b"BIN\0"})
JSON_BYTES_MAX = 100_000_000  # the limit of the safetensors format


def strip_glb(file: BinaryIO, size: int) -> None:
    """Removes `extras` of the model and its scenes from the JSON, and blanks all chunks that are
    neither JSON nor buffers."""
    file.seek(8)
    end = min(int(struct.unpack("<I", file.read(4))[0]), size)
    if end < 20:
        raise ValueError(end)
    at, count = 12, PartCount(size)
    while at + 8 <= end:
        count.add()
        file.seek(at)
        length, kind = struct.unpack("<I4s", file.read(8))
        until = at + 8 + length
        if until > end:
            raise ValueError(kind)
        if kind == b"JSON":
            _rewrite_json(file, at + 8, length, _without_extras)
        elif kind not in _GLB_KEPT:
            blank(file, at + 8, until)
        at = until
    file.truncate(end)


def strip_safetensors(file: BinaryIO, size: int) -> None:
    """Removes the metadata that SaveLatent stores next to its tensors."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    _rewrite_json(file, 8, min(length, size), _without_texts)


def _rewrite_json(
    file: BinaryIO, start: int, length: int, change: Callable[[object], bool]
) -> None:
    """Replaces a JSON text with a changed one, padded with blanks."""
    if length > JSON_BYTES_MAX:
        raise ValueError(length)
    file.seek(start)
    value = json.loads(file.read(length))
    if not change(value):
        return
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > length:
        raise ValueError("the text would become longer")
    file.seek(start)
    file.write(text.ljust(length))


def _without_extras(model: object) -> bool:
    if not isinstance(model, dict):
        return False
    scenes = model.get("scenes")
    places = [model, model.get("asset"), *(scenes if isinstance(scenes, list) else ())]
    dropped = [place.pop("extras", None) for place in places if isinstance(place, dict)]
    return any(extra is not None for extra in dropped)


def _without_texts(header: object) -> bool:
    return isinstance(header, dict) and header.pop("__metadata__", None) is not None
