"""A run from its start to its last candidate, by hand: the loop submits, the test is the worker."""

import re
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.context import give_tokens
from tests.support.jobs.pipelines import (
    ONE_STEP,
    THREE_STEPS,
    TOKENS,
    PipelineSetup,
    pipeline_setup_on,
    png,
)

from comfyfleet.errors import Conflict, InsufficientTokens, InvalidInput, NotFound
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import WorkflowTerms
from comfyfleet.server.jobs import submit
from comfyfleet.server.pipelines import actions, generator, run_state, store_candidates
from comfyfleet.server.pipelines.actions import NewPipelineRun
from comfyfleet.server.pipelines.collector import collect_job, fail_overdue
from comfyfleet.server.pipelines.model import StoredRun
from comfyfleet.server.pipelines.run_state import read_run
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger


async def balance(pipeline_setup: PipelineSetup) -> int:
    async with pipeline_setup.pool.read() as tx:
        return await ledger.balance(tx, *pipeline_setup.whose)


async def test_three_steps_make_their_tree_and_every_token_is_accounted_for(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(base=2)
    assert await pipeline_setup.work_off() == 2 + 4 + 4
    assert await pipeline_setup.made(run) == [2, 4, 4]
    state = await pipeline_setup.state(run)
    assert state.stored.reason == "complete"
    assert [each.child_count for each in state.tree.candidates.values() if each.step == 0] == [2, 2]
    assert state.run.tokens == 2 * 3 + 4 * 2 + 4 * 1
    assert await balance(pipeline_setup) == TOKENS - state.run.tokens
    found = await pipeline_setup.candidates(run)
    by_id = {each.id: each for each in found}
    for each in found:
        assert (each.parent is None) == (each.step == 0)
        assert each.step == 0 or by_id[each.parent].step == each.step - 1  # type: ignore[index]
    await pipeline_setup.require_sound(run, [each.job_id for each in found if each.job_id])


async def test_a_candidate_is_named_by_folder_step_id_and_time(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(base=1, target_folder="cats/spring")
    await pipeline_setup.work_off()
    paths = [(each.file or {})["path"] for each in await pipeline_setup.candidates(run, step=1)]
    pattern = rf"cats/spring/fix-it/[0-9a-f-]{{36}}_{pipeline_setup.clock():%Y%m%d}\d{{6}}\.png"
    assert all(re.fullmatch(pattern, each) for each in paths)
    assert len(set(paths)) == 2


async def test_the_parents_picture_is_handed_on_by_reference(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(base=1)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased())
    await pipeline_setup.sweep()
    handed = await pipeline_setup.leased()
    (parent,) = await pipeline_setup.candidates(run)
    job = await pipeline_setup.job(handed.job_id)
    assert [str(each.file_id) for each in job.spec.assets] == [(parent.file or {})["file_id"]]
    assert job.spec.user_id == pipeline_setup.user_id


async def test_each_job_gets_a_new_seed_which_its_candidates_tell(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=3)
    await pipeline_setup.work_off()
    found = await pipeline_setup.candidates(run)
    assert len({each.seed for each in found}) == 3
    assert all(each.properties["color"] == each.seed for each in found)


async def test_a_fixed_seed_stays(pipeline_setup: PipelineSetup) -> None:
    step = {"name": "Base", "workflow": "draw", "seed": 2**64 - 1}
    run = await pipeline_setup.start({"name": "Fixed", "steps": [step]}, base=2)
    await pipeline_setup.work_off()
    assert {each.seed for each in await pipeline_setup.candidates(run)} == {2**64 - 1}


async def test_four_images_are_four_candidates_with_one_charge(
    pipeline_setup: PipelineSetup,
) -> None:
    step = {"name": "Base", "workflow": "draw", "images_per_job": 4}
    run = await pipeline_setup.start({"name": "Four", "steps": [step]}, base=4)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased(), [png(number) for number in range(4)])
    await pipeline_setup.sweep()
    assert await pipeline_setup.made(run) == [4]
    assert await balance(pipeline_setup) == TOKENS - 3
    assert [each.output_index for each in await pipeline_setup.candidates(run)] == [0, 1, 2, 3]
    assert await pipeline_setup.lease() is None


def with_changed_pixels(picture: bytes) -> bytes:
    at = picture.index(b"IDAT") + 4
    return picture[:at] + bytes([picture[at] ^ 1]) + picture[at + 1 :]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"no picture at all", "a supported image format"),
        (png()[:-10], "ends too early"),
        (png().replace(b"IDAT", b"IDAU"), "it has no pixels"),  # unknown parts are not delivered
        (with_changed_pixels(png()), "damaged"),
    ],
    ids=["empty", "text", "cut", "no pixels", "damaged"],
)
async def test_an_unreadable_output_gives_no_candidate_and_says_why(
    pipeline_setup: PipelineSetup, data: bytes, why: str
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased(), [data])
    await pipeline_setup.sweep()
    assert await pipeline_setup.made(run) == []
    state = await pipeline_setup.state(run)
    assert state.stored.reason == "failed"
    async with pipeline_setup.pool.read() as tx:
        (failed,) = await store_candidates.page_of_failed(tx, run.id, limit=10)
    assert why in (failed.error or "")
    assert await pipeline_setup.lease() is None  # it is not made again by itself
    assert await balance(pipeline_setup) == TOKENS - 3  # the job itself was done


