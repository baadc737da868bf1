import numpy as np
import pytest

from comfyfleet.engine.image_math import Image, crop_to_aspect, resize
from comfyfleet.errors import NodeFailed


def row(*values: float) -> Image:
    """A picture of one line, one channel."""
    return np.array(values, np.float32).reshape(1, 1, -1, 1)


def scaled(picture: Image, width: int, method: str) -> list[float]:
    return [round(float(v), 4) for v in resize(picture, width, 1, method).reshape(-1)]


@pytest.mark.parametrize(
    ("method", "width", "expected"),
    [
        ("nearest-exact", 3, [0.0, 1.0, 1.0]),
        ("nearest-exact", 1, [1.0]),
        ("bilinear", 4, [0.0, 0.25, 0.75, 1.0]),
        ("area", 1, [0.5]),
        ("area", 3, [0.0, 0.5, 1.0]),
        ("bicubic", 4, [-0.1055, 0.2266, 0.7734, 1.1055]),
    ],
)
def test_two_pixels_are_scaled_as_torch_does(
    method: str, width: int, expected: list[float]
) -> None:
    assert scaled(row(0, 1), width, method) == expected


def test_shrinking_does_not_smooth_unless_it_is_by_area_or_lanczos() -> None:
    stripes = row(0, 1, 0, 1, 0, 1, 0, 1)
    assert scaled(stripes, 2, "nearest-exact") == [0.0, 0.0]
    assert scaled(stripes, 2, "area") == [0.5, 0.5]
    assert 0.3 < resize(np.repeat(stripes, 3, axis=-1), 1, 1, "lanczos").mean() < 0.7


def test_the_nearest_pixel_is_found_in_float32() -> None:
    picture = row(*range(24))
    # 18.5 * 24 / 37 is 12, but 24 / 37 is a little less in float32.
    assert resize(picture, 37, 1, "nearest-exact")[0, 0, 18, 0] == 11


def test_lanczos_works_on_bytes() -> None:
    grey = np.full((1, 2, 2, 3), 0.5, np.float32)
    assert resize(grey, 4, 4, "lanczos") == pytest.approx(127 / 255)


def test_masks_are_scaled_like_images() -> None:
    mask = row(0, 1)[..., 0]
    assert resize(mask, 4, 2, "bilinear").shape == (1, 2, 4)
    assert resize(mask, 4, 2, "lanczos").shape == (1, 2, 4)


def test_a_centered_crop_cuts_the_same_from_both_sides() -> None:
    wide = row(0, 1, 2, 3, 4, 5)
    assert crop_to_aspect(wide, 2, 1).reshape(-1).tolist() == [2, 3]
    assert crop_to_aspect(wide, 6, 1) is not None
    tall = np.moveaxis(wide, 2, 1)
    assert crop_to_aspect(tall, 1, 2).reshape(-1).tolist() == [2, 3]


@pytest.mark.parametrize("method", ["nearest-exact", "bilinear", "bicubic", "lanczos"])
def test_a_side_of_nothing_fails(method: str) -> None:
    with pytest.raises(NodeFailed, match="to 0x1"):
        resize(row(0, 1), 0, 1, method)


def test_an_area_of_nothing_is_an_empty_picture() -> None:
    assert resize(row(0, 1), 0, 1, "area").shape == (1, 1, 0, 1)


def test_an_empty_picture_can_not_be_scaled() -> None:
    with pytest.raises(NodeFailed):
        resize(np.zeros((1, 0, 2, 3), np.float32), 2, 2, "area")
    with pytest.raises(NodeFailed):
        resize(np.zeros((0, 2, 2, 3), np.float32), 2, 2, "lanczos")
    with pytest.raises(NodeFailed):
        crop_to_aspect(row(0, 1), 0, 1)
