"""Whether what nodes wrote is what ComfyUI wrote, by the rules of the recorded cases."""

import base64
import fnmatch
import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageSequence

Pixels = npt.NDArray[np.int16]
DURATION_TOLERANCE_S = 0.05


def matches(wanted: Any, got: Any) -> bool:
    """Equal, with `?` in file names for any one character."""
    if isinstance(wanted, dict):
        return (
            isinstance(got, dict)
            and wanted.keys() == got.keys()
            and all(matches(wanted[key], got[key]) for key in wanted)
        )
    if isinstance(wanted, list):
        return (
            isinstance(got, list)
            and len(wanted) == len(got)
            and all(matches(a, b) for a, b in zip(wanted, got, strict=True))
        )
    if isinstance(wanted, str) and "?" in wanted and isinstance(got, str):
        return fnmatch.fnmatchcase(got, wanted)
    return bool(wanted == got)


def difference(wanted: dict[str, Any], shown: dict[str, Any], folders: dict[str, Path]) -> str:
    """What is wrong with one recorded output; empty when nothing is."""
    if wanted["kind"] == "text":
        return "" if shown["text"] == [wanted["text"]] else f"text {shown['text']!r}"
    saved = shown["images"][wanted["index"]]
    path = folders[saved["type"]] / saved["subfolder"] / saved["filename"]
    return {"image": _image, "animation": _animation, "video": _video}[wanted["kind"]](wanted, path)


def _image(wanted: dict[str, Any], path: Path) -> str:
    with PIL.Image.open(path) as picture:
        if picture.mode != wanted["mode"]:
            return f"mode {picture.mode}"
        return _pixels(wanted["tolerance"], _png(wanted["png_base64"]), _array(picture))


def _animation(wanted: dict[str, Any], path: Path) -> str:
    with PIL.Image.open(path) as picture:
        durations, frames = [], []
        for frame in PIL.ImageSequence.Iterator(picture):
            frame.load()
            durations.append(frame.info.get("duration"))
            frames.append(_without_opaque_alpha(_array(frame)))
    if len(frames) != wanted["frames"] or durations != wanted["durations_ms"]:
        return f"{len(frames)} frames of {durations} ms"
    recorded = [_without_opaque_alpha(_png(text)) for text in wanted["frames_png_base64"]]
    pairs = zip(recorded, frames, strict=True)
    return next(filter(None, (_pixels(wanted["tolerance"], a, b) for a, b in pairs)), "")


def _video(wanted: dict[str, Any], path: Path) -> str:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        got = {
            "codec": stream.codec.canonical_name,
            "pix_fmt": frames[0].format.name,
            "width": stream.width,
            "height": stream.height,
            "frames": len(frames),
            "fps": str(Fraction(stream.average_rate or 0)),
            "metadata_keys": sorted(container.metadata),
            "audio": _audio(container),
        }
        duration_s = (container.duration or 0) / av.time_base
    wrong = {key: seen for key, seen in got.items() if seen != wanted[key]}
    if abs(duration_s - wanted["duration_s"]) > DURATION_TOLERANCE_S:
        wrong["duration_s"] = duration_s
    if wrong:
        return str(wrong)
    ends = (("first_png_base64", frames[0]), ("last_png_base64", frames[-1]))
    found = [
        _pixels(wanted["tolerance"], _png(wanted[key]), _int(frame.to_ndarray(format="rgb24")))
        for key, frame in ends
    ]
    return "; ".join(filter(None, found))


def _audio(container: Any) -> dict[str, Any] | None:
    if not container.streams.audio:
        return None
    stream = container.streams.audio[0]
    return {"codec": stream.codec.name, "rate": stream.sample_rate, "channels": stream.channels}


def _pixels(tolerance: Any, wanted: Pixels, got: Pixels) -> str:
    if wanted.shape != got.shape:
        return f"shape {got.shape}, not {wanted.shape}"
    apart = np.abs(wanted - got)
    if isinstance(tolerance, dict):
        mean = float(apart.mean())
        return "" if mean <= tolerance["mean"] else f"mean difference {mean:.2f}"
    largest = int(apart.max(initial=0))
    return "" if largest <= tolerance else f"{largest} apart in {int((apart > tolerance).sum())}"


def _png(text: str) -> Pixels:
    with PIL.Image.open(io.BytesIO(base64.b64decode(text))) as picture:
        return _array(picture)


def _array(picture: PIL.Image.Image) -> Pixels:
    return _int(np.asarray(picture))


def _int(array: Any) -> Pixels:
    return np.asarray(array).astype(np.int16)


def _without_opaque_alpha(pixels: Pixels) -> Pixels:
    is_opaque = pixels.shape[-1] == 4 and bool((pixels[..., 3] == 255).all())
    return pixels[..., :3] if is_opaque else pixels


def without(value: Any, *keys: str) -> Any:
    """The value with these keys taken out at any depth."""
    if isinstance(value, list):
        return [without(item, *keys) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: without(item, *keys) for key, item in value.items() if key not in keys}
