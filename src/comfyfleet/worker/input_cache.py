"""Input files that stay in ComfyUI's input folder between jobs.

ComfyUI's node cache identifies a loader by the name of its file. A file that always gets the same
name is loaded once, and the nodes after it run again only if something else has changed.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import shutil
import stat
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from comfyfleet.api.values import Asset
from comfyfleet.api.worker import Job
from comfyfleet.comfy.backend import Uploaded

logger = logging.getLogger(__name__)

BYTES_MAX = 4 * 1024**3
UNUSED_SECONDS_MAX = 24 * 3600.0
SECRET_FILE, SECRET_BYTES, SECRET_MODE = "inputs.secret", 32, 0o600
NAME_CHARACTERS = 32

# Uploads a file under a name (the first argument) to a subfolder (the second) of the input folder.
Upload = Callable[[str, str], Awaitable[Uploaded]]


class _CachedFile(NamedTuple):
    size: int
    used_at: float


class InputCache:
    """Stores the inputs of jobs under names that only this worker can compute.

    A name is an HMAC of tenant and content, so that no prompt can guess the name of another
    tenant's file. Unused files are removed when the cache is too large, a day after their last use,
    and when the worker starts.
    """

    def __init__(
        self,
        home: Path,
        state: Path,
        root: str,
        *,
        bytes_max: int = BYTES_MAX,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._input = home / "input"
        self._state = state
        self._root = root
        self._bytes_max = bytes_max
        self._clock = clock
        self._secret = b""
        self._is_usable = True  # False once an upload has ended up in another folder
        self._files: OrderedDict[str, _CachedFile] = OrderedDict()  # least recently used first
        self._users: Counter[str] = Counter()
        self._lock = asyncio.Lock()  # held while a file is uploaded or removed

    @property
    def subfolder(self) -> str:
        return f"{self._root}/{self._keyed('folder')}"

    def open(self, jobs: Iterable[Job] = ()) -> None:
        """Removes files left by an earlier process, except the files of `jobs`, which may still be
        running. This call blocks."""
        self._secret = _read_secret(self._state / SECRET_FILE)
        needed = {self._stem(job.tenant_id, asset) for job in jobs for asset in job.assets}
        for path in self._paths():
            if path.stem in needed and (size := _size_of(path)) is not None:
                self._files[path.name] = _CachedFile(size, self._clock())
            else:
                _remove(path)

    async def provide(
        self, job: Job, asset: Asset, path: Path, ending: str, upload: Upload
    ) -> str | None:
        """Returns the name of the asset in the input folder, and uploads the asset if it isn't
        there.

        Returns None if the asset can't be cached. The file is kept until `release` is called with
        its name.
        """
        stem = self._stem(job.tenant_id, asset)
        if stem is None or not self._is_usable:
            return None
        name = f"{stem}{ending}"
        async with self._lock:
            if not await self._put(name, path, upload):
                return None
            self._users[name] += 1
        return name

    def value_of(self, name: str) -> str:
        """Returns the value for a loader's input."""
        return Uploaded(name, self.subfolder).value

    def hold(self, job: Job) -> list[str]:
        """Marks the files as used by a job that an earlier process submitted. Returns their
        names."""
        stems = {self._stem(job.tenant_id, asset) for asset in job.assets}
        names = [name for name in self._files if name.rpartition(".")[0] in stems]
        self._users.update(names)
        return names

    async def release(self, names: Iterable[str]) -> None:
        """Marks files as no longer used by a job, and removes unused files that are too old or
        exceed the size limit."""
        for name in names:
            self._users[name] -= 1
            if self._users[name] <= 0:
                del self._users[name]
            if name in self._files:
                self._files[name] = self._files[name]._replace(used_at=self._clock())
                self._files.move_to_end(name)
        await self.shrink()

    async def shrink(self) -> None:
        async with self._lock:
            for name in self._to_remove():
                del self._files[name]
                await asyncio.to_thread(_remove, self._folder / name)

    def _to_remove(self) -> list[str]:
        total = sum(file.size for file in self._files.values())
        names = []
        for name, file in self._files.items():
            is_old = self._clock() - file.used_at > UNUSED_SECONDS_MAX
            if name not in self._users and (is_old or total > self._bytes_max):
                names.append(name)
                total -= file.size
        return names

    @property
    def _folder(self) -> Path:
        return self._input / self.subfolder

    def _paths(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return list(self._folder.iterdir())
        return []

    async def _put(self, name: str, path: Path, upload: Upload) -> bool:
        target, size = self._folder / name, await asyncio.to_thread(os.path.getsize, path)
        if await asyncio.to_thread(_size_of, target) != size:
            # Remove an incomplete file first. Otherwise, ComfyUI would store the complete one under
            # another name.
            await asyncio.to_thread(_remove, target)
            uploaded = await upload(name, self.subfolder)
            if uploaded.value != self.value_of(name) or (
                await asyncio.to_thread(_size_of, target) != size
            ):
                self._is_usable = False
                logger.warning(
                    "inputs aren't cached, because uploads don't appear in the backend's folder",
                    extra={"folder": str(self._input)},
                )
                return False
        self._files[name] = _CachedFile(size, self._clock())
        self._files.move_to_end(name)
        return True

    def _stem(self, tenant_id: UUID | None, asset: Asset) -> str | None:
        if tenant_id is None or asset.content_hash is None:
            return None
        return self._keyed(f"{tenant_id} {asset.content_hash}")

    def _keyed(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode(), "sha256").hex()[:NAME_CHARACTERS]


def _read_secret(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        if len(stored := path.read_bytes()) == SECRET_BYTES:
            return stored
    new = secrets.token_bytes(SECRET_BYTES)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET_MODE)
    with os.fdopen(handle, "wb") as file:
        file.write(new)
    return new


def _size_of(path: Path) -> int | None:
    """Returns the size of a regular file, or None if the path isn't one."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
