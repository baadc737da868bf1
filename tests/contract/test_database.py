"""What every database of ours does, whatever it is."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import func, insert, select
from tests.support.databases.factory import Databases

from comfyfleet.errors import InvalidInput, Refused
from comfyfleet.server.db import Database
from comfyfleet.server.db.central_tables import tenants
from comfyfleet.server.db.schema import require_newest_schema, upgrade_schema

NOW = datetime(2026, 11, 15, 8, 30, 0, 123456, tzinfo=UTC)


def a_tenant(**changes: object) -> dict[str, object]:
    return {"id": uuid.uuid4(), "name": "Ada", "pool": "main", "created_at": NOW, **changes}


async def test_a_moment_comes_back_as_it_was_in_utc(central: Database) -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=5)))
    async with central.transaction() as tx:
        await tx.execute(insert(tenants).values(a_tenant(created_at=elsewhere)))
        kept = await tx.scalar(select(tenants.c.created_at))
    assert kept == NOW
    assert kept.utcoffset() == timedelta(0)


async def test_what_fails_leaves_nothing(central: Database) -> None:
    async def write_and_fail() -> None:
        async with central.transaction() as tx:
            await tx.execute(insert(tenants).values(a_tenant()))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await write_and_fail()
    async with central.read() as tx:
        assert await tx.scalar(select(func.count()).select_from(tenants)) == 0


async def test_a_number_that_no_column_holds_is_refused_as_the_callers(central: Database) -> None:
    async def write() -> None:
        async with central.transaction() as tx:
            await tx.execute(insert(tenants).values(a_tenant(max_queued=2**70)))

    with pytest.raises(InvalidInput, match="too large"):
        await write()
    async with central.read() as tx:
        assert await tx.scalar(select(func.count()).select_from(tenants)) == 0


async def test_thirty_writers_at_once_all_get_their_turn(central: Database) -> None:
    async def write() -> None:
        async with central.transaction() as tx:
            count = await tx.scalar(select(func.count()).select_from(tenants))
            await asyncio.sleep(0.001)
            await tx.execute(insert(tenants).values(a_tenant(name=f"tenant {count}")))

    await asyncio.gather(*(write() for _ in range(30)))
    async with central.read() as tx:
        assert await tx.scalar(select(func.count()).select_from(tenants)) == 30


async def test_an_upgrade_can_be_repeated(central: Database) -> None:
    await upgrade_schema(central, "central")
    await require_newest_schema(central, "central")


async def test_a_schema_that_is_missing_is_named(databases: Databases, pool: Database) -> None:
    with pytest.raises(Refused, match="central database has schema none") as refused:
        await require_newest_schema(pool, "central")
    assert refused.value.details["hint"] == "comfyfleet db upgrade"
