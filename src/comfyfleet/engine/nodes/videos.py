"""Nodes that take videos apart, build, cut and save them."""

from fractions import Fraction

from comfyfleet.engine.declare import (
    AUDIO,
    HIDDEN_METADATA,
    IMAGE,
    VIDEO,
    Interface,
    choice,
    flag,
    integer,
    node,
    number,
    pure,
    text,
)
from comfyfleet.engine.encode import encode_webm
from comfyfleet.engine.files import Saved, metadata, next_slot, require_pictures
from comfyfleet.engine.node import Context, Result
from comfyfleet.engine.values import Audio, Image
from comfyfleet.engine.video import BuiltVideo, FileVideo, Video

VIDEOS = "comfy_extras.nodes_video"


def shown(saved: Saved) -> dict[str, object]:
    """Videos are told of as animated images."""
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
) -> Result:
    slot = next_slot(context, filename_prefix, *video.size)
    name = f"{slot.stem}_{slot.counter:05}_.mp4"
    video.save(slot.folder / name, format=format, codec=codec, tags=metadata(context))
    return Result((video,), shown(slot.saved(name)))


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
) -> Result:
    height, width = require_pictures(images)
    slot = next_slot(context, filename_prefix, width, height)
    name = f"{slot.stem}_{slot.counter:05}_.webm"
    tags = metadata(context)
    encode_webm(images, fps, slot.folder / name, codec=codec, crf=crf, tags=tags)
    return Result((images,), shown(slot.saved(name)))


NODES = (get_video_components, create_video, video_slice, save_video, save_webm)
