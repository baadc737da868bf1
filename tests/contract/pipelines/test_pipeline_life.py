"""A run from its start to its last candidate, by hand: the loop submits, the test is the worker."""

import re
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.pipelines import ONE_STEP, THREE_STEPS, TOKENS, Studio, png, studio_on

from comfyfleet.errors import Conflict, InvalidInput, NotFound
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import WorkflowTerms
from comfyfleet.server.jobs import submit
from comfyfleet.server.pipelines import actions, store_candidates
from comfyfleet.server.pipelines.actions import NewPipelineRun
from comfyfleet.server.pipelines.collector import collect_job, fail_overdue
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger


async def balance(studio: Studio) -> int:
    async with studio.pool.read() as tx:
        return await ledger.balance(tx, *studio.whose)


async def test_three_steps_make_their_tree_and_every_token_is_accounted_for(
    studio: Studio,
) -> None:
    run = await studio.start(base=2)
    assert await studio.work_off() == 2 + 4 + 4
    assert await studio.made(run) == [2, 4, 4]
    state = await studio.state(run)
    assert state.stored.reason == "complete"
    assert [each.child_count for each in state.tree.candidates.values() if each.step == 0] == [2, 2]
    assert state.run.tokens == 2 * 3 + 4 * 2 + 4 * 1
    assert await balance(studio) == TOKENS - state.run.tokens
    found = await studio.candidates(run)
    by_id = {each.id: each for each in found}
    for each in found:
        assert (each.parent is None) == (each.step == 0)
        assert each.step == 0 or by_id[each.parent].step == each.step - 1  # type: ignore[index]
    await studio.require_sound(run, [each.job_id for each in found if each.job_id])


async def test_a_candidate_is_named_by_folder_step_id_and_time(studio: Studio) -> None:
    run = await studio.start(base=1, target_folder="cats/spring")
    await studio.work_off()
    paths = [(each.file or {})["path"] for each in await studio.candidates(run, step=1)]
    pattern = rf"cats/spring/fix-it/[0-9a-f-]{{36}}_{studio.clock():%Y%m%d}\d{{6}}\.png"
    assert all(re.fullmatch(pattern, each) for each in paths)
    assert len(set(paths)) == 2


async def test_the_parents_picture_is_handed_on_by_reference(studio: Studio) -> None:
    run = await studio.start(base=1)
    await studio.sweep()
    await studio.finish(await studio.leased())
    await studio.sweep()
    handed = await studio.leased()
    (parent,) = await studio.candidates(run)
    job = await studio.job(handed.job_id)
    assert [str(each.file_id) for each in job.asked.assets] == [(parent.file or {})["file_id"]]
    assert job.asked.user_id == studio.user_id


async def test_each_job_gets_a_new_seed_which_its_candidates_tell(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=3)
    await studio.work_off()
    found = await studio.candidates(run)
    assert len({each.seed for each in found}) == 3
    assert all(each.properties["color"] == each.seed for each in found)


async def test_a_fixed_seed_stays(studio: Studio) -> None:
    step = {"name": "Base", "workflow": "draw", "seed": 2**64 - 1}
    run = await studio.start({"name": "Fixed", "steps": [step]}, base=2)
    await studio.work_off()
    assert {each.seed for each in await studio.candidates(run)} == {2**64 - 1}


async def test_four_images_are_four_candidates_with_one_charge(studio: Studio) -> None:
    step = {"name": "Base", "workflow": "draw", "images_per_job": 4}
    run = await studio.start({"name": "Four", "steps": [step]}, base=4)
    await studio.sweep()
    await studio.finish(await studio.leased(), [png(number) for number in range(4)])
    await studio.sweep()
    assert await studio.made(run) == [4]
    assert await balance(studio) == TOKENS - 3
    assert [each.output_index for each in await studio.candidates(run)] == [0, 1, 2, 3]
    assert await studio.lease() is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"no picture at all", "no picture that we know"),
        (png()[:-10], "ends too early"),
        (png().replace(b"IDAT", b"IDAU"), "damaged"),
    ],
    ids=["empty", "text", "cut", "damaged"],
)
async def test_an_unreadable_output_gives_no_candidate_and_says_why(
    studio: Studio, data: bytes, why: str
) -> None:
    run = await studio.start(ONE_STEP, base=1)
    await studio.sweep()
    await studio.finish(await studio.leased(), [data])
    await studio.sweep()
    assert await studio.made(run) == []
    state = await studio.state(run)
    assert state.stored.reason == "failed"
    async with studio.pool.read() as tx:
        (failed,) = await store_candidates.page_of_failed(tx, run.id, limit=10)
    assert why in (failed.error or "")
    assert await studio.lease() is None  # it is not made again by itself
    assert await balance(studio) == TOKENS - 3  # the job itself was done


