"""EXIF, a TIFF directory of numbered tags. ComfyUI writes `prompt:{…}` as the camera's model and `workflow:{…}` as
its make; other savers use the image description or the user comment."""

from collections.abc import Iterator
from typing import Literal

from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Damaged, Span
from comfyfleet.workflow.media.text import Text, labelled

PREFIX = b"Exif\0\0"
EXIF_DIRECTORY = 0x8769
USER_COMMENT = 0x9286
USER_COMMENT_PREFIX_BYTES = 8
ENTRY_BYTES = 12
# BYTE, ASCII, UNDEFINED, UTF-8: the types of texts, all one byte per item.
TEXT_TYPES = (1, 2, 7, 129)

TAG_NAMES = {
    0x010E: "ImageDescription",
    0x010F: "Make",
    0x0110: "Model",
    0x0131: "Software",
    0x013B: "Artist",
    0x8298: "Copyright",
    0x9286: "UserComment",
    0x9C9B: "XPTitle",
    0x9C9C: "XPComment",
    0x9C9E: "XPKeywords",
}

ByteOrder = Literal["big", "little"]
BYTE_ORDERS: dict[bytes, ByteOrder] = {b"II*\0": "little", b"MM\0*": "big"}

BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


def texts(block: Span, budget: Budget) -> Iterator[Text]:
    tiff = block.cut(len(PREFIX)) if block.peek(0, len(PREFIX)) == PREFIX else block
    order = BYTE_ORDERS.get(tiff.peek(0, 4))
    if order is None:
        return
    directories = [tiff.number(4, 4, order)]
    # Two at most, the first one and the one it points to, so directories that point at each other are no loop.
    for directory in directories:
        for tag, entry in _entries(tiff, directory, order, budget):
            if tag == EXIF_DIRECTORY and len(directories) == 1:
                directories.append(entry.number(8, 4, order))
            else:
                yield from _text(tiff, tag, entry, order)


def _entries(
    tiff: Span, directory: int, order: ByteOrder, budget: Budget
) -> Iterator[tuple[int, Span]]:
    for index in range(tiff.number(directory, 2, order)):
        budget.step()
        entry = tiff.cut(directory + 2 + index * ENTRY_BYTES, ENTRY_BYTES)
        yield entry.number(0, 2, order), entry


def _text(tiff: Span, tag: int, entry: Span, order: ByteOrder) -> Iterator[Text]:
    if entry.number(2, 2, order) not in TEXT_TYPES:
        return
    length = entry.number(4, 4, order)
    try:
        value = entry.cut(8, length) if length <= 4 else tiff.cut(entry.number(8, 4, order), length)
    except Damaged:
        # One entry that points beyond the end says nothing about the others.
        return
    name = TAG_NAMES.get(tag, f"EXIF tag 0x{tag:04x}")
    yield _user_comment(name, value) if tag == USER_COMMENT else labelled(name, value)


def _user_comment(name: str, value: Span) -> Text:
    """Its first eight bytes name the encoding, but some savers leave them out."""
    prefix = value.peek(0, USER_COMMENT_PREFIX_BYTES)
    if prefix == b"UNICODE\0":
        encoding, mark_bytes = _utf16_or_utf8(value.peek(USER_COMMENT_PREFIX_BYTES, 2))
        return labelled(name, value.cut(USER_COMMENT_PREFIX_BYTES + mark_bytes), encoding)
    if prefix in (b"ASCII\0\0\0", b"JIS\0\0\0\0\0", bytes(USER_COMMENT_PREFIX_BYTES)):
        return labelled(name, value.cut(USER_COMMENT_PREFIX_BYTES))
    return labelled(name, value)


def _utf16_or_utf8(start: bytes) -> tuple[str, int]:
    """Encoding, and the length of a byte order mark. The standard leaves the order open and savers differ; JSON
    begins with an ASCII character, which tells."""
    if start in BYTE_ORDER_MARKS:
        return BYTE_ORDER_MARKS[start], 2
    if start[:1] == b"\0":
        return "utf-16-be", 0
    return ("utf-16-le" if start[1:] == b"\0" else "utf-8"), 0
