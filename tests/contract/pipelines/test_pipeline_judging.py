"""Approve, reject, crown, compare, undo: what each does to the tree, and that it is written down."""

from uuid import UUID, uuid4

import pytest
from tests.support.jobs.pipelines import ONE_STEP, THREE_STEPS, PipelineSetup

from comfyfleet.errors import Conflict, InvalidInput, LimitExceeded, NotFound
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.pipelines import actions, decide, run_state
from comfyfleet.server.pipelines.actions import CandidateRef
from comfyfleet.server.pipelines.model import CandidateStatus, PipelineCandidate, StoredRun


class Jury:
    """A run with some base candidates, and one who judges them."""

    def __init__(self, pipeline_setup: PipelineSetup, run: StoredRun) -> None:
        self.pipeline_setup, self.run = pipeline_setup, run

    def on(self, candidate: PipelineCandidate) -> CandidateRef:
        return CandidateRef(*self.pipeline_setup.whose, self.run.id, candidate.id)

    async def say(self, candidate: PipelineCandidate, verdict: CandidateStatus) -> CandidateStatus:
        return (
            await actions.judge_candidate(self.pipeline_setup.context, self.on(candidate), verdict)
        ).status

    async def undo(self, candidate: PipelineCandidate) -> CandidateStatus:
        return (
            await actions.undo_judgement(self.pipeline_setup.context, self.on(candidate))
        ).status

    async def vote(
        self, winner: PipelineCandidate, loser: PipelineCandidate
    ) -> tuple[UUID, dict[UUID, float]]:
        vote_id = uuid4()
        scores = await actions.add_vote(
            self.pipeline_setup.context,
            *self.pipeline_setup.whose,
            self.run.id,
            vote_id=vote_id,
            winner=winner.id,
            loser=loser.id,
        )
        return vote_id, scores

    async def scores(self) -> dict[UUID, float]:
        return {each.id: each.score for each in await self.pipeline_setup.candidates(self.run)}


async def jury_of(pipeline_setup: PipelineSetup, base: int) -> tuple[Jury, list[PipelineCandidate]]:
    run = await pipeline_setup.start(ONE_STEP, base=base)
    await pipeline_setup.work_off()
    return Jury(pipeline_setup, run), await pipeline_setup.candidates(run)


NEEDS_APPROVAL = {
    **THREE_STEPS,
    "steps": [{**THREE_STEPS["steps"][0], "needs_approval": True}, THREE_STEPS["steps"][1]],
}


