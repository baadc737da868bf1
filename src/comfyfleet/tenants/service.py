"""Tenants: made in the least full pool, found again, and kept within their limits."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.kernel.errors import Conflict, NotFound, Refused
from comfyfleet.tenants import store
from comfyfleet.tenants.model import (
    DEFAULT_TENANT,
    ERASED,
    PRIORITY_MAX,
    PRIORITY_MIN,
    Tenant,
    check_limits,
    check_name,
    check_retention,
)


async def create(tx: Tx, *, tenant_id: UUID, name: str, pool: str, now: datetime) -> Tenant:
    return await store.add(tx, _row(tenant_id, check_name(name), pool, now))


def _row(tenant_id: UUID, name: str, pool: str, now: datetime) -> dict[str, Any]:
    return {
        "id": tenant_id,
        "name": name,
        "pool": pool,
        "min_priority": PRIORITY_MIN,
        "max_priority": PRIORITY_MAX,
        "max_queued": None,
        "created_at": now,
    }


async def ensure_default(tx: Tx, *, pools: Iterable[str], now: datetime) -> None:
    """The tenant of operators' own jobs; safe when several control planes start at once."""
    if await store.get(tx, DEFAULT_TENANT) is None:
        pool = await least_full(tx, pools)
        await store.add_if_new(tx, _row(DEFAULT_TENANT, "default", pool, now))


async def get(tx: Tx, tenant_id: UUID) -> Tenant:
    return _found(await store.get(tx, tenant_id), tenant_id)


async def all_of(tx: Tx, *, pool: str | None = None) -> list[Tenant]:
    return await store.all_of(tx, pool=pool)


async def set_limits(
    tx: Tx, tenant_id: UUID, *, min_priority: int, max_priority: int, max_queued: int | None
) -> Tenant:
    """A job that waits keeps the priority that it was queued with."""
    check_limits(min_priority=min_priority, max_priority=max_priority, max_queued=max_queued)
    limits = {
        "min_priority": min_priority,
        "max_priority": max_priority,
        "max_queued": max_queued,
    }
    return _found(await store.change(tx, tenant_id, limits), tenant_id)


async def set_retention(tx: Tx, tenant_id: UUID, days: int | None) -> Tenant:
    """How long its media and files are kept; None: as the settings say."""
    values = {"retention_days": check_retention(days)}
    return _found(await store.change(tx, tenant_id, values), tenant_id)


async def set_quota(tx: Tx, tenant_id: UUID, max_storage_bytes: int | None) -> Tenant:
    """How much it may store; None: as the settings say."""
    values = {"max_storage_bytes": max_storage_bytes}
    return _found(await store.change(tx, tenant_id, values), tenant_id)


async def begin_erasing(tx: Tx, tenant_id: UUID, *, now: datetime) -> Tenant:
    """From now on it gets nothing new; asked again, it stays as it was first asked."""
    if tenant_id == DEFAULT_TENANT:
        raise Refused("operators' own jobs are this tenant's: it is not erased")
    tenant = await get(tx, tenant_id)
    if tenant.erasing_at is not None:
        return tenant
    return _found(await store.change(tx, tenant_id, {"erasing_at": now}), tenant_id)


async def end_erasing(tx: Tx, tenant_id: UUID, *, now: datetime) -> Tenant:
    """The row stays: the ledger names it. Its name goes."""
    values = {"erased_at": now, "name": ERASED}
    return _found(await store.change(tx, tenant_id, values), tenant_id)


async def require_kept(tx: Tx, tenant_id: UUID) -> Tenant:
    """A tenant that may get users and keys: one that is being erased gets no more."""
    tenant = await get(tx, tenant_id)
    check_kept(tenant)
    return tenant


def check_kept(tenant: Tenant) -> None:
    if tenant.erasing_at is not None:
        raise Conflict(f"the tenant {tenant.id} is erased, or about to be")


async def least_full(tx: Tx, names: Iterable[str]) -> str:
    """Of the pools that there are, the one with the fewest tenants; the first of equals."""
    counts = await store.counts_by_pool(tx)
    pools = sorted(names, key=lambda name: (counts.get(name, 0), name))
    if not pools:
        raise Refused("there is no pool; COMFYFLEET_TENANT_DATABASE_URLS names them")
    return pools[0]


def _found(tenant: Tenant | None, tenant_id: UUID) -> Tenant:
    if tenant is None:
        raise NotFound(f"there is no tenant {tenant_id}")
    return tenant
