"""A job's way through both databases, one rule at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.context import (
    ManualClock,
    asked,
    give_tokens,
    job_context_on,
    let_expire,
    waiter,
)

from comfyfleet.api.values import DeliveredOutput
from comfyfleet.api.worker import Complete, Heartbeat
from comfyfleet.api.worker import Job as Handed
from comfyfleet.errors import Conflict, InvalidInput, LeaseLost, NotFound, QueueFull
from comfyfleet.server.jobs import finish, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.heartbeat import heartbeat
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import Failure, Job, JobStatus
from comfyfleet.server.jobs.reconcile import expire_due_leases
from comfyfleet.server.jobs.service import event_data
from comfyfleet.server.jobs.submit import retry_job
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch, DispatchStatus, RequeueReason
from comfyfleet.server.queue.switch_costs import ModelChange, RunKind, TimedRun


class Place:
    """A tenant, both sides, and short words for what is done here."""

    def __init__(self, context: JobContext, tenant_id: UUID, clock: ManualClock) -> None:
        self.context, self.tenant_id, self.clock = context, tenant_id, clock

    async def submit(self, **changes: object) -> Job:
        job, _ = await submit.submit(self.context, self.tenant_id, asked(**changes))  # type: ignore[arg-type]
        return job

    async def lease(self, worker_id: str = "w1") -> Handed:
        handed = await lease_next(self.context, waiter(worker_id), wait_seconds=0)
        assert handed
        return handed

    async def nothing_to_lease(self) -> bool:
        return await lease_next(self.context, waiter(), wait_seconds=0) is None

    async def beat(self, handed: Handed, *, started: bool = True) -> bool:
        said = Heartbeat(
            dispatch_id=handed.dispatch_id, lease_token=handed.lease_token, started=started
        )
        return (await heartbeat(self.context, said)).cancelled

    async def complete(self, handed: Handed, *outputs: DeliveredOutput) -> Job:
        said = Complete(
            dispatch_id=handed.dispatch_id, lease_token=handed.lease_token, outputs=outputs
        )
        return await finish.complete(self.context, said)

    async def fail(self, handed: Handed) -> Job:
        why = Failure("no", "raw")
        return await finish.fail(self.context, handed.dispatch_id, handed.lease_token, why)

    async def requeue(self, handed: Handed, reason: RequeueReason) -> None:
        await finish.requeue(self.context, handed.dispatch_id, handed.lease_token, reason)

    async def expire(self) -> int:
        await let_expire(self.context)
        return await expire_due_leases(self.context, last_pass=self.clock())

    async def job(self, job_id: UUID) -> Job:
        return await submit.get_job(self.context, self.tenant_id, job_id)

    async def row(self, job_id: UUID) -> Dispatch:
        async with self.context.central.read() as tx:
            row = await dispatch.of_job(tx, self.tenant_id, job_id)
        assert row
        return row


@pytest.fixture
async def place(databases: Databases, tmp_path: Path) -> AsyncIterator[Place]:
    clock = ManualClock()
    async with job_context_on(databases, tmp_path, clock, max_queued_per_tenant=10) as (
        context,
        tenant_id,
    ):
        yield Place(context, tenant_id, clock)


async def test_a_job_is_submitted_leased_and_completed(place: Place) -> None:
    job = await place.submit()
    assert (await place.row(job.id)).status == DispatchStatus.QUEUED
    handed = await place.lease()
    assert handed.job_id == job.id
    assert (await place.job(job.id)).status == JobStatus.PROCESSING
    assert (await place.complete(handed)).status == JobStatus.COMPLETED
    row = await place.row(job.id)
    assert (row.status, row.attempts) == (DispatchStatus.COMPLETED, 1)
    assert await place.nothing_to_lease()


async def test_its_user_is_told_of_each_of_its_steps(place: Place) -> None:
    user_id = await give_tokens(place.context, place.tenant_id, 10)
    job = await place.submit(user_id=user_id, price_tokens=3, effect_id=uuid4())
    handed = await place.lease()
    started = event_data(await place.job(job.id))
    ended = event_data(await place.complete(handed))
    async with place.context.pools["main"].read() as tx:
        found = await notifications.events_after(tx, place.tenant_id, job.id)
    assert [(each.kind, each.data) for each in found] == [
        ("status", event_data(job)),
        ("status", started),
        ("outputs", {"outputs": []}),
        ("status", ended),
    ]
    assert found[1].created_at == place.clock()
    assert started["status"] == "processing"


async def test_the_same_word_is_heard_again_and_another_is_not(place: Place) -> None:
    await place.submit()
    handed = await place.lease()
    await place.complete(handed)
    assert (await place.complete(handed)).status == JobStatus.COMPLETED
    with pytest.raises(LeaseLost):
        await place.fail(handed)
    with pytest.raises(LeaseLost):
        await place.requeue(handed, RequeueReason.SPOT)


async def test_a_stranger_with_another_token_changes_nothing(place: Place) -> None:
    job = await place.submit()
    handed = await place.lease()
    stranger = handed.model_copy(update={"lease_token": uuid4()})
    for word in (place.complete, place.fail, place.beat):
        with pytest.raises(LeaseLost):
            await word(stranger)
    assert (await place.job(job.id)).status == JobStatus.PROCESSING


async def test_a_worker_that_lost_its_lease_can_neither_deliver_nor_fail(place: Place) -> None:
    job = await place.submit()
    lost = await place.lease()
    await place.beat(lost)
    assert await place.expire() == 1
    with pytest.raises(LeaseLost):
        await place.complete(lost)
    again = await place.lease("w2")
    with pytest.raises(LeaseLost):
        await place.complete(lost)
    assert (await place.complete(again)).status == JobStatus.COMPLETED
    assert (await place.row(job.id)).attempts == 2


async def test_an_expiry_before_the_start_costs_no_attempt(place: Place) -> None:
    job = await place.submit()
    await place.lease()
    await place.expire()
    assert (await place.row(job.id)).attempts == 0
    assert (await place.job(job.id)).status == JobStatus.QUEUED


async def test_the_third_expiry_after_a_start_fails_the_job(place: Place) -> None:
    job = await place.submit()
    for _ in range(3):
        await place.beat(await place.lease())
        await place.expire()
    ended = await place.job(job.id)
    assert ended.status == JobStatus.FAILED
    assert ended.error_message == "Processing failed 3 times."
    assert (await place.row(job.id)).status == DispatchStatus.FAILED


async def test_after_an_outage_nobody_is_late(place: Place) -> None:
    await place.submit()
    handed = await place.lease()
    await let_expire(place.context)
    before = place.clock()
    place.clock.advance(seconds=61)
    assert await expire_due_leases(place.context, last_pass=before) == 0
    await place.beat(handed)


async def test_fail_ends_the_job_whatever_attempts_remain(place: Place) -> None:
    job = await place.submit()
    failed = await place.fail(await place.lease())
    assert (failed.status, failed.error_message) == (JobStatus.FAILED, "no")
    assert (await place.row(job.id)).last_error == "no"
    assert await place.nothing_to_lease()


@pytest.mark.parametrize(("reason", "attempts"), [("spot", 0), ("backend_down", 1)])
async def test_an_interruption_gives_the_attempt_back_and_a_broken_backend_does_not(
    place: Place, reason: str, attempts: int
) -> None:
    job = await place.submit()
    await place.requeue(await place.lease(), RequeueReason(reason))
    row = await place.row(job.id)
    assert (row.status, row.attempts) == (DispatchStatus.QUEUED, attempts)
    assert row.last_error == f"Requeued: {reason}"
    assert (await place.job(job.id)).status == JobStatus.QUEUED


async def test_the_twenty_first_return_sets_a_job_aside(place: Place) -> None:
    job = await place.submit()
    for _ in range(21):
        await place.requeue(await place.lease(), RequeueReason.SPOT)
    row = await place.row(job.id)
    assert (row.status, row.is_poisoned) == (DispatchStatus.FAILED, True)
    assert (await place.job(job.id)).error_message == "Processing was interrupted 21 times."


async def test_a_queued_job_is_cancelled_at_once(place: Place) -> None:
    job = await place.submit()
    await submit.cancel_job(place.context, place.tenant_id, job.id)
    assert (await place.row(job.id)).status == DispatchStatus.CANCELLED
    assert await place.nothing_to_lease()


async def test_a_running_job_is_told_with_the_next_heartbeat(place: Place) -> None:
    job = await place.submit()
    handed = await place.lease()
    await submit.cancel_job(place.context, place.tenant_id, job.id)
    assert (await place.row(job.id)).status == DispatchStatus.LEASED
    assert await place.beat(handed)
    assert (await place.row(job.id)).status == DispatchStatus.CANCELLED
    assert await place.beat(handed), "the answer may have been lost"
    with pytest.raises(LeaseLost):
        await place.complete(handed)


async def test_a_cancelled_job_whose_worker_has_finished_holds_no_lease(place: Place) -> None:
    done, broken = await place.submit(), await place.submit()
    leases = [await place.lease(), await place.lease()]
    for job in (done, broken):
        await submit.cancel_job(place.context, place.tenant_id, job.id)
    with pytest.raises(LeaseLost):
        await place.complete(leases[0])
    with pytest.raises(LeaseLost):
        await place.fail(leases[1])
    for job in (done, broken):
        assert (await place.row(job.id)).status == DispatchStatus.CANCELLED, (
            "no heartbeat will follow"
        )


async def test_a_job_cancelled_between_lease_and_start_is_not_handed_out(place: Place) -> None:
    job = await place.submit()
    await place.context.queue.lease(waiter(), wait_seconds=0)
    await submit.cancel_job(place.context, place.tenant_id, job.id)
    await place.expire()
    assert (await place.row(job.id)).status == DispatchStatus.CANCELLED


async def test_another_tenants_job_is_not_there(place: Place) -> None:
    job = await place.submit()
    with pytest.raises(NotFound):
        await submit.get_job(place.context, uuid4(), job.id)


async def test_the_same_idempotency_key_gives_the_same_job(place: Place) -> None:
    first = await place.submit(idempotency_key="k", request_hash="a")
    again = await place.submit(idempotency_key="k", request_hash="a")
    assert again.id == first.id
    with pytest.raises(Conflict, match="idempotency_key"):
        await place.submit(idempotency_key="k", request_hash="b")


async def test_a_full_queue_refuses_and_writes_nothing(place: Place) -> None:
    jobs = [await place.submit() for _ in range(10)]
    with pytest.raises(QueueFull) as full:
        await place.submit()
    assert full.value.details["retry_after_seconds"] > 0
    await submit.cancel_job(place.context, place.tenant_id, jobs[0].id)
    await place.submit()


async def test_a_retry_is_a_new_job_and_the_old_one_stays(place: Place) -> None:
    job = await place.submit()
    with pytest.raises(Conflict):
        await retry_job(place.context, place.tenant_id, job.id)
    await place.fail(await place.lease())
    again = await retry_job(place.context, place.tenant_id, job.id)
    assert again.spec.retry_of == job.id
    assert (await retry_job(place.context, place.tenant_id, job.id)).id == again.id
    assert (await place.job(job.id)).status == JobStatus.FAILED
    assert (await place.lease()).job_id == again.id


async def test_a_retry_belongs_to_no_batch_and_no_run(place: Place) -> None:
    job = await place.submit(batch_id=uuid4(), batch_position=0, run_kind="graph", run_id=uuid4())
    await place.fail(await place.lease())
    asked_again = (await retry_job(place.context, place.tenant_id, job.id)).spec
    assert (asked_again.batch_id, asked_again.batch_position) == (None, None)
    assert (asked_again.run_kind, asked_again.run_id) == (None, None)


async def test_outputs_must_lie_where_their_urls_led(place: Place) -> None:
    await place.submit()
    handed = await place.lease()
    said = DeliveredOutput(name="output", size=3, content_type="image/png")
    with pytest.raises(InvalidInput, match="was not uploaded"):
        await place.complete(handed, said)
    assert (await place.complete(handed)).status == JobStatus.COMPLETED


async def test_priorities_are_clamped_to_the_tenants_range(place: Place) -> None:
    job = await place.submit(priority=500)
    assert (await place.row(job.id)).priority == 10


async def test_who_hangs_up_while_a_job_is_handed_out_leaves_it_to_the_next(place: Place) -> None:
    """At any moment: neither is it kept from others, nor put off as if a database were away."""
    job = await place.submit()
    for turns in range(0, 40, 2):
        asking = asyncio.create_task(lease_next(place.context, waiter("w1"), wait_seconds=5))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        if asking.done():
            break
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert not await asking, "cancelled, and yet a job"
    else:
        asking = asyncio.create_task(lease_next(place.context, waiter("w2"), wait_seconds=5))
    handed = await asking
    assert handed
    assert handed.job_id == job.id


async def test_what_a_run_tells_of_its_model_is_noted_once(place: Place) -> None:
    await place.submit(model_key="sdxl")
    handed = await place.lease()
    said = Complete(
        dispatch_id=handed.dispatch_id,
        lease_token=handed.lease_token,
        execution_seconds=1.5,
        model_change="switched",
    )
    for _ in range(2):
        await finish.complete(place.context, said, fleet_id=7)
    workflow_id = (await place.row(handed.job_id)).lane.workflow_id
    run = TimedRun(RunKind(7, "sdxl", workflow_id), ModelChange.SWITCHED, 1.5)
    assert place.context.queue.switch_costs.noted == [run]
