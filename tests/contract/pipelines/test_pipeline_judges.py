"""The judge of a step: its jobs, its scores, its verdicts, and that people have the last word."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.jobs.pipelines import THREE_STEPS, TOKENS, PipelineSetup, pipeline_setup_on

from comfyfleet.api.pipelines import CandidateSort
from comfyfleet.api.worker import Job as Handed
from comfyfleet.errors import InvalidInput
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import WorkflowTerms
from comfyfleet.server.jobs.outbox import flush_due
from comfyfleet.server.maintenance.sweeps import advance_pipelines, maintain_pipelines
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.pipelines import actions, run_state, store, store_candidates
from comfyfleet.server.pipelines.actions import CandidateRef
from comfyfleet.server.pipelines.collector import collect_job
from comfyfleet.server.pipelines.model import (
    CandidateStatus,
    JudgedBy,
    PipelineCandidate,
    StoredRun,
)
from comfyfleet.server.pipelines.store_candidates import CandidateFilter
from comfyfleet.server.tenants import wallet as ledger

JUDGE = {"workflow": "rate", "property": "input", "approve_above": 0.8, "reject_below": 0.3}
FIRST, SECOND = THREE_STEPS["steps"][:2]
JUDGED: dict[str, Any] = {"name": "Judged", "steps": [{**FIRST, "judge": JUDGE}, SECOND]}
ALONE: dict[str, Any] = {"name": "Alone", "steps": [{**FIRST, "judge": JUDGE}]}
Score = Callable[[], str | None]  # what a judge shows; None: its job fails
APPROVED = (CandidateStatus.APPROVED, JudgedBy.JUDGE)
REJECTED = (CandidateStatus.REJECTED, JudgedBy.JUDGE)
OPEN = (CandidateStatus.ACTIVE, None)


def shows(*scores: str | None) -> Score:
    given = cycle(scores)
    return lambda: next(given)


async def judged_by_job(setup: PipelineSetup, run: StoredRun, handed: Handed) -> UUID | None:
    """The candidate that a job is to judge."""
    async with setup.pool.read() as tx:
        row = await store_candidates.get_job(tx, run.id, handed.job_id)
    assert row
    return row.parent if row.is_judge else None


async def work_one(setup: PipelineSetup, run: StoredRun, handed: Handed, score: Score) -> None:
    if await judged_by_job(setup, run, handed) is None:
        await setup.finish(handed)
    elif (shown := score()) is None:
        await setup.fail(handed)
    else:
        await setup.finish(handed, [], texts=[shown])


async def work_off(setup: PipelineSetup, run: StoredRun, score: Score) -> int:
    for count in range(100):
        await setup.sweep()
        handed = await setup.lease()
        if handed is None:
            return count
        await work_one(setup, run, handed, score)
    raise AssertionError("still not done after 100 jobs")


async def until_judge(setup: PipelineSetup, run: StoredRun) -> Handed:
    """The first judge's job, once what it judges is made."""
    await setup.sweep()
    await setup.finish(await setup.leased())
    await setup.sweep()
    handed = await setup.leased()
    assert await judged_by_job(setup, run, handed)
    return handed


async def verdicts(setup: PipelineSetup, run: StoredRun) -> list[tuple[Any, ...]]:
    return [(each.status, each.judged_by) for each in await setup.candidates(run, step=0)]


def on(setup: PipelineSetup, run: StoredRun, candidate: PipelineCandidate) -> CandidateRef:
    return CandidateRef(*setup.whose, run.id, candidate.id)


async def say(
    setup: PipelineSetup, run: StoredRun, candidate: PipelineCandidate, verdict: CandidateStatus
) -> PipelineCandidate:
    return await actions.judge_candidate(setup.context, on(setup, run, candidate), verdict)


async def require_paid(setup: PipelineSetup, run: StoredRun, tokens: int) -> None:
    assert (await setup.state(run)).run.tokens == tokens
    async with setup.pool.read() as tx:
        assert await ledger.balance(tx, *setup.whose) == TOKENS - tokens
        assert await ledger.verify(tx) == []


