"""Prompts and workflows are taken out of files; pictures, frames and sounds stay as they were."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest
from tests.unit import saved_files

from comfyfleet.delivery import strip_metadata
from comfyfleet.errors import InvalidInput
from comfyfleet.media import replace_prompt
from comfyfleet.media_boxes import empty_items

SECRET = "OPERATOR-SECRET-SYSTEM-PROMPT"
TEXTS = {"prompt": SECRET, "workflow": SECRET * 200, "comment": SECRET}
FILMS = ["mp4", "mov", "webm", "matroska"]
SOUNDS = [("flac", "flac"), ("mp3", "libmp3lame"), ("ogg", "libopus")]


def stripped(tmp_path: Path, data: bytes) -> bytes:
    path = tmp_path / "file"
    path.write_bytes(data)
    size = strip_metadata(path)
    after = path.read_bytes()
    assert size == len(after)
    return after


def pixels(data: bytes) -> Any:
    with PIL.Image.open(io.BytesIO(data)) as picture:
        return [np.asarray(picture.convert("RGBA")), getattr(picture, "n_frames", 1)]


def decoded(data: bytes) -> list[bytes]:
    with av.open(io.BytesIO(data), "r") as container:
        assert not {key.lower() for key in container.metadata} & {"prompt", "workflow", "comment"}
        return [bytes(frame.planes[0]) for frame in container.decode()]


def tags() -> PIL.Image.Exif:
    found = PIL.Image.Exif()
    found[0x010F], found[0x0110] = f"workflow:{SECRET}", f"prompt:{SECRET}"
    return found


@pytest.mark.parametrize(
    "data",
    [
        saved_files.png({"prompt": SECRET}),
        saved_files.webp(tags()),
        saved_files.jpeg(tags(), comment=SECRET),
        saved_files.encoded("GIF", comment=SECRET.encode()),
        saved_files.encoded("AVIF", exif=tags(), xmp=f"<x>{SECRET}</x>".encode()),
    ],
    ids=["png", "webp", "jpeg", "gif", "avif"],
)
def test_a_picture_loses_its_texts_and_no_pixel(tmp_path: Path, data: bytes) -> None:
    after = stripped(tmp_path, data)
    assert SECRET.encode() in data
    assert SECRET.encode() not in after
    assert np.array_equal(pixels(after)[0], pixels(data)[0])
    assert stripped(tmp_path, after) == after


@pytest.mark.parametrize("make", [saved_files.animated_webp, saved_files.animated_png])
def test_an_animation_keeps_its_frames(tmp_path: Path, make: Any) -> None:
    after = stripped(tmp_path, make())
    assert pixels(after)[1] == pixels(make())[1] > 1
    assert b"comf" not in after


def animation(image_format: str, **options: Any) -> bytes:
    first, *rest = [PIL.Image.new("RGB", (16, 16), (shade, 9, 99)) for shade in (0, 120, 240)]
    buffer = io.BytesIO()
    first.save(buffer, image_format, save_all=True, append_images=rest, duration=50, **options)
    return buffer.getvalue()


def with_xmp(gif: bytes) -> bytes:
    """As the specification of XMP says: the text as it is, and a trailer that leads to its end."""
    trailer = b"\x01" + bytes(range(255, -1, -1)) + b"\0"
    return gif[:-1] + b"\x21\xff\x0bXMP DataXMP" + SECRET.encode() * 20 + trailer + b";"


def test_an_animated_gif_plays_on_as_often_without_comment_and_xmp(tmp_path: Path) -> None:
    data = with_xmp(animation("GIF", loop=3, comment=SECRET.encode()))
    after = stripped(tmp_path, data)
    assert data.count(SECRET.encode()) >= 21
    assert SECRET.encode() not in after
    with PIL.Image.open(io.BytesIO(after)) as picture:
        assert (getattr(picture, "n_frames", 1), picture.info["loop"]) == (3, 3)
        assert "xmp" not in picture.info
    assert np.array_equal(pixels(after)[0], pixels(data)[0])


def test_an_animated_avif_keeps_its_frames_and_no_text(tmp_path: Path) -> None:
    data = animation("AVIF", exif=tags(), xmp=f"<x>{SECRET}</x>".encode())
    after = stripped(tmp_path, data)
    assert SECRET.encode() in data
    assert SECRET.encode() not in after
    assert len(after) == len(data)
    with PIL.Image.open(io.BytesIO(after)) as picture:
        assert getattr(picture, "n_frames", 1) == 3
        assert not dict(picture.getexif())


@pytest.mark.parametrize("container", FILMS)
def test_a_film_loses_its_tags_and_no_frame(tmp_path: Path, container: str) -> None:
    data = saved_files.video(container, TEXTS)
    after = stripped(tmp_path, data)
    assert SECRET.encode() in data
    assert SECRET.encode() not in after
    assert len(decoded(after)) == 1
    assert len(after) == len(data)


@pytest.mark.parametrize(("container", "codec"), SOUNDS)
def test_a_sound_loses_its_tags_and_no_sample(tmp_path: Path, container: str, codec: str) -> None:
    data = saved_files.sound(container, codec, TEXTS)
    after = stripped(tmp_path, data)
    assert SECRET.encode() in data
    assert SECRET.encode() not in after
    assert decoded(after)


def test_comments_over_many_pages_go_and_the_sound_stays(tmp_path: Path) -> None:
    data = saved_files.sound("ogg", "libopus", {"workflow": SECRET * 40_000})
    after = stripped(tmp_path, data)
    assert SECRET.encode() not in after
    assert len(after) == len(data)
    with av.open(io.BytesIO(data), "r") as container:
        assert decoded(after) == [bytes(frame.planes[0]) for frame in container.decode()]


def test_a_model_and_a_drawing_lose_their_texts(tmp_path: Path) -> None:
    model, drawing = saved_files.glb({"prompt": SECRET}), saved_files.svg()
    assert SECRET.encode() not in stripped(tmp_path, model)
    assert len(stripped(tmp_path, model)) == len(model)
    assert b"<metadata" in drawing
    after = stripped(tmp_path, drawing)
    assert b"<metadata" not in after
    assert b"</svg>" in after


@pytest.mark.parametrize(
    "name", ["png", "webp", "jpeg", "gif", "avif", "mp4", "webm", "flac", "mp3", "ogg", "glb"]
)
def test_a_damaged_file_is_refused_or_loses_its_texts(tmp_path: Path, name: str) -> None:
    kinds: dict[str, Callable[[], bytes]] = {
        "png": lambda: saved_files.png(TEXTS),
        "webp": lambda: saved_files.webp(tags()),
        "jpeg": lambda: saved_files.jpeg(tags(), comment=SECRET),
        "gif": lambda: with_xmp(animation("GIF", comment=SECRET)),
        "avif": lambda: animation("AVIF", exif=tags()),
        "mp4": lambda: saved_files.video("mp4", TEXTS),
        "webm": lambda: saved_files.video("webm", TEXTS),
        "flac": lambda: saved_files.sound("flac", "flac", TEXTS),
        "mp3": lambda: saved_files.sound("mp3", "libmp3lame", TEXTS),
        "ogg": lambda: saved_files.sound("ogg", "libopus", TEXTS),
        "glb": lambda: saved_files.glb(TEXTS),
    }
    whole = kinds[name]()
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        with contextlib.suppress(InvalidInput):
            assert SECRET.encode() not in stripped(tmp_path, whole[:length])


@pytest.mark.parametrize("data", [b"", b"made", b"<html>"])
def test_what_is_no_media_stays_as_it_is(tmp_path: Path, data: bytes) -> None:
    assert stripped(tmp_path, data) == data


class Counting(io.BytesIO):
    written = 0

    def write(self, data: Any) -> int:
        self.written += len(data)
        return super().write(data)


def test_an_avif_that_names_the_same_place_very_often_is_written_once() -> None:
    """Else a small file would cost a write of its whole length for each of its items."""
    entry = saved_files.box(b"infe", b"\2\0\0\0", b"\0\1", b"\0\0", b"Exif", b"\0")
    iinf = saved_files.box(b"iinf", bytes(4), b"\0\1", entry)
    item = b"\0\1" + b"\0\0" + b"\xff\xff" + (bytes(4) + (50_000).to_bytes(4, "big")) * 65_535
    iloc = saved_files.box(b"iloc", bytes(4), b"\x44\0", b"\0\1", item)
    meta = saved_files.box(b"meta", bytes(4), iinf, iloc)
    data = saved_files.box(b"ftyp", b"avif", bytes(4)) + meta
    file = Counting(data)
    empty_items(file, iinf[8:], iloc[8:], 0)
    assert 0 < file.written <= len(data)


def test_a_picture_gets_another_prompt_and_keeps_everything_else(tmp_path: Path) -> None:
    data = saved_files.png({"prompt": SECRET, "workflow": "as it was"})
    path = tmp_path / "file"
    path.write_bytes(data)
    size = replace_prompt(path, '{"1": {}}')
    after = path.read_bytes()
    assert size == len(after)
    with PIL.Image.open(io.BytesIO(after)) as picture:
        picture.load()
        assert picture.text == {"prompt": '{"1": {}}', "workflow": "as it was"}  # type: ignore[attr-defined]
    assert np.array_equal(pixels(after)[0], pixels(data)[0])


@pytest.mark.parametrize(
    "data",
    [saved_files.jpeg(tags(), comment=SECRET), saved_files.png({}), b"\x89PNG\r\n\x1a\n\0", b""],
)
def test_files_without_a_prompt_of_comfyui_stay_as_they_are(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    assert replace_prompt(path, "{}") == len(data)
    assert path.read_bytes() == data
