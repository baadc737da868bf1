"""Small batches of the queue run on the event loop. Whatever may take long runs in a thread."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text

from comfyfleet.server.db import open_database
from comfyfleet.server.db.driver import LOOP_CALLS_MAX, SqliteDriver

ENDLESS = """WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers LIMIT 3000000)
    SELECT count(*) FROM numbers"""


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[SqliteDriver]:
    database = open_database(f"sqlite:///{tmp_path / 'some.db'}")
    async with database.transaction() as tx:
        await tx.execute(text("CREATE TABLE things (id INTEGER)"))
    driver = SqliteDriver(database)
    await driver.run(add, calls=1)  # opens the connection
    yield driver
    await driver.close()
    await database.close()


def add(connection: sqlite3.Connection) -> int:
    connection.execute("INSERT INTO things VALUES (1)")
    return threading.get_ident()


def count(connection: sqlite3.Connection) -> int:
    found: int = connection.execute("SELECT count(*) FROM things").fetchone()[0]
    return found


async def test_a_small_batch_runs_on_the_event_loop_and_a_large_one_in_the_thread(
    driver: SqliteDriver,
) -> None:
    here = threading.get_ident()
    assert await driver.run(add, calls=LOOP_CALLS_MAX) == here
    assert await driver.run(add, calls=LOOP_CALLS_MAX + 1) != here
    assert await driver.run(count, calls=1) == 3


async def test_a_batch_that_takes_too_long_is_rolled_back_and_repeated_in_the_thread(
    driver: SqliteDriver,
) -> None:
    ran_in: list[int] = []

    def act(connection: sqlite3.Connection) -> None:
        ran_in.append(add(connection))
        connection.execute(ENDLESS).fetchone()

    await driver.run(act, calls=1)
    assert ran_in[0] == threading.get_ident() != ran_in[1]
    assert await driver.run(count, calls=1) == 2


async def test_an_error_is_raised_and_leaves_nothing(driver: SqliteDriver) -> None:
    def act(connection: sqlite3.Connection) -> None:
        add(connection)
        connection.execute("SELECT * FROM others")

    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await driver.run(act, calls=1)
    assert await driver.run(count, calls=1) == 1


async def test_another_process_that_writes_is_waited_for_in_the_thread(
    driver: SqliteDriver, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "some.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    adding = asyncio.ensure_future(driver.run(add, calls=1))
    await asyncio.sleep(0)  # it has found the file in use
    assert not adding.done()
    other.execute("COMMIT")
    other.close()
    assert await adding != threading.get_ident()


async def test_a_batch_behind_one_whose_caller_was_cancelled_runs_in_the_thread(
    driver: SqliteDriver,
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def act(connection: sqlite3.Connection) -> None:
        add(connection)
        has_begun.set()
        may_end.wait(10)

    gone = asyncio.ensure_future(driver.run(act, calls=LOOP_CALLS_MAX + 1))
    assert await asyncio.to_thread(has_begun.wait, 10)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    adding = asyncio.ensure_future(driver.run(add, calls=1))
    await asyncio.sleep(0)
    may_end.set()
    assert await adding != threading.get_ident()
    assert await driver.run(count, calls=1) == 3