async def test_a_job_without_any_output_gives_none_and_says_so(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=1)
    await studio.sweep()
    await studio.finish(await studio.leased(), [])
    await studio.sweep()
    async with studio.pool.read() as tx:
        (failed,) = await store_candidates.page_of_failed(tx, run.id, limit=10)
    assert failed.error == "the job saved no picture, and showed no text"


async def test_readable_outputs_are_kept_beside_an_unreadable_one(studio: Studio) -> None:
    step = {"name": "Base", "workflow": "draw", "images_per_job": 2}
    run = await studio.start({"name": "Two", "steps": [step]}, base=2)
    await studio.sweep()
    await studio.finish(await studio.leased(), [b"broken", png()])
    await studio.sweep()
    (found,) = await studio.candidates(run)
    assert found.output_index == 1


async def test_an_ended_job_is_collected_once_however_often_it_is_heard(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=1)
    await studio.sweep()
    handed = await studio.leased()
    await studio.finish(handed)
    for _ in range(3):
        await collect_job(studio.context, studio.pool, studio.tenant_id, run.id, handed.job_id)
    assert await studio.made(run) == [1]


async def test_a_failed_job_holds_its_place_until_it_is_retried(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=1)
    await studio.sweep()
    handed = await studio.leased()
    await studio.fail(handed)
    assert await studio.work_off() == 0
    assert (await studio.state(run)).stored.reason == "failed"
    assert await balance(studio) == TOKENS
    assert await actions.retry_jobs(studio.context, *studio.whose, run.id, handed.job_id) == [
        handed.job_id
    ]
    assert await studio.work_off() == 1
    assert await studio.made(run) == [1]
    with pytest.raises(NotFound):
        await actions.retry_jobs(studio.context, *studio.whose, run.id, handed.job_id)


async def test_all_failed_jobs_are_retried_at_once(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=3, limits={"concurrent_jobs": 3})
    await studio.sweep()
    for _ in range(3):
        await studio.fail(await studio.leased())
    await studio.sweep()
    assert len(await actions.retry_jobs(studio.context, *studio.whose, run.id)) == 3
    assert await studio.work_off() == 3


async def test_one_job_of_a_run_is_in_flight_unless_it_may_have_more(studio: Studio) -> None:
    await studio.start(ONE_STEP, base=5)
    await studio.sweep()
    assert await studio.lease()
    assert await studio.lease() is None
    await studio.start(ONE_STEP, base=5, limits={"concurrent_jobs": 3})
    await studio.sweep()
    assert [await studio.lease() is not None for _ in range(4)] == [True, True, True, False]


async def test_a_paused_run_submits_nothing_and_goes_on_when_resumed(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=2)
    await studio.sweep()
    handed = await studio.leased()
    await actions.pause_run(studio.context, *studio.whose, run.id)
    await studio.finish(handed)
    assert await studio.work_off() == 0
    assert await studio.made(run) == [1]
    await actions.resume_run(studio.context, *studio.whose, run.id)
    assert await studio.work_off() == 1


async def test_changed_variables_apply_to_what_is_submitted_next(studio: Studio) -> None:
    run = await studio.start(base=2)
    await studio.sweep()
    await studio.finish(await studio.leased())
    await actions.change_run(studio.context, *studio.whose, run.id, variables={"width": 16})
    await studio.work_off()
    widths = [each.properties["width"] for each in await studio.candidates(run, step=0)]
    assert widths == [8, 16]


async def test_limits_hold_and_can_be_raised(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=9, limits={"tokens": 7})
    assert await studio.work_off() == 2
    assert (await studio.state(run)).stored.reason == "tokens_limit"
    changed = {"tokens": None, "candidates": 3}
    await actions.change_run(studio.context, *studio.whose, run.id, limits=changed)
    assert await studio.work_off() == 1
    assert (await studio.state(run)).stored.reason == "candidates_limit"
    soon = {"candidates": None, "until": studio.clock() + timedelta(seconds=30)}
    await actions.change_run(studio.context, *studio.whose, run.id, limits=soon)
    studio.clock.go_on(seconds=60)
    assert await studio.work_off() == 0
    assert (await studio.state(run)).stored.reason == "time_up"


async def test_cancelling_a_run_cancels_what_is_queued_and_keeps_what_runs(
    studio: Studio,
) -> None:
    run = await studio.start(ONE_STEP, base=5, limits={"concurrent_jobs": 2})
    await studio.sweep()
    handed = await studio.leased()
    await actions.cancel_run(studio.context, *studio.whose, run.id)
    assert await balance(studio) == TOKENS - 3
    await studio.finish(handed)
    assert await studio.work_off() == 0
    assert await studio.made(run) == [1]
    assert (await studio.state(run)).run.tokens == 3
    with pytest.raises(Conflict):
        await actions.resume_run(studio.context, *studio.whose, run.id)


