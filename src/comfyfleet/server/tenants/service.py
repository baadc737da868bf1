"""Tenants, their users and API keys, and operators: created, found, authenticated, limited, revoked, erased."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.api.admin import TenantPrompts
from comfyfleet.api.values import is_storable
from comfyfleet.errors import (
    Conflict,
    InvalidInput,
    LimitExceeded,
    NotFound,
    Refused,
    Unauthenticated,
)
from comfyfleet.server.db import Tx
from comfyfleet.server.secrets import hash_key, is_key_of_hash
from comfyfleet.server.tenants import store
from comfyfleet.server.tenants.model import (
    API_KEY_SHOWN_CHARACTERS,
    DEFAULT_TENANT,
    ERASED,
    KEYS_PER_USER_MAX,
    OPERATOR_KEY_SHOWN_CHARACTERS,
    PRIORITY_MAX,
    PRIORITY_MIN,
    ApiKey,
    Caller,
    NewApiKey,
    NewOperator,
    Operator,
    Tenant,
    User,
    check_email,
    check_key_name,
    check_limits,
    check_operator_name,
    check_retention,
    check_scopes,
    check_tenant_name,
    check_user_name,
)


async def create_tenant(tx: Tx, *, tenant_id: UUID, name: str, pool: str, now: datetime) -> Tenant:
    return await store.add_tenant(tx, _row(tenant_id, check_tenant_name(name), pool, now))


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
    """Creates the tenant of operators' own jobs if it is missing; safe if several control planes
    start at once."""
    if await store.get_tenant(tx, DEFAULT_TENANT) is None:
        pool = await emptiest_pool(tx, pools)
        await store.add_tenant_if_new(tx, _row(DEFAULT_TENANT, "default", pool, now))


async def get_tenant(tx: Tx, tenant_id: UUID) -> Tenant:
    return _require_tenant(await store.get_tenant(tx, tenant_id), tenant_id)


async def list_tenants(tx: Tx, *, pool: str | None = None) -> list[Tenant]:
    return await store.all_tenants(tx, pool=pool)


async def set_limits(
    tx: Tx, tenant_id: UUID, *, min_priority: int, max_priority: int, max_queued: int | None
) -> Tenant:
    """Sets the limits; queued jobs keep their priority."""
    check_limits(min_priority=min_priority, max_priority=max_priority, max_queued=max_queued)
    limits = {
        "min_priority": min_priority,
        "max_priority": max_priority,
        "max_queued": max_queued,
    }
    return _require_tenant(await store.update_tenant(tx, tenant_id, limits), tenant_id)


async def set_retention(tx: Tx, tenant_id: UUID, days: int | None) -> Tenant:
    """Sets how long media and files are kept; None uses the setting."""
    values = {"retention_days": check_retention(days)}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def set_quota(tx: Tx, tenant_id: UUID, max_storage_bytes: int | None) -> Tenant:
    """Sets how many bytes the tenant may store; None uses the setting."""
    values = {"max_storage_bytes": max_storage_bytes}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def set_show_backends(tx: Tx, tenant_id: UUID, show: bool | None) -> Tenant:
    """Sets whether the tenant's users see machines; None uses the setting."""
    values = {"show_backends": show}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def set_prompts(tx: Tx, tenant_id: UUID, terms: TenantPrompts) -> Tenant:
    """Sets which fleets and node types its prompts may use; queued ones stay."""
    values = {"gateway": terms.model_dump(mode="json")}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def begin_erasing(tx: Tx, tenant_id: UUID, *, now: datetime) -> Tenant:
    """Marks a tenant for erasure: it gets nothing new. A repeated call keeps the first time."""
    if tenant_id == DEFAULT_TENANT:
        raise Refused("operators' own jobs are this tenant's: it is not erased")
    tenant = await get_tenant(tx, tenant_id)
    if tenant.erasing_at is not None:
        return tenant
    return _require_tenant(await store.update_tenant(tx, tenant_id, {"erasing_at": now}), tenant_id)


async def end_erasing(tx: Tx, tenant_id: UUID, *, now: datetime) -> Tenant:
    """Marks a tenant as erased and removes its name; the row stays, as the ledger refers to it."""
    values = {"erased_at": now, "name": ERASED}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def require_kept(tx: Tx, tenant_id: UUID) -> Tenant:
    """Returns the tenant; refuses one that is being erased, which gets no more users and keys."""
    tenant = await get_tenant(tx, tenant_id)
    check_kept(tenant)
    return tenant


def check_kept(tenant: Tenant) -> None:
    if tenant.erasing_at is not None:
        raise Conflict(f"the tenant {tenant.id} is erased, or about to be")


async def emptiest_pool(tx: Tx, names: Iterable[str]) -> str:
    """Returns the pool with the fewest tenants; the first of equals."""
    counts = await store.count_tenants_by_pool(tx)
    pools = sorted(names, key=lambda name: (counts.get(name, 0), name))
    if not pools:
        raise Refused("there is no pool; COMFYFLEET_TENANT_DATABASE_URLS names them")
    return pools[0]


def _require_tenant(tenant: Tenant | None, tenant_id: UUID) -> Tenant:
    if tenant is None:
        raise NotFound(f"there is no tenant {tenant_id}")
    return tenant


USERS_PER_PAGE_MAX = 500


async def create_user(
    tx: Tx,
    *,
    user_id: UUID,
    tenant_id: UUID,
    now: datetime,
    email: str | None = None,
    name: str | None = None,
) -> User:
    row = {
        "id": user_id,
        "tenant_id": tenant_id,
        "email": check_email(email),
        "name": check_user_name(name),
        "is_active": True,
        "created_at": now,
    }
    user = await store.add_user(tx, row)
    if user is None:
        raise Conflict("the tenant has a user of that e-mail address already", field="email")
    return user


