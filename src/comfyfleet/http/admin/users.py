"""A tenant's users and their keys, as operators see them."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import Query, status
from pydantic import AwareDatetime, Field

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.http.admin.routing import Answer, Body, Operator, admin_router
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.plane import Plane
from comfyfleet.tenants import service as tenants
from comfyfleet.tenants.keys import service as keys
from comfyfleet.tenants.keys.model import ALL_SCOPES, ApiKey, NewKey, Scope, new_api_key
from comfyfleet.tenants.users import service as users
from comfyfleet.tenants.users.model import User
from comfyfleet.tenants.users.service import PAGE_MAX

router = admin_router()
USERS = "/tenants/{tenant_id}/users"
USER = USERS + "/{user_id}"


class NewUser(Body):
    email: str | None = Field(default=None, examples=["bob@example.com"])
    name: str | None = Field(default=None, examples=["Bob"])


class UserAnswer(Answer):
    id: UUID
    tenant_id: UUID
    email: str | None
    name: str | None
    is_active: bool
    created_at: datetime


class Users(Answer):
    users: list[UserAnswer] = Field(description="The oldest first.")
    next: UUID | None = Field(description="Ask on with after=next; null: that was all.")


class AdminWantedKey(Body):
    name: str = Field(default="key", description="To tell it from others.", examples=["website"])
    scopes: list[Scope] = Field(
        default_factory=lambda: sorted(ALL_SCOPES), description="What it may be used for."
    )
    expires_at: AwareDatetime | None = Field(default=None, description="null: never.")


class AdminKeyAnswer(Answer):
    id: UUID
    user_id: UUID
    name: str
    prefix: str = Field(description="Its first characters.")
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class AdminMadeKey(AdminKeyAnswer):
    key: str = Field(description="It is shown this once.")


class AdminKeys(Answer):
    keys: list[AdminKeyAnswer] = Field(description="The newest first, revoked ones among them.")


@router.post(USERS, status_code=status.HTTP_201_CREATED)
async def create(
    tenant_id: UUID, body: NewUser, plane: GivenPlane, now: GivenNow, operator: Operator
) -> UserAnswer:
    """Without a key: make one under …/users/{user_id}/keys."""
    async with plane.central.look() as tx:
        pool = plane.pools[(await tenants.require_kept(tx, tenant_id)).pool]
    async with pool.begin() as tx:
        user = await users.create(
            tx, user_id=uuid4(), tenant_id=tenant_id, email=body.email, name=body.name, now=now
        )
    async with plane.central.begin() as tx:
        await _record(tx, user, "create_user", operator, now)
    return _answer(user)


@router.get(USERS)
async def list_users(
    tenant_id: UUID,
    plane: GivenPlane,
    after: Annotated[UUID | None, Query(description="Go on after this user.")] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> Users:
    pool = await plane.sides.pool_of(tenant_id)
    async with pool.look() as tx:
        found = await users.all_of(tx, tenant_id, after_id=after, limit=limit)
    following = found[-1].id if len(found) == limit else None
    return Users(users=[_answer(each) for each in found], next=following)


@router.get(USER)
async def show(tenant_id: UUID, user_id: UUID, plane: GivenPlane) -> UserAnswer:
    return _answer(await _user(plane, tenant_id, user_id))


@router.post(USER + "/deactivate")
async def deactivate(
    tenant_id: UUID, user_id: UUID, plane: GivenPlane, now: GivenNow, operator: Operator
) -> UserAnswer:
    """All their keys are revoked, first of all; jobs that were submitted go on."""
    user = await _user(plane, tenant_id, user_id)
    async with plane.central.begin() as tx:
        revoked = await keys.revoke_all(tx, tenant_id, user_id, now=now)
        await _record(tx, user, "deactivate_user", operator, now, {"keys_revoked": revoked})
    return await _set_active(plane, user, is_active=False)


@router.post(USER + "/activate")
async def activate(
    tenant_id: UUID, user_id: UUID, plane: GivenPlane, now: GivenNow, operator: Operator
) -> UserAnswer:
    """They need a new key: those that were revoked stay so."""
    user = await _user(plane, tenant_id, user_id)
    async with plane.central.begin() as tx:
        await tenants.require_kept(tx, tenant_id)
        await _record(tx, user, "activate_user", operator, now)
    return await _set_active(plane, user, is_active=True)


@router.post(USER + "/keys", status_code=status.HTTP_201_CREATED)
async def create_key(
    tenant_id: UUID,
    user_id: UUID,
    body: AdminWantedKey,
    plane: GivenPlane,
    now: GivenNow,
    operator: Operator,
) -> AdminMadeKey:
    """The key is shown this once, and stored hashed."""
    user, key = await _user(plane, tenant_id, user_id), new_api_key()
    wanted = NewKey(uuid4(), key, tenant_id, user_id, body.name, body.scopes, body.expires_at)
    async with plane.central.begin() as tx:
        await tenants.require_kept(tx, tenant_id)
        made = await keys.create(tx, wanted, now=now)
        await _record(tx, user, "create_key", operator, now, _of_key(made))
    return AdminMadeKey(**_key_answer(made).model_dump(), key=key)


@router.get(USER + "/keys")
async def list_keys(tenant_id: UUID, user_id: UUID, plane: GivenPlane) -> AdminKeys:
    await _user(plane, tenant_id, user_id)
    async with plane.central.look() as tx:
        found = await keys.all_of(tx, tenant_id, user_id)
    return AdminKeys(keys=[_key_answer(each) for each in found])


@router.post(USER + "/keys/{key_id}/revoke")
async def revoke_key(
    tenant_id: UUID,
    user_id: UUID,
    key_id: UUID,
    plane: GivenPlane,
    now: GivenNow,
    operator: Operator,
) -> AdminKeyAnswer:
    """Dead at once; a second time changes nothing."""
    user = await _user(plane, tenant_id, user_id)
    async with plane.central.begin() as tx:
        revoked = await keys.revoke(tx, tenant_id, user_id, key_id, now=now)
        await _record(tx, user, "revoke_key", operator, now, _of_key(revoked))
    return _key_answer(revoked)


async def _user(plane: Plane, tenant_id: UUID, user_id: UUID) -> User:
    pool = await plane.sides.pool_of(tenant_id)
    async with pool.look() as tx:
        return await users.get(tx, tenant_id, user_id)


async def _set_active(plane: Plane, user: User, *, is_active: bool) -> UserAnswer:
    pool = await plane.sides.pool_of(user.tenant_id)
    async with pool.begin() as tx:
        return _answer(await users.set_active(tx, user.tenant_id, user.id, is_active=is_active))


async def _record(
    tx: Tx,
    user: User,
    action: str,
    operator: str,
    now: datetime,
    details: dict[str, Any] | None = None,
) -> None:
    await audit.record(
        tx,
        actor=operator,
        action=action,
        subject=user.subject,
        now=now,
        tenant_id=user.tenant_id,
        details=details,
    )


def _of_key(key: ApiKey) -> dict[str, Any]:
    return {"key_id": key.id, "prefix": key.prefix, "scopes": key.scopes}


def _answer(user: User) -> UserAnswer:
    return UserAnswer(**asdict(user))


def _key_answer(key: ApiKey) -> AdminKeyAnswer:
    shown = {name: getattr(key, name) for name in AdminKeyAnswer.model_fields}
    return AdminKeyAnswer.model_validate({**shown, "scopes": sorted(key.scopes)})
