"""What may happen to a job's row. Takes a tenant's transaction, never commits.

Every change that the central side must follow leaves a word in the outbox, in the same
transaction; `settling` delivers it, at once or by a sweep.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.db.dialect import is_sqlite
from comfyfleet.dispatch.model import Lease
from comfyfleet.files.model import File
from comfyfleet.jobs import consequences, store
from comfyfleet.jobs.caps import ActiveMax
from comfyfleet.jobs.completed_job import store as completed_job
from comfyfleet.jobs.consequences import NewId
from comfyfleet.jobs.model import Failure, Job, JobStatus, Submission
from comfyfleet.jobs.new_job import store as new_job
from comfyfleet.jobs.new_job.store import NewRows
from comfyfleet.jobs.rows import just_added, row_of
from comfyfleet.kernel.errors import Conflict, InvalidInput, LeaseLost, NotFound, TooManyActive
from comfyfleet.ledger import service as ledger

ROWS_PER_STATEMENT_MAX = 500
RETRY_SECONDS = 10


async def of_media(tx: Tx, tenant_id: UUID, media_id: UUID, *, limit: int) -> list[Job]:
    """The newest first."""
    return await store.of_media(tx, tenant_id, media_id, limit=limit)


async def get(tx: Tx, tenant_id: UUID, job_id: UUID) -> Job:
    job = await store.get(tx, tenant_id, job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id}")
    return job


async def some(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> dict[UUID, Job]:
    """Those of them that exist."""
    return {job.id: job for job in await store.some(tx, tenant_id, job_ids)}


async def lock(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> None:
    """Whoever changes several locks them first, before any wallet."""
    await store.lock(tx, tenant_id, job_ids)


async def submit(
    tx: Tx,
    tenant_id: UUID,
    asked: Mapping[UUID, Submission],
    *,
    now: datetime,
    active_max: ActiveMax | None = None,
) -> tuple[list[Job], list[int]]:
    """The new jobs and the words left for them; ids that are known already change nothing.

    All of it or nothing: too few tokens, too many active jobs or busy media end the transaction.
    Jobs of batches and runs wait instead, held, until others of their user have ended.
    """
    user_id = _payer(asked)
    if user_id:
        # Counted while it is locked: two submits at once can't both be the last one.
        await ledger.lock_wallet(tx, tenant_id, user_id, now=now)
        if active_max:
            asked = await _held_beyond(tx, tenant_id, user_id, asked, active_max)
    added: list[Job] = []
    pairs = list(asked.items())
    for start in range(0, len(pairs), ROWS_PER_STATEMENT_MAX):
        part = dict(pairs[start : start + ROWS_PER_STATEMENT_MAX])
        added += await store.add(tx, tenant_id, part, now=now)
    if user_id and added:
        await _check_active(tx, tenant_id, user_id, added, active_max)
        prices = {job.id: job.reserved_tokens for job in added}
        await ledger.reserve_all(tx, tenant_id, user_id, prices, now=now)
    await consequences.after_submit(tx, added, now=now)
    words = await store.leave_word(tx, added, now=now) if added else []
    return added, words


def is_single(asked: Mapping[UUID, Submission]) -> bool:
    """One job of a user, by itself: it can be submitted by `submit_one`."""
    one = next(iter(asked.values()))
    is_part = one.is_held or _waits(one)
    return len(asked) == 1 and one.user_id is not None and not is_part


async def submit_one(
    tx: Tx, tenant_id: UUID, asked: Mapping[UUID, Submission], most: ActiveMax, *, now: datetime
) -> tuple[list[Job], list[int]] | None:
    """As `submit` does for a single job that nothing stands in the way of, by one statement.

    None, and nothing is written: then `submit` does it step by step, or tells what is in the way.
    """
    ((job_id, one),) = asked.items()
    job = just_added(tenant_id, job_id, one, now)
    new = NewRows(row_of(tenant_id, job_id, one, now), consequences.submit_event(job)._asdict())
    word = await new_job.add(tx, new, most)
    if word is None:
        return None
    await consequences.attach_media(tx, job)
    return [job], [word]


def _payer(asked: Mapping[UUID, Submission]) -> UUID | None:
    users = {each.user_id for each in asked.values()}
    if len(users) > 1:
        raise InvalidInput("jobs of several users can't be submitted at once")
    user_id = next(iter(users), None)
    if user_id is None and any(each.price_tokens for each in asked.values()):
        raise InvalidInput("a job that costs tokens needs a user who pays", field="user_id")
    return user_id


def _waits(asked: Submission) -> bool:
    """It is a part of something larger, which goes on when there is room."""
    return asked.batch_id is not None or asked.run_id is not None


async def _held_beyond(
    tx: Tx, tenant_id: UUID, user_id: UUID, asked: Mapping[UUID, Submission], most: ActiveMax
) -> Mapping[UUID, Submission]:
    """As many as there is room for go to the queue, in their order."""
    if not any(map(_waits, asked.values())):
        return asked
    room = await active_room(tx, tenant_id, user_id, most)
    kept: dict[UUID, Submission] = {}
    for job_id, each in asked.items():
        is_held = each.is_held or (_waits(each) and room <= 0)
        room -= not is_held
        kept[job_id] = replace(each, is_held=is_held)
    return kept


async def active_room(tx: Tx, tenant_id: UUID, user_id: UUID, most: ActiveMax) -> int:
    """How many more may be active; below zero: too many are."""
    of_user, of_tenant = await store.count_active(tx, tenant_id, user_id, most=most.of_tenant)
    return min(most.of_user - of_user, most.of_tenant - of_tenant)


async def _check_active(
    tx: Tx, tenant_id: UUID, user_id: UUID, added: Sequence[Job], most: ActiveMax | None
) -> None:
    if most is None or all(_waits(job.asked) for job in added):
        return
    of_user, of_tenant = await store.count_active(tx, tenant_id, user_id, most=most.of_tenant)
    for active, limit, whose in (
        (of_user, most.of_user, "user"),
        (of_tenant, most.of_tenant, "tenant"),
    ):
        if active > limit:
            raise TooManyActive(
                f"at most {limit} jobs of a {whose} may be active",
                retry_after_seconds=RETRY_SECONDS,
                active=active - len(added),
            )


async def words_for_runs(
    tx: Tx, kind: str, *, now: datetime, limit: int, after: int = 0
) -> list[tuple[int, UUID, UUID, UUID]]:
    """(word, tenant, run, job): jobs of runs that have ended and were not yet heard of."""
    return await store.words_for_runs(tx, kind, now=now, limit=limit, after=after)


async def postpone_words(tx: Tx, words: Sequence[int], *, until: datetime) -> None:
    await store.postpone_words(tx, words, until=until)


async def forget_words(tx: Tx, words: Sequence[int]) -> None:
    await store.forget_words(tx, words)


async def same_asked_before(tx: Tx, tenant_id: UUID, asked: Submission) -> Job | None:
    """The job of an earlier request with this idempotency key; another request is a conflict."""
    if asked.idempotency_key is None:
        return None
    job = await store.by_key(tx, tenant_id, asked.user_id, asked.idempotency_key)
    if job and job.asked.request_hash != asked.request_hash:
        raise Conflict(
            "idempotency_key was used for another request",
            field="idempotency_key",
            job_id=str(job.id),
        )
    return job


async def start(tx: Tx, lease: Lease, *, now: datetime) -> Job | None:
    """None: the job has ended, is gone, or knows a newer lease. One statement on PostgreSQL."""
    if lease.is_prefetched:
        return await store.start(tx, lease, begun_at=None)
    if not is_sqlite(tx):
        return await store.start(tx, lease, begun_at=now, with_event=True)
    started = await store.start(tx, lease, begun_at=now)
    if started:
        await consequences.after_move(tx, started, now=now)
    return started


async def begin(tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, *, now: datetime) -> None:
    """The worker runs a job that it had prefetched."""
    begun = await store.begin(tx, tenant_id, job_id, token, now=now)
    if begun:
        await consequences.after_move(tx, begun, now=now)


class Ended(NamedTuple):
    """A job that has ended, the words left for it, and whether others of its user wait for room."""

    job: Job
    words: list[int]
    has_held: bool


async def complete_at_once(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    values: Mapping[str, Any],
    *,
    files: Sequence[File],
    now: datetime,
) -> Ended | None:
    """As `complete` does, by one statement of PostgreSQL.

    None, and nothing is written: then `complete` does it step by step, or tells what is in the way.
    """
    done = await completed_job.complete(tx, tenant_id, job_id, token, values, files, now=now)
    return Ended(done.job, [done.word], done.has_held) if done else None


async def complete(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    values: Mapping[str, Any],
    *,
    files: Sequence[File] = (),
    new_id: NewId,
    now: datetime,
) -> Ended:
    """Without words, it was said before: then the files are not added."""
    done = await store.complete(tx, tenant_id, job_id, token, values, now=now)
    if done:
        return await _ended(tx, done, files, new_id=new_id, now=now)
    return await _said_before_of(tx, tenant_id, job_id, token, JobStatus.COMPLETED)


async def fail(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    why: Failure,
    *,
    new_id: NewId,
    now: datetime,
) -> Ended:
    failed = await store.fail(tx, tenant_id, job_id, token, why, now=now)
    if failed:
        return await _ended(tx, failed, new_id=new_id, now=now)
    return await _said_before_of(tx, tenant_id, job_id, token, JobStatus.FAILED)


async def _ended(
    tx: Tx, ended: store.EndedJob, files: Sequence[File] = (), *, new_id: NewId, now: datetime
) -> Ended:
    words = await consequences.after_end(tx, ended, files, new_id=new_id, now=now)
    return Ended(ended.job, words, ended.has_held)


async def _said_before_of(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, status: JobStatus
) -> Ended:
    """Whether others wait is not known: the first word may have been cut off before it looked."""
    return Ended(await _said_before(tx, tenant_id, job_id, token, status), [], has_held=True)


async def put_back(tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, *, now: datetime) -> Job:
    """To wait for another lease. The central side does the rest; a cut is mended by expiry."""
    waiting = await store.put_back(tx, tenant_id, job_id, token)
    if waiting:
        await consequences.after_move(tx, waiting, now=now)
        return waiting
    return await _said_before(tx, tenant_id, job_id, token, JobStatus.QUEUED)


async def _said_before(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, status: JobStatus
) -> Job:
    """The same word with the same token is heard again; anything else comes too late."""
    job = await store.get(tx, tenant_id, job_id)
    if job is None or job.lease_token != token or job.status != status:
        raise LeaseLost("the lease is no longer held; nothing was changed")
    return job


async def cancel(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, new_id: NewId, now: datetime
) -> tuple[Job, list[int]]:
    """Ends a job that is active; one that has ended stays as it is."""
    cancelled = await store.end_active(tx, tenant_id, job_id, JobStatus.CANCELLED, None, now=now)
    if cancelled:
        job, words, _ = await _ended(tx, cancelled, new_id=new_id, now=now)
        return job, words
    return await get(tx, tenant_id, job_id), []


async def give_up(
    tx: Tx, tenant_id: UUID, job_id: UUID, why: Failure, *, new_id: NewId, now: datetime
) -> tuple[Job | None, list[int]]:
    """Fails an active job whoever holds it; none if it has ended meanwhile."""
    failed = await store.end_active(tx, tenant_id, job_id, JobStatus.FAILED, why, now=now)
    if failed is None:
        return None, []
    job, words, _ = await _ended(tx, failed, new_id=new_id, now=now)
    return job, words
