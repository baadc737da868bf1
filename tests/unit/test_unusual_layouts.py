"""Prompts in unusual places of a file never reach a customer: they are removed, or the file is refused."""

import contextlib
import io
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import PIL.ImageCms
import pytest
from tests.unit import saved_files
from tests.unit.saved_files import box, chunk
from tests.unit.test_delivery import MANIFEST, SIGNED, marks, uuid_box, with_jpeg, with_webp

from comfyfleet.delivery import SourceType, prepare_file
from comfyfleet.errors import InvalidInput

WORD = b"SECRETSECRET"
PROMPT = b'{"3": {"class_type": "KSampler", "inputs": {"text": "SECRETSECRET"}}}'
TEXTS = {"prompt": PROMPT.decode(), "workflow": PROMPT.decode()}
PACKED = zlib.compress(PROMPT)
XMP_UUID = "be7acfcb97a942e89c71999491e3afac"
OWN_UUID = bytes(range(16)).hex()
ICC = PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("sRGB")).tobytes()


@cache
def noise(image_format: str, *, progressive: bool = False, icc: bool = False) -> bytes:
    picture = PIL.Image.effect_noise((64, 48), 90).convert("RGB")
    buffer = io.BytesIO()
    options: dict[str, Any] = {"progressive": True} if progressive else {}
    picture.save(buffer, image_format, **options, **({"icc_profile": ICC} if icc else {}))
    return buffer.getvalue()


def exif() -> bytes:
    entry = struct.pack("<HHII", 0x9286, 7, len(PROMPT), 26)
    return b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + bytes(4) + PROMPT


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


# PNG


def in_png(*chunks: bytes) -> bytes:
    data = noise("PNG")
    return data[:33] + b"".join(chunks) + data[33:]


def own_chunk_after_pixels() -> bytes:
    return noise("PNG")[:-12] + chunk(b"wfLo", PROMPT) + noise("PNG")[-12:]


PNGS: Mapping[str, Callable[[], bytes]] = {
    "text": lambda: saved_files.png(TEXTS),
    "text after the end": lambda: noise("PNG") + chunk(b"tEXt", b"prompt\0" + PROMPT),
    "bytes after the end": lambda: noise("PNG") + PROMPT,
    "a second picture after the end": lambda: noise("PNG") + saved_files.png(TEXTS),
    "a chunk of its own": lambda: in_png(chunk(b"prVt", PROMPT)),
    "a chunk of its own after the pixels": own_chunk_after_pixels,
    "a text with another spelling": lambda: in_png(chunk(b"teXt", b"prompt\0" + PROMPT)),
    "the name of a palette": lambda: in_png(chunk(b"sPLT", b"prompt\0\x08" + PROMPT)),
    "no color profile": lambda: in_png(chunk(b"iCCP", b"prompt\0\0" + PACKED)),
    "a long resolution": lambda: in_png(chunk(b"pHYs", bytes(9) + PROMPT)),
    "a time": lambda: in_png(chunk(b"tIME", PROMPT)),
}

# JPEG


def in_jpeg(marker: int, body: bytes) -> bytes:
    return with_jpeg(noise("JPEG"), (marker, body))


def with_fill_bytes(*, before: bool) -> bytes:
    data, note = noise("JPEG"), segment(0xE1, exif())
    return data[:2] + (b"\xff" + note if before else note + b"\xff\xff") + data[2:]


def between_scans(note: bytes) -> bytes:
    data = noise("JPEG", progressive=True)
    first = data.index(b"\xff\xda")
    second = data.rfind(b"\xff\xc4", first, data.index(b"\xff\xda", first + 2))
    return data[:second] + note + data[second:]


def two_jpegs() -> bytes:
    return noise("JPEG") + in_jpeg(0xE1, exif())


