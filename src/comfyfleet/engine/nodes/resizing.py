"""Nodes that scale images and masks. Sizes are rounded half to even, as Python does."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from comfyfleet.engine.declare import (
    IMAGE,
    MATCH,
    Interface,
    bare,
    choice,
    group,
    integer,
    matching,
    number,
    pure,
    selecting,
    size,
    socket,
)
from comfyfleet.engine.limits import require_room
from comfyfleet.engine.scale import CROPS, METHODS, resize
from comfyfleet.engine.values import Image, Picture
from comfyfleet.kernel.errors import InvalidInput

MEGAPIXEL = 1024 * 1024
POST_PROCESSING = "comfy_extras.nodes_post_processing"
IMAGES = "comfy_extras.nodes_images"

Size = tuple[int, int]


def fill_in(picture: Picture, width: int, height: int) -> Size:
    """A width or height of 0 follows from the other and the proportions, and is at least 1."""
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


def multiplied(picture: Picture, factor: float) -> Size:
    height, width = picture.shape[1:3]
    return round(width * factor), round(height * factor)


def to_size(picture: Picture, width: int, height: int, method: str, crop: str) -> Picture:
    if width == 0 and height == 0:
        return picture
    return resize(picture, *fill_in(picture, width, height), method, crop)


def to_multiple(picture: Picture, multiple: int, method: str) -> Picture:
    """Scaled as little as possible, then cut, until both sides are divisible."""
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
    return resize(image, *multiplied(image, scale_by), upscale_method)


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
            # ComfyUI lists one of them twice.
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
    require_room(count, target_height, target_width, channels)
    factor = min(target_width / width, target_height / height)
    # Truncated, not rounded: a thin picture may vanish, and only the padding is left.
    inner_width, inner_height = int(width * factor), int(height * factor)
    inner = resize(image, inner_width, inner_height, interpolation)
    color = 0.0 if padding_color == "black" else 1.0
    padded = np.full((count, target_height, target_width, channels), color, np.float32)
    y, x = (target_height - inner_height) // 2, (target_width - inner_width) // 2
    padded[:, y : y + inner_height, x : x + inner_width] = inner
    return padded


_CROP = choice(*CROPS, default="center")
Resizer = Callable[[Picture, str, Mapping[str, Any]], Picture]
# Each option: the inputs that it brings, and what it does with them.
_RESIZERS: dict[str, tuple[dict[str, Any], Resizer]] = {
    "scale dimensions": (
        {"width": size(low=0), "height": size(low=0), "crop": _CROP},
        lambda p, method, o: to_size(p, o["width"], o["height"], method, o["crop"]),
    ),
    "scale by multiplier": (
        {"multiplier": number(1.0, 0.01, 8.0, 0.01)},
        lambda p, method, o: resize(p, *multiplied(p, o["multiplier"]), method),
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
        # Truncated to whole pixels here, and not in ImageScaleToTotalPixels.
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
            "input": matching("input_type", "IMAGE,MASK"),
            "resize_type": selecting({key: own for key, (own, _) in _RESIZERS.items()}),
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
        raise InvalidInput(f"there is no resize_type {resize_type!r}", known=list(_RESIZERS))
    _, resizer = _RESIZERS[resize_type]
    return resizer(input, scale_method, group(options, "resize_type"))


NODES = (
    image_scale,
    image_scale_by,
    image_scale_to_total_pixels,
    image_scale_to_max_dimension,
    resize_and_pad,
    resize_image_or_mask,
)
