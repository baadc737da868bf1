"""Nodes that scale, crop, pad, rotate and join images.

Sizes are rounded half to even, like Python's `round`, unless a node states otherwise.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from comfyfleet.engine.image_math import (
    CROPS,
    METHODS,
    Image,
    Mask,
    Picture,
    match_channels,
    resize,
)
from comfyfleet.engine.node import (
    IMAGE,
    MATCH,
    SIZE_MAX,
    Context,
    Interface,
    NodeResult,
    bare,
    choice,
    dynamic_choice,
    flag,
    group,
    integer,
    match_type,
    node,
    number,
    offset,
    pure,
    require_memory,
    size,
    socket,
)
from comfyfleet.engine.saved_files import save_preview
from comfyfleet.errors import InvalidInput, NodeFailed

MEGAPIXEL = 1024 * 1024
POST_PROCESSING = "comfy_extras.nodes_post_processing"
IMAGES = "comfy_extras.nodes_images"

Size = tuple[int, int]


def fill_in_size(picture: Picture, width: int, height: int) -> Size:
    """Returns the size. A width or height of 0 is computed from the other one and the aspect ratio,
    and is at least 1."""
    old_height, old_width = picture.shape[1:3]
    if width == 0:
        return max(1, round(old_width * height / old_height)), height
    if height == 0:
        return width, max(1, round(old_height * width / old_width))
    return width, height


def longer_side(picture: Picture, length: int) -> Size:
    height, width = picture.shape[1:3]
    if height > width:
        return round((width / height) * length), length
    if width > height:
        return length, round((height / width) * length)
    return length, length


def shorter_side(picture: Picture, length: int) -> Size:
    height, width = picture.shape[1:3]
    if height < width:
        return round((width / height) * length), length
    if width < height:
        return length, round((height / width) * length)
    return length, length


def total_pixels(picture: Picture, total: float, step: int = 1) -> Size:
    height, width = picture.shape[1:3]
    factor = math.sqrt(total / (width * height))
    return round(width * factor / step) * step, round(height * factor / step) * step


def scale_by_factor(picture: Picture, factor: float) -> Size:
    height, width = picture.shape[1:3]
    return round(width * factor), round(height * factor)


def to_size(picture: Picture, width: int, height: int, method: str, crop: str) -> Picture:
    if width == 0 and height == 0:
        return picture
    return resize(picture, *fill_in_size(picture, width, height), method, crop)


def to_multiple(picture: Picture, multiple: int, method: str) -> Picture:
    """Scales as little as possible, and then crops so that `multiple` divides both sides."""
    height, width = picture.shape[1:3]
    target_width, target_height = width - width % multiple, height - height % multiple
    if 0 in (target_width, target_height) or (target_width, target_height) == (width, height):
        return picture
    factor = max(target_width / width, target_height / height)
    if target_width / width >= target_height / height:
        scaled = (target_width, max(target_height, math.ceil(height * factor)))
    else:
        scaled = (max(target_width, math.ceil(width * factor)), target_height)
    x, y = (scaled[0] - target_width) // 2, (scaled[1] - target_height) // 2
    return resize(picture, *scaled, method)[:, y : y + target_height, x : x + target_width]


@pure(
    Interface(
        "ImageScale",
        "Upscale Image",
        "nodes",
        "image/upscaling",
        inputs={
            "image": bare("IMAGE"),
            "upscale_method": bare(list(METHODS)),
            "width": size(low=0),
            "height": size(low=0),
            "crop": bare(list(CROPS)),
        },
        outputs=("IMAGE",),
        essentials="Image Tools",
        classic=True,
    )
)
def image_scale(image: Image, upscale_method: str, width: int, height: int, crop: str) -> Image:
    return to_size(image, width, height, upscale_method, crop)


@pure(
    Interface(
        "ImageScaleBy",
        "Upscale Image By",
        "nodes",
        "image/upscaling",
        inputs={
            "image": bare("IMAGE"),
            "upscale_method": bare(list(METHODS)),
            "scale_by": number(1.0, 0.01, 8.0, 0.01),
        },
        outputs=("IMAGE",),
        essentials="Image Tools",
        classic=True,
    )
)
def image_scale_by(image: Image, upscale_method: str, scale_by: float) -> Image:
    return resize(image, *scale_by_factor(image, scale_by), upscale_method)


@pure(
    Interface(
        "ImageScaleToTotalPixels",
        "Scale Image to Total Pixels",
        POST_PROCESSING,
        "image/upscaling",
        inputs={
            "image": IMAGE,
            "upscale_method": choice(*METHODS),
            "megapixels": number(1.0, 0.01, 16.0, 0.01),
            "resolution_steps": integer(1, 1, 256, advanced=True),
        },
        outputs=("IMAGE",),
    )
)
def image_scale_to_total_pixels(
    image: Image, upscale_method: str, megapixels: float, resolution_steps: int
) -> Image:
    target = total_pixels(image, megapixels * MEGAPIXEL, resolution_steps)
    return resize(image, *target, upscale_method)


@pure(
    Interface(
        "ImageScaleToMaxDimension",
        "Scale Image to Max Dimension",
        IMAGES,
        "image/upscaling",
        inputs={
            "image": IMAGE,
            # Like in ComfyUI, one of the methods is listed twice.
            "upscale_method": choice(
                "area", "lanczos", "bilinear", "nearest-exact", "bilinear", "bicubic"
            ),
            "largest_size": size(low=0),
        },
        outputs=("IMAGE",),
    )
)
def image_scale_to_max_dimension(image: Image, upscale_method: str, largest_size: int) -> Image:
    return resize(image, *longer_side(image, largest_size), upscale_method)


@pure(
    Interface(
        "ResizeAndPadImage",
        "Resize And Pad Image",
        IMAGES,
        "image/transform",
        inputs={
            "image": IMAGE,
            "target_width": size(),
            "target_height": size(),
            "padding_color": choice("white", "black", advanced=True),
            "interpolation": choice(
                "area", "bicubic", "nearest-exact", "bilinear", "lanczos", advanced=True
            ),
        },
        outputs=("IMAGE",),
    )
)
def resize_and_pad(
    image: Image, target_width: int, target_height: int, padding_color: str, interpolation: str
) -> Image:
    count, height, width, channels = image.shape
    require_memory(count, target_height, target_width, channels)
    factor = min(target_width / width, target_height / height)
    # Sizes are truncated, not rounded, so a very thin image may disappear and leave only the
    # padding.
    inner_width, inner_height = int(width * factor), int(height * factor)
    inner = resize(image, inner_width, inner_height, interpolation)
    color = 0.0 if padding_color == "black" else 1.0
    padded = np.full((count, target_height, target_width, channels), color, np.float32)
    y, x = (target_height - inner_height) // 2, (target_width - inner_width) // 2
    padded[:, y : y + inner_height, x : x + inner_width] = inner
    return padded


_CROP = choice(*CROPS, default="center")
Resizer = Callable[[Picture, str, Mapping[str, Any]], Picture]
# Maps each option to the inputs that it adds and the function that uses them.
_RESIZERS: dict[str, tuple[dict[str, Any], Resizer]] = {
    "scale dimensions": (
        {"width": size(low=0), "height": size(low=0), "crop": _CROP},
        lambda p, method, o: to_size(p, o["width"], o["height"], method, o["crop"]),
    ),
    "scale by multiplier": (
        {"multiplier": number(1.0, 0.01, 8.0, 0.01)},
        lambda p, method, o: resize(p, *scale_by_factor(p, o["multiplier"]), method),
    ),
    "scale longer dimension": (
        {"longer_size": size(low=0)},
        lambda p, method, o: resize(p, *longer_side(p, o["longer_size"]), method),
    ),
    "scale shorter dimension": (
        {"shorter_size": size(low=0)},
        lambda p, method, o: resize(p, *shorter_side(p, o["shorter_size"]), method),
    ),
    "scale width": (
        {"width": size(low=0)},
        lambda p, method, o: to_size(p, o["width"], 0, method, "disabled"),
    ),
    "scale height": (
        {"height": size(low=0)},
        lambda p, method, o: to_size(p, 0, o["height"], method, "disabled"),
    ),
    "scale total pixels": (
        {"megapixels": number(1.0, 0.01, 16.0, 0.01)},
        # Unlike in ImageScaleToTotalPixels, the number of pixels is truncated to an integer.
        lambda p, method, o: resize(p, *total_pixels(p, int(o["megapixels"] * MEGAPIXEL)), method),
    ),
    "match size": (
        {"match": socket("IMAGE,MASK"), "crop": _CROP},
        lambda p, method, o: resize(p, o["match"].shape[2], o["match"].shape[1], method, o["crop"]),
    ),
    "scale to multiple": (
        {"multiple": integer(8, 1, 16384, 1)},
        lambda p, method, o: to_multiple(p, o["multiple"], method),
    ),
}


@pure(
    Interface(
        "ResizeImageMaskNode",
        "Resize Image/Mask",
        POST_PROCESSING,
        "image/transform",
        inputs={
            "input": match_type("input_type", "IMAGE,MASK"),
            "resize_type": dynamic_choice({key: own for key, (own, _) in _RESIZERS.items()}),
            "scale_method": choice(*METHODS, default="area"),
        },
        outputs=(MATCH,),
        output_names=("resized",),
        output_matches=("input_type",),
    )
)
def resize_image_or_mask(
    input: Picture, resize_type: str, scale_method: str, **options: Any
) -> Picture:
    if resize_type not in _RESIZERS:
        raise InvalidInput(f"unknown resize_type {resize_type!r}", known=list(_RESIZERS))
    _, resizer = _RESIZERS[resize_type]
    return resizer(input, scale_method, group(options, "resize_type"))


RESIZERS = (
    image_scale,
    image_scale_by,
    image_scale_to_total_pixels,
    image_scale_to_max_dimension,
    resize_and_pad,
    resize_image_or_mask,
)


REGION = {"x": 0, "y": 0, "width": 512, "height": 512}
OUTPAINT_GREY = 0.5
SPACING_COLORS = {
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
}


def crop_pixels(image: Image, x: int, y: int, width: int, height: int) -> Image:
    """Crops an image. A start beyond the image is moved to its last pixel, and a negative start
    counts from the end, as in Python."""
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
    return crop_pixels(image, x, y, width, height)


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
def image_crop_v2(context: Context, image: Image, crop_region: Mapping[str, Any]) -> NodeResult:
    region = REGION | dict(crop_region)
    cropped = crop_pixels(image, region["x"], region["y"], region["width"], region["height"])
    return NodeResult((cropped,), {"images": save_preview(context, cropped), "animated": (False,)})


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
    require_memory(count, height + top + bottom, width + left + right, channels)
    margins = ((0, 0), (top, bottom), (left, right), (0, 0))
    padded = np.pad(image, margins, constant_values=OUTPAINT_GREY)
    mask = np.ones((1, *padded.shape[1:3]), np.float32)
    inside = (0, slice(top, top + height), slice(left, left + width))
    mask[inside] = 0
    if 0 < 2 * feathering < min(height, width):
        distance = _distance_to_new_edges(width, height, (left, top, right, bottom))
        mask[inside] = (np.maximum(feathering - distance, 0) / feathering) ** 2
    return padded, mask


def _distance_to_new_edges(
    width: int, height: int, padding: tuple[int, int, int, int]
) -> npt.NDArray[np.float64]:
    """Returns each pixel's distance to the nearest edge where padding was added."""
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
        # Make an odd width even, so that the result can be used for a video.
        spacing_width += spacing_width % 2
        parts.insert(1, _spacing(first, second, along, spacing_width, spacing_color))
    return np.concatenate(parts, axis=along)


def _same_batch(first: Image, second: Image) -> tuple[Image, Image]:
    """Extends the shorter batch by repeating its last image."""
    count = max(len(first), len(second))

    def lengthen(image: Image) -> Image:
        if len(image) == 0:
            raise NodeFailed("can't stitch an empty batch")
        return np.concatenate([image, np.repeat(image[-1:], count - len(image), axis=0)])

    return lengthen(first), lengthen(second)


def _same_length(image: Image, target: Image, along: int) -> Image:
    """Scales an image so that the touching edges are equally long. Sizes are truncated."""
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
    # All channels get the same value. Colors other than white are treated as black.
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


TRANSFORMERS = (
    image_crop,
    image_crop_v2,
    pad_for_outpaint,
    image_rotate,
    image_flip,
    image_stitch,
)
