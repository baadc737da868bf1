"""Calls of SQLite: short ones are made at once, and none keeps others from being served for long."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from comfyfleet.server.db import database

NUMBERS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) SELECT i FROM n"
)
# Within a SELECT: of what begins with WITH nobody knows whether it writes.
LONG_READ = f"SELECT max(i) FROM ({NUMBERS})"  # noqa: S608


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[database.SqliteConnection]:
    opened = await database.connect(str(tmp_path / "some.db"))
    opened._conn.isolation_level = None
    await asked(opened, "CREATE TABLE kept (number INTEGER, thread INTEGER)")
    await asked(opened, "CREATE TABLE once (number INTEGER UNIQUE)")
    opened._conn.create_function("here", 0, threading.get_ident)
    yield opened
    await opened.close()


async def asked(
    connection: database.SqliteConnection, sql: str, *values: object
) -> list[tuple[object, ...]]:
    cursor = connection.cursor()
    await cursor.execute(sql, values)
    rows = await cursor.fetchall()
    await cursor.close()
    return rows


async def test_short_statements_are_run_where_they_are_asked_for(
    connection: database.SqliteConnection,
) -> None:
    await asked(connection, "BEGIN IMMEDIATE")
    await asked(connection, "INSERT INTO kept VALUES (?, here())", 1)
    await connection.commit()
    assert await asked(connection, "SELECT number, thread, here() FROM kept") == [
        (1, threading.get_ident(), threading.get_ident())
    ]


async def test_a_long_read_lets_others_be_served(connection: database.SqliteConnection) -> None:
    reading = asyncio.create_task(asked(connection, LONG_READ, 3_000_000))
    served = 0
    while not reading.done():
        await asyncio.sleep(0.001)
        served += 1
    assert await reading == [(3_000_000,)]
    assert served > 10


async def test_a_read_that_is_wrong_is_not_made_twice(
    connection: database.SqliteConnection,
) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await asked(connection, "SELECT * FROM lost")
    assert connection._submitted == connection._finished


async def test_many_rows_at_once_are_written_aside(connection: database.SqliteConnection) -> None:
    values = range(database.PARAMETERS_MAX + 2)
    cursor = connection.cursor()
    await cursor.executemany("INSERT INTO kept VALUES (?, here())", [(each,) for each in values])
    rows = ", ".join(["(?, here())"] * len(values))
    await cursor.execute(f"INSERT INTO kept VALUES {rows}", values)  # noqa: S608
    threads = await asked(connection, "SELECT DISTINCT thread FROM kept")
    assert threads
    assert (threading.get_ident(),) not in threads


async def test_a_call_waits_for_one_whose_caller_has_gone(
    connection: database.SqliteConnection,
) -> None:
    """Its thread is still at it: a second call beside it would be in the midst of the first."""
    await asked(connection, "BEGIN IMMEDIATE")
    await asked(connection, "INSERT INTO kept VALUES (1, 0)")
    gone = asyncio.create_task(asked(connection, NUMBERS, 300_000))
    await asyncio.sleep(0.001)
    gone.cancel()
    await connection.rollback()
    assert connection._submitted == connection._finished
    assert await asked(connection, "SELECT count(*) FROM kept") == [(0,)]


async def test_a_transaction_that_sqlite_gave_up_is_not_committed(
    connection: database.SqliteConnection,
) -> None:
    await asked(connection, "BEGIN IMMEDIATE")
    await asked(connection, "INSERT INTO kept VALUES (1, 0)")
    with pytest.raises(sqlite3.IntegrityError):
        await asked(connection, "INSERT OR ROLLBACK INTO once VALUES (1), (1)")
    with pytest.raises(sqlite3.OperationalError, match="rolled back"):
        await connection.commit()


async def test_a_writer_waits_for_another_and_lets_others_be_served(
    connection: database.SqliteConnection, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "some.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(asked(connection, "BEGIN IMMEDIATE"))
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert not waiting.done()
    other.execute("COMMIT")
    other.close()
    await waiting
    await asked(connection, "INSERT INTO kept VALUES (1, here())")
    await connection.commit()
    assert await asked(connection, "SELECT number FROM kept") == [(1,)]
