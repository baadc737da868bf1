"""Objects that no row names: of uploads that were given up, of leases that were lost, of cuts."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from comfyfleet.db import Database
from comfyfleet.jobs.sides import Sides
from comfyfleet.tenants import service as tenants
from comfyfleet.upkeep import store
from comfyfleet.upkeep.keys import job_of, owner_of
from comfyfleet.upkeep.retaining import delete_keys

# Documents of operators (central/…) are never looked at: they are named by other rows.
TENANTS_PREFIX = "tenants/"
LEFT_FOR = timedelta(days=1)
PAGE = 500


async def remove_leftovers(sides: Sides) -> int:
    """How many went. Who writes at this moment is let finish: only what is a day old counts.

    Tenants that we don't know, and those of a pool that we have not, lose nothing: a setting that is
    wrong or a backup that is older than the store must not cost anybody's files.
    """
    pools = await _pools_by_tenant(sides)
    removed, some = 0, defaultdict[UUID, list[str]](list)
    before = sides.clock() - LEFT_FOR
    async for each in sides.store.listed(TENANTS_PREFIX):
        owner = owner_of(each.key)
        if each.modified_at >= before or owner not in pools:
            continue
        some[owner].append(each.key)
        if len(some[owner]) == PAGE:
            removed += await _remove_unnamed(sides, pools[owner], some.pop(owner))
    for owner, keys in some.items():
        removed += await _remove_unnamed(sides, pools[owner], keys)
    return removed


async def _pools_by_tenant(sides: Sides) -> dict[UUID, Database]:
    async with sides.central.look() as tx:
        found = await tenants.all_of(tx)
    pools = dict(sides.pools.items())
    return {each.id: pools[each.pool] for each in found if each.pool in pools}


async def _remove_unnamed(sides: Sides, pool: Database, keys: Sequence[str]) -> int:
    async with pool.look() as tx:
        unnamed = set(keys) - await store.known_paths(tx, keys)
        jobs = {job for key in unnamed if (job := job_of(key))}
        at_work = await store.active_among(tx, jobs) if jobs else set()
    # What a lease has delivered is named only when it is completed.
    leftover = [key for key in sorted(unnamed) if job_of(key) not in at_work]
    await delete_keys(sides, leftover)
    return len(leftover)


async def remove_all_of(sides: Sides, tenant_id: UUID) -> int:
    """Every object of a tenant, whatever names it."""
    removed, some = 0, []
    async for each in sides.store.listed(f"{TENANTS_PREFIX}{tenant_id}/"):
        some.append(each.key)
        if len(some) == PAGE:
            await delete_keys(sides, some)
            removed, some = removed + len(some), []
    await delete_keys(sides, some)
    return removed + len(some)
