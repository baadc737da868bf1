"""Files in and out: opened without being read whole, written whole or not at all."""

import difflib
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from comfyfleet.graphs.documents import read_document
from comfyfleet.kernel.errors import FleetError, InvalidInput, LimitExceeded
from comfyfleet.workflow.media import Opened, open_document

STANDARD_STREAM = "-"
FILE_HELP = "Workflow or prompt JSON, or a picture, video or sound that ComfyUI saved; - is stdin."
# Pipes can't be mapped into memory, so what comes through one is kept whole.
PIPE_BYTES_MAX = 512 * 1024 * 1024
TEXT_BYTES_MAX = 4 * 1024 * 1024  # of a graph, a pipeline or a list of workflows
NAMES_LOOKED_AT_MAX = 1_000
NAMES_SHOWN_MAX = 3
OPENABLE_SUFFIXES = (
    ".json", ".png", ".webp", ".jpg", ".jpeg", ".mp4", ".webm", ".mov", ".mkv", ".flac", ".mp3",
)  # fmt: skip


def open_file(name: str, stdin: BinaryIO) -> Opened:
    """The workflow or prompt in a file, or in what comes through stdin."""
    if name == STANDARD_STREAM:
        with _named("stdin"):
            return _opened(stdin)
    path = Path(name)
    with (
        explained(path, or_else="Use - to read from stdin."),
        path.open("rb") as file,
        _named(name),
    ):
        return _opened(file)


def read_file(path: Path, *, bytes_max: int) -> bytes:
    with explained(path), path.open("rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise LimitExceeded(f"{path} has more than {bytes_max:,} bytes")
    return data


def read_text(path: Path, *, bytes_max: int = TEXT_BYTES_MAX) -> str:
    try:
        return read_file(path, bytes_max=bytes_max).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not UTF-8 text, and so neither YAML nor JSON") from None


def read_structure(path: Path) -> Any:
    """What a YAML or JSON file holds."""
    text = read_text(path)
    with _named(str(path)):
        return read_document(text)


def need_file(path: Path) -> Path:
    """A file that can be read, or an error that says why it can't."""
    with explained(path), path.open("rb"):
        return path


def write_file(path: Path, data: bytes) -> None:
    """A reader of that file sees the old content or the new one, never half of either."""
    with explained(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a device: there is nothing to replace
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_bytes(data)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _opened(file: BinaryIO) -> Opened:
    if not _is_mappable(file):
        data = file.read(PIPE_BYTES_MAX + 1)
        if len(data) > PIPE_BYTES_MAX:
            raise LimitExceeded(f"more than {PIPE_BYTES_MAX:,} bytes came through the pipe")
        return open_document(data)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data_in_file:
        return open_document(data_in_file)


def _is_mappable(file: BinaryIO) -> bool:
    """An empty file can't be mapped, and a stream that some program stands for has no number."""
    try:
        status = os.fstat(file.fileno())
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors about the content of a file say which file."""
    try:
        yield
    except FleetError as error:
        raise type(error)(f"{name}: {error.message}", **error.details) from error


@contextmanager
def explained(path: Path, *, or_else: str | None = None) -> Iterator[None]:
    """Errors of the system about a path, in words. `or_else` is the hint where nothing is similar."""
    try:
        yield
    except FileNotFoundError as error:
        raise _not_found(path, or_else) from error
    except IsADirectoryError as error:
        raise InvalidInput(f"{path} is a directory", hint=_files_inside(path)) from error
    except PermissionError as error:
        raise InvalidInput(
            f"{path}: you may not access it",
            hint=f"Look at its permissions: ls -l {path}",
        ) from error
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from error


def _not_found(path: Path, or_else: str | None) -> InvalidInput:
    if not path.parent.is_dir():
        return InvalidInput(
            f"there is no directory {path.parent}", hint=f"Create it with: mkdir -p {path.parent}"
        )
    close = difflib.get_close_matches(path.name, _names_in(path.parent), n=NAMES_SHOWN_MAX)
    similar = ", ".join(str(path.with_name(name)) for name in close)
    hint = f"Did you mean: {similar}?" if close else or_else
    return InvalidInput(f"there is no file {path}", **({"hint": hint} if hint else {}))


def _files_inside(path: Path) -> str:
    names = [name for name in _names_in(path) if name.lower().endswith(OPENABLE_SUFFIXES)]
    if not names:
        return "Name a file that ComfyUI saved: a workflow's JSON, a picture, a video."
    shown = ", ".join(str(path / name) for name in names[:NAMES_SHOWN_MAX])
    return f"Name a file in it, such as {shown}"


def _names_in(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in islice(entries, NAMES_LOOKED_AT_MAX))
    except OSError:
        return []
