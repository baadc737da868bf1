"""Nodes that write pictures into the output and temp folders."""

from typing import Any

import PIL.Image
from PIL.PngImagePlugin import PngInfo

from comfyfleet.engine.declare import (
    HIDDEN_METADATA,
    IMAGE,
    Interface,
    bare,
    choice,
    flag,
    integer,
    node,
    number,
    socket,
    text,
)
from comfyfleet.engine.files import (
    Slot,
    metadata,
    next_slot,
    require_pictures,
    save_images,
    save_kept_preview,
    to_pillow,
)
from comfyfleet.engine.node import Context, Result
from comfyfleet.engine.values import Image

IMAGES = "comfy_extras.nodes_images"
WEBP_EFFORT = {"default": 4, "fastest": 0, "slowest": 6}
# Where WebP files keep the prompt; further texts go into the tags below.
EXIF_MODEL = 0x0110
# Shown by editors, and repeated by ComfyUI when it refuses the input: clients see the text.
PREFIX_TOOLTIP = (
    "The prefix for the file to save. This may include formatting information such as "
    "%date:yyyy-MM-dd% or %Empty Latent Image.width% to include values from nodes."
)


@node(
    Interface(
        "SaveImage",
        "Save Image",
        "nodes",
        "image",
        inputs={
            "images": socket("IMAGE", tooltip="The images to save."),
            "filename_prefix": ["STRING", {"default": "ComfyUI", "tooltip": PREFIX_TOOLTIP}],
        },
        hidden=HIDDEN_METADATA,
        outputs=("IMAGE",),
        output_names=("images",),
        output_node=True,
        essentials="Basics",
        classic=True,
        description="Saves the input images to your ComfyUI output directory.",
        aliases=("save", "save image", "export image", "output image", "write image", "download"),
    )
)
def save_image(context: Context, images: Image, filename_prefix: str = "ComfyUI") -> Result:
    return Result((images,), {"images": save_images(context, images, filename_prefix)})


@node(
    Interface(
        "PreviewImage",
        "Preview Image",
        "nodes",
        "image",
        inputs={"images": bare("IMAGE")},
        hidden=HIDDEN_METADATA,
        outputs=("IMAGE",),
        output_names=("images",),
        output_node=True,
        essentials="Basics",
        classic=True,
    )
)
def preview_image(context: Context, images: Image) -> Result:
    return Result((images,), {"images": save_kept_preview(context, images)})


def animation(name: str, title: str, **inputs: Any) -> Interface:
    return Interface(
        name,
        title,
        IMAGES,
        "image",
        inputs={
            "images": IMAGE,
            "filename_prefix": text("ComfyUI"),
            "fps": number(6.0, 0.01, 1000.0, 0.01),
            **inputs,
        },
        hidden=HIDDEN_METADATA,
        outputs=("IMAGE",),
        output_names=("images",),
        output_node=True,
    )


@node(
    animation(
        "SaveAnimatedWEBP",
        "Save Animated WEBP",
        lossless=flag(True),
        quality=integer(80, 0, 100),
        method=choice(*WEBP_EFFORT),
    )
)
def save_animated_webp(
    context: Context,
    images: Image,
    filename_prefix: str,
    fps: float,
    lossless: bool,
    quality: int,
    method: str,
) -> Result:
    options = {
        "exif": webp_exif(metadata(context)),
        "lossless": lossless,
        "quality": quality,
        "method": WEBP_EFFORT[method],
    }
    return _save_animation(context, images, filename_prefix, fps, ".webp", options)


@node(
    animation(
        "SaveAnimatedPNG",
        "Save Animated PNG",
        compress_level=integer(4, 0, 9, advanced=True),
    )
)
def save_animated_png(
    context: Context, images: Image, filename_prefix: str, fps: float, compress_level: int
) -> Result:
    options = {"pnginfo": apng_chunks(metadata(context)), "compress_level": compress_level}
    return _save_animation(context, images, filename_prefix, fps, ".png", options)


def _save_animation(
    context: Context,
    images: Image,
    prefix: str,
    fps: float,
    extension: str,
    options: dict[str, Any],
) -> Result:
    height, width = require_pictures(images)
    slot: Slot = next_slot(context, prefix, width, height)
    # An animation is one file, so the batch number has no place in its name and stays a token.
    name = f"{slot.stem}_{slot.counter:05}_{extension}"
    first, *rest = to_pillow(images)
    duration_ms = int(1000.0 / fps)
    first.save(
        slot.folder / name, save_all=True, append_images=rest, duration=duration_ms, **options
    )
    animated = {"animated": (True,)} if rest else {}
    return Result((images,), {"images": [slot.saved(name)], **animated})


def webp_exif(texts: dict[str, str]) -> PIL.Image.Exif:
    """`prompt:{…}` in the camera's model, `workflow:{…}` and more in the tags before it."""
    exif = PIL.Image.Exif()
    for tag, (key, value) in enumerate(texts.items()):
        exif[EXIF_MODEL - tag] = f"{key}:{value}"
    return exif


def apng_chunks(texts: dict[str, str]) -> PngInfo:
    """Chunks of ComfyUI's own kind: text chunks would not survive in an animation."""
    info = PngInfo()
    for key, value in texts.items():
        info.add(b"comf", f"{key}\0{value}".encode("latin-1"), after_idat=True)
    return info


NODES = (save_image, preview_image, save_animated_webp, save_animated_png)
