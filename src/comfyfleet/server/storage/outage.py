"""Detects outages of the object store and of temporary folders. Logs the start and the end of each
outage once."""

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from comfyfleet.errors import LOGGED, StoreFull, Unavailable, is_full_disk

logger = logging.getLogger(__name__)
# An outage ends when a call succeeds at least this many seconds after the last failure, because
# small files often still fit on a full disk.
SETTLE_SECONDS = 5.0
PART = "the object store"
# Size of the object used to test the store while writes fail. A smaller one might fit on a full
# disk.
PROBE_BYTES = 1024 * 1024


class StoreOutage:
    """The outage state of a store, shared by several threads. `on_change` is called after each
    failure and when the outage ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._failed_at: float | None = None
        self._is_full = False
        self._rejects_writes = False
        self.on_change: Callable[[], None] = lambda: None

    @property
    def is_full(self) -> bool:
        return self._is_full

    @property
    def rejects_writes(self) -> bool:
        """Whether a write has failed and none has succeeded since. Reads may still work."""
        return self._rejects_writes

    def note_failure(self, error: Unavailable, *, is_write: bool = True) -> None:
        error.add_note(LOGGED)
        error.part = PART
        with self._lock:
            is_new, self._failed_at = self._failed_at is None, time.monotonic()
            self._is_full = self._is_full or isinstance(error, StoreFull)
            self._rejects_writes = self._rejects_writes or is_write
        if is_new:
            logger.error("%s is unavailable: %s", self._name, error.message)
        self.on_change()

    def note_success(self, *, has_written: bool) -> None:
        """Records a success. A successful read proves nothing if the store rejects writes."""
        if self._failed_at is None or (self._rejects_writes and not has_written):
            return
        with self._lock:
            failed_at = self._failed_at
            if failed_at is None or time.monotonic() - failed_at < SETTLE_SECONDS:
                return
            self._failed_at, self._is_full, self._rejects_writes = None, False, False
        logger.warning("%s is available again", self._name)
        self.on_change()


LEFT_SECONDS = 86_400.0


class ScratchFolder:
    """A folder for temporary files. `root` doesn't have to exist yet."""

    def __init__(self, root: Path, outage: StoreOutage) -> None:
        self.root = root
        self.outage = outage

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raises StoreFull instead of an operating system error if the disk is full."""
        try:
            yield
        except OSError as error:
            if not is_full_disk(error):
                raise
            full = StoreFull(f"the disk of {self.root} is full", path=str(self.root))
            self.outage.note_failure(full)
            raise full from error
        self.outage.note_success(has_written=True)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Path]:
        """Yields a new folder, which is deleted at the end."""
        with (
            self.watched(),
            tempfile.TemporaryDirectory(prefix="comfyfleet-", dir=self.root) as folder,
        ):
            yield Path(folder)

    def prepare(self) -> None:
        """Creates the folder, and deletes files that a killed process left behind."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in self.root.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > LEFT_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)


@cache
def system_scratch() -> ScratchFolder:
    """Returns the system's folder for temporary files."""
    root = Path(tempfile.gettempdir())
    return ScratchFolder(root, StoreOutage(f"the folder for temporary files {root}"))
