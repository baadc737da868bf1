"""Tenants: made in the least full pool with a first user and key, and kept within limits."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import status
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.files import service as files
from comfyfleet.http.admin.routing import Answer, Body, Operator, Owner, admin_router
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.http.values import INTEGER_MAX
from comfyfleet.tenants import service as tenants
from comfyfleet.tenants.keys import service as keys
from comfyfleet.tenants.keys.model import NewKey, new_api_key
from comfyfleet.tenants.model import PRIORITY_MAX, PRIORITY_MIN, Tenant, check_name
from comfyfleet.tenants.users import service as users
from comfyfleet.wire.files import ROW_ID_MAX

router = admin_router()
FIRST_KEY = "first key"


class NewTenant(Body):
    name: str = Field(description="For people; the id is what counts.", examples=["Ada's films"])
    email: str | None = Field(
        default=None, description="Of its first user.", examples=["ada@example.com"]
    )


class MadeTenant(Answer):
    id: UUID
    name: str
    pool: str = Field(description="The tenant database that it lives in.")
    key: str = Field(description="Of its first user. It is shown this once.")
    user_id: UUID = Field(description="Its first user.")


class Limits(Body):
    min_priority: int = Field(
        default=PRIORITY_MIN, description="Lower ones of its jobs are raised to it."
    )
    max_priority: int = Field(default=PRIORITY_MAX, description="Higher ones are lowered to it.")
    max_queued: int | None = Field(
        default=None, le=INTEGER_MAX, description="So many of its jobs may wait at once."
    )


class Retention(Body):
    retention_days: int | None = Field(
        description="Media and files go after so many days; null: COMFYFLEET_RETENTION_DAYS.",
        examples=[30],
    )


class Quota(Body):
    max_storage_bytes: Annotated[int, Field(ge=0, le=ROW_ID_MAX)] | None = Field(
        description="So much may it store; null: COMFYFLEET_MAX_STORAGE_BYTES_PER_TENANT.",
        examples=[50 * 1024**3],
    )


class Storage(Answer):
    used_bytes: int = Field(description="With uploads that are only announced.")
    max_storage_bytes: int


class TenantAnswer(Answer):
    id: UUID
    name: str
    pool: str
    min_priority: int
    max_priority: int
    max_queued: int | None = Field(description="null: COMFYFLEET_MAX_QUEUED_PER_TENANT.")
    retention_days: int | None = Field(description="null: COMFYFLEET_RETENTION_DAYS.")
    max_storage_bytes: int | None = Field(
        description="null: COMFYFLEET_MAX_STORAGE_BYTES_PER_TENANT."
    )
    erasing_at: datetime | None = Field(description="Since then its private data go.")
    erased_at: datetime | None = Field(description="Since then only its ledger is left.")
    created_at: datetime


class Tenants(Answer):
    tenants: list[TenantAnswer]


@router.post("/tenants", status_code=status.HTTP_201_CREATED)
async def create(
    body: NewTenant, plane: GivenPlane, now: GivenNow, operator: Operator
) -> MadeTenant:
    """With its first user and that user's key, which is shown this once.

    The user is written first: if the rest never comes, a row is left over that no key leads to.
    """
    name, tenant_id, user_id, key = check_name(body.name), uuid4(), uuid4(), new_api_key()
    async with plane.central.look() as tx:
        pool = await tenants.least_full(tx, plane.pools)
    async with plane.pools[pool].begin() as tx:
        await users.create(tx, user_id=user_id, tenant_id=tenant_id, email=body.email, now=now)
    async with plane.central.begin() as tx:
        tenant = await tenants.create(tx, tenant_id=tenant_id, name=name, pool=pool, now=now)
        await keys.create(tx, NewKey(uuid4(), key, tenant_id, user_id, FIRST_KEY), now=now)
        details = {"name": tenant.name, "pool": pool, "user_id": user_id}
        await _record(tx, tenant, "create_tenant", operator, now, details)
    return MadeTenant(id=tenant.id, name=tenant.name, pool=pool, key=key, user_id=user_id)


@router.get("/tenants")
async def list_tenants(plane: GivenPlane) -> Tenants:
    async with plane.central.look() as tx:
        return Tenants(tenants=[answer_of(each) for each in await tenants.all_of(tx)])


@router.get("/tenants/{tenant_id}")
async def show(tenant_id: UUID, plane: GivenPlane) -> TenantAnswer:
    async with plane.central.look() as tx:
        return answer_of(await tenants.get(tx, tenant_id))


@router.put("/tenants/{tenant_id}/limits")
async def set_limits(
    tenant_id: UUID, body: Limits, plane: GivenPlane, now: GivenNow, operator: Operator
) -> TenantAnswer:
    """Jobs that wait keep the priority that they have."""
    async with plane.central.begin() as tx:
        tenant = await tenants.set_limits(tx, tenant_id, **body.model_dump())
        await _record(tx, tenant, "set_limits", operator, now, body.model_dump())
    return answer_of(tenant)


@router.put("/tenants/{tenant_id}/retention")
async def set_retention(
    tenant_id: UUID, body: Retention, plane: GivenPlane, now: GivenNow, owner: Owner
) -> TenantAnswer:
    """How long its media and their files are kept; the ledger stays. Takes an owner: older ones go."""
    async with plane.central.begin() as tx:
        tenant = await tenants.set_retention(tx, tenant_id, body.retention_days)
        await _record(tx, tenant, "set_retention", owner, now, body.model_dump())
    return answer_of(tenant)


@router.put("/tenants/{tenant_id}/quota")
async def set_quota(
    tenant_id: UUID, body: Quota, plane: GivenPlane, now: GivenNow, owner: Owner
) -> TenantAnswer:
    """How many bytes it may store, uploads that are only announced among them. Takes an owner."""
    async with plane.central.begin() as tx:
        tenant = await tenants.set_quota(tx, tenant_id, body.max_storage_bytes)
        await _record(tx, tenant, "set_quota", owner, now, body.model_dump())
    return answer_of(tenant)


@router.get("/tenants/{tenant_id}/storage")
async def storage(tenant_id: UUID, plane: GivenPlane) -> Storage:
    async with plane.central.look() as tx:
        tenant = await tenants.get(tx, tenant_id)
    async with plane.pools[tenant.pool].begin() as tx:
        used = await files.used_bytes(tx, tenant_id)
    own, usual = tenant.max_storage_bytes, plane.settings.max_storage_bytes_per_tenant
    return Storage(used_bytes=used, max_storage_bytes=usual if own is None else own)


async def _record(
    tx: Tx, tenant: Tenant, action: str, operator: str, now: datetime, details: dict[str, Any]
) -> None:
    await audit.record(
        tx,
        actor=operator,
        action=action,
        subject=tenant.subject,
        now=now,
        tenant_id=tenant.id,
        details=details,
    )


def answer_of(tenant: Tenant) -> TenantAnswer:
    return TenantAnswer(**asdict(tenant))
