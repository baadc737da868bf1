"""JPEG. ComfyUI itself saves none; savers that do use EXIF, XMP or a comment, all in front of the picture."""

from collections.abc import Iterator

from comfyfleet.workflow.media import exif, xmp
from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Damaged, Span
from comfyfleet.workflow.media.text import Text, labelled

XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\0"
APP1 = 0xE1
COMMENT = 0xFE
# Start of scan and end of image: no metadata after these.
LAST_MARKERS = (0xDA, 0xD9)


def is_it(head: bytes) -> bool:
    return head.startswith(b"\xff\xd8\xff")


def texts(jpeg: Span, budget: Budget) -> Iterator[Text]:
    for marker, body in _segments(jpeg, budget):
        if marker == COMMENT:
            yield labelled("comment", body)
        elif marker == APP1 and body.peek(0, len(exif.PREFIX)) == exif.PREFIX:
            yield from exif.texts(body, budget)
        elif marker == APP1 and body.peek(0, len(XMP_PREFIX)) == XMP_PREFIX:
            yield from xmp.texts(body.cut(len(XMP_PREFIX)), budget)


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
