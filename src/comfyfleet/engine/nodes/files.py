"""Nodes that load files from the input folder, write images to the output and temp folders or the
websocket, and trim, create and save videos. Also contains model loaders for compatibility, although
the engine has no models."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFile
import PIL.ImageOps
import PIL.ImageSequence
from PIL.PngImagePlugin import PngInfo

from comfyfleet.engine.codecs import BuiltVideo, FileVideo, Video, decode, encode_webm
from comfyfleet.engine.image_math import Audio, Image, Mask, from_bytes
from comfyfleet.engine.node import (
    AUDIO,
    HIDDEN_METADATA,
    IMAGE,
    VIDEO,
    Context,
    Folders,
    Inputs,
    Interface,
    NodeResult,
    bare,
    choice,
    flag,
    integer,
    node,
    number,
    pure,
    require_memory,
    socket,
    text,
)
from comfyfleet.engine.saved_files import (
    FileSlot,
    Saved,
    files_of,
    metadata,
    missing_file,
    next_slot,
    require_pictures,
    save_images,
    save_kept_preview,
    to_pillow,
)
from comfyfleet.errors import NodeFailed
from comfyfleet.protocol.validation import type_name

MASK_CHANNELS = ("alpha", "red", "green", "blue")
# The size of the mask for an image that has none.
NO_MASK_SIZE = (64, 64)
IMAGE_FILE = [[], {"image_upload": True}]


def load_picture(path: Path) -> tuple[Image, Mask]:
    """Returns all frames of an image or video, and their masks, which are 1 where a frame is
    transparent."""
    components = decode(path)
    if len(components.images) == 0:
        # FFmpeg opens animated WebP files, but returns no frames.
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
        # Keep Pillow's own message, because clients recognize the error by it.
        raise NodeFailed(str(error), exception_type=type_name(error)) from error
    same = [frame for frame in frames if frame.size == frames[0].size]
    images = np.stack([np.asarray(frame.convert("RGB")) for frame in same])
    return from_bytes(images), np.stack([_mask_of(frame) for frame in same])


def _pillow_frames(path: Path) -> list[PIL.Image.Image]:
    with PIL.Image.open(path) as opened:
        frames = getattr(opened, "n_frames", 1)
        require_memory(frames, opened.height, opened.width, 3)
        return [PIL.ImageOps.exif_transpose(frame) for frame in PIL.ImageSequence.Iterator(opened)]


@contextmanager
def _truncated_allowed() -> Iterator[None]:
    """Lets Pillow load a truncated image. The missing part is black."""
    # Pillow has this setting only for the whole process, so it is restored afterwards.
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
def load_image(context: Context, image: str) -> NodeResult:
    return NodeResult(load_picture(context.folders.locate(image)))


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
def load_image_mask(context: Context, image: str, channel: str) -> NodeResult:
    pictures, mask = load_picture(context.folders.locate(image))
    if channel == "alpha":
        return NodeResult((mask,))
    return NodeResult((pictures[..., MASK_CHANNELS.index(channel) - 1],))


def _modified_at(folders: Folders, inputs: Inputs) -> float:
    # Use the modification time instead of a hash, because videos are large.
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
def load_video(context: Context, file: str) -> NodeResult:
    return NodeResult((FileVideo(context.folders.locate(file)),))


LOADERS = (load_image, load_image_mask, load_video)


IMAGES = "comfy_extras.nodes_images"
WEBP_EFFORT = {"default": 4, "fastest": 0, "slowest": 6}
# The EXIF tag that stores the prompt in WebP files. Other entries use the tags below it.
EXIF_MODEL = 0x0110
# Editors show this text, and ComfyUI's error messages contain it, so it must not change.
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
def save_image(context: Context, images: Image, filename_prefix: str = "ComfyUI") -> NodeResult:
    return NodeResult((images,), {"images": save_images(context, images, filename_prefix)})


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
def preview_image(context: Context, images: Image) -> NodeResult:
    return NodeResult((images,), {"images": save_kept_preview(context, images)})


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
) -> NodeResult:
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
) -> NodeResult:
    options = {"pnginfo": apng_chunks(metadata(context)), "compress_level": compress_level}
    return _save_animation(context, images, filename_prefix, fps, ".png", options)


def _save_animation(
    context: Context,
    images: Image,
    prefix: str,
    fps: float,
    extension: str,
    options: dict[str, Any],
) -> NodeResult:
    height, width = require_pictures(images)
    slot: FileSlot = next_slot(context, prefix, width, height)
    # An animation is a single file, so the name has no batch number and a token for it isn't
    # replaced.
    name = f"{slot.stem}_{slot.counter:05}_{extension}"
    first, *rest = to_pillow(images)
    duration_ms = int(1000.0 / fps)
    first.save(
        slot.folder / name, save_all=True, append_images=rest, duration=duration_ms, **options
    )
    animated = {"animated": (True,)} if rest else {}
    return NodeResult((images,), {"images": [slot.saved(name)], **animated})


def webp_exif(texts: dict[str, str]) -> PIL.Image.Exif:
    """Returns EXIF data with `prompt:{…}` in the tag for the camera model, and with `workflow:{…}`
    and other entries in the tags below it."""
    exif = PIL.Image.Exif()
    for tag, (key, value) in enumerate(texts.items()):
        exif[EXIF_MODEL - tag] = f"{key}:{value}"
    return exif


def apng_chunks(texts: dict[str, str]) -> PngInfo:
    """Returns PNG chunks of ComfyUI's own type, because ordinary text chunks would get lost in an
    animation."""
    info = PngInfo()
    for key, value in texts.items():
        info.add(b"comf", f"{key}\0{value}".encode("latin-1"), after_idat=True)
    return info


SAVERS = (save_image, preview_image, save_animated_webp, save_animated_png)


PNG_COMPRESSION = 1


def _unique_value(folders: Folders, inputs: Inputs) -> float:
    """Returns a value that never repeats, so that results never come from the cache and every run
    sends its images."""
    return math.nan


@node(
    Interface(
        "SaveImageWebsocket",
        "Save Image (Websocket)",
        "custom_nodes.websocket_image_save",
        "image",
        inputs={"images": bare("IMAGE")},
        outputs=(),
        output_node=True,
        classic=True,
    ),
    fingerprint=_unique_value,
)
def save_image_websocket(context: Context, images: Image) -> NodeResult:
    """Sends each image as the preview of a step. Steps count from 0."""
    for index, picture in enumerate(to_pillow(images)):
        file = BytesIO()
        picture.save(file, "PNG", compress_level=PNG_COMPRESSION)
        context.progress(index, len(images), file.getvalue())
    return NodeResult()


STREAMERS = (save_image_websocket,)


SAMPLERS = (
    *("euler", "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heun", "heunpp2"),
    *("exp_heun_2_x0", "exp_heun_2_x0_sde", "dpm_2", "dpm_2_ancestral", "lms", "dpm_fast"),
    *("dpm_adaptive", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde"),
    *("dpmpp_sde_gpu", "dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu"),
    *("dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "ddpm"),
    *("lcm", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp"),
    *("res_multistep_ancestral", "res_multistep_ancestral_cfg_pp", "gradient_estimation"),
    *("gradient_estimation_cfg_pp", "er_sde", "seeds_2", "seeds_3", "sa_solver"),
    *("sa_solver_pece", "ddim", "uni_pc", "uni_pc_bh2"),
)
CHECKPOINT_TOOLTIP = "The name of the checkpoint (model) to load."


@node(
    Interface(
        "CheckpointLoaderSimple",
        "Load Checkpoint",
        "nodes",
        "model/loaders",
        inputs={"ckpt_name": [[], {"tooltip": CHECKPOINT_TOOLTIP}]},
        outputs=("MODEL", "CLIP", "VAE"),
        classic=True,
    )
)
def load_checkpoint(context: Context, ckpt_name: str) -> NodeResult:
    """Always fails. The node can only run if its model name is linked, because it offers no
    names."""
    raise NodeFailed(f"model {ckpt_name!r} doesn't exist: the built-in engine has no models")


@pure(
    Interface(
        "KSamplerSelect",
        "KSamplerSelect",
        "comfy_extras.nodes_custom_sampler",
        "model/sampling/samplers",
        inputs={"sampler_name": choice(*SAMPLERS)},
        outputs=("SAMPLER",),
    )
)
def select_sampler(sampler_name: str) -> str:
    return sampler_name


MODEL_NODES = (load_checkpoint, select_sampler)


VIDEOS = "comfy_extras.nodes_video"


def saved_video_ui(saved: Saved) -> dict[str, object]:
    """Returns the entry for the history. Videos are listed as animated images."""
    return {"images": [saved], "animated": (True,)}


@pure(
    Interface(
        "GetVideoComponents",
        "Get Video Components",
        VIDEOS,
        "video",
        inputs={"video": VIDEO},
        outputs=("IMAGE", "AUDIO", "FLOAT", "INT"),
        output_names=("images", "audio", "fps", "bit_depth"),
    )
)
def get_video_components(video: Video) -> tuple[Image, Audio | None, float, int]:
    parts = video.components()
    return parts.images, parts.audio, float(parts.fps), video.bit_depth


@pure(
    Interface(
        "CreateVideo",
        "Create Video",
        VIDEOS,
        "video",
        inputs={"images": IMAGE, "fps": number(30.0, 1.0, 120.0, 1.0)},
        optional={"audio": AUDIO, "bit_depth": integer(8, 8, 10, 2, display="number")},
        outputs=("VIDEO",),
        essentials="Video Tools",
    )
)
def create_video(
    images: Image, fps: float, audio: Audio | None = None, bit_depth: int = 8
) -> BuiltVideo:
    return BuiltVideo(images, Fraction(fps), audio, bit_depth)


@pure(
    Interface(
        "Video Slice",
        "Trim Video",
        VIDEOS,
        "video",
        inputs={
            "video": VIDEO,
            "start_time": number(0.0, -100000.0, 100000.0, 0.001),
            "duration": number(0.0, 0.0, step=0.001),
            "strict_duration": flag(False),
        },
        outputs=("VIDEO",),
        essentials="Video Tools",
    )
)
def video_slice(
    video: Video, start_time: float, duration: float, strict_duration: bool
) -> FileVideo:
    return video.part(start_time, duration, strict=strict_duration)


@node(
    Interface(
        "SaveVideo",
        "Save Video",
        VIDEOS,
        "video",
        inputs={
            "video": VIDEO,
            "filename_prefix": text("video/ComfyUI"),
            "format": choice("auto", "mp4", default="auto"),
            "codec": choice("auto", "h264", default="auto"),
        },
        hidden=HIDDEN_METADATA,
        outputs=("VIDEO",),
        output_names=("video",),
        output_node=True,
        essentials="Basics",
    )
)
def save_video(
    context: Context, video: Video, filename_prefix: str, format: str, codec: str
) -> NodeResult:
    slot = next_slot(context, filename_prefix, *video.size)
    name = f"{slot.stem}_{slot.counter:05}_.mp4"
    video.save(slot.folder / name, format=format, codec=codec, tags=metadata(context))
    return NodeResult((video,), saved_video_ui(slot.saved(name)))


@node(
    Interface(
        "SaveWEBM",
        "Save WEBM",
        VIDEOS,
        "video",
        inputs={
            "images": IMAGE,
            "filename_prefix": text("ComfyUI"),
            "codec": choice("vp9", "av1"),
            "fps": number(24.0, 0.01, 1000.0, 0.01),
            "crf": number(32.0, 0, 63.0, 1),
        },
        hidden=HIDDEN_METADATA,
        outputs=("IMAGE",),
        output_names=("images",),
        output_node=True,
        experimental=True,
    )
)
def save_webm(
    context: Context, images: Image, filename_prefix: str, codec: str, fps: float, crf: float
) -> NodeResult:
    height, width = require_pictures(images)
    slot = next_slot(context, filename_prefix, width, height)
    name = f"{slot.stem}_{slot.counter:05}_.webm"
    tags = metadata(context)
    encode_webm(images, fps, slot.folder / name, codec=codec, crf=crf, tags=tags)
    return NodeResult((images,), saved_video_ui(slot.saved(name)))


VIDEO_NODES = (get_video_components, create_video, video_slice, save_video, save_webm)
