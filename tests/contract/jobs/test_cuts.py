"""Each word cut off after each of its steps, and each raced by another worker at each of them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
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
from tests.support.jobs.fuse import Fuse, ProcessDied, fused

from comfyfleet.api.worker import Complete, Fail
from comfyfleet.api.worker import Job as Handed
from comfyfleet.errors import LeaseLost
from comfyfleet.server.jobs import finish
from comfyfleet.server.jobs import submit as job_submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import PRICE_PER_SECOND, Failure, JobSpec, JobStatus
from comfyfleet.server.jobs.outbox import flush_due
from comfyfleet.server.jobs.reconcile import expire_due_leases, reconcile
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import ENDED, RequeueReason
from comfyfleet.server.tenants import wallet as ledger

STEPS_MAX = 60
RACES = 16


@dataclass
class Scene:
    whole: JobContext
    cut: JobContext
    fuse: Fuse
    clock: ManualClock
    tenant_id: UUID
    user_id: UUID

    def paid(self) -> dict[UUID, JobSpec]:
        return {self.whole.new_id(): asked(user_id=self.user_id, price_tokens=7)}

    async def sweep(self) -> None:
        """What comes after a restart."""
        self.clock.advance(hours=1)
        for _ in range(3):
            await let_expire(self.whole)
            await expire_due_leases(self.whole, last_pass=self.clock())
            await flush_due(self.whole, self.whole.pools["main"], limit=100)
            await reconcile(self.whole)

    async def require_in_line(self, job_id: UUID) -> JobStatus:
        job = await job_submit.get_job(self.whole, self.tenant_id, job_id)
        async with self.whole.central.read() as tx:
            row = await dispatch.of_job(tx, self.tenant_id, job_id)
        assert row
        assert (row.status in ENDED) == (not job.status.is_active)
        assert job.status.is_active or row.status.value == job.status.value
        await require_sound_ledger(self.whole, self.tenant_id, [job])
        return job.status

    async def run_to_the_end(self, job_id: UUID) -> None:
        """If it waits, a worker gets it once and only once."""
        handed = await lease_next(self.whole, waiter("later"), wait_seconds=0)
        assert handed
        assert handed.job_id == job_id
        await finish.complete(self.whole, _done(handed))
        assert await lease_next(self.whole, waiter("later"), wait_seconds=0) is None


@pytest.fixture
async def scene(databases: Databases, tmp_path: Path) -> AsyncIterator[Scene]:
    clock, fuse = ManualClock(), Fuse()
    async with job_context_on(databases, tmp_path, clock) as (context, tenant_id):
        user_id = await give_tokens(context, tenant_id, 1000)
        cut = fused(context, fuse)
        yield Scene(context, cut, fuse, clock, tenant_id, user_id)
        await cut.deferred.flush()


def _done(handed: Handed) -> Complete:
    return Complete(dispatch_id=handed.dispatch_id, lease_token=handed.lease_token)


# What a worker reports when a node of the prompt has raised an error.
NODE_ERROR = {"code": "run_failed", "exception_type": "ValueError", "node_id": "3"}

Word = Callable[[Scene, Handed], Awaitable[object]]
WORDS: dict[str, Word] = {
    "complete": lambda scene, lease: finish.complete(scene.cut, _done(lease)),
    "fail": lambda scene, lease: finish.fail(
        scene.cut, lease.dispatch_id, lease.lease_token, Failure("no")
    ),
    "requeue": lambda scene, lease: finish.requeue(
        scene.cut, lease.dispatch_id, lease.lease_token, RequeueReason.SPOT
    ),
    "cancel": lambda scene, lease: job_submit.cancel_job(scene.cut, scene.tenant_id, lease.job_id),
}


async def _cut_off(fuse: Fuse, after: int, work: Awaitable[object]) -> bool:
    """Whether the fuse burnt; false: the word has fewer steps."""
    fuse.left = after
    try:
        await work
    except ProcessDied:
        return True
    finally:
        fuse.left = None
    return False


async def test_a_submit_can_be_cut_anywhere(scene: Scene) -> None:
    for after in range(STEPS_MAX):
        (job_id,) = wanted = scene.paid()
        submit = job_submit.submit_many(scene.cut, scene.tenant_id, wanted)
        was_cut = await _cut_off(scene.fuse, after, submit)
        await scene.sweep()
        async with scene.whole.central.read() as tx:
            row = await dispatch.of_job(tx, scene.tenant_id, job_id)
        if row:
            await scene.require_in_line(job_id)
            await scene.run_to_the_end(job_id)
        if not was_cut:
            assert row
            assert after > 6, "its statements were not among the steps"
            return
    pytest.fail("it never came to its end")


async def test_a_lease_can_be_cut_anywhere(scene: Scene) -> None:
    for after in range(STEPS_MAX):
        (job,) = await job_submit.submit_many(scene.whole, scene.tenant_id, scene.paid())
        work = lease_next(scene.cut, waiter(), wait_seconds=0)
        was_cut = await _cut_off(scene.fuse, after, work)
        await scene.sweep()
        assert await scene.require_in_line(job.id) == JobStatus.QUEUED
        await scene.run_to_the_end(job.id)
        if not was_cut:
            return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize("word", WORDS)
async def test_a_word_can_be_cut_anywhere(scene: Scene, word: str) -> None:
    for after in range(STEPS_MAX):
        await job_submit.submit_many(scene.whole, scene.tenant_id, scene.paid())
        lease = await lease_next(scene.whole, waiter(), wait_seconds=0)
        assert lease
        was_cut = await _cut_off(scene.fuse, after, WORDS[word](scene, lease))
        await scene.sweep()
        if (await scene.require_in_line(lease.job_id)).is_active:
            await scene.run_to_the_end(lease.job_id)
        if not was_cut:
            return
    pytest.fail("it never came to its end")


async def test_a_metered_end_can_be_cut_anywhere_and_is_paid_once(scene: Scene) -> None:
    """2 s at 3 tokens, of 10 that were reserved: whatever is cut, 6 tokens are paid for each prompt."""
    gateway = {"prompt_id": "mine", "number": 1, PRICE_PER_SECOND: 3.0}
    spec = asked(user_id=scene.user_id, price_tokens=10, gateway=gateway)
    for after in range(STEPS_MAX):
        await job_submit.submit_many(scene.whole, scene.tenant_id, {scene.whole.new_id(): spec})
        lease = await lease_next(scene.whole, waiter(), wait_seconds=0)
        assert lease
        was_cut = await _cut_off(scene.fuse, after, finish.complete(scene.cut, _ran(lease)))
        await scene.sweep()
        if (await scene.require_in_line(lease.job_id)).is_active:
            later = await lease_next(scene.whole, waiter("later"), wait_seconds=0)
            assert later
            await finish.complete(scene.whole, _ran(later))
        await scene.require_in_line(lease.job_id)
        async with scene.whole.pools["main"].read() as tx:
            left = await ledger.balance(tx, scene.tenant_id, scene.user_id)
        assert left == 1000 - 6 * (after + 1)
        if not was_cut:
            assert after > 6, "its statements were not among the steps"
            return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize("way", ["interrupt", "limit", "node_error", "cancel"])
async def test_a_stopped_metered_run_can_be_cut_anywhere_and_pays_its_seconds_once(
    scene: Scene, way: str
) -> None:
    """1.9 s at 3 tokens a second cost 6 of the 10 tokens that were reserved."""
    gateway = {"prompt_id": "mine", "number": 1, PRICE_PER_SECOND: 3.0}
    spec = asked(user_id=scene.user_id, price_tokens=10, gateway=gateway)
    for after in range(STEPS_MAX):
        await job_submit.submit_many(scene.whole, scene.tenant_id, {scene.whole.new_id(): spec})
        lease = await lease_next(scene.whole, waiter(), wait_seconds=0)
        assert lease
        scene.clock.advance(seconds=1.9)
        if way == "interrupt":
            await job_submit.interrupt_job(scene.whole, scene.tenant_id, lease.job_id)
        was_cut = await _cut_off(scene.fuse, after, _stop(scene.cut, scene, lease, way))
        if (await job_submit.get_job(scene.whole, scene.tenant_id, lease.job_id)).status.is_active:
            await _stop(scene.whole, scene, lease, way)  # sent again
        await scene.sweep()
        assert not (await scene.require_in_line(lease.job_id)).is_active
        async with scene.whole.pools["main"].read() as tx:
            left = await ledger.balance(tx, scene.tenant_id, scene.user_id)
        assert left == 1000 - 6 * (after + 1)
        if not was_cut:
            assert after > 3, "its statements were not among the steps"
            return
    pytest.fail("it never came to its end")


async def _stop(context: JobContext, scene: Scene, lease: Handed, way: str) -> None:
    if way == "cancel":
        await job_submit.cancel_job(context, scene.tenant_id, lease.job_id)
        return
    message = Fail(
        dispatch_id=lease.dispatch_id,
        lease_token=lease.lease_token,
        error=NODE_ERROR if way == "node_error" else {"code": "run_limit"},
        interrupted=way == "interrupt",
        execution_seconds=1.9,
    )
    place = lease.dispatch_id, lease.lease_token
    await finish.fail(context, *place, Failure("stopped"), message=message)


def _ran(handed: Handed) -> Complete:
    return _done(handed).model_copy(update={"execution_seconds": 1.9, "history": {}})


@pytest.mark.parametrize("word", ["complete", "fail", "requeue"])
async def test_who_holds_the_lease_decides_at_every_step_of_a_late_word(
    scene: Scene, word: str
) -> None:
    raced = 0
    for after in range(RACES):
        await job_submit.submit_many(scene.whole, scene.tenant_id, scene.paid())
        lease = await lease_next(scene.whole, waiter(), wait_seconds=0)
        assert lease
        theirs: list[Handed] = []

        async def lose_it(lease: Handed = lease, theirs: list[Handed] = theirs) -> None:
            await let_expire(scene.whole, lease.dispatch_id)
            await expire_due_leases(scene.whole, last_pass=scene.clock())
            handed = await lease_next(scene.whole, waiter("w2"), wait_seconds=0)
            theirs += [handed] if handed else []

        scene.fuse.left, scene.fuse.meanwhile = after, lose_it
        try:
            await WORDS[word](scene, lease)
        except LeaseLost:
            pass
        finally:
            scene.fuse.left, scene.fuse.meanwhile = None, None
        for handed in theirs:
            raced += 1
            job = await job_submit.get_job(scene.whole, scene.tenant_id, lease.job_id)
            assert job.status == JobStatus.PROCESSING
            assert job.lease_token == handed.lease_token
            await finish.complete(scene.whole, _done(handed))
        await scene.sweep()
        if (await scene.require_in_line(lease.job_id)).is_active:
            await scene.run_to_the_end(lease.job_id)
    assert raced >= 2, "the race was not run"
