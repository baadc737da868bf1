"""Any sequence of credits, reservations and settlements, against a model of a few lines."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.support.databases.factory import Databases

from comfyfleet.errors import Conflict, InsufficientTokens
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import Settlement, TransactionType

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
T = TypeVar("T")
users = st.sampled_from([UUID(int=1), UUID(int=2)])
jobs = st.sampled_from([UUID(int=100 + number) for number in range(6)])
amounts = st.integers(0, 12)


class LedgerLife(RuleBasedStateMachine):
    """A tenant of its own in a database that all examples share."""

    database: Database
    loop: asyncio.Runner

    @initialize()
    def begin(self) -> None:
        self.tenant = uuid4()
        self.balances: dict[UUID, int] = {}
        self.payments: dict[str, tuple[UUID, int]] = {}
        self.reserved: dict[UUID, tuple[UUID, int]] = {}
        self.settled: dict[UUID, TransactionType] = {}
        self.spent = 0

    def act(self, do: Callable[[Tx], Coroutine[Any, Any, T]]) -> T:
        async def in_one_transaction() -> T:
            async with self.database.transaction() as tx:
                return await do(tx)

        return self.loop.run(in_one_transaction())

    @rule(user=users, amount=st.integers(1, 30), payment=st.sampled_from("abcdefgh"))
    def credit(self, user: UUID, amount: int, payment: str) -> None:
        def pay(tx: Tx) -> Coroutine[Any, Any, tuple[int, bool]]:
            return ledger.credit(tx, self.tenant, user, amount, payment, now=NOW)

        if self.payments.setdefault(payment, (user, amount)) != (user, amount):
            with pytest.raises(Conflict):
                self.act(pay)
            return
        balance, is_new = self.act(pay)
        if is_new:
            self.balances[user] = self.balances.get(user, 0) + amount
        assert balance == self.balances[user]

    @rule(user=users, job=jobs, amount=amounts)
    def reserve(self, user: UUID, job: UUID, amount: int) -> None:
        def take(tx: Tx) -> Coroutine[Any, Any, tuple[int, int, bool]]:
            return ledger.reserve(tx, self.tenant, user, job, amount, now=NOW)

        has = self.balances.get(user, 0)
        if amount == 0:
            assert self.act(take) == (0, has, True)
        elif job in self.reserved:
            payer, kept = self.reserved[job]
            if payer == user:
                assert self.act(take) == (kept, has, False)
            else:
                with pytest.raises(Conflict):
                    self.act(take)
        elif amount > has:
            with pytest.raises(InsufficientTokens) as refused:
                self.act(take)
            assert refused.value.details == {"required_tokens": amount, "balance": has}
        else:
            assert self.act(take) == (amount, has - amount, True)
            self.reserved[job] = (user, amount)
            self.balances[user] = has - amount

    @rule(user=users, wanted=st.dictionaries(jobs, amounts, min_size=1))
    def reserve_all(self, user: UUID, wanted: dict[UUID, int]) -> None:
        priced = {job: amount for job, amount in wanted.items() if amount}
        has, total = self.balances.get(user, 0), sum(priced.values())

        def take(tx: Tx) -> Coroutine[Any, Any, tuple[int, int, bool]]:
            return ledger.reserve_all(tx, self.tenant, user, wanted, now=NOW)

        taken = priced.keys() & self.reserved.keys()
        if taken or total > has:
            with pytest.raises(Conflict if taken else InsufficientTokens):
                self.act(take)
            return
        answer = self.act(take)
        assert answer == (total, has - total, True)
        self.reserved |= {job: (user, amount) for job, amount in priced.items()}
        if priced:
            self.balances[user] = has - total

    @rule(job=jobs, succeeded=st.booleans(), unused=amounts)
    def settle(self, job: UUID, succeeded: bool, unused: int) -> None:
        wanted = TransactionType.JOB_CONSUME if succeeded else TransactionType.JOB_REFUND

        def end(tx: Tx) -> Coroutine[Any, Any, Settlement | None]:
            if succeeded:
                return ledger.consume(tx, self.tenant, job, unused=unused, now=NOW)
            return ledger.refund(tx, self.tenant, job, now=NOW)

        found = self.act(end)
        if job not in self.reserved:
            assert found is None
            return
        user, amount = self.reserved[job]
        is_new = job not in self.settled
        assert found == (self.settled.setdefault(job, wanted), user, amount, is_new)
        if is_new:
            self.balances[user] += min(unused, amount) if succeeded else amount
            self.spent = self.spent + (amount - min(unused, amount) if succeeded else 0)

    @invariant()
    def it_adds_up(self) -> None:
        async def look() -> None:
            async with self.database.read() as tx:
                assert await ledger.verify(tx, self.tenant) == []
                paid = sum(amount for _, amount in self.payments.values())
                held = sum(
                    amount for job, (_, amount) in self.reserved.items() if job not in self.settled
                )
                assert paid == sum(self.balances.values()) + held + self.spent
                for user, balance in self.balances.items():
                    assert balance >= 0
                    assert await ledger.balance(tx, self.tenant, user) == balance

        self.loop.run(look())


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        ("sqlite", 15),
        ("postgres", 6),
        pytest.param("sqlite", 60, marks=pytest.mark.slow),
        pytest.param("postgres", 20, marks=pytest.mark.slow),
    ],
)
def test_any_life_of_a_ledger_adds_up(
    request: pytest.FixtureRequest, kind: str, examples: int
) -> None:
    databases: Databases = request.getfixturevalue(f"{kind}_databases")
    with asyncio.Runner() as loop:
        database = loop.run(databases.open("tenant"))

        class Life(LedgerLife):
            pass

        Life.database, Life.loop = database, loop
        run_state_machine_as_test(
            Life,
            settings=settings(
                max_examples=examples,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        loop.run(database.close())
