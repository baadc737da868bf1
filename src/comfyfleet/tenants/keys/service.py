"""API keys in the central database: made, checked, listed, revoked."""

from datetime import datetime
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.kernel.errors import InvalidInput, LimitExceeded, NotFound, Unauthenticated
from comfyfleet.kernel.keys import fits, hashed
from comfyfleet.tenants.keys import store
from comfyfleet.tenants.keys.model import (
    KEYS_PER_USER_MAX,
    SHOWN_CHARACTERS,
    ApiKey,
    Caller,
    NewKey,
    check_name,
    check_scopes,
)

LISTED_MAX = 500


async def create(tx: Tx, new: NewKey, *, now: datetime) -> ApiKey:
    if new.expires_at is not None and new.expires_at <= now:
        raise InvalidInput("a key can't have expired before it is made", field="expires_at")
    if await store.count_good(tx, new.tenant_id, new.user_id, now) >= KEYS_PER_USER_MAX:
        raise LimitExceeded(f"a user has at most {KEYS_PER_USER_MAX} keys; revoke one first")
    row = {
        "id": new.id,
        "tenant_id": new.tenant_id,
        "user_id": new.user_id,
        "name": check_name(new.name),
        "key_hash": hashed(new.key),
        "prefix": new.key[:SHOWN_CHARACTERS],
        "scopes": sorted(check_scopes(new.scopes)),
        "created_at": now,
        "expires_at": new.expires_at,
    }
    return await store.add(tx, row)


async def authenticate(tx: Tx, key: str, *, now: datetime) -> Caller:
    """Reads only; whoever wants the last use noted calls `note_use` if it is not noted yet."""
    found = await store.by_hash(tx, hashed(key))
    if found is None or not fits(key, found[2]):
        raise Unauthenticated("this is no key that we know")
    api_key, tenant, _ = found
    if api_key.revoked_at is not None:
        raise Unauthenticated("this key was revoked")
    if api_key.expires_at is not None and api_key.expires_at <= now:
        raise Unauthenticated("this key has expired")
    return Caller(api_key, tenant)


async def is_good(tx: Tx, key: ApiKey, *, now: datetime) -> bool:
    """As it is now: it may have been revoked, or removed with its tenant, since it was read."""
    found = await store.get(tx, key.tenant_id, key.user_id, key.id)
    if found is None or found.revoked_at is not None:
        return False
    return found.expires_at is None or found.expires_at > now


async def note_use(tx: Tx, key: ApiKey, *, now: datetime) -> None:
    await store.note_use(tx, key.id, now)


async def all_of(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[ApiKey]:
    """The newest first, the revoked ones among them."""
    return await store.of_user(tx, tenant_id, user_id, limit=LISTED_MAX)


async def revoke(tx: Tx, tenant_id: UUID, user_id: UUID, key_id: UUID, *, now: datetime) -> ApiKey:
    """Dead at once; a second time changes nothing."""
    await store.revoke(tx, tenant_id, user_id, key_id, now)
    found = await store.get(tx, tenant_id, user_id, key_id)
    if found is None:
        raise NotFound(f"there is no key {key_id}")
    return found


async def revoke_all(tx: Tx, tenant_id: UUID, user_id: UUID, *, now: datetime) -> int:
    return await store.revoke(tx, tenant_id, user_id, None, now)


async def remove_all_of(tx: Tx, tenant_id: UUID) -> int:
    """Of a tenant that is erased: dead at once, and no trace of what they were named."""
    return await store.remove_all_of(tx, tenant_id)
