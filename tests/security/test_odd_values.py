"""Values that no honest client or worker sends: they are refused early or made harmless."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.server.gateway import GatewayProcess, GatewayUser

from comfyfleet.api.worker import NODE_CHARACTERS_MAX, STEPS_MAX, Progress
from comfyfleet.server.jobs.files import harmless


@pytest.fixture
async def setup(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(sqlite_databases, tmp_path) as plane, fleet_setup_on(plane) as setup:
        yield setup


def saving(prefix: Any) -> dict[str, Any]:
    empty = {"width": 8, "height": 8, "batch_size": 1, "color": 0}
    return {
        "1": {"class_type": "EmptyImage", "inputs": empty},
        "2": {
            "class_type": "SaveImage",
            "inputs": {"images": ["1", 0], "filename_prefix": prefix},
        },
    }


@pytest.mark.parametrize(
    "prefix", ["a\nb", "\x07", "a\x7f", "\x85", {"__value__": "a\rb"}], ids=repr
)
def test_a_prefix_with_control_characters_is_refused_at_once(
    gateway: GatewayProcess, user: GatewayUser, prefix: Any
) -> None:
    with user.http() as http:
        refused = http.post("/prompt", json={"prompt": saving(prefix)})
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_filename_prefix"
        assert http.post("/prompt", json={"prompt": saving("ä b/ü")}).status_code == 200


async def test_a_value_of_a_job_puts_no_control_character_into_a_prefix(setup: FleetSetup) -> None:
    file_id = await setup.upload()
    body = {"workflow_slug": "invert", "files": {"input": file_id}}
    wrong = {**body, "properties": {"prefix": "a\nb"}}
    refused = await setup.admin.post("/api/admin/jobs", json=wrong)
    assert refused.status_code == 422
    assert "control characters" in refused.text
    right = {**body, "properties": {"prefix": "a b"}}
    assert (await setup.admin.post("/api/admin/jobs", json=right)).status_code == 201


def test_a_reference_that_is_too_deep_is_no_unforeseen_error(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    deep = "[" * 100_000
    with user.http() as http:
        answer = http.post(
            "/upload/mask", files={"image": ("m.png", b"x")}, data={"original_ref": deep}
        )
    assert answer.status_code == 500  # as of any text that names no file, and as ComfyUI answers
    assert not [line for line in gateway.running.said if "RecursionError" in line]


async def test_absurd_progress_of_a_worker_is_cut(setup: FleetSetup) -> None:
    long, huge = "x" * 1_000_000, 10**300
    told = Progress.model_validate(
        json.loads(json.dumps({"node": long, "step": huge, "steps": -1}))
    )
    assert told.node == "x" * NODE_CHARACTERS_MAX
    assert (told.step, told.steps) == (None, None)
    most = Progress(node="y" * NODE_CHARACTERS_MAX, step=STEPS_MAX, steps=0)
    assert (most.node, most.step, most.steps) == ("y" * NODE_CHARACTERS_MAX, STEPS_MAX, 0)


@pytest.mark.parametrize(
    ("name", "media_type", "kept"),
    [
        ("a.html", "text/html", ("a.html.txt", "text/plain")),
        ("a.HTA", "image/png", ("a.HTA.txt", "text/plain")),
        ("a.bin", "Text/HTML; charset=x", ("a.bin.txt", "text/plain")),
        ("a.js", "application/javascript", ("a.js.txt", "text/plain")),
        ("a.svg", "image/svg+xml", ("a.svg", "image/svg+xml")),
        ("a.png", "image/png", ("a.png", "image/png")),
    ],
)
def test_a_delivered_file_is_no_program_of_the_desktop(
    name: str, media_type: str, kept: tuple[str, str]
) -> None:
    assert harmless(name, media_type) == kept


async def test_a_delivered_page_is_offered_as_text(setup: FleetSetup) -> None:
    await setup.submit()
    async with setup.worker() as worker:
        job = await worker.job()
        slot = job["outputs"][0]
        await worker.client.put(slot["url"], content=b"<script>", headers=slot["headers"])
        output = {
            "name": slot["name"],
            "size": 8,
            "content_type": "text/html",
            "filename": "a.html",
        }
        done = await worker.call_for(job, "complete", outputs=[output])
        assert done.status_code == 200, done.text
    shown = (await setup.admin.get(f"/api/admin/jobs/{job['job_id']}")).json()
    (file,) = shown["outputs"]
    assert file["content_type"] == "text/plain", shown
    assert ".html.txt" in file["url"] or file.get("filename", "").endswith(".txt")
