"""Prepares files for customers: removes prompts and workflows, and preserves or adds the mark of
files created by AI.

The mark is XMP with the IPTC property DigitalSourceType. Files are not encoded again. Only the
parts of a file that decoding needs are preserved. A file whose parts can't be distinguished is
refused. These functions block.
"""

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

from comfyfleet.errors import InvalidInput
from comfyfleet.media import PICTURE_BYTES_MAX, SNIFF_BYTES, PartCount, sniff_type
from comfyfleet.media_boxes import (
    XMP_UUID,
    IsoBox,
    IsoFile,
    blank,
    fill,
    has_picture_notes,
    read_iso,
    strip_items,
)
from comfyfleet.media_pictures import (
    PICTURE_FORMATS,
    PRIVATE,
    Built,
    Part,
    PartRole,
    PictureFormat,
    in_both_encodings,
    packed_xmp,
    strip_gif,
    strip_svg,
)
from comfyfleet.media_streams import (
    strip_flac,
    strip_glb,
    strip_matroska,
    strip_mpeg,
    strip_ogg,
    strip_riff,
    strip_safetensors,
)


class SourceType(StrEnum):
    """How a file was created, in terms of IPTC's vocabulary."""

    GENERATED = "trainedAlgorithmicMedia"
    EDITED = "compositeWithTrainedAlgorithmicMedia"


# Values of IPTC's vocabulary that mark a file as created with AI. Other values don't, such as
# digitalCapture of an uploaded photo whose metadata a node copied.
_AI_SOURCES = frozenset({*SourceType, "compositeSynthetic"})


class Prepared(NamedTuple):
    size: int
    # A C2PA manifest was removed, because the file also contained a prompt or workflow.
    lost_manifest: bool = False


def strip_metadata(path: Path) -> int:
    """Removes prompts and workflows, and preserves an existing mark. Returns the size of the file.

    Raises InvalidInput if they can't be removed.
    """
    try:
        return _prepare_path(path, Wish(None, strips=True)).size
    except Unremovable as error:
        raise InvalidInput(f"The file {error}.") from error


def prepare_file(
    path: Path, *, mark: str | None = None, strips: bool = True, name: str | None = None
) -> Prepared:
    """Prepares a file in place. `mark` is added if the file has none. `name` is used in errors.

    Raises InvalidInput if prompts and workflows can't be removed. Without `strips`, all metadata
    are preserved, and a mark is added only to a file that has neither XMP nor a C2PA manifest.
    """
    try:
        return _prepare_path(path, Wish(mark, strips))
    except Unremovable as error:
        raise InvalidInput(
            f"The output {name or path.name} {error}. "
            "To deliver such files with their metadata, set keep_metadata on the effect."
        ) from error


class Unremovable(ValueError):
    """Raised if prompts and workflows can't be removed from a file. The message is the reason."""


UNKNOWN_LAYOUT = "is damaged or has an unknown layout, so its prompt can't be removed"


class Wish(NamedTuple):
    mark: str | None
    strips: bool


def _prepare_path(path: Path, wish: Wish) -> Prepared:
    with path.open("r+b") as file:
        head = file.read(SNIFF_BYTES)
        size = file.seek(0, 2)
        lost_manifest = False
        try:
            media_type = sniff_type(head) or _document(head)
            lost_manifest = _prepare(file, media_type, size, wish)
            if wish.strips:
                _require_no_workflow(file, media_type)
        except (struct.error, IndexError, ValueError, RecursionError) as error:
            if wish.strips and not isinstance(error, Unremovable):
                raise Unremovable(UNKNOWN_LAYOUT) from error
            if wish.strips:
                raise
        return Prepared(file.seek(0, 2), lost_manifest)


def _prepare(file: BinaryIO, media_type: str, size: int, wish: Wish) -> bool:
    if media_type in PICTURE_FORMATS:
        data = _read_whole(file, size)
        return _prepare_picture(file, data, PICTURE_FORMATS[media_type], wish)
    if media_type in _ISO_TYPES:
        return _prepare_iso(file, media_type, size, wish)
    if wish.strips and size:
        if media_type in _REBUILT:
            _replace(file, _REBUILT[media_type](_read_whole(file, size)))
        elif media_type in _OVERWRITTEN:
            _OVERWRITTEN[media_type](file, size)
    return False


def _read_whole(file: BinaryIO, size: int) -> bytes:
    if size > PICTURE_BYTES_MAX:
        raise Unremovable("is too large for its prompt to be removed")
    file.seek(0)
    return file.read()


def _replace(file: BinaryIO, data: Built) -> None:
    file.seek(0)
    file.write(data)
    file.truncate()


