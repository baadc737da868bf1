"""What the gateway says about itself: models and devices of online workers, and what an editor asks at its start."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.server.gateway import GatewayClients, clients_of

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.gateway.inventory import folder_of

FACTS: dict[str, Any] = {
    "kind": "ComfyUI",
    "gpu": "NVIDIA L4",
    "gpu_memory_bytes": 24 * 1024**3,
    "node_types": ["CheckpointLoaderSimple", "LoraLoader"],
    "model_files": {"CheckpointLoaderSimple.ckpt_name": ["b.safetensors", "a.safetensors"]},
}
OTHER_FACTS: dict[str, Any] = {
    "kind": "ComfyUI",
    "node_types": ["CheckpointLoaderSimple", "LoraLoader"],
    "model_files": {
        "CheckpointLoaderSimple.ckpt_name": ["c.safetensors"],
        "LoraLoader.lora_name": ["sub/x.safetensors"],
    },
}


@pytest.fixture
async def setup(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(sqlite_databases, tmp_path) as plane, fleet_setup_on(plane) as setup:
        yield setup


@pytest.fixture
async def clients(setup: FleetSetup) -> AsyncIterator[GatewayClients]:
    async with clients_of(setup.plane) as clients:
        yield clients


@pytest.fixture
async def client(clients: GatewayClients) -> httpx.AsyncClient:
    return await clients.new_client()


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/embeddings", []),
        ("/extensions", []),
        ("/i18n", {}),
        ("/workflow_templates", {}),
        ("/global_subgraphs", {}),
        ("/global_subgraphs/x", None),
        ("/node_replacements", {}),
        ("/models/checkpoints", []),
        ("/experiment/models/loras", []),
    ],
)
async def test_what_a_fleet_does_not_have_is_empty(
    client: httpx.AsyncClient, path: str, answer: object
) -> None:
    for prefix in ("", "/api"):
        found = await client.get(prefix + path)
        assert (found.status_code, found.json()) == (200, answer)


@pytest.mark.parametrize(
    "path",
    [
        "/models/nope",
        "/experiment/models/nope",
        "/view_metadata/checkpoints?filename=a.safetensors",
        "/manager/version",
        "/internal/nope",
    ],
)
async def test_what_is_unknown_is_not_found(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


async def test_logs_are_empty_and_can_be_subscribed_to(client: httpx.AsyncClient) -> None:
    assert (await client.get("/internal/logs")).json() == ""
    assert (await client.get("/internal/logs/raw")).json()["entries"] == []
    body = {"clientId": "a", "enabled": True}
    assert (await client.patch("/internal/logs/subscribe", json=body)).status_code == 200
    folders = (await client.get("/internal/folder_paths")).json()
    assert folders["checkpoints"] == []


async def test_features_tell_how_much_may_be_uploaded(
    client: httpx.AsyncClient, setup: FleetSetup
) -> None:
    features = (await client.get("/features")).json()
    assert features["max_upload_size"] == setup.plane.settings.max_upload_bytes
    assert features["supports_preview_metadata"] is True


async def test_models_and_devices_are_those_of_all_online_workers(
    client: httpx.AsyncClient, setup: FleetSetup
) -> None:
    async with setup.plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, "gpu", "production")
        await catalog.set_prompt_terms(tx, fleet, FleetPrompts(), now=setup.plane.clock())
    for name, facts in (("w1", FACTS), ("w2", OTHER_FACTS)):
        joined = await setup.register(name, backend=facts)
        assert joined.status_code == 200, joined.text
    models = await client.get("/models/checkpoints")
    assert models.json() == ["a.safetensors", "b.safetensors", "c.safetensors"]
    described = await client.get("/experiment/models/loras")
    assert described.json() == [{"name": "sub/x.safetensors", "pathIndex": 0}]
    # Where machines aren't shown, one device stands for all of them: the largest.
    stats = (await client.get("/system_stats")).json()
    assert [(each["type"], each["vram_total"]) for each in stats["devices"]] == [
        ("cuda", 24 * 1024**3)
    ]
    for tenant in (await setup.admin.get("/api/admin/tenants")).json()["tenants"]:
        path = f"/api/admin/tenants/{tenant['id']}/show-backends"
        shown = await setup.admin.put(path, json={"show_backends": True})
        assert shown.status_code == 200, shown.text
    stats = (await client.get("/system_stats")).json()
    assert stats["system"]["comfyui_version"] == "0.28.0"
    assert [(each["type"], each["vram_total"]) for each in stats["devices"]] == [
        ("cuda", 24 * 1024**3),
        ("cpu", 0),
    ]
    assert "NVIDIA L4" in stats["devices"][0]["name"]
    assert "w1" not in str(stats)


async def test_files_are_listed_newest_first_and_only_the_callers(clients: GatewayClients) -> None:
    ada, other = await clients.new_client(), await clients.new_client()
    for name in ("a.png", "b.png"):
        await ada.post("/upload/image", files={"image": (name, name.encode())})
    await ada.post("/upload/image", files={"image": ("c.png", b"c")}, data={"subfolder": "deep"})
    assert (await ada.get("/internal/files/input")).json() == ["b.png [input]", "a.png [input]"]
    assert (await ada.get("/internal/files/output")).json() == []
    assert (await ada.get("/internal/files/nope")).status_code == 400
    assert (await other.get("/internal/files/input")).json() == []


@pytest.mark.parametrize(
    ("model_input", "folder"),
    [
        ("CheckpointLoaderSimple.ckpt_name", "checkpoints"),
        ("CLIPLoader.clip_name", "text_encoders"),
        ("CLIPVisionLoader.clip_name", "clip_vision"),
        ("UnetLoaderGGUF.unet_name", "diffusion_models"),
        ("UpscaleModelLoader.model_name", "upscale_models"),
        ("SomeNode.model_name", None),
    ],
)
def test_an_input_tells_the_folder_of_its_models(model_input: str, folder: str | None) -> None:
    assert folder_of(model_input) == folder
