"""WebM and Matroska: `Tags`, usually in front of the frames, sometimes behind them."""

from collections.abc import Iterator

from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Damaged, Span
from comfyfleet.workflow.media.text import Text

SIGNATURE = b"\x1a\x45\xdf\xa3"
SEGMENT = 0x18538067
TAGS = 0x1254C367
TAG = 0x7373
SIMPLE_TAG = 0x67C8
TAG_NAME = 0x45A3
TAG_STRING = 0x4487
NAME_BYTES_MAX = 256


def is_it(head: bytes) -> bool:
    return head.startswith(SIGNATURE)


def texts(file: Span, budget: Budget) -> Iterator[Text]:
    for segment in _bodies(file, SEGMENT, budget):
        for tags in _bodies(segment, TAGS, budget):
            for tag in _bodies(tags, TAG, budget):
                for simple in _bodies(tag, SIMPLE_TAG, budget):
                    yield from _text(simple, budget)


def _text(simple: Span, budget: Budget) -> Iterator[Text]:
    parts = dict(_elements(simple, budget))
    if TAG_NAME in parts and TAG_STRING in parts:
        yield Text(
            parts[TAG_NAME].peek(0, NAME_BYTES_MAX).decode("utf-8", "replace"), parts[TAG_STRING]
        )


def _bodies(parent: Span, wanted: int, budget: Budget) -> Iterator[Span]:
    return (body for element, body in _elements(parent, budget) if element == wanted)


def _elements(parent: Span, budget: Budget) -> Iterator[tuple[int, Span]]:
    """Id and body of each child. Recorders that can't go back leave sizes unknown: such a child lasts to the end,
    and is walked into, because what follows it can't be told from what is in it."""
    offset = 0
    while offset < len(parent):
        budget.step()
        element, id_bytes = _variable_number(parent, offset)
        size, size_bytes = _variable_number(parent, offset + id_bytes)
        start = offset + id_bytes + size_bytes
        value = size - (1 << 7 * size_bytes)
        if value == (1 << 7 * size_bytes) - 1:
            yield element, parent.cut(start)
            offset = start
        else:
            yield element, parent.cut(start, value)
            offset = start + value


def _variable_number(span: Span, offset: int) -> tuple[int, int]:
    """A number and how many bytes it takes; the first set bit, kept in the number, tells."""
    size = 9 - span.number(offset, 1).bit_length()
    if size > 8:
        raise Damaged(f"damaged at byte {span.start + offset:,}, where an element should begin")
    return span.number(offset, size), size
