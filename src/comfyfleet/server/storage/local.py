"""A folder as an object store. Its signed URLs point to the control plane, which serves them."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import math
import mimetypes
import os
import re
import shutil
import stat
import sys
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from itertools import islice, product
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlencode

from comfyfleet.clock import Clock
from comfyfleet.errors import (
    Forbidden,
    InvalidInput,
    LimitExceeded,
    NotFound,
    StoreFull,
    TooManyCalls,
    Unavailable,
    is_full_disk,
)
from comfyfleet.server.storage.model import (
    CHUNK_BYTES,
    MEMORY_BYTES_MAX,
    OBJECT_BYTES_MAX,
    ListedObject,
    ObjectFacts,
    PresignedUrl,
    checked_content_type,
    checked_key,
    checked_seconds,
    checked_size,
)
from comfyfleet.server.storage.outage import PROBE_BYTES, StoreOutage
from comfyfleet.transport.files import open_file, open_with

# An upload that has written nothing for this many seconds belongs to a process that has ended.
INCOMING_SECONDS_MAX = 3600
# A folder may disappear between its creation and its use, when its last object is deleted.
PLACING_TRIES_MAX = 10
UNKNOWN_TYPE = "application/octet-stream"
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# The machine's own table of suffixes is not used, because another machine may read the folder
# later.
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
class OpenObject:
    """An open version of an object. It remains readable if the key is overwritten or deleted."""

    file: BinaryIO
    size: int
    modified_ns: int
    content_type: str


class ObjectFolder:
    def __init__(self, root: Path) -> None:
        # Paths are compared with their real paths, so that a link inside the folder can't lead out
        # of it.
        self.root = Path(os.path.realpath(root))
        self._objects = self.root / "objects"
        self._types = self.root / "types"
        self._incoming = self.root / "incoming"
        # Keeps a file and its type consistent when a key is written twice concurrently.
        self._placing = threading.Lock()

        self.outage = StoreOutage(f"the object store {self.root}")

    @contextlib.contextmanager
    def _watched(self, *, is_write: bool = True) -> Iterator[None]:
        """Converts operating system errors to Unavailable."""
        try:
            yield
        except OSError as error:
            away = _as_unavailable(self.root, error)
            self.outage.note_failure(away, is_write=is_write)
            raise away from error

    def prepare(self, *, now: float) -> None:
        with self._watched():
            for folder in (self._objects, self._types, self._incoming):
                folder.mkdir(parents=True, exist_ok=True)
            for draft in self._incoming.iterdir():
                if now - draft.stat().st_mtime > INCOMING_SECONDS_MAX:
                    draft.unlink(missing_ok=True)

    def open(self, key: str) -> OpenObject:
        path = self._path_of(self._objects, key)
        with self._watched(is_write=False):
            try:
                file = path.open("rb")
            except _NO_FILE:
                raise NotFound(f"object {key!r} was not found", key=key) from None
        status = os.fstat(file.fileno())
        return OpenObject(file, status.st_size, status.st_mtime_ns, self._type_of(key, status))

    @contextlib.contextmanager
    def receive(self) -> Iterator[BinaryIO]:
        """Yields a temporary file, which is deleted afterwards unless it was placed."""
        path = self._incoming / uuid.uuid4().hex
        with self._watched():
            file = path.open("xb")
        try:
            yield file
            with self._watched():
                file.close()  # writes the rest, which fails if the disk is full
        finally:
            with contextlib.suppress(OSError):
                file.close()
            path.unlink(missing_ok=True)

    def write(self, file: BinaryIO, chunk: bytes | bytearray) -> None:
        with self._watched():
            file.write(chunk)

    def put(self, key: str, content: bytes | bytearray, content_type: str) -> None:
        """Stores an object that is completely in memory."""
        with self.receive() as file:
            self.write(file, content)
            self.place(file, key, content_type)

    def place(self, file: BinaryIO, key: str, content_type: str) -> None:
        """Moves a file to its key durably, replacing the existing object.

        Syncs the bytes, the entry of each new folder, and the file's own entry."""
        with self._watched():
            file.flush()
            changed = _make_folders(self._path_of(self._objects, key).parent)
            syncing = [_syncing.submit(_sync_folder, folder) for folder in changed]
            os.fsync(file.fileno())
            for sync in syncing:
                sync.result()
        self._place_synced(file.name, key, content_type)

    def _place_synced(self, draft: str, key: str, content_type: str) -> None:
        path, note = self._path_of(self._objects, key), self._path_of(self._types, key)
        with self._watched():
            for folder in _make_folders(path.parent):
                _sync_folder(folder)
            if _TYPES.get(path.suffix) == content_type:
                with self._placing:
                    # Delete the note of an earlier object, because a copy has the same stamp as its
                    # source.
                    with contextlib.suppress(*_NO_FILE):
                        note.unlink()
                    self._move(draft, path)
            else:
                self._place_noted(draft, path, note, content_type)
            _sync(path.parent)
        self.outage.note_success(has_written=True)

    def _place_noted(self, file: str, path: Path, note: Path, content_type: str) -> None:
        stamp = _stamp(os.stat(file))
        with self.receive() as draft:
            with self._watched():
                draft.write(json.dumps({"type": content_type, "stamp": stamp}).encode())
                draft.flush()
            with self._placing:
                # After a crash in between, the stamp doesn't match, and the type is ignored.
                self._move(draft.name, note)
                self._move(file, path)

    def copy(self, key: str, target: str, content_type: str, size: int | None = None) -> bool:
        """Adds a hard link under another key. Writing either key later replaces its file, and
        doesn't change the shared bytes.

        The bytes were synced when they were placed. Returns False if the size differs from the
        given one."""
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

    def join(self, keys: Sequence[str], target: str, content_type: str) -> None:
        """Concatenates objects into a new one."""
        with self.receive() as file:
            for key in keys:
                opened = self.open(key)
                with opened.file, self._watched():
                    shutil.copyfileobj(opened.file, file, CHUNK_BYTES)
            self.place(file, target, content_type)

    def _link(self, key: str, draft: str) -> None:
        source = self._path_of(self._objects, key)
        with self._watched(), contextlib.suppress(*_NO_FILE):
            try:
                os.link(source, draft)
            except (FileNotFoundError, NotADirectoryError):
                raise
            except OSError:  # a file system without hard links, or a folder
                shutil.copyfile(source, draft)
                _sync(draft)
            return
        raise NotFound(f"object {key!r} was not found", key=key)

    def delete(self, *keys: str) -> None:
        with self._watched(), self._placing:
            for key, root in product(keys, (self._objects, self._types)):
                path = self._path_of(root, key)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
                    _remove_empty(path.parent, root)

    def listed(self, prefix: str) -> Iterator[tuple[str, float]]:
        """Yields the keys with the prefix, each with the time when it was written. Objects that are
        deleted in the meantime may be left out.

        It is a generator that holds only one directory read at a time, because there may be
        millions of objects. It walks only the deepest folder that the prefix names."""
        top = self._objects
        if "/" in prefix:
            top = self._path_of(self._objects, prefix.rpartition("/")[0])
        start = len(str(self._objects)) + 1
        with self._watched(is_write=False):
            for path, stamp in _walk(str(top)):
                key = Path(path[start:]).as_posix()
                if key.startswith(prefix):
                    yield key, stamp

    def _path_of(self, root: Path, key: str) -> Path:
        """Returns the key's path. Refuses a path that contains a link. The folder's own path
        contains none."""
        path = Path(root, checked_key(key))
        prefix = str(root)
        for part in path.parts[len(root.parts) :]:
            prefix = f"{prefix}{os.sep}{part}"
            try:
                if stat.S_ISLNK(os.lstat(prefix).st_mode):
                    raise InvalidInput(f"{key!r} leads out of the folder through a link", key=key)
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
        raise InvalidInput(
            f"{key}: a key and keys below it can't exist in the same folder", key=key
        )

    def _type_of(self, key: str, status: os.stat_result) -> str:
        try:
            note = json.loads((self._types / key).read_bytes())
            if note["stamp"] == _stamp(status):
                return str(note["type"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        # Use the suffix instead. The file may have been copied there manually.
        known = _TYPES.get(os.path.splitext(key)[1])
        return known or mimetypes.guess_type(key)[0] or UNKNOWN_TYPE


def _as_unavailable(root: Path, error: OSError) -> Unavailable:
    if is_full_disk(error):
        return StoreFull(f"the disk of {root} is full", path=str(root))
    return Unavailable(f"{root} is unavailable: {error.strerror or error}", path=str(root))


def _walk(folder: str) -> Iterator[tuple[str, float]]:
    """Yields files, each with the time when it was written. Skips links, because they may lead out
    of the folder."""
    with contextlib.suppress(*_NO_FILE), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(*_NO_FILE):
                    yield entry.path, entry.stat(follow_symlinks=False).st_mtime


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_mtime_ns, status.st_size]


def _make_folders(folder: Path) -> list[Path]:
    """Creates folders. Returns the parent folders of the new ones. They must be synced, because
    files in the new folders could otherwise be lost after a power failure.

    This is done before the lock is taken. An obstacle is reported when the file is moved."""
    if folder.is_dir():
        return []
    changed = _make_folders(folder.parent)
    with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
        folder.mkdir()
        changed.append(folder.parent)
    return changed


# Concurrent syncs take about as long as a single one.
_syncing = ThreadPoolExecutor(max_workers=8, thread_name_prefix="comfyfleet-store")


def _sync_folder(folder: Path) -> None:
    """Syncs a folder, which may have been deleted with its last object."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _sync(folder)


def _remove_empty(folder: Path, root: Path) -> None:
    with contextlib.suppress(OSError):
        while folder != root:
            folder.rmdir()
            folder = folder.parent


def _sync(path: Path | str) -> None:
    if sys.platform == "win32":
        return  # Windows can only sync files that are open for writing, and no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The path under the public URL where the control plane serves a local store (http/objects.py).
OBJECTS_PATH = "/api/objects"
SECRET_BYTES_MIN = 32
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class UrlGrant:
    """The permission for one request for one object. All parts of the URL except the host are
    signed, so that the host can have aliases."""

    method: str
    key: str
    expires: int  # seconds since 1970
    content_type: str = ""  # for a PUT
    size: int | None = None  # for a PUT
    filename: str = ""  # for a GET, the name under which it is saved


class UrlSigner:
    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"the secret must have at least {SECRET_BYTES_MIN} bytes")
        self._secret = secret

    def url(self, public_url: str, grant: UrlGrant, *, path: str = OBJECTS_PATH) -> str:
        query = {"expires": str(grant.expires)}
        if grant.content_type:
            query["type"] = grant.content_type
        if grant.size is not None:
            query["size"] = str(grant.size)
        if grant.filename:
            query["filename"] = grant.filename
        query["signature"] = self.signature(grant)
        base = public_url.rstrip("/") + path
        return f"{base}/{quote(grant.key)}?{urlencode(query, quote_via=quote)}"

    def signature(self, grant: UrlGrant) -> str:
        # JSON separates the fields, so that no two grants have the same text.
        text = json.dumps(["comfyfleet-object-1", *astuple(grant)])
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def granted(self, method: str, key: str, query: Mapping[str, str], *, now: float) -> UrlGrant:
        """Returns the grant in a URL. Raises Forbidden unless its signature is correct and still
        valid."""
        grant = UrlGrant(
            method,
            key,
            _parse_number(query.get("expires")) or 0,
            query.get("type", ""),
            _parse_number(query.get("size")),
            query.get("filename", ""),
        )
        signature = query.get("signature", "").encode(errors="replace")
        if not hmac.compare_digest(self.signature(grant).encode(), signature):
            raise Forbidden("the signature doesn't match this URL", key=key)
        if now >= grant.expires:
            raise Forbidden("the URL has expired; request a new one", key=key)
        return grant


def _parse_number(text: str | None) -> int | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


# Using a thread for each chunk from the network would cost more than writing it.
BUFFER_BYTES = 1024 * 1024
LISTED_AT_ONCE = 500
UPLOADS_PER_KEY_MAX = 4


class LocalStore:
    disk = "local"

    def __init__(
        self,
        root: Path,
        *,
        public_url: str,
        secret: bytes,
        clock: Clock,
        object_bytes_max: int = OBJECT_BYTES_MAX,
    ) -> None:
        self.object_bytes_max = object_bytes_max
        self.root = root
        self._folder = ObjectFolder(root)
        self.outage = self._folder.outage
        self._folder.prepare(now=clock().timestamp())
        self._public_url = public_url
        self._signer = UrlSigner(secret)
        self._clock = clock
        self._uploads: Counter[str] = Counter()

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        if len(data) > MEMORY_BYTES_MAX:
            raise LimitExceeded(
                f"{key}: use a URL to store more than {MEMORY_BYTES_MAX} bytes", key=key
            )
        async with self.receiving(key, content_type) as incoming:
            await incoming.write(data)

    async def get(self, key: str) -> bytes:
        return await asyncio.to_thread(self._read, key)

    def _read(self, key: str) -> bytes:
        opened = self._folder.open(key)
        with opened.file:
            if opened.size > MEMORY_BYTES_MAX:
                raise LimitExceeded(f"{key} has {opened.size} bytes; use a URL to read it", key=key)
            return opened.file.read()

    async def get_start(self, key: str, size: int) -> bytes:
        return await asyncio.to_thread(self._read_start, key, size)

    def _read_start(self, key: str, size: int) -> bytes:
        opened = self._folder.open(key)
        with opened.file:
            return opened.file.read(size)

    async def chunks(
        self, key: str, *, start: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        opened = await self.open(key)
        with opened.file:
            opened.file.seek(start)
            remaining = opened.size if length is None else length
            while chunk := await asyncio.to_thread(opened.file.read, min(remaining, CHUNK_BYTES)):
                remaining -= len(chunk)
                yield chunk

    async def put_file(self, key: str, file: Path, content_type: str) -> None:
        with await open_file(file) as source:
            async with self.receiving(key, content_type) as incoming:
                while chunk := await asyncio.to_thread(source.read, CHUNK_BYTES):
                    await incoming.write(chunk)

    async def head(self, key: str) -> ObjectFacts | None:
        return await asyncio.to_thread(self._read_facts, key)

    def _read_facts(self, key: str) -> ObjectFacts | None:
        try:
            opened = self._folder.open(key)
        except NotFound:
            return None
        opened.file.close()
        return ObjectFacts(opened.size, opened.content_type)

    async def copy(
        self, key: str, target: str, content_type: str, *, size: int | None = None
    ) -> bool:
        checked_content_type(content_type)
        return await asyncio.to_thread(self._folder.copy, key, target, content_type, size)

    async def join(self, keys: Sequence[str], target: str, content_type: str) -> None:
        checked_content_type(content_type)
        await asyncio.to_thread(self._folder.join, keys, target, content_type)

    async def delete(self, *keys: str) -> None:
        await asyncio.to_thread(self._folder.delete, *keys)

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        async for listed in self.listed(prefix):
            yield listed.key

    async def listed(self, prefix: str) -> AsyncIterator[ListedObject]:
        entries = self._folder.listed(prefix)
        while page := await asyncio.to_thread(lambda: list(islice(entries, LISTED_AT_ONCE))):
            for key, stamp in page:
                yield ListedObject(key, datetime.fromtimestamp(stamp, UTC))

    async def url_to_get(self, key: str, *, seconds: int, filename: str | None = None) -> str:
        expires = self._expires(seconds)
        grant = UrlGrant("GET", checked_key(key), expires, filename=filename or "")
        return self._signer.url(self._public_url, grant)

    async def url_to_put(
        self, key: str, *, content_type: str, seconds: int, size: int | None = None
    ) -> PresignedUrl:
        grant = UrlGrant(
            "PUT",
            checked_key(key),
            self._expires(seconds),
            checked_content_type(content_type),
            checked_size(size, size_max=self.object_bytes_max),
        )
        url = self._signer.url(self._public_url, grant)
        return PresignedUrl(url, {"Content-Type": content_type})

    def _expires(self, seconds: int) -> int:
        return math.ceil(self._clock().timestamp() + checked_seconds(seconds))

    async def check(self) -> None:
        await asyncio.to_thread(self._try_writing)

    def _try_writing(self) -> None:
        with self._folder.receive() as file:
            self._folder.write(file, bytes(PROBE_BYTES if self.outage.rejects_writes else 1))
        self.outage.note_success(has_written=True)

    async def aclose(self) -> None:
        """Does nothing, because no file is held open."""

    # The endpoint that serves the URLs uses the methods below.

    def granted(self, method: str, key: str, query: Mapping[str, str]) -> UrlGrant:
        """Returns the grant of a URL. Raises Forbidden unless it was signed for this method and is
        still valid."""
        return self._signer.granted(method, key, query, now=self._clock().timestamp())

    async def open(self, key: str) -> OpenObject:
        return await open_with(lambda: self._folder.open(key), lambda found: found.file.close())

    @asynccontextmanager
    async def receiving(self, key: str, content_type: str) -> AsyncIterator["IncomingObject"]:
        """Yields an upload. The object exists only if the block ends without an error."""
        checked_key(key)
        checked_content_type(content_type)
        with self._counted(key), ExitStack() as opened:
            incoming = IncomingObject(self._folder, opened, self.object_bytes_max)
            yield incoming
            await incoming.place(key, content_type)

    @contextlib.contextmanager
    def _counted(self, key: str) -> Iterator[None]:
        """Limits the number of concurrent uploads to one key. A client that retries needs only a
        few. Each upload takes space on the disk, but a quota counts the object only once."""
        if self._uploads[key] >= UPLOADS_PER_KEY_MAX:
            raise TooManyCalls(
                f"{UPLOADS_PER_KEY_MAX} uploads to {key} are already in progress", key=key
            )
        self._uploads[key] += 1
        try:
            yield
        finally:
            self._uploads[key] -= 1
            if not self._uploads[key]:
                del self._uploads[key]


class IncomingObject:
    """An upload. Small chunks are buffered and written in large ones."""

    def __init__(self, folder: ObjectFolder, opened: ExitStack, bytes_max: int) -> None:
        self._folder = folder
        self._opened = opened
        self._file: BinaryIO | None = None  # None while everything is still buffered
        self._bytes_max = bytes_max
        self._buffer = bytearray()
        self.size = 0

    async def write(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size > self._bytes_max:
            raise LimitExceeded(f"an object can have at most {self._bytes_max} bytes")
        self._buffer += chunk
        if len(self._buffer) >= BUFFER_BYTES:
            await self.flush()

    async def flush(self) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        if buffer:
            await asyncio.to_thread(self._write, buffer)

    def _write(self, buffer: bytearray) -> None:
        if self._file is None:
            self._file = self._opened.enter_context(self._folder.receive())
        self._folder.write(self._file, buffer)

    async def place(self, key: str, content_type: str) -> None:
        """Stores the object under its key. A small object is stored in a single thread call,
        because each thread call costs more than the write itself."""
        if self._file is None:
            await asyncio.to_thread(self._folder.put, key, self._buffer, content_type)
            return
        await self.flush()
        await asyncio.to_thread(self._folder.place, self._file, key, content_type)
