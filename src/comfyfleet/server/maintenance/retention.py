"""Retention: deletes expired media, files, runs, audit entries, events and ended dispatches,
objects without a row, and all private data of an erased tenant. The ledger is kept."""

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from time import monotonic
from typing import TypeAlias
from uuid import UUID

from comfyfleet.server.db import Database, Tx, for_each_pool
from comfyfleet.server.db.outages import errors_logged
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.graphs import actions as graph_actions
from comfyfleet.server.jobs import store as job_store
from comfyfleet.server.jobs import store_prompts, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.maintenance import store
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, job_in_key, owner_of_small, small_key
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.service import prune_audit, record_audit
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import EndedDispatch
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Tenant
from comfyfleet.server.triggers import prune_firings

_KEY = re.compile(r"tenants/(?P<tenant>[0-9a-f-]{36})/")


def tenant_in_key(key: str) -> UUID | None:
    """Returns the tenant of an object's key."""
    match = _KEY.match(key)
    try:
        return UUID(match["tenant"]) if match else None
    except ValueError:
        return None


EXPIRED_PER_PAGE = 200
DELETES_AT_ONCE_MAX = 8


async def expire_old(context: JobContext) -> dict[UUID, int]:
    """Deletes old files. Returns their number per tenant."""
    async with context.central.read() as tx:
        all_tenants = await tenants.list_tenants(tx)
    removed: dict[UUID, int] = {}
    for tenant in all_tenants:
        days = tenant.retention_days or context.settings.retention_days
        if days and tenant.erasing_at is None:
            before = context.clock() - timedelta(days=days)
            if count := await _expire_of(context, tenant, before):
                removed[tenant.id] = count
    return removed


async def _expire_of(context: JobContext, tenant: Tenant, before: datetime) -> int:
    pool = context.pools[tenant.pool]
    is_more = True
    while is_more:
        async with pool.transaction() as tx:
            expired = await media.expire_media(
                tx, tenant.id, before=before, now=context.clock(), limit=EXPIRED_PER_PAGE
            )
        is_more = len(expired) == EXPIRED_PER_PAGE
    await graph_actions.expire_runs(pool, tenant.id, before=before)
    return await _remove_old_files(context, pool, tenant.id, before)


async def _remove_old_files(
    context: JobContext, pool: Database, tenant_id: UUID, before: datetime
) -> int:
    """Deletes old files, except those that newer media, jobs or runs still need. Files with the
    same content are stored only once."""
    removed, last = 0, None
    while True:
        async with pool.transaction() as tx:
            page = await store.old_files(
                tx, tenant_id, before=before, after=last, limit=EXPIRED_PER_PAGE
            )
            ids = {file.id for file in page}
            needed = await store.named_by_media(tx, tenant_id, ids) if ids else set()
            if ids - needed:
                needed |= await store.named_by_active_jobs(tx, tenant_id)
                needed |= await _needed_by_runs(tx, tenant_id, page, before)
            unneeded = [file for file in page if file.id not in needed]
            await _remove_rows_of(tx, tenant_id, unneeded)
        await delete_objects(context, unneeded)
        removed += len(unneeded)
        if len(page) < EXPIRED_PER_PAGE:
            return removed
        last = page[-1]


async def _remove_rows_of(tx: Tx, tenant_id: UUID, removed: Sequence[File]) -> None:
    """Deletes the rows of files and their names. Viewing such a file then returns 404, and its name
    can be reused."""
    ids = [file.id for file in removed]
    jobs = {job for file in removed if (job := job_in_key(file.path))}
    if ids:
        await store.remove_files(tx, tenant_id, ids)
        await store.remove_file_names(tx, tenant_id, ids, jobs)


async def _needed_by_runs(
    tx: Tx, tenant_id: UUID, page: Sequence[File], before: datetime
) -> set[UUID]:
    """Returns the files that a run may still use: its inputs, and files that it generated or reused
    from an earlier run."""
    made_by = {file.id: job for file in page if (job := job_in_key(file.path))}
    input_ids = await graph_actions.input_files_of_open_runs(tx, tenant_id)
    if not made_by:
        return input_ids
    jobs = await store.jobs_of_living_runs(tx, tenant_id, set(made_by.values()), since=before)
    jobs |= await graph_actions.jobs_reused_by_open_runs(tx, tenant_id)
    return input_ids | {file_id for file_id, job in made_by.items() if job in jobs}


async def delete_objects(context: JobContext, removed: Sequence[File]) -> None:
    """Deletes objects. Must be called after the commit that deleted their rows."""
    # Images first, because a process that creates a thumbnail afterwards checks whether the image
    # still exists.
    await delete_keys(context, [file.path for file in removed])
    await delete_keys(context, [small_key(file.path) for file in removed])