async def test_a_job_that_its_owner_cancels_is_not_made_again_by_itself(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=1)
    await studio.sweep()
    (job,) = (await studio.state(run)).in_flight
    await submit.cancel_job(studio.context, studio.tenant_id, job.job_id)
    assert await studio.work_off() == 0
    assert len((await studio.state(run)).tree.failed) == 1


async def test_runs_of_a_tenant_take_turns(studio: Studio) -> None:
    runs = [await studio.start(ONE_STEP, base=3) for _ in range(3)]
    served = []
    for _ in range(9):
        await studio.sweep()
        handed = await studio.leased()
        served.append((await studio.job(handed.job_id)).asked.run_id)
        await studio.finish(handed)
    for start in range(0, 9, 3):
        assert set(served[start : start + 3]) == {each.id for each in runs}


async def test_a_job_over_its_time_is_failed_and_refunded(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=1)
    await studio.sweep()
    handed = await studio.leased()
    studio.clock.go_on(seconds=299)
    assert await fail_overdue(studio.context, studio.pool) == 0
    studio.clock.go_on(seconds=2)
    assert await fail_overdue(studio.context, studio.pool) == 1
    await studio.sweep()
    assert (await studio.job(handed.job_id)).error_message == "It took longer than 300 s."
    assert len((await studio.state(run)).tree.failed) == 1
    assert await balance(studio) == TOKENS


async def test_a_job_that_nobody_takes_up_is_given_up_after_a_day(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=1)
    await studio.sweep()
    studio.clock.go_on(hours=23)
    assert await fail_overdue(studio.context, studio.pool) == 0
    studio.clock.go_on(hours=2)
    assert await fail_overdue(studio.context, studio.pool) == 1
    await studio.sweep()
    assert len((await studio.state(run)).tree.failed) == 1


async def test_too_few_tokens_are_told_and_the_run_goes_on_when_there_are_more(
    databases: Databases, tmp_path: Path
) -> None:
    async with studio_on(databases, tmp_path) as studio:
        run = await studio.start(ONE_STEP, base=400)
        async with studio.pool.transaction() as tx:
            poor = uuid4()
            await ledger.credit(tx, studio.tenant_id, poor, 4, "p", now=studio.clock())
        studio.user_id = poor
        await actions.pause_run(studio.context, studio.tenant_id, run.user_id, run.id)
        run = await studio.start(ONE_STEP, base=2)
        assert await studio.work_off() == 1
        assert (await studio.state(run)).stored.trouble == "Insufficient token balance."
        async with studio.pool.transaction() as tx:
            await ledger.credit(tx, studio.tenant_id, poor, 9, "q", now=studio.clock())
        studio.clock.go_on(seconds=120)
        assert await studio.work_off() == 1


async def test_the_same_key_starts_one_run(studio: Studio) -> None:
    made = await actions.create_pipeline(studio.context, *studio.whose, ONE_STEP)
    new = NewPipelineRun(1, idempotency_key="k")
    first, is_new = await actions.start_run(studio.context, *studio.whose, made.id, new)
    again, is_new_again = await actions.start_run(studio.context, *studio.whose, made.id, new)
    assert (first.id, is_new, is_new_again) == (again.id, True, False)
    other = NewPipelineRun(2, idempotency_key="k")
    with pytest.raises(Conflict):
        await actions.start_run(studio.context, *studio.whose, made.id, other)


async def test_what_is_wrong_with_a_pipeline_is_told_before_anything_is_made(
    studio: Studio,
) -> None:
    steps = [{"name": "A", "workflow": "none"}, {"name": "B", "workflow": "fix"}]
    with pytest.raises(InvalidInput) as refused:
        await actions.create_pipeline(studio.context, *studio.whose, {"name": "x", "steps": steps})
    codes = [each["code"] for each in refused.value.details["problems"]]
    assert codes == ["unknown_workflow", "missing_input"]
    made = await actions.create_pipeline(studio.context, *studio.whose, THREE_STEPS)
    with pytest.raises(InvalidInput, match="no variable 'width'"):
        await actions.start_run(studio.context, *studio.whose, made.id, NewPipelineRun(1))


async def test_others_find_nothing(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=1)
    another_tenant = uuid4()
    async with studio.context.central.transaction() as tx:
        await tenants.create_tenant(
            tx, tenant_id=another_tenant, name="Eve", pool="main", now=studio.clock()
        )
    for whose in ((studio.tenant_id, uuid4()), (another_tenant, studio.user_id)):
        with pytest.raises(NotFound):
            await actions.get_run(studio.context, *whose, run.id)
        with pytest.raises(NotFound):
            await actions.pause_run(studio.context, *whose, run.id)
        with pytest.raises(NotFound):
            await actions.get_pipeline(studio.context, *whose, run.pipeline_id)
        assert await actions.list_runs(studio.context, *whose, limit=10) == []


