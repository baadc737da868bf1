"""Objects as files in a folder. Blocking; LocalStore calls it from threads.

objects/KEY   the bytes, as they came
types/KEY     a note of the content type, with the stamp of the file that it belongs to; none where the
              key's ending tells the type
incoming/     what is being received; never read, never listed
"""

import contextlib
import errno
import json
import mimetypes
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import BinaryIO

from comfyfleet.kernel.errors import InvalidInput, NotFound, Unavailable
from comfyfleet.storage.keys import checked_key

# An upload that has written nothing for so long belongs to a process that is no more.
INCOMING_SECONDS_MAX = 3600
# A folder may go away between its making and its use, when the last object in it is deleted.
PLACING_TRIES_MAX = 10
UNKNOWN_TYPE = "application/octet-stream"
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Not what this machine knows of endings: another one may read the folder later.
_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".mov": "video/quicktime",
    ".mp3": "audio/mpeg",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".json": "application/json",
}


@dataclass(frozen=True, slots=True)
class Opened:
    """One version of an object: it stays readable, whatever happens to the key."""

    file: BinaryIO
    size: int
    modified_ns: int
    content_type: str


class Folder:
    def __init__(self, root: Path) -> None:
        # Paths are compared with their real ones, so that a link inside can't lead out.
        self.root = Path(os.path.realpath(root))
        self._objects = self.root / "objects"
        self._types = self.root / "types"
        self._incoming = self.root / "incoming"
        # Keeps a file and its type together when one key is written twice at once.
        self._placing = threading.Lock()

    def prepare(self, *, now: float) -> None:
        with _telling(self.root):
            for each in (self._objects, self._types, self._incoming):
                each.mkdir(parents=True, exist_ok=True)
            for left in self._incoming.iterdir():
                if now - left.stat().st_mtime > INCOMING_SECONDS_MAX:
                    left.unlink(missing_ok=True)

    def open(self, key: str) -> Opened:
        path = self._place(self._objects, key)
        with _telling(self.root):
            try:
                file = path.open("rb")
            except _NO_FILE:
                raise NotFound(f"there is no object {key!r}", key=key) from None
        found = os.fstat(file.fileno())
        return Opened(file, found.st_size, found.st_mtime_ns, self._type_of(key, found))

    @contextlib.contextmanager
    def receive(self) -> Iterator[BinaryIO]:
        """A file that is gone afterwards, unless it was placed."""
        path = self._incoming / uuid.uuid4().hex
        with _telling(self.root):
            file = path.open("xb")
        try:
            with file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def write(self, file: BinaryIO, chunk: bytes | bytearray) -> None:
        with _telling(self.root):
            file.write(chunk)

    def put(self, key: str, content: bytes | bytearray, content_type: str) -> None:
        """An object that is at hand as a whole."""
        with self.receive() as file:
            self.write(file, content)
            self.place(file, key, content_type)

    def place(self, file: BinaryIO, key: str, content_type: str) -> None:
        """Under its key, on disk for good, in place of what was there.

        Synced are the bytes, the entry of each folder that is new, and the file's own entry.
        """
        with _telling(self.root):
            file.flush()
            os.fsync(file.fileno())
        self._place_synced(file.name, key, content_type)

    def _place_synced(self, draft: str, key: str, content_type: str) -> None:
        path, note = self._place(self._objects, key), self._place(self._types, key)
        with _telling(self.root):
            _make_folders(path.parent)
            if _TYPES.get(path.suffix) == content_type:
                with self._placing:
                    # One of an earlier object: a copy has the stamp of what it was made from.
                    with contextlib.suppress(*_NO_FILE):
                        note.unlink()
                    self._move(draft, path)
            else:
                self._place_noted(draft, path, note, content_type)
            _sync(path.parent)

    def _place_noted(self, file: str, path: Path, note: Path, content_type: str) -> None:
        stamp = _stamp(os.stat(file))
        with self.receive() as draft:
            draft.write(json.dumps({"type": content_type, "stamp": stamp}).encode())
            draft.flush()
            with self._placing:
                # If we die in between, the stamp doesn't fit and the type is not believed.
                self._move(draft.name, note)
                self._move(file, path)

    def copy(self, key: str, target: str, content_type: str, size: int | None = None) -> bool:
        """A second name for the same bytes: who writes the key anew replaces its file, not the bytes.

        They were synced when they were placed. False: it has another size than the one given.
        """
        draft = f"{self._incoming}{os.sep}{uuid.uuid4().hex}"
        self._link(key, draft)
        try:
            if size not in {None, os.stat(draft).st_size}:
                return False
            self._place_synced(draft, target, content_type)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
        return True

    def _link(self, key: str, draft: str) -> None:
        source = self._place(self._objects, key)
        with _telling(self.root), contextlib.suppress(*_NO_FILE):
            try:
                os.link(source, draft)
            except (FileNotFoundError, NotADirectoryError):
                raise
            except OSError:  # a file system without hard links, or a folder
                shutil.copyfile(source, draft)
                _sync(draft)
            return
        raise NotFound(f"there is no object {key!r}", key=key)

    def delete(self, *keys: str) -> None:
        with _telling(self.root), self._placing:
            for key, root in product(keys, (self._objects, self._types)):
                path = self._place(root, key)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
                    _remove_empty(path.parent, root)

    def listed(self, prefix: str) -> Iterator[tuple[str, float]]:
        """Keys that begin so, each with when it was written. What goes meanwhile may be left out.

        A generator, and nothing of a folder is held but what the system reads at once: there may be
        millions of objects. Only the deepest folder that the prefix names is walked.
        """
        top = self._objects
        if "/" in prefix:
            top = self._place(self._objects, prefix.rpartition("/")[0])
        start = len(str(self._objects)) + 1
        with _telling(self.root):
            for path, stamp in _walked(str(top)):
                key = Path(path[start:]).as_posix()
                if key.startswith(prefix):
                    yield key, stamp

    def _place(self, root: Path, key: str) -> Path:
        """Its path, if no part of it is a link; the folder's own path has none."""
        path = Path(root, checked_key(key))
        each = str(root)
        for part in path.parts[len(root.parts) :]:
            each = f"{each}{os.sep}{part}"
            try:
                if stat.S_ISLNK(os.lstat(each).st_mode):
                    raise InvalidInput(f"{key!r} leads through a link, out of the folder", key=key)
            except (FileNotFoundError, NotADirectoryError):
                break
        return path

    def _move(self, file: str, path: Path) -> None:
        for _ in range(PLACING_TRIES_MAX):
            try:
                os.replace(file, path)
            except FileNotFoundError:
                with contextlib.suppress(*_NO_FILE, FileExistsError):
                    path.parent.mkdir(parents=True, exist_ok=True)
                continue
            except (NotADirectoryError, FileExistsError, IsADirectoryError):
                break
            return
        key = path.relative_to(self.root).as_posix()
        raise InvalidInput(f"{key}: a folder can't hold a key and keys below it", key=key)

    def _type_of(self, key: str, found: os.stat_result) -> str:
        try:
            note = json.loads((self._types / key).read_bytes())
            if note["stamp"] == _stamp(found):
                return str(note["type"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        # By its ending, as we put it; or put there by hand, or copied from elsewhere.
        known = _TYPES.get(os.path.splitext(key)[1])
        return known or mimetypes.guess_type(key)[0] or UNKNOWN_TYPE


def _walked(folder: str) -> Iterator[tuple[str, float]]:
    """Files, each with when it was written. A link is none: it may lead out of the folder."""
    with contextlib.suppress(*_NO_FILE), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walked(entry.path)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(*_NO_FILE):
                    yield entry.path, entry.stat(follow_symlinks=False).st_mtime


def _stamp(found: os.stat_result) -> list[int]:
    return [found.st_mtime_ns, found.st_size]


def _make_folders(folder: Path) -> None:
    """On disk for good: a file that can't be reached after a power cut is lost, too.

    Before anybody else has to wait. What stands in the way is told when the file is moved.
    """
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
        folder.mkdir()
        _sync(folder.parent)


def _remove_empty(folder: Path, root: Path) -> None:
    with contextlib.suppress(OSError):
        while folder != root:
            folder.rmdir()
            folder = folder.parent


def _sync(path: Path | str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _telling(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise Unavailable(f"the disk of {root} is full", path=str(root)) from error
        raise Unavailable(
            f"{root} can't be used: {error.strerror or error}", path=str(root)
        ) from error
