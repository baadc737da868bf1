"""How large pictures are, by their first bytes."""

import io

import PIL.Image
import pytest

from comfyfleet.media import HEADER_BYTES, picture_size
from comfyfleet.server.maintenance.checks import probe_video


def drawn(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    PIL.Image.effect_noise((37, 21), 50).convert("RGB").save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("media_type", "data"),
    [
        ("image/png", drawn("PNG")),
        ("image/gif", drawn("GIF")),
        ("image/jpeg", drawn("JPEG")),
        ("image/jpeg", drawn("JPEG", progressive=True, exif=b"Exif\0\0" + b"x" * 5000)),
        ("image/webp", drawn("WEBP")),
        ("image/webp", drawn("WEBP", lossless=True)),
        ("image/webp", drawn("WEBP", exif=b"Exif\0\0" + b"x" * 50)),
    ],
)
def test_a_pictures_header_tells_its_size(media_type: str, data: bytes) -> None:
    assert picture_size(media_type, data[:HEADER_BYTES]) == (37, 21)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "JPEG", "WEBP"])
def test_a_header_that_breaks_off_tells_nothing(kind: str) -> None:
    data = drawn(kind)
    for length in range(0, 40):
        found = picture_size(f"image/{kind.lower()}", data[:length])
        assert found in (None, (37, 21))


def test_what_is_no_picture_has_no_size() -> None:
    assert picture_size("video/mp4", b"anything") is None
    assert picture_size(None, b"") is None
    assert picture_size("image/jpeg", b"\xff\xd8\xff\xff\0\0" * 5000) is None


def test_what_is_no_film_tells_nothing() -> None:
    assert probe_video(b"no film at all") == {}
