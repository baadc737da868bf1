"""Files for customers: the mark of files made by AI is kept or added, prompts go, and signed files stay as they are."""

import contextlib
import io
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import saved_files

from comfyfleet.delivery import Prepared, SourceType, prepare_file, read_mark, write_xmp
from comfyfleet.errors import InvalidInput
from comfyfleet.media import replace_prompt

GENERATED, EDITED = SourceType.GENERATED, SourceType.EDITED
SECRET = '{"3": {"class_type": "KSampler", "inputs": {"text": "SECRET"}}}'
MANIFEST = b"jumb....c2pa....digitalsourcetype/compositeWithTrainedAlgorithmicMedia"
OTHER_XMP = write_xmp(EDITED).replace(b"<rdf:Desc", b"<!--SECRET--><rdf:Desc")


def noise(image_format: str, **options: object) -> bytes:
    picture = PIL.Image.effect_noise((64, 48), 90).convert("RGB")
    buffer = io.BytesIO()
    picture.save(buffer, image_format, **options)
    return buffer.getvalue()


def with_png(data: bytes, *chunks: bytes) -> bytes:
    return data[:33] + b"".join(chunks) + data[33:]


def with_jpeg(data: bytes, *segments: tuple[int, bytes]) -> bytes:
    built = b"".join(
        struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body for marker, body in segments
    )
    return data[:2] + built + data[2:]


def with_webp(data: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    built = b"".join(
        kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2) for kind, body in chunks
    )
    return data[:4] + struct.pack("<I", len(data) + len(built) - 8) + data[8:] + built


def uuid_box(name: str, body: bytes) -> bytes:
    return saved_files.box(b"uuid", bytes.fromhex(name), body)


XMP_UUID, MANIFEST_UUID = "be7acfcb97a942e89c71999491e3afac", "d8fec3d61b0e483c92975828877ec481"


def jumb(manifest: bytes) -> bytes:
    return b"JP\0\1\0\0\0\1" + struct.pack(">I", len(manifest)) + b"jumb" + manifest


def plain_film() -> bytes:
    return saved_files.video("mp4", {})


# By format: a file without notes; with a manifest; with XMP; with a prompt.
PLAIN: dict[str, Callable[[], bytes]] = {
    "png": lambda: noise("PNG"),
    "jpeg": lambda: noise("JPEG"),
    "webp": lambda: noise("WEBP"),
    "lossless": lambda: noise("WEBP", lossless=True),
    "mp4": plain_film,
}
SIGNED: dict[str, Callable[[bytes, bytes], bytes]] = {
    "png": lambda data, manifest: with_png(data, saved_files.chunk(b"caBX", manifest)),
    "jpeg": lambda data, manifest: with_jpeg(data, (0xEB, jumb(manifest))),
    "webp": lambda data, manifest: with_webp(data, (b"C2PA", manifest)),
    "mp4": lambda data, manifest: data + uuid_box(MANIFEST_UUID, bytes(4) + manifest),
}
DESCRIBED: dict[str, Callable[[bytes, bytes], bytes]] = {
    "png": lambda data, xmp: with_png(
        data, saved_files.chunk(b"iTXt", b"XML:com.adobe.xmp\0" + bytes(4) + xmp)
    ),
    "jpeg": lambda data, xmp: with_jpeg(data, (0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp)),
    "webp": lambda data, xmp: with_webp(data, (b"XMP ", xmp)),
    "mp4": lambda data, xmp: data + uuid_box(XMP_UUID, xmp),
}
PRIVATE: dict[str, Callable[[], bytes]] = {
    "png": lambda: with_png(
        noise("PNG"), saved_files.chunk(b"tEXt", b"prompt\0" + SECRET.encode())
    ),
    "jpeg": lambda: with_jpeg(noise("JPEG"), (0xFE, b"workflow:" + SECRET.encode())),
    "webp": lambda: with_webp(noise("WEBP"), (b"EXIF", "workflow".encode("utf-16-le"))),
    "mp4": lambda: saved_files.video("mp4", {"prompt": SECRET}),
}
FORMATS = list(SIGNED)


