"""What may happen to a job's row. Takes a tenant's transaction, never commits.

Every change that the central side must follow leaves a word in the outbox, in the same
transaction; `settling` delivers it, at once or by a sweep.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.dispatch.model import Lease
from comfyfleet.jobs import store
from comfyfleet.jobs.model import Failure, Job, JobStatus, Submission
from comfyfleet.kernel.errors import Conflict, LeaseLost, NotFound

ROWS_PER_STATEMENT_MAX = 500


async def get(tx: Tx, tenant_id: UUID, job_id: UUID) -> Job:
    job = await store.get(tx, tenant_id, job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id}")
    return job


async def submit(
    tx: Tx, tenant_id: UUID, asked: Mapping[UUID, Submission], *, now: datetime
) -> tuple[list[Job], list[int]]:
    """The new jobs and the words left for them; ids that are known already change nothing."""
    added: list[Job] = []
    pairs = list(asked.items())
    for start in range(0, len(pairs), ROWS_PER_STATEMENT_MAX):
        part = dict(pairs[start : start + ROWS_PER_STATEMENT_MAX])
        added += await store.add(tx, tenant_id, part, now=now)
    words = await store.leave_word(tx, added, now=now) if added else []
    return added, words


async def same_asked_before(tx: Tx, tenant_id: UUID, asked: Submission) -> Job | None:
    """The job of an earlier request with this idempotency key; another request is a conflict."""
    if asked.idempotency_key is None:
        return None
    job = await store.by_key(tx, tenant_id, asked.idempotency_key)
    if job and job.asked.request_hash != asked.request_hash:
        raise Conflict(
            "idempotency_key was used for another request",
            field="idempotency_key",
            job_id=str(job.id),
        )
    return job


async def start(tx: Tx, lease: Lease, *, now: datetime) -> Job | None:
    """None: the job has ended, is gone, or knows a newer lease."""
    return await store.start(
        tx,
        lease.tenant_id,
        lease.job_id,
        token=lease.token,
        number=lease.number,
        attempt=lease.attempt,
        now=now,
    )


async def complete(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    values: Mapping[str, Any],
    *,
    now: datetime,
) -> tuple[Job, list[int]]:
    done = await store.complete(tx, tenant_id, job_id, token, values, now=now)
    if done:
        return done, await store.leave_word(tx, [done], now=now)
    return await _said_before(tx, tenant_id, job_id, token, JobStatus.COMPLETED), []


async def fail(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, why: Failure, *, now: datetime
) -> tuple[Job, list[int]]:
    failed = await store.fail(tx, tenant_id, job_id, token, why, now=now)
    if failed:
        return failed, await store.leave_word(tx, [failed], now=now)
    return await _said_before(tx, tenant_id, job_id, token, JobStatus.FAILED), []


async def put_back(tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID) -> Job:
    """To wait for another lease. The central side does the rest; a cut is mended by expiry."""
    waiting = await store.put_back(tx, tenant_id, job_id, token)
    return waiting or await _said_before(tx, tenant_id, job_id, token, JobStatus.QUEUED)


async def _said_before(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, status: JobStatus
) -> Job:
    """The same word with the same token is heard again; anything else comes too late."""
    job = await store.get(tx, tenant_id, job_id)
    if job is None or job.lease_token != token or job.status != status:
        raise LeaseLost("the lease is no longer held; nothing was changed")
    return job


async def cancel(tx: Tx, tenant_id: UUID, job_id: UUID, *, now: datetime) -> tuple[Job, list[int]]:
    """Ends a job that is active; one that has ended stays as it is."""
    cancelled = await store.end_active(tx, tenant_id, job_id, JobStatus.CANCELLED, None, now=now)
    if cancelled:
        return cancelled, await store.leave_word(tx, [cancelled], now=now)
    return await get(tx, tenant_id, job_id), []


async def give_up(
    tx: Tx, tenant_id: UUID, job_id: UUID, why: Failure, *, now: datetime
) -> tuple[Job | None, list[int]]:
    """Fails an active job whoever holds it; none if it has ended meanwhile."""
    failed = await store.end_active(tx, tenant_id, job_id, JobStatus.FAILED, why, now=now)
    return failed, await store.leave_word(tx, [failed], now=now) if failed else []
