"""Nodes of our own, for trying and testing what runs prompts: slow, plain and broken ones."""

import io
import shutil
from pathlib import PurePath
from typing import Any

import numpy as np
import PIL.Image

from comfyfleet.engine.declare import (
    IMAGE,
    MATCH,
    Interface,
    choice,
    flag,
    integer,
    matching,
    node,
    text,
)
from comfyfleet.engine.files import Saved, content_kind, files_of, missing_file, next_slot
from comfyfleet.engine.node import Context, Folders, Inputs, Result, split_annotation
from comfyfleet.engine.values import Image, to_bytes
from comfyfleet.kernel.errors import NodeFailed

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
) -> Result:
    """As slow as wished, with progress and a preview that becomes brighter at each step."""
    picture = placeholder() if image is None else image
    for done in range(1, steps + 1):
        context.pause(step_ms / 1000)
        preview = jpeg(picture[0] * (done / steps)) if previews else None
        context.progress(done, steps, preview)
    return Result((picture,), {"text": (f"{steps} steps of {step_ms} ms",)})


def placeholder() -> Image:
    """A picture for those who gave none: a ramp in each direction."""
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
    found = folders.locate(inputs["file"]).stat()
    return found.st_size, found.st_mtime_ns


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
def pass_file(context: Context, file: str, filename_prefix: str) -> Result:
    """The same bytes in the output folder; gives its name as a loader would take it."""
    source = context.folders.locate(file)
    slot = next_slot(context, filename_prefix)
    _, name = split_annotation(file)
    saved = slot.saved(f"{slot.stem}_{slot.counter:05}_{PurePath(name).suffix}")
    try:
        shutil.copyfile(source, slot.folder / saved["filename"])
    except OSError as error:
        raise NodeFailed(f"{file!r} can't be copied: {error.strerror}") from error
    path = PurePath(saved["subfolder"], saved["filename"]).as_posix()
    return Result((f"{path} [output]",), shown(saved))


def shown(saved: Saved) -> dict[str, Any]:
    """Under the key that ComfyUI's own savers use for such a file."""
    match content_kind(saved["filename"]):
        case "image":
            return {"images": [saved]}
        case "video":
            return {"images": [saved], "animated": (True,)}
        case "audio":
            return {"audio": [saved]}
        case _:
            return {"files": [saved]}


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
        optional={"value": matching("value", "*")},
        outputs=(MATCH,),
        output_names=("value",),
        output_matches=("value",),
        output_node=True,
    )
)
def fail_on_demand(
    context: Context, fail: bool, message: str, after_ms: int, value: Any = None
) -> Result:
    context.pause(after_ms / 1000)
    if fail:
        raise NodeFailed(message)
    return Result((value,))


NODES = (take_steps, pass_file, fail_on_demand)
