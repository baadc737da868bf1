"""Commits on SQLite wait for the disk together, and without a lock that others need."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tests.support.workers.memory_plane import eventually

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import Database, open_database, wal
from comfyfleet.server.db.database import SqliteConnection
from comfyfleet.server.db.wal import CHECKPOINT_COMMITS, WalSync


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
    await WalSync("some.db", asyncio.Lock(), disk.sync).sync()
    assert disk.begun == 0


async def test_all_who_wait_share_one_sync_and_a_later_commit_gets_the_next() -> None:
    disk = Disk()
    syncs = WalSync("some.db", asyncio.Lock(), disk.sync)
    syncs.note_commit()
    first = [asyncio.ensure_future(syncs.sync()) for _ in range(3)]
    await turns()
    syncs.note_commit()  # while the disk writes: it may have come too late for this sync
    second = asyncio.ensure_future(syncs.sync())
    disk.allowed.release()
    await asyncio.gather(*first)
    assert not second.done()
    disk.allowed.release()
    await second
    assert disk.begun == 2
    await syncs.close()


async def test_a_waiter_that_is_cancelled_cancels_no_other() -> None:
    disk = Disk()
    syncs = WalSync("some.db", asyncio.Lock(), disk.sync)
    syncs.note_commit()
    gone, stays = asyncio.ensure_future(syncs.sync()), asyncio.ensure_future(syncs.sync())
    await turns()
    gone.cancel()
    disk.allowed.release()
    await stays
    await syncs.close()


async def test_an_error_of_the_disk_is_reported_and_the_next_sync_tries_again() -> None:
    disk = Disk()
    syncs = WalSync("some.db", asyncio.Lock(), disk.sync)
    syncs.note_commit()
    disk.error = OSError(5, "Input/output error")
    disk.allowed.release()
    with pytest.raises(Unavailable, match="Input/output error"):
        await syncs.sync()
    disk.error = None
    disk.allowed.release()
    await syncs.sync()
    assert disk.begun == 2
    await syncs.close()


async def test_what_may_be_synced_later_goes_with_the_next_sync_or_when_it_is_due() -> None:
    disk = Disk()
    disk.allowed.release(10)
    syncs = WalSync("some.db", asyncio.Lock(), disk.sync)
    syncs.note_commit()
    syncs.begin(within_seconds=0.05)
    await syncs.sync()  # of somebody who waits
    assert disk.begun == 1
    await eventually(lambda: syncs._timer is None)
    assert disk.begun == 1
    syncs.note_commit()
    syncs.begin(within_seconds=0.01)
    assert disk.begun == 1
    await eventually(lambda: disk.begun == 2)
    await syncs.close()


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


async def test_the_log_is_copied_into_the_database_and_starts_anew(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "CHECKPOINT_COMMITS", 5)
    log = tmp_path / "some.db-wal"
    sizes = []
    for _ in range(CHECKPOINT_COMMITS + 20):
        await add(database, persists=False)
        await eventually(lambda: database.wal._checkpoint is None)
        sizes.append(log.stat().st_size)
    assert sizes[-1] == max(sizes[:CHECKPOINT_COMMITS])  # the file is used again and does not grow
    async with database.read() as tx:
        assert (await tx.execute(text("SELECT count(*) FROM things"))).scalar_one() == len(sizes)


async def test_a_checkpoint_waits_until_nobody_writes(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(wal, "CHECKPOINT_COMMITS", 1)
    monkeypatch.setattr(wal, "checkpoint", lambda _: loop.call_soon_threadsafe(began.set))
    database.wal._commits_left = 1
    async with database.turn:
        database.wal.note_commit()
        await turns()
        assert not began.is_set()
    await asyncio.wait_for(began.wait(), 10)


async def test_a_commit_waits_for_the_disk_in_a_thread_only_where_the_log_starts_anew(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[object] = []
    in_thread = SqliteConnection.in_thread

    async def note(connection: SqliteConnection, act: Callable[[], Any]) -> Any:
        handed.append(act)
        return await in_thread(connection, act)

    monkeypatch.setattr(SqliteConnection, "in_thread", note)
    await add(database)
    assert not handed
    database.wal.starts_anew = True
    await add(database)
    assert len(handed) == 1
