"""Users of a tenant, on every database."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from comfyfleet.errors import Conflict, InvalidInput, NotFound
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import User

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
TENANT, OTHER = UUID(int=1), UUID(int=2)


async def make(tx: Tx, email: str | None = None, *, at: datetime = NOW) -> User:
    return await tenants.create_user(
        tx, user_id=uuid4(), tenant_id=TENANT, email=email, name=" Ada ", now=at
    )


async def test_a_user_is_found_by_tenant_and_id_only(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = await make(tx, " Ada@Example.com ")
        assert await tenants.get_user(tx, TENANT, made.id) == made
        with pytest.raises(NotFound):
            await tenants.get_user(tx, OTHER, made.id)
    assert (made.email, made.name, made.is_active) == ("ada@example.com", "Ada", True)


async def test_an_address_is_there_once_in_a_tenant_even_at_once(pool: Database) -> None:
    async def attempt() -> bool:
        try:
            async with pool.transaction() as tx:
                await make(tx, "ada@example.com")
        except Conflict:
            return False
        return True

    assert sum(await asyncio.gather(*(attempt() for _ in range(8)))) == 1
    async with pool.transaction() as tx:
        await tenants.create_user(
            tx, user_id=uuid4(), tenant_id=OTHER, email="ada@example.com", now=NOW
        )


async def test_any_number_of_users_may_have_no_address(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = [await make(tx, at=NOW + timedelta(seconds=number // 2)) for number in range(5)]
        first = await tenants.list_users(tx, TENANT, limit=2)
        rest = await tenants.list_users(tx, TENANT, after_id=first[-1].id)
    assert sorted(each.id for each in first + rest) == sorted(each.id for each in made)
    assert len(first) == 2


async def test_a_user_can_be_deactivated(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = await make(tx)
        changed = await tenants.set_user_active(tx, TENANT, made.id, is_active=False)
        assert await tenants.get_user(tx, TENANT, made.id) == changed
        with pytest.raises(NotFound):
            await tenants.set_user_active(tx, OTHER, made.id, is_active=True)
    assert not changed.is_active


@pytest.mark.parametrize("email", ["", "ada", "@example.com", "ada@", "a b@c.d", "a" * 330 + "@b"])
async def test_what_is_no_address_is_refused(pool: Database, email: str) -> None:
    async with pool.transaction() as tx:
        with pytest.raises(InvalidInput):
            await make(tx, email)
