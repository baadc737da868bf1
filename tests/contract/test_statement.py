"""Statements that the driver sends do on each database what any other statement does."""

import asyncio
import contextlib
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError
from tests.support.databases.recorder import recording

from comfyfleet.errors import InvalidInput
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.dialect import is_one_of
from comfyfleet.server.db.driver import (
    PreparedForIds,
    PreparedInsert,
    PreparedStatement,
    execute_together,
)
from comfyfleet.server.db.tenant_tables import ai_jobs, outbox, token_wallets

NOW = datetime(2026, 11, 15, 8, 30, 0, 123456, tzinfo=UTC)
COLUMNS = ("tenant_id", "job_id", "kind", "payload", "not_before", "created_at")
A_WALLET = {
    "tenant_id": uuid.uuid4(),
    "user_id": uuid.uuid4(),
    "balance": 5,
    "created_at": NOW,
}
ADD = PreparedInsert(outbox, COLUMNS, returning=[outbox.c.id])
GET = PreparedStatement(lambda tx: select(outbox).where(outbox.c.id == bindparam("of_id")))
FORGET = PreparedStatement(lambda tx: delete(outbox).where(outbox.c.id == bindparam("of_id")))
OPEN = PreparedInsert(
    token_wallets,
    ("tenant_id", "user_id", "balance", "created_at"),
    returning=[token_wallets.c.balance],
)
TAKE = PreparedStatement(
    lambda tx: (
        update(token_wallets)
        .where(
            token_wallets.c.user_id == bindparam("of_user"),
            token_wallets.c.balance >= bindparam("amount"),
        )
        .values(balance=token_wallets.c.balance - bindparam("amount"))
        .returning(token_wallets.c.balance)
    )
)


def a_word(**changes: Any) -> dict[str, Any]:
    return {
        "tenant_id": uuid.uuid4(),
        "job_id": uuid.uuid4(),
        "kind": "dispatch",
        "payload": {"names": ["ä", None], "depth": {"x": 1.5}},
        "not_before": NOW,
        "created_at": NOW,
        **changes,
    }


async def how_many(tx: Tx) -> int:
    return int(await tx.scalar(select(func.count()).select_from(outbox)) or 0)


OF_JOBS = PreparedForIds(
    outbox.c.job_id,
    lambda tx, is_one: select(outbox).where(outbox.c.kind == bindparam("of_kind"), is_one),
)


async def test_rows_of_several_ids_come_back_once_each(pool: Database) -> None:
    words = [a_word(), a_word(), a_word(kind="graph"), a_word()]
    async with pool.transaction() as tx:
        await ADD.add(tx, words)
        asked = [each["job_id"] for each in words[:3]] + [uuid.uuid4()]
        found = await OF_JOBS.of(tx, asked, {"of_kind": "dispatch"})
        assert await OF_JOBS.of(tx, [], {"of_kind": "dispatch"}) == []
    assert {each["job_id"]: each["payload"] for each in found} == {
        each["job_id"]: each["payload"] for each in words[:2]
    }
    assert len(found) == 2


async def test_a_row_comes_back_as_it_was_put_in(pool: Database) -> None:
    word = a_word()
    async with pool.transaction() as tx:
        (added,) = await ADD.add(tx, [word])
        found = await GET.first(tx, {"of_id": added["id"]})
    assert found == {"id": added["id"], "tries": 0, **word}


async def test_several_rows_are_added_at_once_and_none_is_no_row(pool: Database) -> None:
    async with pool.transaction() as tx:
        assert len(await ADD.add(tx, [a_word() for _ in range(1200)])) == 1200
        assert await ADD.add(tx, []) == []
        assert await how_many(tx) == 1200


