"""Held jobs of a batch go to the queue as others of it end: a large batch must not crowd it."""

import logging
from collections.abc import Sequence
from uuid import UUID

from comfyfleet.batches import service as batches
from comfyfleet.batches.decide import BatchJob, to_admit
from comfyfleet.db import Database
from comfyfleet.jobs import store
from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.jobs.settling import deliver
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError

log = logging.getLogger(__name__)
BATCHES_PER_PASS_MAX = 200


async def admit_after(sides: Sides, pool: Database, job: Job) -> None:
    """A job of a batch has ended; if this is cut off, the sweep does it."""
    if job.asked.batch_id:
        await admit(sides, pool, job.tenant_id, job.asked.batch_id)


async def admit(sides: Sides, pool: Database, tenant_id: UUID, batch_id: UUID) -> int:
    async with pool.begin() as tx:
        # Two that admit at the same moment would both see the same room.
        await batches.lock(tx, tenant_id, batch_id)
        jobs = await store.of_batch(tx, tenant_id, batch_id)
        held = [job.id for job in jobs if job.asked.is_held and job.status == JobStatus.QUEUED]
        room = to_admit(map(as_batch_job, jobs))
        admitted = await store.admit(tx, tenant_id, held[:room]) if room else []
        words = await store.leave_word(tx, admitted, now=sides.clock()) if admitted else []
    if admitted:
        await deliver(sides, pool, admitted, words)
    return len(admitted)


def as_batch_job(job: Job) -> BatchJob:
    return BatchJob(job.status, job.asked.is_held, job.reserved_tokens)


async def admit_all(sides: Sides) -> None:
    """A pass over all pools; one that is down holds up no other."""
    for name, pool in sides.pools.items():
        try:
            async with pool.look() as tx:
                waiting: Sequence[tuple[UUID, UUID]] = await store.batches_with_held(
                    tx, limit=BATCHES_PER_PASS_MAX
                )
            for tenant_id, batch_id in waiting:
                await admit(sides, pool, tenant_id, batch_id)
        except FleetError as error:
            log.warning("held jobs of pool %s wait: %s", name, error.message)
        except Exception:
            log.exception("held jobs of pool %s wait", name)
