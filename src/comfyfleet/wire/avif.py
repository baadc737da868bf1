"""Empties the items of an AVIF or HEIF picture that hold Exif and XMP. Blocking.

Nothing moves: the `iloc` box names places in the file, of the picture's own data among them.
"""

import struct
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO, NamedTuple

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
