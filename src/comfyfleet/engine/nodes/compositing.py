"""Nodes that lay pictures over each other and handle alpha."""

import numpy as np

from comfyfleet.engine.declare import IMAGE, MASK, Interface, flag, offset, pure
from comfyfleet.engine.scale import resize
from comfyfleet.engine.values import Image, Mask, as_masks, match_channels, repeat_to

COMPOSITING = "comfy_extras.nodes_compositing"


@pure(
    Interface(
        "ImageCompositeMasked",
        "Image Composite Masked",
        "comfy_extras.nodes_mask",
        "image/compositing",
        inputs={
            "destination": IMAGE,
            "source": IMAGE,
            "x": offset(),
            "y": offset(),
            "resize_source": flag(False),
        },
        optional={"mask": MASK},
        outputs=("IMAGE",),
    )
)
def image_composite_masked(
    destination: Image,
    source: Image,
    x: int,
    y: int,
    resize_source: bool,
    mask: Mask | None = None,
) -> Image:
    source = match_channels(source, destination)
    height, width = destination.shape[1:3]
    if resize_source:
        source = resize(source, width, height, "bilinear")
    source = repeat_to(source, len(destination))
    opacity = _opacity(mask, source)
    x = max(-source.shape[2], min(x, width))
    y = max(-source.shape[1], min(y, height))
    # What lies outside the destination is cut; its own corner may lie outside as well.
    visible = (slice(None), slice(None, height - y + min(0, y)), slice(None, width - x + min(0, x)))
    there = (slice(None), slice(y, y + source.shape[1]), slice(x, x + source.shape[2]))
    result = destination.copy()
    opacity = opacity[visible]
    result[there] = opacity * source[visible] + (1 - opacity) * destination[there]
    return result


def _opacity(mask: Mask | None, source: Image) -> Image:
    if mask is None:
        return np.ones_like(source[..., :1])
    fitted = resize(as_masks(mask), source.shape[2], source.shape[1], "bilinear")
    return repeat_to(fitted, len(source))[..., np.newaxis]


@pure(
    Interface(
        "JoinImageWithAlpha",
        "Join Image with Alpha",
        COMPOSITING,
        "image/compositing",
        inputs={"image": IMAGE, "alpha": MASK},
        outputs=("IMAGE",),
    )
)
def join_image_with_alpha(image: Image, alpha: Mask) -> Image:
    """`alpha` is a mask: what it covers becomes transparent."""
    fitted = 1 - resize(as_masks(alpha), image.shape[2], image.shape[1], "bilinear")
    count = max(len(image), len(fitted))
    colors = repeat_to(image, count)[..., :3]
    return np.concatenate([colors, repeat_to(fitted, count)[..., np.newaxis]], axis=-1)


@pure(
    Interface(
        "SplitImageWithAlpha",
        "Split Image with Alpha",
        COMPOSITING,
        "image/compositing",
        inputs={"image": IMAGE},
        outputs=("IMAGE", "MASK"),
    )
)
def split_image_with_alpha(image: Image) -> tuple[Image, Mask]:
    has_alpha = image.shape[-1] > 3
    mask = 1 - image[..., 3] if has_alpha else np.zeros_like(image[..., 0])
    return image[..., :3], mask


NODES = (image_composite_masked, join_image_with_alpha, split_image_with_alpha)