async def get_user(tx: Tx, tenant_id: UUID, user_id: UUID) -> User:
    return _require_user(await store.get_user(tx, tenant_id, user_id), user_id)


async def list_users(
    tx: Tx, tenant_id: UUID, *, after_id: UUID | None = None, limit: int = USERS_PER_PAGE_MAX
) -> list[User]:
    """Returns a page, the oldest first; `after_id` is the id of the last page's last."""
    after = await get_user(tx, tenant_id, after_id) if after_id else None
    return await store.page_of_users(
        tx, tenant_id, after=after, limit=min(limit, USERS_PER_PAGE_MAX)
    )


async def set_user_active(tx: Tx, tenant_id: UUID, user_id: UUID, *, is_active: bool) -> User:
    return _require_user(
        await store.update_user(tx, tenant_id, user_id, {"is_active": is_active}), user_id
    )


def _require_user(user: User | None, user_id: UUID) -> User:
    if user is None:
        raise NotFound(f"there is no user {user_id}")
    return user


KEYS_LISTED_MAX = 500


async def create_key(tx: Tx, new: NewApiKey, *, now: datetime) -> ApiKey:
    if new.expires_at is not None and new.expires_at <= now:
        raise InvalidInput("a key can't have expired before it is made", field="expires_at")
    if await store.count_valid_keys(tx, new.tenant_id, new.user_id, now) >= KEYS_PER_USER_MAX:
        raise LimitExceeded(f"a user has at most {KEYS_PER_USER_MAX} keys; revoke one first")
    row = {
        "id": new.id,
        "tenant_id": new.tenant_id,
        "user_id": new.user_id,
        "name": check_key_name(new.name),
        "key_hash": hash_key(new.key),
        "prefix": new.key[:API_KEY_SHOWN_CHARACTERS],
        "scopes": sorted(check_scopes(new.scopes)),
        "created_at": now,
        "expires_at": new.expires_at,
    }
    return await store.add_key(tx, row)


async def authenticate_key(tx: Tx, key: str, *, now: datetime) -> Caller:
    """Returns the caller of a key. Reads only; to record the use, call `note_key_use`."""
    found = await store.key_by_hash(tx, hash_key(key))
    if found is None or not is_key_of_hash(key, found[2]):
        raise Unauthenticated("this key is unknown")
    api_key, tenant, _ = found
    if api_key.revoked_at is not None:
        raise Unauthenticated("this key was revoked")
    if api_key.expires_at is not None and api_key.expires_at <= now:
        raise Unauthenticated("this key has expired")
    return Caller(api_key, tenant)


async def is_key_valid(tx: Tx, key: ApiKey, *, now: datetime) -> bool:
    """Whether a key is still valid: it may have been revoked or deleted since it was read."""
    found = await store.get_key(tx, key.tenant_id, key.user_id, key.id)
    return found is not None and is_key_current(found, now)


def is_key_current(key: ApiKey, now: datetime) -> bool:
    """Whether it is neither revoked nor expired, as it was read."""
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > now)


async def note_key_use(tx: Tx, key: ApiKey, *, now: datetime) -> None:
    await store.note_key_use(tx, key.id, now)


async def list_keys(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[ApiKey]:
    """Returns all keys, including revoked ones; the newest first."""
    return await store.keys_of_user(tx, tenant_id, user_id, limit=KEYS_LISTED_MAX)


async def revoke_key(
    tx: Tx, tenant_id: UUID, user_id: UUID, key_id: UUID, *, now: datetime
) -> ApiKey:
    """Revokes a key at once; repeating it changes nothing."""
    await store.revoke_key(tx, tenant_id, user_id, key_id, now)
    found = await store.get_key(tx, tenant_id, user_id, key_id)
    if found is None:
        raise NotFound(f"there is no key {key_id}")
    return found


async def revoke_all_keys(tx: Tx, tenant_id: UUID, user_id: UUID, *, now: datetime) -> int:
    return await store.revoke_key(tx, tenant_id, user_id, None, now)


async def delete_keys_of(tx: Tx, tenant_id: UUID) -> int:
    """Deletes the keys of a tenant that is erased, including their names."""
    return await store.delete_keys_of(tx, tenant_id)


async def create_operator(tx: Tx, new: NewOperator, *, now: datetime) -> Operator:
    """Creates an operator. A name is never used for a second one, as the audit refers to it."""
    row = {
        "id": new.id,
        "name": check_operator_name(new.name),
        "role": new.role,
        "key_hash": hash_key(new.key),
        "prefix": new.key[:OPERATOR_KEY_SHOWN_CHARACTERS],
        "created_at": now,
        "created_by": new.created_by,
    }
    added = await store.add_operator(tx, row)
    if added is None:
        raise Conflict(f"there is an operator {new.name}, or was one: choose another name")
    return added


async def authenticate_operator(tx: Tx, key: str) -> Operator:
    found = await store.operator_by_hash(tx, hash_key(key)) if is_storable(key) else None
    if found is None:
        raise Unauthenticated("this is not an operator's key")
    if found.revoked_at is not None:
        raise Unauthenticated("this operator's key was revoked")
    return found


async def note_operator_use(tx: Tx, operator: Operator, *, now: datetime) -> None:
    await store.note_operator_use(tx, operator.id, now)


async def list_operators(tx: Tx) -> list[Operator]:
    """Returns all operators, including revoked ones."""
    return await store.all_operators(tx)


async def revoke_operator(tx: Tx, name: str, *, now: datetime) -> Operator:
    """Revokes an operator's key at once; repeating it changes nothing."""
    await store.revoke_operator(tx, name, now)
    found = await store.operator_by_name(tx, name)
    if found is None:
        raise NotFound(f"there is no operator {name}")
    return found
