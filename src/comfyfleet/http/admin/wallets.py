"""Users' wallets: payments credited once, balances and transactions looked at."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import Query, Response, status
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.http.admin.routing import Answer, Body, Owner, admin_router
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.http.values import Tokens
from comfyfleet.ledger import service as ledger
from comfyfleet.ledger.model import Transaction, TransactionType
from comfyfleet.ledger.service import PAGE_MAX
from comfyfleet.plane import Plane
from comfyfleet.tenants.users import service as users

router = admin_router()
WALLET = "/tenants/{tenant_id}/wallets/{user_id}"
Before = Annotated[int | None, Query(ge=1, le=2**63 - 1, description="Only older than this one.")]


class Payment(Body):
    amount: Tokens = Field(description="In tokens, above zero.", examples=[500])
    provider_transaction_id: str = Field(
        description="The payment provider's own id: the same one counts once.",
        examples=["pi_3PqK2x"],
    )


class Balance(Answer):
    balance: int


class AdminWalletAnswer(Balance):
    tenant_id: UUID
    user_id: UUID


class AdminTransactionAnswer(Answer):
    id: int
    type: TransactionType
    amount: int = Field(description="What it adds to the balance.")
    job_id: UUID | None
    provider_transaction_id: str | None
    created_at: datetime


class AdminTransactions(Answer):
    transactions: list[AdminTransactionAnswer] = Field(description="The newest first.")
    next: int | None = Field(description="Ask on with before=next; null: that was all.")


@router.post(
    WALLET + "/credits",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": Balance, "description": "Credited before; nothing was changed."}},
)
async def credit(
    tenant_id: UUID,
    user_id: UUID,
    body: Payment,
    plane: GivenPlane,
    now: GivenNow,
    operator: Owner,
    response: Response,
) -> Balance:
    """A payment counts once, however often it is told. Takes an owner."""
    pool = await plane.sides.pool_of(tenant_id)
    async with pool.begin() as tx:
        await users.get(tx, tenant_id, user_id)
        credited = await ledger.credit(
            tx, tenant_id, user_id, body.amount, body.provider_transaction_id, now=now
        )
    await _record_once(plane, tenant_id, user_id, body, operator, now)
    if not credited.is_new:
        response.status_code = status.HTTP_200_OK
    return Balance(balance=credited.balance)


@router.get(WALLET)
async def show(tenant_id: UUID, user_id: UUID, plane: GivenPlane) -> AdminWalletAnswer:
    pool = await plane.sides.pool_of(tenant_id)
    async with pool.look() as tx:
        await users.get(tx, tenant_id, user_id)
        balance = await ledger.balance(tx, tenant_id, user_id)
    return AdminWalletAnswer(tenant_id=tenant_id, user_id=user_id, balance=balance)


@router.get(WALLET + "/transactions")
async def transactions(
    tenant_id: UUID,
    user_id: UUID,
    plane: GivenPlane,
    before: Before = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> AdminTransactions:
    pool = await plane.sides.pool_of(tenant_id)
    async with pool.look() as tx:
        await users.get(tx, tenant_id, user_id)
        found = await ledger.transactions(tx, tenant_id, user_id, before_id=before, limit=limit)
    following = found[-1].id if len(found) == limit else None
    return AdminTransactions(transactions=[_answer(each) for each in found], next=following)


async def _record_once(
    plane: Plane, tenant_id: UUID, user_id: UUID, paid: Payment, operator: str, now: datetime
) -> None:
    """The ledger is in another database: whoever was cut off before this line writes it at the repeat."""
    subject = f"payment:{tenant_id}/{paid.provider_transaction_id}"
    async with plane.central.begin() as tx:
        if await audit.find(tx, action="credit", subject=subject, limit=1):
            return
        await audit.record(
            tx,
            actor=operator,
            action="credit",
            subject=subject,
            now=now,
            tenant_id=tenant_id,
            details={"user_id": user_id, "amount": paid.amount},
        )


def _answer(line: Transaction) -> AdminTransactionAnswer:
    fields = asdict(line)
    return AdminTransactionAnswer(
        **{name: fields[name] for name in AdminTransactionAnswer.model_fields}
    )
