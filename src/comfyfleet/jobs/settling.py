"""Brings the central side in line with the tenant's: the tenant's row decides."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from comfyfleet.db import Database, Tx
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import ENDED, ActiveRow, Dispatch, Status
from comfyfleet.effects.models import models_of
from comfyfleet.jobs import store
from comfyfleet.jobs.model import Job, dispatch_for, ended_as
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError

log = logging.getLogger(__name__)
RETRY_WORD = timedelta(seconds=5)


async def deliver(sides: Sides, pool: Database, jobs: Sequence[Job], words: Sequence[int]) -> None:
    """What has just been committed; if this is cut off, the sweep does it again."""
    for job in jobs:
        tell(sides, job)
    await align(sides, jobs)
    sides.deferred.forget_words(pool, words)


def tell(sides: Sides, job: Job) -> None:
    """Those who follow it in this process, and the run that it is a part of."""
    sides.news.tell(job.id)
    if job.asked.run_kind and not job.status.is_active:
        sides.news.tell_run(job.asked.run_kind)


async def align(sides: Sides, jobs: Sequence[Job]) -> None:
    """Active jobs have a dispatch, ended ones an ended one. Safe to repeat."""
    waiting = [job for job in jobs if job.wants_dispatch]
    _note_models(sides, waiting)
    await sides.queue.enqueue([dispatch_for(job, sides.settings.max_attempts) for job in waiting])
    ended = [job for job in jobs if not job.status.is_active]
    if ended:
        async with sides.central.begin() as tx:
            for job in ended:
                await _end(tx, sides, job)


def _note_models(sides: Sides, jobs: Sequence[Job]) -> None:
    """So that no worker that lacks one of them is given the job."""
    known = sides.queue.model_sets
    for job in jobs:
        if job.asked.model_set and job.asked.model_set not in known:
            known.note(job.asked.model_set, models_of(job.asked.prompt))


async def _end(tx: Tx, sides: Sides, job: Job) -> None:
    now, status = sides.clock(), ended_as(job)
    found = await dispatch.of_job(tx, job.tenant_id, job.id)
    if found is None:
        new = dispatch_for(job, sides.settings.max_attempts)
        await dispatch.enqueue_ended(tx, new, status, now=now, error=job.error_message)
    elif found.status == Status.LEASED and status == Status.CANCELLED:
        # The worker is told with its next heartbeat; only then does the dispatch end.
        await dispatch.cancel(tx, found.id, now=now)
    elif found.status not in ENDED:
        await dispatch.bring_in_line(tx, found.id, status, now=now, error=job.error_message)


async def deliver_words(sides: Sides, pool: Database, *, limit: int) -> int:
    """A pass over the outbox of one pool. One word that can't be delivered holds up no other."""
    now = sides.clock()
    async with pool.look() as tx:
        due = await store.words_due(tx, now=now, limit=limit)
    for word_id, tenant_id, job_id in due:
        try:
            await _deliver_word(sides, pool, word_id, tenant_id, job_id)
        except Exception as error:
            odd = not isinstance(error, FleetError)
            log.warning("outbox word %s of job %s waits: %s", word_id, job_id, error, exc_info=odd)
            async with pool.begin() as tx:
                await store.postpone_words(tx, [word_id], until=now + RETRY_WORD)
    return len(due)


async def _deliver_word(
    sides: Sides, pool: Database, word_id: int, tenant_id: UUID, job_id: UUID
) -> None:
    async with pool.look() as tx:
        job = await store.get(tx, tenant_id, job_id)
    if job:
        await align(sides, [job])
    async with pool.say() as tx:
        await store.forget_words(tx, [word_id])


async def end_dispatch_of(sides: Sides, row: Dispatch | ActiveRow, job: Job | None) -> None:
    """The dispatch of a job that has ended, or is gone, ends too."""
    status = ended_as(job) if job else Status.FAILED
    error = job.error_message if job else "Its job is gone."
    async with sides.central.begin() as tx:
        await dispatch.bring_in_line(tx, row.id, status, now=sides.clock(), error=error)
