"""MP3: the ID3v2 tag in front of the sound. FFmpeg (ComfyUI) writes `TXXX` frames, which have a name and a text."""

from collections.abc import Iterator

from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Span
from comfyfleet.workflow.media.text import Text

HEADER_BYTES = 10
NAME_BYTES_MAX = 512
# The four layers and rates that occur; the sound itself has no texts.
FRAME_SYNCS = (b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2")
ENCODINGS = ("latin-1", "utf-16", "utf-16-be", "utf-8")
NAMED_FRAMES = (b"TXXX", b"TXX")
COMMENT_FRAMES = (b"COMM", b"COM")
LANGUAGE_BYTES = 3

UNSYNCHRONISED = 0x80
EXTENDED_HEADER = 0x40
FRAME_COMPRESSED_OR_ENCRYPTED = 0x0C
FRAME_UNSYNCHRONISED = 0x02
FRAME_HAS_LENGTH = 0x01


def is_it(head: bytes) -> bool:
    return head.startswith((b"ID3", *FRAME_SYNCS))


def texts(mp3: Span, budget: Budget) -> Iterator[Text]:
    if mp3.peek(0, 3) != b"ID3":
        return
    version, flags = mp3.number(3, 1), mp3.number(5, 1)
    tag = mp3.cut(HEADER_BYTES, _seven_bit_number(mp3.take(6, 4)))
    if flags & UNSYNCHRONISED and version < 4:
        tag = _resynchronised(tag, budget)
    start = _extended_header_bytes(tag, version) if flags & EXTENDED_HEADER else 0
    for kind, body in _frames(tag.cut(start), version, budget):
        yield from _text(kind, body)


def _frames(tag: Span, version: int, budget: Budget) -> Iterator[tuple[bytes, Span]]:
    """Kind and body of each frame; zeros after the last one are padding."""
    id_bytes = 3 if version == 2 else 4
    header = 2 * id_bytes if version == 2 else HEADER_BYTES
    offset = 0
    while offset + header < len(tag) and tag.number(offset, 1):
        budget.step()
        size = tag.take(offset + id_bytes, id_bytes)
        length = _seven_bit_number(size) if version == 4 else int.from_bytes(size)
        flags = tag.number(offset + 9, 1) if version == 4 else 0
        body = tag.cut(offset + header, length)
        if not flags & FRAME_COMPRESSED_OR_ENCRYPTED:
            yield tag.take(offset, id_bytes), _plain_frame(body, flags, budget)
        offset += header + length


def _plain_frame(body: Span, flags: int, budget: Budget) -> Span:
    body = body.cut(4) if flags & FRAME_HAS_LENGTH else body
    return _resynchronised(body, budget) if flags & FRAME_UNSYNCHRONISED else body


def _text(kind: bytes, body: Span) -> Iterator[Text]:
    code = int.from_bytes(body.peek(0, 1))
    if code >= len(ENCODINGS) or not len(body):
        return
    encoding = ENCODINGS[code]
    if kind in NAMED_FRAMES:
        name, value = _split_name(body.cut(1), encoding)
        yield Text(name, value, (encoding,))
    elif kind in COMMENT_FRAMES and len(body) > LANGUAGE_BYTES:
        name, value = _split_name(body.cut(1 + LANGUAGE_BYTES), encoding)
        yield Text(name or "comment", value, (encoding,))
    elif kind.startswith(b"T"):
        yield Text(kind.decode("latin-1"), body.cut(1), (encoding,))


def _split_name(body: Span, encoding: str) -> tuple[str, Span]:
    width = 2 if encoding.startswith("utf-16") else 1
    head = body.peek(0, NAME_BYTES_MAX)
    ends = (at for at in range(0, len(head), width) if head[at : at + width] == bytes(width))
    end = next(ends, len(head))
    return head[:end].decode(encoding, "replace"), body.cut(min(end + width, len(body)))


def _extended_header_bytes(tag: Span, version: int) -> int:
    return _seven_bit_number(tag.take(0, 4)) if version == 4 else 4 + tag.number(0, 4)


def _seven_bit_number(data: bytes) -> int:
    """Sizes avoid the byte 0xFF, which players take for the start of sound."""
    number = 0
    for byte in data:
        number = number << 7 | byte & 0x7F
    return number


def _resynchronised(span: Span, budget: Budget) -> Span:
    """The same rule for contents: a zero was put after every 0xFF."""
    return Span.of(span.copy(budget.limits).replace(b"\xff\x00", b"\xff"))