JPEGS: Mapping[str, Callable[[], bytes]] = {
    "a comment": lambda: in_jpeg(0xFE, PROMPT),
    "Exif": lambda: in_jpeg(0xE1, exif()),
    **{f"APP{number}": lambda n=number: in_jpeg(0xE0 + n, PROMPT) for number in range(16)},  # type: ignore[misc]
    "a thumbnail": lambda: in_jpeg(0xE0, b"JFIF\0\1\1\0\0\1\0\1\1\1" + PROMPT),
    "APP2 after a name": lambda: in_jpeg(0xE2, b"prompt\0" + PROMPT),
    "APP2 that is no profile": lambda: in_jpeg(0xE2, b"ICC_PROFILE\0\1\1" + PROMPT),
    "a profile without an end": lambda: with_jpeg(
        noise("JPEG"),
        (0xE2, b"ICC_PROFILE\0\1\2" + ICC),
        (0xE2, b"ICC_PROFILE\0\2\2" + WORD * 9),
    ),
    "a fill byte before Exif": lambda: with_fill_bytes(before=True),
    "fill bytes behind Exif": lambda: with_fill_bytes(before=False),
    "bytes between segments": lambda: noise("JPEG")[:20] + PROMPT + noise("JPEG")[20:],
    "a reserved marker": lambda: in_jpeg(0xF0, PROMPT),
    "a comment between scans": lambda: between_scans(segment(0xFE, PROMPT)),
    "Exif between scans": lambda: between_scans(segment(0xE1, exif())),
    "a comment before the end": lambda: noise("JPEG")[:-2] + segment(0xFE, PROMPT) + b"\xff\xd9",
    "bytes after the end": lambda: noise("JPEG") + PROMPT,
    "a second picture after the end": two_jpegs,
}

# WebP


def in_webp(kind: bytes, body: bytes = PROMPT) -> bytes:
    return with_webp(noise("WEBP"), (kind, body))


def note_in_a_frame() -> bytes:
    data = saved_files.animated_webp()
    at = data.index(b"ANMF")
    length = struct.unpack_from("<I", data, at + 4)[0]
    note = b"prmt" + struct.pack("<I", len(PROMPT)) + PROMPT + bytes(len(PROMPT) % 2)
    frame = struct.pack("<4sI", b"ANMF", length + len(note))
    grown = data[:at] + frame + data[at + 8 : at + 8 + length] + note + data[at + 8 + length :]
    return grown[:4] + struct.pack("<I", len(grown) - 8) + grown[8:]


WEBPS: Mapping[str, Callable[[], bytes]] = {
    "Exif": lambda: in_webp(b"EXIF"),
    "Exif with another spelling": lambda: in_webp(b"exif"),
    "a chunk of its own": lambda: in_webp(b"prmt"),
    "no color profile": lambda: in_webp(b"ICCP"),
    "bytes after the end": lambda: noise("WEBP") + PROMPT,
    "Exif after the end": lambda: noise("WEBP") + b"EXIF" + struct.pack("<I", len(PROMPT)) + PROMPT,
    "a chunk that was cut off": lambda: noise("WEBP") + b"EXIF\xff\0\0\0" + PROMPT,
    "a chunk in a frame": note_in_a_frame,
}

# GIF


def in_gif(block: bytes) -> bytes:
    data = noise("GIF")
    return data[:-1] + block + b";"


GIFS: Mapping[str, Callable[[], bytes]] = {
    "a plain text": lambda: in_gif(
        b"\x21\x01\x0c" + bytes(12) + bytes([len(PROMPT)]) + PROMPT + b"\0"
    ),
    "an extension of its own": lambda: in_gif(b"\x21\x77" + bytes([len(PROMPT)]) + PROMPT + b"\0"),
    "a long number of loops": lambda: in_gif(
        b"\x21\xff\x0bNETSCAPE2.0" + bytes([len(PROMPT)]) + PROMPT + b"\0"
    ),
    "bytes after the end": lambda: noise("GIF") + PROMPT,
}

# MP4


@cache
def film(container: str = "mp4", *, has_prompt: bool = False) -> bytes:
    return saved_files.video(container, TEXTS if has_prompt else {})


def private_film(container: str = "mp4") -> bytes:
    return film(container, has_prompt=True)


def in_moov(*inner: bytes) -> bytes:
    """Adds boxes to the header, which is the last box."""
    data, at = film(), film().index(b"moov") - 4
    added = b"".join(inner)
    length = struct.unpack_from(">I", data, at)[0]
    assert at + length == len(data)
    return data[:at] + struct.pack(">I", length + len(added)) + data[at + 4 :] + added


def fragment(*boxes: bytes) -> bytes:
    return film() + box(b"moof", *boxes)


def note() -> bytes:
    return box(b"udta", box(b"\xa9cmt", PROMPT))


def in_tables() -> bytes:
    """Adds a box to each level of a track."""
    inner = box(b"stbl", box(b"stts", bytes(8)), box(b"prmt", PROMPT))
    media = box(b"mdia", box(b"minf", inner, box(b"free", PROMPT)), box(b"uuid", PROMPT))
    return in_moov(box(b"trak", box(b"meta", PROMPT), media))