def _document(head: bytes) -> str:
    """Returns the type of a model, tensor file or drawing, which can't be uploaded as media."""
    if head.startswith(b"glTF"):
        return "model/gltf-binary"
    if head[8:9] == b"{" and not any(head[5:8]):  # JSON that follows its length
        return "application/x-safetensors"
    return "image/svg+xml" if b"<svg" in head.lower() else ""


_ISO_TYPES = frozenset({"video/mp4", "video/quicktime", "audio/mp4", "image/avif", "image/heic"})
_REBUILT: Mapping[str, Callable[[bytes], Built]] = {
    "image/gif": strip_gif,
    "image/svg+xml": strip_svg,
}
_OVERWRITTEN: Mapping[str, Callable[[BinaryIO, int], None]] = {
    "video/webm": strip_matroska,
    "video/x-matroska": strip_matroska,
    "video/x-msvideo": strip_riff,
    "video/ogg": strip_ogg,
    "audio/wav": strip_riff,
    "audio/flac": strip_flac,
    "audio/mpeg": strip_mpeg,
    "audio/ogg": strip_ogg,
    "model/gltf-binary": strip_glb,
    "application/x-safetensors": strip_safetensors,
}
# Names in ComfyUI's prompts and workflows that rarely occur in other files.
_GRAPH_WORDS = in_both_encodings(b"class_type", b"widgets_values", b"last_node_id")
# For these formats, only parts that decoding needs are preserved. The result is searched anyway,
# because a damaged length can make other parts look like pixels. This search uses only one name,
# and skips videos that are larger than the limit.
_KNOWN_PARTS = frozenset(
    {*PICTURE_FORMATS, *_ISO_TYPES, "image/gif", "video/webm", "video/x-matroska"}
)
_GRAPH_WORDS_IN_DAMAGE = in_both_encodings(b"class_type")
SEARCHED_FILM_BYTES_MAX = 1024**3


def _require_no_workflow(file: BinaryIO, media_type: str) -> None:
    is_known = media_type in _KNOWN_PARTS
    if is_known and file.seek(0, 2) > SEARCHED_FILM_BYTES_MAX:
        return
    words = _GRAPH_WORDS_IN_DAMAGE if is_known else _GRAPH_WORDS
    file.seek(0)
    before = b""
    while piece := file.read(PIECE_BYTES):
        searched = before + piece
        if any(word in searched for word in words):
            raise Unremovable("contains a prompt or workflow that can't be removed")
        before = piece[-_OVERLAP_BYTES:]


# The contents of a file's parts

_PRIVATE_IN_NOTES = (*PRIVATE, *in_both_encodings(b"parameters", b"sampler"))
# Text is searched in pieces, each of which takes a few milliseconds.
PIECE_BYTES = 1024**2
SEARCHED_BYTES_MAX = 16 * 1024**2  # a file with more text is assumed to contain a prompt
_OVERLAP_BYTES = 64
_SOURCE = re.compile(rb"digitalsourcetype/([A-Za-z]{1,60})", re.IGNORECASE)
XMP_BYTES_MAX = 1024**2  # maximum size of a packet that is read for its mark


class Findings(NamedTuple):
    has_manifest: bool
    has_xmp: bool
    is_private: bool  # it contains a prompt or a workflow
    mark: str | None

    @property
    def is_signed_only(self) -> bool:
        """Checks whether the file has a manifest and nothing to remove. Any change would invalidate
        the signature."""
        return self.has_manifest and not self.is_private

    def mark_for(self, wish: Wish) -> str | None:
        """Returns the mark of the delivered file. This is its own mark, unless it lacks the
        requested AI mark."""
        return self.mark if self.mark in _AI_SOURCES else wish.mark or self.mark

    def stays(self, wish: Wish) -> bool:
        if not wish.strips:
            return self.has_manifest or self.has_xmp or wish.mark is None
        return self.is_signed_only


def _survey(data: bytes, parts: Callable[[bytes], Iterator[Part]]) -> Findings:
    has_manifest = has_xmp = False
    mark: str | None = None
    count = PartCount(len(data))
    for part in parts(data):
        count.add()
        has_manifest |= part.role is PartRole.MANIFEST
        has_xmp |= part.role is PartRole.XMP
        if mark is None and part.role in (PartRole.XMP, PartRole.MANIFEST):
            mark = read_mark(data[part.start : min(part.end, part.start + XMP_BYTES_MAX)])
        elif mark is None and part.role is PartRole.COMPRESSED:
            mark = read_mark(packed_xmp(data, part, XMP_BYTES_MAX))
    # In files without a manifest, all text is removed anyway.
    is_private = has_manifest and _is_private(_pieces(data, parts(data)))
    return Findings(has_manifest, has_xmp, is_private, mark)


# a piece of text, and the words that make it private
Piece: TypeAlias = tuple[bytes, tuple[bytes, ...]]


