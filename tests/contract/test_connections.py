"""Connections that are kept: none is lost, left in a transaction, or lent to two."""

import asyncio
import contextlib
import gc
import random
import sqlite3
import threading
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from asyncpg.prepared_stmt import PreparedStatement as PreparedByAsyncpg
from sqlalchemy import bindparam, func, select, text, update

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import Database, Tx, database, liveness
from comfyfleet.server.db.coordination import NotifyChannel
from comfyfleet.server.db.database import KEPT_MAX, STATEMENTS_MAX, driver_of, dsn, open_sqlite
from comfyfleet.server.db.driver import PreparedInsert, PreparedStatement
from comfyfleet.server.db.tenant_tables import token_wallets

NOW = datetime(2026, 11, 15, tzinfo=UTC)
CANCELLED = 500
WAIT_SECONDS_MAX = 30
# The server notices within 50 ms that nobody waits for it any longer.
SLEEPS = "SET client_connection_check_interval = 50; SELECT pg_sleep(600)"
OTHERS = """SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE $1"""
TURNS_MAX = 150
WALLET = {"tenant_id": uuid.uuid4(), "user_id": uuid.uuid4(), "balance": 0, "created_at": NOW}
OPEN = PreparedInsert(token_wallets, list(WALLET), returning=[token_wallets.c.balance])
READ = PreparedStatement(
    lambda tx: select(token_wallets.c.balance).where(
        token_wallets.c.user_id == bindparam("of_user")
    )
)
ADD = PreparedStatement(
    lambda tx: (
        update(token_wallets)
        .where(token_wallets.c.user_id == bindparam("of_user"))
        .values(balance=token_wallets.c.balance + 1)
        .returning(token_wallets.c.balance)
    )
)
WHY = b"SFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
FAREWELL = b"E" + (len(WHY) + 4).to_bytes(4, "big") + WHY
OF = {"of_user": WALLET["user_id"]}


async def _look(pool: Database) -> None:
    async with pool.read() as tx:
        await READ.first(tx, OF)
        await tx.scalar(select(func.count()).select_from(token_wallets))


async def _write(pool: Database) -> None:
    async with pool.transaction() as tx:
        await ADD.first(tx, OF)
        await tx.scalar(select(func.count()).select_from(token_wallets))
        await ADD.first(tx, OF)


async def _say(pool: Database) -> None:
    async with pool.execute_one() as tx:
        await ADD.first(tx, OF)


async def _cancelled_after(turns: int, work: Any) -> None:
    doing = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    doing.cancel()
    await asyncio.wait([doing])


def _is_in_transaction(tx: Tx) -> bool:
    driver = driver_of(tx)
    in_it = driver.in_transaction if tx.dialect.name == "sqlite" else driver.is_in_transaction()
    return bool(in_it)


async def _open_in_postgres(tx: Tx) -> list[str]:
    states = text("SELECT state FROM pg_stat_activity WHERE datname = current_database()")
    return [row[0] for row in await tx.execute(states)]