async def delete_keys(context: JobContext, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), DELETES_AT_ONCE_MAX):
        some = keys[start : start + DELETES_AT_ONCE_MAX]
        await asyncio.gather(*(context.store.delete(key) for key in some))


ROWS_PER_STEP = 500
STEPS_PER_PASS_MAX = 200
# Messages for ComfyUI clients are kept for this long. A client that was offline for longer finds
# the results of its runs in the history.
MESSAGES_KEPT = timedelta(hours=1)
# Overwritten uploads are kept for this long, because prompts that were already accepted may use
# them.
REPLACED_KEPT = timedelta(days=1)
# Expired links are kept for this long, so that their pages can show that they have expired.
SHARES_KEPT = timedelta(days=30)
PAUSE_SECONDS_MAX = 1.0
# Deletes at most the given number of rows, and returns how many it deleted.
Step: TypeAlias = Callable[[int], Awaitable[int]]


async def delete_expired_rows(context: JobContext) -> dict[str, int]:
    """Deletes expired rows. Returns their number by kind. A retention of 0 days means forever."""
    settings, central = context.settings, context.central
    removed: dict[str, int] = {}
    if before := _before(context, days=settings.audit_keep_days):
        removed["audit"] = await _in_steps(_step(central, prune_audit, before))
    if before := _before(context, hours=settings.reading_keep_hours):
        removed["readings"] = await _in_steps(_step(central, fleets.prune_readings, before))
    if before := _before(context, days=settings.dispatch_keep_days):
        removed["dispatches"] = await remove_dispatches(context, before)
    delete = partial(_delete_expired_in_pool, context)
    for of_pool in (
        await for_each_pool(context.pools, delete, "its old rows are kept for now")
    ).values():
        for what, count in of_pool.items():
            removed[what] = removed.get(what, 0) + count
    return removed


async def _delete_expired_in_pool(context: JobContext, pool: Database) -> dict[str, int]:
    settings, removed = context.settings, {}
    if before := _before(context, days=settings.event_keep_days):
        removed["events"] = await _in_steps(_step(pool, notifications.prune_events, before))
    if before := _before(context, days=settings.delivery_keep_days):
        removed["deliveries"] = await _in_steps(_step(pool, webhooks.prune_deliveries, before))
        removed["firings"] = await _in_steps(_step(pool, prune_firings, before))
    removed["messages"] = await _in_steps(
        _step(pool, run_log.prune_live, context.clock() - MESSAGES_KEPT)
    )
    removed["previews"] = await _in_steps(
        _step(pool, store_prompts.prune_previews, context.clock() - MESSAGES_KEPT)
    )
    removed["replaced"] = await _in_steps(_replaced(context, pool, context.clock() - REPLACED_KEPT))
    removed["shares"] = await _in_steps(
        _step(pool, media.prune_shares, context.clock() - SHARES_KEPT)
    )
    if before := _before(context, days=settings.prompt_keep_days):
        removed["prompts"] = await _in_steps(_prompts(context, pool, before))
    return removed


def _before(context: JobContext, **retention: int) -> datetime | None:
    """Returns the time before which rows have expired. None means they are kept forever."""
    age = timedelta(**retention)
    return context.clock() - age if age else None


def _step(database: Database, prune: Callable[..., Awaitable[int]], before: datetime) -> Step:
    async def step(limit: int) -> int:
        async with database.transaction() as tx:
            return await prune(tx, before=before, limit=limit)

    return step


def _prompts(context: JobContext, pool: Database, before: datetime) -> Step:
    async def step(limit: int) -> int:
        async with pool.transaction() as tx:
            return await job_store.remove_prompts(
                tx, ended_before=before, now=context.clock(), limit=limit
            )

    return step


def _replaced(context: JobContext, pool: Database, before: datetime) -> Step:
    """Builds a step that deletes overwritten uploads, unless a media item, an active job or an open
    run still needs them."""

    async def step(limit: int) -> int:
        async with pool.transaction() as tx:
            replaced = await store.replaced_files(tx, before=before, limit=limit)
            unneeded: list[File] = []
            for tenant_id, some in replaced.items():
                ids = {file.id for file in some}
                needed = await store.named_by_media(tx, tenant_id, ids)
                needed |= await store.named_by_active_jobs(tx, tenant_id)
                needed |= await graph_actions.input_files_of_open_runs(tx, tenant_id)
                deletable = [file for file in some if file.id not in needed]
                await _remove_rows_of(tx, tenant_id, deletable)
                unneeded += deletable
        await delete_objects(context, unneeded)
        return len(unneeded)

    return step