def prepared(
    tmp_path: Path, data: bytes, mark: str | None = None, *, strips: bool = True
) -> tuple[bytes, Prepared]:
    path = tmp_path / "file"
    path.write_bytes(data)
    found = prepare_file(path, mark=mark, strips=strips)
    after = path.read_bytes()
    assert found.size == len(after)
    return after, found


def pixels(data: bytes) -> list[bytes]:
    if data[4:8] == b"ftyp":
        with av.open(io.BytesIO(data), "r") as container:
            return [bytes(frame.planes[0]) for frame in container.decode()]
    with PIL.Image.open(io.BytesIO(data)) as picture:
        return [np.asarray(picture.convert("RGBA")).tobytes()]


def marks(data: bytes) -> int:
    return data.count(b"digitalsourcetype/")


def shown_mark(data: bytes) -> str | None:
    """As Pillow reads it; of a film by its bytes."""
    if data[4:8] == b"ftyp":
        return read_mark(data)
    with PIL.Image.open(io.BytesIO(data)) as picture:
        found = picture.info.get("xmp") or picture.info.get("XML:com.adobe.xmp") or b""
    return read_mark(found.encode() if isinstance(found, str) else found)


@pytest.mark.parametrize("name", PLAIN)
def test_a_mark_is_added_once_and_the_pixels_stay(tmp_path: Path, name: str) -> None:
    data = PLAIN[name]()
    after, _ = prepared(tmp_path, data, GENERATED)
    assert shown_mark(after) == GENERATED
    assert pixels(after) == pixels(data)
    again, _ = prepared(tmp_path, after, EDITED)
    assert again == after, "the mark that is there stays"


@pytest.mark.parametrize("name", PLAIN)
def test_without_a_rule_nothing_is_added(tmp_path: Path, name: str) -> None:
    after, _ = prepared(tmp_path, PLAIN[name]())
    assert marks(after) == 0