def _pieces(data: bytes, parts: Iterator[Part]) -> Iterator[Piece]:
    for part in parts:
        if part.role is PartRole.COMPRESSED:
            yield PRIVATE[0], PRIVATE  # compressed text can't be searched
        elif part.role is not PartRole.KEPT:
            words = _PRIVATE_IN_NOTES if part.role is PartRole.NOTE else PRIVATE
            for at in range(part.start, part.end, PIECE_BYTES):
                yield data[at : min(at + PIECE_BYTES + _OVERLAP_BYTES, part.end)], words


def _is_private(pieces: Iterator[Piece]) -> bool:
    remaining = SEARCHED_BYTES_MAX
    for piece, words in pieces:
        remaining -= len(piece)
        lowered = piece.lower()
        if remaining < 0 or any(word in lowered for word in words):
            return True
    return False


def read_mark(xmp: bytes) -> str | None:
    """Returns the DigitalSourceType of an XMP packet or a C2PA manifest, or None."""
    match = _SOURCE.search(xmp)
    return match[1].decode() if match else None


def write_xmp(mark: str) -> bytes:
    """Returns an XMP packet that contains only the mark."""
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


# Images, which are read as a whole


def _prepare_picture(file: BinaryIO, data: bytes, form: PictureFormat, wish: Wish) -> bool:
    seen = _survey(data, form.parts)
    if seen.stays(wish):
        return False
    mark = seen.mark_for(wish)
    built = form.build(data, form.parts(data), write_xmp(mark) if mark else None, wish.strips)
    file.seek(0)
    file.write(built)
    file.truncate()
    return wish.strips and seen.has_manifest


# Files with ISO boxes, which may be large. They are changed in place, and a mark is appended.

_MARKED_ISO_TYPES = frozenset({"video/mp4"})


def _prepare_iso(file: BinaryIO, media_type: str, size: int, wish: Wish) -> bool:
    boxes = read_iso(file, size)
    seen = _survey_iso(file, boxes, size)
    if seen.stays(wish):
        return False
    if wish.strips:
        _strip_iso(file, boxes, size)
    mark = seen.mark_for(wish)
    packet = write_xmp(mark) if mark and media_type in _MARKED_ISO_TYPES else b""
    place = next((box for box in boxes.xmp if packet and box.size >= len(packet)), None)
    for box in (*boxes.manifests, *boxes.xmp):
        if box != place:
            fill(file, box.start + 4, b"free", box.inner - 16, box.end)
    if place is not None:
        file.seek(place.inner)
        file.write(packet.ljust(place.size))
    elif packet and (wish.strips or boxes.junk is None):
        _append_xmp(file, boxes, packet)
    return wish.strips and seen.has_manifest


def _strip_iso(file: BinaryIO, boxes: IsoFile, size: int) -> None:
    strip_items(file, size)
    for box in boxes.notes:
        fill(file, box.start + 4, b"free", box.inner, box.end)
    for box in boxes.names:
        blank(file, box.inner, box.end)
    if boxes.junk is not None:
        file.truncate(boxes.junk)


def _survey_iso(file: BinaryIO, boxes: IsoFile, size: int) -> Findings:
    mark = None
    for box in (*boxes.xmp, *boxes.manifests, *boxes.notes):
        file.seek(box.inner)
        mark = mark or read_mark(file.read(min(box.size, XMP_BYTES_MAX)))
    # The notes of an image are items anywhere in the file. They may contain a prompt, and are not
    # searched.
    is_private = bool(boxes.manifests) and (
        _is_private(_iso_pieces(file, boxes, size)) or has_picture_notes(file, size)
    )
    return Findings(bool(boxes.manifests), bool(boxes.xmp), is_private, mark)


def _iso_pieces(file: BinaryIO, boxes: IsoFile, size: int) -> Iterator[Piece]:
    trailing = () if boxes.junk is None else (IsoBox(boxes.junk, boxes.junk, size),)
    for box in (*boxes.notes, *boxes.names, *boxes.xmp, *boxes.manifests, *trailing):
        for at in range(box.inner, box.end, PIECE_BYTES):
            file.seek(at)
            yield file.read(min(PIECE_BYTES + _OVERLAP_BYTES, box.end - at)), PRIVATE


def _append_xmp(file: BinaryIO, boxes: IsoFile, packet: bytes) -> None:
    """Appends a box, so that no position in the file changes. Files whose last box is open-ended
    and very large aren't changed."""
    if boxes.last is None:
        return
    if boxes.is_open_ended:
        length = boxes.last.end - boxes.last.start
        if length >= 2**32:
            return
        file.seek(boxes.last.start)
        file.write(struct.pack(">I", length))
    content = XMP_UUID + packet
    file.seek(0, 2)
    file.write(struct.pack(">I4s", 8 + len(content), b"uuid") + content)
