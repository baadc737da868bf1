"""Creates batches of up to a thousand jobs for an effect, and admits held jobs to the queue."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from comfyfleet.errors import FleetError, NotFound
from comfyfleet.server.db import Database, Tx, for_each_pool
from comfyfleet.server.jobs import reuse, service, store, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.idempotency import hash_request, require_same_request
from comfyfleet.server.jobs.model import (
    ADMITTED_AT_ONCE_MAX,
    JOBS_PER_BATCH_MAX,
    BatchJob,
    BatchSummary,
    HeldJob,
    Job,
    JobBatch,
    JobSpec,
    summarize_batch,
)
from comfyfleet.server.jobs.outbox import flush
from comfyfleet.server.jobs.submit import (
    EffectWorkflow,
    JobRequest,
    resolve_effect,
    resolve_request,
)
from comfyfleet.server.tenants import wallet as ledger


class CreatedBatch(NamedTuple):
    batch: JobBatch
    is_new: bool


async def create_batch(tx: Tx, batch: JobBatch) -> CreatedBatch:
    """Adds the batch. If the idempotency key was used before, returns the earlier batch, or raises
    Conflict if its request body was different.
    """
    if await store.add_batch(tx, batch):
        return CreatedBatch(batch, is_new=True)
    existing = await store.batch_by_key(
        tx, batch.tenant_id, batch.user_id, batch.idempotency_key or ""
    )
    return CreatedBatch(require_same_request(existing, batch.request_hash), is_new=False)


async def get_batch(tx: Tx, tenant_id: UUID, user_id: UUID, batch_id: UUID) -> JobBatch:
    batch = await store.get_batch(tx, tenant_id, user_id, batch_id)
    if batch is None:
        raise NotFound(f"batch {batch_id} was not found")
    return batch


async def mark_batch_cancelled(
    tx: Tx, tenant_id: UUID, user_id: UUID, batch_id: UUID, *, now: datetime
) -> JobBatch:
    """Marks the batch as cancelled if it isn't already. The caller cancels its jobs."""
    await store.cancel_batch(tx, tenant_id, user_id, batch_id, now)
    return await get_batch(tx, tenant_id, user_id, batch_id)


USERS_PER_PASS_MAX = 500
# Maximum number of held jobs that are read per user. The limit exceeds the size of a batch.
# Otherwise, a batch that already has enough queued jobs could hide the held jobs of other batches.
HELD_READ_MAX = 2 * JOBS_PER_BATCH_MAX


async def admit_after_end(context: JobContext, pool: Database, job: Job) -> None:
    """Admits the user's held jobs after a job has ended. If this is interrupted, a later sweep
    admits them.
    """
    if job.spec.user_id:
        await admit(context, pool, job.tenant_id, job.spec.user_id)


async def admit(context: JobContext, pool: Database, tenant_id: UUID, user_id: UUID) -> int:
    async with pool.read() as tx:
        if not await store.held_of(tx, tenant_id, user_id, limit=1):
            return 0
    async with pool.transaction() as tx:
        held = await store.held_of(tx, tenant_id, user_id, limit=HELD_READ_MAX)
        at_once = await store.active_by_batch(tx, tenant_id, user_id)
        first = choose_admitted(held, context.active_max.of_user, at_once)
        # The jobs are locked before the wallet, as in the transaction that ends a job. With
        # different orders, the two transactions could deadlock.
        await store.lock(tx, tenant_id, first)
        await ledger.lock_wallet(tx, tenant_id, user_id, now=context.clock())
        room = await service.active_room(tx, tenant_id, user_id, context.active_max)
        chosen = first[: max(0, room)]
        admitted = await store.admit(tx, tenant_id, chosen) if chosen else []
        outbox_ids = await store.add_outbox(tx, admitted, now=context.clock()) if admitted else []
    if admitted:
        await flush(context, pool, admitted, outbox_ids)
    return len(admitted)


def choose_admitted(held: Sequence[HeldJob], room: int, at_once: Mapping[UUID, int]) -> list[UUID]:
    """Chooses up to `room` held jobs, the oldest first. Each batch has a limit, so that a large
    batch doesn't crowd out the others.
    """
    counts = Counter(at_once)
    chosen: list[UUID] = []
    for job in held:
        if len(chosen) >= room:
            break
        if job.batch_id is not None:
            if counts[job.batch_id] >= ADMITTED_AT_ONCE_MAX:
                continue
            counts[job.batch_id] += 1
        chosen.append(job.id)
    return chosen


def as_batch_job(job: Job) -> BatchJob:
    return BatchJob(job.status, job.spec.is_held, job.reserved_tokens)


async def admit_all(context: JobContext) -> None:
    await for_each_pool(
        context.pools, partial(_admit_of_pool, context), "held jobs are not admitted"
    )