async def _in_steps(step: Step) -> int:
    total = 0
    for _ in range(STEPS_PER_PASS_MAX):
        begun = monotonic()
        count = await step(ROWS_PER_STEP)
        total += count
        if count < ROWS_PER_STEP:
            break
        await _pause(begun)
    return total


async def _pause(begun: float) -> None:
    await asyncio.sleep(min(PAUSE_SECONDS_MAX, monotonic() - begun))


async def remove_dispatches(context: JobContext, before: datetime) -> int:
    """Deletes dispatches that ended before the given time. Keeps dispatches of jobs that have not
    ended.

    An active job without a dispatch would get a second one, so dispatches that can't be compared
    with their jobs are kept."""
    total, last = 0, None
    for _ in range(STEPS_PER_PASS_MAX):
        begun = monotonic()
        async with context.central.read() as tx:
            page = await dispatch.ended_before(tx, before, after=last, limit=ROWS_PER_STEP)
        may_go = await _of_ended_jobs(context, page)
        async with context.central.transaction() as tx:
            total += await dispatch.remove(tx, may_go)
        if len(page) < ROWS_PER_STEP:
            break
        last = page[-1]
        await _pause(begun)
    return total


async def _of_ended_jobs(context: JobContext, page: Sequence[EndedDispatch]) -> list[int]:
    parts: dict[str | None, list[EndedDispatch]] = defaultdict(list)
    for row in page:
        parts[await context.pool_name_of(row.tenant_id)].append(row)
    may_go = [row.id for row in parts.pop(None, [])]  # dispatches whose tenant no longer exists
    for name, part in parts.items():
        with errors_logged(f"pool {name}: ended dispatches are kept for now"):
            async with context.pools[name or ""].read() as tx:
                known = await job_store.statuses_of(tx, [row.job_id for row in part])
            active = {keys for keys, status in known.items() if status.is_active}
            may_go += [row.id for row in part if (row.tenant_id, row.job_id) not in active]
    return may_go


# Documents of operators (central/…) are not examined, because other rows refer to them.
TENANTS_PREFIX = "tenants/"
ORPHANED_AFTER = timedelta(days=1)
OBJECTS_PER_PAGE = 500


async def remove_orphans(context: JobContext) -> int:
    """Deletes objects without a row. They must be a day old, so that writes in progress can finish.
    Returns their number.

    Objects of unknown tenants and of missing pools are kept, so that a wrong setting or an old
    backup can't delete anyone's files."""
    pools = await _pools_by_tenant(context)
    removed, some = 0, defaultdict[UUID, list[str]](list)
    before = context.clock() - ORPHANED_AFTER
    async for listed in context.store.listed(TENANTS_PREFIX):
        owner = tenant_in_key(listed.key)
        if listed.modified_at >= before or owner not in pools:
            continue
        some[owner].append(listed.key)
        if len(some[owner]) == OBJECTS_PER_PAGE:
            removed += await _remove_unnamed(context, pools[owner], some.pop(owner))
    for owner, keys in some.items():
        removed += await _remove_unnamed(context, pools[owner], keys)
    return removed


async def _pools_by_tenant(context: JobContext) -> dict[UUID, Database]:
    async with context.central.read() as tx:
        all_tenants = await tenants.list_tenants(tx)
    pools = dict(context.pools.items())
    return {tenant.id: pools[tenant.pool] for tenant in all_tenants if tenant.pool in pools}


COUNTED_OBJECTS_MAX = 100_000


async def count_unnamed(context: JobContext, tenant_id: UUID) -> tuple[int, bool]:
    """Counts a tenant's objects without a row, of any age. Also returns whether all objects were
    examined."""
    pool, unnamed, seen = await context.pool_of(tenant_id), 0, 0
    some: list[str] = []
    async for listed in context.store.listed(f"{TENANTS_PREFIX}{tenant_id}/"):
        if seen == COUNTED_OBJECTS_MAX:
            break
        seen += 1
        some.append(listed.key)
        if len(some) == OBJECTS_PER_PAGE:
            unnamed += len(await _unnamed(pool, some))
            some = []
    else:
        return unnamed + len(await _unnamed(pool, some)), True
    return unnamed + len(await _unnamed(pool, some)), False


async def _remove_unnamed(context: JobContext, pool: Database, keys: Sequence[str]) -> int:
    leftover = await _unnamed(pool, keys)
    await delete_keys(context, leftover)
    return len(leftover)


