"""Image and mask arithmetic with ComfyUI's results: conversion to bytes, resizing, blur, growing
and shrinking of masks, and torch's noise.

Images are float32 [batch, height, width, channel] and masks float32 [batch, height, width], as in
ComfyUI. Values aren't rounded or clamped between nodes. Resizing uses torch's `interpolate` without
antialiasing, or Pillow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from comfyfleet.engine.node import require_memory
from comfyfleet.errors import NodeFailed

Image = npt.NDArray[np.float32]
Mask = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
# An array whose second and third axes are height and width.
Picture = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    """Samples as float32 [batch, channel, sample]."""

    waveform: npt.NDArray[np.float32]
    sample_rate: int


def f32(array: Any) -> Image:
    """Converts to float32. Nodes compute in double precision where it matters, but return
    float32."""
    return np.asarray(array, dtype=np.float32)


def to_bytes(picture: Picture) -> Bytes:
    """Converts 0..1 to 0..255 by truncation, as ComfyUI does when it saves. Rounding would differ
    by one in half of the cases."""
    scaled: Picture = np.clip(np.float32(255.0) * picture, 0, 255)
    return scaled.astype(np.uint8)


def from_bytes(pixels: Bytes) -> Image:
    return pixels.astype(np.float32) / np.float32(255.0)


def as_masks(mask: Mask) -> Mask:
    """Returns masks with a batch axis. A mask without one becomes a batch with a single mask."""
    return mask.reshape((-1, *mask.shape[-2:]))


def mask_to_image(mask: Mask) -> Image:
    return np.repeat(as_masks(mask)[..., np.newaxis], 3, axis=-1)


def repeat_to(pictures: Picture, count: int) -> Picture:
    """Returns a batch of exactly `count` images, by truncating the batch or repeating it from its
    beginning."""
    if len(pictures) >= count:
        return pictures[:count]
    times = -(-count // len(pictures))
    return np.concatenate([pictures] * times)[:count]


def with_alpha(image: Image, alpha: float = 1.0) -> Image:
    """Adds an alpha channel with the same value everywhere."""
    return np.concatenate([image, np.full_like(image[..., :1], alpha)], axis=-1)


def match_channels(source: Image, target: Image) -> Image:
    """Returns `source` with as many channels as `target`. An alpha channel is removed, or added as
    opaque."""
    if source.shape[-1] > target.shape[-1]:
        return source[..., : target.shape[-1]]
    return with_alpha(source) if source.shape[-1] < target.shape[-1] else source


METHODS = ("nearest-exact", "bilinear", "area", "bicubic", "lanczos")
CROPS = ("disabled", "center")
# Parameter of the cubic kernel that torch uses. Other libraries use -0.5.
CUBIC_A = -0.75

Indices = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float64]
# An array of float32 for the input, and of float64 after the first axis is resized.
Values = npt.NDArray[Any]


def resize(
    picture: Picture, width: int, height: int, method: str, crop: str = "disabled"
) -> Picture:
    """Scales to `width` x `height`. With crop `center`, first crops to the new aspect ratio."""
    if crop == "center":
        picture = crop_to_aspect(picture, width, height)
    _require_size(picture, width, height, method)
    require_memory(picture.shape[0], height, width, *picture.shape[3:])
    if method == "lanczos":
        return _lanczos(picture, width, height)
    along = _ALONG[method]
    return f32(along(along(picture, 1, height), 2, width))


def crop_to_aspect(picture: Picture, width: int, height: int) -> Picture:
    """Crops equally on both sides until the aspect ratio is that of `width` x `height`."""
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
    # Area averaging can return an empty image, but the other methods refuse empty sizes.
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
    # Computed in float32 like torch, because rounding matters where (i + 0.5) * old / size is an
    # integer.
    old = picture.shape[axis]
    position = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(old / size)
    index = np.minimum(np.floor(position).astype(np.intp), old - 1)
    nearest: Values = np.take(picture, index, axis=axis)
    return nearest


def _area(picture: Values, axis: int, size: int) -> Values:
    """Returns the mean over [floor(i * old / size), ceil((i + 1) * old / size))."""
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


def gaussian(radius: int, sigma: float) -> npt.NDArray[np.float64]:
    """Returns one row of a Gaussian kernel. The row spans -1 to 1, so `sigma` is relative to the
    radius."""
    x = np.linspace(-1.0, 1.0, 2 * radius + 1)
    row = np.exp(-x * x / (2.0 * sigma * sigma))
    normalized: npt.NDArray[np.float64] = row / row.sum()
    return normalized


def blur(image: Image, radius: int, sigma: float) -> npt.NDArray[np.float64]:
    """Blurs with mirrored borders. The kernel is separable, so each axis is blurred separately."""
    height, width = image.shape[1:3]
    if radius >= min(height, width):
        raise NodeFailed(f"radius {radius} is too large for an image of {width}x{height}")
    row = gaussian(radius, sigma)
    return _along(_along(image.astype(np.float64), 1, row), 2, row)


def _along(
    image: npt.NDArray[np.float64], axis: int, row: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    radius, size = len(row) // 2, image.shape[axis]
    margins = [(radius, radius) if a == axis else (0, 0) for a in range(image.ndim)]
    padded = np.pad(image, margins, mode="reflect")
    before = (slice(None),) * axis
    total = np.zeros_like(image)
    for offset, weight in enumerate(row):
        total += weight * padded[(*before, slice(offset, offset + size))]
    return total


CROSS = ((0, 1), (1, 0), (1, 1), (1, 2), (2, 1))
SQUARE = tuple((y, x) for y in range(3) for x in range(3))


def dilate(mask: Mask, steps: int, tapered_corners: bool) -> Mask:
    """Replaces each pixel by the largest value (or the smallest, if `steps` is negative) in its
    neighborhood. Repeats this abs(`steps`) times."""
    pick: Callable[..., Mask] = np.maximum if steps > 0 else np.minimum
    shape = CROSS if tapered_corners else SQUARE
    for _ in range(abs(steps)):
        grown = _once(mask, shape, pick)
        # Stop early, because there may be thousands of steps after which nothing changes.
        if np.array_equal(grown, mask):
            break
        mask = grown
    return mask


def _once(mask: Mask, shape: tuple[tuple[int, int], ...], pick: Callable[..., Mask]) -> Mask:
    height, width = mask.shape[1:]
    padded = np.pad(mask, ((0, 0), (1, 1), (1, 1)), mode="edge")
    result = mask
    for y, x in shape:
        result = pick(result, padded[:, y : y + height, x : x + width])
    return result


# Torch generates numbers in blocks of this size. For fewer numbers, it uses a different method that
# generates them one by one.
BLOCK = 16
HALF = BLOCK // 2

Words = npt.NDArray[np.uint32]
Normals = npt.NDArray[np.float32]


def standard_normal(count: int, seed: int) -> Normals:
    """Returns `count` normally distributed numbers from a Mersenne Twister, seeded with the low 32
    bits of `seed`."""
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    if count < BLOCK:
        return _singly(generator, count)
    return _in_blocks(generator, count)


def _words(generator: np.random.RandomState, count: int) -> Words:
    # For the full 32-bit range, numpy returns the generator's output unchanged.
    return generator.randint(0, 2**32, size=count, dtype=np.uint32)


def _in_blocks(generator: np.random.RandomState, count: int) -> Normals:
    values = _uniform24(_words(generator, count))
    whole = count - count % BLOCK
    values[:whole] = _box_muller(values[:whole])
    if whole < count:
        # An incomplete last block is replaced by a new full block that overlaps the previous one.
        values[-BLOCK:] = _box_muller(_uniform24(_words(generator, BLOCK)))
    return values


def _uniform24(words: Words) -> Normals:
    return (words & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)


def _box_muller(uniform: Normals) -> Normals:
    """Applies the Box-Muller transform. The first half of each block determines the radius, the
    second half the angle."""
    blocks = uniform.astype(np.float64).reshape(-1, BLOCK)
    radius = np.sqrt(-2 * np.log(1 - blocks[:, :HALF]))
    angle = 2 * np.pi * blocks[:, HALF:]
    pair = (radius * np.cos(angle), radius * np.sin(angle))
    return np.concatenate(pair, axis=1).reshape(-1).astype(np.float32)


def _singly(generator: np.random.RandomState, count: int) -> Normals:
    """Returns numbers that are computed in pairs, each from two 53-bit uniform numbers. If `count`
    is odd, the second number of the last pair is dropped."""
    pairs = -(-count // 2)
    words = _words(generator, 4 * pairs).astype(np.uint64)
    bits = (words[0::2] << np.uint64(32) | words[1::2]) & np.uint64(2**53 - 1)
    uniform = bits.astype(np.float64) * 2.0**-53
    angle, radius = 2 * np.pi * uniform[0::2], np.sqrt(-2 * np.log(1 - uniform[1::2]))
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return both.reshape(-1)[:count].astype(np.float32)
