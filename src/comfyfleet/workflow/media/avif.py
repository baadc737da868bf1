"""AVIF and HEIF: one of the items that the `meta` box lists is EXIF."""

from collections.abc import Iterator

from comfyfleet.workflow.media import exif
from comfyfleet.workflow.media.boxes import boxes, first_box
from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Span
from comfyfleet.workflow.media.text import Text

BRANDS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix")
VERSION_AND_FLAGS_BYTES = 4


def is_it(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and head[8:12] in BRANDS


def texts(avif: Span, budget: Budget) -> Iterator[Text]:
    meta = first_box(avif, b"meta", budget)
    if meta is None:
        return
    parts = dict(boxes(meta.cut(VERSION_AND_FLAGS_BYTES), budget))
    if b"iinf" not in parts or b"iloc" not in parts:
        return
    wanted = set(_exif_items(parts[b"iinf"], budget))
    for item, from_idat, offset, length in _locations(parts[b"iloc"], budget):
        if item in wanted:
            place = parts.get(b"idat", avif) if from_idat else avif
            yield from _exif_texts(place.cut(offset, length), budget)


def _exif_texts(item: Span, budget: Budget) -> Iterator[Text]:
    """The item begins with the number of bytes between that number and the TIFF header."""
    yield from exif.texts(item.cut(4 + item.number(0, 4)), budget)


def _exif_items(iinf: Span, budget: Budget) -> Iterator[int]:
    count_bytes = 2 if iinf.number(0, 1) == 0 else 4
    for _, entry in boxes(iinf.cut(VERSION_AND_FLAGS_BYTES + count_bytes), budget):
        # Version 2 has short ids, version 3 long ones; those before have no types and no EXIF.
        id_bytes = 2 if entry.peek(0, 1) == b"\x02" else 4
        if entry.peek(VERSION_AND_FLAGS_BYTES + id_bytes + 2, 4) == b"Exif":
            yield entry.number(VERSION_AND_FLAGS_BYTES, id_bytes)


class _Fields:
    """Reads one number after the other; their sizes come from the file."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._offset = 0

    def next(self, size: int) -> int:
        number = self._span.number(self._offset, size)
        self._offset += size
        return number


def _locations(iloc: Span, budget: Budget) -> Iterator[tuple[int, bool, int, int]]:
    """Item, whether its offset counts from the `idat` box, offset and length of its first extent."""
    fields = _Fields(iloc)
    version = fields.next(VERSION_AND_FLAGS_BYTES) >> 24
    sizes = [fields.next(1), fields.next(1)]
    offset_bytes, length_bytes, base_bytes, index_bytes = (
        part for size in sizes for part in divmod(size, 16)
    )
    id_bytes = 2 if version < 2 else 4
    for _ in range(fields.next(id_bytes)):
        budget.step()
        item = fields.next(id_bytes)
        from_idat = version > 0 and fields.next(2) & 0xF == 1
        fields.next(2)  # which file the data is in: always this one
        base = fields.next(base_bytes)
        for extent in range(fields.next(2)):
            budget.step()
            fields.next(index_bytes if version > 0 else 0)
            offset, length = fields.next(offset_bytes), fields.next(length_bytes)
            if extent == 0:
                yield item, from_idat, base + offset, length
