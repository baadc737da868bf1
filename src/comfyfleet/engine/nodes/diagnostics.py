"""Nodes for testing clients and servers (slow, trivial and failing ones), and a blur that is as
slow as ComfyUI's without a GPU.

Clients test queueing, interrupting and reconnecting while a large blur runs, and expect it to take
seconds. Our blur is faster, so it sleeps for the rest of the time. This happens only in an engine
that stands in for a ComfyUI, never while users wait for an image.
"""

import contextlib
import io
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np
import PIL.Image

from comfyfleet.engine.image_math import Image, to_bytes
from comfyfleet.engine.node import (
    IMAGE,
    MATCH,
    Context,
    EngineNodeType,
    Folders,
    Inputs,
    Interface,
    NodeResult,
    choice,
    flag,
    integer,
    match_type,
    node,
    split_annotation,
    text,
)
from comfyfleet.engine.saved_files import Saved, content_kind, files_of, missing_file, next_slot
from comfyfleet.errors import NodeFailed

# The approximate speed of ComfyUI on two CPU cores, and the maximum duration in seconds of a blur
# that is slowed down to this speed.
OPERATIONS_PER_SECOND = 6e9
SECONDS_MAX = 2.0


HEAVY = "ImageBlur"


def with_cpu_pace(nodes: Mapping[str, EngineNodeType]) -> dict[str, EngineNodeType]:
    """Returns the node types with a blur that takes as long as ComfyUI's on a CPU."""
    blur = nodes[HEAVY]

    def run(context: Context, *, image: Any, blur_radius: int, sigma: float) -> NodeResult:
        # For each value, ComfyUI's blur sums over a whole square of pixels.
        side = 2 * blur_radius + 1 if blur_radius else 0
        with minimum_duration(image.size * side**2):
            return blur.run(context, image=image, blur_radius=blur_radius, sigma=sigma)

    return {**nodes, HEAVY: replace(blur, run=run)}


