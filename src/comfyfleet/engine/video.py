"""The two kinds of VIDEO: a file, perhaps only a part of it, and a batch not yet encoded."""

import io
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from comfyfleet.engine.decode import (
    WHOLE,
    Components,
    Source,
    Window,
    bit_depth,
    decode,
    duration_s,
    frame_size,
)
from comfyfleet.engine.encode import Tags, encode_mp4
from comfyfleet.engine.transcode import save_mp4
from comfyfleet.engine.values import Audio, Image
from comfyfleet.kernel.errors import NodeFailed


@dataclass(frozen=True, slots=True)
class FileVideo:
    """A video file; nothing is read before it is asked for."""

    source: Source
    window: Window = WHOLE

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
        part = FileVideo(self.source, Window(self.window.start_s + start_s, duration_s))
        if strict and part.duration_s < duration_s:
            raise NodeFailed(f"the video lasts {self.duration_s} s, too short for this part")
        return part

    def save(self, target: Path, *, format: str, codec: str, tags: Tags) -> None:
        save_mp4(self.source, self.window, target, format=format, codec=codec, tags=tags)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltVideo:
    """Images, sound and a rate, bundled. It is encoded when it is saved or cut."""

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
        """Encoded first, as ComfyUI does it, and always strict about the duration."""
        if self.duration_s < start_s + duration_s:
            raise NodeFailed(f"the video lasts {self.duration_s} s, too short for this part")
        encoded = io.BytesIO()
        encode_mp4(self.images, self.fps, encoded, audio=self.audio, bit_depth=self.bit_depth)
        return FileVideo(encoded.getvalue(), Window(start_s, duration_s))

    def save(self, target: Path, *, format: str, codec: str, tags: Tags) -> None:
        encode_mp4(
            self.images, self.fps, target, audio=self.audio, bit_depth=self.bit_depth, tags=tags
        )


Video = FileVideo | BuiltVideo
