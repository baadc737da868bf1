"""What flows between nodes, and the step from numbers to bytes.

Images are float32 [batch, height, width, channel], masks float32 [batch, height, width], as in
ComfyUI; nothing is rounded or clamped between nodes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.float32]
Mask = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
# Anything with height and width as second and third axis.
Picture = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    """Samples as float32 [batch, channel, sample]."""

    waveform: npt.NDArray[np.float32]
    sample_rate: int


def f32(array: Any) -> Image:
    """Nodes compute in double precision where it matters, but hand on float32."""
    return np.asarray(array, dtype=np.float32)


def to_bytes(picture: Picture) -> Bytes:
    """0..1 → 0..255 by truncation, as ComfyUI saves; rounding would be one off half the time."""
    scaled: Picture = np.clip(np.float32(255.0) * picture, 0, 255)
    return scaled.astype(np.uint8)


def from_bytes(pixels: Bytes) -> Image:
    return pixels.astype(np.float32) / np.float32(255.0)


def as_masks(mask: Mask) -> Mask:
    """A mask without a batch becomes a batch of one."""
    return mask.reshape((-1, *mask.shape[-2:]))


def mask_to_image(mask: Mask) -> Image:
    return np.repeat(as_masks(mask)[..., np.newaxis], 3, axis=-1)


def repeat_to(pictures: Picture, count: int) -> Picture:
    """A batch of exactly `count`: cut, or repeated from its beginning."""
    if len(pictures) >= count:
        return pictures[:count]
    times = -(-count // len(pictures))
    return np.concatenate([pictures] * times)[:count]


def with_alpha(image: Image, alpha: float = 1.0) -> Image:
    """One channel more, of one value everywhere."""
    return np.concatenate([image, np.full_like(image[..., :1], alpha)], axis=-1)


def match_channels(source: Image, target: Image) -> Image:
    """`source` with as many channels as `target`: alpha is cut off, or added as opaque."""
    if source.shape[-1] > target.shape[-1]:
        return source[..., : target.shape[-1]]
    return with_alpha(source) if source.shape[-1] < target.shape[-1] else source
