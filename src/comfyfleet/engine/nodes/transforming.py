"""Nodes that crop, pad, turn and join pictures."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from comfyfleet.engine.declare import (
    IMAGE,
    SIZE_MAX,
    Interface,
    bare,
    choice,
    flag,
    integer,
    node,
    offset,
    pure,
    size,
    socket,
)
from comfyfleet.engine.files import save_preview
from comfyfleet.engine.limits import require_room
from comfyfleet.engine.node import Context, Result
from comfyfleet.engine.scale import resize
from comfyfleet.engine.values import Image, Mask, match_channels
from comfyfleet.kernel.errors import NodeFailed

IMAGES = "comfy_extras.nodes_images"
REGION = {"x": 0, "y": 0, "width": 512, "height": 512}
OUTPAINT_GREY = 0.5
SPACING_COLORS = {
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
}


def cut(image: Image, x: int, y: int, width: int, height: int) -> Image:
    """A start beyond the picture is moved to its last pixel; a negative one counts as in Python."""
    x, y = min(x, image.shape[2] - 1), min(y, image.shape[1] - 1)
    return image[:, y : y + height, x : x + width]


@pure(
    Interface(
        "ImageCrop",
        "Crop Image (DEPRECATED)",
        IMAGES,
        "image/transform",
        inputs={
            "image": IMAGE,
            "width": size(),
            "height": size(),
            "x": offset(),
            "y": offset(),
        },
        outputs=("IMAGE",),
        deprecated=True,
        essentials="Image Tools",
    )
)
def image_crop(image: Image, width: int, height: int, x: int, y: int) -> Image:
    return cut(image, x, y, width, height)


@node(
    Interface(
        "ImageCropV2",
        "Crop Image",
        IMAGES,
        "image/transform",
        inputs={
            "image": IMAGE,
            "crop_region": socket(
                "BOUNDING_BOX", default=REGION, socketless=True, component="ImageCrop"
            ),
        },
        outputs=("IMAGE",),
        shows_result=True,
        essentials="Image Tools",
    )
)
def image_crop_v2(context: Context, image: Image, crop_region: Mapping[str, Any]) -> Result:
    region = REGION | dict(crop_region)
    cropped = cut(image, region["x"], region["y"], region["width"], region["height"])
    return Result((cropped,), {"images": save_preview(context, cropped), "animated": (False,)})


@pure(
    Interface(
        "ImagePadForOutpaint",
        "Pad Image for Outpainting",
        "nodes",
        "image/transform",
        inputs={
            "image": bare("IMAGE"),
            "left": integer(0, 0, SIZE_MAX, 8),
            "top": integer(0, 0, SIZE_MAX, 8),
            "right": integer(0, 0, SIZE_MAX, 8),
            "bottom": integer(0, 0, SIZE_MAX, 8),
            "feathering": integer(40, 0, SIZE_MAX, 1, advanced=True),
        },
        outputs=("IMAGE", "MASK"),
        classic=True,
    )
)
def pad_for_outpaint(
    image: Image, left: int, top: int, right: int, bottom: int, feathering: int
) -> tuple[Image, Mask]:
    count, height, width, channels = image.shape
    require_room(count, height + top + bottom, width + left + right, channels)
    margins = ((0, 0), (top, bottom), (left, right), (0, 0))
    padded = np.pad(image, margins, constant_values=OUTPAINT_GREY)
    mask = np.ones((1, *padded.shape[1:3]), np.float32)
    there = (0, slice(top, top + height), slice(left, left + width))
    mask[there] = 0
    if 0 < 2 * feathering < min(height, width):
        distance = _distance_to_new_edges(width, height, (left, top, right, bottom))
        mask[there] = (np.maximum(feathering - distance, 0) / feathering) ** 2
    return padded, mask


def _distance_to_new_edges(
    width: int, height: int, padding: tuple[int, int, int, int]
) -> npt.NDArray[np.float64]:
    """How far each pixel is from the nearest edge beyond which something was added."""
    left, top, right, bottom = padding
    x, y = np.arange(width), np.arange(height)
    across = np.minimum(x if left else width, width - x if right else width)
    down = np.minimum(y if top else height, height - y if bottom else height)
    rows, columns = np.broadcast_to(down, height), np.broadcast_to(across, width)
    nearest: npt.NDArray[np.float64] = np.minimum(rows[:, np.newaxis], columns, dtype=np.float64)
    return nearest


@pure(
    Interface(
        "ImageRotate",
        "Rotate Image",
        IMAGES,
        "image/transform",
        inputs={
            "image": IMAGE,
            "rotation": choice("none", "90 degrees", "180 degrees", "270 degrees"),
        },
        outputs=("IMAGE",),
        essentials="Image Tools",
    )
)
def image_rotate(image: Image, rotation: str) -> Image:
    quarters = {"90": 1, "180": 2, "270": 3}.get(rotation.split(" ")[0], 0)
    return np.rot90(image, k=quarters, axes=(2, 1))


@pure(
    Interface(
        "ImageFlip",
        "Flip Image",
        IMAGES,
        "image/transform",
        inputs={
            "image": IMAGE,
            "flip_method": choice("x-axis: vertically", "y-axis: horizontally"),
        },
        outputs=("IMAGE",),
    )
)
def image_flip(image: Image, flip_method: str) -> Image:
    return np.flip(image, axis=1 if flip_method.startswith("x") else 2)


@pure(
    Interface(
        "ImageStitch",
        "Stitch Images",
        IMAGES,
        "image/transform",
        inputs={
            "image1": IMAGE,
            "direction": choice("right", "down", "left", "up", default="right"),
            "match_image_size": flag(True),
            "spacing_width": integer(0, 0, 1024, 2, advanced=True),
            "spacing_color": choice(*SPACING_COLORS, default="white", advanced=True),
        },
        optional={"image2": IMAGE},
        outputs=("IMAGE",),
    )
)
def image_stitch(
    image1: Image,
    direction: str,
    match_image_size: bool,
    spacing_width: int,
    spacing_color: str,
    image2: Image | None = None,
) -> Image:
    if image2 is None:
        return image1
    along = 2 if direction in ("left", "right") else 1
    first, second = _same_batch(image1, image2)
    if match_image_size:
        second = _same_length(second, first, along)
    else:
        first, second = _padded_alike(first, second, along, spacing_color)
    if first.shape[-1] < second.shape[-1]:
        first = match_channels(first, second)
    second = match_channels(second, first)
    parts = [second, first] if direction in ("left", "up") else [first, second]
    if spacing_width > 0:
        # An odd width is made even, so that what is stitched can become a video.
        spacing_width += spacing_width % 2
        parts.insert(1, _spacing(first, second, along, spacing_width, spacing_color))
    return np.concatenate(parts, axis=along)


def _same_batch(first: Image, second: Image) -> tuple[Image, Image]:
    """The shorter batch goes on with its last picture."""
    count = max(len(first), len(second))

    def lengthen(image: Image) -> Image:
        if len(image) == 0:
            raise NodeFailed("can't stitch an empty batch")
        return np.concatenate([image, np.repeat(image[-1:], count - len(image), axis=0)])

    return lengthen(first), lengthen(second)


def _same_length(image: Image, target: Image, along: int) -> Image:
    """Scaled so that the edges that touch are equally long; sizes are truncated."""
    height, width = image.shape[1:3]
    aspect = width / height
    if along == 2:
        length = target.shape[1]
        return resize(image, int(length * aspect), length, "lanczos")
    length = target.shape[2]
    return resize(image, length, int(length / aspect), "lanczos")


def _padded_alike(first: Image, second: Image, along: int, color: str) -> tuple[Image, Image]:
    across = 1 if along == 2 else 2
    length = max(first.shape[across], second.shape[across])
    # All channels get one value, and a colour that is not grey counts as black here.
    value = 1.0 if color == "white" else 0.0

    def pad(image: Image) -> Image:
        missing = length - image.shape[across]
        margins = [(0, 0)] * 4
        margins[across] = (missing // 2, missing - missing // 2)
        return np.pad(image, margins, constant_values=value)

    return pad(first), pad(second)


def _spacing(first: Image, second: Image, along: int, width: int, color: str) -> Image:
    shape = list(np.maximum(first.shape, second.shape))
    shape[along] = width
    opaque = (*SPACING_COLORS[color], 1.0)
    return np.broadcast_to(np.array(opaque[: shape[-1]], np.float32), shape)


NODES = (
    image_crop,
    image_crop_v2,
    pad_for_outpaint,
    image_rotate,
    image_flip,
    image_stitch,
)
