"""Where uploaded files go, and under which name."""

import os
from pathlib import Path
from typing import BinaryIO, Protocol

from comfyfleet.engine.trouble import Trouble
from comfyfleet.kernel.errors import InvalidInput

COPY_BYTES = 1024 * 1024


class Save(Protocol):
    """Writes an upload to its place."""

    def __call__(self, upload: BinaryIO, path: Path) -> None: ...


class OutsideFolder(InvalidInput):
    code = "outside_folder"


def place(folder: Path, subfolder: str, name: str) -> Path:
    """The path that a client's words lead to, refused when it leaves the folder."""
    base = os.path.abspath(folder)
    path = os.path.abspath(os.path.join(base, os.path.normpath(subfolder), name))
    if not Path(path).is_relative_to(base):
        raise OutsideFolder(f"{name!r} lies outside its folder", name=name)
    return Path(path)


def store(
    upload: BinaryIO, folder: Path, *, subfolder: str, name: str, overwrite: bool, save: Save
) -> str:
    """Save under the name, or one with a number when other bytes have it. Returns the name."""
    try:
        path = place(folder, subfolder, name)
        (folder / os.path.normpath(subfolder)).mkdir(parents=True, exist_ok=True)
        name, path, known = _free_name(upload, path, name, overwrite=overwrite)
        if not known:
            save(upload, path)
    except (OSError, ValueError) as error:
        raise Trouble(f"{name!r} can't be saved: {error}") from error
    return name


def save_bytes(upload: BinaryIO, path: Path) -> None:
    with path.open("wb") as file:
        while chunk := upload.read(COPY_BYTES):
            file.write(chunk)


def _free_name(
    upload: BinaryIO, path: Path, name: str, *, overwrite: bool
) -> tuple[str, Path, bool]:
    """A name that is free, or taken by the very same bytes (then nothing is to be written)."""
    if overwrite:
        return name, path, False
    stem, extension = os.path.splitext(name)
    number, candidate = 0, path
    while candidate.exists():
        if _same_bytes(upload, candidate):
            return _numbered(stem, number, extension), candidate, True
        number += 1
        candidate = path.parent / os.path.basename(_numbered(stem, number, extension))
    return _numbered(stem, number, extension), candidate, False


def _numbered(stem: str, number: int, extension: str) -> str:
    return f"{stem} ({number}){extension}" if number else f"{stem}{extension}"


def _same_bytes(upload: BinaryIO, path: Path) -> bool:
    with path.open("rb") as file:
        upload.seek(0)
        while chunk := upload.read(COPY_BYTES):
            if file.read(len(chunk)) != chunk:
                break
        else:
            same = not file.read(1)
            upload.seek(0)
            return same
    upload.seek(0)
    return False