@contextlib.contextmanager
def minimum_duration(
    operations: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Makes the block last as long as this many operations would take.

    Doesn't use `context.pause`, because in ComfyUI an interrupt reaches such a node only when it
    has finished.
    """
    end = clock() + min(operations / OPERATIONS_PER_SECOND, SECONDS_MAX)
    yield
    if (remaining := end - clock()) > 0:
        sleep(remaining)


MODULE = "comfyfleet"
CATEGORY = "comfyfleet"
STEPS_MAX = 10_000
STEP_MS_MAX = 600_000
PREVIEW_SIDE_MAX = 512
PLACEHOLDER_SIDE = 64


@node(
    Interface(
        "ComfyfleetSteps",
        "Take Steps",
        MODULE,
        CATEGORY,
        inputs={
            "steps": integer(10, 1, STEPS_MAX, 1),
            "step_ms": integer(100, 0, STEP_MS_MAX, 1),
            "previews": flag(True),
        },
        optional={"image": IMAGE},
        outputs=("IMAGE",),
        output_node=True,
    )
)
def take_steps(
    context: Context, steps: int, step_ms: int, previews: bool, image: Image | None = None
) -> NodeResult:
    """Runs for a given number of steps and time per step, with progress and a preview that becomes
    brighter with each step."""
    picture = placeholder() if image is None else image
    for done in range(1, steps + 1):
        context.pause(step_ms / 1000)
        preview = jpeg(picture[0] * (done / steps)) if previews else None
        context.progress(done, steps, preview)
    return NodeResult((picture,), {"text": (f"{steps} steps of {step_ms} ms",)})


def placeholder() -> Image:
    """Returns an image for callers without one: a gradient in each direction."""
    ramp = np.linspace(0, 1, PLACEHOLDER_SIDE, dtype=np.float32)
    across, down = np.meshgrid(ramp, ramp)
    return np.stack([across, down, 1 - across], axis=-1)[np.newaxis]


def jpeg(picture: Image) -> bytes:
    preview = PIL.Image.fromarray(to_bytes(picture[..., :3]))
    preview.thumbnail((PREVIEW_SIDE_MAX, PREVIEW_SIDE_MAX))
    file = io.BytesIO()
    preview.save(file, "JPEG")
    return file.getvalue()


def _size_and_time(folders: Folders, inputs: Inputs) -> tuple[int, int]:
    status = folders.locate(inputs["file"]).stat()
    return status.st_size, status.st_mtime_ns


@node(
    Interface(
        "ComfyfleetPassFile",
        "Pass File Through",
        MODULE,
        CATEGORY,
        inputs={"file": choice(image_upload=True), "filename_prefix": text("ComfyUI")},
        outputs=("STRING",),
        output_names=("name",),
        output_node=True,
    ),
    choices={"file": files_of()},
    validate=missing_file("input", "file"),
    validated=("file",),
    fingerprint=_size_and_time,
)
def pass_file(context: Context, file: str, filename_prefix: str) -> NodeResult:
    """Copies the file to the output folder. Returns its name in the form that loaders accept."""
    source = context.folders.locate(file)
    slot = next_slot(context, filename_prefix)
    _, name = split_annotation(file)
    saved = slot.saved(f"{slot.stem}_{slot.counter:05}_{PurePath(name).suffix}")
    try:
        shutil.copyfile(source, slot.folder / saved["filename"])
    except OSError as error:
        raise NodeFailed(f"{file!r} can't be copied: {error.strerror}") from error
    path = PurePath(saved["subfolder"], saved["filename"]).as_posix()
    return NodeResult((f"{path} [output]",), saved_file_ui(saved))


def saved_file_ui(saved: Saved) -> dict[str, Any]:
    """Returns the entry for the history, under the key that ComfyUI's own savers use for this type
    of file."""
    match content_kind(saved["filename"]):
        case "image":
            return {"images": [saved]}
        case "video":
            return {"images": [saved], "animated": (True,)}
        case "audio":
            return {"audio": [saved]}
        case _:
            return {"files": [saved]}


MEASURES = ("sharpness", "exposure", "similarity", "words")
HASH_SIDE = 8


@node(
    Interface(
        "ComfyfleetMeasure",
        "Measure Image",
        MODULE,
        CATEGORY,
        inputs={"image": IMAGE, "measure": choice(*MEASURES)},
        optional={"reference": IMAGE},
        outputs=("STRING",),
        output_node=True,
    )
)
def measure_image(
    context: Context, image: Image, measure: str, reference: Image | None = None
) -> NodeResult:
    """Shows a number from 0 to 1 for the first image, or a short description of it."""
    if measure == "similarity" and reference is None:
        raise NodeFailed("the measure 'similarity' requires a reference image")
    grey = grey_of(image)
    match measure:
        case "sharpness":
            shown = f"{sharpness(grey):.4f}"
        case "exposure":
            shown = f"{1 - 2 * abs(float(grey.mean()) - 0.5):.4f}"
        case "similarity":
            equal = picture_hash(grey) == picture_hash(grey_of(reference))
            shown = f"{float(np.mean(equal)):.4f}"
        case _:
            shown = words_for(image[0], grey)
    return NodeResult((shown,), {"text": (shown,)})


def grey_of(image: Any) -> Any:
    return np.asarray(image[0][..., :3], dtype=np.float64).mean(axis=-1)


def sharpness(grey: Any) -> float:
    """Returns the mean difference between neighboring pixels, which a blur reduces. It is 1 for a
    checkerboard.
    """
    across, down = np.abs(np.diff(grey, axis=1)), np.abs(np.diff(grey, axis=0))
    total = across.size + down.size
    return float((across.sum() + down.sum()) / total) if total else 0.0


def picture_hash(grey: Any) -> Any:
    """Returns a 64-bit perceptual hash. Each bit belongs to one of 8 × 8 areas, and is set if the
    image becomes brighter from left to right in this area."""
    small = PIL.Image.fromarray((grey * 255).clip(0, 255).astype(np.uint8))
    pixels = np.asarray(small.resize((HASH_SIDE + 1, HASH_SIDE)), dtype=np.int16)
    return np.diff(pixels, axis=1) > 0


def words_for(picture: Any, grey: Any) -> str:
    height, width = grey.shape
    light = "bright" if grey.mean() > 0.6 else "dark" if grey.mean() < 0.3 else "balanced"
    shape = "landscape" if width > height else "portrait" if height > width else "square"
    colour = ("red", "green", "blue")[int(np.argmax(picture[..., :3].mean(axis=(0, 1))))]
    return f"a {light} {shape}, mostly {colour}"


@node(
    Interface(
        "ComfyfleetFail",
        "Fail on Demand",
        MODULE,
        CATEGORY,
        inputs={
            "fail": flag(True),
            "message": text("failed on demand"),
            "after_ms": integer(0, 0, STEP_MS_MAX, 1),
        },
        optional={"value": match_type("value", "*")},
        outputs=(MATCH,),
        output_names=("value",),
        output_matches=("value",),
        output_node=True,
    )
)
def fail_on_demand(
    context: Context, fail: bool, message: str, after_ms: int, value: Any = None
) -> NodeResult:
    context.pause(after_ms / 1000)
    if fail:
        raise NodeFailed(message)
    return NodeResult((value,))


NODES = (take_steps, pass_file, measure_image, fail_on_demand)
