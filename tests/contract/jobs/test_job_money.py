"""What a job costs: reserved once, consumed or refunded once, whatever happens to it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from tests.support.databases.factory import Databases
from tests.support.jobs.context import (
    ManualClock,
    asked,
    give_tokens,
    job_context_on,
    let_expire,
    require_sound_ledger,
    waiter,
)

from comfyfleet.api.worker import Complete, Fail
from comfyfleet.api.worker import Job as Handed
from comfyfleet.errors import InsufficientTokens, InvalidInput, TooManyActive
from comfyfleet.server.db import Database
from comfyfleet.server.jobs import finish, service, submit
from comfyfleet.server.jobs.batches import admit_all
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import (
    MIN_TOKENS,
    PRICE_PER_SECOND,
    Failure,
    Job,
    JobSpec,
    JobStatus,
)
from comfyfleet.server.jobs.reconcile import expire_due_leases
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.queue.model import RequeueReason
from comfyfleet.server.tenants import wallet as ledger


class Till:
    def __init__(
        self, context: JobContext, tenant_id: UUID, user_id: UUID, clock: ManualClock
    ) -> None:
        self.context, self.tenant_id, self.user_id, self.clock = context, tenant_id, user_id, clock

    def priced(self, **changes: object) -> JobSpec:
        return asked(user_id=self.user_id, price_tokens=10, **changes)  # type: ignore[arg-type]

    async def submit(self, **changes: object) -> Job:
        job, _ = await submit.submit(self.context, self.tenant_id, self.priced(**changes))
        return job

    async def lease(self) -> Handed:
        handed = await lease_next(self.context, waiter(), wait_seconds=0)
        assert handed
        return handed

    async def complete(self, handed: Handed) -> Job:
        said = Complete(dispatch_id=handed.dispatch_id, lease_token=handed.lease_token)
        return await finish.complete(self.context, said)

    async def balance(self) -> int:
        async with self.context.pools["main"].read() as tx:
            return await ledger.balance(tx, self.tenant_id, self.user_id)


@pytest.fixture
async def till(databases: Databases, tmp_path: Path) -> AsyncIterator[Till]:
    clock = ManualClock()
    async with job_context_on(databases, tmp_path, clock, max_attempts=1) as (context, tenant_id):
        user_id = await give_tokens(context, tenant_id, 25)
        yield Till(context, tenant_id, user_id, clock)


async def test_success_is_paid(till: Till) -> None:
    job = await till.submit()
    assert await till.balance() == 15
    handed = await till.lease()
    done = await till.complete(handed)
    await till.complete(handed)
    assert await till.balance() == 15
    assert done.id == job.id
    await require_sound_ledger(till.context, till.tenant_id, [done])


async def test_failure_is_refunded(till: Till) -> None:
    await till.submit()
    handed = await till.lease()
    why = Failure("no")
    for _ in range(2):
        await finish.fail(till.context, handed.dispatch_id, handed.lease_token, why)
    assert await till.balance() == 25


async def test_cancel_is_refunded_once(till: Till) -> None:
    job = await till.submit()
    for _ in range(2):
        await submit.cancel_job(till.context, till.tenant_id, job.id)
    assert await till.balance() == 25


async def test_a_used_up_job_is_refunded(till: Till) -> None:
    await till.submit()
    handed = await till.lease()
    await till.context.queue.extend(handed.dispatch_id, handed.lease_token, started=True)
    await let_expire(till.context)
    await expire_due_leases(till.context, last_pass=till.clock())
    assert await till.balance() == 25


async def test_a_requeue_costs_nothing_more(till: Till) -> None:
    await till.submit()
    handed = await till.lease()
    await finish.requeue(till.context, handed.dispatch_id, handed.lease_token, RequeueReason.SPOT)
    await till.complete(await till.lease())
    assert await till.balance() == 15


async def test_too_few_tokens_write_nothing(till: Till) -> None:
    await till.submit()
    await till.submit()
    with pytest.raises(InsufficientTokens, match=r"^Insufficient token balance\.$") as refused:
        await till.submit()
    assert refused.value.details["required_tokens"] == 10
    assert refused.value.details["balance"] == 5
    assert await till.balance() == 5
    async with till.context.pools["main"].read() as tx:
        assert len(await ledger.transactions(tx, till.tenant_id, till.user_id, limit=9)) == 3


async def test_of_many_at_once_only_those_are_taken_that_can_be_paid(till: Till) -> None:
    submits = [till.submit() for _ in range(8)]
    made = await asyncio.gather(*submits, return_exceptions=True)
    assert sum(isinstance(each, Job) for each in made) == 2
    assert sum(isinstance(each, InsufficientTokens) for each in made) == 6
    assert await till.balance() == 5


async def test_the_same_request_is_paid_once_however_often_it_comes(till: Till) -> None:
    submits = [till.submit(idempotency_key="k", request_hash="h") for _ in range(8)]
    jobs = await asyncio.gather(*submits)
    assert len({job.id for job in jobs}) == 1
    assert await till.balance() == 15


async def test_a_user_has_so_many_active_jobs_and_no_more(till: Till) -> None:
    one = replace(till.context.settings, max_active_jobs_per_user=1)
    till.context = replace(till.context, settings=one)
    submits = [till.submit() for _ in range(4)]
    made = await asyncio.gather(*submits, return_exceptions=True)
    assert sum(isinstance(each, Job) for each in made) == 1
    assert sum(isinstance(each, TooManyActive) for each in made) == 3
    assert await till.balance() == 15


async def test_free_jobs_at_once_are_counted_one_by_one(till: Till) -> None:
    """Singly and two together, as batches come: whichever way, no two rest on the same count."""
    most = 9
    settings = replace(till.context.settings, max_active_jobs_per_user=most)
    till.context = replace(till.context, settings=settings)
    free = replace(till.priced(), price_tokens=0)
    jobs = [{uuid4(): free} for _ in range(2 * most)] + [{uuid4(): free, uuid4(): free}] * 4
    submits = [submit.submit_many(till.context, till.tenant_id, each) for each in jobs]
    made = await asyncio.gather(*submits, return_exceptions=True)
    added = [job for each in made if isinstance(each, list) for job in each]
    refused = [each for each in made if not isinstance(each, list)]
    assert all(isinstance(each, TooManyActive) for each in refused), refused
    assert most - 1 <= len({job.id for job in added}) <= most


async def test_a_submit_counts_again_after_it_has_waited_for_the_wallet(till: Till) -> None:
    till.context = replace(
        till.context, settings=replace(till.context.settings, max_active_jobs_per_user=1)
    )
    pool, free = till.context.pools["main"], replace(till.priced(), price_tokens=0)
    async with pool.transaction() as tx:
        await service.submit(tx, till.tenant_id, {uuid4(): free}, now=till.clock.now)
        late = asyncio.create_task(till.submit())
        if not pool.is_sqlite:
            await _until_one_waits(pool)
    with pytest.raises(TooManyActive):
        await late
    assert await till.balance() == 25


async def _until_one_waits(pool: Database) -> None:
    waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    for _ in range(1_000):
        async with pool.read() as tx:
            if await tx.scalar(waits):
                return
        await asyncio.sleep(0.005)
    raise AssertionError("nobody waits for a lock")


async def test_a_priced_job_needs_somebody_who_pays(till: Till) -> None:
    with pytest.raises(InvalidInput, match="user_id is required"):
        await submit.submit(till.context, till.tenant_id, asked(price_tokens=1))


async def test_what_happens_to_a_job_is_told_in_order(till: Till) -> None:
    job = await till.submit()
    await till.complete(await till.lease())
    async with till.context.pools["main"].read() as tx:
        told = await notifications.events_after(tx, till.tenant_id, job.id)
    statuses = [each.data["status"] for each in told if each.kind == "status"]
    assert statuses == ["queued", "processing", "completed"]


async def test_held_jobs_are_admitted_as_others_end(till: Till) -> None:
    """Each without a price: it is about the order."""
    from comfyfleet.server.jobs import batches
    from comfyfleet.server.jobs.model import JobBatch

    batch = JobBatch(uuid4(), till.tenant_id, till.user_id, uuid4(), 7, None, "h", till.clock())
    async with till.context.pools["main"].transaction() as tx:
        await batches.create_batch(tx, batch)
    jobs = {
        uuid4(): asked(
            user_id=till.user_id, batch_id=batch.id, batch_position=place, is_held=place >= 5
        )
        for place in range(7)
    }
    await submit.submit_many(till.context, till.tenant_id, jobs)
    handed = [await till.lease() for _ in range(5)]
    assert await lease_next(till.context, waiter(), wait_seconds=0) is None
    await admit_all(till.context)
    assert await lease_next(till.context, waiter(), wait_seconds=0) is None
    await till.complete(handed[0])
    assert (await till.lease()).job_id == list(jobs)[5]
    for each in handed[1:]:
        await till.complete(each)
    last = await till.lease()
    assert last.job_id == list(jobs)[6]
    assert (await till.complete(last)).status == JobStatus.COMPLETED


def metered(**changes: object) -> dict[str, object]:
    return {"gateway": {"prompt_id": "p", "number": 1, PRICE_PER_SECOND: 2.0}, **changes}


async def test_a_metered_job_without_a_record_of_its_run_pays_its_seconds(till: Till) -> None:
    await till.submit(**metered())
    handed = await till.lease()
    said = Complete(
        dispatch_id=handed.dispatch_id, lease_token=handed.lease_token, execution_seconds=1.5
    )
    for _ in range(2):
        done = await finish.complete(till.context, said)
    assert await till.balance() == 25 - 3
    await require_sound_ledger(till.context, till.tenant_id, [done])


async def test_a_metered_job_is_given_no_more_seconds_than_are_reserved(till: Till) -> None:
    await till.submit(**metered())
    assert (await till.lease()).run_limit_seconds == 5


async def test_a_metered_job_that_never_ran_is_refunded(till: Till) -> None:
    job = await till.submit(**metered())
    await submit.cancel_job(till.context, till.tenant_id, job.id)
    assert await till.balance() == 25


async def test_a_requeued_metered_job_does_not_pay_for_its_lost_attempt(till: Till) -> None:
    job = await till.submit(**metered())
    handed = await till.lease()
    till.clock.advance(seconds=3)
    await finish.requeue(till.context, handed.dispatch_id, handed.lease_token, RequeueReason.SPOT)
    cancelled = await submit.cancel_job(till.context, till.tenant_id, job.id)
    assert await till.balance() == 25
    await require_sound_ledger(till.context, till.tenant_id, [cancelled])


NODE_ERROR: dict[str, object] = {
    "code": "run_failed",
    "exception_type": "ValueError",
    "node_id": "3",
}
FAILURES: dict[str, tuple[dict[str, object], int]] = {
    "one of its nodes raised an error": (NODE_ERROR, 3),
    "the backend names no node": ({**NODE_ERROR, "node_id": None}, 0),
    "its backend refused it": ({"code": "prompt_refused", "node_id": "3"}, 0),
    "its result can't be delivered": ({"code": "limit_exceeded"}, 0),
    "an input file is gone": ({"code": "input_gone"}, 0),
    "its backend doesn't tell how it ended": ({"code": "unknown_outcome"}, 0),
}


async def fail_after(till: Till, error: dict[str, object], seconds: float) -> Job:
    """Reports the failure of the next job twice, as after a lost response."""
    handed = await till.lease()
    place = handed.dispatch_id, handed.lease_token
    message = Fail(
        dispatch_id=place[0], lease_token=place[1], error=error, execution_seconds=seconds
    )
    for _ in range(2):
        failed = await finish.fail(till.context, *place, Failure("no"), message=message)
    assert failed.status == JobStatus.FAILED
    await require_sound_ledger(till.context, till.tenant_id, [failed])
    return failed


@pytest.mark.parametrize("why", FAILURES)
async def test_a_metered_job_that_fails_by_its_own_nodes_pays_its_seconds(
    till: Till, why: str
) -> None:
    error, cost = FAILURES[why]
    await till.submit(**metered())
    await fail_after(till, error, seconds=1.5)
    assert await till.balance() == 25 - cost


async def test_a_failed_metered_job_pays_at_most_its_reservation(till: Till) -> None:
    await till.submit(**metered())
    await fail_after(till, NODE_ERROR, seconds=60)
    assert await till.balance() == 25 - 10


@pytest.mark.parametrize("gateway", [None, {"prompt_id": "p", "number": 1}])
async def test_a_job_with_a_fixed_price_is_refunded_when_its_own_nodes_fail(
    till: Till, gateway: dict[str, object] | None
) -> None:
    await till.submit(gateway=gateway)
    await fail_after(till, NODE_ERROR, seconds=1.5)
    assert await till.balance() == 25


async def test_a_contained_workflow_is_the_least_that_a_metered_job_costs(till: Till) -> None:
    gateway = {"prompt_id": "p", "number": 1, PRICE_PER_SECOND: 2.0, MIN_TOKENS: 8}
    await till.submit(gateway=gateway)
    handed = await till.lease()
    said = Complete(
        dispatch_id=handed.dispatch_id, lease_token=handed.lease_token, execution_seconds=1
    )
    await finish.complete(till.context, said)
    assert await till.balance() == 25 - 8
