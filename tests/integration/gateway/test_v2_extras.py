"""What the gateway adds to Comfy API v2: addresses that jobs tell, workflows of the editor; and its limits."""

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from tests.integration.gateway import test_v2_jobs
from tests.integration.gateway.test_v2_assets import png, reference, upload
from tests.integration.gateway.test_v2_jobs import error_of
from tests.integration.maintenance.test_webhook_sweep import Detour, open_shop, public
from tests.support.backends.prompts import new_color, picture, slow
from tests.support.databases.factory import Databases
from tests.support.server.gateway import GatewayInProcess, GatewayUser, gateway_on

import comfyfleet.server.http.gateway
from comfyfleet.api.webhooks import is_signature_valid
from comfyfleet.server.db.tenant_tables import ai_jobs
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE
from comfyfleet.server.maintenance.sweeps import deliver_due
from comfyfleet.transport.fetch import PublicHttpClient

TEMPLATES = Path(comfyfleet.server.http.gateway.__file__).parent / "editor_files" / "templates"
SHOP = "https://shop.example/hook"


async def submit(http: httpx.AsyncClient, workflow: Any, **more: Any) -> dict[str, Any]:
    answer = await http.post("/api/v2/jobs", json={"workflow": workflow, **more})
    assert answer.status_code == 201, answer.text
    job: dict[str, Any] = answer.json()
    return job


async def wait(http: httpx.AsyncClient, job: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while job["status"] in ("queued", "running"):
            await asyncio.sleep(0.05)
            job = (await http.get(job["urls"]["self"])).json()
    return job


async def test_a_job_tells_its_end_to_the_address_that_it_names(
    databases: Databases, tmp_path: Path
) -> None:
    async with open_shop() as shop, gateway_on(databases, tmp_path) as server:
        outward = PublicHttpClient(resolver=public, transport=Detour(shop))
        plane = replace(server.plane, outward=outward)
        user = await server.new_user()
        async with user.http_async() as http:
            silent = await submit(http, picture(new_color()))
            job = await submit(http, picture(new_color()), webhook_url=SHOP)
            for each in (silent, job):
                assert (await wait(http, each))["status"] == "succeeded"
            await deliver_due(plane)
            assert (await http.get("/api/webhooks")).json()["webhooks"] == []
        await outward.aclose()
    ((signature, body),) = shop.got
    message = json.loads(body)
    assert message["data"]["prompt_id"] == job["id"]
    assert message["data"]["status"] == "completed"
    stamp = int(signature.split("t=")[1].split(",")[0])
    assert is_signature_valid(job["webhook"]["secret"], body, signature, now=stamp)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://shop.example/",
        "http://127.0.0.1/",
        "https://10.0.0.1/x",
        "nonsense",
        5,
        # Spellings of loopback, which the system's resolver understands.
        "http://localhost/",
        "http://x.localhost/",
        "http://0/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://017700000001/",
    ],
)
def test_an_address_that_is_not_public_is_refused(user: GatewayUser, url: object) -> None:
    with user.http() as http:
        body = {"workflow": picture(new_color()), "webhook_url": url}
        answer = http.post("/api/v2/jobs", json=body)
        assert error_of(answer) == (422, "invalid_request")
        assert http.get("/api/v2/jobs").json()["jobs"] == []


def test_a_workflow_as_the_editor_saves_it_runs(user: GatewayUser) -> None:
    document = json.loads((TEMPLATES / "comfyfleet_colour.json").read_text())
    with user.http() as http:
        job = test_v2_jobs.submit(http, document)
        assert test_v2_jobs.wait(http, job)["status"] == "succeeded"
        told = http.get(f"/api/v2/jobs/{job['id']}/workflow").json()
        assert told == {"workflow": document, "format": "save"}
        history = http.get(f"/history/{job['id']}").json()
    _, _, prompt, extra_data, _ = history[job["id"]]["prompt"]
    assert all("class_type" in node for node in prompt.values())
    assert extra_data["extra_pnginfo"]["workflow"] == document


def test_a_workflow_of_the_editor_loads_assets(user: GatewayUser) -> None:
    document = json.loads((TEMPLATES / "comfyfleet_negative.json").read_text())
    with user.http() as http:
        asset = upload(http, png(0x00FF00)).json()
        document["nodes"][0]["widgets_values"][0] = reference(asset)
        job = test_v2_jobs.wait(http, test_v2_jobs.submit(http, document))
        assert job["status"] == "succeeded", job


