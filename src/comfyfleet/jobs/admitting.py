"""Held jobs go to the queue as others of their user end: nobody has more active than they may."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from uuid import UUID

from comfyfleet.batches.decide import BatchJob
from comfyfleet.batches.model import ADMITTED_AT_ONCE_MAX, JOBS_PER_BATCH_MAX
from comfyfleet.db import Database
from comfyfleet.db.outages import level_of
from comfyfleet.jobs import service, store
from comfyfleet.jobs.model import HeldJob, Job
from comfyfleet.jobs.settling import deliver
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError
from comfyfleet.ledger import service as ledger

log = logging.getLogger(__name__)
USERS_PER_PASS_MAX = 500
# A whole batch that has enough in the queue must not hide what is held behind it.
HELD_LOOKED_AT_MAX = 2 * JOBS_PER_BATCH_MAX


async def admit_after(sides: Sides, pool: Database, job: Job) -> None:
    """A job has ended, and made room for others of its user; if this is cut off, the sweep does it."""
    if job.asked.user_id:
        await admit(sides, pool, job.tenant_id, job.asked.user_id)


async def admit(sides: Sides, pool: Database, tenant_id: UUID, user_id: UUID) -> int:
    async with pool.look() as tx:
        if not await store.held_of(tx, tenant_id, user_id, limit=1):
            return 0
    async with pool.begin() as tx:
        held = await store.held_of(tx, tenant_id, user_id, limit=HELD_LOOKED_AT_MAX)
        at_once = await store.active_by_batch(tx, tenant_id, user_id)
        first = chosen(held, sides.active_max.of_user, at_once)
        # Jobs before the wallet, as a job that ends does it: two that wait for each other never end.
        await store.lock(tx, tenant_id, first)
        await ledger.lock_wallet(tx, tenant_id, user_id, now=sides.clock())
        room = await service.active_room(tx, tenant_id, user_id, sides.active_max)
        few = first[: max(0, room)]
        admitted = await store.admit(tx, tenant_id, few) if few else []
        words = await store.leave_word(tx, admitted, now=sides.clock()) if admitted else []
    if admitted:
        await deliver(sides, pool, admitted, words)
    return len(admitted)


def chosen(held: Sequence[HeldJob], room: int, at_once: Mapping[UUID, int]) -> list[UUID]:
    """The oldest first; of a batch no more at once than it may have, or it would crowd out others."""
    counts = Counter(at_once)
    few: list[UUID] = []
    for each in held:
        if len(few) >= room:
            break
        if each.batch_id is not None:
            if counts[each.batch_id] >= ADMITTED_AT_ONCE_MAX:
                continue
            counts[each.batch_id] += 1
        few.append(each.id)
    return few


def as_batch_job(job: Job) -> BatchJob:
    return BatchJob(job.status, job.asked.is_held, job.reserved_tokens)


async def admit_all(sides: Sides) -> None:
    """A pass over all pools; one that is down holds up no other."""
    for name, pool in sides.pools.items():
        try:
            async with pool.look() as tx:
                waiting = await store.users_with_held(tx, limit=USERS_PER_PASS_MAX)
            for tenant_id, user_id in waiting:
                await admit(sides, pool, tenant_id, user_id)
        except FleetError as error:
            log.log(level_of(error), "held jobs of pool %s wait: %s", name, error.message)
        except Exception:
            log.exception("held jobs of pool %s wait", name)
