"""The Gaussian of ComfyUI's blur and sharpen nodes."""

import numpy as np
import numpy.typing as npt

from comfyfleet.engine.values import Image
from comfyfleet.kernel.errors import NodeFailed


def gaussian(radius: int, sigma: float) -> npt.NDArray[np.float64]:
    """One row of the kernel. Sigma is in units of the radius: the row spans -1 to 1."""
    x = np.linspace(-1.0, 1.0, 2 * radius + 1)
    row = np.exp(-x * x / (2.0 * sigma * sigma))
    normalized: npt.NDArray[np.float64] = row / row.sum()
    return normalized


def blur(image: Image, radius: int, sigma: float) -> npt.NDArray[np.float64]:
    """Blurred with mirrored borders. The kernel is a product, so each axis is done for itself."""
    height, width = image.shape[1:3]
    if radius >= min(height, width):
        raise NodeFailed(f"radius {radius} is too large for a picture of {width}x{height}")
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
