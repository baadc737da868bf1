"""What nobody waits for is written a moment later, and a sweep does what was lost."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import func, select
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock, asked, give_tokens, job_context_on, waiter

from comfyfleet.api.values import DeliveredOutput
from comfyfleet.api.worker import Complete, Heartbeat
from comfyfleet.server.db import Database, open_database
from comfyfleet.server.db.tenant_tables import outbox
from comfyfleet.server.jobs import finish, store, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.heartbeat import heartbeat
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import output_folder_of
from comfyfleet.server.jobs.outbox import flush_due
from comfyfleet.server.media.model import output_key

Given = tuple[JobContext, UUID]


@pytest.fixture
async def given(databases: Databases, tmp_path: Path) -> AsyncIterator[Given]:
    async with job_context_on(databases, tmp_path, ManualClock()) as found:
        yield found


async def outbox_ids(context: JobContext) -> int:
    async with context.pools["main"].read() as tx:
        return int(await tx.scalar(select(func.count()).select_from(outbox)) or 0)


async def completed(context: JobContext, tenant_id: UUID, count: int) -> None:
    user_id = await give_tokens(context, tenant_id, 100)
    wanted = {context.new_id(): asked(user_id=user_id, price_tokens=7) for _ in range(count)}
    await submit.submit_many(context, tenant_id, wanted)
    for _ in range(count):
        handed = await lease_next(context, waiter(), wait_seconds=0)
        assert handed
        said = Complete(dispatch_id=handed.dispatch_id, lease_token=handed.lease_token)
        await finish.complete(context, said)


async def test_delivered_words_are_forgotten_together(given: Given) -> None:
    context, tenant_id = given
    await completed(context, tenant_id, 3)
    await context.deferred.flush()
    assert await outbox_ids(context) == 0


async def test_words_that_were_not_forgotten_change_nothing_when_delivered_again(
    given: Given,
) -> None:
    context, tenant_id = given
    context.deferred.delete_outbox = lambda *_: None  # type: ignore[method-assign]
    await completed(context, tenant_id, 2)
    assert await outbox_ids(context) == 4
    await flush_due(context, context.pools["main"], limit=10)
    assert await outbox_ids(context) == 0
    assert await lease_next(context, waiter(), wait_seconds=0) is None


async def test_forgetting_late_takes_no_newer_word_with_it(given: Given) -> None:
    context, tenant_id = given
    pool = context.pools["main"]
    user_id = await give_tokens(context, tenant_id, 10)
    [job] = await submit.submit_many(context, tenant_id, {context.new_id(): asked(user_id=user_id)})
    await flush_due(context, pool, limit=10)  # the sweep was faster
    async with pool.transaction() as tx:
        [newer] = await store.add_outbox(tx, [job], now=context.clock())
    await context.deferred.flush()
    async with pool.read() as tx:
        assert list(await tx.scalars(select(outbox.c.id))) == [newer]


async def test_a_database_that_is_away_holds_up_no_other(
    given: Given, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context, tenant_id = given
    away: Database = open_database(f"sqlite:///{tmp_path / 'no' / 'such' / 'folder'}")
    context.deferred.delete_outbox(away, [1, 2], context.central)
    await completed(context, tenant_id, 1)
    await context.deferred.flush()
    assert await outbox_ids(context) == 0
    assert "2 outbox rows are left to the sweep" in caplog.text
    await away.close()


async def test_attempts_of_several_jobs_are_noted_together_and_once(given: Given) -> None:
    context, tenant_id = given
    user_id = await give_tokens(context, tenant_id, 100)
    wanted = {context.new_id(): asked(user_id=user_id) for _ in range(3)}
    await submit.submit_many(context, tenant_id, wanted)
    handed = [await lease_next(context, waiter(), wait_seconds=0) for _ in wanted]
    for job in handed:
        assert job
        for text in ("first", "second"):
            said = Heartbeat(
                dispatch_id=job.dispatch_id,
                lease_token=job.lease_token,
                filled_in={"1": {"text": text}},
            )
            await heartbeat(context, said)
    await context.deferred.flush()
    async with context.pools["main"].read() as tx:
        noted = [await store.attempts_of(tx, tenant_id, job_id) for job_id in wanted]
    assert [[each.filled_in for each in of_job] for of_job in noted] == [
        [{"1": {"text": "first"}}]
    ] * 3
    assert await outbox_ids(context) == 0


async def test_what_a_worker_has_put_is_gone_a_moment_after_its_copy_is_named(given: Given) -> None:
    context, tenant_id = given
    user_id = await give_tokens(context, tenant_id, 10)
    await submit.submit_many(context, tenant_id, {context.new_id(): asked(user_id=user_id)})
    handed = await lease_next(context, waiter(), wait_seconds=0)
    assert handed
    put = output_key(
        tenant_id, handed.job_id, output_folder_of(handed.lease_token, handed.job_id), "a.png"
    )
    await context.store.put(put, b"picture", "image/png")
    output = DeliveredOutput(name="a.png", size=7, content_type="image/png", is_stripped=True)
    said = Complete(
        dispatch_id=handed.dispatch_id, lease_token=handed.lease_token, outputs=(output,)
    )
    await finish.complete(context, said)
    assert put in [key async for key in context.store.keys("")]
    await context.deferred.flush()
    [kept] = [key async for key in context.store.keys("")]
    assert await context.store.get(kept) == b"picture"


async def test_an_outbox_row_stays_until_the_disk_has_its_dispatch(given: Given) -> None:
    """A power cut before that undoes the dispatch, and the row adds it again."""
    context, tenant_id = given
    if not context.central.is_sqlite:
        pytest.skip("PostgreSQL waits for the disk in its commits")
    began, may_end = threading.Event(), threading.Event()

    def sync(_: str) -> None:
        began.set()
        may_end.wait(10)

    await context.central.persist()
    context.central.wal._sync = sync
    user_id = await give_tokens(context, tenant_id, 10)
    await submit.submit_many(context, tenant_id, {context.new_id(): asked(user_id=user_id)})
    deleting = asyncio.ensure_future(context.deferred.flush())
    assert await asyncio.to_thread(began.wait, 10)
    assert await outbox_ids(context) == 1
    may_end.set()
    await deleting
    assert await outbox_ids(context) == 0