async def test_as_many_candidates_as_wanted_are_made_and_no_more(studio: Studio) -> None:
    """The last job of two pictures fills the one place that is left; what was not said is left out."""
    two = {"name": "Two", "steps": [{**ONE_STEP["steps"][0], "images_per_job": 2}]}
    run = await studio.start(two, base=3)
    for _ in range(2):
        await studio.sweep()
        await studio.finish(await studio.leased(), [png(1), png(2), png(3)])
    await studio.sweep()
    assert await studio.made(run) == [3]
    assert (await studio.state(run)).stored.reason == "complete"


async def test_a_step_may_make_texts_that_the_next_one_uses(studio: Studio) -> None:
    words = {
        "name": "Words",
        "steps": [
            {"name": "Write", "workflow": "draw"},
            {"name": "Draw", "workflow": "draw", "properties": {"prefix": "a {{ parent.text }}"}},
        ],
    }
    run = await studio.start(words, base=1)
    await studio.sweep()
    await studio.finish(await studio.leased(), [], texts=["cat"])
    await studio.sweep()
    (written,) = await studio.candidates(run)
    assert (written.text, (written.file or {})["mime_type"]) == ("cat", "text/plain")
    handed = await studio.leased()
    assert handed.prompt["2"]["inputs"]["filename_prefix"].endswith("a cat")
    await studio.finish(handed, texts=["a caption"])
    await studio.sweep()
    assert [each.text for each in await studio.candidates(run)] == ["cat", "a caption"]


async def test_variables_of_the_wrong_kind_start_nothing(studio: Studio) -> None:
    made = await actions.create_pipeline(studio.context, *studio.whose, THREE_STEPS)
    for wrong in ("wide", 0.5, True):
        with pytest.raises(InvalidInput, match="width"):
            await actions.start_run(
                studio.context,
                *studio.whose,
                made.id,
                NewPipelineRun(1, variables={"width": wrong}),
            )
    run = await studio.start()
    with pytest.raises(InvalidInput, match="width"):
        await actions.change_run(studio.context, *studio.whose, run.id, variables={"width": "wide"})


async def test_a_seed_fits_wherever_it_is_named(studio: Studio) -> None:
    step = {"name": "Base", "workflow": "draw", "properties": {"width": "{{ seed }}"}}
    await studio.start({"name": "Seeds", "steps": [step]}, base=1)
    await studio.sweep()
    inputs = (await studio.leased()).prompt["1"]["inputs"]
    assert 1 <= inputs["height"] <= 255  # left open, and within its range


async def test_all_that_is_wrong_with_a_pipeline_is_told_at_once(studio: Studio) -> None:
    steps = [
        {"name": "A", "workflow": "draw", "properties": {"width": "{{ nobody }}"}, "keep": "x"},
        {"name": "B", "workflow": "nowhere"},
        {"name": "C", "workflow": "draw", "properties": {"widht": 1, "width": "w{{ seed }}"}},
        {"name": "D", "workflow": "draw", "seed": 300, "properties": {"hue": "{{ seed }}"}},
        {"name": "E", "workflow": "fix"},
    ]
    with pytest.raises(InvalidInput) as refused:
        await actions.create_pipeline(
            studio.context, *studio.whose, {"name": "Bad", "steps": steps}
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


async def test_a_step_that_cannot_be_made_stops_no_other(studio: Studio) -> None:
    run = await studio.start(base=2, limits={"concurrent_jobs": 1})
    await studio.sweep()
    await studio.finish(await studio.leased())
    async with studio.context.central.transaction() as tx:
        fix = await catalog.workflow_by_slug(tx, "fix")
        await catalog.change_terms(tx, fix, WorkflowTerms(is_withdrawn=True))
    await studio.sweep()
    handed = await studio.leased()
    assert handed.prompt["1"]["class_type"] == "EmptyImage"  # the second of the base
    stored = (await studio.state(run)).stored
    assert stored.trouble == "step 'Fix it': the workflow fix is not offered at present"


async def test_a_job_that_nobody_can_run_is_told_as_the_runs_trouble(studio: Studio) -> None:
    run = await studio.start(ONE_STEP, base=1)
    for _ in range(2):
        await studio.sweep()
        studio.clock.go_on(seconds=60)
    trouble = (await studio.state(run)).stored.trouble or ""
    assert "NoBackendAvailable: no backend can run draw at the moment" in trouble
