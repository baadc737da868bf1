"""Decodes and encodes images, video and audio with FFmpeg, with the same results as ComfyUI.

8-bit RGB images stay bytes. All others are converted to float planes by swscale. This is why a
white 8-bit grayscale PNG becomes 0.996 instead of 1.0, as in ComfyUI.
"""

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, cast

import av
import av.container
import av.error
import av.filter
import numpy as np
from av.audio.resampler import AudioResampler
from av.subtitles.stream import SubtitleStream
from av.video.frame import PictureType
from av.video.reformatter import ColorRange

from comfyfleet.engine.image_math import Audio, Bytes, Image, Mask, from_bytes, to_bytes
from comfyfleet.engine.node import require_memory, require_small
from comfyfleet.errors import NodeFailed
from comfyfleet.media import OPEN_OPTIONS, measure_picture

# Pixel formats that are decoded to 8-bit RGB, including those of full-range JPEGs.
BYTE_FORMATS = frozenset({"rgb24", "rgba", "pal8", "yuvj420p", "yuvj422p", "yuvj444p"})
ALIGNMENT_PIXELS = 32

Source = Path | bytes


@dataclass(frozen=True, slots=True)
class ClipWindow:
    """A part of a video. A start below 0 counts from the end. A duration of 0 means the rest of the
    video."""

    start_s: float = 0.0
    duration_s: float = 0.0


WHOLE = ClipWindow()


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """The decoded content of a file. A file without frames has a batch of 0x0 images."""

    images: Image
    mask: Mask | None  # 1 - alpha, if the format has an alpha channel
    audio: Audio | None
    fps: Fraction


@contextmanager
def open_media(source: Source) -> Iterator[av.container.InputContainer]:
    """Opens a file for reading. Raises NodeFailed if FFmpeg can't read it."""
    file = str(source) if isinstance(source, Path) else io.BytesIO(source)
    try:
        # Our own reader measures the file first, because FFmpeg decodes an image when opening it.
        require_small(measure_picture(source))
        with av.open(file, mode="r", options=dict(OPEN_OPTIONS)) as container:
            for stream in container.streams.video:
                require_small((stream.width, stream.height))
            yield container
    except (av.error.FFmpegError, OSError) as error:
        # The message doesn't contain FFmpeg's path, because clients must not see the server's
        # paths.
        raise NodeFailed(f"can't read {_named(source)}: {error.strerror}") from error


def first_video(container: av.container.InputContainer) -> av.VideoStream:
    if not container.streams.video:
        raise NodeFailed("this file has no image")
    return container.streams.video[0]


def _named(source: Source) -> str:
    return source.name if isinstance(source, Path) else "the video"


def duration_s(source: Source) -> float:
    """Returns the duration of the whole file in seconds."""
    with open_media(source) as container:
        if container.duration is not None:
            return container.duration / av.time_base
        stream = first_video(container)
        rate = stream.average_rate
        if rate and stream.frames:
            return float(stream.frames / rate)
        count = sum(1 for _ in container.decode(stream)) if rate else 0
        if not rate or not count:
            raise NodeFailed(f"the duration of {_named(source)} can't be determined")
        return float(count / rate)


def absolute_window(window: ClipWindow, source: Source) -> ClipWindow:
    """Returns the window with its start counted from the beginning."""
    if window.start_s >= 0:
        return window
    return ClipWindow(max(duration_s(source) + window.start_s, 0.0), window.duration_s)


def frame_size(source: Source) -> tuple[int, int]:
    """Returns the stored width and height, before any rotation."""
    with open_media(source) as container:
        stream = first_video(container)
        return stream.width, stream.height


def bit_depth(source: Source) -> int:
    with open_media(source) as container:
        streams = container.streams.video
        return stream_bit_depth(streams[0]) if streams else 8


def stream_bit_depth(stream: av.VideoStream) -> int:
    components = stream.format.components if stream.format else ()
    return max((component.bits for component in components), default=8)


def frame_rate(stream: av.VideoStream) -> Fraction:
    return Fraction(stream.average_rate) if stream.average_rate else Fraction(1)


