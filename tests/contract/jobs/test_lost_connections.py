"""A job is leased at once if the idle connections to its database were lost, and soon after a longer outage."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.context import asked, waiter
from tests.support.jobs.gateway_runs import Scene, scene_on

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import Tx
from comfyfleet.server.jobs import lease as job_lease
from comfyfleet.server.jobs import service
from comfyfleet.server.jobs import submit as job_submit
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.queue import service as dispatch


@pytest.fixture
async def scene(databases: Databases, tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene_on(databases, tmp_path) as scene:
        yield scene


async def submitted(scene: Scene) -> None:
    new = {scene.whole.new_id(): asked(user_id=scene.user_id)}
    await job_submit.submit_many(scene.whole, scene.tenant_id, new)


async def test_a_lost_connection_does_not_delay_a_job(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submitted(scene)
    lost: list[Tx] = []
    start = service.start

    async def start_after_loss(tx: Tx, *arguments: object, **options: object) -> object:
        if not lost:
            lost.append(tx)
            raise Unavailable("the connection was lost while it was idle")
        return await start(tx, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(service, "start", start_after_loss)
    assert await lease_next(scene.whole, waiter("w"), wait_seconds=0)


async def test_a_delayed_job_is_due_when_its_database_is_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submitted(scene)

    async def lose(*_: object, **__: object) -> None:
        raise Unavailable("the database is away")

    with monkeypatch.context() as away:
        away.setattr(service, "start", lose)
        away.setattr(job_lease, "DELAY_SECONDS_MIN", 30.0)
        assert await lease_next(scene.whole, waiter("w"), wait_seconds=0) is None
    pool, now = scene.whole.pools["main"], scene.clock()
    pool.outages.note_success()
    pool.outages.close()
    assert pool.outages.has_ended
    later = now + timedelta(seconds=1)
    async with scene.whole.central.transaction() as tx:
        assert await dispatch.wake_due(tx, now=later, limit=9) == []
        await dispatch.end_delays(tx, "another", now=now)
        assert await dispatch.wake_due(tx, now=later, limit=9) == []
        await dispatch.end_delays(tx, "main", now=now)
        assert len(await dispatch.wake_due(tx, now=later, limit=9)) == 1
    assert await lease_next(scene.whole, waiter("w"), wait_seconds=0)
