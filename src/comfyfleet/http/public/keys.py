"""A user's own keys."""

from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

from fastapi import status
from pydantic import AfterValidator, AwareDatetime, Field

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public.auth import KeyHolder
from comfyfleet.http.public.routing import Answer, Body, Text, public_router
from comfyfleet.tenants.keys import service as keys
from comfyfleet.tenants.keys.model import (
    NAME_CHARACTERS_MAX,
    ApiKey,
    Caller,
    NewKey,
    Scope,
    new_api_key,
)

router = public_router("keys")
Scopes = Annotated[
    list[Scope] | None,
    Field(
        min_length=1,
        max_length=10,
        description="What it may; as much as the key that makes it, unless told otherwise.",
        examples=[["read", "write"]],
    ),
]


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("there is no such moment in UTC") from None


class WantedKey(Body):
    name: Text = Field(
        min_length=1,
        max_length=NAME_CHARACTERS_MAX,
        description="To tell it from others.",
        examples=["build server"],
    )
    scopes: Scopes = None
    expires_at: Annotated[AwareDatetime, AfterValidator(_in_utc)] | None = Field(
        default=None,
        description="null: never.",
        examples=["2031-01-01T00:00:00Z"],
    )


class KeyAnswer(Answer):
    id: UUID
    name: str
    prefix: str = Field(description="How it begins.", examples=["cf_1a2b3c4d"])
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = Field(description="To the minute.")


class MadeKey(KeyAnswer):
    key: str = Field(description="Shown this once: we keep only its hash.")


class PublicKeys(Answer):
    keys: list[KeyAnswer] = Field(description="The newest first, the revoked ones among them.")


@router.post("/keys", status_code=status.HTTP_201_CREATED)
async def create(body: WantedKey, plane: GivenPlane, now: GivenNow, caller: KeyHolder) -> MadeKey:
    """No key can make one that may more than itself, or that outlives it."""
    scopes = caller.key.scopes if body.scopes is None else frozenset(body.scopes)
    for scope in sorted(scopes - caller.key.scopes):
        caller.require(scope)
    key = new_api_key()
    new = NewKey(
        id=plane.sides.new_id(),
        key=key,
        tenant_id=caller.tenant.id,
        user_id=caller.user_id,
        name=body.name,
        scopes=scopes,
        expires_at=_earlier(body.expires_at, caller.key.expires_at),
    )
    async with plane.central.begin() as tx:
        made = await keys.create(tx, new, now=now)
        await _audit(tx, caller, "create_key", made, now)
    return MadeKey(**_answer(made).model_dump(), key=key)


@router.get("/keys")
async def list_keys(plane: GivenPlane, caller: KeyHolder) -> PublicKeys:
    async with plane.central.look() as tx:
        found = await keys.all_of(tx, caller.tenant.id, caller.user_id)
    return PublicKeys(keys=[_answer(each) for each in found])


@router.delete("/keys/{key_id}", responses=problems(404))
async def revoke(key_id: UUID, plane: GivenPlane, now: GivenNow, caller: KeyHolder) -> KeyAnswer:
    """Dead at once; a second time changes nothing."""
    async with plane.central.begin() as tx:
        revoked = await keys.revoke(tx, caller.tenant.id, caller.user_id, key_id, now=now)
        await _audit(tx, caller, "revoke_key", revoked, now)
    return _answer(revoked)


def _earlier(wanted: datetime | None, limit: datetime | None) -> datetime | None:
    return min(filter(None, (wanted, limit)), default=None)


async def _audit(tx: Tx, caller: Caller, action: str, key: ApiKey, now: datetime) -> None:
    await audit.record(
        tx,
        actor=caller.tenant.subject,
        action=action,
        subject=f"key:{key.id}",
        now=now,
        tenant_id=caller.tenant.id,
        details={"user_id": str(caller.user_id), "by_key": str(caller.key.id)},
    )


def _answer(key: ApiKey) -> KeyAnswer:
    return KeyAnswer(
        id=key.id,
        name=key.name,
        prefix=key.prefix,
        scopes=sorted(key.scopes),
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
    )
