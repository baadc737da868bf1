"""Manages tenants, their users and API keys, and operators: create, find, authenticate, limit,
revoke and erase."""

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
    """Creates the tenant for operators' own jobs if it doesn't exist. Safe if several control
    planes start at the same time."""
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
    """Sets the limits of a tenant. Queued jobs keep their priority."""
    check_limits(min_priority=min_priority, max_priority=max_priority, max_queued=max_queued)
    limits = {
        "min_priority": min_priority,
        "max_priority": max_priority,
        "max_queued": max_queued,
    }
    return _require_tenant(await store.update_tenant(tx, tenant_id, limits), tenant_id)


async def set_retention(tx: Tx, tenant_id: UUID, days: int | None) -> Tenant:
    """Sets how many days media and files are kept. None means the default from the settings."""
    values = {"retention_days": check_retention(days)}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def set_quota(tx: Tx, tenant_id: UUID, max_storage_bytes: int | None) -> Tenant:
    """Sets how many bytes the tenant may store. None means the default from the settings."""
    values = {"max_storage_bytes": max_storage_bytes}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def set_show_backends(tx: Tx, tenant_id: UUID, show: bool | None) -> Tenant:
    """Sets whether the tenant's users see machine names, tracebacks and devices. None means the
    default from the settings."""
    values = {"show_backends": show}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def set_prompts(tx: Tx, tenant_id: UUID, terms: TenantPrompts) -> Tenant:
    """Sets the fleets and node types that the tenant's prompts may use. Queued prompts are not
    affected."""
    values = {"gateway": terms.model_dump(mode="json")}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def begin_erasing(tx: Tx, tenant_id: UUID, *, now: datetime) -> Tenant:
    """Marks a tenant for erasure, so that it accepts nothing new. Repeating the call keeps the
    original time."""
    if tenant_id == DEFAULT_TENANT:
        raise Refused("this tenant owns the operators' jobs and can't be erased")
    tenant = await get_tenant(tx, tenant_id)
    if tenant.erasing_at is not None:
        return tenant
    return _require_tenant(await store.update_tenant(tx, tenant_id, {"erasing_at": now}), tenant_id)


async def end_erasing(tx: Tx, tenant_id: UUID, *, now: datetime) -> Tenant:
    """Marks a tenant as erased and removes its name. The row remains, because the ledger refers to
    it."""
    values = {"erased_at": now, "name": ERASED}
    return _require_tenant(await store.update_tenant(tx, tenant_id, values), tenant_id)


async def require_kept(tx: Tx, tenant_id: UUID) -> Tenant:
    """Returns the tenant. Refuses a tenant that is being erased, because no users or keys can be
    added to it."""
    tenant = await get_tenant(tx, tenant_id)
    check_kept(tenant)
    return tenant


def check_kept(tenant: Tenant) -> None:
    if tenant.erasing_at is not None:
        raise Conflict(f"the tenant {tenant.id} has been erased or is being erased")


async def emptiest_pool(tx: Tx, names: Iterable[str]) -> str:
    """Returns the pool with the fewest tenants. The first one wins a tie."""
    counts = await store.count_tenants_by_pool(tx)
    pools = sorted(names, key=lambda name: (counts.get(name, 0), name))
    if not pools:
        raise Refused("no tenant database is configured; set COMFYFLEET_TENANT_DATABASE_URLS")
    return pools[0]


def _require_tenant(tenant: Tenant | None, tenant_id: UUID) -> Tenant:
    if tenant is None:
        raise NotFound(f"tenant {tenant_id} was not found")
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
        raise Conflict("the tenant already has a user with this email address", field="email")
    return user


async def get_user(tx: Tx, tenant_id: UUID, user_id: UUID) -> User:
    return _require_user(await store.get_user(tx, tenant_id, user_id), user_id)


async def list_users(
    tx: Tx, tenant_id: UUID, *, after_id: UUID | None = None, limit: int = USERS_PER_PAGE_MAX
) -> list[User]:
    """Returns a page of users, oldest first. `after_id` is the last id of the previous page."""
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
        raise NotFound(f"user {user_id} was not found")
    return user


