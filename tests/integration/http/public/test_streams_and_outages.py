"""A stream of events whose database goes away ends; it does not break."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator

import pytest
from tests.support.databases.factory import Databases

from comfyfleet.errors import Unavailable
from comfyfleet.server.db.database import open_database
from comfyfleet.server.http.streams import run_shielded, until_unavailable


async def test_a_stream_that_loses_its_database_ends_without_a_traceback(
    postgres_databases: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    database = open_database(await postgres_databases.url("tenant"))

    async def lines() -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        async with database.read() as tx:
            await tx.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
        yield "never"

    with caplog.at_level(logging.INFO):
        assert [each async for each in until_unavailable(lines())] == ["retry: 1000\n\n"]
    await database.close()
    assert [each.exc_info for each in caplog.records] == [None]
    assert "is unavailable" in caplog.text


async def test_an_error_after_the_reader_has_gone_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    has_begun, is_lost = asyncio.Event(), asyncio.Event()

    async def look() -> None:
        has_begun.set()
        await is_lost.wait()
        raise Unavailable("the connection to the database was lost")

    reading = asyncio.create_task(run_shielded(look()))
    await has_begun.wait()
    (looking,) = (task for task in asyncio.all_tasks() if "look" in repr(task.get_coro()))
    reading.cancel()
    await asyncio.wait({reading})
    is_lost.set()
    await asyncio.wait({looking})
    del looking, reading
    gc.collect()
    assert caplog.records == []
