"""Assets that were here before: kept on disk by content, the least recently used go first.

A content hash is BLAKE3, written as 64 hexadecimal digits without any prefix. One worker owns the
folder; a second one in it would lose files that it holds.
"""

import asyncio
import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from blake3 import blake3

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.wire.files import Asset

_HASH = re.compile(r"[0-9a-f]{64}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Asks for a new URL of the same asset.
Renew: TypeAlias = Callable[[Asset], Awaitable[Asset]]


class Source(Protocol):
    def hold(self, asset: Asset, renew: Renew) -> AbstractAsyncContextManager[Path]:
        """The asset as a file of its own, which may be moved away."""
        ...


@dataclass(slots=True)
class _Held:
    """In use: not to be removed. Who wants what is being fetched waits for the lock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class AssetCache:
    """Gives assets out as its source does, but asks it only for what it doesn't have.

    Keyed by endpoint and content: what one backend was given says nothing about another.
    """

    def __init__(self, folder: Path, max_bytes: int, *, source: Source, endpoint: str = "") -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._source = source
        self._mine = folder / blake3(endpoint.encode()).hexdigest()[:16]
        self._incoming = folder / "incoming"
        # What is there, the least recently used first.
        self._sizes: dict[Path, int] = {}
        self._held: dict[Path, _Held] = {}
        # What an earlier process left is looked at once more: it may have died in mid-write.
        self._verified: set[Path] = set()
        self._take_stock()

    @contextlib.asynccontextmanager
    async def hold(self, asset: Asset, renew: Renew) -> AsyncIterator[Path]:
        """The asset as a file that stays, unchanged, for the length of the `with`.

        Raises what the source raises; InvalidInput when the bytes are not those of the hash;
        OSError with ENOSPC when the disk is full although all that could go is gone.
        """
        if asset.content_hash is None:
            async with self._source.hold(asset, renew) as path:
                yield path
            return
        path = self._mine / _checked(asset)
        held = self._held.setdefault(path, _Held())
        held.users += 1
        try:
            async with held.lock:
                await self._provide(path, asset, renew)
            yield path
        finally:
            held.users -= 1
            if not held.users:
                del self._held[path]
            self._shrink(self._max_bytes)

    async def _provide(self, path: Path, asset: Asset, renew: Renew) -> None:
        size = await asyncio.to_thread(_size_if_good, path, path in self._verified)
        if size is None:
            size = await self._fetch(path, asset, renew)
        self._verified.add(path)
        self._sizes.pop(path, None)
        self._sizes[path] = size
        self._shrink(self._max_bytes)

    async def _fetch(self, path: Path, asset: Asset, renew: Renew) -> int:
        """Once more after a damaged transfer, or when room could be made on a full disk."""
        for last in (False, True):
            try:
                async with self._source.hold(asset, renew) as fetched:
                    found = await asyncio.to_thread(_hash_of, fetched)
                    if found == path.name:
                        return await asyncio.to_thread(self._move, fetched, path)
            except OSError as error:
                if last or error.errno not in _FULL or not self._shrink(0):
                    raise
        raise InvalidInput(
            f"the input {asset.name!r} is not what was stored: its hash is {found}, not {path.name}"
        )

    def _move(self, fetched: Path, path: Path) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = fetched.stat().st_size
        try:
            os.replace(fetched, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy(fetched, path)
        return size

    def _copy(self, fetched: Path, path: Path) -> None:
        """From another file system; under its own name only when it is whole."""
        draft = self._incoming / uuid.uuid4().hex
        try:
            shutil.copyfile(fetched, draft)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def _shrink(self, max_bytes: int) -> bool:
        """Whether anything went. What is in use stays, even if it is too much."""
        # One that is larger than the whole cache must not drive all others out while it is here.
        fitting = sum(size for size in self._sizes.values() if size <= self._max_bytes)
        went = False
        for path, size in list(self._sizes.items()):
            too_large = size > self._max_bytes
            if path in self._held or (fitting <= max_bytes and not too_large):
                continue
            path.unlink(missing_ok=True)
            del self._sizes[path]
            self._verified.discard(path)
            fitting -= 0 if too_large else size
            went = True
        return went

    def _take_stock(self) -> None:
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir(parents=True)
        found = [
            (path.stat(), path) for path in self._folder.glob("*/*") if _HASH.fullmatch(path.name)
        ]
        for stat, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            self._sizes[path] = stat.st_size
        self._shrink(self._max_bytes)


def _checked(asset: Asset) -> str:
    content_hash = asset.content_hash or ""
    if not _HASH.fullmatch(content_hash):
        raise InvalidInput(
            f"the input {asset.name!r} has the content hash {content_hash!r}, "
            "which is not BLAKE3 as 64 hexadecimal digits"
        )
    return content_hash


def _size_if_good(path: Path, is_verified: bool) -> int | None:
    """Also marks it as used, in a way that outlives the process."""
    try:
        if not is_verified and _hash_of(path) != path.name:
            return None
        os.utime(path)
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _hash_of(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()
