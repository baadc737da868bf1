"""The boxes of MP4, QuickTime, AVIF and HEIF files. The files may be large, so notes are
overwritten in place.

No data moves, so that positions that a file contains remain correct. Only boxes of known kinds are
preserved. Damaged files raise ValueError, IndexError or struct.error.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import BinaryIO, NamedTuple

from comfyfleet.media import PartCount, TooManyParts

ZEROS = bytes(1024**2)
# maximum size of a box that lists the items of an image and their positions
INDEX_BYTES_MAX = 16 * 1024**2
XMP_UUID = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")
MANIFEST_UUID = bytes.fromhex("d8fec3d61b0e483c92975828877ec481")
DEPTH_MAX = 10
# position in the content of `hdlr`, after the version, the kind and reserved fields
HANDLER_NAME_AT = 24


class BoxRole(Enum):
    NOTE = 1
    XMP = 2
    MANIFEST = 3  # a C2PA manifest
    JUNK = 4  # data after the last box
    NAME = 5  # the text at the end of a handler box, which is preserved otherwise


class IsoBox(NamedTuple):
    start: int
    inner: int  # where the content begins; in a uuid box, after the id
    end: int

    @property
    def size(self) -> int:
        return self.end - self.inner


# The kinds of boxes that are preserved, by their parent box. The empty key is the file itself. All
# other keys are kinds that contain boxes.
_KEPT: Mapping[bytes, frozenset[bytes]] = {
    b"": frozenset({
        b"ftyp", b"styp", b"pdin", b"moov", b"moof", b"mdat", b"mfra", b"sidx", b"ssix", b"meta",
    }),
    b"moov": frozenset({b"mvhd", b"trak", b"mvex", b"iods", b"pssh", b"ctab"}),
    b"trak": frozenset({
        b"tkhd", b"mdia", b"edts", b"tref", b"trgr", b"tapt", b"clip", b"matt", b"load", b"imap",
    }),
    b"mdia": frozenset({b"mdhd", b"hdlr", b"minf", b"elng"}),
    b"minf": frozenset({
        b"vmhd", b"smhd", b"hmhd", b"nmhd", b"sthd", b"gmhd", b"hdlr", b"dinf", b"stbl",
    }),
    b"stbl": frozenset({
        b"stsd", b"stts", b"ctts", b"cslg", b"stsc", b"stsz", b"stz2", b"stco", b"co64", b"stss",
        b"stsh", b"stps", b"padb", b"stdp", b"sdtp", b"sbgp", b"sgpd", b"subs", b"saiz", b"saio",
        b"csgp",
    }),
    b"mvex": frozenset({b"mehd", b"trex", b"leva", b"trep"}),
    b"moof": frozenset({b"mfhd", b"traf", b"pssh"}),
    b"traf": frozenset({
        b"tfhd", b"trun", b"tfdt", b"sbgp", b"sgpd", b"subs", b"saiz", b"saio", b"senc", b"sdtp",
    }),
    # The `meta` box of an image.
    b"meta": frozenset({
        b"hdlr", b"pitm", b"iinf", b"iloc", b"iref", b"iprp", b"idat", b"grpl", b"dinf", b"ipro",
    }),
    b"iprp": frozenset({b"ipco", b"ipma"}),
}  # fmt: skip
# The properties of images include many kinds that decoding needs, so only notes are listed.
_NOTES_IN: Mapping[bytes, frozenset[bytes]] = {
    b"ipco": frozenset({b"udes", b"altt", b"uuid", b"udta", b"meta", b"free", b"skip"})
}
_CONTAINERS = frozenset({*_KEPT, *_NOTES_IN})
_KIND = re.compile(rb"[ -~]{4}")
_UUIDS: Mapping[bytes, BoxRole] = {XMP_UUID: BoxRole.XMP, MANIFEST_UUID: BoxRole.MANIFEST}
_CONTENT = frozenset({b"moov", b"moof"})


class IsoFile(NamedTuple):
    xmp: list[IsoBox]
    manifests: list[IsoBox]
    notes: list[IsoBox]
    names: list[IsoBox]
    junk: int | None  # where data after the last box begins
    last: IsoBox | None
    is_open_ended: bool  # the last box has no length of its own


def iso_boxes(
    file: BinaryIO, start: int, end: int, count: PartCount, *, is_file: bool = False
) -> Iterator[tuple[bytes, int, int, int]]:
    """Yields the kind, the start, the start of the content and the end of each box.

    If `is_file`, the data after the last box is yielded as well, with the kind b"".
    """
    while start + 8 <= end:
        count.add()
        file.seek(start)
        head = file.read(16)
        length, kind = struct.unpack(">I4s", head[:8])
        inner = start + (16 if length == 1 else 8)
        length = struct.unpack(">Q", head[8:16].ljust(8, b"\0"))[0] if length == 1 else length
        length = length or end - start
        if is_file and kind == b"mdat" and start + length > end >= inner:
            length = end - start  # the file was truncated inside its media data
        if length < inner - start or start + length > end or (is_file and not _KIND.match(kind)):
            if not is_file:
                raise ValueError(kind)
            yield b"", start, start, end
            return
        yield kind, start, inner, start + length
        start += length
    if is_file and start < end:
        yield b"", start, start, end


def read_iso(file: BinaryIO, size: int) -> IsoFile:
    """Finds the boxes to remove. Raises ValueError if the file contains neither a video nor an
    image."""
    boxes: dict[BoxRole, list[IsoBox]] = {role: [] for role in BoxRole}
    last: IsoBox | None = None
    is_open_ended = has_content = False
    count = PartCount(size)
    for kind, start, inner, end in iso_boxes(file, 0, size, count, is_file=True):
        if not kind:
            boxes[BoxRole.JUNK].append(IsoBox(start, inner, end))
            break
        last = IsoBox(start, inner, end)
        is_open_ended = _read(file, start, start + 4) == bytes(4)
        is_items = kind == b"meta" and _has_items(file, inner, end, count)
        has_content |= kind in _CONTENT or is_items
        if kind == b"meta" and not is_items:
            boxes[BoxRole.NOTE].append(last)
        else:
            for role, box in _sort(file, (kind, start, inner, end), b"", count):
                boxes[role].append(box)
    if not has_content:
        raise ValueError("the file is neither a video nor an image")
    junk = next((box.start for box in boxes[BoxRole.JUNK]), None)
    return IsoFile(
        boxes[BoxRole.XMP],
        boxes[BoxRole.MANIFEST],
        boxes[BoxRole.NOTE],
        boxes[BoxRole.NAME],
        junk,
        last,
        is_open_ended,
    )


def _sort(
    file: BinaryIO,
    box: tuple[bytes, int, int, int],
    parent: bytes,
    count: PartCount,
    depth: int = 0,
) -> Iterator[tuple[BoxRole, IsoBox]]:
    """Yields the parts to remove from a box and from the boxes inside it."""
    kind, start, inner, end = box
    if kind == b"cmov":
        raise ValueError("the header is compressed")
    role = _UUIDS.get(_read(file, inner, min(inner + 16, end))) if kind == b"uuid" else None
    if role is not None and not parent:
        yield role, IsoBox(start, inner + 16, end)
    elif not _is_kept(kind, parent):
        yield BoxRole.NOTE, IsoBox(start, inner, end)
    elif kind == b"hdlr" and inner + HANDLER_NAME_AT < end:
        yield BoxRole.NAME, IsoBox(start, inner + HANDLER_NAME_AT, end)
    elif kind in _CONTAINERS:
        if depth > DEPTH_MAX:
            raise ValueError("the boxes are nested too deeply")
        first = inner + 4 if kind == b"meta" else inner
        for child in iso_boxes(file, first, end, count):
            yield from _sort(file, child, kind, count, depth + 1)


def _is_kept(kind: bytes, parent: bytes) -> bool:
    if parent in _NOTES_IN:
        return kind not in _NOTES_IN[parent]
    return kind in _KEPT[parent]


def _has_items(file: BinaryIO, inner: int, end: int, count: PartCount) -> bool:
    """Checks whether a `meta` box describes an image. In a video, such a box contains notes."""
    try:
        boxes = {kind: at for kind, _, at, _ in iso_boxes(file, inner + 4, end, count)}
    except TooManyParts:
        raise
    except ValueError:
        return False
    at = boxes.get(b"hdlr")
    return b"iinf" in boxes if at is None else _read(file, at + 8, at + 12) == b"pict"


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    if end - start > INDEX_BYTES_MAX:
        raise ValueError(end - start)
    file.seek(start)
    return file.read(end - start)


def fill(file: BinaryIO, name_at: int, name: bytes, start: int, end: int) -> None:
    """Overwrites a part with zeros, and writes `name` to its header, which usually marks it as
    empty."""
    file.seek(name_at)
    file.write(name)
    blank(file, start, end)


def blank(file: BinaryIO, start: int, end: int) -> None:
    file.seek(start)
    for at in range(start, end, len(ZEROS)):
        file.write(ZEROS[: end - at])


# Images, whose notes are items anywhere in the file

# A directory without entries. Decoders refuse an image whose Exif item isn't Exif.
_EMPTY_EXIF = bytes(4) + b"II*\0" + struct.pack("<IHI", 8, 0, 0)
# Kinds of items with pixels. Items of other kinds contain notes.
_PIXEL_ITEMS = frozenset({
    b"av01", b"hvc1", b"hev1", b"lhv1", b"avc1", b"vvc1", b"evc1", b"jpeg", b"j2k1", b"unci",
    b"grid", b"iovl", b"iden", b"tmap", b"mask", b"hvt1",
})  # fmt: skip
ITEMS_MAX = 10_000
PLACES_MAX = 100_000
NOTES_BYTES_MAX = 256 * 1024 * 1024  # limit for all locations together


class _Place(NamedTuple):
    item: int
    method: int  # the base of the offset: 0 means the file, 1 the content of `idat`
    offset: int
    length: int


def strip_items(file: BinaryIO, size: int) -> None:
    """Overwrites the items with Exif, XMP and other notes."""
    parts = _picture_boxes(file, size)
    if parts:
        iinf, iloc = (_read(file, *parts[name]) for name in (b"iinf", b"iloc") if name in parts)
        empty_items(file, iinf, iloc, parts.get(b"idat", (0, 0))[0])


def has_picture_notes(file: BinaryIO, size: int) -> bool:
    """Checks whether an image with ISO boxes has items with notes."""
    place = _picture_boxes(file, size).get(b"iinf")
    return place is not None and any(True for _ in _notes_in(_read(file, *place)))


def _picture_boxes(file: BinaryIO, size: int) -> dict[bytes, tuple[int, int]]:
    """Returns the boxes that describe an image's items by kind, as the start and end of their
    content."""
    count = PartCount(size)
    for kind, _, inner, end in iso_boxes(file, 0, size, count, is_file=True):
        if kind == b"meta" and _has_items(file, inner, end, count):
            boxes = iso_boxes(file, inner + 4, end, count)
            return {name: (first, until) for name, _, first, until in boxes}
    return {}


def empty_items(file: BinaryIO, iinf: bytes, iloc: bytes, idat: int) -> None:
    """Overwrites the notes of an image. `iinf` and `iloc` are the contents of these boxes, and
    `idat` is the start of that box's content."""
    size = file.seek(0, 2)
    remaining = min(NOTES_BYTES_MAX, size)
    fillings = dict(_notes_in(iinf))
    places = islice((place for place in _places(iloc) if place.item in fillings), PLACES_MAX)
    for place in dict.fromkeys(places):
        if place.method > 1:
            raise ValueError(place)
        start = place.offset + (idat if place.method else 0)
        # The file must not grow because of a location beyond its end.
        length = min(place.length, size - start)
        if length <= 0:
            continue
        remaining -= length
        if remaining < 0:
            raise ValueError(place)
        filling = fillings[place.item]
        file.seek(start)
        file.write(filling[:length].ljust(length, b" " if not filling else b"\0"))


def _notes_in(iinf: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the items that contain notes, and the filling for each: Exif without entries, or
    blanks."""
    at = 6 if iinf[0] == 0 else 8
    for _ in range(ITEMS_MAX):
        if at + 8 > len(iinf):
            return
        length = int(struct.unpack_from(">I", iinf, at)[0])
        entry = iinf[at + 8 : at + length]
        if entry[0] < 2:
            raise ValueError("an item has no kind")
        id_bytes = 2 if entry[0] == 2 else 4
        kind = entry[6 + id_bytes : 10 + id_bytes]
        if kind not in _PIXEL_ITEMS:
            number = int.from_bytes(entry[4 : 4 + id_bytes], "big")
            yield number, _EMPTY_EXIF if kind == b"Exif" else b""
        at += max(length, 8)
    raise ValueError("the file has too many items")


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
        method = number(2) & 0xF if version > 0 else 0
        number(2)  # index of the file with the data: always this file
        base = number(sizes[2])
        for _ in range(number(2)):
            number(sizes[3] if version > 0 else 0)
            offset, length = number(sizes[0]), number(sizes[1])
            yield _Place(item, method, base + offset, length)
