"""Tenants, on every database."""

from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

from comfyfleet.errors import InvalidInput, NotFound, Refused
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Tenant

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)


async def make(tx: Tx, name: str = "Ada", pool: str = "main") -> Tenant:
    return await tenants.create_tenant(tx, tenant_id=uuid4(), name=name, pool=pool, now=NOW)


async def test_a_tenant_is_found_by_its_id(central: Database) -> None:
    async with central.transaction() as tx:
        made = await make(tx, " Ada ")
        assert await tenants.get_tenant(tx, made.id) == made
        assert await tenants.list_tenants(tx) == [made]
    assert (made.name, made.pool, made.max_queued) == ("Ada", "main", None)


async def test_an_unknown_tenant_is_not_found(central: Database) -> None:
    async with central.read() as tx:
        with pytest.raises(NotFound):
            await tenants.get_tenant(tx, UUID(int=1))


async def test_the_least_full_pool_is_chosen(central: Database) -> None:
    async with central.transaction() as tx:
        for pool in ("a", "a", "b", "gone"):
            await make(tx, pool=pool)
        assert await tenants.emptiest_pool(tx, ["a", "b"]) == "b"
        assert await tenants.emptiest_pool(tx, ["a", "b", "c"]) == "c"
        assert await tenants.emptiest_pool(tx, ["z", "y"]) == "y"
        with pytest.raises(Refused):
            await tenants.emptiest_pool(tx, [])


async def test_a_priority_is_clamped_to_the_tenants_range(central: Database) -> None:
    async with central.transaction() as tx:
        made = await make(tx)
        changed = await tenants.set_limits(
            tx, made.id, min_priority=-2, max_priority=3, max_queued=7
        )
        assert await tenants.get_tenant(tx, made.id) == changed
    assert [changed.clamped(each) for each in (-9, -2, 0, 3, 9)] == [-2, -2, 0, 3, 3]
    assert changed.max_queued == 7
    assert made.clamped(1000) == 10


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"min_priority": 2, "max_priority": 1, "max_queued": None}, "min_priority"),
        ({"min_priority": 0, "max_priority": 1, "max_queued": -1}, "max_queued"),
    ],
)
async def test_limits_that_make_no_sense_are_refused(
    central: Database, limits: dict[str, int | None], field: str
) -> None:
    async with central.transaction() as tx:
        made = await make(tx)
        with pytest.raises(InvalidInput) as refused:
            await tenants.set_limits(tx, made.id, **limits)  # type: ignore[arg-type]
        assert await tenants.get_tenant(tx, made.id) == made
    assert refused.value.details["field"] == field


async def test_a_tenant_needs_a_name(central: Database) -> None:
    async with central.transaction() as tx:
        with pytest.raises(InvalidInput, match="name"):
            await make(tx, "  ")