def frames_within(
    container: av.container.InputContainer, stream: av.VideoStream, window: ClipWindow
) -> Iterator[av.VideoFrame]:
    """Yields the frames of an absolute window. Packets that can't be decoded are skipped."""
    time_base = stream.time_base or Fraction(1, av.time_base)
    start = int(window.start_s / time_base)
    end = int((window.start_s + window.duration_s) / time_base)
    if start:
        container.seek(start, stream=stream)
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            continue
        for frame in frames:
            position = frame.pts or 0
            if window.duration_s and position >= end:
                return
            if position >= start:
                yield frame


def decode(source: Source, window: ClipWindow = WHOLE) -> Components:
    """Returns all frames and the audio of a window, in memory."""
    window = absolute_window(window, source)
    with open_media(source) as container:
        stream = first_video(container)
        reader = _FrameReader()
        frames: list[Any] = []
        for frame in frames_within(container, stream, window):
            require_memory(len(frames) + 1, frame.height, frame.width, 3)
            frames.append(reader.read(frame))
        fps = frame_rate(stream)
    images, mask = _stacked(frames, has_alpha=reader.has_alpha)
    return Components(images, mask, decode_audio(source, window), fps)


def _stacked(frames: list[Any], *, has_alpha: bool) -> tuple[Image, Mask | None]:
    if not frames:
        return np.zeros((0, 0, 0, 3), np.float32), None
    pixels = np.stack(frames)
    values = from_bytes(pixels) if pixels.dtype == np.uint8 else pixels.astype(np.float32)
    if not has_alpha:
        return values, None
    return values[..., :-1], np.float32(1.0) - values[..., -1]


