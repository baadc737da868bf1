"""File formats, by their bytes alone: types, sizes and faults of pictures, and texts removed from files without encoding them again."""

import contextlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

from comfyfleet.errors import LimitExceeded

# Enough for every one of these; a first page of Ogg and the head of Matroska are the longest.
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
# How QuickTime began before it named its brand.
_OLD_QUICKTIME = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
# What a file of each type is called by its end.
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
    """The media type; none if it is nothing that we know."""
    found = (look(first) for look in _LOOKS)
    return next((media_type for media_type in found if media_type), None)


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
    size = int.from_bytes(first[:4], "big")  # with its own eight bytes; 1: it stands behind them
    return "video/quicktime" if box in _OLD_QUICKTIME and (size == 1 or size >= 8) else None


def _sniff_matroska(first: bytes) -> str | None:
    if not first.startswith(b"\x1a\x45\xdf\xa3"):
        return None
    at = first.find(b"\x42\x82")  # DocType: an id, a length of one byte, the text
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
    """A frame header without any of the values that are reserved; AAC has another layer."""
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
    *("mov", "mp4", "m4a", "3gp", "3g2", "mj2"),  # AVIF and HEIC, too
    *("matroska", "webm", "avi", "flv", "mpegts", "mpeg"),
    # By its name alone, one picture of a file: see below.
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
# For every av.open that reads. A name such as `a%d.png` is that of one file, and of no sequence.
OPEN_OPTIONS: Mapping[str, str] = {"format_whitelist": ",".join(DEMUXERS), "pattern_type": "none"}


Size: TypeAlias = tuple[int, int]
HEADER_BYTES = 64 * 1024
# A JPEG may carry previews and colour profiles before it tells its size.
LONG_HEADER_BYTES = 4 * 1024**2
# Decoded, a picture takes 12 bytes for each of its pixels, and as much again for each copy.
PIXELS_MAX = 64_000_000
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


def measure_picture(source: bytes | Path) -> Size | None:
    """Width and height by the header alone: nothing is decoded, and of what is no picture little is read."""
    first = _start(source, HEADER_BYTES)
    kind = _picture_type(first)
    size = picture_size(kind, first)
    if size is None and kind in _READERS and len(first) == HEADER_BYTES:
        return picture_size(kind, _start(source, LONG_HEADER_BYTES))
    return size


def _picture_type(first: bytes) -> str | None:
    # Of a picture's brands that are not in the table, too: decoders take them.
    if first.startswith((b"ftypavi", b"ftyphei"), 4):
        return "image/avif"
    return sniff_type(first[:SNIFF_BYTES])


def _start(source: bytes | Path, length: int) -> bytes:
    if isinstance(source, bytes):
        return source[:length]
    with source.open("rb") as file:
        return file.read(length)


