"""A worker's process dies and comes back, while its backend goes on."""

from pathlib import Path

from tests.support.jobs.counted_jobs import FLEET, executions, in_mid_job, prepare, submit
from tests.support.server.deployment import Deployment

JOB_STEPS = 30
END_SECONDS_MAX = 60.0


async def test_killed_and_started_again_it_goes_on_with_what_still_runs(tmp_path: Path) -> None:
    async with Deployment(tmp_path, heartbeat_seconds="1") as deployment:
        secret, tenant_id = prepare(deployment)
        (engine,) = deployment.start_engines("engine-1")
        worker = deployment.start_worker("worker-1", engine, fleet=FLEET, secret=secret)
        colors = submit(deployment, tenant_id, (1, 2), steps=JOB_STEPS)

        in_mid_job(engine)
        worker.process.kill()
        deployment.start_worker("worker-1", engine, fleet=FLEET, secret=secret)

        ended = deployment.admin.wait_until_ended(tenant_id, list(colors), seconds=END_SECONDS_MAX)
        assert [job["status"] for job in ended.values()] == ["completed"] * 2
        assert [job["dispatch"]["attempts"] for job in ended.values()] == [1, 1]
        assert executions([engine]) == {1: 1, 2: 1}
        assert len(deployment.admin.audit(action="register")) == 1
