"""Prepares files for customers: removes prompts and workflows, and keeps or adds the mark of files made by AI.

The mark is XMP with the IPTC property DigitalSourceType. Files are not encoded again, and what can't be parsed
stays as it is. These functions block.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

from comfyfleet.media import (
    PICTURE_BYTES_MAX,
    SNIFF_BYTES,
    fill,
    has_picture_notes,
    iso_boxes,
    note_boxes,
    picture_size,
    sniff_type,
    strip_notes,
)


class SourceType(StrEnum):
    """How a file was made, in the words of IPTC's vocabulary."""

    GENERATED = "trainedAlgorithmicMedia"
    EDITED = "compositeWithTrainedAlgorithmicMedia"


class Prepared(NamedTuple):
    size: int
    # A C2PA manifest was removed, because the file also contained a prompt or workflow.
    lost_manifest: bool = False


def strip_metadata(path: Path) -> int:
    """Removes prompts and workflows, and keeps an existing mark. Returns the size of the file."""
    return prepare_file(path).size


def prepare_file(path: Path, *, mark: str | None = None, strips: bool = True) -> Prepared:
    """Prepares a file in place. `mark` is added if the file has none.

    Without `strips`, all metadata stay, and a mark is added only to a file that has neither XMP nor a C2PA manifest.
    """
    with path.open("r+b") as file:
        head = file.read(SNIFF_BYTES)
        media_type = sniff_type(head)
        size = file.seek(0, 2)
        try:
            lost_manifest = _prepare(file, media_type, head, size, Wish(mark, strips))
        except (struct.error, IndexError, ValueError, RecursionError):
            lost_manifest = False  # damaged, or of an unknown variant
        return Prepared(file.seek(0, 2), lost_manifest)


class Wish(NamedTuple):
    mark: str | None
    strips: bool


def _prepare(file: BinaryIO, media_type: str | None, head: bytes, size: int, wish: Wish) -> bool:
    if media_type in _PICTURES:
        if size > PICTURE_BYTES_MAX:
            return False
        file.seek(0)
        return _prepare_picture(file, file.read(), _PICTURES[media_type], wish)
    if media_type in _ISO_TYPES:
        return _prepare_iso(file, media_type, head, size, wish)
    if wish.strips:
        strip_notes(file, media_type, head, size)
    return False


# What was found in the parts of a file


class PartRole(Enum):
    KEPT = 0
    NOTE = 1  # texts, Exif, comments
    COMPRESSED = 2  # a text that can't be searched
    XMP = 3
    MANIFEST = 4  # of C2PA


class Part(NamedTuple):
    role: PartRole
    start: int
    end: int


def _in_both_encodings(*words: bytes) -> tuple[bytes, ...]:
    """Returns words also in UTF-16, which Exif uses."""
    return (*words, *(b"\0".join(bytes([letter]) for letter in word) for word in words))


_PRIVATE = _in_both_encodings(b"prompt", b"workflow", b"class_type")
_PRIVATE_IN_NOTES = (*_PRIVATE, *_in_both_encodings(b"parameters"))
# Texts are searched in pieces, each of which takes some milliseconds.
PIECE_BYTES = 1024**2
SEARCHED_BYTES_MAX = 16 * 1024**2  # a file with more texts is taken for one with a prompt
_OVERLAP_BYTES = 64
_SOURCE = re.compile(rb"digitalsourcetype/([A-Za-z]{1,60})", re.IGNORECASE)
XMP_BYTES_MAX = 1024**2  # of a packet that is read for its mark


class Findings(NamedTuple):
    has_manifest: bool
    has_xmp: bool
    is_private: bool  # it contains a prompt or a workflow
    mark: str | None

    @property
    def is_signed_only(self) -> bool:
        """Whether the file has a manifest and nothing to remove. Any change would break its signature."""
        return self.has_manifest and not self.is_private

    def stays(self, wish: Wish) -> bool:
        if not wish.strips:
            return self.has_manifest or self.has_xmp or wish.mark is None
        return self.is_signed_only


def _survey(data: bytes, parts: Callable[[bytes], Iterator[Part]]) -> Findings:
    has_manifest = has_xmp = False
    mark: str | None = None
    for part in parts(data):
        has_manifest |= part.role is PartRole.MANIFEST
        has_xmp |= part.role is PartRole.XMP
        if mark is None and part.role in (PartRole.XMP, PartRole.MANIFEST):
            mark = read_mark(data[part.start : min(part.end, part.start + XMP_BYTES_MAX)])
        elif mark is None and part.role is PartRole.COMPRESSED:
            mark = _compressed_mark(data, part)
    # Without a manifest, all texts are removed anyway.
    is_private = has_manifest and _is_private(_pieces(data, parts(data)))
    return Findings(has_manifest, has_xmp, is_private, mark)