KEYS_LISTED_MAX = 500


async def create_key(tx: Tx, new: NewApiKey, *, now: datetime) -> ApiKey:
    if new.expires_at is not None and new.expires_at <= now:
        raise InvalidInput("the expiry time of a key must be in the future", field="expires_at")
    if await store.count_valid_keys(tx, new.tenant_id, new.user_id, now) >= KEYS_PER_USER_MAX:
        raise LimitExceeded(f"a user can have at most {KEYS_PER_USER_MAX} keys; revoke one first")
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
    """Returns the caller of a key. Only reads; call `note_key_use` to record the use."""
    match = await store.key_by_hash(tx, hash_key(key))
    if match is None or not is_key_of_hash(key, match[2]):
        raise Unauthenticated("this key is unknown")
    api_key, tenant, _ = match
    if api_key.revoked_at is not None:
        raise Unauthenticated("this key was revoked")
    if api_key.expires_at is not None and api_key.expires_at <= now:
        raise Unauthenticated("this key has expired")
    return Caller(api_key, tenant)


async def is_key_valid(tx: Tx, key: ApiKey, *, now: datetime) -> bool:
    """Checks whether a key is still valid, because it may have been revoked or deleted since it was
    read."""
    stored = await store.get_key(tx, key.tenant_id, key.user_id, key.id)
    return stored is not None and is_key_current(stored, now)


def is_key_current(key: ApiKey, now: datetime) -> bool:
    """Checks whether the key as read is neither revoked nor expired."""
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > now)


async def note_key_use(tx: Tx, key: ApiKey, *, now: datetime) -> None:
    await store.note_key_use(tx, key.id, now)


async def list_keys(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[ApiKey]:
    """Returns all keys, including revoked ones, newest first."""
    return await store.keys_of_user(tx, tenant_id, user_id, limit=KEYS_LISTED_MAX)


async def revoke_key(
    tx: Tx, tenant_id: UUID, user_id: UUID, key_id: UUID, *, now: datetime
) -> ApiKey:
    """Revokes a key immediately. Repeating it has no effect."""
    await store.revoke_key(tx, tenant_id, user_id, key_id, now)
    key = await store.get_key(tx, tenant_id, user_id, key_id)
    if key is None:
        raise NotFound(f"key {key_id} was not found")
    return key


async def revoke_all_keys(tx: Tx, tenant_id: UUID, user_id: UUID, *, now: datetime) -> int:
    return await store.revoke_key(tx, tenant_id, user_id, None, now)


async def delete_keys_of(tx: Tx, tenant_id: UUID) -> int:
    """Deletes the keys of a tenant that is being erased, including their names."""
    return await store.delete_keys_of(tx, tenant_id)


async def create_operator(tx: Tx, new: NewOperator, *, now: datetime) -> Operator:
    """Creates an operator. A name is never reused, because the audit log refers to it."""
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
        raise Conflict(f"the operator name {new.name} is or was in use; choose another name")
    return added


async def authenticate_operator(tx: Tx, key: str) -> Operator:
    operator = await store.operator_by_hash(tx, hash_key(key)) if is_storable(key) else None
    if operator is None:
        raise Unauthenticated("this is not an operator's key")
    if operator.revoked_at is not None:
        raise Unauthenticated("this operator's key was revoked")
    return operator


async def note_operator_use(tx: Tx, operator: Operator, *, now: datetime) -> None:
    await store.note_operator_use(tx, operator.id, now)


async def list_operators(tx: Tx) -> list[Operator]:
    """Returns all operators, including revoked ones."""
    return await store.all_operators(tx)


async def revoke_operator(tx: Tx, name: str, *, now: datetime) -> Operator:
    """Revokes an operator's key immediately. Repeating it has no effect."""
    await store.revoke_operator(tx, name, now)
    operator = await store.operator_by_name(tx, name)
    if operator is None:
        raise NotFound(f"operator {name} was not found")
    return operator
