"""Names inside of SQLAlchemy and aiosqlite that we use: a version without them fails here, by name."""

import sqlite3
import threading
from contextlib import AsyncExitStack

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, bindparam, insert, select, update
from sqlalchemy.dialects.postgresql.asyncpg import dialect as postgres
from sqlalchemy.dialects.sqlite.aiosqlite import dialect as sqlite
from sqlalchemy.engine import Dialect

from comfyfleet.server.db import Database
from comfyfleet.server.db.database import connect, driver_of

THINGS = Table(
    "things",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("count", Integer, default=lambda: 1, onupdate=lambda: 2),
)
DIALECTS = [
    pytest.param(sqlite(), id="sqlite"),
    pytest.param(postgres(), id="postgres"),  # type: ignore[no-untyped-call]
]


async def test_aiosqlite_runs_calls_on_its_connection_in_a_thread_of_its_own() -> None:
    async with AsyncExitStack() as stack:
        connection = await connect(":memory:")
        stack.push_async_callback(connection.close)
        assert isinstance(connection._conn, sqlite3.Connection)
        assert isinstance(connection._thread, threading.Thread)
        assert connection._thread.daemon
        assert await connection._execute(threading.current_thread) is connection._thread  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_sqlalchemy_compiles_tells_the_order_of_its_values(dialect: Dialect) -> None:
    built = select(THINGS).where(
        THINGS.c.count == bindparam("of_count"), THINGS.c.id > bindparam("after", 7)
    )
    compiled = built.compile(dialect=dialect)
    assert compiled.positiontup == ["of_count", "after"]
    binds = compiled.binds
    assert (binds["of_count"].required, binds["after"].required) == (True, False)
    assert binds["after"].value == 7


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_sqlalchemy_compiles_tells_what_is_not_fixed(dialect: Dialect) -> None:
    listed = select(THINGS).where(THINGS.c.id.in_([1, 2])).compile(dialect=dialect)
    assert listed.post_compile_params
    added = insert(THINGS).compile(dialect=dialect, column_keys=["id"])
    assert added.insert_prefetch
    changed = update(THINGS).values(id=bindparam("to_id")).compile(dialect=dialect)
    assert changed.update_prefetch


async def test_sqlalchemy_lends_the_drivers_own_connection(pool: Database) -> None:
    async with pool.read() as tx:
        driver = driver_of(tx)
        if pool.is_sqlite:
            assert await driver.fetch("SELECT 1", ()) == [(1,)]
        else:
            assert [tuple(row) for row in await driver.fetch("SELECT 1")] == [(1,)]
            assert (driver.is_closed(), driver.is_in_transaction()) == (False, False)
