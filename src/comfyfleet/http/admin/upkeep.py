"""Erasing a tenant, and whether the books add up."""

from typing import Annotated
from uuid import UUID

from fastapi import Query, status
from pydantic import Field

from comfyfleet.http.admin.routing import Answer, Owner, admin_router
from comfyfleet.http.admin.tenants import TenantAnswer, answer_of
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.ledger.model import Fault
from comfyfleet.upkeep import erasing, verifying

router = admin_router()
SHOWN_MAX = 1000


class DriftAnswer(Answer):
    fault: Fault
    tenant_id: UUID
    user_id: UUID | None
    job_id: UUID | None
    message: str


class Books(Answer):
    is_sound: bool = Field(description="All was verified, and all adds up.")
    found: int = Field(description="How many drifts there are.")
    drifts: list[DriftAnswer] = Field(description=f"The first {SHOWN_MAX:,} of them.")
    pools_left_out: list[str] = Field(description="They are down: their books were not verified.")


@router.post("/tenants/{tenant_id}/erase", status_code=status.HTTP_202_ACCEPTED)
async def erase(tenant_id: UUID, plane: GivenPlane, now: GivenNow, operator: Owner) -> TenantAnswer:
    """Removes files, media, prompts, properties, events, webhooks and keys; the ledger stays.

    Its keys are dead with the answer and nothing new is taken. Jobs that are active are cancelled and
    refunded, and the rest is done by a sweep: `erased_at` of the tenant tells when. There is no way back. Takes an owner.
    """
    return answer_of(await erasing.begin(plane.sides, tenant_id, actor=operator, now=now))


@router.get("/ledger")
async def verify(
    plane: GivenPlane,
    tenant_id: Annotated[UUID | None, Query(description="Only this one's.")] = None,
) -> Books:
    """Wallets against their transactions, transactions against jobs. Changes nothing."""
    verified = await verifying.verify(plane.sides, tenant_id)
    shown = [
        DriftAnswer.model_validate({name: getattr(each, name) for name in DriftAnswer.model_fields})
        for each in verified.drifts[:SHOWN_MAX]
    ]
    return Books(
        is_sound=verified.is_sound,
        found=len(verified.drifts),
        drifts=shown,
        pools_left_out=sorted(verified.pools_left_out),
    )
