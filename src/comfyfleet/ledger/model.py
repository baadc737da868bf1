"""Tokens, wallets and their transactions: what they are, and what amounts are taken.

A price of zero leaves no transaction: there is nothing to reserve, and so nothing to settle.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.texts import is_storable

# A client in JavaScript still counts a thousand such amounts exactly.
AMOUNT_TOKENS_MAX = 1_000_000_000_000
PROVIDER_ID_CHARACTERS_MAX = 200


class TransactionType(StrEnum):
    PAYMENT_CREDIT = "PAYMENT_CREDIT"
    JOB_RESERVE = "JOB_RESERVE"
    JOB_CONSUME = "JOB_CONSUME"
    JOB_REFUND = "JOB_REFUND"


SETTLES = frozenset({TransactionType.JOB_CONSUME, TransactionType.JOB_REFUND})


@dataclass(frozen=True, slots=True)
class Wallet:
    tenant_id: UUID
    user_id: UUID
    balance: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Transaction:
    """One line of the ledger; once written, it stays as it is."""

    id: int
    tenant_id: UUID
    user_id: UUID
    job_id: UUID | None
    type: TransactionType
    amount: int  # what it adds to the balance
    provider_transaction_id: str | None
    created_at: datetime


class Credited(NamedTuple):
    balance: int
    is_new: bool  # False: this payment had been credited before


class Reserved(NamedTuple):
    amount: int  # of all jobs together
    balance: int  # what is left
    is_new: bool


class Settlement(NamedTuple):
    """How a job was settled; by an earlier word, if it is not new."""

    type: TransactionType
    user_id: UUID
    reserved_tokens: int
    is_new: bool


class JobFacts(NamedTuple):
    """What the ledger needs to know of a job to check it."""

    job_id: UUID
    reserved_tokens: int
    is_ended: bool
    is_completed: bool


class Fault(StrEnum):
    BALANCE = "balance"  # not the sum of the wallet's transactions
    NEGATIVE = "negative"
    NO_WALLET = "no_wallet"
    SETTLED_TWICE = "settled_twice"
    NOT_RESERVED = "not_reserved"  # settled, or said to be reserved, without a reservation
    AMOUNT = "amount"  # refunded or kept by the job otherwise than reserved
    NOT_SETTLED = "not_settled"  # the job has ended
    SETTLED_EARLY = "settled_early"  # the job goes on
    SETTLED_WRONGLY = "settled_wrongly"  # a success refunded, or a failure consumed


@dataclass(frozen=True, slots=True)
class Drift:
    """Something that does not add up."""

    fault: Fault
    tenant_id: UUID
    user_id: UUID | None
    job_id: UUID | None
    message: str


def check_amount(amount: int, *, least: int) -> int:
    # A bool is an int to Python, and nobody's amount of money.
    if isinstance(amount, bool) or not isinstance(amount, int):
        raise InvalidInput("an amount of tokens must be a whole number", field="amount")
    if not least <= amount <= AMOUNT_TOKENS_MAX:
        raise InvalidInput(
            f"an amount of tokens must be {least} to {AMOUNT_TOKENS_MAX:,}, not {amount}",
            field="amount",
        )
    return amount


def check_provider_id(provider_transaction_id: str) -> str:
    if not provider_transaction_id.strip() or (
        len(provider_transaction_id) > PROVIDER_ID_CHARACTERS_MAX
        or not is_storable(provider_transaction_id)
    ):
        raise InvalidInput(
            "the payment provider's transaction id must have 1 to "
            f"{PROVIDER_ID_CHARACTERS_MAX} characters",
            field="provider_transaction_id",
        )
    return provider_transaction_id
