"""Resizing with the results of ComfyUI: torch's `interpolate` without antialiasing, or Pillow.

Every function takes [batch, height, width] or [batch, height, width, channel] and gives the same.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from comfyfleet.engine.limits import require_room
from comfyfleet.engine.values import Picture, f32, from_bytes, to_bytes
from comfyfleet.kernel.errors import NodeFailed

METHODS = ("nearest-exact", "bilinear", "area", "bicubic", "lanczos")
CROPS = ("disabled", "center")
# Of the cubic kernel; torch's choice, where others take -0.5.
CUBIC_A = -0.75

Indices = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float64]
# float32 as it comes in, float64 between the two axes.
Values = npt.NDArray[Any]


def resize(
    picture: Picture, width: int, height: int, method: str, crop: str = "disabled"
) -> Picture:
    """Scale to `width` x `height`; `center` first cuts to the new proportions."""
    if crop == "center":
        picture = crop_to_aspect(picture, width, height)
    _require_size(picture, width, height, method)
    require_room(picture.shape[0], height, width, *picture.shape[3:])
    if method == "lanczos":
        return _lanczos(picture, width, height)
    along = _ALONG[method]
    return f32(along(along(picture, 1, height), 2, width))


def crop_to_aspect(picture: Picture, width: int, height: int) -> Picture:
    """Cut the same from both sides until the proportions are those of `width` x `height`."""
    old_height, old_width = picture.shape[1:3]
    if old_height <= 0 or height <= 0 or width <= 0:
        raise NodeFailed(f"can't crop {old_width}x{old_height} to {width}x{height}")
    old_aspect, new_aspect = old_width / old_height, width / height
    x = y = 0
    if old_aspect > new_aspect:
        x = round((old_width - old_width * (new_aspect / old_aspect)) / 2)
    elif old_aspect < new_aspect:
        y = round((old_height - old_height * (old_aspect / new_aspect)) / 2)
    return picture[:, y : old_height - y, x : old_width - x]


def _require_size(picture: Picture, width: int, height: int, method: str) -> None:
    # Averaging over areas may give an empty picture; the other methods refuse to.
    smallest = 0 if method == "area" else 1
    if 0 in picture.shape[1:] or min(width, height) < smallest:
        old_height, old_width = picture.shape[1:3]
        raise NodeFailed(f"can't scale {old_width}x{old_height} to {width}x{height} ({method})")


def _lanczos(picture: Picture, width: int, height: int) -> Picture:
    if len(picture) == 0:
        raise NodeFailed("can't scale an empty batch (lanczos)")
    size = (width, height)
    resized = [
        np.asarray(PIL.Image.fromarray(pixels).resize(size, PIL.Image.Resampling.LANCZOS))
        for pixels in to_bytes(picture)
    ]
    return from_bytes(np.stack(resized))


def _nearest(picture: Values, axis: int, size: int) -> Values:
    # In float32, as torch: where (i + 0.5) * old / size is a whole number, rounding decides.
    old = picture.shape[axis]
    position = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(old / size)
    index = np.minimum(np.floor(position).astype(np.intp), old - 1)
    nearest: Values = np.take(picture, index, axis=axis)
    return nearest


def _area(picture: Values, axis: int, size: int) -> Values:
    """The mean over [floor(i * old / size), ceil((i + 1) * old / size))."""
    old = picture.shape[axis]
    steps = np.arange(size)
    start, end = steps * old // size if size else steps, -(-(steps + 1) * old // max(size, 1))
    sums = np.cumsum(picture, axis=axis, dtype=np.float64)
    sums = np.concatenate([np.zeros_like(np.take(sums, [0], axis=axis)), sums], axis=axis)
    total: Values = np.take(sums, end, axis=axis) - np.take(sums, start, axis=axis)
    return np.divide(total, _on_axis((end - start).astype(np.float64), axis, picture.ndim))


def _bilinear(picture: Values, axis: int, size: int) -> Values:
    old = picture.shape[axis]
    position = np.maximum((np.arange(size) + 0.5) * (old / size) - 0.5, 0)
    low = np.minimum(np.floor(position).astype(np.intp), old - 1)
    share = position - low
    return _weighted(picture, axis, [(low, 1 - share), (np.minimum(low + 1, old - 1), share)])


def _bicubic(picture: Values, axis: int, size: int) -> Values:
    old = picture.shape[axis]
    position = (np.arange(size) + 0.5) * (old / size) - 0.5
    low = np.floor(position).astype(np.intp)
    share = position - low
    taps = [
        (np.clip(low + offset, 0, old - 1), _cubic_weight(share - offset))
        for offset in (-1, 0, 1, 2)
    ]
    return _weighted(picture, axis, taps)


def _cubic_weight(distance: Weights) -> Weights:
    x = np.abs(distance)
    near = ((CUBIC_A + 2) * x - (CUBIC_A + 3)) * x * x + 1
    far = CUBIC_A * (((x - 5) * x + 8) * x - 4)
    return np.where(x <= 1, near, far)


def _weighted(picture: Values, axis: int, taps: list[tuple[Indices, Weights]]) -> Values:
    parts = (
        np.take(picture, index, axis=axis) * _on_axis(weight, axis, picture.ndim)
        for index, weight in taps
    )
    total = next(parts)
    for part in parts:
        total += part
    return total


def _on_axis(values: Weights, axis: int, dimensions: int) -> Weights:
    shape = [1] * dimensions
    shape[axis] = -1
    return values.reshape(shape)


_ALONG: dict[str, Callable[[Values, int, int], Values]] = {
    "nearest-exact": _nearest,
    "area": _area,
    "bilinear": _bilinear,
    "bicubic": _bicubic,
}
