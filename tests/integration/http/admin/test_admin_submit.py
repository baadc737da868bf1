"""What a job pins of its workflow when an operator submits it."""

from typing import Any
from uuid import UUID

import httpx
from tests.support.jobs.workflows import OBJECT_INFO
from tests.support.server.object_infos import store_object_info

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.jobs import submit
from comfyfleet.server.tenants.model import DEFAULT_TENANT

WORKFLOW = {
    "nodes": [
        {
            "id": 1,
            "type": "CLIPTextEncode",
            "inputs": [],
            "outputs": [],
            "widgets_values": ["{{what}} in {oil|chalk|ink|wax}"],
        },
        {
            "id": 2,
            "type": "SaveImage",
            "inputs": [{"name": "images", "type": "IMAGE", "link": 1}],
            "outputs": [],
            "widgets_values": ["%date:yyyy%/out"],
        },
        {
            "id": 3,
            "type": "LoadImage",
            "inputs": [],
            "outputs": [{"name": "IMAGE", "type": "IMAGE", "links": [1]}],
            "widgets_values": ["cat.png", "image"],
        },
    ],
    "links": [[1, 3, 0, 2, 0, "IMAGE"]],
    "version": 0.4,
}
PROPERTIES = [{"name": "what", "type": "text", "placeholder": "{{what}}"}]


async def a_fleet_with_workflow(client: httpx.AsyncClient, plane: ControlPlane) -> None:
    await client.post("/api/admin/fleets", json={"slug": "gpus"})
    key, content_hash = await store_object_info(plane.store, OBJECT_INFO)
    async with plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, "gpus", "production")
        await fleets.set_object_info(tx, fleet, key=key, content_hash=content_hash)
    await register(client)
    await client.put(
        "/api/admin/fleets/gpus/production/workflows", json={"workflow_slugs": ["words"]}
    )


async def register(client: httpx.AsyncClient) -> None:
    body = {"slug": "words", "document": WORKFLOW, "properties": PROPERTIES}
    assert (await client.post("/api/admin/workflows", json=body)).status_code == 201


async def submitted(
    client: httpx.AsyncClient, plane: ControlPlane, **body: Any
) -> list[dict[str, Any]]:
    answer = await client.post("/api/admin/jobs", json={"workflow_slug": "words", **body})
    assert answer.status_code == 201, answer.text
    ids = [UUID(each) for each in answer.json()["ids"]]
    jobs = [await submit.get_job(plane.context, DEFAULT_TENANT, each) for each in ids]
    return [dict(job.spec.prompt) for job in jobs]


async def test_words_are_chosen_anew_for_each_job_but_never_those_of_the_user(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await a_fleet_with_workflow(client, plane)
    prompts = await submitted(client, plane, properties={"what": "{a|b} // c"}, count=40)
    texts = {prompt["1"]["inputs"]["text"] for prompt in prompts}
    assert len(texts) > 1
    assert texts <= {f"{{a|b}} // c in {word}" for word in ("oil", "chalk", "ink", "wax")}
    year = plane.clock().year
    assert prompts[0]["2"]["inputs"]["filename_prefix"] == f"{year}/out"


async def test_a_job_keeps_the_version_that_it_was_submitted_with(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await a_fleet_with_workflow(client, plane)
    answer = await client.post(
        "/api/admin/jobs", json={"workflow_slug": "words", "properties": {"what": "x"}}
    )
    (job_id,) = answer.json()["ids"]
    await register(client)
    assert (await client.get(f"/api/admin/jobs/{job_id}")).json()["version"] == 1


async def test_a_value_that_does_not_fit_is_named_and_nothing_is_queued(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await a_fleet_with_workflow(client, plane)
    for wrong, named in (({"what": 5}, "what"), ({}, "what"), ({"who": "x"}, "who")):
        answer = await client.post(
            "/api/admin/jobs", json={"workflow_slug": "words", "properties": wrong}
        )
        assert (answer.status_code, answer.json()["error"]["details"]["property"]) == (422, named)
    assert (await client.get("/api/admin/dispatches")).json()["dispatches"] == []
