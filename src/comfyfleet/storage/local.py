"""A folder as an object store; its URLs point to the control plane, which serves them."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from comfyfleet.kernel.clock import Clock
from comfyfleet.kernel.errors import LimitExceeded, NotFound
from comfyfleet.opened_files import opened, opened_by
from comfyfleet.storage.folder import Folder, Opened
from comfyfleet.storage.keys import (
    checked_content_type,
    checked_key,
    checked_seconds,
    checked_size,
)
from comfyfleet.storage.model import (
    CHUNK_BYTES,
    MEMORY_BYTES_MAX,
    OBJECT_BYTES_MAX,
    Listed,
    ObjectFacts,
    Presigned,
)
from comfyfleet.storage.signing import Grant, Signer

# A thread per chunk as the network delivers them would cost more than the writing.
BUFFER_BYTES = 1024 * 1024
LISTED_AT_ONCE = 500


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
        self._folder = Folder(root)
        self._folder.prepare(now=clock().timestamp())
        self._public_url = public_url
        self._signer = Signer(secret)
        self._clock = clock

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        if len(data) > MEMORY_BYTES_MAX:
            raise LimitExceeded(f"{key}: more than {MEMORY_BYTES_MAX} bytes go by URL", key=key)
        async with self.receiving(key, content_type) as incoming:
            await incoming.write(data)

    async def get(self, key: str) -> bytes:
        return await asyncio.to_thread(self._read, key)

    def _read(self, key: str) -> bytes:
        opened = self._folder.open(key)
        with opened.file:
            if opened.size > MEMORY_BYTES_MAX:
                raise LimitExceeded(f"{key} has {opened.size} bytes; it goes by URL", key=key)
            return opened.file.read()

    async def get_start(self, key: str, size: int) -> bytes:
        return await asyncio.to_thread(self._read_start, key, size)

    def _read_start(self, key: str, size: int) -> bytes:
        opened = self._folder.open(key)
        with opened.file:
            return opened.file.read(size)

    async def chunks(self, key: str) -> AsyncIterator[bytes]:
        opened = await self.open(key)
        with opened.file:
            while chunk := await asyncio.to_thread(opened.file.read, CHUNK_BYTES):
                yield chunk

    async def put_file(self, key: str, file: Path, content_type: str) -> None:
        with await opened(file) as source:
            async with self.receiving(key, content_type) as incoming:
                while chunk := await asyncio.to_thread(source.read, CHUNK_BYTES):
                    await incoming.write(chunk)

    async def head(self, key: str) -> ObjectFacts | None:
        return await asyncio.to_thread(self._look, key)

    def _look(self, key: str) -> ObjectFacts | None:
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

    async def delete(self, *keys: str) -> None:
        await asyncio.to_thread(self._folder.delete, *keys)

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        async for each in self.listed(prefix):
            yield each.key

    async def listed(self, prefix: str) -> AsyncIterator[Listed]:
        found = self._folder.listed(prefix)
        while page := await asyncio.to_thread(lambda: list(islice(found, LISTED_AT_ONCE))):
            for key, stamp in page:
                yield Listed(key, datetime.fromtimestamp(stamp, UTC))

    async def url_to_get(self, key: str, *, seconds: int, filename: str | None = None) -> str:
        expires = self._expires(seconds)
        grant = Grant("GET", checked_key(key), expires, filename=filename or "")
        return self._signer.url(self._public_url, grant)

    async def url_to_put(
        self, key: str, *, content_type: str, seconds: int, size: int | None = None
    ) -> Presigned:
        grant = Grant(
            "PUT",
            checked_key(key),
            self._expires(seconds),
            checked_content_type(content_type),
            checked_size(size, size_max=self.object_bytes_max),
        )
        url = self._signer.url(self._public_url, grant)
        return Presigned(url, {"Content-Type": content_type})

    def _expires(self, seconds: int) -> int:
        return math.ceil(self._clock().timestamp() + checked_seconds(seconds))

    async def check(self) -> None:
        await asyncio.to_thread(self._try_writing)

    def _try_writing(self) -> None:
        with self._folder.receive() as file:
            self._folder.write(file, b"\0")

    async def aclose(self) -> None:
        """Nothing is held open."""

    # For the endpoint that serves the URLs:

    def granted(self, method: str, key: str, query: Mapping[str, str]) -> Grant:
        """Forbidden unless the URL is one of ours, for this method, and still holds."""
        return self._signer.granted(method, key, query, now=self._clock().timestamp())

    async def open(self, key: str) -> Opened:
        return await opened_by(lambda: self._folder.open(key), lambda found: found.file.close())

    @asynccontextmanager
    async def receiving(self, key: str, content_type: str) -> AsyncIterator["Incoming"]:
        """The object is there once the block ends well, and not at all if it doesn't."""
        checked_key(key)
        checked_content_type(content_type)
        with ExitStack() as opened:
            incoming = Incoming(self._folder, opened, self.object_bytes_max)
            yield incoming
            await incoming.place(key, content_type)


class Incoming:
    """An object on its way in: held back in small part, written in large ones."""

    def __init__(self, folder: Folder, opened: ExitStack, bytes_max: int) -> None:
        self._folder = folder
        self._opened = opened
        self._file: BinaryIO | None = None  # none as long as all of it is held back
        self._bytes_max = bytes_max
        self._buffer = bytearray()
        self.size = 0

    async def write(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size > self._bytes_max:
            raise LimitExceeded(f"an object has at most {self._bytes_max} bytes")
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
        """A small one changes threads once: that costs more than to write it."""
        if self._file is None:
            await asyncio.to_thread(self._folder.put, key, self._buffer, content_type)
            return
        await self.flush()
        await asyncio.to_thread(self._folder.place, self._file, key, content_type)