MP4S: Mapping[str, Callable[[], bytes]] = {
    "udta": private_film,
    "4 bytes after the end": lambda: private_film() + b"abcd",
    "20 bytes after the end": lambda: private_film() + b"\xff" * 20,
    "zeros after the end": lambda: private_film() + bytes(20),
    "a text after the end": lambda: film() + PROMPT,
    "a box that was cut off": lambda: film() + struct.pack(">I4s", 999, b"free") + PROMPT,
    "a uuid of its own": lambda: film() + uuid_box(OWN_UUID, PROMPT),
    "a short uuid": lambda: film() + box(b"uuid", b"prompt"),
    "free": lambda: film() + box(b"free", PROMPT),
    "skip": lambda: film() + box(b"skip", PROMPT),
    "an unknown box": lambda: film() + box(b"prmt", PROMPT),
    "udta of the file": lambda: film() + note(),
    "meta of the file": lambda: film() + box(b"meta", bytes(4), PROMPT),
    "meta of the file, open": lambda: film() + struct.pack(">I4s", 0, b"meta") + bytes(4) + PROMPT,
    "free in the header": lambda: in_moov(box(b"free", PROMPT)),
    "a uuid in the header": lambda: in_moov(uuid_box(OWN_UUID, PROMPT)),
    "XMP in the header": lambda: in_moov(uuid_box(XMP_UUID, PROMPT)),
    "XMP of the file": lambda: film() + uuid_box(XMP_UUID, PROMPT),
    "XMP in udta": lambda: in_moov(box(b"udta", box(b"XMP_", PROMPT))),
    "two udta": lambda: in_moov(note(), note()),
    "mvex": lambda: in_moov(box(b"mvex", note())),
    "moof": lambda: fragment(note()),
    "traf": lambda: fragment(box(b"traf", note(), uuid_box(OWN_UUID, PROMPT))),
    "a second film after the end": lambda: film() + private_film(),
    "quicktime after its end": lambda: private_film("mov") + bytes(4),
}
IN_TRACKS = {"tables of a track": in_tables}

# Matroska


def matroska_element(number: bytes, body: bytes) -> bytes:
    return number + b"\x01" + len(body).to_bytes(7, "big") + body


def streamed_webm(*after: bytes) -> bytes:
    """As a program that can't go back writes it: the segment and its cluster have no length."""
    data = bytearray(film("webm"))
    segment_at = data.index(b"\x18\x53\x80\x67")
    data[segment_at + 4 : segment_at + 12] = b"\x01" + b"\xff" * 7
    at = data.index(b"\x1f\x43\xb6\x75")
    wide = 9 - data[at + 4].bit_length()
    length = int.from_bytes(data[at + 4 : at + 4 + wide], "big") & (1 << 7 * wide) - 1
    inner = bytes(data[at + 4 + wide : at + 4 + wide + length])
    return bytes(data[:at]) + b"\x1f\x43\xb6\x75\xff" + inner + b"".join(after)


def tags() -> bytes:
    simple = matroska_element(b"\x45\xa3", b"PROMPT") + matroska_element(b"\x44\x87", PROMPT)
    return matroska_element(
        b"\x12\x54\xc3\x67", matroska_element(b"\x73\x73", matroska_element(b"\x67\xc8", simple))
    )


ATTACHMENT = matroska_element(
    b"\x19\x41\xa4\x69", matroska_element(b"\x61\xa7", matroska_element(b"\x46\x5c", PROMPT))
)
MATROSKAS: Mapping[str, Callable[[], bytes]] = {
    "tags": lambda: private_film("matroska"),
    "the title": lambda: saved_files.video("matroska", {"title": PROMPT.decode()}),
    "zeros after the end": lambda: private_film("webm") + bytes(20),
    "bytes after the end": lambda: private_film("matroska") + b"\xff" * 20,
    "a text after the end": lambda: film("webm") + PROMPT,
    "tags after the end": lambda: film("webm") + tags(),
    "cut off": lambda: private_film("webm")[:-5],
    "tags behind an open cluster": lambda: streamed_webm(tags()),
    "an attachment": lambda: streamed_webm(ATTACHMENT),
    "a void": lambda: streamed_webm(matroska_element(b"\xec", PROMPT)),
    "zeros behind an open segment": lambda: streamed_webm(tags(), bytes(20)),
}

