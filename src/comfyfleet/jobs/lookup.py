"""Jobs as operators look for them: by the id alone, and over all tenants."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from comfyfleet.dispatch import service as dispatch
from comfyfleet.jobs import store
from comfyfleet.jobs.model import Attempt, Job, JobStatus
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError, InvalidInput, NotFound, Unavailable

log = logging.getLogger(__name__)
CURSOR_SEPARATOR = "~"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is not given is not asked for."""

    status: JobStatus | None = None
    tenant_id: UUID | None = None
    workflow_slug: str | None = None
    worker_id: str | None = None  # the last that had it
    since: datetime | None = None


async def find(sides: Sides, job_id: UUID) -> Job:
    """Whosever it is. A pool that is down may hold it: then nobody can tell that there is none."""
    down = []
    for name, pool in sides.pools.items():
        try:
            async with pool.look() as tx:
                job = await store.anywhere(tx, job_id)
        except FleetError as error:
            log.warning("jobs of pool %s can't be looked up: %s", name, error.message)
            down.append(name)
            continue
        if job is not None:
            return job
    if down:
        raise Unavailable(
            f"there is no job {job_id} but perhaps in the pool {down[0]}, which is down"
        )
    raise NotFound(f"there is no job {job_id}")


async def attempts_of(sides: Sides, job: Job) -> list[Attempt]:
    pool = await sides.pool_of(job.tenant_id)
    await sides.deferred.flush()
    async with pool.look() as tx:
        return await store.attempts_of(tx, job.tenant_id, job.id)


class Page(NamedTuple):
    """The newest first; `following` is where to go on, None: that was all."""

    jobs: Sequence[Job]
    following: str | None
    pools_left_out: Sequence[str] = ()  # they are down: there may be more


async def newest(sides: Sides, wanted: Wanted, *, after: str | None, limit: int) -> Page:
    if wanted.worker_id is not None:
        return await _of_worker(sides, wanted, after=after, limit=limit)
    before = _place(after) if after else None
    columns = {
        "status": wanted.status,
        "tenant_id": wanted.tenant_id,
        "workflow_slug": wanted.workflow_slug,
    }
    found: list[Job] = []
    down = []
    for name, pool in sides.pools.items():
        try:
            async with pool.look() as tx:
                found += await store.newest(
                    tx, columns, since=wanted.since, before=before, limit=limit
                )
        except FleetError as error:
            log.warning("jobs of pool %s are left out: %s", name, error.message)
            down.append(name)
    page = sorted(found, key=lambda job: (job.submitted_at, job.id), reverse=True)[:limit]
    return Page(page, _told(page[-1]) if len(page) == limit else None, down)


def _told(job: Job) -> str:
    return f"{job.submitted_at.isoformat()}{CURSOR_SEPARATOR}{job.id}"


def _place(after: str) -> tuple[datetime, UUID]:
    at, _, job_id = after.partition(CURSOR_SEPARATOR)
    try:
        moment, place = datetime.fromisoformat(at), UUID(job_id)
    except ValueError:
        raise _no_place() from None
    if moment.tzinfo is None:
        raise _no_place()
    return moment, place


def _no_place() -> InvalidInput:
    return InvalidInput("this is no place that a page has told", field="after")


async def _of_worker(sides: Sides, wanted: Wanted, *, after: str | None, limit: int) -> Page:
    """Which worker had a job is known to its dispatch, for as long as that is kept."""
    if after is not None and not after.isdecimal():
        raise _no_place()
    async with sides.central.look() as tx:
        rows = await dispatch.list_(
            tx,
            worker_id=wanted.worker_id,
            tenant_id=wanted.tenant_id,
            before_id=int(after) if after else None,
            limit=limit,
        )
    jobs = []
    down: set[str] = set()
    for row in rows:
        name = await sides.pool_name_of(row.tenant_id)
        if name is None or name in down:
            continue
        try:
            async with sides.pools[name].look() as tx:
                job = await store.get(tx, row.tenant_id, row.job_id)
        except FleetError as error:
            log.warning("jobs of pool %s are left out: %s", name, error.message)
            down.add(name)
            continue
        if job is not None and _fits(job, wanted):
            jobs.append(job)
    return Page(jobs, str(rows[-1].id) if len(rows) == limit else None, sorted(down))


def _fits(job: Job, wanted: Wanted) -> bool:
    return (
        wanted.status in (None, job.status)
        and wanted.workflow_slug in (None, job.asked.workflow_slug)
        and (wanted.since is None or job.submitted_at >= wanted.since)
    )
