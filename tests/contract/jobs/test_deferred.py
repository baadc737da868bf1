"""What nobody waits for is written a moment later, and a sweep does what was lost."""

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import func, select
from tests.dbkit.databases import Databases
from tests.jobskit.sides import ByHand, asked, give_tokens, sides_on, waiter

from comfyfleet.db import Database, open_database
from comfyfleet.db.tenant import outbox
from comfyfleet.files.model import output_key
from comfyfleet.jobs import ending, store, submitting
from comfyfleet.jobs.beating import heartbeat
from comfyfleet.jobs.handing import next_job
from comfyfleet.jobs.model import delivery_of
from comfyfleet.jobs.settling import deliver_words
from comfyfleet.jobs.sides import Sides
from comfyfleet.wire.files import DeliveredOutput
from comfyfleet.wire.messages import Complete, Heartbeat

Given = tuple[Sides, UUID]


@pytest.fixture
async def given(databases: Databases, tmp_path: Path) -> AsyncIterator[Given]:
    async with sides_on(databases, tmp_path, ByHand()) as found:
        yield found


async def words(sides: Sides) -> int:
    async with sides.pools["main"].look() as tx:
        return int(await tx.scalar(select(func.count()).select_from(outbox)) or 0)


async def completed(sides: Sides, tenant_id: UUID, count: int) -> None:
    user_id = await give_tokens(sides, tenant_id, 100)
    wanted = {sides.new_id(): asked(user_id=user_id, price_tokens=7) for _ in range(count)}
    await submitting.submit_many(sides, tenant_id, wanted)
    for _ in range(count):
        handed = await next_job(sides, waiter(), wait_seconds=0)
        assert handed
        said = Complete(dispatch_id=handed.dispatch_id, lease_token=handed.lease_token)
        await ending.complete(sides, said)


async def test_delivered_words_are_forgotten_together(given: Given) -> None:
    sides, tenant_id = given
    await completed(sides, tenant_id, 3)
    await sides.deferred.flush()
    assert await words(sides) == 0


async def test_words_that_were_not_forgotten_change_nothing_when_delivered_again(
    given: Given,
) -> None:
    sides, tenant_id = given
    sides.deferred.forget_words = lambda pool, words: None  # type: ignore[method-assign]
    await completed(sides, tenant_id, 2)
    assert await words(sides) == 4
    await deliver_words(sides, sides.pools["main"], limit=10)
    assert await words(sides) == 0
    assert await next_job(sides, waiter(), wait_seconds=0) is None


async def test_forgetting_late_takes_no_newer_word_with_it(given: Given) -> None:
    sides, tenant_id = given
    pool = sides.pools["main"]
    user_id = await give_tokens(sides, tenant_id, 10)
    [job] = await submitting.submit_many(sides, tenant_id, {sides.new_id(): asked(user_id=user_id)})
    await deliver_words(sides, pool, limit=10)  # the sweep was faster
    async with pool.begin() as tx:
        [newer] = await store.leave_word(tx, [job], now=sides.clock())
    await sides.deferred.flush()
    async with pool.look() as tx:
        assert list(await tx.scalars(select(outbox.c.id))) == [newer]


async def test_a_database_that_is_away_holds_up_no_other(
    given: Given, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sides, tenant_id = given
    away: Database = open_database(f"sqlite:///{tmp_path / 'no' / 'such' / 'folder'}")
    sides.deferred.forget_words(away, [1, 2])
    await completed(sides, tenant_id, 1)
    await sides.deferred.flush()
    assert await words(sides) == 0
    assert "2 words of the outbox are left to the sweep" in caplog.text
    await away.close()


async def test_attempts_of_several_jobs_are_noted_together_and_once(given: Given) -> None:
    sides, tenant_id = given
    user_id = await give_tokens(sides, tenant_id, 100)
    wanted = {sides.new_id(): asked(user_id=user_id) for _ in range(3)}
    await submitting.submit_many(sides, tenant_id, wanted)
    handed = [await next_job(sides, waiter(), wait_seconds=0) for _ in wanted]
    for job in handed:
        assert job
        for text in ("first", "second"):
            said = Heartbeat(
                dispatch_id=job.dispatch_id,
                lease_token=job.lease_token,
                filled_in={"1": {"text": text}},
            )
            await heartbeat(sides, said)
    await sides.deferred.flush()
    async with sides.pools["main"].look() as tx:
        noted = [await store.attempts_of(tx, tenant_id, job_id) for job_id in wanted]
    assert [[each.filled_in for each in of_job] for of_job in noted] == [
        [{"1": {"text": "first"}}]
    ] * 3
    assert await words(sides) == 0


async def test_what_a_worker_has_put_is_gone_a_moment_after_its_copy_is_named(given: Given) -> None:
    sides, tenant_id = given
    user_id = await give_tokens(sides, tenant_id, 10)
    await submitting.submit_many(sides, tenant_id, {sides.new_id(): asked(user_id=user_id)})
    handed = await next_job(sides, waiter(), wait_seconds=0)
    assert handed
    put = output_key(
        tenant_id, handed.job_id, delivery_of(handed.lease_token, handed.job_id), "a.png"
    )
    await sides.store.put(put, b"picture", "image/png")
    output = DeliveredOutput(name="a.png", size=7, content_type="image/png", is_stripped=True)
    said = Complete(
        dispatch_id=handed.dispatch_id, lease_token=handed.lease_token, outputs=(output,)
    )
    await ending.complete(sides, said)
    assert put in [key async for key in sides.store.keys("")]
    await sides.deferred.flush()
    [kept] = [key async for key in sides.store.keys("")]
    assert await sides.store.get(kept) == b"picture"
