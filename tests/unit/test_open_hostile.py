"""Whatever the bytes are, opening them ends soon, and in an error of ours if it fails."""

import json
import mmap
import struct
import tempfile
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.saved_files import (
    PROMPT,
    SAVED,
    TEXTS,
    WORKFLOW,
    box,
    chunk,
    id3,
    png,
    png_with,
    safetensors,
    saved,
)

from comfyfleet.errors import InvalidInput, LimitExceeded, NoWorkflowFound
from comfyfleet.workflow.embedded import FileLimits, open_document

GIBIBYTE = 2**30
SMALL = FileLimits(metadata_bytes=10_000, chunks=1_000, texts=50)


def open_or_refuse(data: bytes) -> None:
    try:
        found = open_document(data, limits=SMALL)
    except (InvalidInput, LimitExceeded) as error:
        assert error.message  # noqa: PT017
        return
    assert found.workflow is not None or found.prompt is not None
    json.dumps([found.workflow, found.prompt], allow_nan=False, ensure_ascii=False).encode()


# Anything at all


@pytest.mark.parametrize("name", SAVED)
def test_a_file_cut_off_anywhere_is_opened_or_refused(name: str) -> None:
    data = saved(name)
    for length in range(0, len(data), max(1, len(data) // 50)):
        open_or_refuse(data[:length])


@settings(max_examples=150)
@given(
    name=st.sampled_from(list(SAVED)),
    edits=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 4), st.binary(max_size=8) | st.just(b"\xff" * 4)),
        min_size=1,
        max_size=4,
    ),
)
def test_a_file_changed_anywhere_is_opened_or_refused(
    name: str, edits: list[tuple[float, int, bytes]]
) -> None:
    data = saved(name)
    for place, removed, inserted in edits:
        at = int(place * len(data))
        data = data[:at] + inserted + data[at + removed :]
    open_or_refuse(data)


@given(
    start=st.sampled_from([b"", *(saved(name)[:16] for name in SAVED)]),
    rest=st.binary(max_size=200),
)
def test_any_bytes_are_opened_or_refused(start: bytes, rest: bytes) -> None:
    open_or_refuse(start + rest)


# Lies, loops and bombs


def test_a_compressed_text_that_explodes_is_refused() -> None:
    bomb = zlib.compress(b"[" * 1_000_000)
    for data in (
        png_with(chunk(b"zTXt", b"workflow\0\0" + bomb)),
        png_with(chunk(b"iTXt", b"workflow\0\1\0\0\0" + bomb)),
    ):
        with pytest.raises(LimitExceeded, match="'workflow' has more than 10,000 bytes"):
            open_document(data, limits=SMALL)


def test_a_compressed_text_that_nobody_asked_for_is_not_expanded() -> None:
    bomb = chunk(b"zTXt", b"Software\0\0" + zlib.compress(bytes(1_000_000)))
    workflow = chunk(b"tEXt", b"workflow\0" + TEXTS["workflow"].encode())
    assert open_document(png_with(bomb, workflow), limits=SMALL).workflow == WORKFLOW


def test_a_damaged_compressed_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="The compressed text 'prompt' is damaged"):
        open_document(png_with(chunk(b"zTXt", b"prompt\0\0no zlib")))


def test_a_text_that_is_too_large_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="more than the limit of 10,000"):
        open_document(png({"workflow": "x" * 10_001}), limits=SMALL)


def test_a_text_in_no_known_encoding_is_refused() -> None:
    data = (
        saved("flac")
        .replace(b"KSampler", b"KSampl\xff\xfe", 1)
        .replace(b"KSampler", b"KSampl\xff\xfe", 1)
    )
    with pytest.raises(InvalidInput, match="is not UTF-8"):
        open_document(data)


def test_nesting_inside_a_picture_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="The text 'workflow' is nested deeper"):
        open_document(png({"workflow": '{"nodes":' + "[" * 10_000}))


def test_wrappers_inside_wrappers_come_to_an_end() -> None:
    value = json.dumps(WORKFLOW)
    for _ in range(60):
        value = f'{{"workflow": {value}}}'
    with pytest.raises(NoWorkflowFound):
        open_document(value.encode())


@pytest.mark.parametrize("part", [chunk(b"IDAT", b""), chunk(b"tEXt", b"k\0v")])
def test_more_chunks_than_allowed_are_refused(part: bytes) -> None:
    with pytest.raises(LimitExceeded, match=r"more (parts )?than"):
        open_document(png_with(part * 1_001), limits=SMALL)


def tiff(*entries: bytes) -> bytes:
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries)


