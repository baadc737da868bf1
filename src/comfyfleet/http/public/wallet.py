"""What a user has, and how it came to that."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import Query
from pydantic import Field

from comfyfleet.http.given import GivenPlane
from comfyfleet.http.public.auth import Reader
from comfyfleet.http.public.routing import PAGE_USUAL, ROW_ID_MAX, Answer, Limit, public_router
from comfyfleet.ledger import service as ledger
from comfyfleet.ledger.model import TransactionType

router = public_router("wallet")


class WalletAnswer(Answer):
    balance: int = Field(description="Tokens that are not reserved.", examples=[95])


class TransactionAnswer(Answer):
    id: int
    type: TransactionType
    amount: int = Field(description="What it added to the balance.", examples=[-5])
    job_id: UUID | None
    provider_transaction_id: str | None = Field(description="Of a payment.")
    created_at: datetime


class Transactions(Answer):
    transactions: list[TransactionAnswer] = Field(description="The newest first.")
    next: int | None = Field(description="Ask on with before=next; null: that was all.")


@router.get("/wallet")
async def balance(plane: GivenPlane, caller: Reader) -> WalletAnswer:
    """Of the user whose key it is."""
    async with plane.pools[caller.tenant.pool].look() as tx:
        return WalletAnswer(balance=await ledger.balance(tx, caller.tenant.id, caller.user_id))


@router.get("/wallet/transactions")
async def transactions(
    plane: GivenPlane,
    caller: Reader,
    before: Annotated[
        int | None, Query(ge=0, le=ROW_ID_MAX, description="Only those with a lower id.")
    ] = None,
    limit: Limit = PAGE_USUAL,
) -> Transactions:
    """Every payment, reservation, consumption and refund; they add up to the balance."""
    async with plane.pools[caller.tenant.pool].look() as tx:
        found = await ledger.transactions(
            tx, caller.tenant.id, caller.user_id, before_id=before, limit=limit + 1
        )
    page = found[:limit]
    return Transactions(
        transactions=[
            TransactionAnswer(
                id=each.id,
                type=each.type,
                amount=each.amount,
                job_id=each.job_id,
                provider_transaction_id=each.provider_transaction_id,
                created_at=each.created_at,
            )
            for each in page
        ],
        next=page[-1].id if len(found) > limit else None,
    )
