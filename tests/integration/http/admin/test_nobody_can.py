"""Operators are told when nobody, or not everybody, can run a workflow; and what they misspelt."""

import io
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from PIL import Image
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import PROMPT, FleetSetup, fleet_setup_on

from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.maintenance.embedded_fleet import AutoAssign
from comfyfleet.server.metrics import DRAINING, IDLE, OFFLINE, read_figures

ALL_TYPES = ["LoadImage", "ImageInvert", "SaveImage"]


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


async def test_assigning_names_the_workers_that_can_not_run_it(fleet_setup: FleetSetup) -> None:
    await fleet_setup.assign()
    await fleet_setup.register("good", backend={"node_types": ALL_TYPES})
    await fleet_setup.register("bad", backend={"node_types": ["LoadImage", "SaveImage"]})
    assigned = (await fleet_setup.assign("invert")).json()
    assert assigned["warnings"] == [
        "1 of 2 workers of gpu/production can't run invert: bad lacks node ImageInvert."
    ]
    again = (await fleet_setup.register_workflow("invert")).json()
    assert "bad lacks node ImageInvert" in again["warnings"][0]


async def test_a_capability_that_no_worker_has_is_refused_of_every_fleet(
    fleet_setup: FleetSetup,
) -> None:
    await fleet_setup.register_workflow("large", required_capabilities=["80gb"])
    await fleet_setup.register("w1")
    refused = await fleet_setup.assign("invert", "large")
    assert refused.status_code == 422
    assert "missing capability 80gb" in refused.text


async def test_what_is_assigned_by_itself_can_be_run(fleet_setup: FleetSetup) -> None:
    await fleet_setup.assign()
    await fleet_setup.register_workflow("large", required_capabilities=["80gb"])
    sweep = AutoAssign(fleet_setup.plane, "gpu", "production")
    await fleet_setup.register("w1", backend={"node_types": ALL_TYPES})
    await fleet_setup.register("w2", backend={"node_types": ["LoadImage"]})
    await sweep()
    async with fleet_setup.plane.central.read() as tx:
        fleet = await fleets.get_fleet(tx, "gpu", "production")
        assert [each.slug for each in await fleets.assigned_to(tx, fleet)] == ["invert"]
    await fleet_setup.register("w3", backend={"node_types": ALL_TYPES}, capabilities=["80gb"])
    await sweep()
    async with fleet_setup.plane.central.read() as tx:
        assert len(await fleets.assigned_to(tx, fleet)) == 2


async def test_of_workers_that_can_run_the_same_one_is_looked_at(fleet_setup: FleetSetup) -> None:
    await fleet_setup.register("w1", backend={"node_types": ALL_TYPES})
    await fleet_setup.register("w2", backend={"node_types": ALL_TYPES})
    await fleet_setup.register("w3", backend={"node_types": ALL_TYPES}, capabilities=["80gb"])
    await fleet_setup.register("w4", backend={"node_types": ["LoadImage"]})
    async with fleet_setup.plane.central.read() as tx:
        fleet = await fleets.get_fleet(tx, "gpu", "production")
        an_hour_ago = fleet_setup.plane.clock() - timedelta(hours=1)
        those = await fleets.one_of_each_kind(tx, fleet, seen_since=an_hour_ago)
        assert [each.worker_id for each in those] == ["w1", "w3", "w4"]
        assert not await fleets.one_of_each_kind(tx, fleet, seen_since=fleet_setup.plane.clock())


async def test_workers_are_counted_by_state_where_they_are_kept(fleet_setup: FleetSetup) -> None:
    for name in ("w1", "w2", "w3"):
        await fleet_setup.register(name, max_concurrency=2)
    await fleet_setup.act("workers/w3/drain")
    plane = fleet_setup.plane
    async with plane.central.read() as tx:
        now = await read_figures(tx, now=plane.clock(), offline_after_seconds=90)
        later = plane.clock() + timedelta(minutes=5)
        then = await read_figures(tx, now=later, offline_after_seconds=90)
    (fleet,) = now.fleets
    assert (fleet.workers, fleet.slots) == ({IDLE: 2, DRAINING: 1}, 4)
    assert then.fleets[0].workers == {OFFLINE: 3}


