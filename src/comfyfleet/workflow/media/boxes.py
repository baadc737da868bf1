"""The boxes of MP4, MOV and AVIF: a size, four letters, and a body that may be boxes again."""

from collections.abc import Iterator

from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Damaged, Span

HEADER_BYTES = 8
LONG_HEADER_BYTES = 16


def boxes(span: Span, budget: Budget) -> Iterator[tuple[bytes, Span]]:
    """Kind and body of each box. Up to seven bytes may be left over: QuickTime ends some lists with a zero."""
    offset = 0
    while offset + HEADER_BYTES <= len(span):
        budget.step()
        header, size = HEADER_BYTES, span.number(offset, 4)
        if size == 1:
            header, size = LONG_HEADER_BYTES, span.number(offset + HEADER_BYTES, 8)
        elif size == 0:
            size = len(span) - offset
        if size < header:
            raise Damaged(
                f"damaged at byte {span.start + offset:,}, where a box is smaller than its header"
            )
        yield span.take(offset + 4, 4), span.cut(offset + header, size - header)
        offset += size


def first_box(span: Span, kind: bytes, budget: Budget) -> Span | None:
    return next((body for each, body in boxes(span, budget) if each == kind), None)
