"""Operators' lists of jobs of all tenants, and bulk operations on them.

Lists can be filtered, counted and looked up by ids. A bulk operation handles each job separately,
so that a job that can't be changed doesn't stop the others. The caller learns which ones failed.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple, TypeVar
from uuid import UUID

from comfyfleet.api.console import BulkAct
from comfyfleet.errors import Conflict, FleetError, InvalidInput, NotFound, Refused, Unavailable
from comfyfleet.server.db import Tx
from comfyfleet.server.jobs import store, store_lists
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import (
    Job,
    JobAttempt,
    JobFilter,
    JobSpec,
    JobStatus,
    ListedJob,
    Place,
    merge_found,
)
from comfyfleet.server.jobs.submit import cancel_job, retry_job, submit_many
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch

log = logging.getLogger(__name__)
CURSOR_SEPARATOR = "~"
COUNTED_MAX = store_lists.COUNTED_MAX
T = TypeVar("T")


async def find_job(context: JobContext, job_id: UUID) -> Job:
    """Finds a job of any tenant. If the job isn't found and a pool is down, raises Unavailable,
    because the job may be in that pool.
    """
    results, down = await _in_pools(context, lambda tx: store.find_in_pool(tx, job_id))
    for job in results:
        if job is not None:
            return job
    if down:
        raise Unavailable(
            f"there is no job {job_id} but perhaps in the pool {down[0]}, which is down"
        )
    raise NotFound(f"there is no job {job_id}")


async def find_listed(context: JobContext, job_ids: Sequence[UUID]) -> dict[UUID, ListedJob]:
    """Returns the jobs that exist in reachable pools, in the order of `job_ids`."""
    results, _ = await _in_pools(context, lambda tx: store_lists.find_listed(tx, job_ids))
    known = {job.id: job for some in results for job in some}
    return {job_id: known[job_id] for job_id in dict.fromkeys(job_ids) if job_id in known}


async def attempts_of(context: JobContext, job: Job) -> list[JobAttempt]:
    await context.deferred.flush()
    async with context.tenant(job.tenant_id) as tx:
        return await store.attempts_of(tx, job.tenant_id, job.id)


class StatusCounts(NamedTuple):
    by_status: dict[JobStatus, int]  # each up to COUNTED_MAX
    pools_left_out: Sequence[str] = ()


async def count_by_status(context: JobContext, wanted: JobFilter) -> StatusCounts:
    results, down = await _in_pools(context, lambda tx: store_lists.count_by_status(tx, wanted))
    sums: defaultdict[JobStatus, int] = defaultdict(int)
    for counts in results:
        for status, count in counts.items():
            sums[status] = min(sums[status] + count, COUNTED_MAX)
    return StatusCounts(dict(sums), down)


class FoundJobs(NamedTuple):
    """A page of jobs, the newest first. `following` is the next cursor, or None at the end."""

    jobs: Sequence[ListedJob]
    following: str | None
    pools_left_out: Sequence[str] = ()  # pools that are down and may contain more jobs


async def list_newest(
    context: JobContext, wanted: JobFilter, *, after: str | None, limit: int
) -> FoundJobs:
    if wanted.worker_id is not None:
        return await _of_worker(context, wanted, after=after, limit=limit)
    before = _parse_cursor(after) if after else None
    parts, down = await _in_pools(
        context, lambda tx: store_lists.list_newest(tx, wanted, before=before, limit=limit)
    )
    page = merge_found(parts, limit)
    return FoundJobs(page.jobs, page.complete_to and _cursor_of(page.complete_to), down)


async def _in_pools(
    context: JobContext, read: Callable[[Tx], Awaitable[T]]
) -> tuple[list[T], list[str]]:
    """Reads from each pool. Returns the results and the names of pools that are down."""
    results, down = [], []
    for name, pool in context.pools.items():
        try:
            async with pool.read() as tx:
                results.append(await read(tx))
        except FleetError as error:
            log.warning("jobs of pool %s are left out: %s", name, error.message)
            down.append(name)
    return results, down


def _cursor_of(place: Place) -> str:
    return f"{place[0].isoformat()}{CURSOR_SEPARATOR}{place[1]}"


def _parse_cursor(after: str) -> Place:
    at, _, job_id = after.partition(CURSOR_SEPARATOR)
    try:
        moment, place = datetime.fromisoformat(at), UUID(job_id)
    except ValueError:
        raise _bad_cursor() from None
    if moment.tzinfo is None:
        raise _bad_cursor()
    return moment, place


def _bad_cursor() -> InvalidInput:
    return InvalidInput("after must be the next of an earlier page", field="after")


async def _of_worker(
    context: JobContext, wanted: JobFilter, *, after: str | None, limit: int
) -> FoundJobs:
    """Lists a worker's jobs by their dispatches, which contain the worker until they are deleted."""
    if after is not None and not after.isdecimal():
        raise _bad_cursor()
    async with context.central.read() as tx:
        rows = await dispatch.list_dispatches(
            tx,
            worker_id=wanted.worker_id,
            tenant_id=wanted.tenant_id,
            before_id=int(after) if after else None,
            limit=limit,
        )
    known, down = await _jobs_of(context, rows, wanted)
    jobs = [known[row.job_id] for row in rows if row.job_id in known]
    return FoundJobs(jobs, str(rows[-1].id) if len(rows) == limit else None, sorted(down))


