"""A PostgreSQL that keeps its connections and answers nothing keeps nobody waiting."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from tests.support.databases.factory import Databases
from tests.support.databases.relay import PostgresRelay, relayed_postgres

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import Database, open_database
from comfyfleet.server.db.database import dsn
from comfyfleet.server.db.driver import connect
from comfyfleet.server.db.liveness import LivenessLimits

SECONDS_MAX = 20  # far below what TCP would wait
AT_ONCE = LivenessLimits(use_seconds=0.05, answer_seconds=0.2, retry_seconds=0.02)
PATIENT = LivenessLimits(use_seconds=0.01, answer_seconds=SECONDS_MAX)


@pytest.fixture
async def relay(postgres_databases: Databases) -> AsyncIterator[PostgresRelay]:
    async with relayed_postgres(await postgres_databases.url("central")) as found:
        yield found


@pytest.fixture
async def database(relay: PostgresRelay) -> AsyncIterator[Database]:
    found = open_database(relay.url, AT_ONCE)
    yield found
    relay.unblock()
    await found.close()


async def one(database: Database) -> int:
    async with asyncio.timeout(SECONDS_MAX), database.transaction() as tx:
        return int((await tx.execute(text("SELECT 1"))).scalar_one())


async def answered(database: Database) -> int:
    async with asyncio.timeout(SECONDS_MAX):
        while True:
            try:
                return await one(database)
            except Unavailable:
                await asyncio.sleep(0.01)


async def test_a_statement_in_flight_fails_and_later_ones_work(
    relay: PostgresRelay, database: Database
) -> None:
    await asyncio.gather(*(one(database) for _ in range(4)))
    relay.block()
    found = await asyncio.gather(*(one(database) for _ in range(4)), return_exceptions=True)
    assert {type(each) for each in found} == {Unavailable}
    relay.unblock()
    assert await answered(database) == 1


async def test_nobody_waits_for_a_server_that_is_known_to_be_silent(
    relay: PostgresRelay, database: Database
) -> None:
    assert await one(database) == 1
    relay.block()
    with pytest.raises(Unavailable):
        await one(database)
    with pytest.raises(Unavailable, match="doesn't respond"):
        await one(database)
    relay.unblock()
    assert await answered(database) == 1


async def test_one_who_is_lost_inside_a_transaction_learns_it(
    relay: PostgresRelay, database: Database
) -> None:
    async def lose() -> None:
        async with asyncio.timeout(SECONDS_MAX), database.transaction() as tx:
            await tx.execute(text("SELECT 1"))
            relay.block()
            await tx.execute(text("SELECT 1"))

    with pytest.raises(Unavailable):
        await lose()


async def test_a_slow_statement_of_a_server_that_answers_is_left_alone(
    relay: PostgresRelay,
) -> None:
    database = open_database(relay.url, PATIENT)
    async with database.read() as tx:
        await tx.execute(text("SELECT pg_sleep(0.2)"))
        assert (await tx.execute(text("SELECT 1"))).scalar_one() == 1
    await database.close()


async def test_the_server_ends_a_transaction_that_nobody_continues(database: Database) -> None:
    """A control plane that hangs, or whose machine is gone, must not keep its locks for hours."""
    wanted = "SHOW idle_in_transaction_session_timeout"
    for _ in range(2):
        async with database.transaction() as tx:
            assert (await tx.execute(text(wanted))).scalar_one() == "5min"
    direct = await connect(dsn(database.url))
    assert await direct.fetchval(wanted) == "5min"
    await direct.close()
