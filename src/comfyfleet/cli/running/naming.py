"""Names for the files that came out: readable, safe, and never one that is taken."""

import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from comfyfleet.kernel.errors import InvalidInput, LimitExceeded

STEM_CHARACTERS_MAX = 120
SUFFIX_CHARACTERS_MAX = 16
SAME_NAMES_MAX = 100_000
# What ComfyUI appends to be unique in its own folder: cat_00012_.png, clip_00003-audio.mp4.
_COUNTER = re.compile(r"_\d{5}_?(?=$|-)")
# Names that tell nothing: previews of ComfyUI, and the hashes under which a cloud keeps files.
_TELLS_NOTHING = re.compile(r"ComfyUI_temp_[a-z]{5}|[0-9a-f]{32,}")
_UNSAFE = re.compile(r'[\x00-\x1f\x7f<>:"|?*]+')


def readable_name(filename: str, *, node_name: str | None = None) -> str:
    """`cat_00012_.png` is `cat.png`; whatever a server says, the name stays inside its folder."""
    base = filename.replace("\\", "/").rpartition("/")[2]
    stem, dot, suffix = base.rpartition(".")
    if not stem:
        stem, dot, suffix = base, "", ""
    stem = _COUNTER.sub("", stem)
    if _TELLS_NOTHING.fullmatch(stem):
        stem = (node_name or "output").replace("/", "-").replace("\\", "-")
    stem = _UNSAFE.sub("_", stem).strip(" .")[:STEM_CHARACTERS_MAX] or "output"
    return stem + dot + _UNSAFE.sub("_", suffix)[:SUFFIX_CHARACTERS_MAX]


def numbered(name: str) -> Iterator[str]:
    """`cat.png`, `cat-2.png`, `cat-3.png` …"""
    yield name
    path = Path(name)
    for number in count(2):
        yield f"{path.stem}-{number}{path.suffix}"


def check_folder(folder: Path) -> None:
    """Known before the run and not after it: whether results can be saved there. Makes nothing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise InvalidInput(f"{existing} is no folder, so results can't be saved into {folder}")
    if not os.access(existing, os.W_OK):
        raise InvalidInput(f"{existing}: you may not write there", hint="Name another: -o DIR")


def reserve(folder: Path, name: str) -> Path:
    """A new empty file in that folder: once made, no other run can take its name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for candidate, _ in zip(numbered(name), range(SAME_NAMES_MAX), strict=False):
            path = folder / candidate
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror or error}") from error
    raise LimitExceeded(f"{folder} has {SAME_NAMES_MAX:,} files named like {name}")
