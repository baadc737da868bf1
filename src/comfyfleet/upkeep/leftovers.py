"""Objects that no row names: of uploads that were given up, of leases that were lost, of cuts."""

import re
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from comfyfleet.jobs.sides import Sides
from comfyfleet.upkeep import store
from comfyfleet.upkeep.retaining import delete_keys

# Documents of operators (central/…) are never looked at: they are named by other rows.
TENANTS_PREFIX = "tenants/"
LEFT_FOR = timedelta(days=1)
PAGE = 500
_KEY = re.compile(r"tenants/(?P<tenant>[0-9a-f-]{36})/(?:ai-jobs/(?P<job>[0-9a-f-]{36})/)?")


async def remove_leftovers(sides: Sides) -> int:
    """How many went. Who writes at this moment is let finish: only what is a day old counts."""
    removed, some = 0, []
    before = sides.clock() - LEFT_FOR
    async for each in sides.store.listed(TENANTS_PREFIX):
        if each.modified_at < before:
            some.append(each.key)
        if len(some) == PAGE:
            removed += await _remove_unnamed(sides, some)
            some = []
    return removed + await _remove_unnamed(sides, some)


async def _remove_unnamed(sides: Sides, keys: Sequence[str]) -> int:
    """A tenant lives in one pool; that any of them names the key is enough to keep it."""
    unnamed = set(keys)
    for _, pool in sides.pools.items():
        if not unnamed:
            return 0
        async with pool.look() as tx:
            unnamed -= await store.known_paths(tx, unnamed)
            at_work = await store.active_among(tx, _jobs_of(unnamed))
        # What a lease has delivered is named only when it is completed.
        unnamed -= {key for key in unnamed if _job_of(key) in at_work}
    await delete_keys(sides, sorted(unnamed))
    return len(unnamed)


def _jobs_of(keys: set[str]) -> set[UUID]:
    return {job for key in keys if (job := _job_of(key))}


def _job_of(key: str) -> UUID | None:
    found = _KEY.match(key)
    try:
        return UUID(found["job"]) if found and found["job"] else None
    except ValueError:
        return None


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
