"""An outage of the control plane that is shorter than a lease costs no job its lease."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from uuid import UUID

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock, asked, job_context_on, let_expire, waiter
from tests.support.jobs.fleets import a_fleet, a_worker

from comfyfleet.api.worker import Complete, Job
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.jobs import finish, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.reconcile import expire_due_leases
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch, DispatchStatus

SETTINGS = {"heartbeat_seconds": 5, "lease_seconds": 60, "sweep_seconds": 3.0}
LOST_AFTER, OUTAGE = 15, 30


class Outage:
    """A worker with a job, and the sweep that expires leases."""

    def __init__(self, context: JobContext, clock: ManualClock, job: Job) -> None:
        self.context, self.clock, self.job = context, clock, job
        self.last_pass: datetime = clock()

    async def sweep(self, *, after_seconds: float) -> int:
        self.clock.advance(seconds=after_seconds)
        expired = await expire_due_leases(self.context, last_pass=self.last_pass)
        self.last_pass = self.clock()
        return expired

    async def row(self) -> Dispatch:
        async with self.context.central.read() as tx:
            return await dispatch.get(tx, self.job.dispatch_id)


@pytest.fixture
async def outage(databases: Databases, tmp_path: Path) -> AsyncIterator[Outage]:
    clock = ManualClock()
    async with job_context_on(databases, tmp_path, clock, **SETTINGS) as (context, tenant_id):
        yield Outage(context, clock, await leased(context, tenant_id, clock()))


async def leased(context: JobContext, tenant_id: UUID, now: datetime) -> Job:
    async with context.central.transaction() as tx:
        fleet = await a_fleet(tx)
        await fleets.assign(tx, fleet, [1], now=now)
        worker = await a_worker(tx, fleet, "gpu-1", now=now)
    await submit.submit(context, tenant_id, asked())
    of_worker = replace(waiter("gpu-1"), key_hash=worker.key_hash)
    handed = await lease_next(context, of_worker, wait_seconds=0)
    assert handed
    return handed


async def test_a_worker_has_two_heartbeats_after_an_outage(outage: Outage) -> None:
    assert await outage.sweep(after_seconds=OUTAGE) == 0
    assert await outage.sweep(after_seconds=3) == 0
    assert await outage.sweep(after_seconds=3) == 0
    report = Complete(dispatch_id=outage.job.dispatch_id, lease_token=outage.job.lease_token)
    await finish.complete(outage.context, report)
    row = await outage.row()
    assert (row.status, row.attempts, row.requeues) == (DispatchStatus.COMPLETED, 1, 0)


async def test_a_worker_that_stays_silent_after_an_outage_is_lost(outage: Outage) -> None:
    assert await outage.sweep(after_seconds=OUTAGE) == 0
    assert sum([await outage.sweep(after_seconds=3) for _ in range(4)]) == 1
    assert (await outage.row()).status == DispatchStatus.QUEUED


async def test_a_worker_that_is_silent_without_an_outage_is_lost(outage: Outage) -> None:
    passes = [await outage.sweep(after_seconds=3) for _ in range(LOST_AFTER // 3 + 1)]
    assert (sum(passes), passes[-1]) == (1, 1)


async def test_leases_are_extended_by_the_length_of_the_outage(outage: Outage) -> None:
    before = (await outage.row()).lease_expires_at
    await outage.sweep(after_seconds=OUTAGE + 3)
    after = (await outage.row()).lease_expires_at
    assert before
    assert after
    assert (after - before).total_seconds() == OUTAGE


async def test_a_lease_that_had_expired_before_the_outage_ends(outage: Outage) -> None:
    await let_expire(outage.context)
    assert await outage.sweep(after_seconds=OUTAGE) == 1
