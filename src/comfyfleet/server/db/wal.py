"""Makes SQLite commits durable. Commits at about the same time share a single sync of the disk.

By default, SQLite syncs the disk in each commit while it holds the write lock, so all other writers
would have to wait.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from comfyfleet.errors import Unavailable

logger = logging.getLogger(__name__)
# Maximum milliseconds to wait for another writer.
BUSY_MS = 30_000
MEMORY = ("", ":memory:")
# Number of commits after which a checkpoint starts. A commit writes about ten pages, and SQLite's
# default is a checkpoint after 1,000 pages.
CHECKPOINT_COMMITS = 100


def open_sqlite(path: str) -> sqlite3.Connection:
    # Transactions begin with an explicit BEGIN IMMEDIATE, so the driver must not begin its own.
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    # WalSync syncs the write-ahead log after the commit, when the write lock has been released.
    synchronous = "NORMAL" if mode == "wal" else "FULL"
    for pragma in (
        f"synchronous={synchronous}",
        # WalSync runs the checkpoints, because a commit that ran one would wait for the disk.
        "wal_autocheckpoint=0",
        "foreign_keys=ON",
        f"busy_timeout={BUSY_MS}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def sync_file(path: str) -> None:
    """Syncs a file to the disk. Does nothing if the file doesn't exist."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        getattr(os, "fdatasync", os.fsync)(descriptor)
    finally:
        os.close(descriptor)


def checkpoint(path: str) -> None:
    """Copies the write-ahead log into the database, so that the next commit restarts the log."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


class WalSync:
    """Syncs the write-ahead log of a database, and copies it into the database from time to time.

    Writers hold the `turn` lock while they write.
    """

    def __init__(
        self, path: str, turn: asyncio.Lock, sync: Callable[[str], None] = sync_file
    ) -> None:
        self._path = path
        self._log = "" if path in MEMORY else f"{path}-wal"
        self._turn = turn
        self._sync = sync
        self._commits_left = CHECKPOINT_COMMITS  # Number of commits until the next checkpoint.
        self._checkpoint: asyncio.Task[None] | None = None
        # True if the next commit restarts the log. It waits for the disk, because SQLite syncs the
        # header of the new log.
        self.starts_anew = True
        self._is_dirty = False  # True if there was a commit since the last sync began.
        self._waiting: asyncio.Future[None] | None = None  # The result of the next sync.
        self._running: asyncio.Future[None] | None = None  # The result of the running sync.
        self._pump: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # Starts a delayed sync.
        self._thread: ThreadPoolExecutor | None = None

    def note_commit(self) -> None:
        self.starts_anew = False
        self._is_dirty = bool(self._log)
        self._commits_left -= 1
        if self._commits_left <= 0 and self._log and self._checkpoint is None:
            self._checkpoint = asyncio.create_task(self._run_checkpoint())

    async def _run_checkpoint(self) -> None:
        """Runs a checkpoint while no transaction is open. During concurrent writes, a checkpoint
        would never empty the log.
        """
        try:
            async with self._turn:
                self._commits_left, self.starts_anew = CHECKPOINT_COMMITS, True
                await self._in_thread(checkpoint, self._path)
        # The disk may be full, for example. The log grows until the next checkpoint.
        except sqlite3.Error as error:
            logger.warning("the checkpoint of %s failed: %s", self._path, error)
        finally:
            self._checkpoint = None

    def begin(self, within_seconds: float = 0.0) -> None:
        """Starts a background sync of all commits so far, after at most `within_seconds`."""
        if not self._is_dirty:
            return
        if not within_seconds:
            self._next()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(within_seconds, self._begin_due)

    def _begin_due(self) -> None:
        self._timer = None
        self.begin()

    async def sync(self) -> None:
        """Waits until all commits before this call are on the disk.

        Raises Unavailable if the disk reports an error. It is then unknown whether the commits will
        survive a power failure.
        """
        if self._is_dirty:
            await asyncio.shield(self._next())
        elif self._running is not None:
            await asyncio.shield(self._running)

    def _next(self) -> "asyncio.Future[None]":
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
        return self._waiting

    async def _run(self) -> None:
        while self._waiting is not None:
            self._running, self._waiting = self._waiting, None
            self._is_dirty = False
            try:
                await self._in_thread(self._sync, self._log)
            except OSError as error:
                self._is_dirty = True
                self._running.set_exception(
                    Unavailable(f"the database can't be written: {error.strerror or error}")
                )
                # Marks the exception as retrieved, because a cancelled caller never retrieves it.
                self._running.exception()
            else:
                self._running.set_result(None)
            self._running = None
        self._pump = None

    async def _in_thread(self, act: Callable[[str], None], path: str) -> None:
        if self._thread is None:
            # One thread is for syncs, and one for checkpoints.
            self._thread = ThreadPoolExecutor(2, thread_name_prefix="comfyfleet-sync")
        await asyncio.get_running_loop().run_in_executor(self._thread, act, path)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        running = [task for task in (self._pump, self._checkpoint) if task is not None]
        if running:
            await asyncio.wait(running)
        if self._thread is not None:
            self._thread.shutdown()
