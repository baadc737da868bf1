"""Writers on SQLite share commits, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, OperationalError

from comfyfleet.server.db import Database, open_database

ADD = "INSERT INTO kept VALUES (?)"


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = open_database(f"sqlite:///{tmp_path / 'some.db'}")
    async with opened.transaction() as tx:
        await tx.exec_driver_sql("CREATE TABLE kept (number INTEGER UNIQUE)")
    yield opened
    await opened.close()


@pytest.fixture
def commits(database: Database) -> list[object]:
    seen: list[object] = []
    event.listen(database.engine.sync_engine, "commit", seen.append)
    return seen


async def added(database: Database, number: int) -> None:
    async with database.transaction() as tx:
        await tx.exec_driver_sql(ADD, (number,))
        await asyncio.sleep(0)


async def kept(database: Database) -> list[int]:
    async with database.read() as tx:
        return [row[0] for row in await tx.exec_driver_sql("SELECT number FROM kept ORDER BY 1")]


async def test_those_who_come_meanwhile_are_committed_together(
    database: Database, commits: list[object]
) -> None:
    await asyncio.gather(*(added(database, number) for number in range(30)))
    assert await kept(database) == list(range(30))
    assert len(commits) <= 2


async def test_what_was_told_is_committed(database: Database) -> None:
    async def added_and_seen(number: int) -> None:
        await added(database, number)
        assert number in await kept(database)

    await asyncio.gather(*(added_and_seen(number) for number in range(10)))


async def test_one_that_fails_leaves_nothing_and_harms_nobody(database: Database) -> None:
    await added(database, 3)
    outcomes = await asyncio.gather(
        *(added(database, number) for number in (1, 3, 2, 3)), return_exceptions=True
    )
    assert [type(each) for each in outcomes] == [
        type(None),
        IntegrityError,
        type(None),
        IntegrityError,
    ]
    assert await kept(database) == [1, 2, 3]


async def test_the_first_one_may_fail_too(database: Database) -> None:
    await added(database, 3)
    outcomes = await asyncio.gather(
        *(added(database, number) for number in (3, 1, 2)), return_exceptions=True
    )
    assert isinstance(outcomes[0], IntegrityError)
    assert await kept(database) == [1, 2, 3]


@pytest.mark.parametrize("turns", range(12))
async def test_whoever_is_cancelled_holds_up_nobody(database: Database, turns: int) -> None:
    writers = [asyncio.create_task(added(database, number)) for number in range(6)]
    for _ in range(turns):
        await asyncio.sleep(0.0005)
    for each in writers[::2]:
        each.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    async with asyncio.timeout(5):
        await added(database, 100)
    assert {1, 3, 5, 100} <= set(await kept(database))


async def test_all_are_told_that_nothing_was_committed(database: Database) -> None:
    async def gives_up() -> None:
        async with database.transaction() as tx:
            await tx.exec_driver_sql("INSERT OR ROLLBACK INTO kept VALUES (7), (7)")

    outcomes = await asyncio.gather(
        added(database, 1), gives_up(), added(database, 2), return_exceptions=True
    )
    assert all(isinstance(each, IntegrityError | OperationalError) for each in outcomes)
    assert await kept(database) == []
    await added(database, 8)
    assert await kept(database) == [8]
