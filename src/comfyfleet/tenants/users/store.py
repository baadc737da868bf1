"""The users' only SQL."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import Row, and_, or_, select, update

from comfyfleet.db import Tx
from comfyfleet.db.dialect import insert_if_new
from comfyfleet.db.tenant import users
from comfyfleet.tenants.users.model import User


async def add(tx: Tx, row: Mapping[str, Any]) -> User | None:
    """None: the tenant has a user of that address or id."""
    found = (await tx.execute(insert_if_new(tx, users, [row]).returning(users))).first()
    return _user(found) if found else None


async def get(tx: Tx, tenant_id: UUID, user_id: UUID) -> User | None:
    query = select(users).where(users.c.tenant_id == tenant_id, users.c.id == user_id)
    found = (await tx.execute(query)).first()
    return _user(found) if found else None


async def page(tx: Tx, tenant_id: UUID, *, after: User | None, limit: int) -> list[User]:
    query = (
        select(users)
        .where(users.c.tenant_id == tenant_id)
        .order_by(users.c.created_at, users.c.id)
        .limit(limit)
    )
    if after is not None:
        at = users.c.created_at
        later = or_(at > after.created_at, and_(at == after.created_at, users.c.id > after.id))
        query = query.where(later)
    return [_user(row) for row in await tx.execute(query)]


async def change(tx: Tx, tenant_id: UUID, user_id: UUID, values: Mapping[str, Any]) -> User | None:
    statement = (
        update(users)
        .where(users.c.tenant_id == tenant_id, users.c.id == user_id)
        .values(dict(values))
        .returning(users)
    )
    found = (await tx.execute(statement)).first()
    return _user(found) if found else None


def _user(row: Row[Any]) -> User:
    return User(**row._mapping)
