"""However many ask for a database that is away, its outage is told in two lines."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from tests.support.databases.factory import Databases

from comfyfleet.errors import StoreFull, Unavailable, is_logged, said_to_customers
from comfyfleet.server.db.database import Database, Pools, open_database
from comfyfleet.server.db.outages import OutageLog, log_failure
from comfyfleet.server.http.errors import response_to_error
from comfyfleet.server.storage.outage import StoreOutage


@pytest.fixture
async def database(postgres_databases: Databases) -> AsyncIterator[Database]:
    database = open_database(await postgres_databases.url("central"))
    yield database
    await database.close()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


async def test_an_outage_is_told_once_and_its_end_once(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with pytest.raises(Unavailable) as raised:
            async with database.read() as tx:
                await tx.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
        assert is_logged(raised.value)
    for _ in range(2):
        async with database.read() as tx:
            await tx.exec_driver_sql("SELECT 1")
    await database.close()  # it would else be logged a moment later
    told = warnings(caplog)
    assert ["is unavailable" in each for each in told] == [True, False]
    assert told[1].endswith("is available again")


async def test_a_late_loss_does_not_begin_another_outage(caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog("x", settle_seconds=60)
    outage.note_loss(Unavailable("one connection"))
    outage.note_success()
    assert not outage.is_away
    outage.note_loss(Unavailable("another connection"))
    outage.note_success()
    assert outage.seconds_away > 0
    assert not outage.has_ended
    outage.close()
    assert outage.has_ended
    assert warnings(caplog) == [
        "database x is unavailable: one connection",
        "database x is available again",
    ]


async def test_an_outage_names_its_part_and_customers_no_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    database = open_database("postgresql://user:secret@db.example/b")
    pools = Pools({"b": database})
    error = Unavailable("the database can't be reached: [Errno 111] ('10.0.0.1', 5432)")
    pools["b"].outages.note_loss(error)
    await pools.close()
    assert said_to_customers(error) == (
        "the database of pool b can't be reached at the moment; try again soon"
    )
    assert json.loads(bytes(response_to_error(error, "/api/admin/x").body))["error"]["message"] == (
        f"the database of pool b: {error.message}"
    )
    [line] = warnings(caplog)
    assert line.startswith("the database of pool b (postgresql+asyncpg://user:***@db.example/b) is")


def test_an_outage_of_the_store_names_the_store() -> None:
    error = Unavailable("s3://bucket/key: S3 answered InternalError: no")
    StoreOutage("the bucket bucket").note_failure(error)
    assert said_to_customers(error) == (
        "the object store can't be reached at the moment; try again soon"
    )


def test_a_bug_has_a_traceback_and_an_outage_none(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test")
    group = ExceptionGroup("two", [Unavailable("away"), ExceptionGroup("one", [Unavailable("b")])])
    log_failure(logger, group, "the relay %s broke off", "a")
    log_failure(logger, ValueError("bug"), "the relay %s broke off", "b")
    mixed = ExceptionGroup("two", [Unavailable("away"), ValueError("bug")])
    log_failure(logger, mixed, "the relay %s broke off", "c")
    assert [(each.levelname, each.exc_info is not None) for each in caplog.records] == [
        ("WARNING", False),
        ("ERROR", True),
        ("ERROR", True),
    ]


async def test_many_who_can_not_reach_it_are_one_line(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    away = open_database(f"postgresql://nobody:secret@127.0.0.1:{free_port}/none")

    async def look() -> None:
        async with away.read():
            pass

    found = await asyncio.gather(*(look() for _ in range(20)), return_exceptions=True)
    await away.close()
    assert all(isinstance(each, Unavailable) and is_logged(each) for each in found)
    (line,) = warnings(caplog)
    assert "is unavailable" in line
    assert "secret" not in line


async def test_the_outage_of_one_is_not_anothers(
    database: Database, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    away = open_database(f"postgresql://nobody@127.0.0.1:{free_port}/none")
    with pytest.raises(Unavailable):
        async with database.transaction(), away.read():
            pass
    await away.close()
    (line,) = warnings(caplog)
    assert "/none is unavailable" in line


async def test_a_full_disk_of_a_database_is_no_bug(
    sqlite_databases: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    async def fill(database: Database) -> None:
        async with database.transaction() as tx:
            await tx.execute(text("PRAGMA max_page_count = 1"))  # no more than there are
            await tx.execute(text("CREATE TABLE filler (data BLOB)"))
            await tx.execute(text("INSERT INTO filler VALUES (zeroblob(10000000))"))

    database = open_database(await sqlite_databases.url("central"))
    with pytest.raises(StoreFull) as caught:
        await fill(database)
    await database.close()
    assert response_to_error(caught.value, "/userdata/x").status_code == 507
    assert warnings(caplog)[0].endswith("is unavailable: its disk is full")
