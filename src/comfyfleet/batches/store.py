"""The batches' only SQL."""

from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Row, and_, select, update

from comfyfleet.batches.model import Batch
from comfyfleet.db import Tx
from comfyfleet.db.dialect import insert_if_new, locked
from comfyfleet.db.tenant import batches


async def add(tx: Tx, batch: Batch) -> bool:
    """False: there is one of that idempotency key."""
    found = await tx.execute(insert_if_new(tx, batches, [asdict(batch)]).returning(batches.c.id))
    return found.first() is not None


async def by_key(tx: Tx, tenant_id: UUID, user_id: UUID, idempotency_key: str) -> Batch | None:
    query = select(batches).where(
        batches.c.tenant_id == tenant_id,
        batches.c.user_id == user_id,
        batches.c.idempotency_key == idempotency_key,
    )
    found = (await tx.execute(query)).first()
    return _batch(found) if found else None


async def get(tx: Tx, tenant_id: UUID, user_id: UUID, batch_id: UUID) -> Batch | None:
    query = select(batches).where(_is(tenant_id, user_id, batch_id))
    found = (await tx.execute(query)).first()
    return _batch(found) if found else None


async def lock(tx: Tx, tenant_id: UUID, batch_id: UUID) -> None:
    query = select(batches.c.id).where(batches.c.tenant_id == tenant_id, batches.c.id == batch_id)
    await tx.execute(locked(tx, query))


async def cancel(tx: Tx, tenant_id: UUID, user_id: UUID, batch_id: UUID, now: datetime) -> bool:
    """False: it is not there, or was cancelled before."""
    statement = (
        update(batches)
        .where(_is(tenant_id, user_id, batch_id), batches.c.cancelled_at.is_(None))
        .values(cancelled_at=now)
        .returning(batches.c.id)
    )
    return (await tx.execute(statement)).first() is not None


def _is(tenant_id: UUID, user_id: UUID, batch_id: UUID) -> ColumnElement[bool]:
    return and_(
        batches.c.tenant_id == tenant_id, batches.c.user_id == user_id, batches.c.id == batch_id
    )


def _batch(row: Row[Any]) -> Batch:
    return Batch(**row._mapping)
