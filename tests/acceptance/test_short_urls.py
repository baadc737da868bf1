"""A job that takes longer than its URLs live, with its files in an S3 that checks signatures."""

from pathlib import Path

import httpx
from tests.support.databases.s3 import running_s3
from tests.support.jobs.counted_jobs import FLEET, prepare, submit
from tests.support.server.deployment import Deployment

JOB_STEPS = 40  # of 100 ms: longer than a URL lives
END_SECONDS_MAX = 60.0


async def test_a_job_longer_than_its_urls_live_succeeds(tmp_path: Path) -> None:
    with running_s3() as s3:
        deployment = Deployment(
            tmp_path, environ=s3.env, url_seconds="3", storage_url=s3.url, heartbeat_seconds="1"
        )
        async with deployment:
            secret, tenant_id = prepare(deployment)
            (engine,) = deployment.start_engines("engine-1")
            deployment.start_worker("worker-1", engine, fleet=FLEET, secret=secret)
            (job_id,) = submit(deployment, tenant_id, (1,), steps=JOB_STEPS)

            ended = deployment.admin.wait_until_ended(tenant_id, [job_id], seconds=END_SECONDS_MAX)
            job = ended[job_id]
            assert (job["status"], job["dispatch"]["attempts"]) == ("completed", 1)
            assert job["dispatch"]["duration_seconds"] > 3
            (output,) = job["outputs"]
            assert output["url"].startswith(s3.endpoint)
            async with httpx.AsyncClient() as client:
                found = await client.get(output["url"])
            assert len(found.content) == output["size"] > 0
            assert found.headers["content-type"] == "image/png"
