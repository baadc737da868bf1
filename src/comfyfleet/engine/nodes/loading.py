"""Nodes that read the input folder."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFile
import PIL.ImageOps
import PIL.ImageSequence

from comfyfleet.engine.declare import Interface, bare, choice, node
from comfyfleet.engine.decode import decode
from comfyfleet.engine.faults import type_name
from comfyfleet.engine.files import files_of, missing_file
from comfyfleet.engine.limits import require_room
from comfyfleet.engine.node import Context, Folders, Inputs, Result
from comfyfleet.engine.values import Image, Mask, from_bytes
from comfyfleet.engine.video import FileVideo
from comfyfleet.kernel.errors import NodeFailed

MASK_CHANNELS = ("alpha", "red", "green", "blue")
# What stands for the mask of a picture that has none.
NO_MASK_SIZE = (64, 64)
IMAGE_FILE = [[], {"image_upload": True}]


def load_picture(path: Path) -> tuple[Image, Mask]:
    """All frames of a picture or video, and their masks: 1 where they are transparent."""
    components = decode(path)
    if len(components.images) == 0:
        # FFmpeg opens animated WebP but gives no frame of it.
        return _with_pillow(path)
    mask = components.mask
    if mask is None:
        mask = np.zeros((len(components.images), *NO_MASK_SIZE), np.float32)
    return components.images, mask


def _with_pillow(path: Path) -> tuple[Image, Mask]:
    try:
        try:
            frames = _pillow_frames(path)
        except OSError:
            with _truncated_allowed():
                frames = _pillow_frames(path)
    except (OSError, ValueError, PIL.Image.DecompressionBombError) as error:
        # In Pillow's words: clients know ComfyUI's failure by them.
        raise NodeFailed(str(error), exception_type=type_name(error)) from error
    same = [frame for frame in frames if frame.size == frames[0].size]
    images = np.stack([np.asarray(frame.convert("RGB")) for frame in same])
    return from_bytes(images), np.stack([_mask_of(frame) for frame in same])


def _pillow_frames(path: Path) -> list[PIL.Image.Image]:
    with PIL.Image.open(path) as opened:
        frames = getattr(opened, "n_frames", 1)
        require_room(frames, opened.height, opened.width, 3)
        return [PIL.ImageOps.exif_transpose(frame) for frame in PIL.ImageSequence.Iterator(opened)]


@contextmanager
def _truncated_allowed() -> Iterator[None]:
    """A picture that ends too early is loaded as far as it goes, the rest of it black."""
    # Pillow knows this for the whole process only, so it is put back at once.
    PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        yield
    finally:
        PIL.ImageFile.LOAD_TRUNCATED_IMAGES = False


def _mask_of(frame: PIL.Image.Image) -> Mask:
    if "A" not in frame.getbands():
        return np.zeros(NO_MASK_SIZE, np.float32)
    return np.float32(1.0) - from_bytes(np.asarray(frame.getchannel("A")))


def _content_hash(folders: Folders, inputs: Inputs) -> str:
    with folders.locate(inputs["image"]).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


PICTURE_FILE: dict[str, Any] = {
    "choices": {"image": files_of("image")},
    "validate": missing_file("image", "image"),
    "validated": ("image",),
    "fingerprint": _content_hash,
}


@node(
    Interface(
        "LoadImage",
        "Load Image",
        "nodes",
        "image",
        inputs={"image": IMAGE_FILE},
        outputs=("IMAGE", "MASK"),
        essentials="Basics",
        classic=True,
    ),
    **PICTURE_FILE,
)
def load_image(context: Context, image: str) -> Result:
    return Result(load_picture(context.folders.locate(image)))


@node(
    Interface(
        "LoadImageMask",
        "Load Image (as Mask)",
        "nodes",
        "image",
        inputs={"image": IMAGE_FILE, "channel": bare(list(MASK_CHANNELS))},
        outputs=("MASK",),
        essentials="Image Tools",
        classic=True,
    ),
    **PICTURE_FILE,
)
def load_image_mask(context: Context, image: str, channel: str) -> Result:
    pictures, mask = load_picture(context.folders.locate(image))
    if channel == "alpha":
        return Result((mask,))
    return Result((pictures[..., MASK_CHANNELS.index(channel) - 1],))


def _modified_at(folders: Folders, inputs: Inputs) -> float:
    # Videos are large, so their time stands for their content.
    return folders.locate(inputs["file"]).stat().st_mtime


@node(
    Interface(
        "LoadVideo",
        "Load Video",
        "comfy_extras.nodes_video",
        "video",
        inputs={"file": choice(video_upload=True)},
        outputs=("VIDEO",),
        essentials="Basics",
    ),
    choices={"file": files_of("video")},
    validate=missing_file("video", "file"),
    validated=("file",),
    fingerprint=_modified_at,
)
def load_video(context: Context, file: str) -> Result:
    return Result((FileVideo(context.folders.locate(file)),))


NODES = (load_image, load_image_mask, load_video)
