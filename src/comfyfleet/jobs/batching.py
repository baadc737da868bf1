"""A batch: one effect, up to a thousand sets of properties, paid at once, admitted bit by bit."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID, uuid5

from comfyfleet.batches import service as batches
from comfyfleet.batches.decide import rolled_up
from comfyfleet.batches.model import ADMITTED_AT_ONCE_MAX, JOBS_PER_BATCH_MAX, Batch, RollUp
from comfyfleet.jobs import service, store, submitting
from comfyfleet.jobs.admitting import as_batch_job
from comfyfleet.jobs.customers import Application, Offered, offered_by, ordered
from comfyfleet.jobs.model import Job, Submission
from comfyfleet.jobs.settling import deliver
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError, InvalidInput


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Each set is applied on its own; media, where the effect takes it, is named in each set."""

    effect_id: UUID
    sets: Sequence[Mapping[str, Any]]
    video_ids: Sequence[UUID | None] = ()
    idempotency_key: str | None = None

    @property
    def request_hash(self) -> str:
        said = [str(self.effect_id), [dict(each) for each in self.sets], list(self.video_ids)]
        text = json.dumps(said, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


async def apply_batch(
    sides: Sides, tenant_id: UUID, user_id: UUID, wanted: BatchOrder
) -> tuple[Batch, bool]:
    """All of its jobs or none: too few tokens for all refuse the whole batch."""
    _check(wanted)
    before = await _asked_before(sides, tenant_id, user_id, wanted)
    if before:
        return before, False
    async with sides.central.look() as tx:
        offered = await offered_by(tx, wanted.effect_id)
    batch = Batch(
        id=sides.new_id(),
        tenant_id=tenant_id,
        user_id=user_id,
        effect_id=wanted.effect_id,
        total=len(wanted.sets),
        idempotency_key=wanted.idempotency_key,
        request_hash=wanted.request_hash,
        created_at=sides.clock(),
    )
    asked = {
        uuid5(batch.id, str(position)): await _job(sides, batch, offered, wanted, position)
        for position in range(len(wanted.sets))
    }
    return await _write(sides, batch, asked)


async def _asked_before(
    sides: Sides, tenant_id: UUID, user_id: UUID, wanted: BatchOrder
) -> Batch | None:
    """Before anything is validated: the effect may have changed since the first request."""
    if wanted.idempotency_key is None:
        return None
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        return await batches.same_asked_before(
            tx, tenant_id, user_id, wanted.idempotency_key, wanted.request_hash
        )


def _check(wanted: BatchOrder) -> None:
    if not 0 < len(wanted.sets) <= JOBS_PER_BATCH_MAX:
        raise InvalidInput(
            f"a batch has 1 to {JOBS_PER_BATCH_MAX} sets of properties, not {len(wanted.sets)}",
            field="items",
        )
    if wanted.video_ids and len(wanted.video_ids) != len(wanted.sets):
        raise InvalidInput("name media for each set of properties, or for none", field="items")


async def _job(
    sides: Sides, batch: Batch, offered: Offered, wanted: BatchOrder, position: int
) -> Submission:
    one = Application(
        effect_id=wanted.effect_id,
        properties=wanted.sets[position],
        video_id=wanted.video_ids[position] if wanted.video_ids else None,
    )
    try:
        asked = await ordered(sides, batch.tenant_id, batch.user_id, offered, one)
    except FleetError as error:
        error.message = f"set {position + 1}: {error.message}"
        raise
    return replace(
        asked,
        batch_id=batch.id,
        batch_position=position,
        is_held=position >= ADMITTED_AT_ONCE_MAX,
        request_hash=None,
    )


async def _write(sides: Sides, batch: Batch, asked: dict[UUID, Submission]) -> tuple[Batch, bool]:
    clamped = await submitting.admissible(sides, batch.tenant_id, asked)
    pool = await sides.pool_of(batch.tenant_id)
    async with pool.begin() as tx:
        created = await batches.create(tx, batch)
        if not created.is_new:
            return created.batch, False
        jobs, words = await service.submit(
            tx, batch.tenant_id, clamped, now=sides.clock(), active_max=sides.active_max
        )
    await deliver(sides, pool, jobs, words)
    return batch, True


async def batch_of(
    sides: Sides, tenant_id: UUID, user_id: UUID, batch_id: UUID
) -> tuple[Batch, RollUp, list[Job]]:
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        batch = await batches.get(tx, tenant_id, user_id, batch_id)
        jobs = await store.of_batch(tx, tenant_id, batch_id)
    return batch, rolled_up(map(as_batch_job, jobs)), jobs


async def cancel_batch(sides: Sides, tenant_id: UUID, user_id: UUID, batch_id: UUID) -> Batch:
    """The held ones first, or each that ends would let another in."""
    pool = await sides.pool_of(tenant_id)
    async with pool.begin() as tx:
        batch = await batches.cancel(tx, tenant_id, user_id, batch_id, now=sides.clock())
        jobs = await store.of_batch(tx, tenant_id, batch_id)
    for job in sorted(jobs, key=lambda each: not each.asked.is_held):
        if job.status.is_active:
            await submitting.cancel(sides, tenant_id, job.id)
    return batch
