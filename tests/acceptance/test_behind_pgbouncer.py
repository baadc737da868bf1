"""A deployment whose databases are behind PgBouncer: everything works, also when the pooler is restarted."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.databases.pgbouncer import pgbouncer, through
from tests.support.jobs.counted_jobs import FLEET
from tests.support.jobs.large_graph import check_the_end, document, prepare
from tests.support.server.admin_client import until
from tests.support.server.deployment import Deployment
from tests.support.server.processes import COMFYFLEET, clean_environ

SETTINGS = {
    "lease_seconds": "10",
    "heartbeat_seconds": "1",
    "sweep_seconds": "0.5",
    "calls_per_second": "1000",
    "calls_at_once": "1000",
}
END_SECONDS_MAX = 120.0


@contextmanager
def behind_pooler(deployment: Deployment, *, pool_mode: str, has_direct: bool) -> Iterator[None]:
    central, tenants = deployment.postgres.url("central"), deployment.postgres.url("tenants")
    with pgbouncer(central, pool_mode=pool_mode, pool_size=30) as pooler:
        deployment.database_environ = {
            "COMFYFLEET_CENTRAL_DATABASE_URL": through(pooler, central),
            "COMFYFLEET_TENANT_DATABASE_URLS": f"main={through(pooler, tenants)}",
        }
        if has_direct:
            deployment.database_environ |= {
                "COMFYFLEET_CENTRAL_DATABASE_DIRECT_URL": central,
                "COMFYFLEET_TENANT_DATABASE_DIRECT_URLS": f"main={tenants}",
            }
        yield


@pytest.mark.parametrize(("pool_mode", "has_direct"), [("transaction", True), ("session", False)])
async def test_a_graph_ends_with_the_right_pictures(
    tmp_path: Path, pool_mode: str, has_direct: bool
) -> None:
    async with Deployment(tmp_path, None, **SETTINGS) as deployment:
        with behind_pooler(deployment, pool_mode=pool_mode, has_direct=has_direct):
            secret, customer = await asyncio.to_thread(prepare, deployment)
            engines = deployment.start_engines("engine-1", "engine-2")
            for number, engine in enumerate(engines, 1):
                deployment.start_worker(f"worker-{number}", engine, fleet=FLEET, secret=secret)
            until(lambda: len(deployment.admin.worker_ids()) == 2, seconds=60)
            run_id = customer.started(customer.stored(document("worker-1", "worker-2")), "one")
            check_the_end(customer, customer.finished(run_id, seconds=END_SECONDS_MAX))
            log = deployment.control.said()
            assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]
            assert "is unavailable" not in log
            deployment.control.terminate()
            assert deployment.control.wait() == 0


async def test_serve_names_the_setting_that_is_missing(tmp_path: Path) -> None:
    async with Deployment(tmp_path, None, **SETTINGS) as deployment:
        with behind_pooler(deployment, pool_mode="transaction", has_direct=False):
            served = await asyncio.to_thread(
                subprocess.run,
                [str(COMFYFLEET), "serve", "--port", "0"],
                cwd=tmp_path,
                env=clean_environ(deployment._environ()),
                capture_output=True,
                text=True,
                timeout=60,
            )
        assert served.returncode != 0
        assert "COMFYFLEET_CENTRAL_DATABASE_DIRECT_URL is not set" in served.stderr
