"""PostgreSQL behind PgBouncer: in transaction mode with a direct URL, and in session mode without one."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest
from sqlalchemy import text
from tests.support.databases.factory import Databases
from tests.support.databases.pgbouncer import pgbouncer, through

from comfyfleet.server.db import Database, open_database
from comfyfleet.server.db.coordination import AdvisoryLocks, NotifyChannel
from comfyfleet.server.db.database import dsn
from comfyfleet.server.db.driver import PostgresDriver
from comfyfleet.server.db.pooler import shares_connections

AT_ONCE = 40


@pytest.fixture
def transaction_pooler(postgres_databases: Databases) -> Iterator[str]:
    # Two server connections for many clients: a client seldom gets the same one twice.
    with pgbouncer(str(postgres_databases.server_url), pool_mode="transaction", pool_size=2) as url:
        yield url


@pytest.fixture
def session_pooler(postgres_databases: Databases) -> Iterator[str]:
    with pgbouncer(str(postgres_databases.server_url), pool_mode="session") as url:
        yield url


@pytest.fixture
async def pooled(postgres_databases: Databases, transaction_pooler: str) -> AsyncIterator[Database]:
    direct = await postgres_databases.url("central")
    database = open_database(through(transaction_pooler, direct), direct_url=direct)
    yield database
    await database.close()


async def test_statements_at_once_share_few_server_connections(pooled: Database) -> None:
    async def look(number: int) -> int:
        async with pooled.read() as tx:
            query = text("SELECT CAST(:number AS bigint) AS number, CAST('[1]' AS jsonb)")
            return int((await tx.execute(query, {"number": number})).scalar_one())

    async def write(number: int) -> int:
        async with pooled.transaction() as tx:
            query = text("SELECT CAST(:number AS bigint) + 0, CAST(:name AS text)")
            return int((await tx.execute(query, {"number": number, "name": "x"})).scalar_one())

    driver = PostgresDriver(pooled)

    async def send(number: int) -> int:
        rows = await driver.fetch("SELECT $1::bigint, pg_sleep(0.001)", number, locks=(number,))
        return int(rows[0][0])

    numbers = range(AT_ONCE)
    # Again and again: a statement that was prepared on one server connection is not there on the other.
    for act in (look, write, send) * 3:
        assert await asyncio.gather(*map(act, numbers)) == list(numbers)
    await driver.close()
    # Another process would use the same names on the same server connections.
    async with pooled.read() as tx:
        named = await tx.scalar(text("SELECT count(*) FROM pg_prepared_statements"))
    assert named == 0


async def test_settings_of_the_queue_stay_inside_its_transactions(pooled: Database) -> None:
    driver = PostgresDriver(pooled)
    (row,) = await driver.fetch("SELECT current_setting('enable_seqscan')")
    assert row[0] == "off"
    await driver.close()
    async with pooled.read() as tx:
        assert (await tx.execute(text("SHOW enable_seqscan"))).scalar_one() == "on"
        prepared = await tx.execute(
            text("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''")
        )
        assert prepared.scalar_one() == 0


async def test_locks_and_hints_go_directly(pooled: Database) -> None:
    first, second = AdvisoryLocks(pooled), AdvisoryLocks(pooled)
    assert await first.take("sweep")
    assert not await second.take("sweep")
    await first.give("sweep")
    assert await second.take("sweep")
    listener, sender = NotifyChannel(pooled, "hints"), NotifyChannel(pooled, "hints")
    heard: asyncio.Queue[str] = asyncio.Queue()
    listens = asyncio.Event()
    task = asyncio.create_task(listener.listen(heard.put_nowait, listens.set))
    async with asyncio.timeout(20):
        await listens.wait()
        await sender.send(word := uuid4().hex)
        assert await heard.get() == word
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for each in (first, second, sender):
        await each.close()


async def test_a_pooler_is_recognized(
    postgres_databases: Databases, transaction_pooler: str, session_pooler: str
) -> None:
    direct = await postgres_databases.url("central")
    assert not await shares_connections(dsn(direct))
    assert await shares_connections(dsn(through(transaction_pooler, direct)))
    assert not await shares_connections(dsn(through(session_pooler, direct)))


async def test_session_mode_needs_no_direct_url(
    postgres_databases: Databases, session_pooler: str
) -> None:
    database = open_database(through(session_pooler, await postgres_databases.url("central")))
    driver, locks = PostgresDriver(database), AdvisoryLocks(database)
    for _ in range(2):
        (row,) = await driver.fetch("SELECT current_setting('enable_seqscan')", locks=(1,))
        assert row[0] == "off"
    assert await locks.take("sweep")
    async with database.transaction() as tx:
        assert (await tx.execute(text("SELECT 1"))).scalar_one() == 1
    await driver.close()
    await locks.close()
    await database.close()
