"""The API keys' only SQL."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, bindparam, delete, func, insert, or_, select, update

from comfyfleet.db import Tx
from comfyfleet.db.central import api_keys, tenants
from comfyfleet.db.statement import Statement, in_parts
from comfyfleet.tenants.keys.model import NOTED_EVERY, ApiKey, Scope
from comfyfleet.tenants.model import Tenant


async def add(tx: Tx, row: Mapping[str, Any]) -> ApiKey:
    found = await tx.execute(insert(api_keys).values(dict(row)).returning(api_keys))
    return _key(found.one())


_COLUMNS, _OF_OWNER = ([each.name for each in table.c] for table in (api_keys, tenants))
_BY_HASH = Statement(
    lambda tx: (
        select(*api_keys.c, *(each.label(f"owner_{each.name}") for each in tenants.c))
        .join(tenants, tenants.c.id == api_keys.c.tenant_id)
        .where(api_keys.c.key_hash == bindparam("of_hash"))
    )
)


async def by_hash(tx: Tx, key_hash: str) -> tuple[ApiKey, Tenant, str] | None:
    """The key, its tenant, and the hash that it is kept as."""
    found = await _BY_HASH.tuples(tx, {"of_hash": key_hash})
    if not found:
        return None
    mine, owner = in_parts(found[0], _COLUMNS, _OF_OWNER)
    return _key_of(mine), Tenant(**owner), mine["key_hash"]


async def of_user(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[ApiKey]:
    query = (
        select(api_keys)
        .where(api_keys.c.tenant_id == tenant_id, api_keys.c.user_id == user_id)
        .order_by(api_keys.c.created_at.desc(), api_keys.c.id)
        .limit(limit)
    )
    return [_key(row) for row in await tx.execute(query)]


async def count_good(tx: Tx, tenant_id: UUID, user_id: UUID, now: datetime) -> int:
    query = select(func.count()).where(
        api_keys.c.tenant_id == tenant_id,
        api_keys.c.user_id == user_id,
        api_keys.c.revoked_at.is_(None),
        or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > now),
    )
    return await tx.scalar(query) or 0


async def get(tx: Tx, tenant_id: UUID, user_id: UUID, key_id: UUID) -> ApiKey | None:
    query = select(api_keys).where(
        api_keys.c.tenant_id == tenant_id,
        api_keys.c.user_id == user_id,
        api_keys.c.id == key_id,
    )
    found = (await tx.execute(query)).first()
    return _key(found) if found else None


async def revoke(tx: Tx, tenant_id: UUID, user_id: UUID, key_id: UUID | None, now: datetime) -> int:
    """How many were good until now; all of the user's if none is named."""
    statement = update(api_keys).where(
        api_keys.c.tenant_id == tenant_id,
        api_keys.c.user_id == user_id,
        api_keys.c.revoked_at.is_(None),
    )
    if key_id is not None:
        statement = statement.where(api_keys.c.id == key_id)
    ended = await tx.execute(statement.values(revoked_at=now).returning(api_keys.c.id))
    return len(ended.all())


async def remove_all_of(tx: Tx, tenant_id: UUID) -> int:
    statement = delete(api_keys).where(api_keys.c.tenant_id == tenant_id)
    return len((await tx.execute(statement.returning(api_keys.c.id))).all())


async def note_use(tx: Tx, key_id: UUID, now: datetime) -> None:
    used = api_keys.c.last_used_at
    await tx.execute(
        update(api_keys)
        .where(api_keys.c.id == key_id, or_(used.is_(None), used <= now - NOTED_EVERY))
        .values(last_used_at=now)
    )


def _key(row: Row[Any]) -> ApiKey:
    return _key_of(row._mapping)


def _key_of(row: Mapping[Any, Any]) -> ApiKey:
    values = {name: value for name, value in row.items() if name != "key_hash"}
    return ApiKey(**{**values, "scopes": frozenset(Scope(each) for each in values["scopes"])})
