"""Workers whose ComfyUI is dead: they say so, get no job, and what waits for them goes elsewhere."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.graphs import graph, graph_setup_on, node, output
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on

from comfyfleet.server.graphs.run import Choice, ExecutionKey, GraphRunStatus
from comfyfleet.server.metrics import read_figures

ABLE = {"node_types": ["EmptyImage", "LoadImage", "SaveImage"]}


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


async def state(fleet_setup: FleetSetup, worker_id: str = "w1") -> dict[str, Any]:
    found: dict[str, Any] = (await fleet_setup.admin.get(f"/api/admin/workers/{worker_id}")).json()
    return found


async def test_a_worker_with_a_problem_gets_no_job_until_it_polls_without_one(
    fleet_setup: FleetSetup,
) -> None:
    async with fleet_setup.worker() as worker:
        assert (await state(fleet_setup))["state"] == "online"
        polled = await worker.poll(backend_problem="down")
        assert polled["reason"] == "this worker reports that its ComfyUI doesn't answer"
        found = await state(fleet_setup)
        assert (found["state"], found["problem"]) == ("faulty", "its ComfyUI doesn't answer")
        job_id = await fleet_setup.submit()
        assert (await worker.poll(backend_problem="down"))["job"] is None
        why = (await fleet_setup.job(job_id))["why"]
        assert why == (
            "No worker of fleet gpu/production can run jobs (w1: its ComfyUI doesn't answer)."
        )
        job = await worker.job()
        assert job["job_id"] == str(job_id)
        assert (await state(fleet_setup))["state"] == "online"


async def test_a_heartbeat_does_not_end_a_problem(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker(max_concurrency=2) as worker:
        await fleet_setup.submit()
        job = await worker.job(max_concurrency=2)
        await worker.poll(backend_problem="disk_full", max_concurrency=2)
        assert (await worker.call_for(job, "heartbeat")).status_code == 200
        assert (await state(fleet_setup))["problem"] == "its disk is full"


async def test_a_worker_with_a_problem_is_no_capacity(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker() as worker:
        await worker.poll(backend_problem="hung")
        plane = fleet_setup.plane
        async with plane.central.read() as tx:
            figures = await read_figures(tx, now=plane.clock(), offline_after_seconds=90)
    assert [each.slots for each in figures.fleets] == [0]


async def test_a_job_handed_back_for_a_full_disk_costs_no_attempt(fleet_setup: FleetSetup) -> None:
    job_id = await fleet_setup.submit()
    async with fleet_setup.worker() as worker, fleet_setup.worker("w2") as other:
        job = await worker.job()
        assert (await worker.call_for(job, "requeue", reason="disk_full")).status_code == 200
        assert (await worker.poll())["job"] is None, "it is avoided while another can run the job"
        again = await other.job()
        assert (again["job_id"], again["attempt"]) == (str(job_id), 1)


@pytest.mark.parametrize("strategy", ["ask_user", "auto_select"])
async def test_a_node_bound_to_a_dead_backend_is_placed_anew(
    databases: Databases, tmp_path: Path, strategy: str
) -> None:
    async with (
        graph_setup_on(databases, tmp_path, workers=()) as graph_setup,
        AsyncExitStack() as stack,
    ):
        for name in ("w1", "w2"):
            worker = graph_setup.fleet_setup.worker(name, backend=ABLE)
            graph_setup.workers[name] = await stack.enter_async_context(worker)
        first = node("first", backend_affinity="worker:w1", fallback_strategy=strategy)
        kept = await graph_setup.started(graph([first, output()], "first.output > result.value"))
        await graph_setup.workers["w1"].poll(backend_problem="down")
        await graph_setup.judge()
        await graph_setup.sweep()
        kept = await graph_setup.now(kept)
        if strategy == "ask_user":
            question = kept.run.record(ExecutionKey("first")).question
            assert question is not None
            assert question.message == "Backend worker:w1 is offline"
            assert question.backends == ("worker:w2",)
            kept = await graph_setup.answer(kept, "first", Choice.BACKEND, "worker:w2")
        assert len(await graph_setup.work("w2")) == 1
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED


async def test_a_worker_that_has_left_is_offline_and_one_that_never_was_is_unknown(
    fleet_setup: FleetSetup,
) -> None:
    async with fleet_setup.worker() as worker:
        assert (await worker.call("deregister", worker_id="w1")).status_code == 200
    for act in ("drain", "undrain", "rotate-token", "approve", "revoke"):
        answer = await fleet_setup.admin.post(f"/api/admin/workers/w1/{act}")
        assert answer.status_code == 409, answer.text
        assert answer.json()["error"]["code"] == "worker_offline"
        assert "w1 is offline" in answer.json()["error"]["message"]
        unknown = await fleet_setup.admin.post(f"/api/admin/workers/stranger/{act}")
        assert unknown.status_code == 404