def test_a_workflow_of_the_editor_with_unknown_nodes_is_refused(user: GatewayUser) -> None:
    document = json.loads((TEMPLATES / "comfyfleet_colour.json").read_text())
    document["nodes"][0]["type"] = "NobodyHasThis"
    with user.http() as http:
        answer = http.post("/api/v2/jobs", json={"workflow": document})
    assert error_of(answer) == (422, "invalid_workflow")
    assert "NobodyHasThis" in answer.text


async def test_a_key_is_free_again_after_a_day(databases: Databases, tmp_path: Path) -> None:
    async with gateway_on(databases, tmp_path) as server:
        user = await server.new_user()
        key = {"Idempotency-Key": "once"}
        async with user.http_async() as http:
            for status in (201, 422):
                body = {"workflow": picture(new_color())}
                answer = await http.post("/api/v2/jobs", json=body, headers=key)
                assert answer.status_code == status
            await make_older(server, user, hours=25)
            answer = await http.post("/api/v2/jobs", json=body, headers=key)
            assert answer.status_code == 201


async def make_older(server: GatewayInProcess, user: GatewayUser, *, hours: int) -> None:
    async with server.plane.context.tenant_transaction(user.tenant_id) as tx:
        rows = (await tx.execute(select(ai_jobs.c.id, ai_jobs.c.submitted_at))).all()
        for row in rows:
            older = row.submitted_at - timedelta(hours=hours)
            await tx.execute(
                update(ai_jobs).where(ai_jobs.c.id == row.id).values(submitted_at=older)
            )


async def test_one_key_at_once_is_one_job(databases: Databases, tmp_path: Path) -> None:
    async with gateway_on(databases, tmp_path) as server:
        user = await server.new_user()
        key = {"Idempotency-Key": "at once"}
        async with user.http_async() as http:
            answers = await asyncio.gather(
                *(
                    http.post("/api/v2/jobs", json={"workflow": picture(color)}, headers=key)
                    for color in range(8)
                )
            )
            assert sorted(each.status_code for each in answers) == [201] + [422] * 7
            assert len((await http.get("/api/v2/jobs")).json()["jobs"]) == 1


async def test_a_full_queue_says_when_to_come_again(databases: Databases, tmp_path: Path) -> None:
    async with gateway_on(databases, tmp_path, max_queued_per_tenant=1) as server:
        user = await server.new_user()
        async with user.http_async() as http:
            answers = [
                await http.post("/api/v2/jobs", json={"workflow": slow(new_color())})
                for _ in range(5)
            ]
            refused = [each for each in answers if each.status_code != 201]
            assert refused
            for each in refused:
                assert each.status_code == 429
                assert each.json()["error"]["code"] == "queue_full"
                assert int(each.headers["retry-after"]) > 0


async def test_too_few_tokens_are_told_before_anything_is_queued(
    databases: Databases, tmp_path: Path
) -> None:
    async with gateway_on(databases, tmp_path) as server:
        await set_price(server, 5)
        poor, rich = await server.new_user(), await server.new_user(tokens=7)
        body = {"workflow": picture(new_color())}
        async with poor.http_async() as http:
            answer = await http.post("/api/v2/jobs", json=body)
            assert error_of(answer) == (402, "insufficient_credits")
            assert answer.json()["error"]["details"]["required_tokens"] == 5
            assert (await http.get("/api/v2/jobs")).json()["jobs"] == []
        async with rich.http_async() as http:
            job = await submit(http, picture(new_color()))
            assert (await wait(http, job))["status"] == "succeeded"
            assert (await http.post("/api/v2/jobs", json=body)).status_code == 402


async def set_price(server: GatewayInProcess, tokens: int) -> None:
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    path = f"{server.url}/api/admin/fleets/{FLEET}/{STAGE}/prompts"
    async with httpx.AsyncClient(headers=headers) as admin:
        terms = (await admin.get(path)).json()
        terms.pop("warning")
        answer = await admin.put(path, json={**terms, "price_tokens": tokens})
        assert answer.status_code == 200, answer.text
    # What a fleet offers is read again after a moment.
    user = await server.new_user()
    body = {"workflow": picture(0)}
    async with user.http_async() as http:
        for _ in range(150):
            if (await http.post("/api/v2/jobs", json=body)).status_code != 201:
                return
            await asyncio.sleep(0.2)