async def _jobs_of(
    context: JobContext, rows: Sequence[Dispatch], wanted: JobFilter
) -> tuple[dict[UUID, ListedJob], set[str]]:
    """Returns the matching jobs of these dispatches by id, and the pools that are down."""
    of_tenants: defaultdict[UUID, list[UUID]] = defaultdict(list)
    for row in rows:
        of_tenants[row.tenant_id].append(row.job_id)
    known: dict[UUID, ListedJob] = {}
    down: set[str] = set()
    for tenant_id, job_ids in of_tenants.items():
        name = await context.pool_name_of(tenant_id)
        if name is None or name in down:
            continue
        try:
            async with context.pools[name].read() as tx:
                known |= await _matching(tx, tenant_id, job_ids, wanted)
        except FleetError as error:
            log.warning("jobs of pool %s are left out: %s", name, error.message)
            down.add(name)
    return known, down


async def _matching(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID], wanted: JobFilter
) -> dict[UUID, ListedJob]:
    jobs = await store_lists.get_listed(tx, tenant_id, job_ids)
    if wanted.error is not None:
        having = await store_lists.with_error(tx, job_ids, wanted.error)
        jobs = [job for job in jobs if job.id in having]
    return {job.id: job for job in jobs if wanted.matches(job)}


JOBS_PER_BULK_MAX = 500
# Jobs that are handled at the same time. Each one holds a database connection for a moment.
AT_ONCE_MAX = 4
NAMED_IN_AUDIT_MAX = 10
# Statuses that a filter without statuses selects: the jobs to which the operation applies.
APPLIES_TO = {
    BulkAct.CANCEL: (JobStatus.QUEUED, JobStatus.PROCESSING),
    BulkAct.RETRY: (JobStatus.FAILED,),
    BulkAct.REPRIORITISE: (JobStatus.QUEUED,),
}
MAY_BE_FILTERED = {
    **APPLIES_TO,
    BulkAct.RETRY: (JobStatus.FAILED, JobStatus.CANCELLED),
    BulkAct.REPRIORITISE: (JobStatus.QUEUED, JobStatus.PROCESSING),
}


@dataclass(frozen=True, slots=True)
class BulkOrder:
    act: BulkAct
    actor: str
    priority: int = 0  # the new priority for REPRIORITISE


class BulkFailure(NamedTuple):
    job_id: UUID
    code: str
    message: str


class BulkOutcome(NamedTuple):
    done: Sequence[UUID]
    failed: Sequence[BulkFailure]
    retries: dict[UUID, UUID]  # the new jobs by the ids of the retried ones


class BulkSelection(NamedTuple):
    jobs: Sequence[ListedJob]
    missing: Sequence[UUID] = ()  # requested ids that don't exist
    following: str | None = None  # the cursor for more matching jobs
    pools_left_out: Sequence[str] = ()


async def select_by_ids(context: JobContext, job_ids: Sequence[UUID]) -> BulkSelection:
    jobs_by_id = await find_listed(context, job_ids)
    missing = [job_id for job_id in dict.fromkeys(job_ids) if job_id not in jobs_by_id]
    return BulkSelection(list(jobs_by_id.values()), missing)


async def select_by_filter(
    context: JobContext, act: BulkAct, wanted: JobFilter, *, after: str | None, limit: int
) -> BulkSelection:
    """Selects a page of the matching jobs, the newest first."""
    for status in wanted.statuses:
        if status not in MAY_BE_FILTERED[act]:
            raise InvalidInput(f"jobs that are {status} can't be meant by {act}", field="status")
    mine = replace(wanted, statuses=wanted.statuses or APPLIES_TO[act])
    page = await list_newest(context, mine, after=after, limit=limit)
    return BulkSelection(page.jobs, (), page.following, page.pools_left_out)


