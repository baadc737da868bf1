"""A PostgreSQL that goes away is told apart from a statement that is wrong, at every moment."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from tests.support.databases.restartable_postgres import PostgresProcess, restartable_postgres

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import Database, open_database

BACK_SECONDS_MAX = 10


@pytest.fixture
def postgres() -> Iterator[PostgresProcess]:
    with restartable_postgres() as found:
        yield found


@pytest.fixture
async def database(postgres: PostgresProcess) -> AsyncIterator[Database]:
    found = open_database(postgres.url())
    yield found
    await found.close()


async def one(database: Database) -> int:
    async with database.transaction() as tx:
        return int((await tx.execute(text("SELECT 1"))).scalar_one())


async def test_away_starting_and_back(postgres: PostgresProcess, database: Database) -> None:
    """Asked without a pause: nothing but an answer or Unavailable may be heard."""
    heard: set[str] = set()
    restarted = asyncio.Event()

    async def ask() -> None:
        while not restarted.is_set():
            try:
                heard.add(f"answered {await one(database)}")
            except Unavailable:
                heard.add("away")
            await asyncio.sleep(0)

    asking = [asyncio.create_task(ask()) for _ in range(4)]
    for _ in range(2):
        await asyncio.to_thread(postgres.stop_at_once)
        await asyncio.to_thread(postgres.start)
    restarted.set()
    await asyncio.wait_for(asyncio.gather(*asking), BACK_SECONDS_MAX)
    assert heard == {"answered 1", "away"}
    assert await one(database) == 1


async def test_lost_inside_a_transaction(postgres: PostgresProcess, database: Database) -> None:
    async def cut_off() -> None:
        async with database.transaction() as tx:
            await tx.execute(text("SELECT 1"))
            await asyncio.to_thread(postgres.stop_at_once)
            await tx.execute(text("SELECT 1"))

    with pytest.raises(Unavailable):
        await cut_off()
    with pytest.raises(Unavailable):
        await one(database)


async def test_what_is_wrong_with_a_statement_stays_what_it_is(database: Database) -> None:
    for statement, values in (("SELECT 1/0", {}), ("SELECT CAST(:a AS bigint)", {"a": "x"})):
        with pytest.raises(DBAPIError):
            async with database.transaction() as tx:
                await tx.execute(text(statement), values)
    with pytest.raises(FileNotFoundError):
        async with database.transaction():
            raise FileNotFoundError("of our own")
