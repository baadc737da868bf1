"""Workers that share a machine with several GPUs: it may go only when none of them is at work."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

TURN_SECONDS_MAX = 15.0
TURN_LOOK_SECONDS = 0.05
BUSY_SUFFIX = ".busy"


class Neighbours:
    """Files in a shared folder, locked while their worker is busy: a lock ends with its process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = folder / f"{os.getpid()}-{id(self)}{BUSY_SUFFIX}"
        self._held: int | None = None

    def mark_busy(self) -> None:
        if self._held is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = _locked(self._own)

    def unmark(self) -> None:
        if self._held is not None:
            self._own.unlink(missing_ok=True)
            os.close(self._held)
            self._held = None

    def others_are_busy(self) -> bool:
        return any(
            _is_locked(path) for path in self._folder.glob(f"*{BUSY_SUFFIX}") if path != self._own
        )

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One at a time looks at the others and speaks, so that the last word is about all of them.

        Who waits too long goes on all the same: a hung neighbour is no reason to be silent.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock: int | None = None
        for _ in range(int(TURN_SECONDS_MAX / TURN_LOOK_SECONDS)):
            if (lock := _locked(self._folder / "turn")) is not None:
                break
            await asyncio.sleep(TURN_LOOK_SECONDS)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the file's lock; None: somebody else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if _lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not _lock(descriptor):
            return True
        path.unlink(missing_ok=True)  # left by one that was killed
        return False
    finally:
        os.close(descriptor)


if sys.platform == "win32":

    def _lock(descriptor: int) -> bool:
        """There, each worker speaks for itself."""
        return True

else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