async def test_few_texts_are_enough_for_any_number_of_rows_or_ids(pool: Database) -> None:
    if pool.is_sqlite:
        pytest.skip("it keeps few prepared statements, and no large ones")
    with recording({make_url(pool.url).database or "": "pool"}) as record:
        async with pool.transaction() as tx:
            for count in range(2, 300, 7):
                added = await ADD.add(tx, [a_word() for _ in range(count)])
                ids = [each["id"] for each in added]
                assert len(ids) == count
                gone = delete(outbox).where(is_one_of(tx, outbox.c.id, ids))
                assert (await tx.execute(gone)).rowcount == count
    texts = {each.text.split()[0]: set[str]() for each in record.said}
    for each in record.said:
        texts[each.text.split()[0]].add(each.text)
    assert len(texts["DELETE"]) == 1
    assert len(texts["INSERT"]) <= 16 + 3


async def test_of_rows_that_are_known_nothing_is_returned(pool: Database) -> None:
    rows = [
        {"tenant_id": uuid.uuid4(), "user_id": uuid.uuid4(), "balance": 5, "created_at": NOW}
        for _ in range(3)
    ]
    async with pool.transaction() as tx:
        assert await OPEN.add(tx, rows[:1]) == [{"balance": 5}]
        assert await OPEN.add(tx, rows[:1]) == []
        assert len(await OPEN.add(tx, rows)) == 2


async def test_a_write_is_guarded_by_what_is_bound(pool: Database) -> None:
    row = {"tenant_id": uuid.uuid4(), "user_id": uuid.uuid4(), "balance": 5, "created_at": NOW}
    async with pool.transaction() as tx:
        await OPEN.add(tx, [row])
        assert await TAKE.first(tx, {"of_user": row["user_id"], "amount": 3}) == {"balance": 2}
        assert await TAKE.first(tx, {"of_user": row["user_id"], "amount": 3}) is None


async def test_a_value_that_is_forgotten_is_no_null(pool: Database) -> None:
    word = a_word()
    del word["kind"]
    with pytest.raises(Exception, match="kind"):
        async with pool.transaction() as tx:
            await ADD.add(tx, [word])


async def test_a_number_that_no_column_can_hold_is_refused_as_such(pool: Database) -> None:
    async def take(amount: int) -> None:
        async with pool.transaction() as tx:
            await TAKE.rows(tx, {"of_user": uuid.uuid4(), "amount": amount})

    with pytest.raises(InvalidInput, match="a number is too large"):
        await take(2**70)
    await take(2**40)


async def test_it_is_undone_with_its_transaction(pool: Database) -> None:
    with contextlib.suppress(RuntimeError):
        async with pool.transaction() as tx:
            await ADD.add(tx, [a_word()])
            await tx.execute(insert(outbox).values(a_word()))
            assert await how_many(tx) == 2
            raise RuntimeError
    async with pool.read() as tx:
        assert await how_many(tx) == 0


async def test_a_single_statement_is_a_transaction_by_itself(pool: Database) -> None:
    async with pool.execute_one() as tx:
        (added,) = await ADD.add(tx, [a_word()])
    async with pool.read() as tx:
        assert await how_many(tx) == 1
    async with pool.execute_one() as tx:
        assert await FORGET.rows(tx, {"of_id": added["id"]}) == []
    async with pool.read() as tx:
        assert await how_many(tx) == 0


async def test_who_is_cut_off_leaves_neither_rows_nor_locks(pool: Database) -> None:
    row = {"tenant_id": uuid.uuid4(), "user_id": uuid.uuid4(), "balance": 5, "created_at": NOW}
    async with pool.transaction() as tx:
        await OPEN.add(tx, [row])
    taken = asyncio.Event()

    async def take_and_wait() -> None:
        async with pool.transaction() as tx:
            await TAKE.rows(tx, {"of_user": row["user_id"], "amount": 5})
            taken.set()
            await asyncio.sleep(60)

    cut_off = asyncio.create_task(take_and_wait())
    await taken.wait()
    cut_off.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cut_off
    async with asyncio.timeout(5), pool.transaction() as tx:
        assert await TAKE.first(tx, {"of_user": row["user_id"], "amount": 5}) == {"balance": 0}


