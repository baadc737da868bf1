"""Reads the text metadata in PNG, JPEG and WebP files: their chunks, EXIF and XMP."""

import html
import re
from collections.abc import Iterator
from typing import Literal

from comfyfleet.workflow.embedded.reader import Budget, Damaged, Span, Text, labelled

PREFIX = b"Exif\0\0"
EXIF_DIRECTORY = 0x8769
USER_COMMENT = 0x9286
USER_COMMENT_PREFIX_BYTES = 8
ENTRY_BYTES = 12
# The EXIF types for text, which have one byte per item: BYTE, ASCII, UNDEFINED, UTF-8.
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


def exif_texts(block: Span, budget: Budget) -> Iterator[Text]:
    tiff = block.cut(len(PREFIX)) if block.peek(0, len(PREFIX)) == PREFIX else block
    order = BYTE_ORDERS.get(tiff.peek(0, 4))
    if order is None:
        return
    directories = [tiff.number(4, 4, order)]
    # At most two directories are read: the first one and the one it points to. So directories that
    # point to each other can't cause a loop.
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
        # An entry that points beyond the end doesn't invalidate the others.
        return
    name = TAG_NAMES.get(tag, f"EXIF tag 0x{tag:04x}")
    yield _user_comment(name, value) if tag == USER_COMMENT else labelled(name, value)


def _user_comment(name: str, value: Span) -> Text:
    """Decodes a UserComment. Its first eight bytes name the encoding, but some savers omit them."""
    prefix = value.peek(0, USER_COMMENT_PREFIX_BYTES)
    if prefix == b"UNICODE\0":
        encoding, mark_bytes = _utf16_or_utf8(value.peek(USER_COMMENT_PREFIX_BYTES, 2))
        return labelled(name, value.cut(USER_COMMENT_PREFIX_BYTES + mark_bytes), encoding)
    if prefix in (b"ASCII\0\0\0", b"JIS\0\0\0\0\0", bytes(USER_COMMENT_PREFIX_BYTES)):
        return labelled(name, value.cut(USER_COMMENT_PREFIX_BYTES))
    return labelled(name, value)


def _utf16_or_utf8(start: bytes) -> tuple[str, int]:
    """Returns the encoding, and the length of the byte order mark.

    The standard leaves the byte order open, and savers differ. JSON begins with an ASCII character,
    which reveals the order.
    """
    if start in BYTE_ORDER_MARKS:
        return BYTE_ORDER_MARKS[start], 2
    if start[:1] == b"\0":
        return "utf-16-be", 0
    return ("utf-16-le" if start[1:] == b"\0" else "utf-8"), 0


# Matches only the start of a property. Its end is searched for from there, so no input can make
# this slow.
_PROPERTY = re.compile(r"[<:\s](workflow|prompt)(>|=[\"'])", re.IGNORECASE)


def xmp_texts(packet: Span, budget: Budget) -> Iterator[Text]:
    xml = packet.copy(budget.limits).decode("utf-8", "replace")
    position = 0
    while position >= 0 and (start := _PROPERTY.search(xml, position)):
        budget.step()
        is_element = start[2] == ">"
        end = xml.find("</" if is_element else start[2][1], start.end())
        if end < 0:
            return
        yield Text(start[1], html.unescape(xml[start.end() : end]).strip())
        # The closing tag also contains the name.
        position = xml.find(">", end) if is_element else end


SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEYWORD_BYTES_MAX = 79
# In iTXt, a language and a translated keyword come between the keyword and the text.
ITXT_HEADER_BYTES_MAX = 1024
# The standard requires Latin-1, but savers that don't escape write UTF-8, which the editor reads.
LATIN1_OR_UTF8 = ("utf-8", "latin-1")


def is_png(head: bytes) -> bool:
    return head.startswith(SIGNATURE)


def png_size(png: Span) -> str:
    return f" {png.number(16, 4)}x{png.number(20, 4)}" if len(png) >= 24 else ""


