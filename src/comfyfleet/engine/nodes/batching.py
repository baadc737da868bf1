"""Nodes that make images and put them into batches."""

from typing import Any

import numpy as np

from comfyfleet.engine.declare import (
    BATCH_MAX,
    COLOR_MAX,
    IMAGE,
    SIZE_MAX,
    Interface,
    bare,
    group,
    growing,
    integer,
    node,
    pure,
    size,
)
from comfyfleet.engine.limits import require_room
from comfyfleet.engine.node import Context, Result
from comfyfleet.engine.scale import resize
from comfyfleet.engine.values import Image, match_channels
from comfyfleet.kernel.errors import NodeFailed

IMAGES = "comfy_extras.nodes_images"
SLOTS_MAX = 50


def batched(images: list[Image]) -> Image:
    """One batch of the first one's size; where only some have alpha, the others are opaque."""
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
        raise NodeFailed(f"a picture can't be {width}x{height}, {batch_size} times")
    require_room(batch_size, height, width, 3)
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
def get_image_size(context: Context, image: Image) -> Result:
    count, height, width = image.shape[:3]
    context.show_text(f"width: {width}, height: {height}\n batch size: {count}")
    return Result((width, height, count))


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
    return batched([image1, image2])


@pure(
    Interface(
        "BatchImagesNode",
        "Batch Images",
        "comfy_extras.nodes_post_processing",
        "image/batch",
        inputs={"images": growing("image", "IMAGE", prefix="image", min=1, max=SLOTS_MAX)},
        outputs=("IMAGE",),
        essentials="Image Tools",
    )
)
def batch_images(**inputs: Any) -> Image:
    images = group(inputs, "images")
    # By the number of the slot, not by the order in which a client wrote the inputs.
    slots = (f"image{number}" for number in range(SLOTS_MAX))
    return batched([images[slot] for slot in slots if slot in images])


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
    require_room(amount, *image.shape)
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
    """An index below 0 counts from the end; one outside the batch is moved into it."""
    start = batch_index + len(image) if batch_index < 0 else batch_index
    start = max(0, min(len(image) - 1, start))
    return image[start : start + length].copy()


NODES = (
    empty_image,
    get_image_size,
    image_batch,
    batch_images,
    repeat_image_batch,
    image_from_batch,
)
