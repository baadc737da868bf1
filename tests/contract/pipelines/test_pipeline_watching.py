"""Bursts of failures raise an alert, a full store pauses, old files go and the index stays."""

import logging
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.pipelines import ONE_STEP, PipelineSetup, pipeline_setup_on, png
from tests.support.server.control_plane import plane_on

from comfyfleet.server.maintenance.sweeps import RESULTS, SUBMITS, pipeline_sweeps
from comfyfleet.server.media.model import small_key
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.pipelines import actions
from comfyfleet.server.pipelines.collector import remove_old_files
from comfyfleet.server.pipelines.model import PipelineRunStatus
from comfyfleet.settings import Settings, read_settings


async def fail_next(pipeline_setup: PipelineSetup, times: int) -> None:
    for _ in range(times):
        await pipeline_setup.sweep()
        await pipeline_setup.fail(await pipeline_setup.leased())
    await pipeline_setup.sweep()


async def deliveries(pipeline_setup: PipelineSetup) -> list[str]:
    async with pipeline_setup.pool.transaction() as tx:
        due = await webhooks.take_due_deliveries(
            tx, now=pipeline_setup.clock() + timedelta(hours=1), limit=50
        )
    return [delivery.event for delivery, _ in due]


async def test_a_burst_of_failures_is_told_once(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pipeline_setup_on(databases, tmp_path, pipeline_alert_failures=3) as pipeline_setup:
        async with pipeline_setup.pool.transaction() as tx:
            await webhooks.create_webhook(
                tx,
                webhook_id=uuid4(),
                tenant_id=pipeline_setup.tenant_id,
                user_id=pipeline_setup.user_id,
                url="https://example.com/hook",
                events=["pipeline.alert"],
                now=pipeline_setup.clock(),
            )
        await pipeline_setup.start(ONE_STEP, base=20)
        with caplog.at_level(logging.ERROR, logger="comfyfleet.server.pipelines"):
            await fail_next(pipeline_setup, 2)
            assert not caplog.records
            await fail_next(pipeline_setup, 3)
        assert len(caplog.records) == 1
        assert "out of memory" in caplog.text
        assert await deliveries(pipeline_setup) == ["pipeline.alert"]


async def test_failures_far_apart_are_no_burst(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pipeline_setup_on(databases, tmp_path, pipeline_alert_failures=2) as pipeline_setup:
        await pipeline_setup.start(ONE_STEP, base=20)
        for _ in range(3):
            await fail_next(pipeline_setup, 1)
            pipeline_setup.clock.advance(seconds=700)
        assert "alert" not in caplog.text


async def test_a_run_that_fills_its_room_is_paused_and_goes_on_with_more(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=5, limits={"bytes": 2 * len(png())})
    assert await pipeline_setup.work_off() == 2
    paused = await actions.get_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert (paused.run.status, paused.pause_reason) == (PipelineRunStatus.PAUSED, "storage_limit")
    await actions.change_run(
        pipeline_setup.context, *pipeline_setup.whose, run.id, limits={"bytes": None}
    )
    await actions.resume_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert await pipeline_setup.work_off() == 3


async def test_old_runs_lose_their_files_and_keep_their_index(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=2)
    await pipeline_setup.work_off()
    before = await pipeline_setup.candidates(run)
    await remove_old_files(pipeline_setup.context, pipeline_setup.pool)
    assert await pipeline_setup.candidates(run) == before
    await pipeline_setup.context.deferred.flush()
    store, prefix = pipeline_setup.context.store, f"tenants/{pipeline_setup.tenant_id}/"
    for key in [key async for key in store.keys(prefix)]:  # as if somebody had looked at them
        await store.put(small_key(key), b"small", "image/webp")
    pipeline_setup.clock.advance(days=91)
    await remove_old_files(pipeline_setup.context, pipeline_setup.pool)
    after = await pipeline_setup.candidates(run)
    assert [each.id for each in after] == [each.id for each in before]
    assert all((each.file or {})["path"] for each in after)
    assert all((each.file or {})["file_id"] is None for each in after)
    await pipeline_setup.context.deferred.flush()
    kept = [key async for key in store.keys(prefix)]
    assert kept == []
    stored = await actions.get_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert stored.files_removed_at == pipeline_setup.clock()


def test_the_intervals_have_the_names_that_people_know() -> None:
    read = read_settings({"COMFYUI_SUBMIT_INTERVAL": "3", "COMFYUI_POLL_INTERVAL": "0.5"})
    assert (read.comfyui_submit_interval, read.comfyui_poll_interval) == (3.0, 0.5)
    usual = Settings()
    assert (usual.comfyui_submit_interval, usual.comfyui_poll_interval) == (10.0, 5.0)


async def test_the_intervals_are_those_of_the_sweeps(databases: Databases, tmp_path: Path) -> None:
    async with plane_on(
        databases, tmp_path, comfyui_submit_interval=3.0, comfyui_poll_interval=0.5
    ) as plane:
        seconds = {sweep.name: sweep.seconds for sweep in pipeline_sweeps(plane)}
    assert (seconds[SUBMITS], seconds[RESULTS]) == (3.0, 0.5)
