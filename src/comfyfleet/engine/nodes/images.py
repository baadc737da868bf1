"""Nodes that adjust the colors of images, composite them, handle alpha, create batches, and create
and change masks."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from comfyfleet.engine.image_math import (
    Bytes,
    Image,
    Mask,
    as_masks,
    blur,
    dilate,
    f32,
    from_bytes,
    mask_to_image,
    match_channels,
    repeat_to,
    resize,
    standard_normal,
)
from comfyfleet.engine.node import (
    BATCH_MAX,
    COLOR_MAX,
    HIDDEN_METADATA,
    IMAGE,
    MASK,
    SIZE_MAX,
    Context,
    Interface,
    NodeResult,
    autogrow,
    bare,
    choice,
    flag,
    group,
    integer,
    node,
    number,
    offset,
    pure,
    require_memory,
    size,
)
from comfyfleet.engine.saved_files import save_preview
from comfyfleet.errors import NodeFailed

POST_PROCESSING = "comfy_extras.nodes_post_processing"
BLEND_MODES = ("normal", "multiply", "screen", "overlay", "soft_light", "difference")
SHARPEN_STRENGTH = 10


@pure(
    Interface(
        "ImageInvert",
        "Invert Image Colors",
        "nodes",
        "image/color",
        inputs={"image": bare("IMAGE")},
        outputs=("IMAGE",),
        essentials="Image Tools",
        classic=True,
    )
)
def image_invert(image: Image) -> Image:
    # Like ComfyUI, this computes in float32. Most saved values are therefore one below 255 - v.
    inverted: Image = 1.0 - image
    return inverted


@pure(
    Interface(
        "ImageBlend",
        "Blend Images",
        POST_PROCESSING,
        "image/filters",
        inputs={
            "image1": IMAGE,
            "image2": IMAGE,
            "blend_factor": number(0.5, 0.0, 1.0, 0.01),
            "blend_mode": choice(*BLEND_MODES),
        },
        outputs=("IMAGE",),
        essentials="Image Tools",
        aliases=("mix images",),
    )
)
def image_blend(image1: Image, image2: Image, blend_factor: float, blend_mode: str) -> Image:
    image2 = match_channels(image2, image1)
    if image1.shape != image2.shape:
        image2 = resize(image2, image1.shape[2], image1.shape[1], "bicubic", "center")
    mixed = blend_pixels(image1, image2, blend_mode)
    return np.clip(image1 * (1 - blend_factor) + mixed * blend_factor, 0, 1)


def blend_pixels(below: Image, above: Image, mode: str) -> Image:
    match mode:
        case "multiply":
            return below * above
        case "screen":
            return 1 - (1 - below) * (1 - above)
        case "overlay":
            light = 1 - 2 * (1 - below) * (1 - above)
            return np.where(below <= 0.5, 2 * below * above, light)
        case "soft_light":
            return _soft_light(below, above)
        case "difference":
            # Negative values are kept here. They are clamped to 0 after mixing.
            return below - above
        case _:
            return above


def _soft_light(below: Image, above: Image) -> Image:
    darker = below - (1 - 2 * above) * below * (1 - below)
    cubic = ((16 * below - 12) * below + 4) * below
    curve = np.where(below <= 0.25, cubic, np.sqrt(np.maximum(below, 0)))
    return np.where(above <= 0.5, darker, below + (2 * above - 1) * (curve - below))


@pure(
    Interface(
        "ImageBlur",
        "Blur Image",
        POST_PROCESSING,
        "image/filters",
        inputs={
            "image": IMAGE,
            "blur_radius": integer(1, 1, 31, 1),
            "sigma": number(1.0, 0.1, 10.0, 0.1),
        },
        outputs=("IMAGE",),
    )
)
def image_blur(image: Image, blur_radius: int, sigma: float) -> Image:
    if not blur_radius:
        return image
    return f32(blur(image, blur_radius, sigma))


@pure(
    Interface(
        "ImageSharpen",
        "Sharpen Image",
        POST_PROCESSING,
        "image/filters",
        inputs={
            "image": IMAGE,
            "sharpen_radius": integer(1, 1, 31, 1, advanced=True),
            "sigma": number(1.0, 0.1, 10.0, 0.01, advanced=True),
            "alpha": number(1.0, 0.0, 5.0, 0.01, advanced=True),
        },
        outputs=("IMAGE",),
    )
)
def image_sharpen(image: Image, sharpen_radius: int, sigma: float, alpha: float) -> Image:
    if sharpen_radius == 0:
        return image
    strength = SHARPEN_STRENGTH * alpha
    sharpened = image * (1 + strength) - strength * blur(image, sharpen_radius, sigma)
    return f32(np.clip(sharpened, 0, 1))


@pure(
    Interface(
        "ImageQuantize",
        "Quantize Image",
        POST_PROCESSING,
        "image/filters",
        inputs={
            "image": IMAGE,
            "colors": integer(256, 1, 256, 1),
            "dither": choice(
                "none", "floyd-steinberg", "bayer-2", "bayer-4", "bayer-8", "bayer-16"
            ),
        },
        outputs=("IMAGE",),
    )
)
def image_quantize(image: Image, colors: int, dither: str) -> Image:
    if image.shape[-1] != 3:
        raise NodeFailed(f"only three channels can be quantized, not {image.shape[-1]}")
    # The conversion via int64 makes values outside 0..1 wrap around instead of clipping them.
    pixels = (image * np.float32(255)).astype(np.int64).astype(np.uint8)
    return from_bytes(np.stack([_quantized(one, colors, dither) for one in pixels]))


def _quantized(pixels: Bytes, colors: int, dither: str) -> Bytes:
    picture = PIL.Image.fromarray(pixels)
    palette = picture.quantize(colors=colors)
    method = PIL.Image.Dither.NONE
    if dither == "floyd-steinberg":
        method = PIL.Image.Dither.FLOYDSTEINBERG
    elif dither.startswith("bayer-"):
        count = len(palette.getpalette() or ()) // 3
        picture = PIL.Image.fromarray(_bayer(pixels, int(dither.split("-")[1]), count))
    # Quantize again with the resulting palette, because Pillow dithers only with a given palette.
    return np.asarray(picture.quantize(palette=palette, dither=method).convert("RGB"))


def _bayer(pixels: Bytes, order: int, colors: int) -> Bytes:
    """Applies ordered dithering by adding a tiled threshold matrix, whose spread depends on the
    number of colors."""
    height, width = pixels.shape[:2]
    matrix = 2 * 256 / colors * bayer_matrix(int(math.log2(order))) + 0.5
    tiled = np.tile(matrix, (-(-height // order), -(-width // order)))[:height, :width]
    shifted = pixels.astype(np.float32) + tiled[..., np.newaxis].astype(np.float32)
    return np.clip(shifted, 0, 255).astype(np.uint8)


def bayer_matrix(level: int) -> npt.NDArray[np.float64]:
    """Returns a square matrix of thresholds around 0, with 2**level rows. Each level combines four
    copies of the previous one."""
    matrix = np.zeros((1, 1))
    for exponent in range(1, level + 1):
        quarter = 4**exponent
        scaled = matrix * quarter
        matrix = np.block([[scaled - 1.5, scaled + 0.5], [scaled + 1.5, scaled - 0.5]]) / quarter
    return matrix


@pure(
    Interface(
        "ImageAddNoise",
        "Add Noise to Image",
        "comfy_extras.nodes_images",
        "image/filters",
        inputs={
            "image": IMAGE,
            "seed": integer(0, 0, 0xFFFFFFFFFFFFFFFF, control_after_generate=True),
            "strength": number(0.5, 0.0, 1.0, 0.01),
        },
        outputs=("IMAGE",),
    )
)
def image_add_noise(image: Image, seed: int, strength: float) -> Image:
    noise = standard_normal(image.size, seed).reshape(image.shape)
    return np.clip(image + strength * noise, 0, 1)


@pure(
    Interface(
        "AdjustBrightness",
        "Adjust Brightness",
        "comfy_extras.nodes_dataset",
        "image/adjustments",
        inputs={"images": IMAGE, "factor": number(1.0, 0.0, 2.0)},
        outputs=("IMAGE",),
        output_names=("images",),
        experimental=True,
    )
)
def adjust_brightness(images: Image, factor: float) -> Image:
    return f32(np.clip(images * factor, 0, 1))


@pure(
    Interface(
        "AdjustContrast",
        "Adjust Contrast",
        "comfy_extras.nodes_dataset",
        "image/adjustments",
        inputs={"images": IMAGE, "factor": number(1.0, 0.0, 2.0)},
        outputs=("IMAGE",),
        output_names=("images",),
        experimental=True,
    )
)
def adjust_contrast(images: Image, factor: float) -> Image:
    return f32(np.clip((images - 0.5) * factor + 0.5, 0, 1))


FILTERS = (
    image_invert,
    image_blend,
    image_blur,
    image_sharpen,
    image_quantize,
    image_add_noise,
    adjust_brightness,
    adjust_contrast,
)


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
    # Parts of the source beyond the destination's right and bottom edges are dropped.
    visible = (slice(None), slice(None, height - y + min(0, y)), slice(None, width - x + min(0, x)))
    inside = (slice(None), slice(y, y + source.shape[1]), slice(x, x + source.shape[2]))
    result = destination.copy()
    opacity = opacity[visible]
    result[inside] = opacity * source[visible] + (1 - opacity) * destination[inside]
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
    """Adds an alpha channel. The area that the mask `alpha` covers becomes transparent."""
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


COMPOSITORS = (image_composite_masked, join_image_with_alpha, split_image_with_alpha)


IMAGES = "comfy_extras.nodes_images"
SLOTS_MAX = 50


def make_batch(images: list[Image]) -> Image:
    """Returns one batch with the size of the first image. If only some images have an alpha
    channel, the others become opaque."""
    richest = max(images, key=lambda image: image.shape[-1])
    equal = [match_channels(image, richest) for image in images]
    height, width = equal[0].shape[1:3]
    fitted = [
        image
        if image.shape[1:3] == (height, width)
        else resize(image, width, height, "bilinear", "center")
        for image in equal
    ]
    return np.concatenate(fitted)


@pure(
    Interface(
        "EmptyImage",
        "Empty Image",
        "nodes",
        "image",
        inputs={
            "width": size(),
            "height": size(),
            "batch_size": integer(1, 1, BATCH_MAX),
            "color": integer(0, 0, COLOR_MAX, 1, display="color"),
        },
        outputs=("IMAGE",),
        classic=True,
    )
)
def empty_image(width: int, height: int, batch_size: int, color: int) -> Image:
    if min(width, height, batch_size) < 0:
        raise NodeFailed(f"can't create {batch_size} images of {width}x{height}")
    require_memory(batch_size, height, width, 3)
    channels = [(color >> shift & 0xFF) / 0xFF for shift in (16, 8, 0)]
    return np.full((batch_size, height, width, 3), channels, np.float32)


@node(
    Interface(
        "GetImageSize",
        "Get Image Size",
        IMAGES,
        "image",
        inputs={"image": IMAGE},
        hidden={"unique_id": "UNIQUE_ID"},
        outputs=("INT", "INT", "INT"),
        output_names=("width", "height", "batch_size"),
    )
)
def get_image_size(context: Context, image: Image) -> NodeResult:
    count, height, width = image.shape[:3]
    context.show_text(f"width: {width}, height: {height}\n batch size: {count}")
    return NodeResult((width, height, count))


@pure(
    Interface(
        "ImageBatch",
        "Batch Images (DEPRECATED)",
        "nodes",
        "image/batch",
        inputs={"image1": bare("IMAGE"), "image2": bare("IMAGE")},
        outputs=("IMAGE",),
        deprecated=True,
        classic=True,
    )
)
def image_batch(image1: Image, image2: Image) -> Image:
    return make_batch([image1, image2])


@pure(
    Interface(
        "BatchImagesNode",
        "Batch Images",
        "comfy_extras.nodes_post_processing",
        "image/batch",
        inputs={"images": autogrow("image", "IMAGE", prefix="image", min=1, max=SLOTS_MAX)},
        outputs=("IMAGE",),
        essentials="Image Tools",
    )
)
def batch_images(**inputs: Any) -> Image:
    images = group(inputs, "images")
    # Images are ordered by slot number, not by the order of the inputs in the prompt.
    slots = (f"image{number}" for number in range(SLOTS_MAX))
    return make_batch([images[slot] for slot in slots if slot in images])


@pure(
    Interface(
        "RepeatImageBatch",
        "Repeat Image Batch",
        IMAGES,
        "image/batch",
        inputs={"image": IMAGE, "amount": integer(1, 1, BATCH_MAX)},
        outputs=("IMAGE",),
    )
)
def repeat_image_batch(image: Image, amount: int) -> Image:
    require_memory(amount, *image.shape)
    return np.tile(image, (amount, 1, 1, 1))


@pure(
    Interface(
        "ImageFromBatch",
        "Get Image from Batch",
        IMAGES,
        "image/batch",
        inputs={
            "image": IMAGE,
            "batch_index": integer(0, -SIZE_MAX, SIZE_MAX),
            "length": integer(1, 1, BATCH_MAX),
        },
        outputs=("IMAGE",),
    )
)
def image_from_batch(image: Image, batch_index: int, length: int) -> Image:
    """Returns images of a batch. A negative index counts from the end, and an index outside the
    batch is clamped."""
    start = batch_index + len(image) if batch_index < 0 else batch_index
    start = max(0, min(len(image) - 1, start))
    return image[start : start + length].copy()


BATCHERS = (
    empty_image,
    get_image_size,
    image_batch,
    batch_images,
    repeat_image_batch,
    image_from_batch,
)


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
        raise NodeFailed(f"can't create a mask of {width}x{height}")
    require_memory(height, width)
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
    inside = (slice(None), slice(y, bottom), slice(x, right))
    result[inside] = combine_pixels(result[inside], source[:, : bottom - y, : right - x], operation)
    return np.clip(result, 0, 1)


def combine_pixels(below: Mask, above: Mask, operation: str) -> Mask:
    match operation:
        case "multiply":
            return below * above
        case "add":
            return below + above
        case "subtract":
            return below - above
    # Values are rounded half to even, so a mask of 0.5 counts as empty.
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
    """Returns values that rise to 1 over the first `rise` positions: 1/n, 2/n …"""
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
    return dilate(as_masks(mask), expand, tapered_corners)


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
    # Unlike all other nodes, this one rounds values to bytes instead of truncating them.
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
def mask_preview(context: Context, mask: Mask) -> NodeResult:
    saved = save_preview(context, mask_to_image(mask))
    return NodeResult((mask,), {"images": saved, "animated": (False,)})


MASK_NODES = (
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