async def events(setup: PipelineSetup, run: StoredRun, *kinds: str) -> list[Mapping[str, Any]]:
    async with setup.pool.read() as tx:
        found = await run_state.read_events(tx, run.id, after_id=0, limit=1000)
    return [each.data for each in found if each.kind in kinds]


async def test_what_is_good_gets_children_what_is_bad_does_not_and_a_person_is_asked_about_the_rest(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(JUDGED, base=4)
    assert await work_off(pipeline_setup, run, shows("0.9", "0.5", "0.1", "0.8")) == 4 + 4 + 4
    assert await verdicts(pipeline_setup, run) == [APPROVED, OPEN, REJECTED, APPROVED]
    good, unclear, _, edge = await pipeline_setup.candidates(run, step=0)
    scores = [each.judge_score for each in await pipeline_setup.candidates(run, step=0)]
    assert scores == [0.9, 0.5, 0.1, 0.8]
    children = await pipeline_setup.candidates(run, step=1)
    assert {each.parent for each in children} == {good.id, edge.id}
    assert {each.judged_by for each in children} == {None}
    await require_paid(pipeline_setup, run, 4 * 3 + 4 * 1 + 4 * 2)
    seen = await run_state.read_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert (seen.stored.reason, seen.steps[0].waiting) == ("waiting_for_judgement", 1)
    await say(pipeline_setup, run, unclear, CandidateStatus.APPROVED)
    assert await work_off(pipeline_setup, run, shows()) == 2
    assert (await pipeline_setup.state(run)).stored.reason == "complete"
    async with pipeline_setup.context.central.read() as tx:
        told = await notifications.find_audit_entries(
            tx, subject=f"pipeline_run:{run.id}", limit=50
        )
    decided = [
        (each.actor, each.details["judged_by"])
        for each in told
        if each.action in ("pipeline_approved", "pipeline_rejected")
    ]
    assert decided == [
        (f"tenant:{pipeline_setup.tenant_id}", "person"),
        *[("sweep", "judge")] * 3,
    ]
    scored = await events(pipeline_setup, run, "scored")
    assert [each["score"] for each in scored] == scores


async def test_a_judge_sees_the_picture_and_what_its_properties_say(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ALONE, base=1)
    handed = await until_judge(pipeline_setup, run)
    (candidate,) = await pipeline_setup.candidates(run)
    job = await pipeline_setup.job(handed.job_id)
    assert [str(each.file_id) for each in job.spec.assets] == [(candidate.file or {})["file_id"]]
    assert (job.spec.user_id, job.spec.price_tokens) == (pipeline_setup.user_id, 1)


async def test_a_person_overrides_the_judge_and_undo_brings_its_verdict_back(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(JUDGED, base=1)
    await work_off(pipeline_setup, run, shows("0.1"))
    (bad,) = await pipeline_setup.candidates(run)
    now = await say(pipeline_setup, run, bad, CandidateStatus.WINNER)
    assert (now.status, now.judged_by) == (CandidateStatus.WINNER, JudgedBy.PERSON)
    assert await work_off(pipeline_setup, run, shows()) == 2
    back = await actions.undo_judgement(pipeline_setup.context, on(pipeline_setup, run, bad))
    assert (back.status, back.judged_by) == REJECTED
    undone = await actions.undo_judgement(pipeline_setup.context, on(pipeline_setup, run, bad))
    assert (undone.status, undone.judged_by, undone.judge_score) == (*OPEN, 0.1)
    # It is not judged again: now a person is asked.
    assert await work_off(pipeline_setup, run, shows("0.1")) == 0
    assert await verdicts(pipeline_setup, run) == [OPEN]


async def test_a_person_who_agrees_with_the_judge_is_told_as_the_one_who_judged(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ALONE, base=1)
    await work_off(pipeline_setup, run, shows("0.9"))
    (good,) = await pipeline_setup.candidates(run)
    for _ in range(2):
        now = await say(pipeline_setup, run, good, CandidateStatus.APPROVED)
        assert (now.status, now.judged_by) == (CandidateStatus.APPROVED, JudgedBy.PERSON)
    back = await actions.undo_judgement(pipeline_setup.context, on(pipeline_setup, run, good))
    assert (back.status, back.judged_by) == APPROVED


@pytest.mark.parametrize("verdict", ["approved", "rejected", "winner"])
async def test_a_late_score_is_kept_and_changes_nothing_that_a_person_said(
    pipeline_setup: PipelineSetup, verdict: str
) -> None:
    run = await pipeline_setup.start(ALONE, base=1)
    handed = await until_judge(pipeline_setup, run)
    (candidate,) = await pipeline_setup.candidates(run)
    await say(pipeline_setup, run, candidate, CandidateStatus(verdict))
    await pipeline_setup.finish(handed, [], texts=["0.1" if verdict == "approved" else "0.9"])
    await pipeline_setup.sweep()
    (now,) = await pipeline_setup.candidates(run)
    assert (now.status, now.judged_by) == (verdict, JudgedBy.PERSON)
    assert now.judge_score is not None
    await require_paid(pipeline_setup, run, 3 + 1)


async def test_a_judge_that_waits_is_cancelled_and_refunded_when_a_person_was_faster(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ALONE, base=1)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased())
    await pipeline_setup.sweep()
    await require_paid_reserved(pipeline_setup, run, 4)
    (candidate,) = await pipeline_setup.candidates(run)
    await say(pipeline_setup, run, candidate, CandidateStatus.APPROVED)
    assert await work_off(pipeline_setup, run, shows("0.1")) == 0
    await require_paid(pipeline_setup, run, 3)
    # Once nobody has judged it any more, it is the judge's turn again.
    await actions.undo_judgement(pipeline_setup.context, on(pipeline_setup, run, candidate))
    assert await work_off(pipeline_setup, run, shows("0.1")) == 1
    assert await verdicts(pipeline_setup, run) == [REJECTED]
    await require_paid(pipeline_setup, run, 4)


async def require_paid_reserved(setup: PipelineSetup, run: StoredRun, tokens: int) -> None:
    assert (await setup.state(run)).run.tokens == tokens


async def test_a_judge_that_fails_leaves_the_candidate_to_a_person_and_says_so(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(JUDGED, base=1)
    assert await work_off(pipeline_setup, run, shows(None)) == 2
    (candidate,) = await pipeline_setup.candidates(run)
    assert (candidate.judge_score, candidate.judge_error) == (None, "out of memory")
    await require_paid(pipeline_setup, run, 3)
    seen = await run_state.read_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    first = seen.steps[0]
    assert (seen.stored.reason, first.waiting, first.failed) == ("waiting_for_judgement", 1, 1)
    (told,) = await events(pipeline_setup, run, "job_failed")
    assert told["candidate_id"] == str(candidate.id)
    assert told["is_judge"]
    (failed,) = await run_state.list_failures(
        pipeline_setup.context, *pipeline_setup.whose, run.id, limit=5
    )
    assert (failed.is_judge, failed.parent) == (True, candidate.id)
    await actions.retry_jobs(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert await work_off(pipeline_setup, run, shows("0.9")) == 1 + 2
    (candidate,) = await pipeline_setup.candidates(run, step=0)
    assert (candidate.judge_score, candidate.judge_error) == (0.9, None)
    await require_paid(pipeline_setup, run, 3 + 1 + 2 * 2)


@pytest.mark.parametrize("shown", ["good", "NaN", "[1]", "true", "1e999", str(10**400)])
async def test_what_is_no_number_is_no_score_and_was_paid_for(
    pipeline_setup: PipelineSetup, shown: str
) -> None:
    run = await pipeline_setup.start(ALONE, base=1)
    await work_off(pipeline_setup, run, shows(shown))
    (candidate,) = await pipeline_setup.candidates(run)
    assert candidate.judge_score is None
    assert (candidate.judge_error or "").startswith("the judge returned no score")
    assert await verdicts(pipeline_setup, run) == [OPEN]
    await require_paid(pipeline_setup, run, 4)


async def test_a_score_may_be_computed_from_what_the_judge_showed(
    pipeline_setup: PipelineSetup,
) -> None:
    judge = {**JUDGE, "score": "1 - output.json.error / 10"}
    run = await pipeline_setup.start({"name": "C", "steps": [{**FIRST, "judge": judge}]}, base=1)
    await work_off(pipeline_setup, run, shows('{"error": 2}'))
    (candidate,) = await pipeline_setup.candidates(run)
    assert candidate.judge_score == pytest.approx(0.8)
    assert candidate.status == CandidateStatus.APPROVED


async def test_a_text_is_left_to_a_person(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(ALONE, base=1)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased(), [], texts=["once upon a time"])
    await pipeline_setup.sweep()
    assert await pipeline_setup.lease() is None
    (candidate,) = await pipeline_setup.candidates(run)
    assert "looks at pictures" in (candidate.judge_error or "")
    seen = await run_state.read_run(pipeline_setup.context, *pipeline_setup.whose, run.id)
    assert seen.steps[0].waiting == 1


async def test_judges_are_bounded_by_the_tokens_of_the_run(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(ALONE, base=3, limits={"tokens": 7})
    assert await work_off(pipeline_setup, run, shows("0.5")) == 2 + 1
    assert (await pipeline_setup.state(run)).stored.reason == "tokens_limit"
    await require_paid(pipeline_setup, run, 7)
    await actions.change_run(
        pipeline_setup.context, *pipeline_setup.whose, run.id, limits={"tokens": None}
    )
    await work_off(pipeline_setup, run, shows("0.5"))
    await require_paid(pipeline_setup, run, 3 * (3 + 1))


async def test_a_judge_that_is_not_offered_any_more_stops_nothing_but_itself(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(JUDGED, base=2)
    async with pipeline_setup.context.central.transaction() as tx:
        rate = await catalog.workflow_by_slug(tx, "rate")
        await catalog.change_terms(tx, rate, WorkflowTerms(is_withdrawn=True))
    assert await work_off(pipeline_setup, run, shows("0.9")) == 2
    state = await pipeline_setup.state(run)
    assert "'Base, judge'" in (state.stored.trouble or "")
    first, _ = await pipeline_setup.candidates(run)
    await say(pipeline_setup, run, first, CandidateStatus.APPROVED)
    assert await work_off(pipeline_setup, run, shows("0.9")) == 2


async def test_a_judge_that_rejects_stops_children_that_wait(pipeline_setup: PipelineSetup) -> None:
    """A person approved it, its children were queued, and then the person took it back."""
    run = await pipeline_setup.start(JUDGED, base=1, limits={"concurrent_jobs": 3})
    handed = await until_judge(pipeline_setup, run)
    (candidate,) = await pipeline_setup.candidates(run)
    await say(pipeline_setup, run, candidate, CandidateStatus.APPROVED)
    await pipeline_setup.sweep()
    await actions.undo_judgement(pipeline_setup.context, on(pipeline_setup, run, candidate))
    assert len((await pipeline_setup.state(run)).in_flight) == 1 + 2
    await pipeline_setup.finish(handed, [], texts=["0.1"])
    await pipeline_setup.sweep()
    assert (await pipeline_setup.state(run)).in_flight == []
    assert await pipeline_setup.lease() is None
    await require_paid(pipeline_setup, run, 3 + 1)


async def test_candidates_are_listed_by_score_page_by_page(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(ALONE, base=5)
    await work_off(pipeline_setup, run, shows("0.5", None, "0.9", "-2", "0.5"))
    wanted = CandidateFilter(sort=CandidateSort.SCORE)
    found: list[PipelineCandidate] = []
    for _ in range(5):
        async with pipeline_setup.pool.read() as tx:
            found += await store_candidates.list_page(
                tx, run.id, wanted, after=found[-1] if found else None, limit=1
            )
    assert [each.judge_score for each in found] == [0.9, 0.5, 0.5, -2, None]
    assert len({each.id for each in found}) == 5
    assert found[1].created_at < found[2].created_at


async def test_votes_go_on_beside_scores(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(ALONE, base=3)
    await work_off(pipeline_setup, run, shows("0.9", "0.5", "0.6"))
    whose = (pipeline_setup.context, *pipeline_setup.whose, run.id)
    sure, one, other = await pipeline_setup.candidates(run)
    pair = await actions.pick_pair(*whose)
    assert pair
    assert sure.id != pair.first.id  # a judge was sure of it: it can wait
    vote = pipeline_setup.context.new_id()
    scores = await actions.add_vote(*whose, vote_id=vote, winner=one.id, loser=other.id)
    assert scores == {one.id: 1016.0, other.id: 984.0}
    after = await pipeline_setup.candidates(run)
    assert [each.judge_score for each in after] == [0.9, 0.5, 0.6]


async def test_a_loop_that_dies_anywhere_pays_each_judge_once(
    databases: Databases, tmp_path: Path
) -> None:
    async with pipeline_setup_on(databases, tmp_path) as setup:
        run = await setup.start(JUDGED, base=2)
        fuse, burns, score = Fuse(), 0, shows("0.9", "0.1")
        cut = fused(setup.context, fuse)
        for length in range(60):
            fuse.left = length % 23
            try:
                await setup.sweep(cut)
            except ProcessDied:
                burns += 1
            fuse.left = None
            await flush_due(setup.context, setup.pool, limit=100)
            await maintain_pipelines(setup.context, setup.pool)
            if handed := await setup.lease():
                await work_one(setup, run, handed, score)
        assert burns > 20
        await work_off(setup, run, score)
        assert sorted(await verdicts(setup, run)) == sorted([APPROVED, REJECTED])
        assert await setup.made(run) == [2, 2]
        await require_paid(setup, run, 2 * (3 + 1) + 2 * 2)
        assert len(await events(setup, run, "scored")) == 2
        assert len(await events(setup, run, "approved", "rejected")) == 2


async def test_two_loops_at_once_judge_once(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(JUDGED, base=1)
    for _ in range(20):
        await asyncio.gather(
            *(advance_pipelines(pipeline_setup.context, pipeline_setup.pool) for _ in range(4))
        )
        pipeline_setup.clock.advance(seconds=20)
        handed = await pipeline_setup.lease()
        if handed is None:
            break
        await work_one(pipeline_setup, run, handed, shows("0.9"))
    assert await pipeline_setup.made(run) == [1, 2]
    await require_paid(pipeline_setup, run, 3 + 1 + 2 * 2)


async def test_a_score_is_written_once_however_often_it_is_heard(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(ALONE, base=1)
    handed = await until_judge(pipeline_setup, run)
    await pipeline_setup.finish(handed, [], texts=["0.9"])
    (candidate,) = await pipeline_setup.candidates(run)
    for _ in range(3):
        await collect_job(
            pipeline_setup.context, pipeline_setup.pool, run.tenant_id, run.id, handed.job_id
        )
    async with pipeline_setup.pool.read() as tx:
        assert len(await store.last_judgements(tx, candidate.id, limit=5)) == 1
    assert await verdicts(pipeline_setup, run) == [APPROVED]


async def test_a_pipeline_whose_judge_does_not_fit_is_not_stored(
    pipeline_setup: PipelineSetup,
) -> None:
    def wrong() -> Iterator[dict[str, Any]]:
        yield {**JUDGE, "workflow": "rates"}
        yield {**JUDGE, "property": "image"}
        yield {**JUDGE, "approve_above": 0.1}

    for judge in wrong():
        with pytest.raises(InvalidInput) as refused:
            await pipeline_setup.start({"name": "W", "steps": [{**FIRST, "judge": judge}]})
        problem, *_ = refused.value.details["problems"]
        assert problem["step"] == "Base"
        assert problem["field"].startswith("judge.")
