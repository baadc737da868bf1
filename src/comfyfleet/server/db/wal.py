"""Makes commits of SQLite durable: commits that end at about the same time share one write to the disk.

SQLite itself would wait for the disk in each commit, while it holds the lock that all other writers need.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from comfyfleet.errors import Unavailable

# How long another writer may take before we give up.
BUSY_MS = 30_000
MEMORY = ("", ":memory:")


def open_sqlite(path: str) -> sqlite3.Connection:
    # Transactions are begun by us, with BEGIN IMMEDIATE; the driver must not begin its own.
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    # A write-ahead log is synced by WalSync, after the commit and without its lock.
    synchronous = "NORMAL" if mode == "wal" else "FULL"
    for pragma in (
        f"synchronous={synchronous}",
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


class WalSync:
    """Syncs the write-ahead log of one database."""

    def __init__(self, path: str, sync: Callable[[str], None] = sync_file) -> None:
        self._log = "" if path in MEMORY else f"{path}-wal"
        self._sync = sync
        self._is_dirty = False  # something was committed since the last sync began
        self._waiting: asyncio.Future[None] | None = None  # for the sync that begins next
        self._running: asyncio.Future[None] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def note_commit(self) -> None:
        self._is_dirty = bool(self._log)

    def begin(self) -> None:
        """Begins to write what was committed to the disk, for which nobody waits."""
        if self._is_dirty:
            self._next()

    async def sync(self) -> None:
        """Returns once everything that was committed before this call is on the disk.

        Raises Unavailable if the disk refuses. Then the commits may or may not survive a power cut.
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
                await self._sync_in_thread()
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

    async def _sync_in_thread(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="comfyfleet-sync")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._sync, self._log)

    async def close(self) -> None:
        if self._pump is not None:
            await asyncio.wait([self._pump])
        if self._thread is not None:
            self._thread.shutdown()
