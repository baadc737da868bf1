"""Any order of words and sweeps, cut off anywhere between the two databases."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
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

from comfyfleet.api.worker import Complete, Fail, Heartbeat
from comfyfleet.api.worker import Job as Handed
from comfyfleet.errors import LeaseLost
from comfyfleet.server.jobs import finish, submit
from comfyfleet.server.jobs.heartbeat import heartbeat
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import PRICE_PER_SECOND, Failure, Job, JobStatus
from comfyfleet.server.jobs.outbox import flush_due
from comfyfleet.server.jobs.reconcile import expire_due_leases, reconcile
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import ENDED, Dispatch, RequeueReason

Answer = TypeVar("Answer")
CUTS = st.sampled_from([None, None, None, *range(10)])
WORKER_REASONS = st.sampled_from(["spot", "drain", "recall", "backend_down", "out_of_memory"])


class JobMachine(RuleBasedStateMachine):
    """`databases` is set by the test that runs it."""

    databases: Databases
    jobs: Bundle[UUID] = Bundle("jobs")
    leases: Bundle[Handed] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.clock, self.fuse = ManualClock(), Fuse()
        self.folder = TemporaryDirectory()
        opened = job_context_on(self.databases, Path(self.folder.name), self.clock, max_requeues=4)
        self.whole, self.tenant_id = self.do(self.stack.enter_async_context(opened))
        self.user_id = self.do(give_tokens(self.whole, self.tenant_id, 10_000))
        self.context = fused(self.whole, self.fuse)
        self.known: list[UUID] = []
        self.ended: dict[UUID, JobStatus] = {}
        self.accepted: dict[UUID, set[UUID]] = {}

    def teardown(self) -> None:
        try:
            self.do(self.everything_is_in_line())
        finally:
            self.do(self.stack.aclose())
            self.loop.close()
            self.folder.cleanup()

    def do(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return self.loop.run_until_complete(work)

    def cut(self, after: int | None, work: Coroutine[Any, Any, Answer]) -> Answer | None:
        """Runs until the fuse burns; a lost lease is an answer like any other."""
        self.fuse.left = after
        try:
            return self.do(work)
        except (ProcessDied, LeaseLost):
            return None
        finally:
            self.fuse.left = None

    @initialize(target=leases)
    def begin(self) -> Any:
        """Some jobs wait and some run, or most of a short life would be spent on getting there."""
        for number in range(4):
            self.submit(None, 1 + number % 2, 0)
        handed = [self.lease(None, worker) for worker in ("w1", "w2")]
        self.extend(handed[0], True, None)
        return multiple(*handed)

    @rule(
        target=jobs,
        cut=CUTS,
        workflow_id=st.sampled_from([1, 2]),
        priority=st.integers(0, 2),
        is_metered=st.booleans(),
    )
    def submit(
        self, cut: int | None, workflow_id: int, priority: int, is_metered: bool = False
    ) -> UUID:
        job_id = self.whole.new_id()
        self.known.append(job_id)
        priced = asked(workflow_id, priority=priority, user_id=self.user_id, price_tokens=3)
        if is_metered:
            prompt = {"prompt_id": str(job_id), "number": 1, PRICE_PER_SECOND: 1.0}
            priced = replace(priced, gateway=prompt)
        wanted = {job_id: priced}
        self.cut(cut, submit.submit_many(self.context, self.tenant_id, wanted))
        return job_id

    @rule(target=leases, cut=CUTS, worker=st.sampled_from(["w1", "w2"]))
    def lease(self, cut: int | None, worker: str) -> Any:
        handed = self.cut(cut, lease_next(self.context, waiter(worker), wait_seconds=0))
        return handed or multiple()

    @rule(lease=leases, started=st.booleans(), cut=CUTS)
    def extend(self, lease: Handed, started: bool, cut: int | None) -> None:
        said = Heartbeat(
            dispatch_id=lease.dispatch_id, lease_token=lease.lease_token, started=started
        )
        self.cut(cut, heartbeat(self.context, said))

    @rule(lease=leases, cut=CUTS)
    def complete(self, lease: Handed, cut: int | None) -> None:
        before = self.status(lease.job_id)
        said = Complete(dispatch_id=lease.dispatch_id, lease_token=lease.lease_token)
        self.cut(cut, finish.complete(self.context, said))
        if before != JobStatus.COMPLETED and self.status(lease.job_id) == JobStatus.COMPLETED:
            self.accepted.setdefault(lease.job_id, set()).add(lease.lease_token)

    @rule(
        lease=leases,
        after=st.integers(0, 6),
        word=st.sampled_from(["complete", "fail", "requeue"]),
        ends=st.booleans(),
    )
    def word_while_the_lease_is_lost(
        self, lease: Handed, after: int, word: str, ends: bool
    ) -> None:
        """At some step of its word the lease expires, and another worker has the job."""
        theirs: list[Handed] = []

        async def meanwhile() -> None:
            await let_expire(self.whole, lease.dispatch_id)
            await expire_due_leases(self.whole, last_pass=self.clock())
            handed = await lease_next(self.whole, waiter("w3"), wait_seconds=0)
            if handed and handed.job_id == lease.job_id:
                theirs.append(handed)

        self.fuse.meanwhile = meanwhile
        why = Failure("no")
        said = Complete(dispatch_id=lease.dispatch_id, lease_token=lease.lease_token)
        place = (lease.dispatch_id, lease.lease_token)
        match word:
            case "complete":
                self.cut(after, finish.complete(self.context, said))
            case "fail":
                self.cut(after, finish.fail(self.context, *place, why))
            case _:
                self.cut(after, finish.requeue(self.context, *place, RequeueReason.SPOT))
        self.fuse.meanwhile = None
        if theirs:
            assert self.status(lease.job_id) == JobStatus.PROCESSING, "who holds it decides"
            if ends:
                self.complete(theirs[0], None)
                assert self.status(lease.job_id) == JobStatus.COMPLETED

    @rule(lease=leases, cut=CUTS)
    def fail(self, lease: Handed, cut: int | None) -> None:
        why = Failure("no")
        self.cut(cut, finish.fail(self.context, lease.dispatch_id, lease.lease_token, why))

    @rule(lease=leases, seconds=st.sampled_from([0.0, 1.5, 9.0]), at_limit=st.booleans(), cut=CUTS)
    def stop(self, lease: Handed, seconds: float, at_limit: bool, cut: int | None) -> None:
        """The worker stops a run at its limit, or because its owner has interrupted it."""
        job = self.do(self.job(lease.job_id))
        if not at_limit and job and job.spec.gateway:  # other jobs are cancelled instead
            self.do(submit.interrupt_job(self.whole, self.tenant_id, lease.job_id))
        said = Fail(
            dispatch_id=lease.dispatch_id,
            lease_token=lease.lease_token,
            error={"code": "run_limit"},
            interrupted=True,
            execution_seconds=seconds,
        )
        place = (lease.dispatch_id, lease.lease_token)
        self.cut(cut, finish.fail(self.context, *place, Failure("no"), message=said))

    @rule(lease=leases, reason=WORKER_REASONS, cut=CUTS)
    def requeue(self, lease: Handed, reason: str, cut: int | None) -> None:
        word = finish.requeue(
            self.context, lease.dispatch_id, lease.lease_token, RequeueReason(reason)
        )
        self.cut(cut, word)

    @rule(job_id=consumes(jobs), cut=CUTS)
    def cancel(self, job_id: UUID, cut: int | None) -> None:
        if self.status(job_id):
            self.cut(cut, submit.cancel_job(self.context, self.tenant_id, job_id))

    @rule(lease=leases, cut=CUTS)
    def expire(self, lease: Handed, cut: int | None) -> None:
        self.do(let_expire(self.whole, lease.dispatch_id))
        self.cut(cut, expire_due_leases(self.context, last_pass=self.clock()))

    @rule(cut=CUTS)
    def outbox(self, cut: int | None) -> None:
        self.cut(cut, flush_due(self.context, self.context.pools["main"], limit=100))

    @rule(cut=CUTS)
    def reconcile(self, cut: int | None) -> None:
        self.clock.advance(minutes=1)
        self.cut(cut, reconcile(self.context))

    def status(self, job_id: UUID) -> JobStatus | None:
        job = self.do(self.job(job_id))
        return job.status if job else None

    async def job(self, job_id: UUID) -> Job | None:
        from comfyfleet.server.jobs import store

        async with self.whole.pools["main"].read() as tx:
            return await store.get(tx, self.tenant_id, job_id)

    async def row(self, job_id: UUID) -> Dispatch | None:
        async with self.whole.central.read() as tx:
            return await dispatch.of_job(tx, self.tenant_id, job_id)

    @invariant()
    def what_has_ended_stays_ended(self) -> None:
        for job_id in self.known:
            status = self.status(job_id)
            assert self.ended.get(job_id, status) == status
            if status and not status.is_active:
                self.ended[job_id] = status

    @invariant()
    def attempts_stay_within_their_maximum(self) -> None:
        for job_id in self.known:
            row = self.do(self.row(job_id))
            assert row is None or 0 <= row.attempts <= row.max_attempts

    @invariant()
    def one_result_is_accepted(self) -> None:
        assert all(len(tokens) == 1 for tokens in self.accepted.values())

    async def everything_is_in_line(self) -> None:
        """After the sweeps have passed, both sides tell the same, and no job is forgotten."""
        self.clock.advance(hours=1)
        for _ in range(6):
            await let_expire(self.whole)
            await expire_due_leases(self.whole, last_pass=self.clock())
            await flush_due(self.whole, self.whole.pools["main"], limit=1000)
            await reconcile(self.whole)
        for job_id in self.known:
            job, row = await self.job(job_id), await self.row(job_id)
            if job is None:
                assert row is None, "a dispatch without a job"
                continue
            assert row is not None, "a job that is never run"
            assert (row.status in ENDED) == (not job.status.is_active)
            assert job.status.is_active or row.status.value == job.status.value
            await require_sound_ledger(self.whole, self.tenant_id, [job])


@pytest.fixture
def machine(databases: Databases) -> type[JobMachine]:
    return type("Machine", (JobMachine,), {"databases": databases})


def _examples(databases: Databases, sqlite: int, postgres: int) -> settings:
    return settings(
        max_examples=postgres if databases.server_url else sqlite,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_no_cut_loses_a_job_or_runs_one_twice(
    machine: type[JobMachine], databases: Databases
) -> None:
    run_state_machine_as_test(machine, settings=_examples(databases, 12, 4))


@pytest.mark.slow
def test_no_cut_loses_a_job_however_long_one_looks(
    machine: type[JobMachine], databases: Databases
) -> None:
    run_state_machine_as_test(machine, settings=_examples(databases, 300, 100))
