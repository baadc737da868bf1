"""Operators: who may read, act, and own."""

from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from fastapi import status
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.http.admin.routing import Answer, Body, Owner, admin_router
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.operators import service as operators
from comfyfleet.operators.model import NewOperator, Operator, Role, new_operator_key

router = admin_router("/operators")


class NewPerson(Body):
    name: str = Field(description="The audit tells it.", examples=["ada"])
    role: Role = Role.OPERATOR


class OperatorAnswer(Answer):
    id: UUID
    name: str
    role: Role
    prefix: str = Field(description="The first characters of the key.")
    created_at: datetime
    created_by: str
    revoked_at: datetime | None
    last_used_at: datetime | None


class MadeOperator(OperatorAnswer):
    key: str = Field(description="It is shown this once.")


class Operators(Answer):
    operators: list[OperatorAnswer]


@router.post("", status_code=status.HTTP_201_CREATED)
async def add(body: NewPerson, plane: GivenPlane, now: GivenNow, owner: Owner) -> MadeOperator:
    """With a key of their own, which is shown this once. Takes an owner."""
    key = new_operator_key()
    async with plane.central.begin() as tx:
        made = await operators.create(
            tx, NewOperator(uuid4(), body.name, body.role, key, created_by=owner), now=now
        )
        await audit.record(
            tx,
            actor=owner,
            action="add_operator",
            subject=made.subject,
            now=now,
            details={"role": made.role},
        )
    return MadeOperator(**_told(made), key=key)


@router.get("")
async def list_operators(plane: GivenPlane) -> Operators:
    """The revoked ones among them. The key of the environment is nobody's, and not listed."""
    async with plane.central.look() as tx:
        return Operators(
            operators=[OperatorAnswer(**_told(each)) for each in await operators.all_of(tx)]
        )


@router.post("/{name}/revoke")
async def revoke(name: str, plane: GivenPlane, now: GivenNow, owner: Owner) -> OperatorAnswer:
    """Their key is dead at once, on every control plane. Takes an owner."""
    async with plane.central.begin() as tx:
        revoked = await operators.revoke(tx, name, now=now)
        await audit.record(
            tx, actor=owner, action="revoke_operator", subject=revoked.subject, now=now
        )
    return OperatorAnswer(**_told(revoked))


def _told(operator: Operator) -> dict[str, Any]:
    return {name: getattr(operator, name) for name in OperatorAnswer.model_fields}
