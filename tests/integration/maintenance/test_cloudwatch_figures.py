"""The figures of a real fleet, as a simulated CloudWatch received them."""

from pathlib import Path

from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.fleet import FleetSetup
from tests.support.workers.aws import Aws

from comfyfleet.server.maintenance.cloudwatch import typical_of
from comfyfleet.server.maintenance.sweeps import all_sweeps
from comfyfleet.server.metrics import FleetFigures
from comfyfleet.server.queue.model import LaneDepth, QueueLane

NAMESPACE = "Comfyfleet"


async def test_a_fleet_wants_workers_while_jobs_wait_and_none_when_they_are_gone(
    aws: Aws, sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with (
        plane_on(sqlite_databases, tmp_path, cloudwatch_namespace=NAMESPACE) as plane,
        client_of(plane) as admin,
    ):
        fleet_setup = FleetSetup(plane, admin)
        await fleet_setup.set_up()
        (publishing,) = (each for each in all_sweeps(plane) if each.name == "cloudwatch")
        file_id = await fleet_setup.upload()
        jobs = {"workflow_slug": "invert", "files": {"input": file_id}, "count": 12}
        submitted = await admin.post("/api/admin/jobs", json=jobs)
        assert submitted.status_code == 201, submitted.text
        await publishing.run()
        told = aws.published(NAMESPACE, "gpu")
        assert (told["QueueDepth"], told["WantedWorkers"]) == ((12, "Count"), (3, "Count"))
        listed = (await admin.get("/api/admin/dispatches")).json()["dispatches"]
        for each in listed:
            await admin.post(f"/api/admin/dispatches/{each['id']}/cancel")
        aws.forget()
        await publishing.run()
        told = aws.published(NAMESPACE, "gpu")
        assert (told["QueueDepth"], told["WantedWorkers"]) == ((0, "Count"), (0, "Count"))


async def test_without_a_namespace_nothing_is_published(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        assert "cloudwatch" not in [each.name for each in all_sweeps(plane)]


def test_a_job_lasts_as_long_as_those_that_wait() -> None:
    fleet = FleetFigures("gpu", "production", 4, 0, 0.0, {}, 0, None, frozenset({1, 2}))
    depths = {
        QueueLane(1, "production", "self_hosted"): LaneDepth(3, 0, None),
        QueueLane(2, "production", "self_hosted"): LaneDepth(1, 0, None),
        QueueLane(2, "staging", "self_hosted"): LaneDepth(9, 0, None),
        QueueLane(3, "production", "self_hosted"): LaneDepth(9, 0, None),
    }
    assert typical_of(fleet, depths, {1: 10.0, 2: 50.0, 3: 900.0}) == 20.0
    assert typical_of(fleet, {}, {}) is None
