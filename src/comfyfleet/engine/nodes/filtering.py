"""Nodes that change the colours of pictures."""

import math

import numpy as np
import numpy.typing as npt
import PIL.Image

from comfyfleet.engine.blur import blur
from comfyfleet.engine.declare import IMAGE, Interface, bare, choice, integer, number, pure
from comfyfleet.engine.noise import standard_normal
from comfyfleet.engine.scale import resize
from comfyfleet.engine.values import Bytes, Image, f32, from_bytes, match_channels
from comfyfleet.kernel.errors import NodeFailed

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
    # In float32, not in bytes: most values come out one lower than 255 - v when saved.
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
    mixed = blended(image1, image2, blend_mode)
    return np.clip(image1 * (1 - blend_factor) + mixed * blend_factor, 0, 1)


def blended(below: Image, above: Image, mode: str) -> Image:
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
            # Not the absolute value: what is negative is clamped to 0 after mixing.
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
    # By way of int64: values outside 0..1 wrap around, they are not clipped here.
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
    # Mapped a second time onto its own palette: only then does Pillow dither.
    return np.asarray(picture.quantize(palette=palette, dither=method).convert("RGB"))


def _bayer(pixels: Bytes, order: int, colors: int) -> Bytes:
    """Shifted up and down by a tiled threshold matrix whose spread follows from the palette."""
    height, width = pixels.shape[:2]
    matrix = 2 * 256 / colors * bayer_matrix(int(math.log2(order))) + 0.5
    tiled = np.tile(matrix, (-(-height // order), -(-width // order)))[:height, :width]
    shifted = pixels.astype(np.float32) + tiled[..., np.newaxis].astype(np.float32)
    return np.clip(shifted, 0, 255).astype(np.uint8)


def bayer_matrix(level: int) -> npt.NDArray[np.float64]:
    """Thresholds around 0 of size 2**level, each level made of four of the one before."""
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


NODES = (
    image_invert,
    image_blend,
    image_blur,
    image_sharpen,
    image_quantize,
    image_add_noise,
    adjust_brightness,
    adjust_contrast,
)
