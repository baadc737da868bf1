"""Files of nodes that have ended are stored, named and told before their run has ended: once, whatever is cut."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import ProcessDied
from tests.support.jobs.gateway_runs import ONE, OTHER, Scene, done, executed, made, scene_on

from comfyfleet.api.values import DeliveredOutput
from comfyfleet.api.worker import Fail
from comfyfleet.api.worker import Job as Handed
from comfyfleet.server.db.tenant_tables import gateway_files, run_events
from comfyfleet.server.jobs import finish
from comfyfleet.server.jobs.files import report_live
from comfyfleet.server.jobs.model import PRICE_PER_SECOND, Failure, JobStatus
from comfyfleet.server.maintenance.retention import count_unnamed
from comfyfleet.server.queue.model import RequeueReason

STEPS_MAX = 60


@pytest.fixture
async def scene(databases: Databases, tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene_on(databases, tmp_path) as scene:
        yield scene


async def test_a_file_is_there_under_its_name_before_the_run_has_ended(scene: Scene) -> None:
    lease = await scene.lease()
    assert lease.live_outputs
    await scene.report(lease)
    (name,) = await scene.rows(gateway_files, lease.job_id)
    (file,) = await scene.files_of(lease.job_id)
    assert (name.path, name.file_id, file.user_id) == ("x_00001_.png", file.id, scene.user_id)
    assert await scene.whole.store.get(file.path) == ONE
    await scene.report(lease)  # once more, as the answer was lost
    assert len(await scene.files_of(lease.job_id)) == 1
    job = await scene.complete(lease, made(ONE))
    assert [each.file_id for each in job.outputs] == [file.id]
    (name,) = await scene.rows(gateway_files, lease.job_id)
    assert (name.path, name.file_id, name.output) == ("x_00001_.png", None, "output.png")
    await scene.require_tidy()


async def test_an_object_without_a_row_is_counted(scene: Scene) -> None:
    assert await count_unnamed(scene.whole, scene.tenant_id) == (0, True)
    lease, output = await scene.lease(), made(ONE)
    await scene.upload(lease, output, ONE)  # a running job's own is no leftover
    assert await count_unnamed(scene.whole, scene.tenant_id) == (0, True)
    await scene.complete(lease, output)
    await scene.whole.deferred.flush()
    assert await count_unnamed(scene.whole, scene.tenant_id) == (0, True)
    await scene.whole.store.put(f"tenants/{scene.tenant_id}/files/left.png", ONE, "image/png")
    assert await count_unnamed(scene.whole, scene.tenant_id) == (1, True)


async def test_names_go_on_counting_with_each_report(scene: Scene) -> None:
    lease = await scene.lease()
    both = [made(ONE, "a.png", 1), made(OTHER, "b.png", 2)]
    for output, data in zip(both, (ONE, OTHER), strict=True):
        await scene.upload(lease, output, data)
        await report_live(scene.whole, scene.key(lease), [executed(output)], [output])
    assert await scene.names_told(lease.job_id) == ["x_00001_.png", "x_00002_.png"]
    job = await scene.complete(lease, *both)
    assert len(job.outputs) == len(await scene.files_of(lease.job_id)) == 2


async def test_a_run_that_begins_again_replaces_what_it_told_before(scene: Scene) -> None:
    first = await scene.lease()
    await scene.report(first, ONE)
    await scene.report(first, OTHER, "only-the-first-made-it.png")
    await finish.requeue(
        scene.whole, first.dispatch_id, first.lease_token, RequeueReason.SPOT, worker_id="w"
    )
    second = await scene.lease_again()
    await scene.report(first, OTHER)  # too late
    await scene.report(second, OTHER + b"!")
    names = await scene.names_told(second.job_id)
    assert names == ["x_00001_.png", "x_00002_.png", "x_00001_.png"]
    job = await scene.complete(second, made(OTHER + b"!"))
    (file,) = await scene.files_of(second.job_id)
    assert [each.file_id for each in job.outputs] == [file.id]
    assert await scene.whole.store.get(file.path) == OTHER + b"!"
    (name,) = await scene.rows(gateway_files, second.job_id)
    assert name.path == "x_00001_.png"
    await scene.require_tidy()


async def test_a_worker_that_was_restarted_gives_the_file_another_name_and_it_stays_one(
    scene: Scene,
) -> None:
    lease = await scene.lease()
    await scene.report(lease)
    again = made(ONE, "1234abcd-x_00001_.png")
    await scene.upload(lease, again, ONE)
    job = await scene.complete(lease, again)
    assert len(await scene.files_of(lease.job_id)) == 1
    (name,) = await scene.rows(gateway_files, lease.job_id)
    assert (name.path, name.output) == ("x_00001_.png", job.outputs[0].name)
    await scene.require_tidy()


def failed(lease: Handed, events: Sequence[Any], outputs: Sequence[DeliveredOutput]) -> Fail:
    return Fail(
        dispatch_id=lease.dispatch_id,
        lease_token=lease.lease_token,
        error="no",
        events=tuple(events),
        outputs=tuple(outputs),
        told_outputs=True,
    )


async def test_a_failed_run_keeps_what_it_has_made(scene: Scene) -> None:
    lease = await scene.lease()
    await scene.report(lease)
    last = made(OTHER, "last.png", 2)
    await scene.upload(lease, last, OTHER)
    word = failed(lease, [executed(last)], [last])
    why = Failure("no")
    key = lease.dispatch_id, lease.lease_token
    job = await finish.fail(scene.whole, *key, why, message=word)
    assert job.status == JobStatus.FAILED
    record = (await scene.rows(run_events, lease.job_id))[-1].record
    assert [each["filename"] for each in record["outputs"]["9"]["images"]] == ["x_00002_.png"]
    names = await scene.rows(gateway_files, lease.job_id)
    assert {each.file_id for each in names} == {each.id for each in await scene.files_of(job.id)}
    await scene.require_tidy()


@pytest.mark.parametrize("terms", [{"price_tokens": 5}, {"gateway": {PRICE_PER_SECOND: 1.0}}])
async def test_a_run_that_is_paid_for_shows_nothing_before_it_is(
    scene: Scene, terms: dict[str, Any]
) -> None:
    lease = await scene.lease(**terms)
    assert not lease.live_outputs
    await scene.report(lease)
    assert await scene.names_told(lease.job_id) == []
    word = failed(lease, [executed(made(ONE))], [made(ONE)])
    key = lease.dispatch_id, lease.lease_token
    await finish.fail(scene.whole, *key, Failure("no"), message=word)
    assert (await scene.rows(run_events, lease.job_id))[-1].record["outputs"] == {}
    assert not await scene.files_of(lease.job_id)
    assert not await scene.rows(gateway_files, lease.job_id)
    await scene.require_tidy()


async def test_a_report_and_the_end_can_be_cut_anywhere(scene: Scene) -> None:
    was_cut = 0
    for after in range(STEPS_MAX):
        lease, output = await scene.lease(), made(ONE)
        await scene.upload(lease, output, ONE)
        scene.fuse.left = after
        try:
            await report_live(scene.cut, scene.key(lease), [executed(output)], [output], report=1)
            await finish.complete(scene.cut, done(lease, output))
        except ProcessDied:
            was_cut += 1
        finally:
            scene.fuse.left = None
        await scene.cut.deferred.flush()
        # The worker tells it again.
        await report_live(scene.whole, scene.key(lease), [executed(output)], [output], report=1)
        job = await scene.complete(lease, output)
        rows = await scene.rows(run_events, lease.job_id)
        assert [row.has_end for row in rows].count(True) == 1
        (told,) = await scene.names_told(lease.job_id)
        (file,) = await scene.files_of(lease.job_id)
        assert [each.file_id for each in job.outputs] == [file.id]
        assert await scene.whole.store.get(file.path) == ONE
        (name,) = await scene.rows(gateway_files, lease.job_id)
        assert (name.path, name.file_id, name.output) == (told, None, "output.png")
        if was_cut <= after:
            break
    assert was_cut > 5
    await scene.require_tidy()
