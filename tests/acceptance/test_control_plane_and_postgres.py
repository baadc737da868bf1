"""The control plane as a process on a PostgreSQL that goes away and comes back."""

from pathlib import Path

from tests.support.server.admin_client import until
from tests.support.server.deployment import Deployment

BACK_SECONDS_MAX = 15


async def test_it_outlives_its_database_and_comes_back_when_it_is_killed_itself(
    tmp_path: Path,
) -> None:
    async with Deployment(tmp_path) as deployment:
        deployment.start_control()
        deployment.postgres.stop_at_once()
        assert not deployment.admin.is_ready()
        deployment.postgres.start()
        until(deployment.admin.is_ready, seconds=BACK_SECONDS_MAX, what=deployment.control.said)
        deployment.restart_control()
        assert deployment.admin.is_ready()
        deployment.control.terminate()
        assert deployment.control.wait() == 0
