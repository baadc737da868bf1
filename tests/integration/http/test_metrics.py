"""/metrics as Prometheus would read it, on both databases."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.databases.factory import Databases
from tests.support.jobs.dispatches import lane, leased, new, submit, waiter
from tests.support.jobs.fleets import a_fleet, a_worker, a_workflow
from tests.support.server.control_plane import client_of, plane_on

from comfyfleet.clock import utc_now
from comfyfleet.errors import Unavailable
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Sighting
from comfyfleet.server.maintenance.cloudwatch import scaling_figures, wanted_by
from comfyfleet.server.metrics import read_figures
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import DispatchStatus


class Later:
    """A clock that can be put forward."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self.ahead


@pytest.fixture
def clock() -> Later:
    return Later()


@pytest.fixture
async def plane(databases: Databases, tmp_path: Path, clock: Later) -> AsyncIterator[ControlPlane]:
    async with plane_on(databases, tmp_path, clock=clock) as plane:
        yield plane


async def samples(client: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def of(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


async def test_queue_leases_and_workers_are_told_by_workflow_and_fleet(plane: ControlPlane) -> None:
    now = plane.clock()
    async with plane.central.transaction() as tx:
        upscale, other = await a_workflow(tx, "upscale"), await a_workflow(tx, "other")
        fleet = await a_fleet(tx, "gpus")
        await fleets.assign(tx, fleet, {upscale}, now=now)
        busy = await a_worker(tx, fleet, "gpu-1", now=now)
        await a_worker(tx, fleet, "gpu-2", now=now - timedelta(hours=1))
        await fleets.drain_worker(tx, await a_worker(tx, fleet, "gpu-3", now=now))
        await fleets.record_sighting(tx, busy, Sighting(load=1), now=now + timedelta(seconds=30))
    jobs = [new(to=lane(upscale)) for _ in range(3)]
    await submit(plane.central, *jobs, now=now - timedelta(seconds=100))
    await submit(plane.central, new(to=lane(other)), now=now)
    await leased(plane.queue, waiter(lanes=[lane(upscale)]))
    async with client_of(plane, key=None) as client:
        found = await samples(client)
    where = {"workflow": "upscale", "stage": "production", "provider": "self_hosted"}
    assert found[of("comfyfleet_queue_depth", **where)] == 2
    assert found[of("comfyfleet_leases", **where)] == 1
    assert 99 < found[of("comfyfleet_queue_oldest_seconds", **where)] < 200
    assert found[of("comfyfleet_queue_depth", **{**where, "workflow": "other"})] == 1
    gpus = {"fleet": "gpus", "stage": "production"}
    assert found[of("comfyfleet_fleet_queue_depth", **gpus)] == 2
    assert found[of("comfyfleet_fleet_leases", **gpus)] == 1
    states = {"busy": 1, "offline": 1, "draining": 1, "idle": 0, "revoked": 0}
    for state, number in states.items():
        assert found[of("comfyfleet_workers", **gpus, state=state)] == number, state


async def test_a_job_that_ends_is_counted_in_the_next_reading_and_only_there(
    plane: ControlPlane, clock: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.server.http.health.FRESH_SECONDS", -1.0)
    async with plane.central.transaction() as tx:
        workflow = await a_workflow(tx, "upscale")
    async with client_of(plane) as client:
        await submit(plane.central, *(new(to=lane(workflow)) for _ in range(3)))
        for duration in (0.7, 40.0):
            lease = await leased(plane.queue, waiter(lanes=[lane(workflow)]))
            await plane.queue.complete(lease.dispatch_id, lease.token, duration=duration)
        lease = await leased(plane.queue, waiter(lanes=[lane(workflow)]))
        async with plane.central.transaction() as tx:
            await dispatch.end(
                tx, lease.dispatch_id, lease.token, DispatchStatus.FAILED, now=clock(), error="no"
            )
        good = {"workflow": "upscale", "stage": "production", "outcome": "completed"}
        bad = {**good, "outcome": "failed"}
        for _ in range(2):
            clock.ahead += timedelta(minutes=1)
            found = await samples(client)
            assert found[of("comfyfleet_jobs_ended_total", **good)] == 2
            assert found[of("comfyfleet_jobs_ended_total", **bad)] == 1
            assert found[of("comfyfleet_job_seconds_count", **good)] == 2
            assert found[of("comfyfleet_job_seconds_sum", **good)] == pytest.approx(40.7)
            assert found[of("comfyfleet_job_seconds_bucket", **good, le="1.0")] == 1
            assert found[of("comfyfleet_job_seconds_bucket", **good, le="60.0")] == 2


async def test_calls_are_counted_by_route_and_never_by_id(plane: ControlPlane) -> None:
    async with client_of(plane) as client:
        for path in ("/healthz", "/healthz", "/nowhere/1", "/nowhere/2"):
            await client.get(path)
        found = await samples(client)
    health = {"method": "GET", "route": "/healthz", "status": "200"}
    assert found[of("comfyfleet_api_calls_total", **health)] == 2
    nowhere = {"method": "GET", "route": "unknown", "status": "404"}
    assert found[of("comfyfleet_api_calls_total", **nowhere)] == 2
    assert found[of("comfyfleet_api_call_seconds_count", method="GET", route="/healthz")] == 2


async def test_without_the_database_the_process_still_tells_what_it_counted(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise Unavailable("the database can't be reached")

    async with client_of(plane) as client:
        await client.get("/healthz")
        monkeypatch.setattr(plane.central, "read", away)
        found = await samples(client)
    assert found[of("comfyfleet_figures_readable")] == 0
    health = {"method": "GET", "route": "/healthz", "status": "200"}
    assert found[of("comfyfleet_api_calls_total", **health)] == 1


async def test_stalls_of_the_event_loop_are_counted(plane: ControlPlane) -> None:
    name = of("comfyfleet_loop_stall_seconds_count")
    async with client_of(plane, key=None) as client:
        before = (await samples(client))[name]
        time.sleep(0.15)  # noqa: ASYNC251
        async with asyncio.timeout(30):
            while (await samples(client))[name] == before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_the_wanted_workers_are_those_that_cloudwatch_is_told(plane: ControlPlane) -> None:
    """Twelve queued jobs of 60 s each: three workers start all of them within five minutes."""
    async with plane.central.transaction() as tx:
        fleet, workflow = await a_fleet(tx), await a_workflow(tx)
        await fleets.assign(tx, fleet, {workflow}, now=plane.clock())
    await submit(plane.central, *(new(to=lane(workflow)) for _ in range(12)))
    async with client_of(plane) as client:
        found = await samples(client)
    wanted = found[of("comfyfleet_wanted_workers", fleet="gpus", stage="production")]
    async with plane.central.read() as tx:
        figures = await read_figures(tx, now=plane.clock(), offline_after_seconds=90)
        (scaling,) = await scaling_figures(tx, figures, cap=plane.settings.max_fleet_workers)
    assert wanted == wanted_by(scaling) == 3