def require_pixels(size: Size | None, pixels_max: int = PIXELS_MAX) -> None:
    """Refuses a picture that is too large to decode, before anybody does."""
    if size is not None and size[0] * size[1] > pixels_max:
        raise LimitExceeded(
            f"the picture is {size[0]}x{size[1]}, and at most {pixels_max:,} pixels are taken",
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
    """The largest of its parts: tiles and thumbnails have sizes, too."""
    found, at = None, first.find(b"ispe")
    while at >= 0 and at + 16 <= len(first):
        size = _big(first, at + 8, 4), _big(first, at + 12, 4)
        found = max(found or size, size, key=lambda each: each[0] * each[1])
        at = first.find(b"ispe", at + 16)
    return found


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
# Some writers pad a JPEG or GIF behind its end.
_PADDING = b"\0\n\r "


def picture_problem(data: bytes) -> str | None:
    """Why it can't be shown; none if it can, as far as its structure tells."""
    if not data:
        return "it is empty"
    found = sniff_type(data[:SNIFF_BYTES])
    if found is None:
        return "it is no picture that we know"
    if not found.startswith("image/"):
        return f"it is {found}, no picture"
    if found == "image/png":
        return _png_problem(data)
    if found == "image/webp":
        size = int.from_bytes(data[4:8], "little") + 8
        return "it ends too early" if len(data) < size else None
    ending = _ENDINGS.get(found)
    if ending and not data.rstrip(_PADDING).endswith(ending):
        return "it ends too early"
    return None


def _png_problem(data: bytes) -> str | None:
    """Each part carries its own checksum; the last one is IEND."""
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


# A directory without entries: decoders refuse a picture whose Exif item is no Exif.
_EMPTY_EXIF = bytes(4) + b"II*\0" + struct.pack("<IHI", 8, 0, 0)
_XML_TYPES = (b"application/rdf+xml", b"text/xml", b"application/xml")
ITEMS_MAX = 10_000
PLACES_MAX = 100_000
NOTES_BYTES_MAX = 256 * 1024 * 1024  # of all places together


class _Place(NamedTuple):
    item: int
    is_in_idat: bool
    offset: int
    length: int


def empty_items(file: BinaryIO, iinf: bytes, iloc: bytes, idat: int) -> None:
    """`iinf` and `iloc` are the contents of these boxes, `idat` is where that of `idat` begins."""
    size = file.seek(0, 2)
    left = min(NOTES_BYTES_MAX, size)
    fillings = dict(_notes_in(iinf))
    for place in islice(_places(iloc), PLACES_MAX):
        filling = fillings.get(place.item)
        start = place.offset + (idat if place.is_in_idat else 0)
        if filling is None or place.length > left or start + place.length > size:
            continue  # behind its end a file would grow to wherever the place is said to be
        left -= place.length
        file.seek(start)
        file.write(filling[: place.length].ljust(place.length, b" " if not filling else b"\0"))


def _notes_in(iinf: bytes) -> Iterator[tuple[int, bytes]]:
    """Items that hold notes, and what they are filled with: Exif without entries, or blanks."""
    at = 6 if iinf[0] == 0 else 8
    for _ in range(ITEMS_MAX):
        if at + 8 > len(iinf):
            return
        length = int(struct.unpack_from(">I", iinf, at)[0])
        entry = iinf[at + 8 : at + length]
        id_bytes = 2 if entry[0] == 2 else 4
        kind, rest = entry[6 + id_bytes : 10 + id_bytes], entry[10 + id_bytes :]
        number = int.from_bytes(entry[4 : 4 + id_bytes], "big")
        if kind == b"Exif":
            yield number, _EMPTY_EXIF
        elif kind == b"mime" and any(each in rest for each in _XML_TYPES):
            yield number, b""
        at += max(length, 8)


def _places(iloc: bytes) -> Iterator[_Place]:
    at = 0

    def number(size: int) -> int:
        nonlocal at
        if at + size > len(iloc):
            raise ValueError(at)
        at += size
        return int.from_bytes(iloc[at - size : at], "big")

    version = number(4) >> 24
    sizes = divmod(number(1), 16) + divmod(number(1), 16)
    id_bytes = 2 if version < 2 else 4
    for _ in range(min(number(id_bytes), ITEMS_MAX)):
        item = number(id_bytes)
        is_in_idat = version > 0 and number(2) & 0xF == 1
        number(2)  # which file the data is in: always this one
        base = number(sizes[2])
        for _ in range(number(2)):
            number(sizes[3] if version > 0 else 0)
            offset, length = number(sizes[0]), number(sizes[1])
            yield _Place(item, is_in_idat, base + offset, length)


PICTURE_BYTES_MAX = 1024**3
PARTS_MAX = 100_000
INDEX_BYTES_MAX = 16 * 1024**2  # of a box that says what a picture has, and where
ZEROS = bytes(1024**2)
# In one piece while it is made: a file may be cut into parts of a few bytes, each of which would be an
# object of its own, ten times as large as the file.
Stripped: TypeAlias = bytearray
_PNG_PLAIN_TEXTS = frozenset({b"tEXt", b"comf"})
_PNG_PROMPT = b"prompt\0"
_PNG_MANIFEST = b"caBX"  # of C2PA
_MOVIE_BOXES = frozenset({b"trak", b"mdia", b"minf"})
_MOVIE_NOTES = frozenset({b"udta", b"meta"})
_GIF_KEPT = (b"NETSCAPE2.0", b"ANIMEXTS1.0", b"ICCRGBG1012")  # how often it plays, its colours
_SEGMENT, _TAGS, _VOID = 0x18538067, 0x1254C367, b"\xec"
_FLAC_COMMENT, _FLAC_PADDING = 4, 1
_OGG_COMMENTS = (b"\x03vorbis", b"OpusTags")
_SVG_BEGIN = re.compile(rb"<metadata\b", re.IGNORECASE)
_SVG_END = re.compile(rb"</metadata\s*>", re.IGNORECASE)


def strip_notes(file: BinaryIO, media_type: str | None, head: bytes, size: int) -> None:
    """Removes texts from formats other than PNG, JPEG and WebP. Raises ValueError, IndexError or struct.error for
    damaged files."""
    media_type = media_type or _document(head)
    if media_type in _WITHOUT and size <= PICTURE_BYTES_MAX:
        file.seek(0)
        _replace(file, _WITHOUT[media_type](file.read()))
    elif media_type in _OVERWRITE:
        _OVERWRITE[media_type](file, size)


def replace_prompt(path: Path, prompt: str) -> int:
    """Puts another prompt in the place of the one that ComfyUI wrote into a PNG. Its size afterwards.

    Other files stay as they are.
    """
    with path.open("r+b") as file:
        if (
            sniff_type(file.read(SNIFF_BYTES)) == "image/png"
            and file.seek(0, 2) <= PICTURE_BYTES_MAX
        ):
            file.seek(0)
            with contextlib.suppress(struct.error):  # damaged
                _replace(file, _png_with_prompt(file.read(), prompt.encode("ascii")))
        return file.seek(0, 2)


def _png_with_prompt(data: bytes, prompt: bytes) -> Stripped:
    kept, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        end = at + 12 + int(struct.unpack_from(">I", data, at)[0])
        kind, content = data[at + 4 : at + 8], data[at + 8 : end - 4]
        if kind == _PNG_MANIFEST:
            return bytearray(data)  # any change would break its signature
        if kind in _PNG_PLAIN_TEXTS and content.startswith(_PNG_PROMPT):
            part = kind + _PNG_PROMPT + prompt
            kept += struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
        else:
            kept += data[at:end]
        at = end
    return kept + data[at:]


def _document(head: bytes) -> str:
    """Models and drawings that ComfyUI saves: no media that can be uploaded, so not sniffed."""
    if head.startswith(b"glTF"):
        return "model/gltf-binary"
    return "image/svg+xml" if b"<svg" in head.lower() else ""


def _replace(file: BinaryIO, data: Stripped) -> None:
    file.seek(0)
    file.write(data)
    file.truncate()


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


def iso_boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int, int]]:
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
    for kind, _, inner, end in list(iso_boxes(file, 0, size)):
        if kind == b"moov":
            _free_notes(file, inner, end)


