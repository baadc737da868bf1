"""The token ledger: credit, reserve, consume and refund. Only the holder of a wallet's lock changes
its balance."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.errors import Conflict, InsufficientTokens, LimitExceeded
from comfyfleet.server.db import Tx
from comfyfleet.server.db.driver import StatementCall
from comfyfleet.server.tenants import store
from comfyfleet.server.tenants.model import (
    SETTLES,
    Credited,
    Fault,
    JobLedgerFacts,
    LedgerDrift,
    LedgerTransaction,
    PaymentClaim,
    Reserved,
    Settlement,
    TokenWallet,
    TransactionType,
    WalletSummary,
    check_amount,
    check_provider_id,
    drifts_of_job,
)

JOBS_AT_ONCE_MAX = 1000
TRANSACTIONS_PER_PAGE_MAX = 500
TRANSACTIONS_SUMMED_MAX = 10_000
PAID_TO_ANOTHER_USER = "this payment was credited to another user's wallet"
ALREADY_RESERVED = "one of the jobs already has reserved tokens"


async def lock_wallet(tx: Tx, tenant_id: UUID, user_id: UUID, *, now: datetime) -> TokenWallet:
    """Locks the wallet until the transaction ends. Creates the wallet if the user has none."""
    wallet = await store.lock_wallet(tx, tenant_id, user_id)
    if wallet is None:
        await store.open_wallet(tx, tenant_id, user_id, now)
        wallet = await store.lock_wallet(tx, tenant_id, user_id)
    assert wallet is not None  # noqa: S101  it was just made, and wallets are never removed
    return wallet


async def claim_payment(tx: Tx, payment: PaymentClaim, *, now: datetime) -> None:
    """Claims a payment's id in the central database before the payment is credited.

    The claim of an interrupted credit remains, so that only the same credit can be repeated."""
    check_amount(payment.amount, least=1)
    check_provider_id(payment.provider_transaction_id)
    claimed = await store.claim_payment(tx, payment, now)
    if claimed.tenant_id != payment.tenant_id:
        raise Conflict(
            f"this payment was credited to another tenant: {claimed.tenant_id}",
            field="provider_transaction_id",
        )
    if claimed.user_id != payment.user_id:
        raise Conflict(PAID_TO_ANOTHER_USER, field="provider_transaction_id")
    if claimed.amount != payment.amount:
        raise _other_amount(payment.amount, credited=claimed.amount)


async def credit(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    amount: int,
    provider_transaction_id: str,
    *,
    now: datetime,
) -> Credited:
    """Credits a payment once. Repeating it has no effect. The same id with another amount is
    refused."""
    check_amount(amount, least=1)
    check_provider_id(provider_transaction_id)
    wallet = await lock_wallet(tx, tenant_id, user_id, now=now)
    row = {
        **_row(tenant_id, user_id, TransactionType.PAYMENT_CREDIT, amount, now),
        "provider_transaction_id": provider_transaction_id,
    }
    if await store.add_transaction(tx, [row]):
        return Credited(await store.credit(tx, tenant_id, user_id, amount), is_new=True)
    paid = await store.transaction_of_payment(tx, tenant_id, provider_transaction_id)
    if paid is None or paid.user_id != user_id:
        raise Conflict(PAID_TO_ANOTHER_USER, field="provider_transaction_id")
    if paid.amount != amount:
        raise _other_amount(amount, credited=paid.amount)
    return Credited(wallet.balance, is_new=False)


def _other_amount(amount: int, *, credited: int) -> Conflict:
    return Conflict(
        f"this payment was credited before with {credited} tokens, not {amount}",
        field="amount",
        credited=credited,
    )


async def reserve(
    tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID, amount: int, *, now: datetime
) -> Reserved:
    """Reserves tokens for a job. Returns the existing reservation if there is one."""
    reserved = await _reserve(tx, tenant_id, user_id, {job_id: amount}, now)
    if reserved is not None:
        return reserved
    earlier = await store.transactions_of_jobs(
        tx, tenant_id, [job_id], [TransactionType.JOB_RESERVE]
    )
    remaining = await balance(tx, tenant_id, user_id)
    if not earlier:
        raise InsufficientTokens(required_tokens=amount, balance=remaining)
    if earlier[0].user_id != user_id:
        raise Conflict(f"the job {job_id} belongs to another user's wallet")
    return Reserved(-earlier[0].amount, remaining, is_new=False)


async def reserve_all(
    tx: Tx, tenant_id: UUID, user_id: UUID, amounts: Mapping[UUID, int], *, now: datetime
) -> Reserved:
    """Reserves tokens for all of the new jobs or for none of them. `amounts` are by job id."""
    if len(amounts) > JOBS_AT_ONCE_MAX:
        raise LimitExceeded(
            f"tokens can be reserved for at most {JOBS_AT_ONCE_MAX:,} jobs in one call"
        )
    reserved = await _reserve(tx, tenant_id, user_id, amounts, now)
    if reserved is not None:
        return reserved
    priced = [job_id for job_id, amount in amounts.items() if amount]
    if await store.transactions_of_jobs(tx, tenant_id, priced, [TransactionType.JOB_RESERVE]):
        raise Conflict(ALREADY_RESERVED)
    remaining = await balance(tx, tenant_id, user_id)
    raise InsufficientTokens(required_tokens=sum(amounts.values()), balance=remaining)


async def consume(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, unused: int = 0, now: datetime
) -> Settlement | None:
    """Consumes the reservation of a successful job. The same transaction returns unused tokens to
    the wallet. Returns None if nothing was reserved."""
    return await _settle(tx, tenant_id, job_id, TransactionType.JOB_CONSUME, now, unused)


def consume_call(tenant_id: UUID, job_id: UUID, *, now: datetime) -> StatementCall:
    """Builds a call like `consume`, to be sent together with other writes."""
    return store.consume_call(tenant_id, job_id, now)


async def refund(tx: Tx, tenant_id: UUID, job_id: UUID, *, now: datetime) -> Settlement | None:
    """Refunds the reservation of a job that did not succeed. Returns None if nothing was
    reserved."""
    return await _settle(tx, tenant_id, job_id, TransactionType.JOB_REFUND, now)


async def balance(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    wallet = await store.get_wallet(tx, tenant_id, user_id)
    return wallet.balance if wallet else 0


async def balances(
    tx: Tx, tenant_id: UUID, *, after_user_id: UUID | None = None, limit: int
) -> list[tuple[UUID, int]]:
    """Returns a page of (user, balance), ordered by user. `after_user_id` is the last user of the
    previous page."""
    return await store.list_balances(tx, tenant_id, after_user_id=after_user_id, limit=limit)


async def transactions(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    before_id: int | None = None,
    limit: int,
    types: Collection[TransactionType] = (),
) -> list[LedgerTransaction]:
    """Returns a page of transactions, newest first. `before_id` is the last id of the previous
    page. Without `types`, returns all types."""
    return await store.newest_transactions(
        tx,
        tenant_id,
        user_id,
        before_id=before_id,
        limit=min(limit, TRANSACTIONS_PER_PAGE_MAX),
        types=types,
    )


async def summary(tx: Tx, tenant_id: UUID, user_id: UUID, *, since: datetime) -> WalletSummary:
    """Sums the tokens added, spent and refunded since a given time, over a limited number of the
    newest transactions."""
    totals = await store.sums_by_type(
        tx, tenant_id, user_id, since=since, limit=TRANSACTIONS_SUMMED_MAX
    )
    return WalletSummary(
        added=totals.get(TransactionType.PAYMENT_CREDIT, 0),
        spent=-totals.get(TransactionType.JOB_CONSUME, 0),
        refunded=totals.get(TransactionType.JOB_REFUND, 0),
    )


async def verify(tx: Tx, tenant_id: UUID | None = None) -> list[LedgerDrift]:
    """Returns the inconsistencies within the ledger, for one tenant or for the whole pool."""
    drifts = [_wallet_drift(row) for row in await store.unbalanced_wallets(tx, tenant_id)]
    drifts += [
        LedgerDrift(
            Fault.NO_WALLET,
            row.tenant_id,
            row.user_id,
            None,
            f"the transactions add up to {row.total} tokens, but there is no wallet",
        )
        for row in await store.transactions_without_wallet(tx, tenant_id)
    ]
    return drifts + [_job_drift(row) for row in await store.unmatched_transactions(tx, tenant_id)]


async def verify_jobs(tx: Tx, tenant_id: UUID, jobs: Sequence[JobLedgerFacts]) -> list[LedgerDrift]:
    """Returns jobs whose transactions don't match their status. Ended jobs must be settled
    accordingly."""
    if len(jobs) > JOBS_AT_ONCE_MAX:
        raise LimitExceeded(f"at most {JOBS_AT_ONCE_MAX:,} jobs can be checked in one call")
    by_job: dict[UUID, list[LedgerTransaction]] = {job.job_id: [] for job in jobs}
    for line in await store.transactions_of_jobs(
        tx, tenant_id, by_job.keys(), list(TransactionType)
    ):
        if line.job_id is not None:
            by_job[line.job_id].append(line)
    return [drift for job in jobs for drift in drifts_of_job(tenant_id, job, by_job[job.job_id])]


async def _reserve(
    tx: Tx, tenant_id: UUID, user_id: UUID, amounts: Mapping[UUID, int], now: datetime
) -> Reserved | None:
    """Takes tokens. Returns None without writing anything if the balance is too low, or if a job
    already has a reservation."""
    priced = {job_id: check_amount(amount, least=0) for job_id, amount in amounts.items()}
    priced = {job_id: amount for job_id, amount in priced.items() if amount}
    total = sum(priced.values())
    if not priced:
        return Reserved(0, await balance(tx, tenant_id, user_id), is_new=True)
    remaining = await store.debit(tx, tenant_id, user_id, total, priced.keys())
    if remaining is None and await store.lock_wallet(tx, tenant_id, user_id):
        # A payment may have been added in between. Under the lock, the second result is final.
        remaining = await store.debit(tx, tenant_id, user_id, total, priced.keys())
    if remaining is None:
        return None
    rows = [
        {**_row(tenant_id, user_id, TransactionType.JOB_RESERVE, -amount, now), "job_id": job_id}
        for job_id, amount in priced.items()
    ]
    if await store.add_transaction(tx, rows) != len(rows):
        raise Conflict(ALREADY_RESERVED)
    return Reserved(total, remaining, is_new=True)


async def _settle(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    settlement: TransactionType,
    now: datetime,
    unused: int = 0,
) -> Settlement | None:
    reserves = await store.transactions_of_jobs(
        tx, tenant_id, [job_id], [TransactionType.JOB_RESERVE]
    )
    if not reserves:
        return None
    user_id, reserved = reserves[0].user_id, -reserves[0].amount
    gives = reserved if settlement is TransactionType.JOB_REFUND else min(unused, reserved)
    if gives:
        await store.lock_wallet(tx, tenant_id, user_id)
    row = _row(tenant_id, user_id, settlement, gives, now)
    if not await store.add_transaction(tx, [{**row, "job_id": job_id}]):
        earlier = await store.transactions_of_jobs(tx, tenant_id, [job_id], SETTLES)
        return Settlement(earlier[0].type, user_id, reserved, is_new=False)
    if gives:
        await store.credit(tx, tenant_id, user_id, gives)
    return Settlement(settlement, user_id, reserved, is_new=True)


def _row(
    tenant_id: UUID, user_id: UUID, kind: TransactionType, amount: int, now: datetime
) -> dict[str, Any]:
    return {
        "tenant_id": tenant_id,
        "user_id": user_id,
        "type": kind,
        "amount": amount,
        "created_at": now,
    }


def _wallet_drift(row: Any) -> LedgerDrift:
    if row.balance < 0:
        fault, says = Fault.NEGATIVE, f"the balance is {row.balance}"
    else:
        fault = Fault.BALANCE
        says = f"the balance is {row.balance}, but the transactions add up to {row.total}"
    return LedgerDrift(fault, row.tenant_id, row.user_id, None, says)


def _job_drift(row: Any) -> LedgerDrift:
    if row.reserves != 1:
        fault, says = (
            Fault.NOT_RESERVED,
            f"{row.reserves} reservations, settled {row.settled} times",
        )
    elif row.settled > 1:
        fault, says = Fault.SETTLED_TWICE, f"settled {row.settled} times"
    elif row.payers > 1:
        fault, says = Fault.AMOUNT, "the transactions of a single job are in several wallets"
    else:
        fault = Fault.AMOUNT
        says = f"{row.reserved} tokens were reserved, {row.refunded} refunded and {row.unused} returned as unused"
    return LedgerDrift(fault, row.tenant_id, None, row.job_id, says)
