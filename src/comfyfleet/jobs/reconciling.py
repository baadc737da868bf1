"""Finds what no retry and no sweep has put right, page by page, and repairs it. All is audited.

Both sides are compared by sets: some queries for each page, however many rows it has. A pass may end
before all is read, and tells where the next one goes on.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

from comfyfleet.audit import service as audit
from comfyfleet.db import Database
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import ActiveRow, Dispatch
from comfyfleet.jobs import service, store
from comfyfleet.jobs.complaints import UNKNOWN
from comfyfleet.jobs.model import Failure, Job, JobStatus
from comfyfleet.jobs.settling import align, deliver, end_dispatch_of
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError, InvalidInput

log = logging.getLogger(__name__)
PAGE = 2000
# What is younger is still on its way between the two databases.
SETTLED = timedelta(seconds=30)
LEASED, QUEUED, POOL = "leased", "queued", "pool"
Keys: TypeAlias = tuple[UUID, UUID]  # of a job: its tenant, and its own


@dataclass(frozen=True)
class Repairs:
    dispatches_ended: int = 0
    dispatches_made: int = 0
    pools_skipped: int = 0
    rows_read: int = 0
    next: str | None = None  # where to go on; None: all was read

    def __add__(self, other: "Repairs") -> "Repairs":
        return Repairs(
            self.dispatches_ended + other.dispatches_ended,
            self.dispatches_made + other.dispatches_made,
            self.pools_skipped + other.pools_skipped,
            self.rows_read + other.rows_read,
        )


@dataclass(frozen=True)
class Place:
    """How far a pass has come: leased dispatches first, then queued ones, then jobs by pool."""

    stage: str = LEASED
    pool: str = ""
    after: tuple[Any, ...] = ()

    def as_text(self) -> str:
        return json.dumps([self.stage, self.pool, *self.after], default=str)


def place_of(text: str) -> Place:
    try:
        stage, pool, *after = json.loads(text)
        if stage == LEASED:
            return Place(LEASED, after=tuple(map(int, after)))
        if stage == QUEUED:
            return Place(QUEUED, after=_share(*after) if after else ())
        return Place(POOL, str(pool), tuple(map(UUID, after)))
    except (ValueError, TypeError, AttributeError):
        raise InvalidInput("this is no place that a pass has told", field="after") from None


def _share(
    tenant_id: str, workflow_id: int, stage: str, provider: str, priority: int, *rest: int
) -> tuple[Any, ...]:
    rank, row_id = rest
    numbers = map(int, (priority, rank, row_id))
    return UUID(tenant_id), int(workflow_id), str(stage), str(provider), *numbers


async def reconcile(
    sides: Sides, *, after: str | None = None, rows_max: int | None = None
) -> Repairs:
    """From where an earlier pass has ended, about so many rows; else all of them."""
    place: Place | None = place_of(after) if after else Place()
    repairs = Repairs()
    while place is not None:
        if rows_max is not None and repairs.rows_read >= rows_max:
            return replace(repairs, next=place.as_text())
        found, place = await _page_at(sides, place)
        repairs += found
    return repairs


async def _page_at(sides: Sides, place: Place) -> tuple[Repairs, Place | None]:
    if place.stage == POOL:
        return await _pool_page(sides, place)
    before = sides.clock() - SETTLED
    on: Place | None
    async with sides.central.look() as tx:
        if place.stage == LEASED:
            last = place.after[0] if place.after else 0
            rows = await dispatch.leased_after(tx, last, before=before, limit=PAGE)
            on = Place(LEASED, after=(rows[-1].id,)) if len(rows) == PAGE else Place(QUEUED)
        else:
            rows, going_on = await dispatch.queued_after(
                tx, place.after or None, before=before, limit=PAGE
            )
            on = Place(QUEUED, after=tuple(going_on)) if going_on else _pool_after(sides, "")
    ended = await _end_orphans(sides, rows)
    return Repairs(dispatches_ended=ended, rows_read=len(rows)), on


def _pool_after(sides: Sides, name: str) -> Place | None:
    following = sorted(each for each in sides.pools if each > name)
    return Place(POOL, following[0]) if following else None


async def _pool_page(sides: Sides, place: Place) -> tuple[Repairs, Place | None]:
    """A pool that is down, or was taken away, holds up no other."""
    name = place.pool
    try:
        keys, repairs = await _compare_jobs(sides, sides.pools[name], place.after)
    except FleetError as error:
        log.warning("pool %s was left out: %s", name, error.message)
        return Repairs(pools_skipped=1), _pool_after(sides, name)
    except Exception:
        log.exception("pool %s was left out", name)
        return Repairs(pools_skipped=1), _pool_after(sides, name)
    on = Place(POOL, name, keys[-1]) if len(keys) == PAGE else _pool_after(sides, name)
    return repairs, on


async def _end_orphans(sides: Sides, rows: Sequence[ActiveRow]) -> int:
    """Dispatches whose job is gone or ended are ended."""
    ended = 0
    for pool, part in (await _by_pool(sides, rows)).items():
        try:
            known = await _known(sides, pool, part)
        except FleetError as error:
            log.warning("%s dispatches were left as they are: %s", len(part), error.message)
            continue
        for row in part:
            ended += await _alone(row.id, _end_if_orphaned, sides, row, known)
    return ended


async def _by_pool(sides: Sides, rows: Sequence[ActiveRow]) -> dict[str | None, list[ActiveRow]]:
    """None: of tenants that are gone."""
    parts: dict[str | None, list[ActiveRow]] = defaultdict(list)
    for row in rows:
        parts[await sides.pool_name_of(row.tenant_id)].append(row)
    return parts


async def _known(
    sides: Sides, pool: str | None, rows: Sequence[ActiveRow]
) -> dict[Keys, JobStatus]:
    if pool is None:
        return {}
    async with sides.pools[pool].look() as tx:
        return await store.known(tx, [row.job_id for row in rows])


async def _end_if_orphaned(sides: Sides, row: ActiveRow, known: dict[Keys, JobStatus]) -> bool:
    status = known.get((row.tenant_id, row.job_id))
    if status is not None and (status.is_active or row.cancel_requested):
        return False  # of those that are to be cancelled, the worker is told with its heartbeat
    job = None if status is None else await _job(sides, row.tenant_id, row.job_id)
    if job and job.status.is_active:
        return False
    await end_dispatch_of(sides, row, job)
    await _note(sides, row.id, row.tenant_id, f"job is {job.status}" if job else "job is gone")
    return True


async def _job(sides: Sides, tenant_id: UUID, job_id: UUID) -> Job | None:
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        return await store.get(tx, tenant_id, job_id)


async def _alone(name: object, act: Callable[..., Awaitable[bool]], *given: object) -> bool:
    """One row that can't be repaired holds up no other."""
    try:
        return await act(*given)
    except FleetError as error:
        log.warning("%s was left as it is: %s", name, error.message)
    except Exception:
        log.exception("%s was left as it is", name)
    return False


