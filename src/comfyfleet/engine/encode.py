"""Batches of images into video files: H.264 and AAC in MP4, VP9 or AV1 in WebM."""

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import av.container
import av.error
import numpy as np

from comfyfleet.engine.values import Audio, Image, to_bytes
from comfyfleet.kernel.errors import NodeFailed

Target = Path | io.BytesIO
Tags = Mapping[str, str]

DEEP_BITS = 10
LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}
WEBM_ENCODERS = {"vp9": "libvpx-vp9", "av1": "libsvtav1"}
AV1_SPEED = "6"


def encode_mp4(
    images: Image,
    fps: Fraction,
    target: Target,
    *,
    audio: Audio | None = None,
    bit_depth: int = 8,
    tags: Tags | None = None,
) -> None:
    """Encode a batch with x264's defaults."""
    if images.shape[-1] != 3 or 0 in images.shape:
        raise NodeFailed(f"a video can't be made of images of shape {images.shape}")
    count, height, width = images.shape[:3]
    rate = rounded_rate(fps)
    with new_file(target, tags or {}, format="mp4") as output:
        stream = add_h264(output, rate, width, height, bit_depth)
        track = add_aac(output, audio)
        mux(output, stream, (_frame(image, bit_depth) for image in images))
        if audio is not None and track is not None:
            mux_audio(output, track, audio, math.ceil(audio.sample_rate / rate * count))


def encode_webm(
    images: Image, fps: float, target: Path, *, codec: str, crf: float, tags: Tags
) -> None:
    """Encode a batch as VP9, with alpha if the images have it, or as AV1."""
    height, width, channels = images.shape[1:]
    has_alpha = channels == 4 and codec == "vp9"
    layout = "rgba" if has_alpha else "rgb24"
    pixels = to_bytes(images[..., : len(layout.rstrip("24"))])
    with new_file(target, tags, format="webm") as output:
        added = output.add_stream(WEBM_ENCODERS[codec], rate=rounded_rate(fps))
        stream = cast(av.VideoStream, added)
        stream.width, stream.height = width, height
        stream.pix_fmt = _webm_pixels(codec, has_alpha=has_alpha)
        stream.bit_rate = 0
        speed = {"preset": AV1_SPEED} if codec == "av1" else {}
        stream.codec_context.options = {"crf": str(crf), **speed}
        mux(output, stream, (av.VideoFrame.from_ndarray(one, format=layout) for one in pixels))


def rounded_rate(fps: float | Fraction) -> Fraction:
    """In thousandths, as ComfyUI writes it."""
    return Fraction(round(fps * 1000), 1000)


def pixel_format(bit_depth: int) -> str:
    return "yuv420p10le" if bit_depth >= DEEP_BITS else "yuv420p"


def _webm_pixels(codec: str, *, has_alpha: bool) -> str:
    if codec == "av1":
        return "yuv420p10le"
    return "yuva420p" if has_alpha else "yuv420p"


def _frame(image: Image, bit_depth: int) -> av.VideoFrame:
    if bit_depth < DEEP_BITS:
        frame = av.VideoFrame.from_ndarray(to_bytes(image), format="rgb24")
    else:
        # By way of 16 bits: bytes would lose what the ten bits are for.
        deep = np.clip(image * np.float32(65535), 0, 65535).astype(np.uint16)
        frame = av.VideoFrame.from_ndarray(deep, format="rgb48le")
    return frame.reformat(format=pixel_format(bit_depth))


@contextmanager
def new_file(target: Target, tags: Tags, *, format: str) -> Iterator[av.container.OutputContainer]:
    """A container to write; a file that could not be finished is taken away again."""
    # Else MP4 drops every tag that it does not know, such as the prompt.
    flags = "use_metadata_tags" if isinstance(target, io.BytesIO) else "use_metadata_tags+faststart"
    options = {"movflags": flags} if format == "mp4" else {}
    file = str(target) if isinstance(target, Path) else target
    try:
        with av.open(file, mode="w", format=format, options=options) as output:
            output.metadata.update(tags)
            yield output
    except BaseException as error:
        if isinstance(target, Path):
            target.unlink(missing_ok=True)
        if isinstance(error, av.error.FFmpegError):
            raise NodeFailed(f"the video can't be written: {error.strerror}") from error
        raise


def add_h264(
    output: av.container.OutputContainer, rate: Fraction, width: int, height: int, bit_depth: int
) -> av.VideoStream:
    stream = output.add_stream("h264", rate=rate)
    stream.width, stream.height = width, height
    stream.pix_fmt = pixel_format(bit_depth)
    return stream


def add_aac(output: av.container.OutputContainer, audio: Audio | None) -> av.AudioStream | None:
    if audio is None:
        return None
    layout = LAYOUTS.get(audio.waveform.shape[1], "stereo")
    return output.add_stream("aac", rate=audio.sample_rate, layout=layout)


def mux(
    output: av.container.OutputContainer, stream: av.VideoStream, frames: Iterable[av.VideoFrame]
) -> int:
    """Encode and write the frames; how many there were."""
    count = 0
    for frame in frames:
        output.mux(stream.encode(frame))
        count += 1
    output.mux(stream.encode(None))
    return count


def mux_audio(
    output: av.container.OutputContainer, track: av.AudioStream, audio: Audio, samples_max: int
) -> None:
    """Write the sound, no longer than the pictures."""
    samples = np.ascontiguousarray(audio.waveform[0, :, :samples_max])
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=track.layout.name)
    frame.sample_rate = audio.sample_rate
    frame.pts = 0
    output.mux(track.encode(frame))
    output.mux(track.encode(None))
