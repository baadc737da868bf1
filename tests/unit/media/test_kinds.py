"""What a file really is."""

import io
import wave

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from comfyfleet.errors import InvalidInput
from comfyfleet.server.media.model import (
    SNIFF_BYTES,
    canonical_type,
    check_claim,
    is_media_type,
    kind_of,
    sniff_type,
)

EBML = b"\x1a\x45\xdf\xa3\x9f\x42\x86\x81\x01\x42\xf7\x81\x01\x42\xf2\x81\x04\x42\xf3\x81\x08"
OGG = b"OggS\x00\x02" + bytes(20) + b"\x01\x1e"


@pytest.mark.parametrize(
    ("saved_as", "media_type"),
    [
        ("PNG", "image/png"),
        ("JPEG", "image/jpeg"),
        ("WEBP", "image/webp"),
        ("GIF", "image/gif"),
        ("AVIF", "image/avif"),
    ],
)
def test_pictures_are_known_as_pillow_writes_them(saved_as: str, media_type: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, saved_as)
    assert sniff_type(buffer.getvalue()[:SNIFF_BYTES]) == media_type


def encoded(container: str, codec: str) -> bytes:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        if codec in ("flac", "libmp3lame", "libopus", "aac"):
            stream = output.add_stream(codec, rate=48000)
            layout = "flt" if codec == "libopus" else "s16"
            planar = {"aac": "fltp", "libmp3lame": "s16p"}.get(codec, layout)
            channels = 1
            dtype = np.float32 if "flt" in planar else np.int16
            frame = av.AudioFrame.from_ndarray(
                np.zeros((channels, 1024), dtype), format=planar, layout="mono"
            )
            frame.sample_rate = 48000
        else:
            stream = output.add_stream(codec, rate=24)
            stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"  # type: ignore[union-attr]
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")  # type: ignore[assignment]
        output.mux(stream.encode(frame))  # type: ignore[union-attr, arg-type]
        output.mux(stream.encode(None))  # type: ignore[union-attr]
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("container", "codec", "media_type"),
    [
        ("mp4", "mpeg4", "video/mp4"),
        ("mov", "mpeg4", "video/quicktime"),
        ("webm", "libvpx-vp9", "video/webm"),
        ("matroska", "mpeg4", "video/x-matroska"),
        ("avi", "mpeg4", "video/x-msvideo"),
        ("flac", "flac", "audio/flac"),
        ("mp3", "libmp3lame", "audio/mpeg"),
        ("ogg", "libopus", "audio/ogg"),
        ("ipod", "aac", "audio/mp4"),
    ],
)
def test_films_and_sound_are_known_as_ffmpeg_writes_them(
    container: str, codec: str, media_type: str
) -> None:
    assert sniff_type(encoded(container, codec)[:SNIFF_BYTES]) == media_type


def test_a_wave_is_known() -> None:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(16))
    assert sniff_type(buffer.getvalue()) == "audio/wav"


@pytest.mark.parametrize(
    ("first", "media_type"),
    [
        (b"\0\0\0\x14ftypqt  " + bytes(8), "video/quicktime"),
        (b"\0\0\0\x18ftypheic" + bytes(8), "image/heic"),
        (b"\0\0\0\x08wide\0\0\x10\0mdat", "video/quicktime"),
        (EBML + b"\x42\x82\x84webm", "video/webm"),
        (EBML + b"\x42\x82\x88matroska", "video/x-matroska"),
        (OGG + b"\x01vorbis", "audio/ogg"),
        (OGG + b"\x80theora", "video/ogg"),
        (b"\xff\xfb\x90\x64" + bytes(20), "audio/mpeg"),
        (b"RF64\xff\xff\xff\xffWAVEds64", "audio/wav"),
    ],
)
def test_rarer_beginnings_are_known(first: bytes, media_type: str) -> None:
    assert sniff_type(first) == media_type


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'>",
        b"<!doctype html>",
        b"MZ\x90\0",
        b"PK\x03\x04",
        b"%PDF-1.7",
        b"\x89PNG\n\x1a\n",  # a PNG that went through a text mode
        b"RIFF\0\0\0\0sfbk",
        b"\xff\xf1\x50\x80",  # AAC
        b"\xff\xff\xff\xff",
        EBML,
        EBML + b"\x42\x82",
        b"\xff\xd8",
    ],
)
def test_what_is_no_media_is_not_taken_for_it(first: bytes) -> None:
    assert sniff_type(first) is None


@pytest.mark.parametrize(
    ("claimed", "is_taken"),
    [
        ("image/png", True),
        ("IMAGE/PNG; charset=binary", True),
        ("image/x-png", True),
        ("image/jpeg", False),
        ("video/mp4", False),
        ("application/octet-stream", False),
        ("", False),
    ],
)
def test_a_claim_must_be_borne_out_by_the_bytes(claimed: str, is_taken: bool) -> None:
    assert is_media_type(claimed, b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR") is is_taken


def test_sound_alone_may_come_in_a_films_container() -> None:
    assert is_media_type("audio/webm", EBML + b"\x42\x82\x84webm")
    assert not is_media_type("video/webm", OGG)


def test_a_wrong_claim_is_told_with_what_was_found() -> None:
    with pytest.raises(InvalidInput, match="announced as image/png, but it is image/jpeg"):
        check_claim("image/png", b"\xff\xd8\xff\xe0")
    with pytest.raises(InvalidInput, match="an unknown type"):
        check_claim("image/png", b"<script>")
    assert check_claim("image/jpg", b"\xff\xd8\xff\xe0") == "image/jpeg"


def test_kinds_go_by_the_family() -> None:
    assert [kind_of(each) for each in ("image/x", "Video/mp4", "text/plain", "")] == [
        "image",
        "video",
        None,
        None,
    ]


@given(st.binary(max_size=64))
def test_no_beginning_is_too_odd(first: bytes) -> None:
    found = sniff_type(first)
    assert found is None or canonical_type(found) == found
