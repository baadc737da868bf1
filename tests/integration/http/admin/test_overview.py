"""Operators see what waits, runs and ended, and what needs them."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import PRICE, EffectSetup, effect_setup_on

from comfyfleet.clock import utc_now
from comfyfleet.server.db import open_database
from comfyfleet.server.maintenance import checks
from comfyfleet.server.maintenance.sweeps import remove_lost_workers, rollup_sweeps


class MovedClock:
    """The real time, which PostgreSQL goes by, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self.ahead

    def advance(self, **time: float) -> None:
        self.ahead += timedelta(**time)


class Scene:
    def __init__(self, setup: EffectSetup, clock: MovedClock) -> None:
        self.setup, self.clock = setup, clock
        (self.rollups,) = rollup_sweeps(setup.plane)

    async def overview(self, span: str = "1h") -> dict[str, Any]:
        path = f"/api/admin/overview?range={span}"
        answer = await self.setup.fleet_setup.admin.get(path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def pass_minutes(self, count: int = 2) -> None:
        for _ in range(count):
            self.clock.advance(seconds=60)
            if self.rollups.is_due and await self.rollups.is_due():
                await self.rollups.run()

    async def alerts(self) -> dict[str, dict[str, Any]]:
        answer = await self.setup.fleet_setup.admin.get("/api/admin/alerts")
        assert answer.status_code == 200, answer.text
        assert all(each["todo"] for each in answer.json()["alerts"])
        return {each["kind"]: each for each in answer.json()["alerts"]}


@pytest.fixture
async def scene(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    monkeypatch.setattr(checks, "DISK_FREE_BYTES", 0)  # of this machine
    clock = MovedClock()
    async with (
        plane_on(databases, tmp_path, clock=clock, max_active_jobs_per_user=50) as plane,
        effect_setup_on(plane) as setup,
    ):
        yield Scene(setup, clock)


async def test_an_hour_a_day_and_a_week_are_told_from_the_same_sums(scene: Scene) -> None:
    ada = await scene.setup.customer(tokens=1000)
    for _ in range(3):
        await ada.job(scene.setup.draw)
        await scene.setup.work()
    await ada.job(scene.setup.draw)
    await scene.setup.fail()
    waiting = await ada.job(scene.setup.draw)
    await scene.pass_minutes()
    for span, steps, step in (("1h", 60, 60), ("24h", 96, 900), ("7d", 84, 7200)):
        told = await scene.overview(span)
        assert told["step_seconds"] == step
        assert {len(column) for column in told["series"].values()} == {steps}
        totals = told["totals"]
        assert (totals["completed"], totals["failed"], totals["tokens"]) == (3, 1, 3 * PRICE)
        assert totals["success_rate"] == 0.75
        assert sum(told["series"]["completed"]) == 3
        assert totals["wait_p50_seconds"] is not None
        (draw,) = (each for each in told["workflows"] if each["workflow"] == "draw")
        assert (draw["completed"], draw["failed"], draw["queued"]) == (3, 1, 1)
        assert (len(draw["ended"]), sum(draw["ended"])) == (steps, 4)
        assert draw["wait_p95_seconds"] is not None
        assert draw["run_p95_seconds"] == totals["run_p95_seconds"]
    assert (told["now"]["queued"], told["now"]["running"]) == (1, 0)
    assert told["now"]["oldest_seconds"] >= 120
    assert told["now"]["waiting"] == {"gpu/production": 1}
    assert waiting
    wrong = await scene.setup.fleet_setup.admin.get("/api/admin/overview?range=2h")
    assert wrong.status_code == 422


async def test_what_a_worker_holds_for_later_does_not_run(scene: Scene) -> None:
    ada = await scene.setup.customer(tokens=1000)
    for _ in range(2):
        await ada.job(scene.setup.draw)
    fleet = scene.setup.fleet_setup
    async with fleet.worker("w1") as worker, fleet.worker("w2") as other:
        job = await worker.job()
        await other.job()
        await worker.call_for(job, "heartbeat", started=True)
        told = await scene.overview()
        now = told["now"]
        assert (now["queued"], now["running"], now["held"]) == (0, 1, 1)
        (draw,) = (each for each in told["workflows"] if each["workflow"] == "draw")
        assert (draw["running"], draw["held"]) == (1, 1)


async def test_a_worker_is_busy_while_it_holds_a_job_whatever_it_said_when_it_asked(
    scene: Scene,
) -> None:
    ada = await scene.setup.customer(tokens=1000)
    fleet = scene.setup.fleet_setup

    async def states() -> tuple[int, int, list[int]]:
        workers = (await scene.overview())["now"]["workers"]
        told = (await fleet.admin.get("/api/admin/workers")).json()["workers"]
        for each in told:
            shown = await fleet.admin.get(f"/api/admin/workers/{each['worker_id']}")
            assert shown.json()["current_load"] == each["current_load"]
        return workers["idle"], workers["busy"], [each["current_load"] for each in told]

    async with fleet.worker("w1") as worker, fleet.worker("w2") as other:
        await other.poll(current_load=1)  # it delivers a result, and has nothing else to do
        assert await states() == (2, 0, [0, 0])
        for _ in range(2):
            await ada.job(scene.setup.draw)
        job = await worker.job(current_load=0)
        assert await states() == (1, 1, [1, 0])
        await worker.job(current_load=1, wait_seconds=5)  # held for later
        assert await states() == (1, 1, [1, 0])
        await worker.call_for(job, "fail", error="broken")
        assert await states() == (1, 1, [1, 0])


async def test_a_worker_that_misses_its_moments_is_silent_before_it_is_gone(scene: Scene) -> None:
    admin = scene.setup.fleet_setup.admin

    async def seen() -> tuple[str, bool]:
        (worker,) = (await admin.get("/api/admin/workers")).json()["workers"]
        silent = worker["silent_since"]
        assert silent in (None, worker["last_seen_at"])
        return worker["state"], silent is not None

    await scene.setup.fleet_setup.register("w1")
    assert await seen() == ("online", False)
    scene.clock.advance(seconds=50)
    assert await seen() == ("online", False)
    scene.clock.advance(seconds=20)
    assert await seen() == ("online", True)
    scene.clock.advance(seconds=30)
    assert await seen() == ("offline", True)


async def test_a_workflow_that_fails_often_is_told_with_what_to_do(scene: Scene) -> None:
    ada = await scene.setup.customer(tokens=1000)
    for _ in range(5):
        await ada.job(scene.setup.draw)
        await scene.setup.fail()
    await scene.pass_minutes()
    told = (await scene.alerts())["error_rate"]
    assert (told["severity"], told["subject"], told["count"]) == ("error", "workflow:draw", 5)
    assert (await scene.overview())["alerts"][0]["kind"] == "error_rate"
    scene.clock.advance(minutes=20)
    assert "error_rate" not in await scene.alerts()


async def test_lost_and_new_workers_are_told(scene: Scene) -> None:
    assert await scene.alerts() == {}
    await scene.setup.fleet_setup.register("gpu-7")
    scene.clock.advance(seconds=scene.setup.plane.settings.offline_after_seconds + 1)
    told = (await scene.alerts())["workers_lost"]
    assert (told["severity"], told["subject"]) == ("error", "worker:gpu-7")
    scene.clock.advance(seconds=scene.setup.plane.settings.remove_worker_after_seconds + 1)
    await remove_lost_workers(scene.setup.plane)
    assert (await scene.alerts())["workers_lost"]["severity"] == "warning"
    await scene.setup.fleet_setup.admin.put(
        "/api/admin/fleets/gpu/production/approval", json={"approval": "manual"}
    )
    await scene.setup.fleet_setup.register("gpu-7")
    found = await scene.alerts()
    assert found.keys() == {"workers_pending"}
    assert "gpu-7" in found["workers_pending"]["message"]


async def test_jobs_that_nobody_can_run_are_told_with_the_reason(scene: Scene) -> None:
    ada = await scene.setup.customer(tokens=1000)
    await ada.job(scene.setup.draw)
    assert "stuck_jobs" not in await scene.alerts()
    scene.clock.advance(seconds=61)
    told = (await scene.alerts())["stuck_jobs"]
    assert (told["severity"], told["count"]) == ("error", 1)
    assert "has no workers" in told["message"]
    await scene.setup.fleet_setup.act("workflows/draw/pause")
    assert "paused" in (await scene.alerts())["stuck_jobs"]["message"]


async def test_full_disks_maintenance_and_pools_that_are_down_are_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "DISK_FREE_BYTES", 10**9)
    monkeypatch.setattr(checks, "_own_disk", _no_disk)
    async with scene.setup.fleet_setup.worker("gpu-7") as worker:
        scene.clock.advance(seconds=60)  # else what it tells is not worth writing
        await worker.poll(reading={"disk_free_bytes": 1000})
    assert (await scene.alerts()).keys() == {"disk"}
    await scene.setup.fleet_setup.act("maintenance", on=True)
    away = open_database("postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setitem(scene.setup.plane.pools._databases, "other", away)
    found = await scene.alerts()
    await away.close()
    assert found.keys() == {"disk", "maintenance", "pool_down"}
    assert (found["disk"]["subject"], found["disk"]["severity"]) == ("worker:gpu-7", "error")
    assert found["pool_down"]["subject"] == "pool:other"


async def _no_disk(_plane: object) -> list[tuple[str, int]]:
    return []


async def test_what_happened_is_gone_from_an_hour_after_an_hour(scene: Scene) -> None:
    ada = await scene.setup.customer(tokens=1000)
    await ada.job(scene.setup.draw)
    await scene.setup.work()
    await scene.pass_minutes()
    scene.clock.advance(hours=2)
    assert (await scene.overview("1h"))["totals"]["completed"] == 0
    assert (await scene.overview("24h"))["totals"]["completed"] == 1
