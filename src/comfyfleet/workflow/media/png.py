"""PNG and APNG. ComfyUI writes `tEXt` chunks into images and its own `comf` chunks into animations."""

from collections.abc import Iterator

from comfyfleet.workflow.media import exif
from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Damaged, Span
from comfyfleet.workflow.media.text import Text

SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEYWORD_BYTES_MAX = 79
# iTXt puts a language and a translated keyword between the keyword and the text.
ITXT_HEADER_BYTES_MAX = 1024
# The standard says Latin-1; savers that don't escape write UTF-8, and the editor reads that.
LATIN1_OR_UTF8 = ("utf-8", "latin-1")


def is_it(head: bytes) -> bool:
    return head.startswith(SIGNATURE)


def size(png: Span) -> str:
    return f" {png.number(16, 4)}x{png.number(20, 4)}" if len(png) >= 24 else ""


def texts(png: Span, budget: Budget) -> Iterator[Text]:
    for kind, body in _chunks(png, budget):
        if kind in (b"tEXt", b"comf"):
            yield from _plain_text(body)
        elif kind == b"zTXt":
            yield from _compressed_text(body)
        elif kind == b"iTXt":
            yield from _international_text(body)
        elif kind == b"eXIf":
            yield from exif.texts(body, budget)


def _chunks(png: Span, budget: Budget) -> Iterator[tuple[bytes, Span]]:
    """Kind and body of each chunk. Checksums are not checked: the editor doesn't, and JSON shows damage itself."""
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
