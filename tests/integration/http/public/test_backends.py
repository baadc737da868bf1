"""What customers see of machines: everything, or only fleets; and never fleets of other tenants."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.graphs.runner import read_outbox

GB = 1024**3
GPU = {"gpu": "NVIDIA L4", "gpu_memory_bytes": 24 * GB, "node_types": ["EmptyImage", "SaveImage"]}
LARGE = {**GPU, "gpu": "NVIDIA H200", "gpu_memory_bytes": 139 * GB}
READING = {"gpu_memory_total_bytes": 24 * GB, "gpu_memory_used_bytes": 4 * GB}
GRAPH = {
    "name": "one",
    "nodes": [
        {"id": "draw", "type": "workflow", "workflow": "draw"},
        {"id": "result", "type": "output"},
    ],
    "connections": [{"from": "draw.output", "to": "result.value"}],
}


@pytest.fixture
async def setup(databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as setup:
        yield setup


async def show(setup: EffectSetup, tenant_id: UUID, setting: bool | None) -> None:
    admin = setup.fleet_setup.admin
    path = f"/api/admin/tenants/{tenant_id}/show-backends"
    answer = await admin.put(path, json={"show_backends": setting})
    assert answer.status_code == 200, answer.text
    assert answer.json()["show_backends"] is setting


async def backends(customer: Customer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await customer.get("backends"))["backends"]
    return found


async def open_fleet(setup: EffectSetup, slug: str, worker_id: str) -> None:
    """A fleet that takes only prompts, with one worker."""
    admin = setup.fleet_setup.admin
    made = await admin.post("/api/admin/fleets", json={"slug": slug, "stage": "production"})
    async with setup.plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, slug, "production")
        await catalog.set_prompt_terms(tx, fleet, FleetPrompts(), now=setup.plane.clock())
    joined = await setup.fleet_setup.register(
        worker_id, fleet_slug=slug, secret=made.json()["secret"], backend=GPU
    )
    assert joined.status_code == 200, joined.text


async def restrict(setup: EffectSetup, tenant_id: UUID, *names: str) -> None:
    admin = setup.fleet_setup.admin
    answer = await admin.put(f"/api/admin/tenants/{tenant_id}/prompts", json={"fleets": names})
    assert answer.status_code == 200, answer.text


async def test_machines_are_listed_with_their_state_queue_and_memory(setup: EffectSetup) -> None:
    ada = await setup.customer()
    await show(setup, ada.tenant_id, True)
    async with setup.fleet_setup.worker("w1", backend=GPU) as worker:
        await setup.fleet_setup.register("w2", backend=LARGE)
        await ada.job(setup.draw)
        job = await worker.job()
        held = {name: job[name] for name in ("dispatch_id", "lease_token")}
        await worker.poll(backend_problem="down", current_load=1, held=[held], reading=READING)
        found = await backends(ada)
    assert found[0] == {
        "name": "worker:w1",
        "fleet": "gpu/production",
        "is_online": False,
        "queue_depth": 1,
        "device": "NVIDIA L4",
        "memory_total_bytes": 24 * GB,
        "memory_free_bytes": 20 * GB,
    }
    assert (found[1]["name"], found[1]["is_online"]) == ("worker:w2", True)
    assert (found[1]["memory_total_bytes"], found[1]["memory_free_bytes"]) == (139 * GB, None)


async def test_where_they_are_not_shown_fleets_are_listed(setup: EffectSetup) -> None:
    ada = await setup.customer()
    for name, facts in (("w1", GPU), ("w2", LARGE)):
        await setup.fleet_setup.register(name, backend=facts)
    (fleet,) = await backends(ada)
    assert (fleet["name"], fleet["is_online"]) == ("fleet:gpu/production", True)
    assert fleet["memory_total_bytes"] == 139 * GB
    assert "w1" not in str(fleet)
    assert "NVIDIA" not in str(fleet)


@pytest.mark.parametrize("shown", [True, False])
async def test_only_fleets_that_the_caller_may_use_are_listed(
    setup: EffectSetup, shown: bool
) -> None:
    """Another tenant's fleet, one that runs nothing on offer, and one of another stage stay hidden."""
    ada, bob = await setup.customer(), await setup.customer()
    for customer in (ada, bob):
        await show(setup, customer.tenant_id, shown)
    await setup.fleet_setup.register("w1", backend=GPU)
    await open_fleet(setup, "of-bob", "bobs")
    await open_fleet(setup, "of-ada", "adas")
    admin = setup.fleet_setup.admin
    await admin.post("/api/admin/fleets", json={"slug": "unused", "stage": "production"})
    assert "unused/production" not in {each["fleet"] for each in await backends(ada)}
    await restrict(setup, ada.tenant_id, "of-ada/production")
    await restrict(setup, bob.tenant_id, "of-bob/production", "gpu/production")
    assert {each["fleet"] for each in await backends(ada)} == {"of-ada/production"}
    assert {each["fleet"] for each in await backends(bob)} == {
        "gpu/production",
        "of-bob/production",
    }
    assert "adas" not in str(await backends(bob))
    assert "bobs" not in str(await backends(ada))


async def test_a_running_node_names_its_backend_and_a_failed_one_its_traceback_where_shown(
    setup: EffectSetup,
) -> None:
    ada = await setup.customer()
    async with setup.fleet_setup.worker("w1", backend=GPU) as worker:
        made = await ada.client.post("/api/graphs", json=GRAPH)
        assert made.status_code == 201, made.text
        started = await ada.client.post(f"/api/graphs/{made.json()['id']}/runs", json={})
        assert started.status_code == 201, started.text
        path = f"graph-runs/{started.json()['id']}"
        job = await worker.job()
        assert (await worker.call_for(job, "heartbeat", started=True)).status_code == 200
        for shown, name in ((True, "worker:w1"), (False, None)):
            await show(setup, ada.tenant_id, shown)
            run = await ada.get(path)
            (running,) = run["progress"]["running_nodes"]
            assert running["backend_id"] == name
            assert run["executions"][0]["backend"] == name
        error = {"exception_type": "ValueError", "exception_message": "no", "traceback": ["line 7"]}
        assert (await worker.call_for(job, "fail", error=error)).status_code == 200
        await read_outbox(setup.plane.graphs, setup.plane.pools["main"])
    for shown in (True, False):
        await show(setup, ada.tenant_id, shown)
        (execution,) = (
            each for each in (await ada.get(path))["executions"] if each["node"] == "draw"
        )
        assert ("line 7" in (execution["traceback"] or "")) is shown