def _iso_picture(file: BinaryIO, size: int) -> None:
    """An animation has a film's boxes besides."""
    _movie(file, size)
    parts = _picture_boxes(file, size)
    if not parts:
        return
    iinf, iloc = (_read(file, *parts[name]) for name in (b"iinf", b"iloc") if name in parts)
    empty_items(file, iinf, iloc, parts.get(b"idat", (0, 0))[0])


def _picture_boxes(file: BinaryIO, size: int) -> dict[bytes, tuple[int, int]]:
    """Returns the boxes that describe the items of a picture, by kind: start and end of their content."""
    meta = next((each for each in iso_boxes(file, 0, size) if each[0] == b"meta"), None)
    if meta is None:
        return {}
    return {kind: (inner, end) for kind, _, inner, end in iso_boxes(file, meta[2] + 4, meta[3])}


def has_picture_notes(file: BinaryIO, size: int) -> bool:
    """Whether a picture of ISO boxes has items with Exif or XMP."""
    place = _picture_boxes(file, size).get(b"iinf")
    return place is not None and any(True for _ in _notes_in(_read(file, *place)))


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    if end - start > INDEX_BYTES_MAX:
        raise ValueError(end - start)
    file.seek(start)
    return file.read(end - start)


def _free_notes(file: BinaryIO, start: int, end: int) -> None:
    """Nothing moves: what the file says about places in it stays true."""
    for at, inner, until in list(note_boxes(file, start, end)):
        fill(file, at + 4, b"free", inner, until)


def note_boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the start, the start of the content and the end of each box with notes inside a film's header."""
    for kind, at, inner, until in list(iso_boxes(file, start, end)):
        if kind in _MOVIE_NOTES:
            yield at, inner, until
        elif kind in _MOVIE_BOXES:
            yield from note_boxes(file, inner, until)


def fill(file: BinaryIO, name_at: int, name: bytes, start: int, end: int) -> None:
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
                fill(file, at, _VOID + b"\x01" + length, at + 9, until)


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
            fill(file, at, bytes([head[0] & 0x80 | _FLAC_PADDING]), at + 4, end)
        at = end


def _mp3(file: BinaryIO, size: int) -> None:
    """The tag at its beginning becomes padding, that at its end is cut off."""
    file.seek(0)
    head = file.read(10)
    if head[:3] == b"ID3":
        length = sum(
            (byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True)
        )
        fill(file, 5, b"\0", 10, min(10 + length, size))
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
