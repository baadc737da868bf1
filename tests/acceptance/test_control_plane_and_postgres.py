"""The control plane as a process on a PostgreSQL that goes away and comes back."""

from pathlib import Path

from tests.support.server.admin_client import until
from tests.support.server.stage import Stage

BACK_SECONDS_MAX = 15


async def test_it_outlives_its_database_and_comes_back_when_it_is_killed_itself(
    tmp_path: Path,
) -> None:
    async with Stage(tmp_path) as stage:
        stage.start_control()
        stage.postgres.stop_at_once()
        assert not stage.admin.is_ready()
        stage.postgres.start()
        until(stage.admin.is_ready, seconds=BACK_SECONDS_MAX, what=stage.control.said)
        stage.restart_control()
        assert stage.admin.is_ready()
        stage.control.terminate()
        assert stage.control.wait() == 0
