"""Sums of what happened, kept by several control planes, on every database."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select
from tests.support.databases.factory import Databases
from tests.support.jobs.bulk import add_dispatches, add_jobs, counting, dispatch_row, job_row
from tests.support.jobs.context import ManualClock, give_tokens, job_context_on

from comfyfleet.server.db import Pools, open_database
from comfyfleet.server.db.central_tables import fleets, rollups
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.metrics import (
    BUCKETS,
    RANGES,
    RETENTION,
    RUN,
    WAIT,
    Rollup,
    RollupPass,
    percentile,
    percentile_of,
    read_rollup,
)
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.switch_costs import ModelChange, RunKind, TimedRun

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)  # where the clock of tests begins


class Scene:
    def __init__(self, context: JobContext, clock: ManualClock, tenant_id: Any) -> None:
        self.context, self.clock, self.tenant_id = context, clock, tenant_id

    def plane(self, **changes: Any) -> RollupPass:
        """What one control plane adds."""
        return RollupPass(self.context.central, changes.get("pools", self.context.pools), 90)

    async def ended(self, at: datetime, count: int = 1, **changes: Any) -> None:
        """Jobs that waited for 2 seconds and ran for 10."""
        jobs = [job_row(self.tenant_id, at - timedelta(seconds=12)) for _ in range(count)]
        begun = at - timedelta(seconds=10)
        usual = {"status": "completed", "ended_at": at, "duration_seconds": 10.0}
        rows = [
            dispatch_row(job, 0, **{**usual, "leased_at": begun, "started_at": begun, **changes})
            for job in jobs
        ]
        await add_dispatches(self.context.central, rows)

    async def pass_by(self, *planes: RollupPass) -> None:
        for each in planes:
            if await each.is_due(self.clock()):
                await each.run(self.clock())

    async def read(self, name: str = "1h") -> Rollup:
        async with self.context.central.read() as tx:
            return await read_rollup(tx, RANGES[name], now=self.clock())


@pytest.fixture
async def scene(databases: Databases, tmp_path: Path) -> AsyncIterator[Scene]:
    clock = ManualClock()
    async with job_context_on(databases, tmp_path, clock) as (context, tenant_id):
        yield Scene(context, clock, tenant_id)


async def test_what_ended_is_added_once_however_many_control_planes_look(scene: Scene) -> None:
    planes = [scene.plane() for _ in range(3)]
    await scene.ended(NOW + timedelta(seconds=5), 3)
    await scene.ended(NOW + timedelta(seconds=50), status="failed")
    await scene.ended(NOW + timedelta(seconds=70), status="cancelled", duration_seconds=None)
    for _ in range(6):
        scene.clock.advance(seconds=31)
        await scene.pass_by(*planes)
    for name in RANGES:
        total = (await scene.read(name)).total
        ended = [total.count(each) for each in ("completed", "failed", "cancelled")]
        assert ended == [3, 1, 1], name
        assert total.success_rate == 0.75
        wait, run = total.percentile(WAIT, 0.5), total.percentile(RUN, 0.5)
        assert wait == pytest.approx(2, rel=0.35)
        assert run == pytest.approx(10, rel=0.35)
        assert total.workflows()[1]["completed"] == 3
        assert total.workflows()[1]["run_seconds"] == 40
        assert percentile_of(total.workflows()[1], WAIT, 0.5) == wait
        assert percentile_of(total.workflows()[1], RUN, 0.5) == run
    points = {point.at: point for point in (await scene.read()).points}
    assert points[NOW].count("completed") == 3
    assert points[NOW + timedelta(minutes=1)].count("cancelled") == 1


async def test_two_control_planes_at_the_same_moment_add_a_minute_once(scene: Scene) -> None:
    first, second = scene.plane(), scene.plane()
    await scene.ended(NOW + timedelta(seconds=5), 2)
    scene.clock.advance(seconds=75)
    await asyncio.gather(first.run(scene.clock()), second.run(scene.clock()))
    assert (await scene.read()).total.count("completed") == 2


async def test_tokens_of_completed_jobs_are_added_less_what_went_back(scene: Scene) -> None:
    user_id = await give_tokens(scene.context, scene.tenant_id, 100)
    at = NOW + timedelta(seconds=20)
    jobs = [
        job_row(
            scene.tenant_id,
            NOW,
            user_id=user_id,
            status=status,
            completed_at=at,
            reserved_tokens=7,
        )
        for status in ("completed", "completed", "failed")
    ]
    await add_jobs(scene.context.pools["main"], jobs)
    await scene.ended(at)
    scene.clock.advance(seconds=75)
    await scene.pass_by(scene.plane())
    assert (await scene.read()).total.count("tokens") == 14


async def test_tokens_of_a_pool_that_was_down_are_added_when_it_is_back(scene: Scene) -> None:
    at = NOW + timedelta(seconds=20)
    job = job_row(scene.tenant_id, NOW, status="completed", completed_at=at, reserved_tokens=7)
    await add_jobs(scene.context.pools["main"], [job])
    await scene.ended(at)
    away = open_database("postgresql://nobody@127.0.0.1:1/none")
    scene.clock.advance(seconds=75)
    await scene.pass_by(scene.plane(pools=Pools({"main": away})))
    await away.close()
    total = (await scene.read()).total
    assert (total.count("completed"), total.count("tokens")) == (1, 0)
    await scene.ended(NOW + timedelta(seconds=80))
    scene.clock.advance(seconds=60)
    await scene.pass_by(scene.plane())
    total = (await scene.read()).total
    assert (total.count("completed"), total.count("tokens")) == (2, 7)


async def test_what_waits_and_runs_is_a_mean_over_time(scene: Scene) -> None:
    jobs = [job_row(scene.tenant_id, NOW) for _ in range(4)]
    await add_dispatches(scene.context.central, [dispatch_row(each, 0) for each in jobs])
    adding = scene.plane()
    scene.clock.advance(seconds=15)
    for _ in range(3):
        scene.clock.advance(seconds=60)
        await scene.pass_by(adding)
    minute = next(
        each for each in (await scene.read()).points if each.at == NOW + timedelta(minutes=1)
    )
    assert minute.mean("queued_seconds") == 4
    assert minute.mean("leased_seconds") == 0


async def test_runs_that_stayed_with_their_model_are_counted_where_they_are_stored(
    scene: Scene,
) -> None:
    kind = RunKind(1, "sdxl", 1)
    async with scene.context.central.transaction() as tx:
        row = {"id": 1, "slug": "a", "stage": "b", "secret_hash": "c", "created_at": NOW}
        await tx.execute(insert(fleets).values(row))
        runs = [TimedRun(kind, change, 1.0) for change in [ModelChange.SAME] * 3]
        await dispatch.add_runs(tx, [*runs, TimedRun(kind, ModelChange.SWITCHED, 2)], now=NOW)
    total = (await scene.read()).total
    assert (total.stayed, total.switched) == (3, 1)


async def test_nothing_is_written_while_nothing_happens(scene: Scene) -> None:
    adding = scene.plane()
    await scene.ended(NOW + timedelta(seconds=5))
    scene.clock.advance(seconds=75)
    await scene.pass_by(adding)
    with counting(scene.context.central, scene.context.pools["main"]) as sent:
        for _ in range(30):
            scene.clock.advance(seconds=20)
            await scene.pass_by(adding)
    words = {statement.split()[0] for statement, _ in sent}
    assert words <= {"SELECT", "BEGIN", "PRAGMA"}
    assert len(sent) <= 10 * 5  # in ten minutes
    await scene.ended(scene.clock.now + timedelta(seconds=1))
    scene.clock.advance(seconds=80)
    await scene.pass_by(adding)
    assert (await scene.read()).total.count("completed") == 2


async def test_old_steps_go_and_their_number_is_bounded(scene: Scene) -> None:
    adding = scene.plane()
    for _ in range(40):
        await scene.ended(scene.clock.now)
        scene.clock.advance(minutes=20)
        await scene.pass_by(adding)
    async with scene.context.central.read() as tx:
        oldest = select(rollups.c.step_seconds, func.min(rollups.c.at))
        rows = await tx.execute(oldest.group_by(rollups.c.step_seconds))
    by_step = {row[0]: row[1] for row in rows}
    assert by_step.keys() == RETENTION.keys()
    for step, at in by_step.items():
        assert at >= scene.clock.now - RETENTION[step] - timedelta(minutes=21)


def test_a_percentile_lies_in_its_bucket() -> None:
    counts = [0.0] * (len(BUCKETS) + 1)
    assert percentile(counts, 0.5) is None
    counts[3] = 10
    found = percentile(counts, 0.5)
    assert found is not None
    assert BUCKETS[2] < found < BUCKETS[3]
    counts[-1] = 90
    assert percentile(counts, 0.95) == pytest.approx(BUCKETS[-1])
