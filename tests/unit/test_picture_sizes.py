"""The size of a picture, from its first bytes."""

from pathlib import Path

import PIL.Image
import pytest

from comfyfleet.media import measure_picture


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "webp", "avif"])
@pytest.mark.parametrize("size", [(1, 1), (640, 480), (3, 1000)])
def test_the_size_is_that_which_was_saved(
    tmp_path: Path, suffix: str, size: tuple[int, int]
) -> None:
    path = tmp_path / f"picture.{suffix}"
    PIL.Image.new("RGB", size).save(path)
    assert measure_picture(path) == size


def test_a_lossless_webp_has_a_size_too(tmp_path: Path) -> None:
    path = tmp_path / "picture.webp"
    PIL.Image.new("RGBA", (300, 7)).save(path, lossless=True)
    assert measure_picture(path) == (300, 7)


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG", b"\xff\xd8\xff", b"RIFF" + bytes(40), b"no picture at all, only text"]
)
def test_what_is_no_picture_has_no_size(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "thing"
    path.write_bytes(data)
    assert measure_picture(path) is None