async def test_two_that_take_at_once_follow_each_other(pool: Database) -> None:
    row = {"tenant_id": uuid.uuid4(), "user_id": uuid.uuid4(), "balance": 20, "created_at": NOW}
    async with pool.transaction() as tx:
        await OPEN.add(tx, [row])

    async def take() -> Any:
        async with pool.transaction() as tx:
            return await TAKE.first(tx, {"of_user": row["user_id"], "amount": 1})

    left = await asyncio.gather(*(take() for _ in range(30)))
    assert sorted(each["balance"] for each in left if each) == list(range(20))


EVERYTHING = PreparedStatement(lambda tx: select(ai_jobs).where(ai_jobs.c.id == bindparam("of_id")))


def a_job(**changes: Any) -> dict[str, Any]:
    return {
        "id": uuid.uuid4(),
        "tenant_id": uuid.uuid4(),
        "user_id": None,
        "workflow_id": 1,
        "workflow_slug": "retro",
        "workflow_version": 1,
        "stage": "live",
        "provider": "self_hosted",
        "priority": 0,
        "status": "queued",
        "prompt": {"3": {"inputs": {"b": 1, "a": "ä"}}},
        "properties": {},
        "assets": [],
        "is_held": True,
        "submitted_at": NOW,
        **changes,
    }


async def test_values_come_out_as_core_gives_them(pool: Database) -> None:
    job = a_job()
    async with pool.transaction() as tx:
        await tx.execute(insert(ai_jobs).values(job))
        core = (await tx.execute(select(ai_jobs).where(ai_jobs.c.id == job["id"]))).one()
        found = await EVERYTHING.first(tx, {"of_id": job["id"]})
    assert found == dict(core._mapping)
    assert found["is_held"] is True
    assert found["submitted_at"].tzinfo is not None
    assert list(found["prompt"]["3"]["inputs"]) == ["b", "a"]
    known = {name: type(value) for name, value in core._mapping.items()}
    assert {name: type(value) for name, value in found.items()} == known


async def test_a_constraint_is_told_by_the_name_that_core_tells_it_by(pool: Database) -> None:
    add = PreparedStatement(lambda tx: insert(token_wallets), columns=list(A_WALLET))
    async with pool.transaction() as tx:
        await add.rows(tx, A_WALLET)
    with pytest.raises(IntegrityError):
        async with pool.transaction() as tx:
            await add.rows(tx, A_WALLET)


async def test_a_list_has_no_fixed_text(pool: Database) -> None:
    some = PreparedStatement(lambda tx: select(outbox).where(outbox.c.id.in_(bindparam("ids"))))
    async with pool.read() as tx:
        with pytest.raises(TypeError, match="aren't constant"):
            await some.rows(tx, {"ids": [1, 2]})


async def test_writes_that_are_sent_together_all_happen(pool: Database) -> None:
    wallet = {**A_WALLET, "user_id": uuid.uuid4()}
    taken = {"of_user": wallet["user_id"], "amount": 2}
    async with pool.transaction() as tx:
        await OPEN.add(tx, [wallet])
        (answer,) = await execute_together(tx, (ADD, a_word()), (ADD, a_word()), (TAKE, taken))
        assert list(answer) == [3]
        assert await how_many(tx) == 2
        ((word_id,),) = await execute_together(tx, (ADD, a_word()))
        assert await GET.first(tx, {"of_id": word_id})


async def test_of_writes_that_are_sent_together_none_is_left_when_one_fails(pool: Database) -> None:
    add = PreparedStatement(lambda tx: insert(token_wallets), columns=list(A_WALLET))
    async with pool.transaction() as tx:
        await add.rows(tx, A_WALLET)
    with pytest.raises(IntegrityError):
        async with pool.transaction() as tx:
            await execute_together(tx, (ADD, a_word()), (add, A_WALLET), (ADD, a_word()))
    async with pool.read() as tx:
        assert await how_many(tx) == 0
