"""Numbers that a worker makes up: none of them may cost a job its result, or anybody an answer."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, WorkerClient, fleet_setup_on

BEYOND = ("1e999", "-1e999", "NaN", "Infinity", "9" * 5000)


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


async def said(worker: WorkerClient, job: dict[str, Any], word: str, more: str) -> httpx.Response:
    """As JSON that no library of ours would write."""
    lease = f'"dispatch_id": {job["dispatch_id"]}, "lease_token": "{job["lease_token"]}"'
    headers = {"Content-Type": "application/json"}
    content = f"{{{lease}, {more}}}"
    return await worker.client.post(f"/api/worker/{word}", content=content, headers=headers)


async def test_numbers_beyond_a_float_cost_no_job_its_result(fleet_setup: FleetSetup) -> None:
    async with fleet_setup.worker() as worker:
        for number in BEYOND:
            job_id = await fleet_setup.submit()
            job = await worker.job()
            filled_in = f'"filled_in": {{"1": {{"seed": {number}}}}}'
            beat = await said(worker, job, "heartbeat", filled_in)
            assert beat.status_code == 200, (number[:10], beat.text)
            told = f'"execution_seconds": {number}, "model_change": "switched"'
            ended = await said(worker, job, "complete", told)
            assert ended.status_code == 200, (number[:10], ended.text)
            shown = await fleet_setup.job(job_id)
            assert shown["status"] == "completed"