Piece: TypeAlias = tuple[bytes, tuple[bytes, ...]]  # a text, and the words that make it private


def _pieces(data: bytes, parts: Iterator[Part]) -> Iterator[Piece]:
    for part in parts:
        if part.role is PartRole.COMPRESSED:
            yield _PRIVATE[0], _PRIVATE  # it can't be searched
        elif part.role is not PartRole.KEPT:
            words = _PRIVATE_IN_NOTES if part.role is PartRole.NOTE else _PRIVATE
            for at in range(part.start, part.end, PIECE_BYTES):
                yield data[at : min(at + PIECE_BYTES + _OVERLAP_BYTES, part.end)], words


def _is_private(pieces: Iterator[Piece]) -> bool:
    left = SEARCHED_BYTES_MAX
    for piece, words in pieces:
        left -= len(piece)
        lowered = piece.lower()
        if left < 0 or any(word in lowered for word in words):
            return True
    return False


def read_mark(xmp: bytes) -> str | None:
    """Returns the DigitalSourceType of an XMP packet or a C2PA manifest."""
    found = _SOURCE.search(xmp)
    return found[1].decode() if found else None


def write_xmp(mark: str) -> bytes:
    """Returns an XMP packet with only the mark."""
    return (
        '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
        '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        '<rdf:Description rdf:about="" xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/">'
        "<Iptc4xmpExt:DigitalSourceType>"
        f"http://cv.iptc.org/newscodes/digitalsourcetype/{mark}"
        "</Iptc4xmpExt:DigitalSourceType>"
        '</rdf:Description></rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
    ).encode()


# Pictures, which are read as a whole

# In one piece while it is built: a file may consist of parts of a few bytes, each of which would be an object
# of its own, ten times as large as the file.
Built: TypeAlias = bytearray


class PictureFormat(NamedTuple):
    parts: Callable[[bytes], Iterator[Part]]
    build: Callable[[bytes, Iterator[Part], bytes | None, bool], Built]


def _prepare_picture(file: BinaryIO, data: bytes, form: PictureFormat, wish: Wish) -> bool:
    seen = _survey(data, form.parts)
    if seen.stays(wish):
        return False
    mark = seen.mark or wish.mark
    built = form.build(data, form.parts(data), write_xmp(mark) if mark else None, wish.strips)
    file.seek(0)
    file.write(built)
    file.truncate()
    return wish.strips and seen.has_manifest


_PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"comf"})  # the last: ComfyUI's own
_PNG_XMP = b"XML:com.adobe.xmp\0"
_PNG_MANIFEST = b"caBX"
PNG_KEYWORD_BYTES_MAX = 80  # with its end


def _png_parts(data: bytes) -> Iterator[Part]:
    at = 8
    while at + 12 <= len(data):
        end = at + 12 + int(struct.unpack_from(">I", data, at)[0])
        yield Part(_png_role(data, at), at, end)
        at = end
    yield Part(PartRole.KEPT, at, len(data))


def _png_role(data: bytes, at: int) -> PartRole:
    kind = data[at + 4 : at + 8]
    if kind == _PNG_MANIFEST:
        return PartRole.MANIFEST
    if kind not in _PNG_TEXTS:
        return PartRole.KEPT
    keyword_end = data.find(b"\0", at + 8, at + 8 + PNG_KEYWORD_BYTES_MAX)
    is_compressed = kind == b"iTXt" and data[keyword_end + 1 : keyword_end + 2] == b"\1"
    if kind == b"zTXt" or (is_compressed and keyword_end >= 0):
        return PartRole.COMPRESSED
    is_xmp = kind == b"iTXt" and data.startswith(_PNG_XMP, at + 8)
    return PartRole.XMP if is_xmp else PartRole.NOTE


def _compressed_mark(data: bytes, part: Part) -> str | None:
    """Returns the mark of a compressed XMP packet, of which only the beginning is unpacked."""
    if not data.startswith(_PNG_XMP, part.start + 8):
        return None
    start = part.start + 8 + len(_PNG_XMP) + 4  # flags, and no language and no translated keyword
    packed = data[start : min(part.end - 4, start + XMP_BYTES_MAX)]
    try:
        return read_mark(zlib.decompressobj().decompress(packed, XMP_BYTES_MAX))
    except zlib.error:
        return None


