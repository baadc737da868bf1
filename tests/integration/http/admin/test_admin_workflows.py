"""Workflows through the operators' API."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.jobs.workflows import OBJECT_INFO, PROMPT
from tests.support.server.object_infos import store_object_info

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets

EXAMPLES = Path(__file__).parents[4] / "examples" / "workflows"
PROPERTIES = [
    {"name": "input", "type": "image", "binding": "3.image"},
    {"name": "what", "type": "text", "placeholder": "__WHAT__", "default": "a cat"},
    {"name": "steps", "type": "integer", "placeholder": "__STEPS__", "default": 20, "max": 50},
    {"name": "seed", "type": "seed", "binding": "5.seed"},
]


async def register(client: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    body = {
        "slug": "photo",
        "document": PROMPT,
        "properties": PROPERTIES,
        "output_node_id": "9",
        **changes,
    }
    return await client.post("/api/admin/workflows", json=body)


async def report_object_info(client: httpx.AsyncClient, plane: ControlPlane) -> None:
    await client.post("/api/admin/fleets", json={"slug": "gpus"})
    key, content_hash = await store_object_info(plane.store, OBJECT_INFO)
    async with plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, "gpus", "production")
        await fleets.set_object_info(tx, fleet, key=key, content_hash=content_hash)


async def test_a_prompt_is_registered_and_shown_with_what_it_needs(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await report_object_info(client, plane)
    answer = await register(client, price_tokens=5, required_capabilities=["big"])
    assert answer.status_code == 201
    assert answer.json() == {"slug": "photo", "version": 1, "warnings": [], "notes": []}
    shown = (await client.get("/api/admin/workflows/photo")).json()
    assert shown["models"][0] == {
        "input": "CheckpointLoaderSimple.ckpt_name",
        "file": "sdxl.safetensors",
    }
    assert (shown["price_tokens"], shown["run_limit_seconds"]) == (5, 3600)
    steps = next(each for each in shown["properties"] if each["name"] == "steps")
    assert (steps["minimum"], steps["maximum"], steps["required"]) == (1, 50, False)
    assert (await client.get("/api/admin/workflows/photo/document")).json() == PROMPT


@pytest.mark.parametrize("name", ["soften", "negative", "video"])
async def test_an_editors_workflow_is_registered_with_the_engine_alone(
    client: httpx.AsyncClient, name: str
) -> None:
    document = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    answer = await register(
        client, slug=name, document=document, properties=[], output_node_id=None
    )
    assert answer.json() == {"slug": name, "version": 1, "warnings": [], "notes": []}
    assert (await client.get(f"/api/admin/workflows/{name}")).json()["kind"] == "workflow"


async def test_the_next_version_keeps_the_terms_and_the_old_one_can_come_back(
    client: httpx.AsyncClient,
) -> None:
    await register(client, price_tokens=5)
    assert (await register(client)).json()["version"] == 2
    shown = (await client.get("/api/admin/workflows/photo")).json()
    assert (shown["version"], shown["versions"], shown["price_tokens"]) == (2, [2, 1], 5)
    back = await client.post("/api/admin/workflows/photo/activate", json={"version": 1})
    assert back.json()["version"] == 1
    none = await client.post("/api/admin/workflows/photo/activate", json={"version": 9})
    assert none.status_code == 404


async def test_a_draft_is_tried_by_operators_and_used_by_nobody_else(
    client: httpx.AsyncClient,
) -> None:
    await register(client)
    made = await register(client, properties=[], is_draft=True)
    assert (made.status_code, made.json()["version"]) == (201, 2)
    shown = (await client.get("/api/admin/workflows/photo")).json()
    assert (shown["version"], shown["versions"]) == (1, [2, 1])
    assert shown["registered_at"].keys() == {"1", "2"}
    assert shown["registered_at"]["1"] <= shown["registered_at"]["2"]
    assert shown["properties"]
    draft = (await client.get("/api/admin/workflows/photo?version=2")).json()
    assert draft["properties"] == []
    job = await client.post("/api/admin/jobs", json={"workflow_slug": "photo", "version": 2})
    assert job.status_code == 201, job.text
    details = (await client.get(f"/api/admin/jobs/{job.json()['ids'][0]}/details")).json()
    assert details["version"] == 2


async def test_a_workflow_is_held_back_and_let_go(client: httpx.AsyncClient) -> None:
    await register(client)
    for act, field, value in (
        ("pause", "is_paused", True),
        ("resume", "is_paused", False),
        ("deactivate", "is_active", False),
        ("activate", "is_active", True),
    ):
        answer = await client.post(f"/api/admin/workflows/photo/{act}")
        assert (answer.status_code, answer.json()[field]) == (200, value)
        (entry,) = (await client.get(f"/api/admin/audit?action={act}")).json()["entries"]
        assert (entry["subject"], entry["actor"]) == ("workflow:photo", "admin")
    changed = await client.patch("/api/admin/workflows/photo", json={"run_limit_seconds": 60})
    assert changed.json()["run_limit_seconds"] == 60


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"properties": [{"name": "x", "type": "text", "binding": "77.text"}]}, "77"),
        ({"properties": [PROPERTIES[1], PROPERTIES[1]]}, "what"),
        ({"properties": [{"name": "x", "type": "words", "binding": "4.text"}]}, "unknown type"),
        ({"output_node_id": "77"}, "77"),
        ({"document": {"no": "document"}}, "neither a workflow nor a prompt"),
        ({"slug": "No Good"}, "slug"),
        ({"price_tokens": -1}, "price_tokens"),
        ({"fleet": "nowhere/production"}, "nowhere/production"),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_written(
    client: httpx.AsyncClient, changes: dict[str, Any], named: str
) -> None:
    answer = await register(client, **changes)
    assert answer.status_code == 422
    assert named in answer.json()["error"]["message"]
    assert (await client.get("/api/admin/workflows")).json() == {"workflows": []}
    assert (await client.get("/api/admin/audit")).json()["entries"] == []


async def test_fields_of_a_property_that_nobody_knows_are_told(client: httpx.AsyncClient) -> None:
    wrong = {"name": "kind", "type": "text", "binding": "9.filename_prefix", "defualt": "x"}
    answer = await register(client, properties=[wrong])
    assert "defualt" in answer.json()["warnings"][0]


async def test_an_unknown_workflow_is_not_found(client: httpx.AsyncClient) -> None:
    assert (await client.get("/api/admin/workflows/nowhere")).status_code == 404
    assert (await client.post("/api/admin/workflows/nowhere/pause")).status_code == 404
