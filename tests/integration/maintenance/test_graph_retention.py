"""What goes of graph runs when their time is up, and what those that go on keep."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import func, select
from tests.support.server.control_plane import client_of
from tests.support.server.customers import png
from tests.support.server.fleet import FleetSetup, WorkerClient
from tests.support.server.tenants import PNG, AdjustableClock, TenantData

from comfyfleet.server.db.tenant_tables import graph_executions
from comfyfleet.server.graphs.runner import read_outbox
from comfyfleet.server.maintenance.sweeps import (
    advance_pipelines,
    check_all_files,
    expire_all,
    remove_all_orphans,
)
from comfyfleet.server.media import service as media
from comfyfleet.server.pipelines.actions import NewPipelineRun, create_pipeline, start_run

PRICE = 2
NODES: list[dict[str, Any]] = [
    {"id": "photo", "type": "input", "value_type": "image"},
    {"id": "first", "type": "workflow", "workflow": "invert"},
    {"id": "second", "type": "workflow", "workflow": "invert"},
    {"id": "third", "type": "workflow", "workflow": "invert"},
    {"id": "picture", "type": "output"},
    {"id": "other", "type": "output"},
]
CONNECTIONS = [
    {"from": "photo.value", "to": "first.input"},
    {"from": "first.output", "to": "second.input"},
    {"from": "photo.value", "to": "third.input"},
    {"from": "second.output", "to": "picture.value"},
    {"from": "third.output", "to": "other.value"},
]


def graph(**of_second: Any) -> dict[str, Any]:
    nodes = [{**each, **of_second} if each["id"] in ("second", "third") else each for each in NODES]
    return {"name": "a private name", "nodes": nodes, "connections": CONNECTIONS}


@pytest.fixture
def storage_url(tmp_path: Path) -> str:
    """Stores are told apart in test_retention.py."""
    return (tmp_path / "objects").as_uri()


@pytest.fixture
async def api(house: FleetSetup, ada: TenantData) -> AsyncIterator[httpx.AsyncClient]:
    made = await house.register_workflow("invert", price_tokens=PRICE)
    assert made.status_code == 201, made.text
    await ada.pays(100)
    await ada.admin.put(f"{ada.path}/retention", json={"retention_days": 30})
    async with client_of(ada.plane, ada.key) as client:
        yield client


async def started(api: httpx.AsyncClient, document: dict[str, Any], file_id: UUID) -> str:
    stored = await api.post("/api/graphs", json=document)
    assert stored.status_code in (200, 201), stored.text  # 200: an equal one is there already
    body = {"inputs": {"photo": str(file_id)}}
    run = await api.post(f"/api/graphs/{stored.json()['id']}/runs", json=body)
    assert run.status_code == 201, run.text
    run_id: str = run.json()["id"]
    return run_id


async def deliver(worker: WorkerClient) -> None:
    """A picture, as an engine saves it."""
    job, data = await worker.job(), png()
    slot = job["outputs"][0]
    put = await worker.client.put(slot["url"], content=data, headers=slot["headers"])
    assert put.status_code in (200, 201), put.text
    made = {"name": slot["name"], "size": len(data), "content_type": "image/png"}
    done = await worker.call_for(job, "complete", outputs=[made])
    assert done.status_code == 200, done.text


async def work(house: FleetSetup, jobs: int, worker_id: str = "w1") -> None:
    async with house.worker(worker_id) as worker:
        for _ in range(jobs):
            await deliver(worker)
            await read_outbox(house.plane.graphs, house.plane.pools["main"])


async def seen(api: httpx.AsyncClient, run_id: str) -> dict[str, Any]:
    answer = await api.get(f"/api/graph-runs/{run_id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_run_whose_time_is_up_keeps_only_what_it_cost(
    house: FleetSetup, ada: TenantData, api: httpx.AsyncClient, ahead: AdjustableClock
) -> None:
    old = await started(api, graph(), (await ada.file()).id)
    await work(house, 3)
    ahead.by = timedelta(days=20)
    young = await started(api, graph(), (await ada.file()).id)
    await work(house, 3, "w2")
    before = await seen(api, old)
    assert before["status"] == "completed"
    ahead.by = timedelta(days=31)
    await expire_all(ada.plane)
    after = await seen(api, old)
    kept = ("id", "graph_id", "graph_version", "status", "tokens", "created_at", "ended_at")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert after["is_expired"]
    gone = ("inputs", "outputs", "error", "nodes", "executions", "name")
    assert [after[name] or None for name in gone] == [None] * 6
    async with ada.pool.read() as tx:
        rows = select(func.count()).where(graph_executions.c.run_id == UUID(old))
        assert await tx.scalar(rows) == 0
    other = await seen(api, young)
    assert not other["is_expired"]
    assert other["inputs"]
    assert other["executions_total"] == 6
    listed = (await api.get("/api/graph-runs")).json()["runs"]
    assert [(each["id"], each["tokens"]) for each in listed] == [(young, 6), (old, 6)]
    assert await ada.balance() == 100 - 12
    assert (await api.get(f"/api/graph-runs/{old}/events")).text.count("event: end") == 1


async def test_a_failed_run_whose_time_is_up_is_not_retried(
    house: FleetSetup, ada: TenantData, api: httpx.AsyncClient, ahead: AdjustableClock
) -> None:
    run_id = await started(api, graph(), (await ada.file()).id)
    async with house.worker() as worker:
        await worker.call_for(await worker.job(), "fail", error="a private wish was not granted")
    await read_outbox(ada.plane.graphs, ada.pool)
    assert "private wish" in (await api.get(f"/api/graph-runs/{run_id}")).text
    ahead.by = timedelta(days=31)
    await expire_all(ada.plane)
    found = await api.get(f"/api/graph-runs/{run_id}")
    assert found.json()["status"] == "failed"
    assert "private" not in found.text
    refused = await api.post(f"/api/graph-runs/{run_id}/retry")
    assert refused.status_code == 409
    assert "run has expired" in refused.json()["error"]["message"]
    assert (await api.post(f"/api/graph-runs/{run_id}/cancel")).json()["status"] == "failed"


async def test_a_run_that_waits_for_an_answer_keeps_its_files(
    house: FleetSetup, ada: TenantData, api: httpx.AsyncClient, ahead: AdjustableClock
) -> None:
    """One that was given, and one that a node has made for the next."""
    async with house.worker("away"):
        pass
    photo = await ada.file(None)
    await ada.plane.store.put(photo.path, PNG, "image/png")
    bound = graph(backend_affinity="worker:away", fallback_strategy="ask_user")
    await house.act("workers/away/drain")
    run_id = await started(api, bound, photo.id)
    unneeded = await ada.file()
    await work(house, 1)
    assert (await seen(api, run_id))["status"] == "waiting_for_user"
    ahead.by = timedelta(days=40)
    await check_all_files(ada.plane)
    await expire_all(ada.plane)
    await remove_all_orphans(ada.plane)
    assert await ada.has(photo) == (True, True)
    async with ada.pool.read() as tx:
        kept = await media.get_file(tx, ada.tenant_id, photo.id)
    assert await ada.plane.store.get(kept.path) == PNG
    assert await ada.has(unneeded) == (False, False)
    assert not (await seen(api, run_id))["is_expired"]
    async with house.worker("w2") as worker:
        for node in ("second", "third"):
            said = {"node": node, "choice": "backend", "backend": "worker:w2"}
            answered = await api.post(f"/api/graph-runs/{run_id}/answer", json=said)
            assert answered.status_code == 200, answered.text
            await deliver(worker)
            await read_outbox(ada.plane.graphs, ada.pool)
    assert (await seen(api, run_id))["status"] == "completed"


async def test_an_input_that_never_came_is_told_before_the_run(
    ada: TenantData, api: httpx.AsyncClient
) -> None:
    announced = await ada.file(None)
    stored = (await api.post("/api/graphs", json=graph())).json()
    body = {"inputs": {"photo": str(announced.id)}}
    refused = await api.post(f"/api/graphs/{stored['id']}/runs", json=body)
    assert refused.status_code == 422
    assert refused.json()["error"]["details"]["problems"][0]["node"] == "photo"


async def test_files_of_a_pipeline_run_stay_while_it_goes_on(
    house: FleetSetup, ada: TenantData, api: httpx.AsyncClient, ahead: AdjustableClock
) -> None:
    """A parent's picture is needed for as long as children may come of it."""
    photo = await ada.file()
    await ada.media(photo)
    steps = [
        {
            "name": "Base",
            "workflow": "invert",
            "properties": {"input": str(photo.id)},
            "needs_approval": True,
        },
        {"name": "More", "workflow": "invert", "properties": {"input": "{{ parent.file }}"}},
    ]
    context, whose = ada.plane.context, (ada.tenant_id, ada.user_id)
    pipeline = await create_pipeline(context, *whose, {"name": "x", "steps": steps})
    run, _ = await start_run(context, *whose, pipeline.id, NewPipelineRun(1))
    await advance_pipelines(context, ada.pool)
    async with house.worker() as worker:
        await deliver(worker)
    await advance_pipelines(context, ada.pool)
    path = f"/api/pipeline-runs/{run.id}"
    (candidate,) = (await api.get(f"{path}/candidates")).json()["candidates"]
    ahead.by = timedelta(days=29)
    assert (await api.patch(path, json={"variables": {"x": 1}})).status_code == 200
    ahead.by = timedelta(days=31)
    await expire_all(ada.plane)
    found = (await api.get(f"{path}/candidates/{candidate['id']}")).json()
    assert found["url"]
    ahead.by = timedelta(days=60)
    await expire_all(ada.plane)
    found = (await api.get(f"{path}/candidates/{candidate['id']}")).json()
    assert found["url"] is None