def test_lossless_webp_keeps_its_transparency(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    PIL.Image.new("RGBA", (9, 7), (9, 99, 200, 40)).save(buffer, "WEBP", lossless=True)
    after, _ = prepared(tmp_path, buffer.getvalue(), GENERATED)
    assert pixels(after) == pixels(buffer.getvalue())
    with PIL.Image.open(io.BytesIO(after)) as picture:
        assert picture.mode == "RGBA"


@pytest.mark.parametrize("name", FORMATS)
def test_an_existing_mark_stays_without_the_other_texts_of_its_packet(
    tmp_path: Path, name: str
) -> None:
    data = DESCRIBED[name](PLAIN[name](), OTHER_XMP)
    after, found = prepared(tmp_path, data, GENERATED)
    assert shown_mark(after) == EDITED
    assert marks(after) == 1
    assert b"SECRET" not in after
    assert not found.lost_manifest
    assert pixels(after) == pixels(data)


@pytest.mark.parametrize("name", FORMATS)
def test_the_mark_of_a_photo_does_not_keep_that_of_ai_away(tmp_path: Path, name: str) -> None:
    """A node may copy the metadata of the photo that it was given."""
    photo = write_xmp(EDITED).replace(EDITED.encode(), b"digitalCapture")
    after, _ = prepared(tmp_path, DESCRIBED[name](PLAIN[name](), photo), EDITED)
    assert shown_mark(after) == EDITED
    assert marks(after) == 1
    unmarked, _ = prepared(tmp_path, DESCRIBED[name](PLAIN[name](), photo))
    assert shown_mark(unmarked) == "digitalCapture", "its workflow loads no model"


@pytest.mark.parametrize("name", FORMATS)
def test_a_prompt_goes_and_a_mark_comes(tmp_path: Path, name: str) -> None:
    data = PRIVATE[name]()
    after, found = prepared(tmp_path, data, EDITED)
    assert shown_mark(after) == EDITED
    assert b"SECRET" not in after
    assert not found.lost_manifest
    assert pixels(after) == pixels(data)


@pytest.mark.parametrize("name", FORMATS)
def test_a_signed_file_without_a_prompt_is_not_touched(tmp_path: Path, name: str) -> None:
    data = SIGNED[name](PLAIN[name](), MANIFEST)
    after, found = prepared(tmp_path, data, GENERATED)
    assert after == data
    assert not found.lost_manifest


@pytest.mark.parametrize("name", FORMATS)
def test_a_signed_file_with_a_prompt_loses_both_and_keeps_its_mark(
    tmp_path: Path, name: str
) -> None:
    data = SIGNED[name](PRIVATE[name](), MANIFEST)
    after, found = prepared(tmp_path, data, GENERATED)
    assert found.lost_manifest
    assert shown_mark(after) == EDITED, "as the manifest said"
    assert b"c2pa" not in after
    assert b"SECRET" not in after
    assert pixels(after) == pixels(data)


@pytest.mark.parametrize("name", FORMATS)
def test_a_prompt_inside_a_manifest_is_a_prompt(tmp_path: Path, name: str) -> None:
    data = SIGNED[name](PLAIN[name](), MANIFEST + SECRET.encode())
    after, found = prepared(tmp_path, data)
    assert found.lost_manifest
    assert b"SECRET" not in after


def test_the_mark_of_a_compressed_packet_stays(tmp_path: Path) -> None:
    body = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(write_xmp(EDITED))
    after, _ = prepared(tmp_path, with_png(noise("PNG"), saved_files.chunk(b"iTXt", body)))
    assert shown_mark(after) == EDITED


def test_a_compressed_text_counts_as_a_prompt(tmp_path: Path) -> None:
    text = saved_files.chunk(b"zTXt", b"other\0\0" + zlib.compress(SECRET.encode()))
    data = SIGNED["png"](with_png(noise("PNG"), text), MANIFEST)
    after, found = prepared(tmp_path, data)
    assert found.lost_manifest
    assert b"zTXt" not in after


@pytest.mark.parametrize("name", FORMATS)
def test_where_metadata_is_kept_only_a_mark_is_added(tmp_path: Path, name: str) -> None:
    data = PRIVATE[name]()
    after, _ = prepared(tmp_path, data, GENERATED, strips=False)
    assert marks(after) == 1
    assert pixels(after) == pixels(data)
    assert (b"SECRET" in after) == (b"SECRET" in data)
    for whole in (SIGNED[name](data, MANIFEST), DESCRIBED[name](data, OTHER_XMP)):
        assert prepared(tmp_path, whole, GENERATED, strips=False)[0] == whole


def test_a_film_whose_last_part_is_open_gets_a_mark(tmp_path: Path) -> None:
    data = plain_film()
    last = data + struct.pack(">I4s", 0, b"free") + bytes(100)
    after, _ = prepared(tmp_path, last, GENERATED)
    assert after[len(data) : len(data) + 4] == struct.pack(">I", 108)
    assert shown_mark(after) == GENERATED
    assert pixels(after) == pixels(data)


def test_a_signed_picture_of_the_gateway_keeps_its_prompt(tmp_path: Path) -> None:
    path, data = tmp_path / "file", SIGNED["png"](PRIVATE["png"](), MANIFEST)
    path.write_bytes(data)
    assert replace_prompt(path, "{}") == len(data)
    assert path.read_bytes() == data


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_or_loses_its_texts(tmp_path: Path, name: str) -> None:
    whole = SIGNED[name](DESCRIBED[name](PRIVATE[name](), OTHER_XMP), MANIFEST)
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        with contextlib.suppress(InvalidInput):
            assert b"class_type" not in prepared(tmp_path, whole[:length], GENERATED)[0]


@given(st.data())
def test_any_changed_bytes_are_survived_or_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FORMATS))
    whole = bytearray(SIGNED[name](DESCRIBED[name](_small(name), OTHER_XMP), MANIFEST))
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = Path(_scratch.name) / "fuzzed"
    path.write_bytes(whole)
    try:
        size = prepare_file(path, mark=GENERATED).size
    except InvalidInput:
        return
    assert size == path.stat().st_size <= len(whole) + 2_000


def _small(name: str) -> bytes:
    return _small_files.setdefault(name, PRIVATE[name]())


_small_files: dict[str, bytes] = {}
_scratch = tempfile.TemporaryDirectory()
