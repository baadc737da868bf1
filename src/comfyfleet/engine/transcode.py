"""Video files into other video files: streams copied as they are, or encoded anew."""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path

import av
import av.container
import numpy as np
from av.subtitles.stream import SubtitleStream
from av.video.frame import PictureType
from av.video.reformatter import ColorRange

from comfyfleet.engine.decode import (
    WHOLE,
    Source,
    Window,
    absolute,
    decode_audio,
    first_video,
    frame_rate,
    frames_within,
    opened,
    stream_bit_depth,
)
from comfyfleet.engine.encode import Tags, add_aac, add_h264, mux, mux_audio, new_file
from comfyfleet.engine.values import Bytes
from comfyfleet.kernel.errors import NodeFailed

COPIED = (av.VideoStream, av.AudioStream, SubtitleStream)


def save_mp4(
    source: Source, window: Window, target: Path, *, format: str, codec: str, tags: Tags
) -> None:
    """Copy the streams where nothing is to be changed, else encode them."""
    with opened(source) as container:
        can_copy = window == WHOLE and _is_wanted(container, format, codec)
        if can_copy and _copy(container, target, tags):
            return
    transcode(source, window, target, tags=tags)


def _is_wanted(container: av.container.InputContainer, format: str, codec: str) -> bool:
    videos = container.streams.video
    same_format = format == "auto" or format in container.format.name.split(",")
    same_codec = codec == "auto" or not videos or videos[0].codec.canonical_name == codec
    return same_format and same_codec


def _copy(container: av.container.InputContainer, target: Path, tags: Tags) -> bool:
    """Copy all streams; False when MP4 can't hold one of them."""
    with new_file(target, {**container.metadata, **tags}, format="mp4") as output:
        copies = {}
        for stream in container.streams:
            # Without a codec context FFmpeg does not know what it is.
            if not isinstance(stream, COPIED) or stream.codec_context is None:
                continue
            try:
                copies[stream.index] = output.add_stream_from_template(stream, opaque=True)
            except ValueError:
                if not isinstance(stream, SubtitleStream):
                    return False
        for packet in container.demux():
            if packet.stream.index in copies and packet.dts is not None:
                packet.stream = copies[packet.stream.index]
                output.mux(packet)
    return True


def transcode(source: Source, window: Window, target: Path, *, tags: Tags) -> None:
    """Encode a window as H.264 and AAC, one frame at a time."""
    window = absolute(window, source)
    audio = decode_audio(source, window)
    with opened(source) as container:
        stream = first_video(container)
        frames = frames_within(container, stream, window)
        first = next(frames, None)
        if first is None:
            raise NodeFailed("there is no frame in this part of the video")
        width, height = _upright_size(first)
        with new_file(target, {**container.metadata, **tags}, format="mp4") as output:
            out = add_h264(output, frame_rate(stream), width, height, stream_bit_depth(stream))
            # Frames keep their own times; reordered ones would shift those of a trimmed video.
            out.codec_context.max_b_frames = 0
            out.codec_context.time_base = stream.time_base or Fraction(1, av.time_base)
            track = add_aac(output, audio)
            count = mux(output, out, _prepared(chain([first], frames), out.pix_fmt or "yuv420p"))
            if audio is not None and track is not None:
                samples = audio.sample_rate / frame_rate(stream) * count
                mux_audio(output, track, audio, math.ceil(samples))


def _upright_size(frame: av.VideoFrame) -> tuple[int, int]:
    is_turned = round(frame.rotation // 90) % 2 == 1
    width, height = (frame.height, frame.width) if is_turned else (frame.width, frame.height)
    if width % 2 or height % 2:
        raise NodeFailed(f"H.264 needs even sides, not {width}x{height}")
    return width, height


def _prepared(frames: Iterable[av.VideoFrame], pixels: str) -> Iterator[av.VideoFrame]:
    """Upright, in the encoder's format, with times that begin at 0."""
    start: int | None = None
    for frame in frames:
        position = frame.pts or 0
        start = position if start is None else start
        prepared = _converted(_turned(frame), pixels)
        prepared.pts, prepared.time_base = position - start, frame.time_base
        # Else the encoder would repeat the source's choice of key frames.
        prepared.pict_type = PictureType.NONE
        yield prepared


def _turned(frame: av.VideoFrame) -> av.VideoFrame:
    quarters = round(frame.rotation // 90)
    if not quarters:
        return frame
    pixels: Bytes = np.rot90(frame.to_ndarray(format="rgb24"), k=quarters).astype(np.uint8)
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")


def _converted(frame: av.VideoFrame, pixels: str) -> av.VideoFrame:
    if frame.color_range != ColorRange.JPEG:
        return frame.reformat(format=pixels)
    # Players take H.264 to be of limited range.
    return frame.reformat(format=pixels, src_color_range="JPEG", dst_color_range="MPEG")