def png_texts(png: Span, budget: Budget) -> Iterator[Text]:
    for kind, body in _png_chunks(png, budget):
        if kind in (b"tEXt", b"comf"):
            yield from _plain_text(body)
        elif kind == b"zTXt":
            yield from _compressed_text(body)
        elif kind == b"iTXt":
            yield from _international_text(body)
        elif kind == b"eXIf":
            yield from exif_texts(body, budget)


def _png_chunks(png: Span, budget: Budget) -> Iterator[tuple[bytes, Span]]:
    """Yields the kind and body of each chunk.

    Checksums are not verified. The editor doesn't verify them either, and damaged JSON is detected
    anyway.
    """
    offset = len(SIGNATURE)
    for _ in budget.steps():
        length, kind = png.number(offset, 4), png.take(offset + 4, 4)
        if kind == b"IEND":
            return
        yield kind, png.cut(offset + 8, length)
        offset += 12 + length


def _keyword(body: Span) -> bytes | None:
    keyword, separator, _ = body.peek(0, KEYWORD_BYTES_MAX + 1).partition(b"\0")
    return keyword if separator else None


def _plain_text(body: Span) -> Iterator[Text]:
    keyword = _keyword(body)
    if keyword:
        yield Text(keyword.decode("latin-1"), body.cut(len(keyword) + 1), LATIN1_OR_UTF8)


def _compressed_text(body: Span) -> Iterator[Text]:
    keyword = _keyword(body)
    if keyword:
        value = body.cut(len(keyword) + 2)
        yield Text(keyword.decode("latin-1"), value, LATIN1_OR_UTF8, deflated=True)


def _international_text(body: Span) -> Iterator[Text]:
    keyword = _keyword(body)
    if not keyword:
        return
    after = len(keyword) + 1
    names = body.peek(after + 2, ITXT_HEADER_BYTES_MAX).split(b"\0", 2)
    if len(names) < 3:
        raise Damaged(f"damaged in the text {keyword.decode('latin-1')!r}")
    language, translated, _ = names
    value = body.cut(after + 2 + len(language) + 1 + len(translated) + 1)
    yield Text(keyword.decode("latin-1"), value, deflated=body.number(after, 1) == 1)


XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\0"
APP1 = 0xE1
COMMENT = 0xFE
# Start of scan and end of image. No metadata follows these.
LAST_MARKERS = (0xDA, 0xD9)


def is_jpeg(head: bytes) -> bool:
    return head.startswith(b"\xff\xd8\xff")


def jpeg_texts(jpeg: Span, budget: Budget) -> Iterator[Text]:
    for marker, body in _segments(jpeg, budget):
        if marker == COMMENT:
            yield labelled("comment", body)
        elif marker == APP1 and body.peek(0, len(PREFIX)) == PREFIX:
            yield from exif_texts(body, budget)
        elif marker == APP1 and body.peek(0, len(XMP_PREFIX)) == XMP_PREFIX:
            yield from xmp_texts(body.cut(len(XMP_PREFIX)), budget)


def _segments(jpeg: Span, budget: Budget) -> Iterator[tuple[int, Span]]:
    offset = 2
    for _ in budget.steps():
        fill, marker = jpeg.take(offset, 2)
        if fill != 0xFF:
            raise Damaged(f"damaged at byte {offset:,}, where a segment should begin")
        if marker in LAST_MARKERS:
            return
        if marker == 0xFF:
            offset += 1
            continue
        length = jpeg.number(offset + 2, 2)
        yield marker, jpeg.cut(offset + 4, length - 2)
        offset += 2 + length


RIFF_HEADER_BYTES = 12


def is_webp(head: bytes) -> bool:
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP"


def webp_texts(webp: Span, budget: Budget) -> Iterator[Text]:
    for kind, body in _riff_chunks(webp, budget):
        if kind == b"EXIF":
            yield from exif_texts(body, budget)
        elif kind == b"XMP ":
            yield from xmp_texts(body, budget)


def _riff_chunks(webp: Span, budget: Budget) -> Iterator[tuple[bytes, Span]]:
    offset = RIFF_HEADER_BYTES
    while offset < len(webp):
        budget.step()
        length = webp.number(offset + 4, 4, "little")
        yield webp.take(offset, 4), webp.cut(offset + 8, length)
        offset += 8 + length + length % 2
