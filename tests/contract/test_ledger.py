"""The ledger, on every database, and with many at once on purpose."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from sqlalchemy import delete, insert, text, update
from sqlalchemy.exc import DBAPIError

from comfyfleet.errors import Conflict, InsufficientTokens, InvalidInput, LimitExceeded
from comfyfleet.server.db import Database
from comfyfleet.server.db.dialect import is_sqlite
from comfyfleet.server.db.tenant_tables import token_transactions, token_wallets
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import (
    Credited,
    Fault,
    JobLedgerFacts,
    Reserved,
    TransactionType,
)

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
TENANT, ADA, BOB = UUID(int=1), UUID(int=2), UUID(int=3)
JOB = UUID(int=10)


async def pay(pool: Database, amount: int, payment: str = "pi_1", user: UUID = ADA) -> Credited:
    async with pool.transaction() as tx:
        return await ledger.credit(tx, TENANT, user, amount, payment, now=NOW)


async def reserve(pool: Database, job: UUID, amount: int, user: UUID = ADA) -> Reserved:
    async with pool.transaction() as tx:
        return await ledger.reserve(tx, TENANT, user, job, amount, now=NOW)


async def balance(pool: Database, user: UUID = ADA) -> int:
    async with pool.read() as tx:
        return await ledger.balance(tx, TENANT, user)


async def types(pool: Database, user: UUID = ADA) -> list[str]:
    async with pool.read() as tx:
        found = await ledger.transactions(tx, TENANT, user, limit=500)
    return [each.type for each in reversed(found)]


async def adds_up(pool: Database) -> bool:
    async with pool.read() as tx:
        return await ledger.verify(tx) == []


async def test_a_payment_is_credited_once(pool: Database) -> None:
    assert await pay(pool, 100) == (100, True)
    assert await pay(pool, 100) == (100, False)
    with pytest.raises(Conflict, match="credited before with 100 tokens, not 999"):
        await pay(pool, 999)
    assert await pay(pool, 5, "pi_2") == (105, True)
    assert await types(pool) == ["PAYMENT_CREDIT", "PAYMENT_CREDIT"]


async def test_a_payment_of_one_user_is_never_credited_to_another(pool: Database) -> None:
    await pay(pool, 100)
    with pytest.raises(Conflict):
        await pay(pool, 100, user=BOB)
    assert await balance(pool, BOB) == 0


async def test_two_tenants_may_have_payments_of_the_same_id(pool: Database) -> None:
    await pay(pool, 100)
    async with pool.transaction() as tx:
        assert await ledger.credit(tx, UUID(int=9), ADA, 7, "pi_1", now=NOW) == (7, True)
    assert await balance(pool) == 100


@pytest.mark.parametrize("amount", [0, -1, True, 1.5, 10**12 + 1])
async def test_only_whole_amounts_above_zero_are_credited(pool: Database, amount: int) -> None:
    with pytest.raises(InvalidInput):
        await pay(pool, amount)


@pytest.mark.parametrize("payment", ["", "  ", "x" * 201])
async def test_a_payment_needs_its_providers_id(pool: Database, payment: str) -> None:
    with pytest.raises(InvalidInput):
        await pay(pool, 1, payment)


async def test_what_a_job_costs_leaves_the_wallet_at_once(pool: Database) -> None:
    await pay(pool, 100)
    assert await reserve(pool, JOB, 30) == Reserved(30, 70, is_new=True)
    assert await balance(pool) == 70
    assert await adds_up(pool)


async def test_too_little_is_refused_with_both_figures_and_nothing_written(pool: Database) -> None:
    await pay(pool, 10)
    async with pool.transaction() as tx:  # and committed: the refusal itself must have left nothing
        with pytest.raises(InsufficientTokens) as refused:
            await ledger.reserve(tx, TENANT, ADA, JOB, 11, now=NOW)
        with pytest.raises(InsufficientTokens):
            await ledger.reserve(tx, TENANT, BOB, JOB, 1, now=NOW)
    assert refused.value.code == "insufficient_tokens"
    assert refused.value.message == "Insufficient token balance."
    assert refused.value.details == {"required_tokens": 11, "balance": 10}
    assert await balance(pool) == 10
    assert await types(pool) == ["PAYMENT_CREDIT"]
    assert await types(pool, BOB) == []


async def test_a_job_reserves_once_and_keeps_its_first_amount(pool: Database) -> None:
    await pay(pool, 40)
    await reserve(pool, JOB, 30)
    assert await reserve(pool, JOB, 35) == Reserved(30, 10, is_new=False)
    with pytest.raises(Conflict):
        await reserve(pool, JOB, 30, BOB)
    assert await balance(pool) == 10


async def test_a_price_of_zero_leaves_no_transaction(pool: Database) -> None:
    assert await reserve(pool, JOB, 0) == Reserved(0, 0, is_new=True)
    async with pool.transaction() as tx:
        assert await ledger.consume(tx, TENANT, JOB, now=NOW) is None
        assert await ledger.refund(tx, TENANT, JOB, now=NOW) is None
    assert await types(pool) == []


async def test_success_spends_what_was_reserved(pool: Database) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    async with pool.transaction() as tx:
        settled = await ledger.consume(tx, TENANT, JOB, now=NOW)
    assert settled == (TransactionType.JOB_CONSUME, ADA, 30, True)
    assert await balance(pool) == 70
    assert await types(pool) == ["PAYMENT_CREDIT", "JOB_RESERVE", "JOB_CONSUME"]


async def test_what_a_job_has_not_used_goes_back_once_with_its_settlement(pool: Database) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    for is_new in (True, False):
        async with pool.transaction() as tx:
            settled = await ledger.consume(tx, TENANT, JOB, unused=12, now=NOW)
        assert settled == (TransactionType.JOB_CONSUME, ADA, 30, is_new)
        assert await balance(pool) == 82
    async with pool.transaction() as tx:
        await ledger.refund(tx, TENANT, JOB, now=NOW)
    assert await balance(pool) == 82
    assert await types(pool) == ["PAYMENT_CREDIT", "JOB_RESERVE", "JOB_CONSUME"]
    assert await adds_up(pool)


async def test_no_more_goes_back_than_was_reserved(pool: Database) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    async with pool.transaction() as tx:
        await ledger.consume(tx, TENANT, JOB, unused=31, now=NOW)
    assert await balance(pool) == 100
    assert await adds_up(pool)


async def test_more_given_back_than_was_reserved_is_found(pool: Database) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    line = {"tenant_id": TENANT, "user_id": ADA, "job_id": JOB, "created_at": NOW}
    async with pool.transaction() as tx:
        await tx.execute(
            insert(token_transactions).values({**line, "type": "JOB_CONSUME", "amount": 31})
        )
        await tx.execute(update(token_wallets).values(balance=101))
        found = [(each.job_id, each.fault) for each in await ledger.verify(tx)]
    assert found == [(JOB, Fault.AMOUNT)]


async def test_failure_gives_back_what_was_reserved(pool: Database) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    async with pool.transaction() as tx:
        settled = await ledger.refund(tx, TENANT, JOB, now=NOW)
    assert settled == (TransactionType.JOB_REFUND, ADA, 30, True)
    assert await balance(pool) == 100
    assert await types(pool) == ["PAYMENT_CREDIT", "JOB_RESERVE", "JOB_REFUND"]


Settle = Callable[..., Awaitable[object]]


@pytest.mark.parametrize("first", [ledger.consume, ledger.refund])
@pytest.mark.parametrize("second", [ledger.consume, ledger.refund])
async def test_whichever_settles_first_wins(pool: Database, first: Settle, second: Settle) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    async with pool.transaction() as tx:
        won = await ledger.consume(tx, TENANT, JOB, now=NOW) if first is ledger.consume else None
        won = won or await ledger.refund(tx, TENANT, JOB, now=NOW)
    assert won is not None
    async with pool.transaction() as tx:
        assert await second(tx, TENANT, JOB, now=NOW) == won._replace(is_new=False)
    assert await balance(pool) == (70 if first is ledger.consume else 100)
    assert await adds_up(pool)


async def test_another_tenants_job_is_not_settled(pool: Database) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    async with pool.transaction() as tx:
        assert await ledger.refund(tx, UUID(int=9), JOB, now=NOW) is None
    assert await balance(pool) == 70


async def test_many_jobs_are_reserved_all_or_none(pool: Database) -> None:
    await pay(pool, 1000)
    jobs = {uuid4(): 1 for _ in range(999)} | {uuid4(): 0}
    async with pool.transaction() as tx:
        assert await ledger.reserve_all(tx, TENANT, ADA, jobs, now=NOW) == (999, 1, True)
        with pytest.raises(InsufficientTokens) as refused:
            await ledger.reserve_all(tx, TENANT, ADA, {uuid4(): 1, uuid4(): 1}, now=NOW)
    assert refused.value.details == {"required_tokens": 2, "balance": 1}
    assert await balance(pool) == 1
    assert len(await types(pool)) == 500  # the longest page
    assert await adds_up(pool)


async def test_a_job_that_has_its_tokens_is_not_reserved_again_among_others(
    pool: Database,
) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    with pytest.raises(Conflict):
        async with pool.transaction() as tx:
            await ledger.reserve_all(tx, TENANT, ADA, {JOB: 1, uuid4(): 1}, now=NOW)
    with pytest.raises(LimitExceeded):
        async with pool.transaction() as tx:
            await ledger.reserve_all(tx, TENANT, ADA, {uuid4(): 0 for _ in range(1001)}, now=NOW)
    assert await balance(pool) == 70


async def test_transactions_come_in_pages_the_newest_first(pool: Database) -> None:
    for number in range(5):
        await pay(pool, number + 1, f"pi_{number}")
    async with pool.read() as tx:
        first = await ledger.transactions(tx, TENANT, ADA, limit=2)
        rest = await ledger.transactions(tx, TENANT, ADA, before_id=first[-1].id, limit=9)
    assert [each.amount for each in first + rest] == [5, 4, 3, 2, 1]
    assert first[0].provider_transaction_id == "pi_4"


async def test_thirty_two_at_once_never_spend_more_than_there_is(pool: Database) -> None:
    await pay(pool, 100)

    async def attempt() -> bool:
        try:
            await reserve(pool, uuid4(), 10)
        except InsufficientTokens:
            return False
        return True

    taken = await asyncio.gather(*(attempt() for _ in range(32)))
    assert sum(taken) == 10
    assert await balance(pool) == 0
    assert await adds_up(pool)


async def test_one_payment_told_sixteen_times_at_once_counts_once(pool: Database) -> None:
    credited = await asyncio.gather(*(pay(pool, 100) for _ in range(16)))
    assert sum(each.is_new for each in credited) == 1
    assert {each.balance for each in credited} == {100}
    assert await types(pool) == ["PAYMENT_CREDIT"]


async def test_a_payment_told_for_two_users_at_once_reaches_one(pool: Database) -> None:
    users = [ADA, BOB] * 4
    told = [pay(pool, 100, user=user) for user in users]
    answers = await asyncio.gather(*told, return_exceptions=True)
    assert sum(isinstance(each, Credited) and each.is_new for each in answers) == 1
    assert sum(isinstance(each, Conflict) for each in answers) == 4
    assert await balance(pool, ADA) + await balance(pool, BOB) == 100
    assert await adds_up(pool)


async def test_consume_and_refund_at_once_settle_once(pool: Database) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)

    async def settle(number: int) -> bool:
        act = ledger.consume if number % 2 else ledger.refund
        async with pool.transaction() as tx:
            settled = await act(tx, TENANT, JOB, now=NOW)
        assert settled is not None
        return settled.is_new

    assert sum(await asyncio.gather(*(settle(number) for number in range(16)))) == 1
    assert len(await types(pool)) == 3
    assert await adds_up(pool)


async def test_under_the_wallets_lock_others_wait(pool: Database) -> None:
    seen: list[int] = []

    async def count_and_reserve() -> None:
        async with pool.transaction() as tx:
            await ledger.lock_wallet(tx, TENANT, ADA, now=NOW)
            seen.append(len(await ledger.transactions(tx, TENANT, ADA, limit=500)))
            await asyncio.sleep(0.001)
            await ledger.reserve(tx, TENANT, ADA, uuid4(), 1, now=NOW)

    await pay(pool, 100)
    await asyncio.gather(*(count_and_reserve() for _ in range(12)))
    assert seen == list(range(1, 13))


@pytest.mark.parametrize("act", ["update", "delete"])
async def test_the_database_refuses_to_change_a_transaction(pool: Database, act: str) -> None:
    await pay(pool, 100)
    statement = (
        update(token_transactions).values(amount=1)
        if act == "update"
        else delete(token_transactions)
    )
    with pytest.raises(DBAPIError, match="never changed"):
        async with pool.transaction() as tx:
            await tx.execute(statement)
    assert await adds_up(pool)


async def test_the_database_refuses_a_balance_below_zero_and_a_second_settlement(
    pool: Database,
) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    line = {"tenant_id": TENANT, "user_id": ADA, "job_id": JOB, "created_at": NOW}
    async with pool.transaction() as tx:
        await tx.execute(insert(token_transactions).values(type="JOB_CONSUME", amount=0, **line))
    with pytest.raises(DBAPIError):
        async with pool.transaction() as tx:
            await tx.execute(insert(token_transactions).values(type="JOB_REFUND", amount=3, **line))
    with pytest.raises(DBAPIError):
        async with pool.transaction() as tx:
            await tx.execute(update(token_wallets).values(balance=-1))


async def test_a_wallet_that_is_not_the_sum_is_found(pool: Database) -> None:
    await pay(pool, 100)
    await pay(pool, 5, "pi_2", BOB)
    async with pool.transaction() as tx:
        await tx.execute(
            update(token_wallets).values(balance=99).where(token_wallets.c.user_id == ADA)
        )
        [drift] = await ledger.verify(tx)
        assert await ledger.verify(tx, UUID(int=9)) == []
    assert (drift.fault, drift.user_id) == (Fault.BALANCE, ADA)
    assert drift.message == "the balance is 99, but the transactions add up to 100"


async def test_transactions_without_their_wallet_are_found(pool: Database) -> None:
    await pay(pool, 100)
    async with pool.transaction() as tx:
        await tx.execute(delete(token_wallets))
        [drift] = await ledger.verify(tx, TENANT)
    assert (drift.fault, drift.user_id) == (Fault.NO_WALLET, ADA)


async def test_a_settlement_without_or_unlike_its_reservation_is_found(pool: Database) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    other = UUID(int=11)
    rows = [
        {"job_id": JOB, "type": "JOB_REFUND", "amount": 29},
        {"job_id": other, "type": "JOB_CONSUME", "amount": 0},
    ]
    async with pool.transaction() as tx:
        for row in rows:
            line = {"tenant_id": TENANT, "user_id": ADA, "created_at": NOW, **row}
            await tx.execute(insert(token_transactions).values(line))
        await tx.execute(update(token_wallets).values(balance=99))
        found = {each.job_id: each.fault for each in await ledger.verify(tx)}
    assert found == {JOB: Fault.AMOUNT, other: Fault.NOT_RESERVED}


async def test_a_job_settled_twice_is_found_if_the_index_were_gone(pool: Database) -> None:
    await pay(pool, 100)
    await reserve(pool, JOB, 30)
    line = {"tenant_id": TENANT, "user_id": ADA, "job_id": JOB, "created_at": NOW}
    async with pool.transaction() as tx:
        await tx.execute(text("DROP INDEX token_transactions_settled"))
        for kind, amount in (("JOB_CONSUME", 0), ("JOB_REFUND", 30)):
            await tx.execute(insert(token_transactions).values(type=kind, amount=amount, **line))
        await tx.execute(update(token_wallets).values(balance=100))
        [drift] = await ledger.verify(tx)
    assert drift.fault is Fault.SETTLED_TWICE


async def test_a_negative_balance_is_found_if_the_check_were_gone(pool: Database) -> None:
    await pay(pool, 1)
    async with pool.transaction() as tx:
        if is_sqlite(tx):
            await tx.execute(text("PRAGMA ignore_check_constraints = ON"))
        else:
            drop = "ALTER TABLE token_wallets DROP CONSTRAINT token_wallets_balance_check"
            await tx.execute(text(drop))
        await tx.execute(update(token_wallets).values(balance=-1))
        [drift] = await ledger.verify(tx)
    assert drift.fault is Fault.NEGATIVE


async def test_ended_jobs_must_be_settled_as_they_ended(pool: Database) -> None:
    await pay(pool, 100)
    jobs = [UUID(int=number) for number in range(20, 25)]
    for job in jobs:
        await reserve(pool, job, 10)
    async with pool.transaction() as tx:
        await ledger.consume(tx, TENANT, jobs[0], now=NOW)
        await ledger.refund(tx, TENANT, jobs[1], now=NOW)
        ended = [JobLedgerFacts(job, 10, is_ended=True, is_completed=True) for job in jobs[:3]]
        going = [JobLedgerFacts(jobs[3], 10, is_ended=False, is_completed=False)]
        found = await ledger.verify_jobs(tx, TENANT, ended + going)
    assert [(each.job_id, each.fault) for each in found] == [
        (jobs[1], Fault.SETTLED_WRONGLY),
        (jobs[2], Fault.NOT_SETTLED),
    ]