class _FrameReader:
    """Converts frames to arrays. The first frame determines the format of all frames."""

    def __init__(self) -> None:
        self.has_alpha = False
        self._format: str | None = None
        self._align: av.filter.Graph | None = None

    def read(self, frame: av.VideoFrame) -> Any:
        if self._format is None:
            self.has_alpha = _has_alpha(frame)
            self._format = _target_format(frame.format.name, has_alpha=self.has_alpha)
        pixels = self._converted(frame, self._format)
        # Like ComfyUI, this uses FFmpeg's rotation, although it is wrong for mirrored images.
        quarters = round(frame.rotation // 90)
        return np.rot90(pixels, k=quarters).copy() if quarters else pixels

    def _converted(self, frame: av.VideoFrame, target: str) -> Any:
        is_aligned = frame.width % ALIGNMENT_PIXELS == 0
        if is_aligned or not target.startswith("gbr"):
            return frame.to_ndarray(format=target)
        # Without padding, memory contents beyond the right edge would appear in the last columns.
        if self._align is None:
            self._align = _alignment(frame)
        self._align.push(frame)
        padded = cast(av.VideoFrame, self._align.pull())
        pixels = padded.to_ndarray(format=target)[: frame.height, : frame.width]
        return np.ascontiguousarray(pixels)


def _has_alpha(frame: av.VideoFrame) -> bool:
    # A palette can contain transparent colors, so every palette image has a mask.
    is_palette = frame.format.name == "pal8"
    return is_palette or any(component.is_alpha for component in frame.format.components)


def _target_format(name: str, *, has_alpha: bool) -> str:
    if name in BYTE_FORMATS:
        return "rgba" if has_alpha else "rgb24"
    return "gbrapf32le" if has_alpha else "gbrpf32le"


def _alignment(frame: av.VideoFrame) -> av.filter.Graph:
    """Builds a filter that pads frames to a multiple of 32 pixels by repeating the border."""
    width = -(-frame.width // ALIGNMENT_PIXELS) * ALIGNMENT_PIXELS
    height = -(-frame.height // ALIGNMENT_PIXELS) * ALIGNMENT_PIXELS
    right, bottom = width - frame.width, height - frame.height
    graph = av.filter.Graph()
    start = graph.add_buffer(
        width=frame.width,
        height=frame.height,
        format=frame.format,
        time_base=frame.time_base or Fraction(1, av.time_base),
    )
    steps = [start, graph.add("pad", f"{width}:{height}:0:0")]
    # FFmpeg can fill at most half of the padded image this way. ComfyUI can't load smaller images.
    if 2 * right <= width and 2 * bottom <= height:
        borders = f"left=0:right={right}:top=0:bottom={bottom}:mode=smear"
        steps.append(graph.add("fillborders", borders))
    graph.link_nodes(*steps, graph.add("buffersink")).configure()
    return graph


def decode_audio(source: Source, window: ClipWindow) -> Audio | None:
    """Returns the audio of an absolute window, or None if there is no audio that can be decoded."""
    with open_media(source) as container:
        stream = last_decodable_audio(container)
        if stream is None:
            return None
        video = first_video(container)
        start = int(window.start_s / (video.time_base or 1))
        if start:
            container.seek(start, stream=video)
        parts = list(_samples_within(container, stream, window))
    if not parts:
        return None
    samples = np.concatenate(parts, axis=1)
    rate = stream.sample_rate or 1
    if window.duration_s:
        samples = samples[:, : int(window.duration_s * rate)]
    return Audio(samples[np.newaxis], rate)


def last_decodable_audio(container: av.container.InputContainer) -> av.AudioStream | None:
    # A stream without an FFmpeg decoder has no codec context, and decoding it would crash.
    decodable = [stream for stream in container.streams.audio if stream.codec_context is not None]
    return decodable[-1] if decodable else None


def _samples_within(
    container: av.container.InputContainer, stream: av.AudioStream, window: ClipWindow
) -> Iterator[Any]:
    resampler = AudioResampler(format="fltp")
    end = window.start_s + window.duration_s
    is_started = False
    for packet in container.demux(stream):
        for decoded in packet.decode():
            for frame in resampler.resample(decoded):
                if window.duration_s and (frame.time or 0.0) > end:
                    return
                late_s = 0.0 if is_started else window.start_s - (frame.time or 0.0)
                skip = max(0, int(late_s * stream.sample_rate))
                if skip < frame.samples:
                    is_started = True
                    yield frame.to_ndarray()[:, skip:]


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
    """Encodes a batch with x264's defaults."""
    if images.shape[-1] != 3 or 0 in images.shape:
        raise NodeFailed(f"can't encode a video from images of shape {images.shape}")
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
    """Encodes a batch as VP9 (with alpha if the images have an alpha channel) or as AV1."""
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
    """Returns the frame rate in thousandths, as ComfyUI writes it."""
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
        # Convert via 16 bits, because 8 bits would lose the precision of a 10-bit format.
        deep = np.clip(image * np.float32(65535), 0, 65535).astype(np.uint16)
        frame = av.VideoFrame.from_ndarray(deep, format="rgb48le")
    return frame.reformat(format=pixel_format(bit_depth))


@contextmanager
def new_file(target: Target, tags: Tags, *, format: str) -> Iterator[av.container.OutputContainer]:
    """Opens a container for writing. Deletes the file if it can't be completed."""
    # Without this flag, MP4 drops all unknown tags, such as the prompt.
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
    """Encodes and writes the frames, and returns their number."""
    count = 0
    for frame in frames:
        output.mux(stream.encode(frame))
        count += 1
    output.mux(stream.encode(None))
    return count


def mux_audio(
    output: av.container.OutputContainer, track: av.AudioStream, audio: Audio, samples_max: int
) -> None:
    """Writes the audio, truncated to the length of the video."""
    samples = np.ascontiguousarray(audio.waveform[0, :, :samples_max])
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=track.layout.name)
    frame.sample_rate = audio.sample_rate
    frame.pts = 0
    output.mux(track.encode(frame))
    output.mux(track.encode(None))


COPIED = (av.VideoStream, av.AudioStream, SubtitleStream)


def save_mp4(
    source: Source, window: ClipWindow, target: Path, *, format: str, codec: str, tags: Tags
) -> None:
    """Copies the streams if nothing has to change. Otherwise, encodes them."""
    with open_media(source) as container:
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
    """Copies all streams. Returns False if MP4 can't hold one of them."""
    with new_file(target, {**container.metadata, **tags}, format="mp4") as output:
        copies = {}
        for stream in container.streams:
            # Skip streams without a codec context, because FFmpeg doesn't know their codec.
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


def transcode(source: Source, window: ClipWindow, target: Path, *, tags: Tags) -> None:
    """Encodes a window as H.264 and AAC, one frame at a time."""
    window = absolute_window(window, source)
    audio = decode_audio(source, window)
    with open_media(source) as container:
        stream = first_video(container)
        frames = frames_within(container, stream, window)
        first = next(frames, None)
        if first is None:
            raise NodeFailed("this part of the video contains no frames")
        width, height = _upright_size(first)
        with new_file(target, {**container.metadata, **tags}, format="mp4") as output:
            out = add_h264(output, frame_rate(stream), width, height, stream_bit_depth(stream))
            # B-frames are disabled, because reordering frames would shift the timestamps of a
            # trimmed video.
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
        raise NodeFailed(f"H.264 requires an even width and height, not {width}x{height}")
    return width, height


def _prepared(frames: Iterable[av.VideoFrame], pixels: str) -> Iterator[av.VideoFrame]:
    """Yields the frames upright, in the encoder's pixel format, with timestamps that begin at 0."""
    start: int | None = None
    for frame in frames:
        position = frame.pts or 0
        start = position if start is None else start
        prepared = _converted(_rotated(frame), pixels)
        prepared.pts, prepared.time_base = position - start, frame.time_base
        # Let the encoder choose the key frames. Otherwise, it would copy the source's choice.
        prepared.pict_type = PictureType.NONE
        yield prepared


def _rotated(frame: av.VideoFrame) -> av.VideoFrame:
    quarters = round(frame.rotation // 90)
    if not quarters:
        return frame
    pixels: Bytes = np.rot90(frame.to_ndarray(format="rgb24"), k=quarters).astype(np.uint8)
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")


def _converted(frame: av.VideoFrame, pixels: str) -> av.VideoFrame:
    if frame.color_range != ColorRange.JPEG:
        return frame.reformat(format=pixels)
    # Convert full range to limited range, which players assume for H.264.
    return frame.reformat(format=pixels, src_color_range="JPEG", dst_color_range="MPEG")


@dataclass(frozen=True, slots=True)
class FileVideo:
    """A video file, which is read only when needed."""

    source: Source
    window: ClipWindow = WHOLE

    @property
    def size(self) -> tuple[int, int]:
        return frame_size(self.source)

    @property
    def bit_depth(self) -> int:
        return bit_depth(self.source)

    @property
    def duration_s(self) -> float:
        whole = duration_s(self.source)
        start = self.window.start_s
        rest = min(whole, -start) if start < 0 else whole - start
        return min(self.window.duration_s, rest) if self.window.duration_s else rest

    def components(self) -> Components:
        return decode(self.source, self.window)

    def part(self, start_s: float, duration_s: float, *, strict: bool) -> "FileVideo":
        part = FileVideo(self.source, ClipWindow(self.window.start_s + start_s, duration_s))
        if strict and part.duration_s < duration_s:
            raise NodeFailed(f"the video lasts only {self.duration_s} s, which is too short")
        return part

    def save(self, target: Path, *, format: str, codec: str, tags: Tags) -> None:
        save_mp4(self.source, self.window, target, format=format, codec=codec, tags=tags)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltVideo:
    """Images, audio and a frame rate. The video is encoded when it is saved or trimmed."""

    images: Image
    fps: Fraction
    audio: Audio | None = None
    bit_depth: int = 8

    @property
    def size(self) -> tuple[int, int]:
        return self.images.shape[2], self.images.shape[1]

    @property
    def duration_s(self) -> float:
        return float(len(self.images) / self.fps)

    def components(self) -> Components:
        return Components(self.images, None, self.audio, self.fps)

    def part(self, start_s: float, duration_s: float, *, strict: bool) -> FileVideo:
        """Encodes the video first, like ComfyUI. Always raises NodeFailed if the video is too
        short."""
        if self.duration_s < start_s + duration_s:
            raise NodeFailed(f"the video lasts only {self.duration_s} s, which is too short")
        encoded = io.BytesIO()
        encode_mp4(self.images, self.fps, encoded, audio=self.audio, bit_depth=self.bit_depth)
        return FileVideo(encoded.getvalue(), ClipWindow(start_s, duration_s))

    def save(self, target: Path, *, format: str, codec: str, tags: Tags) -> None:
        encode_mp4(
            self.images, self.fps, target, audio=self.audio, bit_depth=self.bit_depth, tags=tags
        )


Video = FileVideo | BuiltVideo
