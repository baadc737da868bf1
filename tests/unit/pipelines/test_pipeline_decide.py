"""What a pipeline run makes next, and why it makes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from random import Random
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.pipelines.builders import NOW, candidate, run, steps, tree

from comfyfleet.server.pipelines.decide import (
    BaseGeneration,
    ChildGeneration,
    Generation,
    NoWork,
    NoWorkReason,
    count_steps,
    next_jobs,
    parents_in_order,
    success_rate,
    take_turns,
    to_cancel,
    wanted_of,
)
from comfyfleet.server.pipelines.model import (
    CandidateStatus,
    FailedJob,
    JobInFlight,
    PipelineDefinition,
    PipelineRunStatus,
    RunLimits,
    RunTree,
    StoredPipelineRun,
    WorkKey,
)

TWO = steps({}, {"children_per_parent": 2})
THREE = steps({}, {"children_per_parent": 2}, {})


def jobs(
    pipeline: PipelineDefinition, of: StoredPipelineRun, tree: RunTree, *in_flight: JobInFlight
) -> list[Generation | NoWork]:
    return next_jobs(pipeline, of, tree, in_flight, now=NOW)


def child(parent: int, step: int = 1) -> ChildGeneration:
    return ChildGeneration(UUID(int=parent), step)


def flying(
    number: int, step: int = 0, parent: int | None = None, *, is_queued: bool = False
) -> JobInFlight:
    return JobInFlight(
        UUID(int=900 + number), step, UUID(int=parent) if parent else None, is_queued
    )


def test_an_empty_run_begins_with_the_base() -> None:
    assert jobs(TWO, run(3), tree()) == [BaseGeneration()]
    assert jobs(TWO, run(3, concurrent_jobs=9), tree()) == [BaseGeneration()] * 3


def test_children_come_before_the_base() -> None:
    assert jobs(TWO, run(3), tree(candidate(1))) == [child(1)]


def test_the_deepest_step_comes_first() -> None:
    given = tree(candidate(1, child_count=1), candidate(2, 1, parent=1))
    assert jobs(THREE, run(3), given) == [child(2, 2)]


def test_the_best_judged_parent_comes_first_and_the_oldest_among_equals() -> None:
    given = tree(
        candidate(1), candidate(2, score=1100.0), candidate(3, status=CandidateStatus.APPROVED, score=900.0),
        candidate(4, status=CandidateStatus.WINNER, score=800.0), candidate(5),
    )  # fmt: skip
    found = jobs(TWO, run(5, concurrent_jobs=10), given)
    assert found == [child(n) for n in (4, 4, 3, 3, 2, 2, 1, 1, 5, 5)]


def test_age_is_told_by_the_clock_and_not_by_the_id() -> None:
    older = replace(candidate(9), created_at=NOW - timedelta(days=1))
    assert jobs(TWO, run(2), tree(candidate(1), older)) == [child(9)]


def test_what_is_in_flight_or_failed_holds_its_place() -> None:
    given = tree(candidate(1, child_count=1), failed=(FailedJob(UUID(int=9), 0),))
    assert jobs(TWO, run(2, concurrent_jobs=9), given, flying(1, 1, parent=1)) == [
        NoWork(NoWorkReason.IN_FLIGHT)
    ]


def test_one_job_at_a_time_unless_more_are_allowed() -> None:
    assert jobs(TWO, run(3), tree(), flying(1)) == [NoWork(NoWorkReason.BUSY)]


def test_only_as_many_as_are_kept_get_children() -> None:
    keeping = steps({"keep": 1}, {"children_per_parent": 2})
    given = tree(candidate(1), candidate(2, score=1200.0))
    assert jobs(keeping, run(2, concurrent_jobs=9), given) == [child(2), child(2)]


def test_where_approval_is_needed_nothing_happens_without_it() -> None:
    careful = steps({"needs_approval": True}, {})
    assert jobs(careful, run(1), tree(candidate(1))) == [NoWork(NoWorkReason.WAITING_FOR_JUDGEMENT)]
    assert jobs(careful, run(1), tree(candidate(1, status=CandidateStatus.APPROVED))) == [child(1)]
    assert jobs(careful, run(1), tree(candidate(1, status=CandidateStatus.REJECTED))) == [
        NoWork(NoWorkReason.COMPLETE)
    ]


def test_a_rejected_candidate_stops_its_branch() -> None:
    given = tree(
        candidate(1, status=CandidateStatus.REJECTED, child_count=2),
        candidate(2, 1, parent=1),
        candidate(3, 1, parent=1),
    )
    assert jobs(THREE, run(1), given) == [NoWork(NoWorkReason.COMPLETE)]
    queued = [
        flying(1, 2, parent=2, is_queued=True),
        flying(2, 2, parent=3),
        flying(3, is_queued=True),
    ]
    assert to_cancel(given, queued) == queued[:1]


def test_a_job_with_several_pictures_fills_several_places() -> None:
    fours = steps({"images_per_job": 4}, {})
    assert jobs(fours, run(8, concurrent_jobs=9), tree()) == [BaseGeneration()] * 2
    assert jobs(fours, run(8, concurrent_jobs=9), tree(), flying(1)) == [BaseGeneration()]


def test_the_last_job_is_made_even_if_it_makes_more_than_is_wanted() -> None:
    twos = steps({"images_per_job": 2})
    assert jobs(twos, run(3, concurrent_jobs=9), tree()) == [BaseGeneration()] * 2
    given = tree(candidate(1), candidate(2))
    assert jobs(twos, run(3, concurrent_jobs=9, candidates=3), given) == [BaseGeneration()]


def test_a_step_that_cannot_be_made_leaves_the_others() -> None:
    given = tree(candidate(1))
    assert next_jobs(TWO, run(2), given, [], now=NOW, without={WorkKey(1)}) == [BaseGeneration()]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (PipelineRunStatus.PAUSED, NoWorkReason.PAUSED),
        (PipelineRunStatus.CANCELLED, NoWorkReason.CANCELLED),
    ],
)
def test_a_run_that_is_stopped_makes_nothing(
    status: PipelineRunStatus, reason: NoWorkReason
) -> None:
    assert jobs(TWO, replace(run(3), status=status), tree()) == [NoWork(reason)]


def test_every_limit_has_its_reason() -> None:
    assert jobs(TWO, run(3, until=NOW), tree()) == [NoWork(NoWorkReason.TIME_UP)]
    assert jobs(TWO, run(3, until=NOW + timedelta(seconds=1)), tree()) == [BaseGeneration()]
    assert jobs(TWO, run(3, candidates=1), tree(candidate(1))) == [
        NoWork(NoWorkReason.CANDIDATES_LIMIT)
    ]
    found = next_jobs(
        TWO, run(3, tokens=25, concurrent_jobs=9), tree(), (), now=NOW, prices={WorkKey(0): 10}
    )
    assert found == [BaseGeneration()] * 2
    spent = replace(run(3, tokens=25), tokens=20)
    assert next_jobs(TWO, spent, tree(), (), now=NOW, prices={WorkKey(0): 10}) == [
        NoWork(NoWorkReason.TOKENS_LIMIT)
    ]


def test_what_has_failed_is_told_and_not_made_again() -> None:
    given = tree(failed=(FailedJob(UUID(int=9), 0),))
    assert jobs(TWO, run(1), given) == [NoWork(NoWorkReason.FAILED)]


def test_all_made_is_complete() -> None:
    given = tree(candidate(1, child_count=2), candidate(2, 1, parent=1), candidate(3, 1, parent=1))
    assert jobs(TWO, run(1), given) == [NoWork(NoWorkReason.COMPLETE)]


def test_the_board_counts_each_step() -> None:
    given = tree(
        candidate(1, status=CandidateStatus.APPROVED, child_count=1, job_id=UUID(int=5)), candidate(2, 1, parent=1),
        failed=(FailedJob(UUID(int=9), 0),),
    )  # fmt: skip
    first, second = count_steps(TWO, run(3), given, [flying(1, 1, parent=1)])
    assert first[1:] == (3, 1, 1, 0, 0, 1, False, 0, 0, 0)
    assert second[1:] == (2, 1, 0, 0, 1, 0, False, 0, 0, 0)
    judged = PipelineDefinition(
        "judged", (replace(TWO.steps[0], needs_approval=True), TWO.steps[1])
    )
    waiting = tree(*(candidate(n) for n in (1, 2)), candidate(3, status=CandidateStatus.REJECTED))
    first, _ = count_steps(judged, run(3), waiting, [])
    assert (first.needs_approval, first.waiting) == (True, 2)
    assert success_rate(given) == pytest.approx(2 / 3)
    assert success_rate(tree()) is None


def test_runs_take_turns() -> None:
    a, b, c = (UUID(int=n) for n in (1, 2, 3))
    base = BaseGeneration()
    work: dict[UUID, Sequence[Generation]] = {a: [base] * 3, b: [], c: [base]}
    assert [each for each, _ in take_turns(work, after=None, limit=9)] == [a, c, a, a]
    assert [each for each, _ in take_turns(work, after=a, limit=2)] == [c, a]
    assert [each for each, _ in take_turns(work, after=c, limit=1)] == [a]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3))
def test_a_run_with_work_is_served_within_one_round(count: int, limit: int) -> None:
    runs = [UUID(int=n) for n in range(1, count + 1)]
    last: UUID | None = None
    served: list[UUID] = []
    while len(served) < count:
        turn = take_turns({each: [BaseGeneration()] * 5 for each in runs}, after=last, limit=limit)
        served += [each for each, _ in turn]
        last = served[-1]
    assert set(served[:count]) == set(runs)


@dataclass
class Loop:
    """Plays the world to a pipeline run, and checks after every step what must hold."""

    pipeline: PipelineDefinition
    run: StoredPipelineRun
    rng: Random
    tree: RunTree = field(default_factory=RunTree)
    in_flight: list[JobInFlight] = field(default_factory=list)
    number: int = 0
    price: int = 7

    def submit(self) -> list[Generation | NoWork]:
        prices = dict.fromkeys(self.pipeline.works, self.price)
        found = next_jobs(
            self.pipeline, self.run, self.tree, self.in_flight, now=NOW, prices=prices
        )
        for each in found:
            if isinstance(each, NoWork):
                continue
            self.number += 1
            parent = each.parent if isinstance(each, ChildGeneration) else None
            self.in_flight.append(JobInFlight(UUID(int=self.number), each.step, parent))
            self.run = replace(self.run, tokens=self.run.tokens + self.price)
        self.check()
        return found

    def end_one(self, failing: float) -> None:
        job = self.in_flight.pop(self.rng.randrange(len(self.in_flight)))
        if self.rng.random() < failing:
            self.tree = RunTree(
                self.tree.candidates,
                (*self.tree.failed, FailedJob(job.job_id, job.step, job.parent)),
            )
            self.run = replace(self.run, tokens=self.run.tokens - self.price)
            return
        made = dict(self.tree.candidates)
        for _ in range(self.brings([job])):
            self.number += 1
            new = candidate(
                self.number, job.step, job.parent.int if job.parent else None, job_id=job.job_id
            )
            made[new.id] = new
            if job.parent:
                mother = made[job.parent]
                made[job.parent] = replace(mother, child_count=mother.child_count + 1)
        self.tree = RunTree(made, self.tree.failed)

    def brings(self, jobs: Sequence[JobInFlight]) -> int:
        """How many candidates jobs make: no more than are wanted are kept."""
        total = 0
        for step, parent in {(each.step, each.parent) for each in jobs}:
            made = self.tree.candidates.values()
            siblings = sum((each.step, each.parent) == (step, parent) for each in made)
            count = sum((each.step, each.parent) == (step, parent) for each in jobs)
            left = wanted_of(self.pipeline, self.run, step) - siblings
            total += min(count * self.pipeline.steps[step].images_per_job, max(left, 0))
        return total

    def judge_one(self) -> None:
        if self.tree.candidates:
            chosen = self.tree.candidates[self.rng.choice(sorted(self.tree.candidates))]
            judged = replace(
                chosen,
                status=self.rng.choice(list(CandidateStatus)),
                score=self.rng.uniform(800, 1200),
            )
            self.tree = RunTree({**self.tree.candidates, chosen.id: judged}, self.tree.failed)

    def retry_all(self) -> None:
        self.tree = RunTree(self.tree.candidates)

    def check(self) -> None:
        limits = self.run.limits
        assert len(self.in_flight) <= limits.concurrent_jobs
        coming = self.brings(self.in_flight)
        made = self.tree.candidates.values()
        assert limits.candidates is None or len(made) + coming <= limits.candidates
        assert limits.tokens is None or self.run.tokens <= limits.tokens
        base = sum(each.step == 0 for each in made)
        assert base <= self.run.base_candidates
        for each in made:
            if each.step + 1 < len(self.pipeline.steps):
                assert each.child_count <= self.pipeline.steps[each.step + 1].children_per_parent


PIPELINES = st.lists(
    st.builds(
        lambda images, times, keep, needs: {
            "images_per_job": images, "children_per_parent": images * times, "keep": keep, "needs_approval": needs,
        },
        st.integers(1, 2), st.integers(1, 2), st.none() | st.integers(1, 3), st.booleans(),
    ),
    min_size=1, max_size=4,
).map(lambda given: steps(*given))  # fmt: skip
LIMITS = st.builds(
    RunLimits,
    candidates=st.none() | st.integers(0, 40),
    tokens=st.none() | st.integers(0, 200),
    concurrent_jobs=st.integers(1, 4),
)
ENDS = frozenset(NoWorkReason) - {
    NoWorkReason.BUSY,
    NoWorkReason.IN_FLIGHT,
    NoWorkReason.PAUSED,
    NoWorkReason.CANCELLED,
    NoWorkReason.TIME_UP,
}


def check_limits(pipeline: PipelineDefinition, limits: RunLimits, base: int, seed: int) -> None:
    rng = Random(seed)
    loop = Loop(pipeline, StoredPipelineRun(UUID(int=1), base, limits=limits), rng)
    for _ in range(80):
        act = rng.random()
        if act < 0.15:
            loop.judge_one()
        elif act < 0.2:
            paused = rng.choice([PipelineRunStatus.PAUSED, PipelineRunStatus.ACTIVE])
            loop.run = replace(loop.run, status=paused)
        elif act < 0.25:
            loop.retry_all()
        elif act < 0.6 and loop.in_flight:
            loop.end_one(failing=0.2)
        else:
            found = loop.submit()
            is_paused = loop.run.status == PipelineRunStatus.PAUSED
            assert not is_paused or found == [NoWork(NoWorkReason.PAUSED)]


@settings(max_examples=60, deadline=None)
@given(PIPELINES, LIMITS, st.integers(0, 6), st.integers(0, 2**32))
def test_limits_hold_whatever_people_and_machines_do(
    pipeline: PipelineDefinition, limits: RunLimits, base: int, seed: int
) -> None:
    check_limits(pipeline, limits, base, seed)


@pytest.mark.slow
@settings(max_examples=2_000, deadline=None)
@given(PIPELINES, LIMITS, st.integers(0, 6), st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
def test_limits_and_ends_deep(
    pipeline: PipelineDefinition, limits: RunLimits, base: int, seed: int, failing: float
) -> None:
    check_limits(pipeline, limits, base, seed)
    check_end(pipeline, limits, base, seed, failing)


@settings(max_examples=60, deadline=None)
@given(PIPELINES, LIMITS, st.integers(0, 5), st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
def test_it_always_comes_to_an_end_and_then_nobody_who_may_have_children_lacks_any(
    pipeline: PipelineDefinition, limits: RunLimits, base: int, seed: int, failing: float
) -> None:
    check_end(pipeline, limits, base, seed, failing)


def test_failed_jobs_make_no_room_for_more_candidates_than_the_limit() -> None:
    pipeline = steps({"images_per_job": 2, "children_per_parent": 2})
    check_end(pipeline, RunLimits(candidates=3, concurrent_jobs=2), base=5, seed=483, failing=0.3)


def check_end(
    pipeline: PipelineDefinition, limits: RunLimits, base: int, seed: int, failing: float
) -> None:
    loop = Loop(pipeline, StoredPipelineRun(UUID(int=1), base, limits=limits), Random(seed))
    for _ in range(2_000):
        found = loop.submit()
        if loop.in_flight:
            loop.end_one(failing)
        elif isinstance(found[0], NoWork):
            break
    (last,) = found
    assert isinstance(last, NoWork)
    assert last.reason in ENDS
    if (
        last.reason in (NoWorkReason.COMPLETE, NoWorkReason.WAITING_FOR_JUDGEMENT)
        and not loop.tree.failed
    ):
        for parent in parents_in_order(pipeline, loop.tree):
            wanted = pipeline.steps[parent.step + 1].children_per_parent
            assert parent.child_count == wanted


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(0, 2**32))
def test_no_parent_waits_longer_than_what_those_before_it_want(count: int, seed: int) -> None:
    """Among equals the oldest is served first."""
    rng = Random(seed)
    loop = Loop(TWO, StoredPipelineRun(UUID(int=1), 100), rng)
    loop.tree = tree(
        *(candidate(n, score=rng.choice([1000.0, 1100.0])) for n in range(1, count + 1))
    )
    loop.number = count
    first = loop.tree.candidates[UUID(int=1)]
    before_it = sum(each.score > first.score for each in loop.tree.candidates.values())
    waited = 0
    while loop.submit() != [child(1)]:
        waited += 1
        loop.end_one(0.0)
    assert waited <= 2 * before_it