def _build_png(data: bytes, parts: Iterator[Part], xmp: bytes | None, strips: bool) -> Built:
    built = bytearray(data[:8])
    for part in parts:
        if part.role is PartRole.KEPT or not strips:
            built += data[part.start : part.end]
        if xmp is not None and part.start == 8:  # after the header
            chunk = b"iTXt" + _PNG_XMP + bytes(4) + xmp
            built += (
                struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
            )
    return built


_JPEG_NOTES = frozenset({0xE1, 0xED, 0xFE})  # Exif and XMP, Photoshop's, comments
_JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_JPEG_APP0, _JPEG_APP11, _JPEG_SCAN = 0xE0, 0xEB, 0xDA
SEGMENT_BYTES_MAX = 65_533


def _jpeg_parts(data: bytes) -> Iterator[Part]:
    at = 2
    # Up to the first scan: after it there are pixels.
    while data[at] == 0xFF and data[at + 1] != _JPEG_SCAN:
        end = at + 2 + int(struct.unpack_from(">H", data, at + 2)[0])
        yield Part(_jpeg_role(data, at), at, end)
        at = end
    yield Part(PartRole.KEPT, at, len(data))


def _jpeg_role(data: bytes, at: int) -> PartRole:
    marker = data[at + 1]
    if marker == 0xE1 and data.startswith(_JPEG_XMP, at + 4):
        return PartRole.XMP
    # A JUMBF box, in each of its segments.
    if (
        marker == _JPEG_APP11
        and data[at + 4 : at + 6] == b"JP"
        and data[at + 16 : at + 20] == b"jumb"
    ):
        return PartRole.MANIFEST
    return PartRole.NOTE if marker in _JPEG_NOTES else PartRole.KEPT


def _build_jpeg(data: bytes, parts: Iterator[Part], xmp: bytes | None, strips: bool) -> Built:
    built, is_waiting = bytearray(data[:2]), xmp is not None
    for part in parts:
        if is_waiting and xmp is not None and data[part.start + 1 : part.start + 2] != b"\xe0":
            segment = _JPEG_XMP + xmp
            built += b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment
            is_waiting = False
        if part.role is PartRole.KEPT or not strips:
            built += data[part.start : part.end]
    return built


_WEBP_ROLES: Mapping[bytes, PartRole] = {
    b"EXIF": PartRole.NOTE,
    b"XMP ": PartRole.XMP,
    b"C2PA": PartRole.MANIFEST,
}
_WEBP_HAS_EXIF, _WEBP_HAS_XMP, _WEBP_HAS_ALPHA = 0x08, 0x04, 0x10


def _webp_parts(data: bytes) -> Iterator[Part]:
    at = 12
    while at + 8 <= len(data):
        length = int(struct.unpack_from("<I", data, at + 4)[0])
        end = at + 8 + length + length % 2
        yield Part(_WEBP_ROLES.get(data[at : at + 4], PartRole.KEPT), at, end)
        at = end


def _build_webp(data: bytes, parts: Iterator[Part], xmp: bytes | None, strips: bool) -> Built:
    built = bytearray(b"RIFF----WEBP")
    extended = data[12:16] == b"VP8X"
    if xmp is not None and not extended:
        header = _webp_header(data)
        if header is None:
            xmp = None
        else:
            built += header
    for part in parts:
        if part.role is PartRole.KEPT or not strips:
            built += data[part.start : part.end]
    if extended and len(built) > 20:
        dropped = _WEBP_HAS_EXIF | _WEBP_HAS_XMP if strips else 0
        built[20] = built[20] & ~dropped | (_WEBP_HAS_XMP if xmp is not None else 0)
    if xmp is not None:
        built += b"XMP " + struct.pack("<I", len(xmp)) + xmp + bytes(len(xmp) % 2)
    struct.pack_into("<I", built, 4, len(built) - 8)
    return built


def _webp_header(data: bytes) -> bytes | None:
    """Returns the header that a file needs to have metadata, with its size and whether it has alpha."""
    size = picture_size("image/webp", data[:64])
    if size is None:
        return None
    has_alpha = data[12:16] == b"VP8L" and bool(data[24] & 0x10)
    flags = _WEBP_HAS_XMP | (_WEBP_HAS_ALPHA if has_alpha else 0)
    width, height = (each - 1 for each in size)
    content = bytes([flags, 0, 0, 0]) + width.to_bytes(3, "little") + height.to_bytes(3, "little")
    return b"VP8X" + struct.pack("<I", len(content)) + content


