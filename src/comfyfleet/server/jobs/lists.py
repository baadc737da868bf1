"""Lists jobs of all tenants for operators, and performs bulk operations on them.

Jobs can be filtered, counted and looked up by id. A bulk operation handles each job separately, so
a job that can't be changed doesn't stop the others. The outcome lists the jobs that failed.
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
            f"job {job_id} was not found, but pool {down[0]} is down and could not be searched"
        )
    raise NotFound(f"job {job_id} was not found")


async def find_listed(context: JobContext, job_ids: Sequence[UUID]) -> dict[UUID, ListedJob]:
    """Returns the jobs that were found, in the order of `job_ids`. Skips pools that are down."""
    results, _ = await _in_pools(context, lambda tx: store_lists.find_listed(tx, job_ids))
    jobs_by_id = {job.id: job for jobs in results for job in jobs}
    return {job_id: jobs_by_id[job_id] for job_id in dict.fromkeys(job_ids) if job_id in jobs_by_id}


async def attempts_of(context: JobContext, job: Job) -> list[JobAttempt]:
    await context.deferred.flush()
    async with context.tenant(job.tenant_id) as tx:
        return await store.attempts_of(tx, job.tenant_id, job.id)


class StatusCounts(NamedTuple):
    by_status: dict[JobStatus, int]  # each count is limited to COUNTED_MAX
    # names of pools that are down and were not counted
    pools_left_out: Sequence[str] = ()


async def count_by_status(context: JobContext, job_filter: JobFilter) -> StatusCounts:
    results, down = await _in_pools(context, lambda tx: store_lists.count_by_status(tx, job_filter))
    sums: defaultdict[JobStatus, int] = defaultdict(int)
    for counts in results:
        for status, count in counts.items():
            sums[status] = min(sums[status] + count, COUNTED_MAX)
    return StatusCounts(dict(sums), down)


class FoundJobs(NamedTuple):
    """A page of jobs, the newest first. `following` is the cursor of the next page, or None on the
    last page.
    """

    jobs: Sequence[ListedJob]
    following: str | None
    pools_left_out: Sequence[str] = ()  # pools that are down and may contain more jobs


async def list_newest(
    context: JobContext, job_filter: JobFilter, *, after: str | None, limit: int
) -> FoundJobs:
    if job_filter.worker_id is not None:
        return await _of_worker(context, job_filter, after=after, limit=limit)
    before = _parse_cursor(after) if after else None
    parts, down = await _in_pools(
        context, lambda tx: store_lists.list_newest(tx, job_filter, before=before, limit=limit)
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
            log.warning("the list doesn't include jobs of pool %s: %s", name, error.message)
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
    return InvalidInput("after must be the `next` value of an earlier page", field="after")


async def _of_worker(
    context: JobContext, job_filter: JobFilter, *, after: str | None, limit: int
) -> FoundJobs:
    """Lists a worker's jobs. Each job is found by its dispatch, which names the worker until the
    dispatch is deleted.
    """
    if after is not None and not after.isdecimal():
        raise _bad_cursor()
    async with context.central.read() as tx:
        rows = await dispatch.list_dispatches(
            tx,
            worker_id=job_filter.worker_id,
            tenant_id=job_filter.tenant_id,
            before_id=int(after) if after else None,
            limit=limit,
        )
    jobs_by_id, down = await _jobs_of(context, rows, job_filter)
    jobs = [jobs_by_id[row.job_id] for row in rows if row.job_id in jobs_by_id]
    return FoundJobs(jobs, str(rows[-1].id) if len(rows) == limit else None, sorted(down))


async def _jobs_of(
    context: JobContext, rows: Sequence[Dispatch], job_filter: JobFilter
) -> tuple[dict[UUID, ListedJob], set[str]]:
    """Returns the matching jobs of these dispatches by id, and the pools that are down."""
    of_tenants: defaultdict[UUID, list[UUID]] = defaultdict(list)
    for row in rows:
        of_tenants[row.tenant_id].append(row.job_id)
    jobs_by_id: dict[UUID, ListedJob] = {}
    down: set[str] = set()
    for tenant_id, job_ids in of_tenants.items():
        name = await context.pool_name_of(tenant_id)
        if name is None or name in down:
            continue
        try:
            async with context.pools[name].read() as tx:
                jobs_by_id |= await _matching(tx, tenant_id, job_ids, job_filter)
        except FleetError as error:
            log.warning("the list doesn't include jobs of pool %s: %s", name, error.message)
            down.add(name)
    return jobs_by_id, down


async def _matching(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID], job_filter: JobFilter
) -> dict[UUID, ListedJob]:
    jobs = await store_lists.get_listed(tx, tenant_id, job_ids)
    if job_filter.error is not None:
        ids_with_error = await store_lists.with_error(tx, job_ids, job_filter.error)
        jobs = [job for job in jobs if job.id in ids_with_error]
    return {job.id: job for job in jobs if job_filter.matches(job)}


JOBS_PER_BULK_MAX = 500
# Maximum number of jobs that are handled concurrently. Each holds a database connection for a
# moment.
AT_ONCE_MAX = 4
NAMED_IN_AUDIT_MAX = 10
# The statuses that each operation selects if the filter contains none.
APPLIES_TO = {
    BulkAct.CANCEL: (JobStatus.QUEUED, JobStatus.PROCESSING),
    BulkAct.RETRY: (JobStatus.FAILED,),
    BulkAct.REPRIORITISE: (JobStatus.QUEUED,),
}
# The statuses that a filter may contain for each operation.
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
    retries: dict[UUID, UUID]  # maps the ids of retried jobs to the ids of the new jobs


class BulkSelection(NamedTuple):
    jobs: Sequence[ListedJob]
    missing: Sequence[UUID] = ()  # requested ids of jobs that were not found
    following: str | None = None  # the cursor for more matching jobs
    pools_left_out: Sequence[str] = ()


async def select_by_ids(context: JobContext, job_ids: Sequence[UUID]) -> BulkSelection:
    jobs_by_id = await find_listed(context, job_ids)
    missing = [job_id for job_id in dict.fromkeys(job_ids) if job_id not in jobs_by_id]
    return BulkSelection(list(jobs_by_id.values()), missing)


async def select_by_filter(
    context: JobContext, act: BulkAct, job_filter: JobFilter, *, after: str | None, limit: int
) -> BulkSelection:
    """Selects a page of jobs that match the filter, the newest first."""
    for status in job_filter.statuses:
        if status not in MAY_BE_FILTERED[act]:
            raise InvalidInput(f"{act} can't be applied to {status} jobs", field="status")
    applicable_filter = replace(job_filter, statuses=job_filter.statuses or APPLIES_TO[act])
    page = await list_newest(context, applicable_filter, after=after, limit=limit)
    return BulkSelection(page.jobs, (), page.following, page.pools_left_out)


async def act_on_all(context: JobContext, order: BulkOrder, chosen: BulkSelection) -> BulkOutcome:
    """Performs the operation on each selected job. Writes one audit entry for the order and one for
    each changed job.
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
    failed = [result for result in results if isinstance(result, BulkFailure)]
    done = {job.id: result for job, result in pairs if not isinstance(result, BulkFailure)}
    await _audit(context, order, [job for job in chosen.jobs if job.id in done], done)
    absent = [
        BulkFailure(job_id, NotFound.code, f"job {job_id} was not found")
        for job_id in chosen.missing
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
        raise Conflict(f"the job has already ended ({ended.status})")
    return None


async def _reprioritise(context: JobContext, order: BulkOrder, job: ListedJob) -> None:
    async with context.central.transaction() as tx:
        row = await dispatch.of_job(tx, job.tenant_id, job.id)
        if row is None:
            raise Conflict(
                "the job isn't in the queue; it is either held for now or has already ended"
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
    """Writes an audit entry for each changed job. Changes of priority have already been audited in
    the transactions that changed the dispatches.
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
    """Submits a job's prompt and files again for an operator. No user pays for the new job, and it
    doesn't affect the original job's media item or run.
    """
    if job.status.is_active:
        raise Conflict("the job has not ended yet; wait for it or cancel it")
    spec = replay_spec(job, backend_affinity, priority)
    (added,) = await submit_many(context, job.tenant_id, {context.new_id(): spec})
    return added


def replay_spec(job: Job, backend_affinity: str | None, priority: int) -> JobSpec:
    spec = job.spec
    if not spec.prompt:
        raise Refused("the job's prompt was deleted after its retention time; submit a new job")
    if spec.gateway is not None:
        raise Refused(
            "a prompt from a ComfyUI client can't be replayed; submit it again with the client"
        )
    return JobSpec(
        workflow_id=spec.workflow_id,
        workflow_slug=spec.workflow_slug,
        workflow_version=spec.workflow_version,
        prompt=spec.prompt,
        properties=spec.properties,
        assets=spec.assets,
        output_node_id=spec.output_node_id,
        stage=spec.stage,
        provider=spec.provider,
        priority=priority,
        backend_affinity=backend_affinity,
        model_key=spec.model_key,
        model_set=spec.model_set,
        retry_of=job.id,
    )
