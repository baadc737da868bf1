"""Nodes that make and change masks."""

import numpy as np

from comfyfleet.engine.declare import (
    COLOR_MAX,
    HIDDEN_METADATA,
    IMAGE,
    MASK,
    SIZE_MAX,
    Interface,
    choice,
    flag,
    integer,
    node,
    number,
    offset,
    pure,
    size,
)
from comfyfleet.engine.files import save_preview
from comfyfleet.engine.limits import require_room
from comfyfleet.engine.morphology import grow
from comfyfleet.engine.node import Context, Result
from comfyfleet.engine.values import Image, Mask, as_masks, f32, mask_to_image
from comfyfleet.kernel.errors import NodeFailed

MASKS = "comfy_extras.nodes_mask"
CHANNELS = ("red", "green", "blue", "alpha")
OPERATIONS = ("multiply", "add", "subtract", "and", "or", "xor")


@pure(
    Interface(
        "SolidMask",
        "Create Solid Mask",
        MASKS,
        "image/mask",
        inputs={"value": number(1.0, 0.0, 1.0, 0.01), "width": size(), "height": size()},
        outputs=("MASK",),
    )
)
def solid_mask(value: float, width: int, height: int) -> Mask:
    if min(width, height) < 0:
        raise NodeFailed(f"a mask can't be {width}x{height}")
    require_room(height, width)
    return np.full((1, height, width), value, np.float32)


@pure(
    Interface(
        "InvertMask",
        "Invert Mask",
        MASKS,
        "image/mask",
        inputs={"mask": MASK},
        outputs=("MASK",),
    )
)
def invert_mask(mask: Mask) -> Mask:
    return np.float32(1.0) - mask


@pure(
    Interface(
        "CropMask",
        "Crop Mask",
        MASKS,
        "image/mask",
        inputs={
            "mask": MASK,
            "x": offset(),
            "y": offset(),
            "width": size(),
            "height": size(),
        },
        outputs=("MASK",),
    )
)
def crop_mask(mask: Mask, x: int, y: int, width: int, height: int) -> Mask:
    return as_masks(mask)[:, y : y + height, x : x + width]


@pure(
    Interface(
        "MaskComposite",
        "Combine Masks",
        MASKS,
        "image/mask",
        inputs={
            "destination": MASK,
            "source": MASK,
            "x": offset(),
            "y": offset(),
            "operation": choice(*OPERATIONS),
        },
        outputs=("MASK",),
    )
)
def mask_composite(destination: Mask, source: Mask, x: int, y: int, operation: str) -> Mask:
    result, source = as_masks(destination).copy(), as_masks(source)
    right = min(x + source.shape[2], result.shape[2])
    bottom = min(y + source.shape[1], result.shape[1])
    there = (slice(None), slice(y, bottom), slice(x, right))
    result[there] = combined(result[there], source[:, : bottom - y, : right - x], operation)
    return np.clip(result, 0, 1)


def combined(below: Mask, above: Mask, operation: str) -> Mask:
    match operation:
        case "multiply":
            return below * above
        case "add":
            return below + above
        case "subtract":
            return below - above
    # Rounded half to even: a mask of 0.5 counts as empty.
    first, second = np.rint(below) != 0, np.rint(above) != 0
    logic = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[operation]
    return f32(logic(first, second))


@pure(
    Interface(
        "FeatherMask",
        "Feather Mask",
        MASKS,
        "image/mask",
        inputs={
            "mask": MASK,
            "left": offset(),
            "top": offset(),
            "right": offset(),
            "bottom": offset(),
        },
        outputs=("MASK",),
    )
)
def feather_mask(mask: Mask, left: int, top: int, right: int, bottom: int) -> Mask:
    result = as_masks(mask).copy()
    height, width = result.shape[1:]
    result *= ramp(width, left) * ramp(width, right)[::-1]
    result *= (ramp(height, top) * ramp(height, bottom)[::-1])[:, np.newaxis]
    return result


def ramp(length: int, rise: int) -> Mask:
    """Rises to 1 over the first `rise` places: 1/n, 2/n …"""
    rise = min(rise, length)
    values = np.ones(length, np.float32)
    values[:rise] = np.arange(1, rise + 1) / max(rise, 1)
    return values


@pure(
    Interface(
        "GrowMask",
        "Grow Mask",
        MASKS,
        "image/mask",
        inputs={
            "mask": MASK,
            "expand": integer(0, -SIZE_MAX, SIZE_MAX, 1),
            "tapered_corners": flag(True, advanced=True),
        },
        outputs=("MASK",),
    )
)
def grow_mask(mask: Mask, expand: int, tapered_corners: bool) -> Mask:
    return grow(as_masks(mask), expand, tapered_corners)


@pure(
    Interface(
        "ThresholdMask",
        "Threshold Mask",
        MASKS,
        "image/mask",
        inputs={"mask": MASK, "value": number(0.5, 0.0, 1.0, 0.01)},
        outputs=("MASK",),
    )
)
def threshold_mask(mask: Mask, value: float) -> Mask:
    return f32(mask > np.float32(value))


@pure(
    Interface(
        "MaskToImage",
        "Convert Mask to Image",
        MASKS,
        "image/mask",
        inputs={"mask": MASK},
        outputs=("IMAGE",),
    )
)
def mask_as_image(mask: Mask) -> Image:
    return mask_to_image(mask)


@pure(
    Interface(
        "ImageToMask",
        "Convert Image to Mask",
        MASKS,
        "image/mask",
        inputs={"image": IMAGE, "channel": choice(*CHANNELS)},
        outputs=("MASK",),
    )
)
def image_as_mask(image: Image, channel: str) -> Mask:
    index = CHANNELS.index(channel)
    if index >= image.shape[-1]:
        raise NodeFailed(f"the image has no {channel} channel")
    return image[..., index]


@pure(
    Interface(
        "ImageColorToMask",
        "Convert Image Color to Mask",
        MASKS,
        "image/mask",
        inputs={"image": IMAGE, "color": integer(0, 0, COLOR_MAX, 1, display="number")},
        outputs=("MASK",),
    )
)
def image_color_to_mask(image: Image, color: int) -> Mask:
    # The one place where values are rounded to bytes and not truncated.
    parts = np.rint(np.clip(image, 0, 1) * np.float32(255)).astype(np.int32)
    colors = (parts[..., 0] << 16) + (parts[..., 1] << 8) + parts[..., 2]
    return f32(colors == color)


@node(
    Interface(
        "MaskPreview",
        "Preview Mask",
        MASKS,
        "image/mask",
        inputs={"mask": MASK},
        hidden=HIDDEN_METADATA,
        outputs=("MASK",),
        output_names=("mask",),
        output_node=True,
    )
)
def mask_preview(context: Context, mask: Mask) -> Result:
    saved = save_preview(context, mask_to_image(mask))
    return Result((mask,), {"images": saved, "animated": (False,)})


NODES = (
    solid_mask,
    invert_mask,
    crop_mask,
    mask_composite,
    feather_mask,
    grow_mask,
    threshold_mask,
    mask_as_image,
    image_as_mask,
    image_color_to_mask,
    mask_preview,
)