@pytest.mark.parametrize(
    "block",
    [
        tiff(struct.pack("<HHII", 0x8769, 4, 1, 8)),
        tiff(struct.pack("<HHII", 0x010F, 2, 2**32 - 1, 2**32 - 1)),
        tiff(*[struct.pack("<HHII", 0x010F, 2, 1000, 0)] * 40),
        b"II*\0" + struct.pack("<IH", 8, 65535),
        b"II*\0" + struct.pack("<I", 2**32 - 1),
        b"",
    ],
    ids=["points at itself", "beyond the end", "overlapping", "too many", "nowhere", "empty"],
)
def test_exif_that_lies_holds_no_workflow(block: bytes) -> None:
    with pytest.raises(NoWorkflowFound):
        open_document(png_with(chunk(b"eXIf", block)))


FTYP = box(b"ftyp", b"isom")
LYING_ILOC = box(b"iloc", b"\2" + bytes(3) + b"\xff" * 40)
LIES = {
    "box smaller than its header": FTYP + struct.pack(">I4s", 4, b"moov"),
    "box larger than any file": FTYP + struct.pack(">I4sQ", 1, b"moov", 2**63),
    "box of no size": FTYP + struct.pack(">I4sQ", 1, b"moov", 0),
    "boxes that contain each other": FTYP + struct.pack(">I4s", 0, b"moov") * 500,
    "comment beyond its box": FTYP + box(b"moov", box(b"udta", box(b"\xa9cmt", b"\xff\xff\0\0x"))),
    "items beyond the file": box(b"ftyp", b"avif")
    + box(b"meta", bytes(4), box(b"iinf", b""), LYING_ILOC),
    "element without an id": b"\x1a\x45\xdf\xa3" + bytes(20),
    "elements of unknown size in each other": b"\x1a\x45\xdf\xa3\x80"
    + b"\x18\x53\x80\x67\xff" * 40,
    "four billion comments": b"fLaC\x84\0\0\x08" + struct.pack("<II", 0, 2**32 - 1),
    "page without its segments": b"OggS" + bytes(22) + b"\xff",
    "pages without segments": (b"OggS" + bytes(23)) * 40,
    "markers without segments": b"\xff\xd8\xff" + b"\xff" * 500,
    "segment of no size": b"\xff\xd8\xff\xe1\0\0" + bytes(10),
    "chunk larger than the file": b"RIFF\xff\xff\xff\xffWEBPEXIF\xff\xff\xff\xff",
    "tag larger than the file": b"ID3\4\0\xff\x7f\x7f\x7f\x7f",
    "frame larger than the tag": id3(b"TXXX" + b"\xff" * 6, version=4),
    "json chunk larger than the file": b"glTF\2\0\0\0\xff\xff\xff\xff\xff\xff\xff\xffJSON",
    "header larger than the file": struct.pack("<Q", 2**32 - 1) + b"{",
    "header of another shape": safetensors(["not", "an", "object"]),
    "metadata that is never closed": b"<svg><metadata><metadata>",
    "metadata without content": b"<svg>" + b"<metadata></metadata>" * 500,
}
WITHOUT_END = {
    "elements": b"\x1a\x45\xdf\xa3\x80" + b"\x18\x53\x80\x67\xff" * 1_000,
    "boxes": FTYP + box(b"moov", box(b"udta", box(b"free") * 1_001)),
    "blocks": b"fLaC" + b"\1\0\0\0" * 1_001,
    "pages": (b"OggS" + bytes(23)) * 1_001,
    "packet": b"OggS" + bytes(22) + b"\xff" * 256 + bytes(255 * 255),
    "fill bytes": b"\xff\xd8\xff" + b"\xff" * 2_000,
    "metadata elements": b"<svg>" + b"<metadata></metadata>" * 1_001,
    "properties": b"RIFF\0\0\0\0WEBPXMP " + struct.pack("<I", 10_010) + b" prompt=''" * 1_001,
    "directory entries": png_with(chunk(b"eXIf", tiff(*[bytes(12)] * 1_001))),
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_a_container_that_lies_holds_no_workflow(data: bytes) -> None:
    with pytest.raises(NoWorkflowFound):
        open_document(data)


@pytest.mark.parametrize("data", WITHOUT_END.values(), ids=WITHOUT_END)
def test_a_container_that_goes_on_and_on_is_refused(data: bytes) -> None:
    with pytest.raises(LimitExceeded):
        open_document(data, limits=FileLimits(metadata_bytes=30_000, chunks=1_000))


def test_a_movie_of_many_gigabytes_is_not_copied() -> None:
    movie = saved("mp4")
    metadata = movie[movie.index(b"moov") - 4 :]
    with tempfile.TemporaryFile() as file:
        file.write(box(b"ftyp", b"isom") + struct.pack(">I4sQ", 1, b"mdat", 5 * GIBIBYTE))
        file.seek(12 + 5 * GIBIBYTE)
        file.write(metadata)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            tracemalloc.start()
            found = open_document(mapped)
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert (found.workflow, found.prompt) == (WORKFLOW, PROMPT)
    assert peak_bytes < 100_000
