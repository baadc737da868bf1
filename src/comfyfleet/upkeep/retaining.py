"""Retention: media, files and graph runs of a tenant go when their time is up; the ledger stays.

Rows go first and objects after the commit, so that a cut costs space, which the sweep of leftovers
gives back, and never a file that somebody still counts on.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from comfyfleet.db import Database, Tx
from comfyfleet.files.model import File
from comfyfleet.graphs import expiring as graph_runs
from comfyfleet.jobs.sides import Sides
from comfyfleet.media import service as media
from comfyfleet.tenants import service as tenants
from comfyfleet.tenants.model import Tenant
from comfyfleet.upkeep import store
from comfyfleet.upkeep.keys import job_of

PAGE = 200
DELETES_AT_ONCE_MAX = 8


async def expire_old(sides: Sides) -> dict[UUID, int]:
    """How many files of which tenants went."""
    async with sides.central.look() as tx:
        found = await tenants.all_of(tx)
    gone: dict[UUID, int] = {}
    for tenant in found:
        days = tenant.retention_days or sides.settings.retention_days
        if days and tenant.erasing_at is None:
            before = sides.clock() - timedelta(days=days)
            if count := await _expire_of(sides, tenant, before):
                gone[tenant.id] = count
    return gone


async def _expire_of(sides: Sides, tenant: Tenant, before: datetime) -> int:
    pool = sides.pools[tenant.pool]
    is_more = True
    while is_more:
        async with pool.begin() as tx:
            expired = await media.expire(
                tx, tenant.id, before=before, now=sides.clock(), limit=PAGE
            )
        is_more = len(expired) == PAGE
    await graph_runs.expire_runs(pool, tenant.id, before=before)
    return await _remove_old_files(sides, pool, tenant.id, before)


async def _remove_old_files(sides: Sides, pool: Database, tenant_id: UUID, before: datetime) -> int:
    """All but those that younger media, jobs or runs still need: the same content is stored once."""
    removed, last = 0, None
    while True:
        async with pool.begin() as tx:
            page = await store.old_files(tx, tenant_id, before=before, after=last, limit=PAGE)
            ids = {each.id for each in page}
            needed = await store.named_by_media(tx, tenant_id, ids) if ids else set()
            if ids - needed:
                needed |= await store.named_by_active_jobs(tx, tenant_id)
                needed |= await _needed_by_runs(tx, tenant_id, page, before)
            unneeded = [each for each in page if each.id not in needed]
            await store.remove_files(tx, tenant_id, [each.id for each in unneeded])
        await delete_objects(sides, unneeded)
        removed += len(unneeded)
        if len(page) < PAGE:
            return removed
        last = page[-1]


async def _needed_by_runs(
    tx: Tx, tenant_id: UUID, page: Sequence[File], before: datetime
) -> set[UUID]:
    """What a node or a step may take up yet: given to a run, or made in one."""
    made_by = {each.id: job for each in page if (job := job_of(each.path))}
    given = await graph_runs.files_given(tx, tenant_id)
    if not made_by:
        return given
    jobs = await store.jobs_of_living_runs(tx, tenant_id, set(made_by.values()), since=before)
    return given | {file_id for file_id, job in made_by.items() if job in jobs}


async def delete_objects(sides: Sides, removed: Sequence[File]) -> None:
    """After the commit that removed their rows."""
    await delete_keys(sides, [each.path for each in removed])


async def delete_keys(sides: Sides, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), DELETES_AT_ONCE_MAX):
        some = keys[start : start + DELETES_AT_ONCE_MAX]
        await asyncio.gather(*(sides.store.delete(key) for key in some))