async def test_before_a_worker_has_joined_registering_is_no_reason_to_warn(
    fleet_setup: FleetSetup,
) -> None:
    prompt = {**PROMPT, "4": {"class_type": "KSampler", "inputs": {}}}
    made = (await fleet_setup.register_workflow("paint", document=prompt)).json()
    assert made["warnings"] == []
    (note,) = made["notes"]
    assert note.startswith("No worker has reported its backend's node types yet.")


async def test_submitting_says_what_is_missing_where(fleet_setup: FleetSetup) -> None:
    body = {"workflow_slug": "invert", "files": {"input": await fleet_setup.upload()}}
    made = (await fleet_setup.admin.post("/api/admin/jobs", json=body)).json()
    assert made["warnings"] == [
        "No worker has workflow invert: fleet gpu/production has no workers."
    ]


async def test_a_workflow_that_was_misspelt_is_suggested(fleet_setup: FleetSetup) -> None:
    for method, path, body in (
        ("GET", "workflows/inver", None),
        ("POST", "jobs", {"workflow_slug": "inver"}),
        ("PUT", "fleets/gpu/production/workflows", {"workflow_slugs": ["inver"]}),
    ):
        answer = await fleet_setup.admin.request(method, f"/api/admin/{path}", json=body)
        assert answer.status_code in (404, 422)
        assert '"invert"' in answer.json()["error"]["message"]


async def test_a_type_that_is_none_is_told_in_a_sentence(fleet_setup: FleetSetup) -> None:
    wrong = [{"name": "width", "type": "integr", "binding": "1.image"}]
    answer = await fleet_setup.register_workflow("x", properties=wrong)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith(
        "the property width: unknown type 'integr' (did you mean integer?); use one of text,"
    )


async def test_submitting_to_a_worker_that_lacks_something_says_what(
    fleet_setup: FleetSetup,
) -> None:
    await fleet_setup.assign("invert")
    await fleet_setup.register("good", backend={"node_types": ALL_TYPES})
    await fleet_setup.register("bad", backend={"node_types": ["LoadImage", "SaveImage"]})
    said = {}
    for name in ("good", "bad", "gone"):
        body = {
            "workflow_slug": "invert",
            "files": {"input": await fleet_setup.upload()},
            "backend_affinity": f"worker:{name}",
        }
        said[name] = (await fleet_setup.admin.post("/api/admin/jobs", json=body)).json()["warnings"]
    can_not = "which can't run workflow invert: missing node ImageInvert."
    assert said == {
        "good": [],
        "bad": [f"The job is bound to worker:bad, {can_not}"],
        "gone": [
            "The job is bound to worker:gone, which doesn't exist or can't run workflow invert."
        ],
    }


@pytest.mark.parametrize("ending", ["gif", "webp"])
async def test_an_animated_picture_is_no_video_and_what_to_do_is_said(
    fleet_setup: FleetSetup, ending: str
) -> None:
    film = [{"name": "input", "type": "video", "binding": "1.image"}]
    assert (await fleet_setup.register_workflow("film", properties=film)).status_code == 201
    moving = io.BytesIO()
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green")]
    frames[0].save(moving, ending, save_all=True, append_images=frames[1:])
    data = moving.getvalue()
    announced = await fleet_setup.admin.post(
        "/api/admin/uploads",
        json={"filename": f"a.{ending}", "content_type": f"image/{ending}", "size": len(data)},
    )
    slot = announced.json()["upload"]
    await fleet_setup.admin.put(slot["url"], content=data, headers=slot["headers"])
    body = {"workflow_slug": "film", "files": {"input": announced.json()["file_id"]}}
    refused = await fleet_setup.admin.post("/api/admin/jobs", json=body)
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == (
        f"input requires video, but the file is image/{ending}; "
        "convert animated images to MP4 or WebM first"
    )
