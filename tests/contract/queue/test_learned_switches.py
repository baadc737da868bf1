"""What switches of models cost is learned from runs, kept in the database, and shared by all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.jobs.dispatches import lane, leased, new, opened, parked, submit, waiter
from tests.support.jobs.fleets import a_fleet

from comfyfleet.server.db import Database
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import Waiter
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.server.queue.store import writes
from comfyfleet.server.queue.switch_costs import (
    SAMPLES_KEPT_MAX,
    SAMPLES_MIN,
    ModelChange,
    RunKind,
    Samples,
    TimedRun,
)

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


@pytest.fixture
async def fleet_id(central: Database) -> int:
    async with central.transaction() as tx:
        return (await a_fleet(tx)).id


def runs(fleet_id: int, model: str, *, stay: float, switch: float) -> list[TimedRun]:
    kind = RunKind(fleet_id, model, 1)
    both = (TimedRun(kind, ModelChange.SAME, stay), TimedRun(kind, ModelChange.SWITCHED, switch))
    return [each for each in both for _ in range(SAMPLES_MIN)]


async def tell(db: Database, told: list[TimedRun], *, now: datetime = NOW) -> None:
    async with db.transaction() as tx:
        await service.add_runs(tx, told, now=now)


async def samples(db: Database) -> dict[RunKind, Samples]:
    async with db.read() as tx:
        return await writes.all_samples(tx)


async def test_runs_are_kept_by_fleet_model_and_workflow(central: Database, fleet_id: int) -> None:
    one, other = RunKind(fleet_id, "sdxl", 1), RunKind(fleet_id, "sdxl", 2)
    await tell(
        central, [TimedRun(one, ModelChange.SAME, 1.25), TimedRun(other, ModelChange.SWITCHED, 2.5)]
    )
    await tell(
        central, [TimedRun(one, ModelChange.SAME, 1.5), TimedRun(one, ModelChange.SWITCHED, 3.0004)]
    )
    assert await samples(central) == {
        one: Samples((1.25, 1.5), (3.0,)),
        other: Samples((), (2.5,)),
    }


async def test_what_several_tell_at_the_same_moment_is_all_kept(
    central: Database, fleet_id: int
) -> None:
    kinds = [RunKind(fleet_id, model, 1) for model in ("wan", "flux", "sdxl")]
    told = [
        [TimedRun(kind, ModelChange.SAME, float(n)) for kind in kinds]
        for n in range(SAMPLES_KEPT_MAX)
    ]
    await asyncio.gather(*(tell(central, each) for each in told))
    found = await samples(central)
    for kind in kinds:
        assert sorted(found[kind].stayed) == [float(n) for n in range(SAMPLES_KEPT_MAX)]


async def test_what_is_not_run_any_more_is_forgotten(central: Database, fleet_id: int) -> None:
    await tell(central, runs(fleet_id, "old", stay=1, switch=2))
    await tell(central, runs(fleet_id, "sdxl", stay=1, switch=2), now=NOW + timedelta(days=31))
    assert {kind.model_key for kind in await samples(central)} == {"sdxl"}


async def test_what_one_control_plane_notes_all_learn_and_a_restart_does_not_forget(
    central: Database, fleet_id: int
) -> None:
    async with opened(central) as one, opened(central) as other:
        for run in runs(fleet_id, "sdxl", stay=1.2, switch=2.2):
            one.switch_costs.note(run)
        await one.learn()
        assert one.switch_costs.noted == []
        await other.learn()
        assert other.switch_costs.estimates == one.switch_costs.estimates
    async with opened(central) as again:
        await again.learn()
        known = again.switch_costs.estimates[fleet_id, "sdxl"]
    assert known.seconds == pytest.approx(1.0)
    assert (known.run_seconds, known.stayed, known.switched) == (1.2, SAMPLES_MIN, SAMPLES_MIN)


def with_model(name: str, model: str, fleet_id: int) -> Waiter:
    return waiter(name, models_loaded=(model,), fleet_id=fleet_id, lanes=[lane(1), lane(2)])


@pytest.mark.parametrize(("switch", "first"), [(1.23, "flux"), (2.2, "sdxl")])
async def test_once_it_is_learned_that_switches_are_free_jobs_go_by_their_order(
    central: Database, fleet_id: int, switch: float, first: str
) -> None:
    async with opened(central) as queue:
        for _ in range(2):
            await submit(central, new(model_key="flux"), new(to=lane(2), model_key="sdxl"), now=NOW)
        warm = with_model("gpu-1", "sdxl", fleet_id)
        assert (await leased(queue, warm)).model_key == "sdxl", "as long as nothing is learned"
        for model in ("sdxl", "flux"):
            await tell(central, runs(fleet_id, model, stay=1.2, switch=switch))
        await queue.learn()
        assert (await leased(queue, warm)).model_key == first


@asynccontextmanager
async def learned(db: Database, fleet_id: int, *, switch: float) -> AsyncIterator[DispatchQueue]:
    """A queue that knows the costs, and that a worker elsewhere has the model."""
    await tell(db, runs(fleet_id, "sdxl", stay=0.1, switch=0.1 + switch))
    async with opened(db) as queue:
        await queue.learn()
        await submit(db, new(model_key="sdxl"))
        await leased(queue, with_model("warm", "sdxl", fleet_id))
        yield queue


async def test_a_new_job_is_held_for_a_worker_with_its_model_and_then_given_to_anyone(
    central: Database, fleet_id: int
) -> None:
    async with learned(central, fleet_id, switch=0.4) as queue:
        cold = with_model("cold", "flux", fleet_id)
        waiting = asyncio.create_task(queue.lease(cold, wait_seconds=20))
        await parked(queue, 1)
        [job] = await queue.enqueue([new(model_key="sdxl")])
        lease = await asyncio.wait_for(waiting, 10)  # not only with the recheck
        assert lease is not None
        assert lease.dispatch_id == job.id


async def test_a_worker_with_the_model_gets_a_job_that_is_held_for_it(
    central: Database, fleet_id: int
) -> None:
    async with learned(central, fleet_id, switch=50) as queue:
        cold = with_model("cold", "flux", fleet_id)
        waiting = asyncio.create_task(queue.lease(cold, wait_seconds=20))
        await parked(queue, 1)
        [job] = await queue.enqueue([new(model_key="sdxl")])
        await parked(queue, 1)
        assert (await leased(queue, with_model("warm", "sdxl", fleet_id))).dispatch_id == job.id
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})