async def test_only_approved_candidates_get_children_where_approval_is_needed(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(NEEDS_APPROVAL, base=2)
    jury = Jury(pipeline_setup, run)
    assert await pipeline_setup.work_off() == 2
    assert (await pipeline_setup.state(run)).stored.reason == "waiting_for_judgement"
    first, second = await pipeline_setup.candidates(run)
    assert await jury.say(second, CandidateStatus.APPROVED) == CandidateStatus.APPROVED
    assert await pipeline_setup.work_off() == 2
    children = await pipeline_setup.candidates(run, step=1)
    assert {each.parent for each in children} == {second.id}
    assert await jury.say(first, CandidateStatus.WINNER) == CandidateStatus.WINNER
    assert await pipeline_setup.work_off() == 2


async def test_rejecting_stops_the_branch_and_undoing_lets_it_go_on(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(base=1, limits={"concurrent_jobs": 2})
    jury = Jury(pipeline_setup, run)
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased())
    await pipeline_setup.sweep()
    running = await pipeline_setup.leased()
    (base,) = await pipeline_setup.candidates(run)
    assert await jury.say(base, CandidateStatus.REJECTED) == CandidateStatus.REJECTED
    assert await pipeline_setup.lease() is None  # the child that was queued is cancelled
    await pipeline_setup.finish(running)
    assert await pipeline_setup.work_off() == 0
    assert await pipeline_setup.made(run) == [1, 1]
    assert (await pipeline_setup.state(run)).run.tokens == 3 + 2
    assert await jury.undo(base) == CandidateStatus.ACTIVE
    assert await pipeline_setup.work_off() == 1 + 2
    assert await pipeline_setup.made(run) == [1, 2, 2]


async def test_undo_gives_back_what_was_before_act_by_act(pipeline_setup: PipelineSetup) -> None:
    jury, (one,) = await jury_of(pipeline_setup, 1)
    await jury.say(one, CandidateStatus.APPROVED)
    await jury.say(one, CandidateStatus.WINNER)
    await jury.say(one, CandidateStatus.WINNER)
    assert await jury.undo(one) == CandidateStatus.APPROVED
    assert await jury.undo(one) == CandidateStatus.ACTIVE
    with pytest.raises(Conflict):
        await jury.undo(one)


async def test_a_vote_moves_points_and_its_undo_moves_them_back(
    pipeline_setup: PipelineSetup,
) -> None:
    jury, (one, two, three) = await jury_of(pipeline_setup, 3)
    first, scores = await jury.vote(one, two)
    assert scores == {one.id: 1016.0, two.id: 984.0}
    second, _ = await jury.vote(three, one)
    expected = decide.replay_votes([decide.PairVote(second, three.id, one.id)])
    await actions.undo_vote(pipeline_setup.context, *pipeline_setup.whose, jury.run.id, first)
    await actions.undo_vote(pipeline_setup.context, *pipeline_setup.whose, jury.run.id, first)
    assert await jury.scores() == {**{two.id: 1000.0}, **expected}


async def test_a_vote_counts_once_however_often_it_is_sent(pipeline_setup: PipelineSetup) -> None:
    jury, (one, two) = await jury_of(pipeline_setup, 2)
    vote_id, scores = await jury.vote(one, two)
    again = await actions.add_vote(
        pipeline_setup.context,
        *pipeline_setup.whose,
        jury.run.id,
        vote_id=vote_id,
        winner=one.id,
        loser=two.id,
    )
    assert again == scores
    with pytest.raises(Conflict):
        await actions.add_vote(
            pipeline_setup.context,
            *pipeline_setup.whose,
            jury.run.id,
            vote_id=vote_id,
            winner=two.id,
            loser=one.id,
        )


async def test_a_tie_brings_scores_closer_and_is_undone_like_any_vote(
    pipeline_setup: PipelineSetup,
) -> None:
    jury, (one, two) = await jury_of(pipeline_setup, 2)
    whose = (pipeline_setup.context, *pipeline_setup.whose, jury.run.id)
    _, won = await jury.vote(one, two)
    tie = pipeline_setup.context.new_id()
    scores = await actions.add_vote(*whose, vote_id=tie, winner=one.id, loser=two.id, is_tie=True)
    assert 1000 < scores[one.id] < won[one.id]
    assert scores[one.id] - 1000 == pytest.approx(1000 - scores[two.id])
    with pytest.raises(Conflict):
        await actions.add_vote(*whose, vote_id=tie, winner=one.id, loser=two.id)
    seen = await run_state.read_lineage(*whose, one.id)
    assert seen.votes == (1, 0, 1)
    assert (await run_state.read_lineage(*whose, two.id)).votes == (0, 1, 1)
    assert await actions.undo_vote(*whose, tie) == won


async def test_a_run_takes_so_many_votes_and_those_undone_count(
    pipeline_setup: PipelineSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair is chosen by all votes of the run, so they are not without end."""
    monkeypatch.setattr(actions, "VOTES_MAX", 2)
    jury, (one, two) = await jury_of(pipeline_setup, 2)
    whose = (pipeline_setup.context, *pipeline_setup.whose, jury.run.id)
    first, _ = await jury.vote(one, two)
    await actions.undo_vote(*whose, first)
    last, scores = await jury.vote(one, two)
    with pytest.raises(LimitExceeded, match="at most 2 votes"):
        await jury.vote(one, two)
    assert await jury.scores() == scores
    # One that was counted is still answered.
    again = await actions.add_vote(*whose, vote_id=last, winner=one.id, loser=two.id)
    assert again == scores


async def test_a_skipped_pair_comes_later(pipeline_setup: PipelineSetup) -> None:
    jury, _ = await jury_of(pipeline_setup, 3)
    whose = (pipeline_setup.context, *pipeline_setup.whose, jury.run.id)
    skipped: list[tuple[UUID, UUID]] = []
    for _ in range(3):
        pair = await actions.pick_pair(*whose, skipped=skipped)
        assert pair
        assert (pair.votes, pair.votes_enough) == (0, 3)
        skipped.append((pair.first.id, pair.second.id))
    assert len({frozenset(each) for each in skipped}) == 3
    again = await actions.pick_pair(*whose, skipped=skipped)
    assert again


async def test_a_pair_is_of_one_step_and_new_to_each_other(pipeline_setup: PipelineSetup) -> None:
    jury, found = await jury_of(pipeline_setup, 3)
    met = set()
    for _ in range(3):
        pair = await actions.pick_pair(pipeline_setup.context, *pipeline_setup.whose, jury.run.id)
        assert pair
        met.add(frozenset(each.id for each in pair.candidates))
        await jury.vote(*pair.candidates)
    assert len(met) == 3
    await jury.say(found[0], CandidateStatus.REJECTED)
    await jury.say(found[1], CandidateStatus.REJECTED)
    assert (
        await actions.pick_pair(pipeline_setup.context, *pipeline_setup.whose, jury.run.id) is None
    )


async def test_only_two_different_candidates_of_one_step_are_compared(
    pipeline_setup: PipelineSetup,
) -> None:
    run = await pipeline_setup.start(base=1)
    await pipeline_setup.work_off()
    jury = Jury(pipeline_setup, run)
    base, child = (await pipeline_setup.candidates(run))[:2]
    with pytest.raises(InvalidInput, match="same step"):
        await jury.vote(base, child)
    with pytest.raises(InvalidInput, match="itself"):
        await jury.vote(base, base)


async def test_every_act_is_audited(pipeline_setup: PipelineSetup) -> None:
    jury, (one, two) = await jury_of(pipeline_setup, 2)
    await jury.say(one, CandidateStatus.APPROVED)
    await jury.undo(one)
    await jury.say(one, CandidateStatus.REJECTED)
    await jury.say(two, CandidateStatus.WINNER)
    vote_id, _ = await jury.vote(one, two)
    await actions.undo_vote(pipeline_setup.context, *pipeline_setup.whose, jury.run.id, vote_id)
    async with pipeline_setup.context.central.read() as tx:
        found = await notifications.find_audit_entries(
            tx, subject=f"pipeline_run:{jury.run.id}", limit=50
        )
    said = [each.action for each in reversed(found) if each.actor.startswith("tenant:")]
    assert said == [
        "pipeline_started",
        "pipeline_approved",
        "pipeline_undone",
        "pipeline_rejected",
        "pipeline_crowned",
        "pipeline_voted",
        "pipeline_vote_undone",
    ]
    assert all(each.details.get("user_id") for each in found if each.actor != "sweep")


async def test_a_candidate_of_another_run_is_not_there(pipeline_setup: PipelineSetup) -> None:
    jury, (one,) = await jury_of(pipeline_setup, 1)
    other, _ = await jury_of(pipeline_setup, 1)
    with pytest.raises(NotFound):
        await other.say(one, CandidateStatus.APPROVED)
    stranger = CandidateRef(pipeline_setup.tenant_id, uuid4(), jury.run.id, one.id)
    with pytest.raises(NotFound):
        await actions.judge_candidate(pipeline_setup.context, stranger, CandidateStatus.APPROVED)
