"""Growing and shrinking of masks."""

from collections.abc import Callable

import numpy as np

from comfyfleet.engine.values import Mask

CROSS = ((0, 1), (1, 0), (1, 1), (1, 2), (2, 1))
SQUARE = tuple((y, x) for y in range(3) for x in range(3))


def grow(mask: Mask, steps: int, tapered_corners: bool) -> Mask:
    """`steps` times the largest value (below 0: the smallest) of each pixel's neighbourhood."""
    pick: Callable[..., Mask] = np.maximum if steps > 0 else np.minimum
    shape = CROSS if tapered_corners else SQUARE
    for _ in range(abs(steps)):
        grown = _once(mask, shape, pick)
        # Steps may be thousands, far more than any mask has pixels to give.
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