async def _unnamed(pool: Database, keys: Sequence[str]) -> list[str]:
    """Returns the keys without a row. Leaves out keys of running jobs, because a job's rows are
    created when it ends."""
    async with pool.read() as tx:
        known = await store.known_paths(tx, {*keys, *map(owner_of_small, keys)})
        unnamed = {key for key in keys if known.isdisjoint((key, owner_of_small(key)))}
        jobs = {job for key in unnamed if (job := job_in_key(key))}
        at_work = await store.active_among(tx, jobs) if jobs else set()
    return [key for key in sorted(unnamed) if job_in_key(key) not in at_work]


async def remove_tenant_objects(context: JobContext, tenant_id: UUID) -> int:
    """Deletes all objects of a tenant, whether or not a row refers to them."""
    removed, some = 0, []
    async for listed in context.store.listed(f"{TENANTS_PREFIX}{tenant_id}/"):
        some.append(listed.key)
        if len(some) == OBJECTS_PER_PAGE:
            await delete_keys(context, some)
            removed, some = removed + len(some), []
    await delete_keys(context, some)
    return removed + len(some)


ERASED_PER_PAGE = 500
ACTION = "erase_tenant"


async def begin_erasure(
    context: JobContext, tenant_id: UUID, *, actor: str, now: datetime
) -> Tenant:
    """Closes the tenant. A sweep then erases its data. Repeating the call has no effect."""
    async with context.central.transaction() as tx:
        before = await tenants.get_tenant(tx, tenant_id)
        tenant = await tenants.begin_erasing(tx, tenant_id, now=now)
        removed = await tenants.delete_keys_of(tx, tenant_id)
        if before.erasing_at is None:
            await record_audit(
                tx,
                actor,
                ACTION,
                tenant.subject,
                now,
                tenant_id,
                step="begun",
                keys_removed=removed,
            )
    return tenant


async def erase_pending_tenants(context: JobContext) -> int:
    """Continues all unfinished erasures."""
    async with context.central.read() as tx:
        erasing = [tenant for tenant in await tenants.list_tenants(tx) if tenant.erasing_at]
    pending = [tenant for tenant in erasing if tenant.erased_at is None]
    for tenant in pending:
        await erase_tenant(context, tenant)
    return len(pending)


async def erase_tenant(context: JobContext, tenant: Tenant) -> None:
    pool = context.pools[tenant.pool]
    cancelled = await _cancel_all(context, pool, tenant.id)
    objects = await remove_tenant_objects(context, tenant.id)
    rows = {name: await _remove_rows(pool, name, tenant.id) for name in store.PRIVATE}
    await _scrub(pool, tenant.id)
    async with pool.read() as tx:
        if await store.active_jobs(tx, tenant.id, limit=1):
            # a job was submitted just before the tenant was closed, and the next pass cancels it
            return
    async with context.central.transaction() as tx:
        await store.scrub_dispatches(tx, tenant.id)
        await store.remove_route_calls(tx, tenant.id)
        # Also delete keys created just before the tenant was closed.
        await tenants.delete_keys_of(tx, tenant.id)
        await tenants.end_erasing(tx, tenant.id, now=context.clock())
        await record_audit(
            tx,
            "sweep",
            ACTION,
            tenant.subject,
            context.clock(),
            tenant.id,
            step="ended",
            jobs_cancelled=cancelled,
            objects_removed=objects,
            rows_removed=rows,
        )


async def _cancel_all(context: JobContext, pool: Database, tenant_id: UUID) -> int:
    """Cancels the tenant's jobs. Each is refunded as if its owner had cancelled it."""
    cancelled = 0
    while True:
        async with pool.read() as tx:
            some = await store.active_jobs(tx, tenant_id, limit=ERASED_PER_PAGE)
        if not some:
            return cancelled
        for job_id in some:
            await submit.cancel_job(context, tenant_id, job_id)
        cancelled += len(some)


async def _remove_rows(pool: Database, name: str, tenant_id: UUID) -> int:
    removed = 0
    while True:
        async with pool.transaction() as tx:
            some = await store.remove_rows(tx, name, tenant_id, limit=ERASED_PER_PAGE)
        removed += some
        if some < ERASED_PER_PAGE:
            return removed


async def _scrub(pool: Database, tenant_id: UUID) -> None:
    last: UUID | None = None
    while True:
        async with pool.transaction() as tx:
            last = await store.scrub_jobs(tx, tenant_id, after=last, limit=ERASED_PER_PAGE)
        if last is None:
            break
    async with pool.transaction() as tx:
        await store.scrub_users(tx, tenant_id)