async def _compare_jobs(
    sides: Sides, pool: Database, after: tuple[Any, ...]
) -> tuple[list[Keys], Repairs]:
    """Active jobs without a dispatch get one; those whose dispatch has ended fail."""
    before = sides.clock() - SETTLED
    place = (after[0], after[1]) if after else None
    async with pool.look() as tx:
        keys = await store.active_after(tx, place, before=before, limit=PAGE)
    async with sides.central.look() as tx:
        has_ended = await dispatch.have_ended(tx, keys)
    made = await _make_dispatches(sides, pool, [each for each in keys if each[1] not in has_ended])
    for tenant_id, job_id in keys:
        if has_ended.get(job_id):
            await _alone(job_id, _fail_with_its_dispatch, sides, pool, tenant_id, job_id)
    return keys, Repairs(dispatches_made=made, rows_read=len(keys))


async def _make_dispatches(sides: Sides, pool: Database, forgotten: Sequence[Keys]) -> int:
    ids_of: dict[UUID, list[UUID]] = defaultdict(list)
    for tenant_id, job_id in forgotten:
        ids_of[tenant_id].append(job_id)
    made = 0
    for tenant_id, job_ids in ids_of.items():
        async with pool.look() as tx:
            jobs = await store.some(tx, tenant_id, job_ids)
        await align(sides, jobs)
        for job in jobs:
            await _note_made(sides, job)
        made += len(jobs)
    return made


async def _note(sides: Sides, dispatch_id: int, tenant_id: UUID, found: str) -> None:
    async with sides.central.begin() as tx:
        await audit.record(
            tx,
            actor="sweep",
            action="reconcile",
            subject=f"dispatch:{dispatch_id}",
            now=sides.clock(),
            tenant_id=tenant_id,
            details={"found": found},
        )


async def _note_made(sides: Sides, job: Job) -> None:
    async with sides.central.begin() as tx:
        await audit.record(
            tx,
            actor="sweep",
            action="reconcile",
            subject=f"job:{job.id}",
            now=sides.clock(),
            tenant_id=job.tenant_id,
            details={"found": "an active job without a dispatch"},
        )


async def _fail_with_its_dispatch(
    sides: Sides, pool: Database, tenant_id: UUID, job_id: UUID
) -> bool:
    """A dispatch never ends before its job, unless an operator or a restored backup made it so."""
    async with sides.central.look() as tx:
        row: Dispatch | None = await dispatch.of_job(tx, tenant_id, job_id)
    if row is None or row.ended_at is None:
        return False
    why = Failure(UNKNOWN, f"its dispatch is {row.status}: {row.last_error}")
    async with pool.begin() as tx:
        failed, words = await service.give_up(
            tx, tenant_id, job_id, why, new_id=sides.new_id, now=sides.clock()
        )
    if failed:
        await deliver(sides, pool, [failed], words)
        found = f"job was active while its dispatch is {row.status}"
        await _note(sides, row.id, row.tenant_id, found)
    return failed is not None
