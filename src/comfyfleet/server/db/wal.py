"""Makes SQLite commits durable. Commits that end at about the same time share one write to the
disk.

SQLite itself would wait for the disk in each commit, while it holds the lock that all other writers
need.
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
# Milliseconds to wait for another writer before giving up.
BUSY_MS = 30_000
MEMORY = ("", ":memory:")
# A commit writes about ten pages. SQLite itself would start a checkpoint after 1,000 pages.
CHECKPOINT_COMMITS = 100


def open_sqlite(path: str) -> sqlite3.Connection:
    # We begin transactions with BEGIN IMMEDIATE, so the driver must not begin its own.
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    # A write-ahead log is synced by WalSync, after the commit and without its lock.
    synchronous = "NORMAL" if mode == "wal" else "FULL"
    for pragma in (
        f"synchronous={synchronous}",
        # WalSync starts checkpoints, because a commit that does so waits for the disk.
        "wal_autocheckpoint=0",
        "foreign_keys=ON",
        f"busy_timeout={BUSY_MS}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def sync_file(path: str) -> None:
    """Writes a file's contents to the disk. A missing file has nothing to write."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        getattr(os, "fdatasync", os.fsync)(descriptor)
    finally:
        os.close(descriptor)


def checkpoint(path: str) -> None:
    """Copies the log into the database, so that the next commit restarts the log."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


class WalSync:
    """Syncs the write-ahead log of one database, and copies it into the database from time to time.

    Writers hold `turn` while they write.
    """

    def __init__(
        self, path: str, turn: asyncio.Lock, sync: Callable[[str], None] = sync_file
    ) -> None:
        self._path = path
        self._log = "" if path in MEMORY else f"{path}-wal"
        self._turn = turn
        self._sync = sync
        self._commits_left = CHECKPOINT_COMMITS  # until the next checkpoint
        self._checkpoint: asyncio.Task[None] | None = None
        # Whether the next commit waits for the disk, because SQLite syncs the header of a restarted
        # log.
        self.starts_anew = True
        self._is_dirty = False  # something was committed since the last sync began
        self._waiting: asyncio.Future[None] | None = None  # for the sync that begins next
        self._running: asyncio.Future[None] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # for a sync that may begin later
        self._thread: ThreadPoolExecutor | None = None

    def note_commit(self) -> None:
        self.starts_anew = False
        self._is_dirty = bool(self._log)
        self._commits_left -= 1
        if self._commits_left <= 0 and self._log and self._checkpoint is None:
            self._checkpoint = asyncio.create_task(self._run_checkpoint())

    async def _run_checkpoint(self) -> None:
        """Runs a checkpoint while nobody writes, because a checkpoint with concurrent writes never
        empties the log.
        """
        try:
            async with self._turn:
                self._commits_left, self.starts_anew = CHECKPOINT_COMMITS, True
                await self._in_thread(checkpoint, self._path)
        # for example a full disk; the log grows until the next checkpoint
        except sqlite3.Error as error:
            logger.warning("a checkpoint of %s failed: %s", self._path, error)
        finally:
            self._checkpoint = None

    def begin(self, within_seconds: float = 0.0) -> None:
        """Begins to write committed changes to the disk. No caller waits for it."""
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
        """Returns once everything that was committed before this call is on the disk.

        Raises Unavailable if the disk reports an error. In that case, the commits may or may not
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
                self._running.exception()  # marks it as retrieved: a cancelled caller never does
            else:
                self._running.set_result(None)
            self._running = None
        self._pump = None

    async def _in_thread(self, act: Callable[[str], None], path: str) -> None:
        if self._thread is None:
            # one thread for syncs, one for checkpoints
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
