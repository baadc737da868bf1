import numpy as np
import pytest

from comfyfleet.engine.image_math import (
    Mask,
    blur,
    dilate,
    gaussian,
    match_channels,
    repeat_to,
    standard_normal,
    to_bytes,
)
from comfyfleet.engine.node import require_memory
from comfyfleet.errors import LimitExceeded, NodeFailed


def dot() -> Mask:
    mask = np.zeros((1, 5, 5), np.float32)
    mask[0, 2, 2] = 1
    return mask


def test_bytes_are_truncated_not_rounded() -> None:
    values = np.array([-1, 0, 0.5, 0.999, 1, 7], np.float32)
    assert to_bytes(values).tolist() == [0, 0, 127, 254, 255, 255]


def test_loading_and_saving_keeps_every_byte() -> None:
    every = np.arange(256, dtype=np.uint8)
    assert (to_bytes(every.astype(np.float32) / np.float32(255)) == every).all()


def test_an_array_that_would_fill_the_memory_is_refused() -> None:
    require_memory(1, 8192, 16384, 3)
    with pytest.raises(LimitExceeded, match="4096x16384x16384x3"):
        require_memory(4096, 16384, 16384, 3)


def test_a_batch_is_cut_or_repeated() -> None:
    batch = np.arange(3, dtype=np.float32).reshape(3, 1, 1)
    assert repeat_to(batch, 2).reshape(-1).tolist() == [0, 1]
    assert repeat_to(batch, 5).reshape(-1).tolist() == [0, 1, 2, 0, 1]


def test_channels_follow_the_target() -> None:
    rgb, rgba = np.zeros((1, 1, 1, 3), np.float32), np.zeros((1, 1, 1, 4), np.float32)
    assert match_channels(rgb, rgba).tolist() == [[[[0, 0, 0, 1]]]]
    assert match_channels(rgba, rgb).shape[-1] == 3
    assert match_channels(rgb, rgb) is rgb


def test_sigma_is_in_units_of_the_radius() -> None:
    assert gaussian(1, 1.0) == pytest.approx(gaussian(8, 1.0)[::8] / gaussian(8, 1.0)[::8].sum())


def test_blur_keeps_a_flat_picture_and_mirrors_its_borders() -> None:
    flat = np.full((1, 3, 4, 3), 0.25, np.float32)
    assert blur(flat, 2, 1.0) == pytest.approx(0.25)
    edge = np.array([1, 0, 0], np.float32).reshape(1, 1, 3, 1).repeat(3, axis=1)
    weights = gaussian(1, 1.0)
    assert blur(edge, 1, 1.0)[0, 1, 0, 0] == pytest.approx(weights[1])


@pytest.mark.parametrize("radius", [3, 4])
def test_a_radius_that_reaches_over_the_picture_fails(radius: int) -> None:
    with pytest.raises(NodeFailed, match="too large"):
        blur(np.zeros((1, 3, 9, 3), np.float32), radius, 1.0)


def test_tapered_corners_grow_a_diamond() -> None:
    assert dilate(dot(), 1, tapered_corners=True).sum() == 5
    assert dilate(dot(), 2, tapered_corners=True).sum() == 13
    assert dilate(dot(), 1, tapered_corners=False).sum() == 9


def test_growing_stops_when_nothing_changes() -> None:
    assert dilate(dot(), 16384, tapered_corners=True).all()
    assert not dilate(dot(), -16384, tapered_corners=True).any()
    assert dilate(dot(), 0, tapered_corners=True).sum() == 1


def test_shrinking_does_not_eat_into_a_mask_from_the_border() -> None:
    assert dilate(np.ones((1, 3, 3), np.float32), -1, tapered_corners=False).all()


def test_noise_depends_on_the_low_bits_of_the_seed_only() -> None:
    assert (standard_normal(40, 42) == standard_normal(40, 2**32 + 42)).all()
    assert (standard_normal(40, 42) != standard_normal(40, 43)).any()


@pytest.mark.parametrize("count", [1, 15, 16, 17, 48])
def test_noise_of_any_length_is_finite(count: int) -> None:
    drawn = standard_normal(count, 7)
    assert drawn.shape == (count,)
    assert np.isfinite(drawn).all()


def test_noise_is_normal() -> None:
    drawn = standard_normal(20_000, 1)
    assert abs(float(drawn.mean())) < 0.03
    assert abs(float(drawn.std()) - 1) < 0.03


def test_the_last_incomplete_block_is_drawn_anew() -> None:
    assert (standard_normal(17, 3)[:1] == standard_normal(32, 3)[:1]).all()
    assert (standard_normal(17, 3)[1:16] != standard_normal(32, 3)[1:16]).any()
