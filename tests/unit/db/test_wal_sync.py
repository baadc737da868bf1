"""Commits on SQLite wait for the disk together, and without a lock that others need."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.support.workers.memory_plane import eventually

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import Database, open_database
from comfyfleet.server.db.wal import WalSync


class Disk:
    """Counts syncs. Each waits until it is allowed."""

    def __init__(self) -> None:
        self.begun = 0
        self.allowed = threading.Semaphore(0)
        self.error: OSError | None = None

    def sync(self, path: str) -> None:
        self.begun += 1
        self.allowed.acquire()
        if self.error is not None:
            raise self.error


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_was_not_changed_is_not_synced() -> None:
    disk = Disk()
    await WalSync("some.db", disk.sync).sync()
    assert disk.begun == 0


async def test_all_who_wait_share_one_sync_and_a_later_commit_gets_the_next() -> None:
    disk = Disk()
    wal = WalSync("some.db", disk.sync)
    wal.note_commit()
    first = [asyncio.ensure_future(wal.sync()) for _ in range(3)]
    await turns()
    wal.note_commit()  # while the disk writes: it may have come too late for this sync
    second = asyncio.ensure_future(wal.sync())
    disk.allowed.release()
    await asyncio.gather(*first)
    assert not second.done()
    disk.allowed.release()
    await second
    assert disk.begun == 2
    await wal.close()


async def test_a_waiter_that_is_cancelled_cancels_no_other() -> None:
    disk = Disk()
    wal = WalSync("some.db", disk.sync)
    wal.note_commit()
    gone, stays = asyncio.ensure_future(wal.sync()), asyncio.ensure_future(wal.sync())
    await turns()
    gone.cancel()
    disk.allowed.release()
    await stays
    await wal.close()


async def test_an_error_of_the_disk_is_reported_and_the_next_sync_tries_again() -> None:
    disk = Disk()
    wal = WalSync("some.db", disk.sync)
    wal.note_commit()
    disk.error = OSError(5, "Input/output error")
    disk.allowed.release()
    with pytest.raises(Unavailable, match="Input/output error"):
        await wal.sync()
    disk.error = None
    disk.allowed.release()
    await wal.sync()
    assert disk.begun == 2
    await wal.close()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = open_database(f"sqlite:///{tmp_path / 'some.db'}")
    async with database.transaction() as tx:
        await tx.execute(text("CREATE TABLE things (id INTEGER)"))
    yield database
    await database.close()


async def add(database: Database, *, persists: bool = True) -> None:
    async with database.transaction(persists=persists) as tx:
        await tx.execute(text("INSERT INTO things VALUES (1)"))


async def test_a_transaction_ends_when_the_disk_has_it_and_others_write_meanwhile(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    monkeypatch.setattr(database.wal, "_sync", disk.sync)
    writing = asyncio.ensure_future(add(database))
    await eventually(lambda: disk.begun == 1)
    await add(database, persists=False)  # the other one waits for the disk, and holds no lock
    assert not writing.done()
    disk.allowed.release(2)
    await writing
    await database.persist()
    assert disk.begun == 2
