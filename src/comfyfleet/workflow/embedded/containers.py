"""Reads the text metadata in container files: AVIF, HEIF, MP4, MOV, WebM, Matroska, GLB, SVG,
safetensors, MP3 (ID3v2), FLAC, Ogg and Opus (Vorbis comments)."""

from collections.abc import Iterator
from typing import Any

from comfyfleet.errors import LimitExceeded
from comfyfleet.workflow.embedded import images
from comfyfleet.workflow.embedded.reader import Budget, Damaged, Span, Text, parse_json

HEADER_BYTES = 8
LONG_HEADER_BYTES = 16


def boxes(span: Span, budget: Budget) -> Iterator[tuple[bytes, Span]]:
    """Yields the kind and body of each box.

    Up to seven bytes may remain at the end, because QuickTime ends some lists with a zero.
    """
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
    return next((body for box_kind, body in boxes(span, budget) if box_kind == kind), None)


BRANDS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix")
VERSION_AND_FLAGS_BYTES = 4


def is_avif(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and head[8:12] in BRANDS


def avif_texts(avif: Span, budget: Budget) -> Iterator[Text]:
    meta = first_box(avif, b"meta", budget)
    if meta is None:
        return
    parts = dict(boxes(meta.cut(VERSION_AND_FLAGS_BYTES), budget))
    if b"iinf" not in parts or b"iloc" not in parts:
        return
    exif_ids = set(_exif_items(parts[b"iinf"], budget))
    for item, from_idat, offset, length in _locations(parts[b"iloc"], budget):
        if item in exif_ids:
            place = parts.get(b"idat", avif) if from_idat else avif
            yield from _exif_texts(place.cut(offset, length), budget)


def _exif_texts(item: Span, budget: Budget) -> Iterator[Text]:
    """Yields the text metadata of an EXIF item.

    The item begins with the number of bytes between this number and the TIFF header.
    """
    yield from images.exif_texts(item.cut(4 + item.number(0, 4)), budget)


def _exif_items(iinf: Span, budget: Budget) -> Iterator[int]:
    count_bytes = 2 if iinf.number(0, 1) == 0 else 4
    for _, entry in boxes(iinf.cut(VERSION_AND_FLAGS_BYTES + count_bytes), budget):
        # Version 2 has short ids and version 3 has long ids. Earlier versions have no types and
        # therefore no EXIF.
        id_bytes = 2 if entry.peek(0, 1) == b"\x02" else 4
        if entry.peek(VERSION_AND_FLAGS_BYTES + id_bytes + 2, 4) == b"Exif":
            yield entry.number(VERSION_AND_FLAGS_BYTES, id_bytes)


class _Fields:
    """Reads consecutive numbers whose sizes are specified in the file."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._offset = 0

    def next(self, size: int) -> int:
        number = self._span.number(self._offset, size)
        self._offset += size
        return number


def _locations(iloc: Span, budget: Budget) -> Iterator[tuple[int, bool, int, int]]:
    """Yields for each item its id, whether its offset is relative to the `idat` box, and the offset
    and length of its first extent."""
    fields = _Fields(iloc)
    version = fields.next(VERSION_AND_FLAGS_BYTES) >> 24
    sizes = [fields.next(1), fields.next(1)]
    offset_bytes, length_bytes, base_bytes, index_bytes = (
        part for size in sizes for part in divmod(size, 16)
    )
    id_bytes = 2 if version < 2 else 4
    for _ in range(fields.next(id_bytes)):
        budget.step()
        item = fields.next(id_bytes)
        from_idat = version > 0 and fields.next(2) & 0xF == 1
        fields.next(2)  # index of the file with the data: always this file
        base = fields.next(base_bytes)
        for extent in range(fields.next(2)):
            budget.step()
            fields.next(index_bytes if version > 0 else 0)
            offset, length = fields.next(offset_bytes), fields.next(length_bytes)
            if extent == 0:
                yield item, from_idat, base + offset, length


# Early QuickTime files begin with one of these boxes instead of `ftyp`. Their first byte is zero,
# because it begins the box's size, which distinguishes them from text files with one of these
# words.
OLD_FIRST_BOXES = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
UTF16_TYPE = 2

ITEM_NAMES = {
    b"\xa9cmt": "comment",
    b"\xa9des": "description",
    b"desc": "description",
    b"\xa9too": "encoder",
}


def is_mp4(head: bytes) -> bool:
    return head[4:8] == b"ftyp" or (head[4:8] in OLD_FIRST_BOXES and head[0] == 0)


def mp4_texts(movie: Span, budget: Budget) -> Iterator[Text]:
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
            # QuickTime's own format: a length and a language before the text.
            yield Text(_item_name(kind), body.cut(4, body.number(0, 2)))


def _texts_of_meta(meta: Span, budget: Budget) -> Iterator[Text]:
    # In MP4, a version precedes the boxes. In QuickTime, it doesn't.
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
    """Yields the names of the keys. They are stored like boxes: a size, a namespace and the
    name."""
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


SIGNATURE = b"\x1a\x45\xdf\xa3"
SEGMENT = 0x18538067
TAGS = 0x1254C367
TAG = 0x7373
SIMPLE_TAG = 0x67C8
TAG_NAME = 0x45A3
TAG_STRING = 0x4487
TAG_NAME_BYTES_MAX = 256
MATROSKA_CRC_BYTES = 6  # the checksum element at the start of the tags


def is_matroska(head: bytes) -> bool:
    return head.startswith(SIGNATURE)


def matroska_texts(file: Span, budget: Budget) -> Iterator[Text]:
    for tags in matroska_tags(file, budget):
        for tag in _bodies(tags, TAG, budget):
            for simple in _bodies(tag, SIMPLE_TAG, budget):
                yield from _text(simple, budget)


def matroska_tags(file: Span, budget: Budget) -> Iterator[Span]:
    for segment in _bodies(file, SEGMENT, budget):
        yield from _bodies(segment, TAGS, budget)


def _text(simple: Span, budget: Budget) -> Iterator[Text]:
    parts = dict(_elements(simple, budget))
    if TAG_NAME in parts and TAG_STRING in parts:
        yield Text(
            parts[TAG_NAME].peek(0, TAG_NAME_BYTES_MAX).decode("utf-8", "replace"),
            parts[TAG_STRING],
        )


def _bodies(parent: Span, element_id: int, budget: Budget) -> Iterator[Span]:
    return (body for element, body in _elements(parent, budget) if element == element_id)


def _elements(parent: Span, budget: Budget) -> Iterator[tuple[int, Span]]:
    """Yields the id and body of each child.

    Recorders that can't seek leave sizes unknown. Such a child extends to the end of its parent,
    and its content is read as siblings, because the two can't be distinguished.
    """
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
    """Returns a variable-length number and its length in bytes. The first set bit determines the
    length, and remains part of the number."""
    size = 9 - span.number(offset, 1).bit_length()
    if size > 8:
        raise Damaged(f"damaged at byte {span.start + offset:,}, where an element should begin")
    return span.number(offset, size), size


GLB_HEADER_BYTES = 12
# No real model has a larger header. The limit also ensures that the length can't look like text.
SAFETENSORS_HEADER_BYTES_MAX = 2**32 - 1


def is_glb(head: bytes) -> bool:
    return head.startswith(b"glTF")


def is_safetensors(head: bytes) -> bool:
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= SAFETENSORS_HEADER_BYTES_MAX


def is_svg(head: bytes) -> bool:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return start.startswith(b"<svg") or (
        start.startswith((b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in start
    )


def glb_texts(glb: Span, budget: Budget) -> Iterator[Text]:
    """Yields the metadata that ComfyUI stores in `asset.extras` of the first chunk, which is
    JSON."""
    if glb.take(GLB_HEADER_BYTES + 4, 4) != b"JSON":
        raise Damaged(f"damaged at byte {GLB_HEADER_BYTES}, where the JSON should begin")
    chunk = glb.cut(GLB_HEADER_BYTES + 8, glb.number(GLB_HEADER_BYTES, 4, "little"))
    value = _json(chunk, "the JSON of the GLB", budget)
    yield from _members(_member(_member(value, "asset"), "extras"))


def safetensors_texts(file: Span, budget: Budget) -> Iterator[Text]:
    header = file.cut(8, file.number(0, 8, "little"))
    value = _json(header, "the header of the safetensors file", budget)
    yield from _members(_member(value, "__metadata__"))


def svg_texts(svg: Span, budget: Budget) -> Iterator[Text]:
    """Yields the metadata that ComfyUI stores as one JSON document in `<metadata><![CDATA[…]]>`."""
    xml = svg.peek(0, budget.limits.metadata_bytes)
    end = 0
    while (start := xml.find(b"<metadata", end)) >= 0:
        budget.step()
        end = xml.find(b"</metadata", start)
        if end < 0:
            raise Damaged("damaged or truncated in its metadata")
        opening, closing = xml.find(b"<![CDATA[", start, end), xml.rfind(b"]]>", start, end)
        if opening >= 0:
            yield Text("metadata", svg.cut(opening + 9, max(0, closing - opening - 9)))


def _json(span: Span, what: str, budget: Budget) -> Any:
    return parse_json(span.copy(budget.limits), what=what, limits=budget.limits)


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _members(value: Any) -> Iterator[Text]:
    for key in value if isinstance(value, dict) else ():
        if isinstance(value[key], str | dict):
            yield Text(key, value[key])


ID3_HEADER_BYTES = 10
ID3_NAME_BYTES_MAX = 512
# The four combinations of layer and protection that occur. MPEG audio frames contain no text
# metadata.
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


def is_mp3(head: bytes) -> bool:
    return head.startswith((b"ID3", *FRAME_SYNCS))


def mp3_texts(mp3: Span, budget: Budget) -> Iterator[Text]:
    if mp3.peek(0, 3) != b"ID3":
        return
    version, flags = mp3.number(3, 1), mp3.number(5, 1)
    tag = mp3.cut(ID3_HEADER_BYTES, _seven_bit_number(mp3.take(6, 4)))
    if flags & UNSYNCHRONISED and version < 4:
        tag = _resynchronised(tag, budget)
    start = _extended_header_bytes(tag, version) if flags & EXTENDED_HEADER else 0
    for kind, body in _frames(tag.cut(start), version, budget):
        yield from _id3_text(kind, body)


def _frames(tag: Span, version: int, budget: Budget) -> Iterator[tuple[bytes, Span]]:
    """Yields the kind and body of each frame. Zeros after the last frame are padding."""
    id_bytes = 3 if version == 2 else 4
    header = 2 * id_bytes if version == 2 else ID3_HEADER_BYTES
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


def _id3_text(kind: bytes, body: Span) -> Iterator[Text]:
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
    head = body.peek(0, ID3_NAME_BYTES_MAX)
    ends = (at for at in range(0, len(head), width) if head[at : at + width] == bytes(width))
    end = next(ends, len(head))
    return head[:end].decode(encoding, "replace"), body.cut(min(end + width, len(body)))


def _extended_header_bytes(tag: Span, version: int) -> int:
    return _seven_bit_number(tag.take(0, 4)) if version == 4 else 4 + tag.number(0, 4)


def _seven_bit_number(data: bytes) -> int:
    """Parses a size that uses 7 bits per byte. This avoids 0xFF, which players interpret as the
    start of audio."""
    number = 0
    for byte in data:
        number = number << 7 | byte & 0x7F
    return number


def _resynchronised(span: Span, budget: Budget) -> Span:
    """Removes the zero that was inserted after every 0xFF in the content. It prevents players from
    mistaking content for the start of audio."""
    return Span.of(span.copy(budget.limits).replace(b"\xff\x00", b"\xff"))


KEY_BYTES_MAX = 256
FLAC_SIGNATURE = b"fLaC"
FLAC_COMMENT_BLOCK = 4
OGG_SIGNATURE = b"OggS"
OGG_PAGE_HEADER_BYTES = 27
# The beginning of a stream's second packet, and the number of bytes before the comments: Vorbis,
# Opus, Theora, FLAC in Ogg (a block header).
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
    """Yields the packets of the first stream. A packet ends with a segment of less than 255
    bytes."""
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
        is_first_stream = ogg.take(offset + 14, 4) == stream
        offset += OGG_PAGE_HEADER_BYTES + len(lacing)
        for length in lacing:
            if is_first_stream:
                yield ogg.cut(offset, length)
            offset += length