async def act_on_all(context: JobContext, order: BulkOrder, chosen: BulkSelection) -> BulkOutcome:
    """Performs the operation on each job. Writes one audit entry for the order, and one for each
    job that it changed.
    """
    await context.audit(
        order.actor,
        f"bulk_{order.act}",
        "jobs",
        None,
        jobs=len(chosen.jobs),
        first=[job.id for job in chosen.jobs[:NAMED_IN_AUDIT_MAX]],
    )
    gate = asyncio.Semaphore(AT_ONCE_MAX)

    async def act(job: ListedJob) -> UUID | BulkFailure | None:
        async with gate:
            try:
                return await _act(context, order, job)
            except FleetError as error:
                return BulkFailure(job.id, error.code, error.message)

    results = await asyncio.gather(*map(act, chosen.jobs))
    pairs = list(zip(chosen.jobs, results, strict=True))
    failed = [each for each in results if isinstance(each, BulkFailure)]
    done = {job.id: each for job, each in pairs if not isinstance(each, BulkFailure)}
    await _audit(context, order, [job for job in chosen.jobs if job.id in done], done)
    absent = [
        BulkFailure(each, NotFound.code, f"there is no job {each}") for each in chosen.missing
    ]
    retries = {job_id: new_id for job_id, new_id in done.items() if new_id is not None}
    return BulkOutcome(list(done), [*failed, *absent], retries)


async def _act(context: JobContext, order: BulkOrder, job: ListedJob) -> UUID | None:
    if order.act is BulkAct.RETRY:
        return (await retry_job(context, job.tenant_id, job.id)).id
    if order.act is BulkAct.REPRIORITISE:
        await _reprioritise(context, order, job)
        return None
    ended = await cancel_job(context, job.tenant_id, job.id)
    if ended.status is not JobStatus.CANCELLED:
        raise Conflict(f"the job has ended: {ended.status}")
    return None


async def _reprioritise(context: JobContext, order: BulkOrder, job: ListedJob) -> None:
    async with context.central.transaction() as tx:
        row = await dispatch.of_job(tx, job.tenant_id, job.id)
        if row is None:
            raise Conflict(
                "the job is not in the queue: it waits for others of its user, or has ended"
            )
        moved = await dispatch.reprioritise(
            tx, row.id, order.priority, now=context.clock(), actor=order.actor
        )
    context.queue.arrived([moved])


async def _audit(
    context: JobContext,
    order: BulkOrder,
    jobs: Sequence[ListedJob],
    results: dict[UUID, UUID | None],
) -> None:
    """Audits the changed jobs. A change of priority is already audited in the transaction that
    changes the dispatch.
    """
    if order.act is BulkAct.REPRIORITISE or not jobs:
        return
    now = context.clock()
    async with context.central.transaction() as tx:
        for job in jobs:
            new_job = results[job.id]
            more = {} if new_job is None else {"new_job": new_job}
            subject = f"job:{job.id}"
            await record_audit(tx, order.actor, str(order.act), subject, now, job.tenant_id, **more)


async def replay_job(
    context: JobContext,
    job: Job,
    *,
    backend_affinity: str | None,
    priority: int,
) -> Job:
    """Runs the prompt and files of any job again for an operator. No user pays for it, and the
    job's media item and run are not affected.
    """
    if job.status.is_active:
        raise Conflict("the job has not ended: wait for it, or cancel it")
    spec = replay_spec(job, backend_affinity, priority)
    (added,) = await submit_many(context, job.tenant_id, {context.new_id(): spec})
    return added


def replay_spec(job: Job, backend_affinity: str | None, priority: int) -> JobSpec:
    asked = job.asked
    if not asked.prompt:
        raise Refused("the job's prompt was deleted after its retention time: submit a new job")
    if asked.gateway is not None:
        raise Refused("a prompt of a ComfyUI client is run again by its client, not here")
    return JobSpec(
        workflow_id=asked.workflow_id,
        workflow_slug=asked.workflow_slug,
        workflow_version=asked.workflow_version,
        prompt=asked.prompt,
        properties=asked.properties,
        assets=asked.assets,
        output_node_id=asked.output_node_id,
        stage=asked.stage,
        provider=asked.provider,
        priority=priority,
        backend_affinity=backend_affinity,
        model_key=asked.model_key,
        model_set=asked.model_set,
        retry_of=job.id,
    )
