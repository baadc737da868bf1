"""WebP, still or animated: a RIFF file whose EXIF chunk has the texts."""

from collections.abc import Iterator

from comfyfleet.workflow.media import exif, xmp
from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Span
from comfyfleet.workflow.media.text import Text

RIFF_HEADER_BYTES = 12


def is_it(head: bytes) -> bool:
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP"


def texts(webp: Span, budget: Budget) -> Iterator[Text]:
    for kind, body in _chunks(webp, budget):
        if kind == b"EXIF":
            yield from exif.texts(body, budget)
        elif kind == b"XMP ":
            yield from xmp.texts(body, budget)


def _chunks(webp: Span, budget: Budget) -> Iterator[tuple[bytes, Span]]:
    offset = RIFF_HEADER_BYTES
    while offset < len(webp):
        budget.step()
        length = webp.number(offset + 4, 4, "little")
        yield webp.take(offset, 4), webp.cut(offset + 8, length)
        offset += 8 + length + length % 2