async def test_a_job_without_any_output_gives_none_and_says_so(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased(), [])
    await pipeline_setup.sweep()
    async with pipeline_setup.pool.read() as tx:
        (failed,) = await store_candidates.page_of_failed(tx, run.id, limit=10)
    assert failed.error == "the job saved no image and showed no text"


async def test_readable_outputs_are_kept_beside_an_unreadable_one(
    pipeline_setup: PipelineSetup,
) -> None:
    step = {"name": "Base", "workflow": "draw", "images_per_job": 2}
    run = await pipeline_setup.start({"name": "Two", "steps": [step]}, base=2)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased(), [b"broken", png()])
    await pipeline_setup.sweep()
    (found,) = await pipeline_setup.candidates(run)
    assert found.output_index == 1


async def test_an_ended_job_is_collected_once_however_often_it_is_heard(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    await pipeline_setup.sweep()
    handed = await pipeline_setup.leased()
    await pipeline_setup.finish(handed)
    for _ in range(3):
        await collect_job(
            pipeline_setup.context,
            pipeline_setup.pool,
            pipeline_setup.tenant_id,
            run.id,
            handed.job_id,
        )
    assert await pipeline_setup.made(run) == [1]


async def test_a_failed_job_holds_its_place_until_it_is_retried(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    await pipeline_setup.sweep()
    handed = await pipeline_setup.leased()
    await pipeline_setup.fail(handed)
    assert await pipeline_setup.work_off() == 0
    assert (await pipeline_setup.state(run)).stored.reason == "failed"
    assert await balance(pipeline_setup) == TOKENS
    assert await actions.retry_jobs(
        pipeline_setup.context, *pipeline_setup.whose, run.id, handed.job_id
    ) == [handed.job_id]
    assert await pipeline_setup.work_off() == 1
    assert await pipeline_setup.made(run) == [1]
    with pytest.raises(NotFound):
        await actions.retry_jobs(
            pipeline_setup.context, *pipeline_setup.whose, run.id, handed.job_id
        )


async def test_all_failed_jobs_are_retried_at_once(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=3, limits={"concurrent_jobs": 3})
    await pipeline_setup.sweep()
    for _ in range(3):
        await pipeline_setup.fail(await pipeline_setup.leased())
    await pipeline_setup.sweep()
    assert len(await actions.retry_jobs(pipeline_setup.context, *pipeline_setup.whose, run.id)) == 3
    assert await pipeline_setup.work_off() == 3


async def test_one_job_of_a_run_is_in_flight_unless_it_may_have_more(
    pipeline_setup: PipelineSetup,
) -> None:
    await pipeline_setup.start(ONE_STEP, base=5)
    await pipeline_setup.sweep()
    assert await pipeline_setup.lease()
    assert await pipeline_setup.lease() is None
    await pipeline_setup.start(ONE_STEP, base=5, limits={"concurrent_jobs": 3})
    await pipeline_setup.sweep()
    assert [await pipeline_setup.lease() is not None for _ in range(4)] == [True, True, True, False]


async def test_a_paused_run_submits_nothing_and_goes_on_when_resumed(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=2)
    await pipeline_setup.sweep()
    handed = await pipeline_setup.leased()
    await actions.pause_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    await pipeline_setup.finish(handed)
    assert await pipeline_setup.work_off() == 0
    assert await pipeline_setup.made(run) == [1]
    await actions.resume_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert await pipeline_setup.work_off() == 1


async def test_changed_variables_apply_to_what_is_submitted_next(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(base=2)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased())
    await actions.change_run(
        pipeline_setup.context, *pipeline_setup.whose, run.id, variables={"width": 16}
    )
    await pipeline_setup.work_off()
    widths = [each.properties["width"] for each in await pipeline_setup.candidates(run, step=0)]
    assert widths == [8, 16]


async def test_limits_hold_and_can_be_raised(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=9, limits={"tokens": 7})
    assert await pipeline_setup.work_off() == 2
    assert (await pipeline_setup.state(run)).stored.reason == "tokens_limit"
    changed = {"tokens": None, "candidates": 3}
    await actions.change_run(pipeline_setup.context, *pipeline_setup.whose, run.id, limits=changed)
    assert await pipeline_setup.work_off() == 1
    assert (await pipeline_setup.state(run)).stored.reason == "candidates_limit"
    soon = {"candidates": None, "until": pipeline_setup.clock() + timedelta(seconds=30)}
    await actions.change_run(pipeline_setup.context, *pipeline_setup.whose, run.id, limits=soon)
    pipeline_setup.clock.advance(seconds=60)
    assert await pipeline_setup.work_off() == 0
    assert (await pipeline_setup.state(run)).stored.reason == "time_up"


async def test_cancelling_a_run_cancels_what_is_queued_and_keeps_what_runs(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=5, limits={"concurrent_jobs": 2})
    await pipeline_setup.sweep()
    handed = await pipeline_setup.leased()
    await actions.cancel_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert await balance(pipeline_setup) == TOKENS - 3
    await pipeline_setup.finish(handed)
    assert await pipeline_setup.work_off() == 0
    assert await pipeline_setup.made(run) == [1]
    assert (await pipeline_setup.state(run)).run.tokens == 3
    with pytest.raises(Conflict):
        await actions.resume_run(pipeline_setup.context, *pipeline_setup.whose, run.id)


async def test_a_job_that_its_owner_cancels_is_not_made_again_by_itself(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    await pipeline_setup.sweep()
    (job,) = (await pipeline_setup.state(run)).in_flight
    await submit.cancel_job(pipeline_setup.context, pipeline_setup.tenant_id, job.job_id)
    assert await pipeline_setup.work_off() == 0
    assert len((await pipeline_setup.state(run)).tree.failed) == 1


async def test_runs_of_a_tenant_take_turns(pipeline_setup: PipelineSetup) -> None:
    runs = [await pipeline_setup.start(ONE_STEP, base=3) for _ in range(3)]
    served = []
    for _ in range(9):
        await pipeline_setup.sweep()
        handed = await pipeline_setup.leased()
        served.append((await pipeline_setup.job(handed.job_id)).spec.run_id)
        await pipeline_setup.finish(handed)
    for start in range(0, 9, 3):
        assert set(served[start : start + 3]) == {each.id for each in runs}


async def test_a_job_over_its_time_is_failed_and_refunded(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    await pipeline_setup.sweep()
    handed = await pipeline_setup.leased()
    pipeline_setup.clock.advance(seconds=299)
    assert await fail_overdue(pipeline_setup.context, pipeline_setup.pool) == 0
    pipeline_setup.clock.advance(seconds=2)
    assert await fail_overdue(pipeline_setup.context, pipeline_setup.pool) == 1
    await pipeline_setup.sweep()
    assert (await pipeline_setup.job(handed.job_id)).error_message == "It took longer than 300 s."
    assert len((await pipeline_setup.state(run)).tree.failed) == 1
    assert await balance(pipeline_setup) == TOKENS


@pytest.mark.parametrize(("own", "seconds"), [({}, 601), ({"timeout": 20}, 20)])
async def test_the_setting_counts_for_steps_without_a_time_of_their_own(
    databases: Databases, tmp_path: Path, own: dict[str, int], seconds: int
) -> None:
    (step,) = ONE_STEP["steps"]
    async with pipeline_setup_on(databases, tmp_path, comfyui_timeout=600.5) as pipeline_setup:
        await pipeline_setup.start({**ONE_STEP, "steps": [{**step, **own}]}, base=1)
        await pipeline_setup.sweep()
        handed = await pipeline_setup.leased()
        pipeline_setup.clock.advance(seconds=seconds)
        assert await fail_overdue(pipeline_setup.context, pipeline_setup.pool) == 0
        pipeline_setup.clock.advance(seconds=1)
        assert await fail_overdue(pipeline_setup.context, pipeline_setup.pool) == 1
        await pipeline_setup.sweep()
        ended = await pipeline_setup.job(handed.job_id)
        assert ended.error_message == f"It took longer than {seconds} s."


async def test_a_job_that_nobody_takes_up_is_given_up_after_a_day(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    await pipeline_setup.sweep()
    pipeline_setup.clock.advance(hours=23)
    assert await fail_overdue(pipeline_setup.context, pipeline_setup.pool) == 0
    pipeline_setup.clock.advance(hours=2)
    assert await fail_overdue(pipeline_setup.context, pipeline_setup.pool) == 1
    await pipeline_setup.sweep()
    assert len((await pipeline_setup.state(run)).tree.failed) == 1


async def test_too_few_tokens_are_told_and_the_run_goes_on_when_there_are_more(
    databases: Databases, tmp_path: Path
) -> None:
    async with pipeline_setup_on(databases, tmp_path) as pipeline_setup:
        run = await pipeline_setup.start(ONE_STEP, base=400)
        async with pipeline_setup.pool.transaction() as tx:
            poor = uuid4()
            await ledger.credit(
                tx, pipeline_setup.tenant_id, poor, 4, "p", now=pipeline_setup.clock()
            )
        pipeline_setup.user_id = poor
        await actions.pause_run(
            pipeline_setup.context, pipeline_setup.tenant_id, run.user_id, run.id
        )
        run = await pipeline_setup.start(ONE_STEP, base=2)
        assert await pipeline_setup.work_off() == 1
        assert (await pipeline_setup.state(run)).stored.trouble == "Insufficient token balance."
        async with pipeline_setup.pool.transaction() as tx:
            await ledger.credit(
                tx, pipeline_setup.tenant_id, poor, 9, "q", now=pipeline_setup.clock()
            )
        pipeline_setup.clock.advance(seconds=120)
        assert await pipeline_setup.work_off() == 1


async def stuck_run(pipeline_setup: PipelineSetup) -> StoredRun:
    """A run without tokens that was checked just now, after one job."""
    pipeline_setup.user_id = await give_tokens(pipeline_setup.context, pipeline_setup.tenant_id, 4)
    run = await pipeline_setup.start(ONE_STEP, base=2)
    assert await pipeline_setup.work_off() == 1
    stored = (await pipeline_setup.state(run)).stored
    assert (stored.trouble, stored.trouble_seconds) == ("Insufficient token balance.", 0)
    return stored


async def test_a_credit_wakes_the_runs_of_its_user(pipeline_setup: PipelineSetup) -> None:
    run = await stuck_run(pipeline_setup)
    async with pipeline_setup.pool.transaction() as tx:
        await ledger.credit(tx, *pipeline_setup.whose, 9, "q", now=pipeline_setup.clock())
    await run_state.wake_runs_of(pipeline_setup.context, pipeline_setup.tenant_id, uuid4())
    assert await pipeline_setup.work_off() == 0
    await run_state.wake_runs_of(pipeline_setup.context, *pipeline_setup.whose)
    stored = (await pipeline_setup.state(run)).stored
    assert stored.trouble_seconds_at(pipeline_setup.clock()) is None  # it may have passed
    assert await pipeline_setup.work_off() == 1


async def test_a_check_that_read_the_state_before_the_wake_does_not_undo_it(
    pipeline_setup: PipelineSetup,
) -> None:
    seen = await stuck_run(pipeline_setup)
    pipeline_setup.clock.advance(seconds=1)
    await run_state.wake_stuck_runs(pipeline_setup.context, pipeline_setup.pool)
    await generator._record_trouble(
        pipeline_setup.context,
        pipeline_setup.pool,
        seen,
        InsufficientTokens("too few", required_tokens=3, balance=1),
    )
    async with pipeline_setup.pool.transaction() as tx:
        await ledger.credit(tx, *pipeline_setup.whose, 9, "q", now=pipeline_setup.clock())
    assert await pipeline_setup.work_off() == 1


async def test_a_run_that_is_not_stuck_is_not_woken(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    await pipeline_setup.work_off()
    await run_state.wake_stuck_runs(pipeline_setup.context, pipeline_setup.pool)
    await run_state.wake_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert (await pipeline_setup.state(run)).stored.look_at is None


async def test_a_stuck_run_is_not_busy_and_names_no_time_left(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await stuck_run(pipeline_setup)
    seen = await read_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert seen.stored.reason_at(pipeline_setup.clock()) is None
    assert seen.seconds_left is None


async def test_the_same_key_starts_one_run(pipeline_setup: PipelineSetup) -> None:
    made = await actions.create_pipeline(pipeline_setup.context, *pipeline_setup.whose, ONE_STEP)
    new = NewPipelineRun(1, idempotency_key="k")
    first, is_new = await actions.start_run(
        pipeline_setup.context, *pipeline_setup.whose, made.id, new
    )
    again, is_new_again = await actions.start_run(
        pipeline_setup.context, *pipeline_setup.whose, made.id, new
    )
    assert (first.id, is_new, is_new_again) == (again.id, True, False)
    other = NewPipelineRun(2, idempotency_key="k")
    with pytest.raises(Conflict):
        await actions.start_run(pipeline_setup.context, *pipeline_setup.whose, made.id, other)


async def test_what_is_wrong_with_a_pipeline_is_told_before_anything_is_made(
    pipeline_setup: PipelineSetup,
) -> None:
    steps = [{"name": "A", "workflow": "fix"}, {"name": "B", "workflow": "none"}]
    with pytest.raises(InvalidInput) as refused:
        await actions.create_pipeline(
            pipeline_setup.context, *pipeline_setup.whose, {"name": "x", "steps": steps}
        )
    codes = [each["code"] for each in refused.value.details["problems"]]
    assert codes == ["missing_input", "unknown_workflow"]
    made = await actions.create_pipeline(pipeline_setup.context, *pipeline_setup.whose, THREE_STEPS)
    with pytest.raises(InvalidInput, match="no variable 'width'"):
        await actions.start_run(
            pipeline_setup.context, *pipeline_setup.whose, made.id, NewPipelineRun(1)
        )


async def test_others_find_nothing(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    another_tenant = uuid4()
    async with pipeline_setup.context.central.transaction() as tx:
        await tenants.create_tenant(
            tx, tenant_id=another_tenant, name="Eve", pool="main", now=pipeline_setup.clock()
        )
    for whose in ((pipeline_setup.tenant_id, uuid4()), (another_tenant, pipeline_setup.user_id)):
        with pytest.raises(NotFound):
            await actions.get_run(pipeline_setup.context, *whose, run.id)
        with pytest.raises(NotFound):
            await actions.pause_run(pipeline_setup.context, *whose, run.id)
        with pytest.raises(NotFound):
            await actions.get_pipeline(pipeline_setup.context, *whose, run.pipeline_id)
        assert await actions.list_runs(pipeline_setup.context, *whose, limit=10) == []


async def test_as_many_candidates_as_wanted_are_made_and_no_more(
    pipeline_setup: PipelineSetup,
) -> None:
    """The last job of two pictures fills the one place that is left; what was not said is left out."""
    two = {"name": "Two", "steps": [{**ONE_STEP["steps"][0], "images_per_job": 2}]}
    run = await pipeline_setup.start(two, base=3)
    for _ in range(2):
        await pipeline_setup.sweep()
        await pipeline_setup.finish(await pipeline_setup.leased(), [png(1), png(2), png(3)])
    await pipeline_setup.sweep()
    assert await pipeline_setup.made(run) == [3]
    assert (await pipeline_setup.state(run)).stored.reason == "complete"


async def test_a_step_may_make_texts_that_the_next_one_uses(pipeline_setup: PipelineSetup) -> None:
    words = {
        "name": "Words",
        "steps": [
            {"name": "Write", "workflow": "draw"},
            {"name": "Draw", "workflow": "draw", "properties": {"prefix": "a {{ parent.text }}"}},
        ],
    }
    run = await pipeline_setup.start(words, base=1)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased(), [], texts=["cat"])
    await pipeline_setup.sweep()
    (written,) = await pipeline_setup.candidates(run)
    assert (written.text, (written.file or {})["mime_type"]) == ("cat", "text/plain")
    handed = await pipeline_setup.leased()
    assert handed.prompt["2"]["inputs"]["filename_prefix"].endswith("a cat")
    await pipeline_setup.finish(handed, texts=["a caption"])
    await pipeline_setup.sweep()
    assert [each.text for each in await pipeline_setup.candidates(run)] == ["cat", "a caption"]


async def test_variables_of_the_wrong_kind_start_nothing(pipeline_setup: PipelineSetup) -> None:
    made = await actions.create_pipeline(pipeline_setup.context, *pipeline_setup.whose, THREE_STEPS)
    for wrong in ("wide", 0.5, True):
        with pytest.raises(InvalidInput, match="width"):
            await actions.start_run(
                pipeline_setup.context,
                *pipeline_setup.whose,
                made.id,
                NewPipelineRun(1, variables={"width": wrong}),
            )
    run = await pipeline_setup.start()
    with pytest.raises(InvalidInput, match="width"):
        await actions.change_run(
            pipeline_setup.context, *pipeline_setup.whose, run.id, variables={"width": "wide"}
        )


async def test_a_seed_fits_wherever_it_is_named(pipeline_setup: PipelineSetup) -> None:
    step = {"name": "Base", "workflow": "draw", "properties": {"width": "{{ seed }}"}}
    await pipeline_setup.start({"name": "Seeds", "steps": [step]}, base=1)
    await pipeline_setup.sweep()
    inputs = (await pipeline_setup.leased()).prompt["1"]["inputs"]
    assert 1 <= inputs["height"] <= 255  # left open, and within its range


async def test_a_later_step_takes_its_parents_picture_by_itself(
    pipeline_setup: PipelineSetup,
) -> None:
    steps = [{"name": "Base", "workflow": "draw"}, {"name": "Fix", "workflow_id": "fix"}]
    made = await actions.create_pipeline(
        pipeline_setup.context, *pipeline_setup.whose, {"name": "Two", "steps": steps}
    )
    bound = {"name": "Fix", "workflow": "fix", "properties": {"input": "{{ parent.file }}"}}
    assert made.document["steps"] == [steps[0], bound]
    assert made.pipeline.steps[1].properties == bound["properties"]


async def test_all_that_is_wrong_with_a_pipeline_is_told_at_once(
    pipeline_setup: PipelineSetup,
) -> None:
    steps = [
        {"name": "E", "workflow": "fix"},
        {"name": "A", "workflow": "draw", "properties": {"width": "{{ nobody }}"}, "keep": "x"},
        {"name": "B", "workflow": "nowhere"},
        {"name": "C", "workflow": "draw", "properties": {"widht": 1, "width": "w{{ seed }}"}},
        {"name": "D", "workflow": "draw", "seed": 300, "properties": {"hue": "{{ seed }}"}},
    ]
    with pytest.raises(InvalidInput) as refused:
        await actions.create_pipeline(
            pipeline_setup.context, *pipeline_setup.whose, {"name": "Bad", "steps": steps}
        )
    found = {(each["step"], each["code"]) for each in refused.value.details["problems"]}
    assert found == {
        ("A", "invalid_field"),
        ("A", "invalid_template"),
        ("B", "unknown_workflow"),
        ("C", "unknown_property"),
        ("C", "type_mismatch"),
        ("D", "type_mismatch"),
        ("E", "missing_input"),
    }


async def test_a_step_that_cannot_be_made_stops_no_other(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(base=2, limits={"concurrent_jobs": 1})
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased())
    async with pipeline_setup.context.central.transaction() as tx:
        fix = await catalog.workflow_by_slug(tx, "fix")
        await catalog.change_terms(tx, fix, WorkflowTerms(is_withdrawn=True))
    await pipeline_setup.sweep()
    handed = await pipeline_setup.leased()
    assert handed.prompt["1"]["class_type"] == "EmptyImage"  # the second of the base
    stored = (await pipeline_setup.state(run)).stored
    assert stored.trouble == "step 'Fix it': the workflow fix isn't currently offered"


async def test_a_job_that_nobody_can_run_is_told_as_the_runs_trouble(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ONE_STEP, base=1)
    for _ in range(2):
        await pipeline_setup.sweep()
        pipeline_setup.clock.advance(seconds=60)
    trouble = (await pipeline_setup.state(run)).stored.trouble or ""
    assert "NoBackendAvailable: no backend can run draw at the moment" in trouble