# Sounds


def sound(container: str = "mp3", codec: str = "libmp3lame") -> bytes:
    return saved_files.sound(container, codec, {})


def private_sound(container: str, codec: str) -> bytes:
    return saved_files.sound(container, codec, TEXTS)


def id3(body: bytes) -> bytes:
    return b"ID3\3\0\0" + bytes(len(body) >> shift & 0x7F for shift in (21, 14, 7, 0)) + body


def ape(body: bytes) -> bytes:
    def end(flags: int) -> bytes:
        return b"APETAGEX" + struct.pack("<IIII", 2000, len(body) + 32, 1, flags) + bytes(8)

    return end(1 << 31 | 1 << 29) + body + end(1 << 31)


def two_frames() -> bytes:
    """A tag between the frames of an MP3, as in a file that was joined from two."""
    data = sound()
    at = data.index(b"\xff\xfb")
    return data + id3(PROMPT) + data[at:] + data[at:]


def in_flac(kind: int) -> bytes:
    data = sound("flac", "flac")
    return data[:42] + bytes([kind]) + len(PROMPT).to_bytes(3, "big") + PROMPT + data[42:]


def in_riff(*chunks: tuple[bytes, bytes]) -> bytes:
    return with_webp(sound("wav", "pcm_s16le"), *chunks)


SOUNDS: Mapping[str, Callable[[], bytes]] = {
    "mp3: two tags": lambda: id3(PROMPT) + id3(PROMPT) + sound(),
    "mp3: a tag between frames": two_frames,
    "mp3: APE": lambda: sound() + ape(PROMPT),
    "mp3: APE and ID3": lambda: sound() + ape(PROMPT) + b"TAG" + PROMPT.ljust(125, b"\0"),
    "mp3: bytes after the end": lambda: sound() + PROMPT,
    "flac: behind an ID3 tag": lambda: id3(bytes(10)) + private_sound("flac", "flac"),
    "flac: in and behind an ID3 tag": lambda: id3(PROMPT) + sound("flac", "flac"),
    "flac: APE": lambda: sound("flac", "flac") + ape(PROMPT),
    "flac: an application": lambda: in_flac(2),
    "flac: a picture": lambda: in_flac(6),
    "flac: padding": lambda: in_flac(1),
    "ogg: FLAC": lambda: private_sound("ogg", "flac"),
    "ogg: Opus and bytes after the end": lambda: private_sound("ogg", "libopus") + PROMPT,
    "ogg: one after the other": lambda: sound("ogg", "libopus") + private_sound("ogg", "libopus"),
    "wav: LIST": lambda: saved_files.sound("wav", "pcm_s16le", {"title": PROMPT.decode()}),
    "wav: own": lambda: in_riff((b"prmt", PROMPT), (b"iXML", PROMPT), (b"bext", PROMPT)),
    "wav: after the end": lambda: sound("wav", "pcm_s16le") + b"LIST\xff\0\0\0" + PROMPT,
    "avi: LIST": lambda: saved_files.video("avi", {"title": PROMPT.decode()}),
    "avi: bytes after the end": lambda: saved_files.video("avi", {}) + PROMPT,
}


def with_handler_name(data: bytes) -> bytes:
    """Writes a text into the name of a track's handler."""
    assert b"VideoHandler" in data
    return data.replace(b"VideoHandler", WORD)


def fragmented_film() -> bytes:
    file = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov"}
    with av.open(file, mode="w", format="mp4", options=options) as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        container.mux(stream.encode(av.VideoFrame(16, 16, "yuv420p")))
        container.mux(stream.encode(None))
    return file.getvalue()


HANDLER_NAMES: dict[str, Callable[[], bytes]] = {
    "a film": lambda: with_handler_name(film()),
    "quicktime": lambda: with_handler_name(film("mov")),
    "fragments": lambda: with_handler_name(fragmented_film()),
}
LAYOUTS = {
    f"{name}: {layout}": make
    for name, layouts in {
        "png": PNGS, "jpeg": JPEGS, "webp": WEBPS, "gif": GIFS, "mp4": MP4S,
        "mp4 handler": HANDLER_NAMES,
        "matroska": MATROSKAS, "sound": SOUNDS,
    }.items()
    for layout, make in layouts.items()
}  # fmt: skip


