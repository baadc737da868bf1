"""Tenants: made in the least full pool, and kept within limits."""

from dataclasses import asdict
from datetime import datetime
from uuid import UUID, uuid4

from fastapi import status
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.http.admin.routing import Answer, Body, Operator, admin_router
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.tenants import service as tenants
from comfyfleet.tenants.model import PRIORITY_MAX, PRIORITY_MIN, Tenant

router = admin_router()


class NewTenant(Body):
    name: str = Field(description="For people; the id is what counts.")


class MadeTenant(Answer):
    id: UUID
    name: str
    pool: str = Field(description="The tenant database that it lives in.")
    key: str | None = Field(
        default=None, description="Of its first user; null as long as there are none."
    )
    user_id: UUID | None = Field(default=None, description="Its first user.")


class Limits(Body):
    min_priority: int = Field(
        default=PRIORITY_MIN, description="Lower ones of its jobs are raised to it."
    )
    max_priority: int = Field(default=PRIORITY_MAX, description="Higher ones are lowered to it.")
    max_queued: int | None = Field(
        default=None, description="So many of its jobs may wait at once."
    )


class TenantAnswer(Answer):
    id: UUID
    name: str
    pool: str
    min_priority: int
    max_priority: int
    max_queued: int | None = Field(description="null: COMFYFLEET_MAX_QUEUED_PER_TENANT.")
    created_at: datetime


class Tenants(Answer):
    tenants: list[TenantAnswer]


@router.post("/tenants", status_code=status.HTTP_201_CREATED)
async def create(
    body: NewTenant, plane: GivenPlane, now: GivenNow, operator: Operator
) -> MadeTenant:
    async with plane.central.begin() as tx:
        tenant = await tenants.create(
            tx,
            tenant_id=uuid4(),
            name=body.name,
            pool=await tenants.least_full(tx, plane.pools),
            now=now,
        )
        await audit.record(
            tx,
            actor=operator,
            action="create_tenant",
            subject=tenant.subject,
            now=now,
            tenant_id=tenant.id,
            details={"name": tenant.name, "pool": tenant.pool},
        )
    return MadeTenant(id=tenant.id, name=tenant.name, pool=tenant.pool)


@router.get("/tenants")
async def list_tenants(plane: GivenPlane) -> Tenants:
    async with plane.central.look() as tx:
        return Tenants(tenants=[_answer(each) for each in await tenants.all_of(tx)])


@router.get("/tenants/{tenant_id}")
async def show(tenant_id: UUID, plane: GivenPlane) -> TenantAnswer:
    async with plane.central.look() as tx:
        return _answer(await tenants.get(tx, tenant_id))


@router.put("/tenants/{tenant_id}/limits")
async def set_limits(
    tenant_id: UUID, body: Limits, plane: GivenPlane, now: GivenNow, operator: Operator
) -> TenantAnswer:
    """Jobs that wait keep the priority that they have."""
    async with plane.central.begin() as tx:
        tenant = await tenants.set_limits(tx, tenant_id, **body.model_dump())
        await audit.record(
            tx,
            actor=operator,
            action="set_limits",
            subject=tenant.subject,
            now=now,
            tenant_id=tenant.id,
            details=body.model_dump(),
        )
    return _answer(tenant)


def _answer(tenant: Tenant) -> TenantAnswer:
    return TenantAnswer(**asdict(tenant))
