"""Names, counters and descriptions of saved files, in the form that clients of ComfyUI rely on."""

import json
import mimetypes
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from PIL.PngImagePlugin import PngInfo

from comfyfleet.engine.image_math import Image, to_bytes
from comfyfleet.engine.node import Context, FolderName, Folders, path_inside
from comfyfleet.errors import InvalidInput, NodeFailed

SAVED_COMPRESSION = 4
PREVIEW_COMPRESSION = 1
PREVIEW_LETTERS = "abcdefghijklmnopqrstupvxyz"
PREVIEW_LETTERS_COUNT = 5

Saved = dict[str, str]


@dataclass(frozen=True, slots=True)
class FileSlot:
    """The name and folder for the next file of a prefix."""

    folder: Path
    subfolder: str
    stem: str
    counter: int
    type: FolderName

    def name(self, extension: str, batch_number: int = 0) -> str:
        stem = self.stem.replace("%batch_num%", str(batch_number))
        return f"{stem}_{self.counter + batch_number:05}_{extension}"

    def saved(self, name: str) -> Saved:
        """Returns the file's entry in the history."""
        return {"filename": name, "subfolder": self.subfolder, "type": self.type}


def next_slot(
    context: Context, prefix: str, width: int = 0, height: int = 0, type: FolderName = "output"
) -> FileSlot:
    """Returns the slot for the next file with `prefix`, and creates its folder."""
    base = context.folders.of(type)
    prefix = fill_tokens(prefix, width=width, height=height, now=context.now())
    subfolder, stem = os.path.split(os.path.normpath(prefix))
    try:
        folder = path_inside(base, subfolder)
    except InvalidInput as error:
        raise _outside(base, subfolder) from error
    folder.mkdir(parents=True, exist_ok=True)
    length = len(os.path.basename(prefix))
    counter = next_counter((path.name for path in folder.iterdir()), stem, length)
    return FileSlot(folder, subfolder, stem, counter, type)


def _outside(base: Path, subfolder: str) -> NodeFailed:
    """Returns the error with ComfyUI's original message, which clients may recognize."""
    folder, root = os.path.abspath(base / subfolder), os.path.abspath(base)
    return NodeFailed(
        "**** ERROR: Saving image outside the output folder is not allowed."
        f"\n full_output_folder: {folder}"
        f"\n         output_dir: {root}"
        f"\n         commonpath: {os.path.commonpath((folder, root))}"
    )


def fill_tokens(prefix: str, *, width: int, height: int, now: datetime) -> str:
    """Fills in tokens such as `%width%` and `%year%`. Unknown tokens are preserved."""
    tokens = {
        "width": str(width),
        "height": str(height),
        "year": str(now.year),
        "month": f"{now.month:02}",
        "day": f"{now.day:02}",
        "hour": f"{now.hour:02}",
        "minute": f"{now.minute:02}",
        "second": f"{now.second:02}",
    }
    for token, value in tokens.items():
        prefix = prefix.replace(f"%{token}%", value)
    return prefix


def next_counter(names: Iterable[str], stem: str, length: int) -> int:
    """Returns one more than the highest number after `stem_`, regardless of the extension.

    `length` is the length of the given prefix. If it differs from the length of the stem (for a
    prefix that ends with a slash), no file counts and existing files are overwritten, as in
    ComfyUI.
    """
    counted = [
        _number(name[length + 1 :])
        for name in names
        if name[:length] == stem and name[length : length + 1] == "_"
    ]
    return max(counted, default=0) + 1


def _number(rest: str) -> int:
    try:
        return int(rest.split(".")[0].split("_")[0])
    except ValueError:
        return 0


def metadata(context: Context) -> dict[str, str]:
    """Returns the metadata for saved files, with each value as JSON."""
    extra = context.extra_pnginfo or {}
    values = {"prompt": context.prompt, **extra}
    return {key: json.dumps(value) for key, value in values.items()}


def save_images(context: Context, images: Image, prefix: str) -> list[Saved]:
    """Saves one PNG per image of the batch, with the prompt and workflow as metadata."""
    info = png_text(metadata(context))
    return _save_pngs(context, images, prefix, "output", SAVED_COMPRESSION, info)


def save_preview(context: Context, images: Image) -> list[Saved]:
    """Saves one temporary PNG per image, with random letters as the name and without metadata."""
    return _save_temporary(context, images, random_letters(context), None)


def save_kept_preview(context: Context, images: Image) -> list[Saved]:
    """Saves previews with metadata, under random letters that the node reuses in all runs."""
    letters = context.memory.setdefault("letters", random_letters(context))
    return _save_temporary(context, images, letters, png_text(metadata(context)))


def random_letters(context: Context) -> str:
    return "".join(context.random.choices(PREVIEW_LETTERS, k=PREVIEW_LETTERS_COUNT))


def _save_temporary(
    context: Context, images: Image, letters: str, info: PngInfo | None
) -> list[Saved]:
    prefix = f"ComfyUI_temp_{letters}"
    return _save_pngs(context, images, prefix, "temp", PREVIEW_COMPRESSION, info)


def _save_pngs(
    context: Context,
    images: Image,
    prefix: str,
    type: FolderName,
    compress_level: int,
    info: PngInfo | None,
) -> list[Saved]:
    height, width = require_pictures(images)
    slot = next_slot(context, prefix, width, height, type)
    saved = []
    for number, picture in enumerate(to_pillow(images)):
        name = slot.name(".png", number)
        picture.save(slot.folder / name, pnginfo=info, compress_level=compress_level)
        saved.append(slot.saved(name))
    return saved


def require_pictures(images: Image) -> tuple[int, int]:
    """Returns the height and width. Raises NodeFailed if there are no images to save."""
    if isinstance(images, np.ndarray) and (images.ndim != 4 or 0 in images.shape):
        raise NodeFailed(f"there are no images to save; the shape is {images.shape!r}")
    # Validation allows strings and numbers. Like in ComfyUI, clients get Python's error for them.
    return images[0].shape[0], images[0].shape[1]


def to_pillow(images: Image) -> list[PIL.Image.Image]:
    return [PIL.Image.fromarray(pixels) for pixels in to_bytes(images)]


def png_text(texts: dict[str, str]) -> PngInfo:
    info = PngInfo()
    for key, value in texts.items():
        info.add_text(key, value)
    return info


def files_of(*kinds: str) -> Callable[[Folders], list[str]]:
    """Returns a function that lists the input files with one of the content types, or all files if
    `kinds` is empty."""

    def find(folders: Folders) -> list[str]:
        if not folders.input.is_dir():
            return []
        names = sorted(path.name for path in folders.input.iterdir() if path.is_file())
        return [name for name in names if not kinds or content_kind(name) in kinds]

    return find


def content_kind(name: str) -> str:
    """Returns the content type that the extension implies: `image`, `video`, `audio` …"""
    # On some machines, the MIME types don't include WebP and Matroska.
    extension = name.rsplit(".", 1)[-1].lower()
    known = {"webp": "image", "mkv": "video", "webm": "video"}
    guessed, _ = mimetypes.guess_type(name, strict=False)
    return known.get(extension) or (guessed or "").split("/")[0]


def missing_file(what: str, name: str) -> Callable[[Folders, Any], str | None]:
    """Returns a validator that checks whether the input `name` is the name of an existing file."""

    def validate(folders: Folders, inputs: Any) -> str | None:
        value = inputs[name]
        return None if folders.holds(value) else f"Invalid {what} file: {value}"

    return validate