_PICTURES: Mapping[str | None, PictureFormat] = {
    "image/png": PictureFormat(_png_parts, _build_png),
    "image/jpeg": PictureFormat(_jpeg_parts, _build_jpeg),
    "image/webp": PictureFormat(_webp_parts, _build_webp),
}


# Files of ISO boxes, which may be large: they are changed in place, and a mark is appended

_ISO_TYPES = frozenset({"video/mp4", "video/quicktime", "audio/mp4", "image/avif", "image/heic"})
_MARKED_ISO_TYPES = frozenset({"video/mp4"})
_XMP_UUID = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")
_MANIFEST_UUID = bytes.fromhex("d8fec3d61b0e483c92975828877ec481")


class IsoBox(NamedTuple):
    start: int
    inner: int  # where its content begins; after the id of a uuid box
    end: int

    @property
    def size(self) -> int:
        return self.end - self.inner


class IsoFile(NamedTuple):
    xmp: list[IsoBox]
    manifests: list[IsoBox]
    notes: list[IsoBox]
    last: IsoBox | None
    is_open_ended: bool  # the last box has no length of its own


def _prepare_iso(
    file: BinaryIO, media_type: str | None, head: bytes, size: int, wish: Wish
) -> bool:
    boxes = _read_iso(file, size)
    is_picture = (media_type or "").startswith("image/")
    seen = _survey_iso(file, boxes, size, is_picture=is_picture)
    if seen.stays(wish):
        return False
    if wish.strips:
        strip_notes(file, media_type, head, size)
    mark = seen.mark or wish.mark
    packet = write_xmp(mark) if mark and media_type in _MARKED_ISO_TYPES else b""
    place = next((box for box in boxes.xmp if packet and box.size >= len(packet)), None)
    for box in (*boxes.manifests, *boxes.xmp):
        if box != place:
            fill(file, box.start + 4, b"free", box.inner - 16, box.end)
    if place is not None:
        file.seek(place.inner)
        file.write(packet.ljust(place.size))
    elif packet:
        _append_xmp(file, boxes, packet)
    return wish.strips and seen.has_manifest


def _read_iso(file: BinaryIO, size: int) -> IsoFile:
    xmp: list[IsoBox] = []
    manifests: list[IsoBox] = []
    notes: list[IsoBox] = []
    last: IsoBox | None = None
    is_open_ended = False
    for kind, start, inner, end in list(iso_boxes(file, 0, size)):
        last = IsoBox(start, inner, end)
        file.seek(start)
        is_open_ended = file.read(4) == bytes(4)
        if kind == b"uuid":
            file.seek(inner)
            name = file.read(16)
            found = IsoBox(start, inner + 16, end)
            if name == _XMP_UUID:
                xmp.append(found)
            elif name == _MANIFEST_UUID:
                manifests.append(found)
        elif kind == b"moov":
            notes += [IsoBox(*each) for each in note_boxes(file, inner, end)]
    return IsoFile(xmp, manifests, notes, last, is_open_ended)


def _survey_iso(file: BinaryIO, boxes: IsoFile, size: int, *, is_picture: bool) -> Findings:
    mark = None
    for box in (*boxes.xmp, *boxes.manifests):
        file.seek(box.inner)
        mark = mark or read_mark(file.read(min(box.size, XMP_BYTES_MAX)))
    # The notes of a picture are items anywhere in the file. They may contain a prompt, and are not searched.
    is_private = bool(boxes.manifests) and (
        _is_private(_iso_pieces(file, boxes)) or (is_picture and has_picture_notes(file, size))
    )
    return Findings(bool(boxes.manifests), bool(boxes.xmp), is_private, mark)


def _iso_pieces(file: BinaryIO, boxes: IsoFile) -> Iterator[Piece]:
    for box in (*boxes.notes, *boxes.xmp, *boxes.manifests):
        for at in range(box.inner, box.end, PIECE_BYTES):
            file.seek(at)
            yield file.read(min(PIECE_BYTES + _OVERLAP_BYTES, box.end - at)), _PRIVATE


def _append_xmp(file: BinaryIO, boxes: IsoFile, packet: bytes) -> None:
    """Appends a box, so that no place in the file moves. Files whose last box is open and very large stay as they are."""
    if boxes.last is None:
        return
    if boxes.is_open_ended:
        length = boxes.last.end - boxes.last.start
        if length >= 2**32:
            return
        file.seek(boxes.last.start)
        file.write(struct.pack(">I", length))
    content = _XMP_UUID + packet
    file.seek(0, 2)
    file.write(struct.pack(">I4s", 8 + len(content), b"uuid") + content)
