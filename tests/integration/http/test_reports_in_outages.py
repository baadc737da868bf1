"""Final reports of workers while a part of the service is away."""

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import EffectSetup, effect_setup_on

from comfyfleet.errors import Unavailable
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.queue import service as dispatch


@pytest.fixture
async def setup(databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as effects:
        yield effects


async def lease_end(setup: EffectSetup, job: dict[str, Any]) -> datetime:
    async with setup.plane.central.read() as tx:
        row = await dispatch.get(tx, job["dispatch_id"])
    assert row.lease_expires_at is not None
    return row.lease_expires_at


@pytest.mark.parametrize("report", ["complete", "fail"])
async def test_a_report_that_cannot_be_stored_extends_its_lease(
    setup: EffectSetup, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    """The worker repeats it until the tenant's database is back, which may take longer than a lease."""

    async def away(*_: object) -> None:
        raise Unavailable("the database of pool main can't be reached")

    ada = await setup.customer()
    await ada.job(setup.invert, video_id=await ada.video())
    async with setup.fleet_setup.worker() as worker:
        job = await worker.job()
        before = await lease_end(setup, job)
        with monkeypatch.context() as patch:
            patch.setattr(JobContext, "pool_of", away)
            refused = await worker.call_for(job, report)
            assert refused.status_code == 503, refused.text
        assert await lease_end(setup, job) > before
        token = {**job, "lease_token": job["job_id"]}
        assert (await worker.call_for(token, report)).status_code == 409
