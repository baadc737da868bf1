"""MP4, MOV and M4V. FFmpeg with `use_metadata_tags` (ComfyUI, VideoHelperSuite) writes named keys into `meta`;
without it, as older VideoHelperSuites did, the JSON is the comment."""

from collections.abc import Iterator

from comfyfleet.workflow.media.boxes import boxes, first_box
from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Span
from comfyfleet.workflow.media.text import Text

# Files of the first QuickTime have no `ftyp` in front; a zero, the start of a plausible size, then tells them from
# a text that happens to have such a word.
OLD_FIRST_BOXES = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
VERSION_AND_FLAGS_BYTES = 4
UTF16_TYPE = 2

ITEM_NAMES = {
    b"\xa9cmt": "comment",
    b"\xa9des": "description",
    b"desc": "description",
    b"\xa9too": "encoder",
}


def is_it(head: bytes) -> bool:
    return head[4:8] == b"ftyp" or (head[4:8] in OLD_FIRST_BOXES and head[0] == 0)


def texts(movie: Span, budget: Budget) -> Iterator[Text]:
    for kind, body in boxes(movie, budget):
        if kind == b"moov":
            for part, content in boxes(body, budget):
                yield from _texts_of(part, content, budget)
        else:
            yield from _texts_of(kind, body, budget)


def _texts_of(kind: bytes, body: Span, budget: Budget) -> Iterator[Text]:
    if kind == b"udta":
        yield from _texts_of_user_data(body, budget)
    elif kind == b"meta":
        yield from _texts_of_meta(body, budget)


def _texts_of_user_data(udta: Span, budget: Budget) -> Iterator[Text]:
    for kind, body in boxes(udta, budget):
        if kind == b"meta":
            yield from _texts_of_meta(body, budget)
        elif kind.startswith(b"\xa9") and len(body) >= 4:
            # QuickTime's own form: a length and a language in front of the text.
            yield Text(_item_name(kind), body.cut(4, body.number(0, 2)))


def _texts_of_meta(meta: Span, budget: Budget) -> Iterator[Text]:
    # In MP4 a version comes before the boxes, in QuickTime none.
    start = 0 if meta.peek(4, 4) == b"hdlr" else VERSION_AND_FLAGS_BYTES
    parts = dict(boxes(meta.cut(start), budget))
    if b"ilst" not in parts:
        return
    names = list(_key_names(parts[b"keys"], budget)) if b"keys" in parts else []
    for kind, item in boxes(parts[b"ilst"], budget):
        index = int.from_bytes(kind)
        name = names[index - 1] if 0 < index <= len(names) else _item_name(kind)
        yield from _texts_of_item(name, item, budget)


def _key_names(keys: Span, budget: Budget) -> Iterator[str]:
    """Keys are stored like boxes: a size, a namespace, the name."""
    for _namespace, name in boxes(keys.cut(VERSION_AND_FLAGS_BYTES + 4), budget):
        yield name.peek(0, 256).decode("utf-8", "replace")


def _texts_of_item(name: str, item: Span, budget: Budget) -> Iterator[Text]:
    own_name = first_box(item, b"name", budget) if name == "----" else None
    if own_name is not None:
        name = own_name.peek(VERSION_AND_FLAGS_BYTES, 256).decode("utf-8", "replace")
    data = first_box(item, b"data", budget)
    if data is not None and len(data) >= 8:
        encoding = "utf-16-be" if data.number(0, 4) == UTF16_TYPE else "utf-8"
        yield Text(name, data.cut(8), (encoding,))


def _item_name(kind: bytes) -> str:
    return ITEM_NAMES.get(kind, kind.decode("latin-1"))
