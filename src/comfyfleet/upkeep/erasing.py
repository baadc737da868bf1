"""Erasing a tenant: its private data go, its ledger stays. Every step can be cut, and is taken again.

Once it has begun, the tenant has no keys and gets no jobs. So what remains only becomes less, and the
whole is repeated until nothing is left.
"""

from datetime import datetime
from uuid import UUID

from comfyfleet.audit import service as audit
from comfyfleet.db import Database
from comfyfleet.jobs import submitting
from comfyfleet.jobs.sides import Sides
from comfyfleet.tenants import service as tenants
from comfyfleet.tenants.keys import service as keys
from comfyfleet.tenants.model import Tenant
from comfyfleet.upkeep import leftovers, store

PAGE = 500
ACTION = "erase_tenant"


async def begin(sides: Sides, tenant_id: UUID, *, actor: str, now: datetime) -> Tenant:
    """Shuts the door; a sweep does the rest. Asked again, nothing changes."""
    async with sides.central.begin() as tx:
        before = await tenants.get(tx, tenant_id)
        tenant = await tenants.begin_erasing(tx, tenant_id, now=now)
        removed = await keys.remove_all_of(tx, tenant_id)
        if before.erasing_at is None:
            await audit.record(
                tx,
                actor=actor,
                action=ACTION,
                subject=tenant.subject,
                now=now,
                tenant_id=tenant_id,
                details={"step": "begun", "keys_removed": removed},
            )
    return tenant


async def erase_pending(sides: Sides) -> int:
    """Goes on with all that were begun and not ended."""
    async with sides.central.look() as tx:
        found = [each for each in await tenants.all_of(tx) if each.erasing_at]
    pending = [each for each in found if each.erased_at is None]
    for tenant in pending:
        await erase(sides, tenant)
    return len(pending)


async def erase(sides: Sides, tenant: Tenant) -> None:
    pool = sides.pools[tenant.pool]
    cancelled = await _cancel_all(sides, pool, tenant.id)
    objects = await leftovers.remove_all_of(sides, tenant.id)
    rows = {name: await _remove_rows(pool, name, tenant.id) for name in store.PRIVATE}
    await _scrub(pool, tenant.id)
    async with pool.look() as tx:
        if await store.active_jobs(tx, tenant.id, limit=1):
            return  # submitted as the door was shut: the next pass cancels it
    async with sides.central.begin() as tx:
        await store.scrub_dispatches(tx, tenant.id)
        # A key that was made as the door was shut goes, too.
        await keys.remove_all_of(tx, tenant.id)
        await tenants.end_erasing(tx, tenant.id, now=sides.clock())
        await audit.record(
            tx,
            actor="sweep",
            action=ACTION,
            subject=tenant.subject,
            now=sides.clock(),
            tenant_id=tenant.id,
            details={
                "step": "ended",
                "jobs_cancelled": cancelled,
                "objects_removed": objects,
                "rows_removed": rows,
            },
        )


async def _cancel_all(sides: Sides, pool: Database, tenant_id: UUID) -> int:
    """Each refunded as if its owner had cancelled it."""
    cancelled = 0
    while True:
        async with pool.look() as tx:
            some = await store.active_jobs(tx, tenant_id, limit=PAGE)
        if not some:
            return cancelled
        for job_id in some:
            await submitting.cancel(sides, tenant_id, job_id)
        cancelled += len(some)


async def _remove_rows(pool: Database, name: str, tenant_id: UUID) -> int:
    removed = 0
    while True:
        async with pool.begin() as tx:
            some = await store.remove_rows(tx, name, tenant_id, limit=PAGE)
        removed += some
        if some < PAGE:
            return removed


async def _scrub(pool: Database, tenant_id: UUID) -> None:
    last: UUID | None = None
    while True:
        async with pool.begin() as tx:
            last = await store.scrub_jobs(tx, tenant_id, after=last, limit=PAGE)
        if last is None:
            break
    async with pool.begin() as tx:
        await store.scrub_users(tx, tenant_id)
