"""What the gateway says about itself: models and devices of online workers, and what an editor asks at its start."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.server.gateway import GatewayClients, clients_of

from comfyfleet import __version__
from comfyfleet.api.admin import FleetPrompts
from comfyfleet.api.worker import Reading
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Sighting
from comfyfleet.server.gateway.inventory import folder_of

SYSTEM: dict[str, Any] = {
    "os": "linux",
    "ram_total": 64 * 1024**3,
    "pytorch_version": "2.11.0+cu130",
    "python_version": "3.12.1",
    "comfy_package_versions": [{"name": "comfy-kitchen", "installed": "0.2.22", "required": None}],
}
FACTS: dict[str, Any] = {
    "kind": "ComfyUI",
    "version": "0.33.0",
    "system": SYSTEM,
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
    system = stats["system"]
    assert (system["comfyui_version"], system["ram_free"]) == ("0.33.0", 64 * 1024**3)
    assert {name: system[name] for name in SYSTEM} == SYSTEM
    assert system["argv"] == [f"comfyfleet {__version__}"]
    assert [(each["type"], each["vram_total"]) for each in stats["devices"]] == [
        ("cuda", 24 * 1024**3),
        ("cpu", 0),
    ]
    assert "NVIDIA L4" in stats["devices"][0]["name"]
    assert "w1" not in str(stats)


async def test_memory_that_other_programs_use_is_not_free(
    client: httpx.AsyncClient, setup: FleetSetup
) -> None:
    async with setup.plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, "gpu", "production")
        await catalog.set_prompt_terms(tx, fleet, FleetPrompts(), now=setup.plane.clock())
    await setup.register("w1", backend=FACTS)
    reading = Reading(
        gpu_memory_used_bytes=4 * 1024**3,
        gpu_memory_total_bytes=24 * 1024**3,
        memory_used_bytes=60 * 1024**3,
    )
    now = setup.plane.clock() + timedelta(minutes=5)
    async with setup.plane.central.transaction() as tx:
        (worker,) = await fleets.workers_of(tx, fleet, limit=1)
        await fleets.record_sighting(tx, worker, Sighting(reading=reading), now=now)
    stats = (await client.get("/system_stats")).json()
    assert (
        stats["devices"][0]["vram_free"] == stats["devices"][0]["torch_vram_free"] == 20 * 1024**3
    )
    assert stats["system"]["ram_free"] == 4 * 1024**3


async def test_assets_are_disabled_as_in_a_comfyui_without_them(client: httpx.AsyncClient) -> None:
    assert (await client.get("/features")).json()["assets"] is False
    for method, path in (
        ("GET", "/api/assets"),
        ("HEAD", "/api/assets/hash/x"),
        ("PUT", f"/api/assets/{uuid4()}"),
        ("GET", "/api/tags"),
    ):
        answer = await client.request(method, path)
        assert answer.status_code == 503, path
        if method != "HEAD":
            assert answer.json()["error"]["code"] == "SERVICE_DISABLED"
    assert (await client.get("/api/assets/x")).status_code == 404
    assert (await client.post("/api/assets/x")).status_code == 405


async def test_node_replacements_are_not_offered(client: httpx.AsyncClient) -> None:
    assert (await client.get("/features")).json()["node_replacements"] is False


async def test_a_socket_without_an_upgrade_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.get("/ws")
    assert (answer.status_code, answer.text[:20]) == (400, "No WebSocket UPGRADE")


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