async def test_whoever_is_cancelled_anywhere_leaves_no_connection_behind(pool: Database) -> None:
    chance = random.Random(11)
    async with pool.transaction() as tx:
        await OPEN.add(tx, [WALLET])
    for _ in range(CANCELLED // 20):
        acts = [chance.choice([_look, _write, _say])(pool) for _ in range(20)]
        await asyncio.gather(*(_cancelled_after(chance.randrange(TURNS_MAX), act) for act in acts))
    async with asyncio.timeout(10):
        await asyncio.gather(*(_write(pool) for _ in range(20)))
        await asyncio.gather(*(_look(pool) for _ in range(20)))
    lent = [pool.read() for _ in range(4)]
    for each in lent:
        tx = await each.__aenter__()
        assert not _is_in_transaction(tx)
    if not pool.is_sqlite:
        assert len(await _open_in_postgres(tx)) <= KEPT_MAX + 4
        assert "idle in transaction" not in await _open_in_postgres(tx)
    for each in lent:
        await each.__aexit__(None, None, None)
    await pool.close()
    assert pool.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


async def test_a_server_that_leaves_between_two_statements_is_away(pool: Database) -> None:
    if pool.is_sqlite:
        return
    with pytest.raises(Unavailable):
        async with pool.transaction() as tx:
            # What a server that is stopped sends to whoever asks nothing just then.
            driver_of(tx)._protocol.data_received(FAREWELL)
    await _look(pool)


async def test_a_connection_is_used_again_and_by_one_at_a_time(pool: Database) -> None:
    async with pool.read() as tx:
        first = driver_of(tx)
        await tx.scalar(select(func.count()).select_from(token_wallets))
        async with pool.read() as other:
            assert driver_of(other) is not first
    async with pool.read() as tx:
        assert not tx.in_transaction()
        again = driver_of(tx)
    async with pool.read() as tx:
        assert driver_of(tx) is again


async def test_what_is_given_back_after_the_close_is_closed(pool: Database) -> None:
    async with pool.read() as tx:
        await READ.first(tx, OF)
        await pool.close()
    assert tx.closed
    assert pool.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


async def _count_in_postgres(pool: Database, query: str = "%") -> int:
    """Connections to the database, other than the one that asks."""
    other = await asyncpg.connect(dsn(pool.url))
    try:
        found: int = await other.fetchval(OTHERS, query)
        return found
    finally:
        await other.close()


async def _wait_until_postgres_has(pool: Database, connections: int, query: str = "%") -> None:
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while await _count_in_postgres(pool, query) != connections:  # noqa: ASYNC110  (its own event)
            await asyncio.sleep(0.02)


async def test_what_is_given_back_after_the_close_leaves_no_session(pool: Database) -> None:
    if pool.is_sqlite:
        return
    async with pool.read() as tx:
        await READ.first(tx, OF)
        await pool.close()
    await _wait_until_postgres_has(pool, 0)


async def test_a_connection_whose_opening_is_cancelled_is_closed(
    pool: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pool.is_sqlite:
        return
    monkeypatch.setattr(liveness, "SESSION_SETTINGS", SLEEPS)
    opening = asyncio.ensure_future(_look(pool))
    await _wait_until_postgres_has(pool, 1, SLEEPS)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    await _wait_until_postgres_has(pool, 0)


async def test_a_file_whose_opening_is_cancelled_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, before = threading.Event(), threading.Event(), {*threading.enumerate()}

    def open_slowly(path: str) -> sqlite3.Connection:
        began.set()
        go_on.wait(WAIT_SECONDS_MAX)
        return open_sqlite(path)

    monkeypatch.setattr(database, "open_sqlite", open_slowly)
    opening = asyncio.ensure_future(database.connect(str(tmp_path / "slow.sqlite3")))
    await asyncio.to_thread(began.wait, WAIT_SECONDS_MAX)
    opening.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    # The thread would tell of the file when nobody is there any more to hear of it.
    assert not opening.done()
    go_on.set()
    await asyncio.wait([opening])
    assert opening.cancelled()
    for each in {*threading.enumerate()} - before:
        if "connection" in each.name:
            each.join(WAIT_SECONDS_MAX)
            assert not each.is_alive()


async def test_messages_to_others_share_one_connection(central: Database) -> None:
    if central.is_sqlite:
        return
    channel = NotifyChannel(central, "tests")
    await asyncio.gather(*(channel.send(str(number)) for number in range(10)))
    assert await _count_in_postgres(central) == 1
    await channel.close()
    await _wait_until_postgres_has(central, 0)


async def test_a_failed_write_is_undone_before_its_connection_is_used_again(pool: Database) -> None:
    async with pool.transaction() as tx:
        await OPEN.add(tx, [WALLET])
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            async with pool.transaction() as tx:
                await ADD.first(tx, OF)
                raise RuntimeError
    async with pool.read() as tx:
        assert await READ.first(tx, OF) == {"balance": 0}


async def test_a_lost_connection_keeps_no_prepared_statements(central: Database) -> None:
    """Connections are in reference cycles, and exempted objects are collected once an hour."""
    if central.is_sqlite:
        pytest.skip("SQLite's driver has no prepared statements of its own")
    query = f"SELECT '{uuid.uuid4()}'"

    def kept() -> int:
        objects = (one for one in gc.get_objects() if type(one) is PreparedByAsyncpg)
        return sum(one._query == query for one in objects)

    async with central.read() as tx:
        await tx.execute(text(query))
    gc.collect()
    gc.disable()
    try:
        assert kept() == 1
        with contextlib.suppress(Unavailable):
            async with central.read() as tx:
                await tx.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        await central.close()
        assert kept() == 0
    finally:
        gc.enable()


async def test_a_connection_keeps_a_limited_number_of_prepared_statements(
    central: Database,
) -> None:
    if central.is_sqlite:
        pytest.skip("SQLite's driver has no prepared statements of its own")
    async with central.read() as tx:
        for number in range(2 * STATEMENTS_MAX):
            await tx.execute(text(f"SELECT {number}"))
        counted = text("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''")
        assert (await tx.execute(counted)).scalar_one() <= 1.5 * STATEMENTS_MAX + 1
