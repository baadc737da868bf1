"""Pictures, videos and sound out of files, through FFmpeg with the results of ComfyUI.

Bytes that are RGB already stay bytes; everything else goes through swscale to float planes. That
is why a white 8-bit grey PNG is 0.996 and not 1.0, and it can't be had any other way.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import av.container
import av.error
import av.filter
import numpy as np
from av.audio.resampler import AudioResampler

from comfyfleet.engine.limits import require_room, require_small
from comfyfleet.engine.values import Audio, Image, Mask, from_bytes
from comfyfleet.kernel.demuxers import OPEN_OPTIONS
from comfyfleet.kernel.errors import NodeFailed
from comfyfleet.kernel.pictures import HEADER_BYTES, LONG_HEADER_BYTES, Size, size_by_header

# Decoded to 8-bit RGB; full-range JPEG is among them.
BYTE_FORMATS = frozenset({"rgb24", "rgba", "pal8", "yuvj420p", "yuvj422p", "yuvj444p"})
ALIGNMENT_PIXELS = 32

Source = Path | bytes


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a video. A start below 0 counts from the end; a duration of 0 is all the rest."""

    start_s: float = 0.0
    duration_s: float = 0.0


WHOLE = Window()


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """What a file holds: no frames is a batch of 0x0 pictures."""

    images: Image
    mask: Mask | None  # 1 - alpha, where the format has alpha
    audio: Audio | None
    fps: Fraction


@contextmanager
def opened(source: Source) -> Iterator[av.container.InputContainer]:
    """The file opened for reading; what FFmpeg can't make sense of is a NodeFailed."""
    file = str(source) if isinstance(source, Path) else io.BytesIO(source)
    try:
        require_small(size_told(source))
        with av.open(file, mode="r", options=dict(OPEN_OPTIONS)) as container:
            for stream in container.streams.video:
                require_small((stream.width, stream.height))
            yield container
    except (av.error.FFmpegError, OSError) as error:
        # Without the path that FFmpeg adds: it is nobody's business but the server's.
        raise NodeFailed(f"can't read {_named(source)}: {error.strerror}") from error


def size_told(source: Source) -> Size | None:
    """By our own reading: FFmpeg decodes a picture already as it opens it."""
    for length in (HEADER_BYTES, LONG_HEADER_BYTES):
        first = source[:length] if isinstance(source, bytes) else _start(source, length)
        size = size_by_header(first)
        if size is not None or len(first) < length:
            return size
    return None


def _start(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)


def first_video(container: av.container.InputContainer) -> av.VideoStream:
    if not container.streams.video:
        raise NodeFailed("there is no picture in this file")
    return container.streams.video[0]


def _named(source: Source) -> str:
    return source.name if isinstance(source, Path) else "the video"


def duration_s(source: Source) -> float:
    """Of the whole file."""
    with opened(source) as container:
        if container.duration is not None:
            return container.duration / av.time_base
        stream = first_video(container)
        rate = stream.average_rate
        if rate and stream.frames:
            return float(stream.frames / rate)
        count = sum(1 for _ in container.decode(stream)) if rate else 0
        if not rate or not count:
            raise NodeFailed(f"how long {_named(source)} is can't be told")
        return float(count / rate)


def absolute(window: Window, source: Source) -> Window:
    """The window with its start counted from the beginning."""
    if window.start_s >= 0:
        return window
    return Window(max(duration_s(source) + window.start_s, 0.0), window.duration_s)


def frame_size(source: Source) -> tuple[int, int]:
    """Width and height as stored, before any rotation."""
    with opened(source) as container:
        stream = first_video(container)
        return stream.width, stream.height


def bit_depth(source: Source) -> int:
    with opened(source) as container:
        streams = container.streams.video
        return stream_bit_depth(streams[0]) if streams else 8


def stream_bit_depth(stream: av.VideoStream) -> int:
    components = stream.format.components if stream.format else ()
    return max((component.bits for component in components), default=8)


def frame_rate(stream: av.VideoStream) -> Fraction:
    return Fraction(stream.average_rate) if stream.average_rate else Fraction(1)


def frames_within(
    container: av.container.InputContainer, stream: av.VideoStream, window: Window
) -> Iterator[av.VideoFrame]:
    """The frames of an absolute window. Packets that can't be decoded are passed over."""
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


def decode(source: Source, window: Window = WHOLE) -> Components:
    """All frames and the sound of a window, in memory."""
    window = absolute(window, source)
    with opened(source) as container:
        stream = first_video(container)
        reader = _FrameReader()
        frames: list[Any] = []
        for frame in frames_within(container, stream, window):
            require_room(len(frames) + 1, frame.height, frame.width, 3)
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
    """Turns frames into arrays. The first one decides the format for all."""

    def __init__(self) -> None:
        self.has_alpha = False
        self._format: str | None = None
        self._align: av.filter.Graph | None = None

    def read(self, frame: av.VideoFrame) -> Any:
        if self._format is None:
            self.has_alpha = _has_alpha(frame)
            self._format = _target_format(frame.format.name, has_alpha=self.has_alpha)
        pixels = self._converted(frame, self._format)
        # FFmpeg's own idea of rotation, wrong as it is for mirrored pictures.
        quarters = round(frame.rotation // 90)
        return np.rot90(pixels, k=quarters).copy() if quarters else pixels

    def _converted(self, frame: av.VideoFrame, target: str) -> Any:
        is_aligned = frame.width % ALIGNMENT_PIXELS == 0
        if is_aligned or not target.startswith("gbr"):
            return frame.to_ndarray(format=target)
        # Else what lies in memory beyond the right edge would show in the last columns.
        if self._align is None:
            self._align = _alignment(frame)
        self._align.push(frame)
        padded = cast(av.VideoFrame, self._align.pull())
        pixels = padded.to_ndarray(format=target)[: frame.height, : frame.width]
        return np.ascontiguousarray(pixels)


def _has_alpha(frame: av.VideoFrame) -> bool:
    # Any palette may hold transparent colours, so every palette picture has a mask.
    is_palette = frame.format.name == "pal8"
    return is_palette or any(component.is_alpha for component in frame.format.components)


def _target_format(name: str, *, has_alpha: bool) -> str:
    if name in BYTE_FORMATS:
        return "rgba" if has_alpha else "rgb24"
    return "gbrapf32le" if has_alpha else "gbrpf32le"


def _alignment(frame: av.VideoFrame) -> av.filter.Graph:
    """Pads to a multiple of 32 and smears the border into the padding."""
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
    # FFmpeg smears over half of a picture at most; smaller ones ComfyUI can't load at all.
    if 2 * right <= width and 2 * bottom <= height:
        borders = f"left=0:right={right}:top=0:bottom={bottom}:mode=smear"
        steps.append(graph.add("fillborders", borders))
    graph.link_nodes(*steps, graph.add("buffersink")).configure()
    return graph


def decode_audio(source: Source, window: Window) -> Audio | None:
    """The sound of an absolute window; None where there is none that can be decoded."""
    with opened(source) as container:
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
    # A stream that FFmpeg has no decoder for has no codec context, and decoding it would crash.
    known = [stream for stream in container.streams.audio if stream.codec_context is not None]
    return known[-1] if known else None


def _samples_within(
    container: av.container.InputContainer, stream: av.AudioStream, window: Window
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