def prepared(tmp_path: Path, data: bytes, mark: str | None = None, *, strips: bool = True) -> bytes:
    path = tmp_path / "made.bin"
    path.write_bytes(data)
    size = prepare_file(path, mark=mark, strips=strips).size
    after = path.read_bytes()
    assert size == len(after)
    return after


def shown(data: bytes) -> list[bytes]:
    """Returns the decoded frames and samples."""
    with PIL.Image.open(io.BytesIO(data)) as picture:
        frames = []
        for number in range(getattr(picture, "n_frames", 1)):
            picture.seek(number)
            frames.append(np.asarray(picture.convert("RGBA")).tobytes())
        return frames


def played(data: bytes) -> list[bytes]:
    with av.open(io.BytesIO(data), "r") as container:
        return [bytes(frame.planes[0]) for frame in container.decode()]


def decoded(layout: str, data: bytes) -> list[bytes]:
    return shown(data) if layout.startswith(("png", "jpeg", "webp", "gif")) else played(data)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mark", [None, SourceType.GENERATED])
def test_no_layout_brings_the_prompt_to_a_customer(
    tmp_path: Path, layout: str, mark: str | None
) -> None:
    data = LAYOUTS[layout]()
    after = prepared(tmp_path, data, mark)
    assert WORD in data or PACKED in data or b"prompt" in data
    assert not any(word in after for word in (WORD, PACKED, b"prompt"))
    shown_after = decoded(layout, after)
    shown_before = shown_after
    with contextlib.suppress(OSError, av.error.InvalidDataError):  # notes that no decoder skips
        shown_before = decoded(layout, data)
    assert shown_after == shown_before != []
    if mark and layout.startswith(("png", "jpeg", "webp", "mp4")) and "quicktime" not in layout:
        assert marks(after) == 1
    assert prepared(tmp_path, after, mark) == after


def test_notes_in_the_tables_of_a_track_go(tmp_path: Path) -> None:
    data = in_tables()
    after = prepared(tmp_path, data)
    assert data.count(WORD) == 4
    assert WORD not in after
    assert len(after) == len(data)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_a_color_profile_stays(tmp_path: Path, image_format: str) -> None:
    after = prepared(tmp_path, noise(image_format, icc=True))
    with PIL.Image.open(io.BytesIO(after)) as picture:
        assert picture.info["icc_profile"] == ICC


@pytest.mark.parametrize("name", SIGNED)
def test_a_signature_does_not_protect_a_prompt_in_an_unusual_place(
    tmp_path: Path, name: str
) -> None:
    plain = {"png": noise("PNG"), "jpeg": noise("JPEG"), "webp": noise("WEBP"), "mp4": film()}
    data = SIGNED[name](plain[name], MANIFEST) + PROMPT
    after = prepared(tmp_path, data)
    assert WORD not in after
    assert b"c2pa" not in after
    assert marks(after) == 1


@pytest.mark.parametrize(
    "layout", ["png: bytes after the end", "jpeg: APP4", "webp: bytes after the end"]
)
def test_kept_metadata_stay_in_unusual_places(tmp_path: Path, layout: str) -> None:
    data = LAYOUTS[layout]()
    after = prepared(tmp_path, data, SourceType.GENERATED, strips=False)
    assert after.count(WORD) == data.count(WORD)
    assert shown(after) == shown(data)
    assert marks(after) == 1


def tiff() -> bytes:
    return saved_files.encoded("TIFF", tiffinfo={270: PROMPT.decode()})


def test_latents_lose_their_texts(tmp_path: Path) -> None:
    data = saved_files.safetensors(TEXTS)
    after = prepared(tmp_path, data)
    assert WORD not in after
    assert len(after) == len(data)


def test_a_drawing_loses_its_comments_and_descriptions(tmp_path: Path) -> None:
    style = b"<style><![CDATA[ a { b: '<!--' } ]]></style>"
    data = (
        b"<svg><!-- SECRET --><desc/><a/><desc>SECRET</desc><s:title lang='a'>SECRET</s:title>"
        + style
        + b"<svg:metadata><desc>SECRET</desc></svg:metadata ><description/><title>SECRET</title></svg>"
    )
    assert prepared(tmp_path, data) == b"<svg><a/>" + style + b"<description/></svg>"


