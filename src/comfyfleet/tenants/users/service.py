"""Users of a tenant. Another tenant's user is not there, whoever asks.

Keys live in the central database: whoever deactivates a user also revokes their keys there
(`keys.service.revoke_all`), for no key is checked against the pool at each call.
"""

from datetime import datetime
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.kernel.errors import Conflict, NotFound
from comfyfleet.tenants.users import store
from comfyfleet.tenants.users.model import User, check_email, check_name

PAGE_MAX = 500


async def create(
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
        "name": check_name(name),
        "is_active": True,
        "created_at": now,
    }
    user = await store.add(tx, row)
    if user is None:
        raise Conflict("the tenant has a user of that e-mail address already", field="email")
    return user


async def get(tx: Tx, tenant_id: UUID, user_id: UUID) -> User:
    return _found(await store.get(tx, tenant_id, user_id), user_id)


async def all_of(
    tx: Tx, tenant_id: UUID, *, after_id: UUID | None = None, limit: int = PAGE_MAX
) -> list[User]:
    """The oldest first; go on with `after_id` = the last one's id."""
    after = await get(tx, tenant_id, after_id) if after_id else None
    return await store.page(tx, tenant_id, after=after, limit=min(limit, PAGE_MAX))


async def set_active(tx: Tx, tenant_id: UUID, user_id: UUID, *, is_active: bool) -> User:
    return _found(await store.change(tx, tenant_id, user_id, {"is_active": is_active}), user_id)


def _found(user: User | None, user_id: UUID) -> User:
    if user is None:
        raise NotFound(f"there is no user {user_id}")
    return user
