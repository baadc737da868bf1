"""The tenants' only SQL."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import Row, bindparam, func, insert, select, update

from comfyfleet.db import Tx
from comfyfleet.db.central import tenants
from comfyfleet.db.dialect import insert_if_new
from comfyfleet.db.statement import Statement
from comfyfleet.tenants.model import Tenant


async def add(tx: Tx, row: Mapping[str, Any]) -> Tenant:
    found = await tx.execute(insert(tenants).values(dict(row)).returning(tenants))
    return _tenant(found.one())


async def add_if_new(tx: Tx, row: Mapping[str, Any]) -> None:
    await tx.execute(insert_if_new(tx, tenants, [row]))


_GET = Statement(lambda tx: select(tenants).where(tenants.c.id == bindparam("of_id")))


async def get(tx: Tx, tenant_id: UUID) -> Tenant | None:
    found = await _GET.first(tx, {"of_id": tenant_id})
    return Tenant(**found) if found else None


async def all_of(tx: Tx, *, pool: str | None) -> list[Tenant]:
    query = select(tenants).order_by(tenants.c.created_at, tenants.c.id)
    if pool is not None:
        query = query.where(tenants.c.pool == pool)
    return [_tenant(row) for row in await tx.execute(query)]


async def change(tx: Tx, tenant_id: UUID, values: Mapping[str, Any]) -> Tenant | None:
    statement = update(tenants).where(tenants.c.id == tenant_id).values(dict(values))
    found = (await tx.execute(statement.returning(tenants))).first()
    return _tenant(found) if found else None


async def counts_by_pool(tx: Tx) -> dict[str, int]:
    query = select(tenants.c.pool, func.count().label("tenants")).group_by(tenants.c.pool)
    return {row.pool: row.tenants for row in await tx.execute(query)}


def _tenant(row: Row[Any]) -> Tenant:
    return Tenant(**row._mapping)
