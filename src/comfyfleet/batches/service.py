"""Batches as rows; their jobs come through the one door like all others."""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from comfyfleet.batches import store
from comfyfleet.batches.model import Batch, check_total
from comfyfleet.db import Tx
from comfyfleet.kernel.errors import Conflict, NotFound


class Created(NamedTuple):
    batch: Batch
    is_new: bool


async def create(tx: Tx, batch: Batch) -> Created:
    """The same key again is the same batch, and with another body a Conflict."""
    check_total(batch.total)
    if await store.add(tx, batch):
        return Created(batch, is_new=True)
    found = await same_asked_before(
        tx, batch.tenant_id, batch.user_id, batch.idempotency_key or "", batch.request_hash
    )
    if found is None:
        raise Conflict("the idempotency key was used for another request", field="idempotency_key")
    return Created(found, is_new=False)


async def same_asked_before(
    tx: Tx, tenant_id: UUID, user_id: UUID, idempotency_key: str, request_hash: str
) -> Batch | None:
    """The batch of an earlier request with this key; another request is a conflict."""
    found = await store.by_key(tx, tenant_id, user_id, idempotency_key)
    if found and found.request_hash != request_hash:
        raise Conflict("the idempotency key was used for another request", field="idempotency_key")
    return found


async def lock(tx: Tx, tenant_id: UUID, batch_id: UUID) -> None:
    """Until the transaction ends, nobody else admits jobs of it."""
    await store.lock(tx, tenant_id, batch_id)


async def get(tx: Tx, tenant_id: UUID, user_id: UUID, batch_id: UUID) -> Batch:
    found = await store.get(tx, tenant_id, user_id, batch_id)
    if found is None:
        raise NotFound(f"there is no batch {batch_id}")
    return found


async def cancel(tx: Tx, tenant_id: UUID, user_id: UUID, batch_id: UUID, *, now: datetime) -> Batch:
    """Marks it; the caller cancels its jobs. A second time changes nothing."""
    await store.cancel(tx, tenant_id, user_id, batch_id, now)
    return await get(tx, tenant_id, user_id, batch_id)
