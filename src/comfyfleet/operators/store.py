"""The operators' only SQL."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, or_, select, update

from comfyfleet.db import Tx
from comfyfleet.db.central import operators
from comfyfleet.db.dialect import insert_if_new
from comfyfleet.operators.model import NOTED_EVERY, Operator, Role

LISTED_MAX = 1000


async def add(tx: Tx, row: Mapping[str, Any]) -> Operator | None:
    """None: the name is taken."""
    added = await tx.execute(insert_if_new(tx, operators, [row]).returning(operators))
    found = added.first()
    return _operator(found) if found else None


async def by_hash(tx: Tx, key_hash: str) -> Operator | None:
    found = (await tx.execute(select(operators).where(operators.c.key_hash == key_hash))).first()
    return _operator(found) if found else None


async def all_of(tx: Tx) -> list[Operator]:
    query = select(operators).order_by(operators.c.created_at, operators.c.id).limit(LISTED_MAX)
    return [_operator(row) for row in await tx.execute(query)]


async def revoke(tx: Tx, name: str, now: datetime) -> None:
    good = update(operators).where(operators.c.name == name, operators.c.revoked_at.is_(None))
    await tx.execute(good.values(revoked_at=now))


async def by_name(tx: Tx, name: str) -> Operator | None:
    found = (await tx.execute(select(operators).where(operators.c.name == name))).first()
    return _operator(found) if found else None


async def note_use(tx: Tx, operator_id: UUID, now: datetime) -> None:
    used = operators.c.last_used_at
    await tx.execute(
        update(operators)
        .where(operators.c.id == operator_id, or_(used.is_(None), used <= now - NOTED_EVERY))
        .values(last_used_at=now)
    )


def _operator(row: Row[Any]) -> Operator:
    values = {name: value for name, value in row._mapping.items() if name != "key_hash"}
    return Operator(**{**values, "role": Role(values["role"])})