async def _admit_of_pool(context: JobContext, pool: Database) -> None:
    async with pool.read() as tx:
        waiting = await store.users_with_held(tx, limit=USERS_PER_PASS_MAX)
    for tenant_id, user_id in waiting:
        await admit(context, pool, tenant_id, user_id)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request that submits one job for each set of properties. If the effect processes a media
    item, `video_ids` contains one id for each set.
    """

    effect_id: UUID
    sets: Sequence[Mapping[str, Any]]
    video_ids: Sequence[UUID | None] = ()
    idempotency_key: str | None = None

    @property
    def request_hash(self) -> str:
        sets = [dict(properties) for properties in self.sets]
        return hash_request(str(self.effect_id), sets, list(self.video_ids))


async def submit_batch(
    context: JobContext, tenant_id: UUID, user_id: UUID, request: BatchRequest
) -> tuple[JobBatch, bool]:
    """Submits either all jobs of a batch or none. Refuses the batch if the user doesn't have enough
    tokens for all of its jobs.
    """
    earlier_batch = await _find_repeated(context, tenant_id, user_id, request)
    if earlier_batch:
        return earlier_batch, False
    async with context.central.read() as tx:
        offered = await resolve_effect(tx, request.effect_id)
    batch = JobBatch(
        id=context.new_id(),
        tenant_id=tenant_id,
        user_id=user_id,
        effect_id=request.effect_id,
        total=len(request.sets),
        idempotency_key=request.idempotency_key,
        request_hash=request.request_hash,
        created_at=context.clock(),
    )
    specs: dict[UUID, JobSpec] = {}
    for position in range(len(request.sets)):
        spec = await _build_spec(context, batch, offered, request, position)
        specs[uuid5(batch.id, str(position))] = spec
        await asyncio.sleep(0)  # lets other tasks run, because building a thousand specs is slow
    return await _write(context, batch, specs)


async def _find_repeated(
    context: JobContext, tenant_id: UUID, user_id: UUID, request: BatchRequest
) -> JobBatch | None:
    """Returns the batch of an earlier request with the same key. This is called before the request
    is validated, because the effect may have changed in the meantime.
    """
    if request.idempotency_key is None:
        return None
    async with context.tenant(tenant_id) as tx:
        batch = await store.batch_by_key(tx, tenant_id, user_id, request.idempotency_key)
    return batch and require_same_request(batch, request.request_hash)


async def _build_spec(
    context: JobContext,
    batch: JobBatch,
    offered: EffectWorkflow,
    request: BatchRequest,
    position: int,
) -> JobSpec:
    job_request = JobRequest(
        effect_id=request.effect_id,
        values=request.sets[position],
        video_id=request.video_ids[position] if request.video_ids else None,
        user_id=batch.user_id,
    )
    try:
        spec = await resolve_request(context, batch.tenant_id, job_request, offered)
    except FleetError as error:
        error.message = f"set {position + 1}: {error.message}"
        raise
    return replace(
        spec,
        batch_id=batch.id,
        batch_position=position,
        is_held=position >= ADMITTED_AT_ONCE_MAX,
    )


async def _write(
    context: JobContext, batch: JobBatch, specs: dict[UUID, JobSpec]
) -> tuple[JobBatch, bool]:
    clamped = await submit.check_admission(context, batch.tenant_id, specs)
    pool = await context.pool_of(batch.tenant_id)
    kept_since = None
    if reuse.asks_for_reuse(clamped):
        kept_since = await reuse.files_kept_since(context, batch.tenant_id)
    async with pool.transaction() as tx:
        created = await create_batch(tx, batch)
        if not created.is_new:
            return created.batch, False
        jobs, outbox_ids = await reuse.submit(
            context,
            tx,
            batch.tenant_id,
            clamped,
            kept_since=kept_since,
            active_max=context.active_max,
        )
    await flush(context, pool, jobs, outbox_ids)
    return batch, True


async def read_batch(
    context: JobContext, tenant_id: UUID, user_id: UUID, batch_id: UUID
) -> tuple[JobBatch, BatchSummary, list[Job]]:
    async with context.tenant(tenant_id) as tx:
        batch = await get_batch(tx, tenant_id, user_id, batch_id)
        jobs = await store.list_of_batch(tx, tenant_id, batch_id)
    return batch, summarize_batch(map(as_batch_job, jobs)), jobs


async def cancel_batch(
    context: JobContext, tenant_id: UUID, user_id: UUID, batch_id: UUID
) -> JobBatch:
    """Cancels a batch, starting with its held jobs. Otherwise, each cancelled job would admit a
    held job to the queue.
    """
    async with context.tenant_transaction(tenant_id) as tx:
        batch = await mark_batch_cancelled(tx, tenant_id, user_id, batch_id, now=context.clock())
        jobs = await store.list_of_batch(tx, tenant_id, batch_id)
    for job in sorted(jobs, key=lambda candidate: not candidate.spec.is_held):
        if job.status.is_active:
            await submit.cancel_job(context, tenant_id, job.id)
    return batch
