"""API keys, on every database."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select

from comfyfleet.errors import Forbidden, InvalidInput, LimitExceeded, NotFound, Unauthenticated
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.central_tables import api_keys
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import (
    KEYS_PER_USER_MAX,
    ApiKey,
    NewApiKey,
    Scope,
    Tenant,
    new_api_key,
)

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
USER, OTHER = UUID(int=1), UUID(int=2)


async def a_tenant(tx: Tx) -> Tenant:
    return await tenants.create_tenant(tx, tenant_id=uuid4(), name="Ada", pool="main", now=NOW)


async def make(
    tx: Tx, tenant: Tenant, key: str | None = None, *, expires_at: datetime | None = None
) -> ApiKey:
    new = NewApiKey(
        uuid4(), key or new_api_key(), tenant.id, USER, name="laptop", expires_at=expires_at
    )
    return await tenants.create_key(tx, new, now=NOW)


async def test_a_key_opens_its_users_door(central: Database) -> None:
    key = new_api_key()
    assert re.fullmatch(r"cf_[0-9a-f]{64}", key)
    async with central.transaction() as tx:
        tenant = await a_tenant(tx)
        made = await make(tx, tenant, key)
        caller = await tenants.authenticate_key(tx, key, now=NOW)
    assert (caller.key, caller.tenant, caller.user_id) == (made, tenant, USER)
    assert key.startswith(made.prefix)
    assert len(made.prefix) == 11


async def test_the_key_itself_is_nowhere_in_the_database(central: Database) -> None:
    key = new_api_key()
    async with central.transaction() as tx:
        await make(tx, await a_tenant(tx), key)
        [row] = (await tx.execute(select(api_keys))).all()
    assert key not in repr(row)


@pytest.mark.parametrize("key", ["", "cf_", "cf_" + "0" * 64, "päss"])
async def test_what_was_never_given_out_opens_nothing(central: Database, key: str) -> None:
    async with central.transaction() as tx:
        await make(tx, await a_tenant(tx))
        with pytest.raises(Unauthenticated):
            await tenants.authenticate_key(tx, key, now=NOW)


async def test_an_expired_key_opens_nothing_from_that_moment_on(central: Database) -> None:
    key, end = new_api_key(), NOW + timedelta(hours=1)
    async with central.transaction() as tx:
        tenant = await a_tenant(tx)
        await make(tx, tenant, key, expires_at=end)
        await tenants.authenticate_key(tx, key, now=end - timedelta(seconds=1))
        with pytest.raises(Unauthenticated, match="expired"):
            await tenants.authenticate_key(tx, key, now=end)
        with pytest.raises(InvalidInput):
            await make(tx, tenant, expires_at=NOW)


async def test_a_revoked_key_opens_nothing(central: Database) -> None:
    key = new_api_key()
    async with central.transaction() as tx:
        tenant = await a_tenant(tx)
        made = await make(tx, tenant, key)
        revoked = await tenants.revoke_key(tx, tenant.id, USER, made.id, now=NOW)
        later = NOW + timedelta(days=1)
        assert await tenants.revoke_key(tx, tenant.id, USER, made.id, now=later) == revoked
        with pytest.raises(Unauthenticated, match="revoked"):
            await tenants.authenticate_key(tx, key, now=NOW)
    assert revoked.revoked_at == NOW


async def test_nobody_revokes_anothers_key(central: Database) -> None:
    async with central.transaction() as tx:
        tenant, stranger = await a_tenant(tx), await a_tenant(tx)
        made = await make(tx, tenant)
        for tenant_id, user_id in ((stranger.id, USER), (tenant.id, OTHER)):
            with pytest.raises(NotFound):
                await tenants.revoke_key(tx, tenant_id, user_id, made.id, now=NOW)
        assert await tenants.list_keys(tx, tenant.id, USER) == [made]
        assert await tenants.list_keys(tx, stranger.id, USER) == []


async def test_all_keys_of_a_user_end_together(central: Database) -> None:
    async with central.transaction() as tx:
        tenant = await a_tenant(tx)
        for _ in range(3):
            await make(tx, tenant)
        assert await tenants.revoke_all_keys(tx, tenant.id, USER, now=NOW) == 3
        assert await tenants.revoke_all_keys(tx, tenant.id, USER, now=NOW) == 0
        assert all(each.revoked_at for each in await tenants.list_keys(tx, tenant.id, USER))


async def test_a_use_is_noted_once_a_minute(central: Database) -> None:
    async with central.transaction() as tx:
        tenant = await a_tenant(tx)
        made = await make(tx, tenant)
        for seconds in (0, 59, 60, 61):
            await tenants.note_key_use(tx, made, now=NOW + timedelta(seconds=seconds))
        [used] = await tenants.list_keys(tx, tenant.id, USER)
    assert not made.is_use_recorded(NOW)
    assert used.last_used_at == NOW + timedelta(seconds=60)
    assert used.is_use_recorded(NOW + timedelta(seconds=119))


async def test_a_key_does_only_what_its_scopes_say(central: Database) -> None:
    key = new_api_key()
    async with central.transaction() as tx:
        tenant = await a_tenant(tx)
        reader = NewApiKey(uuid4(), key, tenant.id, USER, name="reader", scopes=["read"])
        await tenants.create_key(tx, reader, now=NOW)
        caller = await tenants.authenticate_key(tx, key, now=NOW)
        for scopes in (["all"], []):
            with pytest.raises(InvalidInput):
                await tenants.create_key(tx, replace(reader, scopes=scopes), now=NOW)
    caller.require(Scope.READ)
    with pytest.raises(Forbidden):
        caller.require(Scope.WRITE)


async def test_a_user_has_so_many_keys_and_no_more(central: Database) -> None:
    async with central.transaction() as tx:
        tenant = await a_tenant(tx)
        for _ in range(KEYS_PER_USER_MAX):
            made = await make(tx, tenant)
        with pytest.raises(LimitExceeded):
            await make(tx, tenant)
        await tenants.revoke_key(tx, tenant.id, USER, made.id, now=NOW)
        await make(tx, tenant)
