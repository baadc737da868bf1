"""Fleets through the operators' API."""

from typing import Any

import httpx
import pytest
from tests.support.jobs.fleets import a_worker
from tests.support.jobs.workflows import PROMPT
from tests.support.server.control_plane import client_of

from comfyfleet.api.worker import BackendFacts
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.switch_costs import ModelChange, RunKind, TimedRun

FLEET = {"slug": "gpus", "stage": "production"}
ALL = BackendFacts(node_types=tuple(sorted({node["class_type"] for node in PROMPT.values()})))


async def make_fleet(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.post("/api/admin/fleets", json=FLEET)
    assert answer.status_code == 201
    made: dict[str, Any] = answer.json()
    return made


async def make_workflow(client: httpx.AsyncClient, slug: str = "photo", **more: Any) -> None:
    body = {"slug": slug, "document": PROMPT, "output_node_id": "9", **more}
    assert (await client.post("/api/admin/workflows", json=body)).status_code == 201


async def join(plane: ControlPlane, worker_id: str, backend: BackendFacts | None = None) -> None:
    async with plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, "gpus", "production")
        await a_worker(tx, fleet, worker_id, backend=backend, now=plane.clock())


async def assign(client: httpx.AsyncClient, *slugs: str) -> httpx.Response:
    return await client.put(
        "/api/admin/fleets/gpus/production/workflows", json={"workflow_slugs": [*slugs]}
    )


@pytest.mark.parametrize("key", [None, "not-the-admin-key"])
async def test_without_the_admin_key_nothing_is_told(plane: ControlPlane, key: str | None) -> None:
    async with client_of(plane, key) as stranger:
        for path in ("fleets", "workflows", "workers", "tenants", "audit"):
            assert (await stranger.get(f"/api/admin/{path}")).status_code == 401
        assert (await stranger.post("/api/admin/fleets", json=FLEET)).status_code == 401


async def test_a_fleets_secret_is_shown_once_and_stored_hashed(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    made = await make_fleet(client)
    assert made.keys() == {"slug", "stage", "secret", "join"}
    async with plane.central.read() as tx:
        fleets.check_secret(await fleets.get_fleet(tx, "gpus", "production"), made["secret"])
    for path in ("fleets", "fleets/gpus/production", "audit"):
        assert made["secret"] not in (await client.get(f"/api/admin/{path}")).text


async def test_a_fleet_is_made_once(client: httpx.AsyncClient) -> None:
    await make_fleet(client)
    again = await client.post("/api/admin/fleets", json=FLEET)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
    bad = await client.post("/api/admin/fleets", json={"slug": "No Good"})
    assert (bad.status_code, bad.json()["error"]["details"]["field"]) == (422, "slug")


async def test_a_secret_is_rotated_and_a_cap_set(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    made = await make_fleet(client)
    rotated = (await client.post("/api/admin/fleets/gpus/production/rotate-secret")).json()
    assert rotated["secret"] != made["secret"]
    capped = await client.put("/api/admin/fleets/gpus/production/cap", json={"max_workers": 3})
    assert capped.json()["max_workers"] == 3
    shown = (await client.get("/api/admin/fleets")).json()["fleets"]
    assert [(each["slug"], each["max_workers"], each["workers"]) for each in shown] == [
        ("gpus", 3, 0)
    ]
    missing = await client.put("/api/admin/fleets/nowhere/x/cap", json={"max_workers": 3})
    assert missing.status_code == 404


async def test_with_no_worker_known_an_assignment_is_taken_with_a_warning(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await make_fleet(client)
    await make_workflow(client)
    await join(plane, "silent")
    answer = await assign(client, "photo")
    assert answer.status_code == 200
    assert (answer.json()["workflows"], answer.json()["added"]) == (["photo"], ["photo"])
    assert "it is unknown whether photo" in answer.json()["warnings"][0]


async def test_with_workers_known_and_none_able_it_is_refused_with_what_is_missing(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await make_fleet(client)
    await make_workflow(client, required_capabilities=["big"])
    await join(
        plane,
        "poor",
        BackendFacts(
            node_types=("SaveImage", "LoadImage", "CLIPTextEncode", "CheckpointLoaderSimple"),
            model_files={"CheckpointLoaderSimple.ckpt_name": ("other.safetensors",)},
        ),
    )
    answer = await assign(client, "photo")
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "refused"
    assert error["details"]["missing"] == {
        "node_types": ["KSampler", "LoraLoader"],
        "models": ["sdxl.safetensors"],
        "capabilities": ["big"],
    }
    assert "node KSampler" in error["message"]
    shown = (await client.get("/api/admin/fleets/gpus/production")).json()
    assert shown["workflows"] == []


async def test_one_able_worker_is_enough_and_the_others_are_told(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await make_fleet(client)
    await make_workflow(client)
    await join(plane, "able", ALL)
    await join(plane, "poor", BackendFacts(node_types=("SaveImage",)))
    (warning,) = (await assign(client, "photo")).json()["warnings"]
    assert "1 of 2 workers of gpus/production can't run photo" in warning
    assert "poor lacks node" in warning
    workers = (await client.get("/api/admin/workflows/photo/workers")).json()["workers"]
    assert {each["worker_id"]: each["can_run"] for each in workers} == {
        "able": True,
        "poor": False,
    }
    assert (await client.get("/api/admin/workflows/photo")).json()["fleets"] == ["gpus/production"]


async def test_an_assignment_replaces_the_one_before(client: httpx.AsyncClient) -> None:
    await make_fleet(client)
    await make_workflow(client, "one")
    await make_workflow(client, "two")
    await assign(client, "one")
    answer = (await assign(client, "two")).json()
    assert (answer["workflows"], answer["removed"]) == (["two"], ["one"])
    unknown = await assign(client, "nowhere")
    assert (unknown.status_code, unknown.json()["error"]["details"]["unknown"]) == (
        422,
        ["nowhere"],
    )


async def test_a_fleet_shows_what_switches_of_its_models_cost(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await make_fleet(client)
    await make_workflow(client)
    async with plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, "gpus", "production")
        for model, switch in (("flux", 1.43), ("sdxl", 2.4)):
            kind = RunKind(fleet.id, model, 1)
            told = {ModelChange.SAME: 1.4, ModelChange.SWITCHED: switch}
            runs = [TimedRun(kind, *each) for each in told.items() for _ in range(9)]
            await dispatch.add_runs(tx, runs, now=plane.clock())
    shown = (await client.get("/api/admin/fleets/gpus/production")).json()["model_switches"]
    assert shown == [
        {"model": "flux", "seconds": 0.03, "run_seconds": 1.4, "runs": 9, "is_free": True},
        {"model": "sdxl", "seconds": 1.0, "run_seconds": 1.4, "runs": 9, "is_free": False},
    ]
    await plane.queue.learn()
    metrics = (await client.get("/metrics")).text
    assert (
        'comfyfleet_model_switch_seconds{fleet="gpus",model="sdxl",stage="production"} 1.0'
        in metrics
    )