def test_begins_without_an_end_in_a_drawing_stay(tmp_path: Path) -> None:
    data = b"<svg><title><!-- SECRET --><desc>SECRET</desc><a/><!--<metadata></svg>"
    assert prepared(tmp_path, data) == b"<svg><title><a/><!--<metadata></svg>"


def glb_with(*chunks: bytes) -> bytes:
    data = saved_files.glb({}) + b"".join(chunks)
    return data[:8] + struct.pack("<I", len(data)) + data[12:]


@pytest.mark.parametrize(
    "data",
    [
        glb_with(struct.pack("<I4s", len(PROMPT), b"PRMT") + PROMPT),
        saved_files.glb({}) + PROMPT,
    ],
)
def test_models_lose_unknown_chunks_and_bytes_after_the_end(tmp_path: Path, data: bytes) -> None:
    assert WORD not in prepared(tmp_path, data)


def pixels_with_a_note() -> bytes:
    """A WebP whose pixels, by their length, go on to the end of the file."""
    data = in_webp(b"prmt")
    return data[:16] + struct.pack("<I", len(data) - 20) + data[20:]


REFUSED: Mapping[str, Callable[[], bytes]] = {
    "TIFF": tiff,
    "a text": lambda: PROMPT,
    "a text in UTF-16": lambda: PROMPT.decode().encode("utf-16"),
    "an SVG with a comment without an end": lambda: b"<svg><!--" + PROMPT + b"</svg>",
    "an MP4 without a header": lambda: box(b"ftyp", b"isom") + box(b"udta", PROMPT),
    "an MP4 with a broken header": lambda: (
        box(b"ftyp", b"isom") + box(b"moov", struct.pack(">I4s", 999, b"udta"), PROMPT)
    ),
    "an MP4 with a compressed header": lambda: (
        box(b"ftyp", b"qt  ") + box(b"moov", box(b"cmov", PACKED + WORD))
    ),
    "a PNG with broken chunks": lambda: noise("PNG")[:40] + bytes(20) + PROMPT,
    "a JPEG without a scan": lambda: b"\xff\xd8" + segment(0xFE, PROMPT) + b"\xff\xd9",
    "a WebP without pixels": lambda: with_webp(b"RIFF\4\0\0\0WEBP", (b"EXIF", PROMPT)),
    "a WebP with a wrong length": pixels_with_a_note,
    "a GIF without an end": lambda: noise("GIF")[:-1] + b"\x77" + PROMPT,
    "an MP3 without frames": lambda: id3(PROMPT) + b"nothing",
    "a WebM without a segment": lambda: film("webm")[:20].ljust(60, b"\0") + PROMPT,
    "an Ogg of an unknown codec": lambda: private_sound("ogg", "libopus").replace(b"Opus", b"Cups"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_stripped_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(REFUSED[name]())
    with pytest.raises(InvalidInput, match=r"output made\.bin .* set keep_metadata on the effect"):
        prepare_file(path, name="made.bin")


@pytest.mark.parametrize("name", REFUSED)
def test_keep_metadata_delivers_what_would_be_refused(tmp_path: Path, name: str) -> None:
    after = prepared(tmp_path, REFUSED[name](), SourceType.GENERATED, strips=False)
    assert WORD in after.replace(b"\0", b"")


def test_a_text_packed_as_a_color_profile_of_a_signed_picture_is_a_prompt(tmp_path: Path) -> None:
    data = SIGNED["png"](in_png(chunk(b"iCCP", b"icc\0\0" + PACKED)), MANIFEST)
    after = prepared(tmp_path, data)
    assert PACKED not in after
    assert b"c2pa" not in after


def test_a_picture_that_is_too_large_to_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved_files.png(TEXTS)
    monkeypatch.setattr("comfyfleet.delivery.PICTURE_BYTES_MAX", len(data))
    assert WORD not in prepared(tmp_path, data)
    monkeypatch.setattr("comfyfleet.delivery.PICTURE_BYTES_MAX", len(data) - 1)
    with pytest.raises(InvalidInput, match="too large"):
        prepared(tmp_path, data)
    assert prepared(tmp_path, data, SourceType.GENERATED, strips=False) == data


@pytest.mark.parametrize(
    "data", [b"v 1 2 3\nf 1 1 1\n", b'{"answer": 42}', saved_files.encoded("TIFF")]
)
def test_files_of_other_types_without_a_prompt_are_delivered(tmp_path: Path, data: bytes) -> None:
    assert prepared(tmp_path, data) == data
