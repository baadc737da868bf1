"""Names for the files that came out: readable, safe, and never one that is taken."""

import filecmp
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice, takewhile
from pathlib import Path

from comfyfleet.kernel.errors import InvalidInput, LimitExceeded

STEM_CHARACTERS_MAX = 120
SUFFIX_CHARACTERS_MAX = 16
FOLDERS_MAX = 16
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


def readable_folder(subfolder: str) -> Path:
    """`shots\\day 1` is `shots/day 1`; whatever a server says, it stays inside."""
    parts = (_UNSAFE.sub("_", part).strip(" .") for part in re.split(r"[\\/]", subfolder))
    kept = [part[:STEM_CHARACTERS_MAX] for part in parts if part]
    return Path(*kept[:FOLDERS_MAX])


def numbered(name: str) -> Iterator[str]:
    """`cat.png`, `cat-2.png`, `cat-3.png` …"""
    yield name
    path = Path(name)
    for number in count(2):
        yield f"{path.stem}-{number}{path.suffix}"


def check_folder(folder: Path) -> None:
    """Known before the run and not after it: whether results can be saved there. Leaves nothing."""
    lineage = (folder, *folder.absolute().parents)
    missing = list(takewhile(lambda path: not path.exists(), lineage))
    existing = lineage[len(missing)]
    if not existing.is_dir():
        raise InvalidInput(f"{existing} is no folder, so results can't be saved into {folder}")
    try:
        _try_to_write(folder)
    except OSError as error:
        raise InvalidInput(
            f"results can't be saved into {folder}: {error.strerror or error}",
            hint="Name another: -o DIR",
        ) from error
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _try_to_write(folder: Path) -> None:
    """Only trying tells: a folder may be read-only, full, or one in which nothing can be made."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


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


def equal_before(path: Path, name: str) -> Path | None:
    """A file of that name with the same content, numbered lower."""
    for candidate in islice(numbered(name), SAME_NAMES_MAX):
        other = path.with_name(candidate)
        if other == path:
            return None
        if other.is_file() and filecmp.cmp(path, other, shallow=False):
            return other
    return None
