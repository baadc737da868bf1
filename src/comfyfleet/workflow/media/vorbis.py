"""Vorbis comments, the `KEY=value` texts of FLAC, Ogg and Opus."""

from collections.abc import Iterator

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Damaged, Span
from comfyfleet.workflow.media.text import Text

KEY_BYTES_MAX = 256
FLAC_SIGNATURE = b"fLaC"
FLAC_COMMENT_BLOCK = 4
OGG_SIGNATURE = b"OggS"
OGG_PAGE_HEADER_BYTES = 27
# What the second packet of a stream begins with: Vorbis, Opus, Theora, FLAC in Ogg (a block header).
OGG_COMMENT_PREFIXES = (
    (b"\x03vorbis", 7),
    (b"OpusTags", 8),
    (b"\x81theora", 7),
    (b"\x04", 4),
    (b"\x84", 4),
)


def is_flac(head: bytes) -> bool:
    return head.startswith(FLAC_SIGNATURE)


def is_ogg(head: bytes) -> bool:
    return head.startswith(OGG_SIGNATURE)


def flac_texts(flac: Span, budget: Budget) -> Iterator[Text]:
    offset, last = len(FLAC_SIGNATURE), False
    while not last:
        budget.step()
        kind, length = flac.number(offset, 1), flac.number(offset + 1, 3)
        body, last = flac.cut(offset + 4, length), bool(kind & 0x80)
        if kind & 0x7F == FLAC_COMMENT_BLOCK:
            yield from _comments(body, budget)
        offset += 4 + length


def ogg_texts(ogg: Span, budget: Budget) -> Iterator[Text]:
    packets = _first_packets(ogg, budget)
    next(packets, None)
    packet = next(packets, b"")
    skip = next((length for prefix, length in OGG_COMMENT_PREFIXES if packet.startswith(prefix)), 0)
    yield from _comments(Span.of(packet[skip:]), budget)


def _comments(block: Span, budget: Budget) -> Iterator[Text]:
    offset = 4 + block.number(0, 4, "little")
    count, offset = block.number(offset, 4, "little"), offset + 4
    for _ in range(count):
        budget.step()
        length = block.number(offset, 4, "little")
        comment = block.cut(offset + 4, length)
        key, separator, _ = comment.peek(0, KEY_BYTES_MAX).partition(b"=")
        if separator:
            yield Text(key.decode("utf-8", "replace"), comment.cut(len(key) + 1))
        offset += 4 + length


def _first_packets(ogg: Span, budget: Budget) -> Iterator[bytes]:
    """Packets of the stream that comes first. A packet lasts until a segment of less than 255 bytes."""
    parts: list[bytes] = []
    size = 0
    for segment in _segments(ogg, budget):
        parts.append(segment.take(0, len(segment)))
        size += len(segment)
        if size > budget.limits.metadata_bytes:
            raise LimitExceeded(
                f"The metadata has more than {budget.limits.metadata_bytes:,} bytes.",
                limit=budget.limits.metadata_bytes,
            )
        if len(segment) < 255:
            yield b"".join(parts)
            parts, size = [], 0


def _segments(ogg: Span, budget: Budget) -> Iterator[Span]:
    stream = ogg.peek(14, 4)
    offset = 0
    while offset < len(ogg):
        budget.step()
        if ogg.take(offset, 4) != OGG_SIGNATURE:
            raise Damaged(f"damaged at byte {offset:,}, where a page should begin")
        lacing = ogg.take(offset + OGG_PAGE_HEADER_BYTES, ogg.number(offset + 26, 1))
        wanted = ogg.take(offset + 14, 4) == stream
        offset += OGG_PAGE_HEADER_BYTES + len(lacing)
        for length in lacing:
            if wanted:
                yield ogg.cut(offset, length)
            offset += length
