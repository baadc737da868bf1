"""Judges of steps: how they are read and refused, what their scores decide, and that people have the last word."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs.builders import example_catalogue
from tests.unit.pipelines.builders import NOW, candidate, run, tree

from comfyfleet.api.expressions import FieldPath
from comfyfleet.server.pipelines.decide import (
    BaseGeneration,
    ChildGeneration,
    JudgeGeneration,
    NoWork,
    NoWorkReason,
    count_steps,
    judged_verdict,
    next_jobs,
    next_pair,
    parents_in_order,
    to_cancel,
    wanted_of,
)
from comfyfleet.server.pipelines.model import (
    CandidateStatus,
    FailedJob,
    JobInFlight,
    JudgedBy,
    PipelineDefinition,
    PipelineRunStatus,
    RunLimits,
    RunTree,
    Step,
    StepJudge,
    StoredPipelineRun,
    WorkKey,
)
from comfyfleet.server.pipelines.parse import parse_pipeline, validate, variable_problems

BASE = {"name": "Base", "workflow": "negative"}
SOFT = {"name": "Soft", "workflow": "soften", "properties": {"input": "{{ parent.file }}"}}
MEASURE = {"measure": "exposure", "approve_above": 0.8, "reject_below": 0.3}
JUDGE = StepJudge(Step("judge", "rate"), "image", FieldPath("output", ("json",)), 0.8, 0.3)


def document(judge: Any, **step: Any) -> dict[str, Any]:
    return {"name": "Judged", "steps": [{**BASE, **step, "judge": judge}]}


def problems(given: dict[str, Any]) -> list[tuple[str, str]]:
    """The step and field of each problem."""
    parsed = parse_pipeline(given)
    found = [*parsed.problems, *validate(parsed.pipeline, example_catalogue())]
    return [(each.node, each.port) for each in found]


def messages(given: dict[str, Any]) -> str:
    parsed = parse_pipeline(given)
    found = [*parsed.problems, *validate(parsed.pipeline, example_catalogue())]
    return "; ".join(each.message for each in found)


def test_a_measure_is_read_as_the_judge_of_a_graph_is() -> None:
    assert problems(document(MEASURE)) == []
    (step,) = parse_pipeline(document(MEASURE)).pipeline.steps
    assert step.judge
    assert (step.judge.name, step.judge.picture_property) == ("exposure", "image")
    assert (step.judge.work.workflow, step.judge.work.properties) == (
        "measure",
        {"measure": "exposure"},
    )
    assert step.needs_approval  # by the judge, or by a person


def test_a_judge_of_ones_own_may_be_told_what_to_compare_with() -> None:
    own = {"workflow": "similarity", "score": "output.json * 100", "approve_above": 6}
    reference = {"properties": {"reference": "{{ parent.file }}"}}
    given = {"name": "Two", "steps": [BASE, {**SOFT, "judge": {**own, **reference}}]}
    assert problems(given) == []
    # The first step has no parent, and a judge without its reference can't run.
    assert problems(document({**own, **reference})) == [("Base", "judge.reference")]
    assert problems(document(own)) == [("Base", "judge.reference")]


def test_variables_of_a_judge_are_checked_before_a_run_starts() -> None:
    judge = {**MEASURE, "measure": "{{ variables.what }}"}
    pipeline = parse_pipeline(document(judge)).pipeline
    catalogue = example_catalogue()
    facts = {key: catalogue.facts_for(work) for key, work in pipeline.works.items()}
    known = {key: each for key, each in facts.items() if each}
    (missing,) = variable_problems(pipeline, {}, known)
    assert (missing.node, missing.port) == ("Base", "judge.measure")
    (wrong,) = variable_problems(pipeline, {"what": "beauty"}, known)
    assert (wrong.node, wrong.port) == ("Base", "judge.measure")
    assert variable_problems(pipeline, {"what": "sharpness"}, known) == ()


@pytest.mark.parametrize(
    ("judge", "where"),
    [
        ("sharpness", "judge"),
        ({"approve_above": 1}, "judge.workflow"),
        ({"measure": "exposure"}, "judge.approve_above"),
        ({"measure": "exposure", "approve_above": None}, "judge.approve_above"),
        ({**MEASURE, "reject_below": 0.9}, "judge.reject_below"),
        ({**MEASURE, "approve_above": float("nan")}, "judge.approve_above"),
        ({**MEASURE, "approve_above": float("inf")}, "judge.approve_above"),
        ({**MEASURE, "reject_below": 10**400}, "judge.reject_below"),
        ({**MEASURE, "reject_below": True}, "judge.reject_below"),
        ({**MEASURE, "approve_above": "0.8"}, "judge.approve_above"),
        ({**MEASURE, "measure": "beauty"}, "judge.measure"),
        ({**MEASURE, "measure": 7}, "judge.measure"),
        ({**MEASURE, "timeout": 0}, "judge.timeout"),
        ({**MEASURE, "score": "output.json +"}, "judge.score"),
        ({**MEASURE, "score": "candidate.id"}, "judge.score"),
        ({**MEASURE, "reuse": True}, "judge.reuse"),
        ({**MEASURE, "properties": {"strength": 1}}, "judge.strength"),
        ({"workflow": "aesthetic", "approve_above": 6}, "judge.workflow"),
        ({"effect": "aesthetic", "approve_above": 6}, "judge.effect"),
        ({"workflow": "measure", "version": 9, "approve_above": 6}, "judge.workflow"),
        ({"workflow": "soften", "property": "radius", "approve_above": 6}, "judge.property"),
        ({"workflow": "video", "property": "input", "approve_above": 6}, "judge.property"),
        ({"workflow": "soften", "property": "photo", "approve_above": 6}, "judge.property"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_judge_is_told_with_step_and_field(judge: Any, where: str) -> None:
    assert ("Base", where) in problems(document(judge))


def test_a_step_with_a_judge_cannot_do_without_approval() -> None:
    assert problems(document(MEASURE, needs_approval=False)) == [("Base", "needs_approval")]
    assert problems(document(MEASURE, needs_approval=True)) == []
    assert "must not be above approve_above (0.8)" in messages(
        document({**MEASURE, "reject_below": 0.9})
    )


@pytest.mark.parametrize(
    ("approve", "reject", "expected"),
    [
        (0.8, 0.3, [None, "rejected", "approved"]),
        (0.8, None, [None, None, "approved"]),
        (None, 0.3, [None, "rejected", None]),
        (0.5, 0.5, ["approved", "rejected", "approved"]),
        (0.3, 0.3, ["approved", "rejected", "approved"]),
    ],
)
def test_from_approve_above_on_it_approves_and_below_reject_below_it_rejects(
    approve: float | None, reject: float | None, expected: list[str | None]
) -> None:
    judge = replace(JUDGE, approve_above=approve, reject_below=reject)
    assert [judge.verdict(score) for score in (0.5, 0.29, 0.8)] == expected


def pipeline(*judged: bool, images: int = 1) -> PipelineDefinition:
    made = [
        Step(
            f"step {number}",
            "make",
            children_per_parent=images,
            images_per_job=images,
            needs_approval=has_judge,
            judge=JUDGE if has_judge else None,
        )
        for number, has_judge in enumerate(judged)
    ]
    return PipelineDefinition("judged", tuple(made))


TWO = pipeline(True, False)
ID = UUID(int=1)


def jobs(given: RunTree, *in_flight: JobInFlight, **limits: Any) -> list[Any]:
    prices = {WorkKey(0): 3, WorkKey(0, is_judge=True): 2, WorkKey(1): 1}
    return next_jobs(TWO, run(2, **limits), given, in_flight, now=NOW, prices=prices)


def test_a_candidate_is_judged_before_anything_else_is_made() -> None:
    made = tree(candidate(1))
    assert jobs(made, concurrent_jobs=2) == [JudgeGeneration(ID, 0), BaseGeneration()]
    underway = JobInFlight(UUID(int=9), 0, ID, is_judge=True)
    assert jobs(made, underway, concurrent_jobs=3) == [BaseGeneration()]
    approved = tree(candidate(1, status=CandidateStatus.APPROVED, judged_by=JudgedBy.JUDGE))
    assert jobs(approved) == [ChildGeneration(ID, 1)]


def test_a_judge_adds_no_candidate_and_keeps_to_the_tokens() -> None:
    made = tree(candidate(1), candidate(2))
    for most in (2, 1):  # it was lowered after they were made
        assert jobs(made, candidates=most) == [JudgeGeneration(ID, 0)]
    assert jobs(made, tokens=1) == [NoWork(NoWorkReason.TOKENS_LIMIT)]
    assert jobs(made, tokens=3, concurrent_jobs=2) == [JudgeGeneration(ID, 0)]


@pytest.mark.parametrize(
    "known",
    [
        {"judge_score": 0.5},
        {"judge_error": "out of memory"},
        {"status": CandidateStatus.REJECTED, "judged_by": JudgedBy.PERSON},
        {"status": CandidateStatus.APPROVED, "judged_by": JudgedBy.PERSON, "child_count": 1},
    ],
)
def test_what_was_judged_or_could_not_be_is_left_to_people(known: dict[str, Any]) -> None:
    made = tree(candidate(1, **known), candidate(2, **known))
    (none,) = jobs(made, concurrent_jobs=4)
    assert isinstance(none, NoWork)


def test_a_judge_that_failed_leaves_nothing_to_be_retried_once_a_person_has_judged() -> None:
    lost = (FailedJob(UUID(int=9), 0, ID, is_judge=True),)
    rejected: dict[str, Any] = {"status": CandidateStatus.REJECTED, "judged_by": JudgedBy.PERSON}
    made = (
        candidate(1, judge_error="broken", **rejected),
        candidate(2, judge_score=0.1, **rejected),
    )
    assert jobs(tree(*made, failed=lost)) == [NoWork(NoWorkReason.COMPLETE)]
    open_one = candidate(1, judge_error="broken")
    waiting = NoWork(NoWorkReason.WAITING_FOR_JUDGEMENT)
    assert jobs(tree(open_one, made[1], failed=lost)) == [waiting]


def test_the_board_tells_whom_the_judge_and_whom_a_person_has_to_look_at() -> None:
    unclear = candidate(3, judge_score=0.5)
    made = tree(candidate(1), candidate(2), unclear)
    underway = JobInFlight(UUID(int=9), 0, ID, is_judge=True)
    first, _ = count_steps(TWO, run(3), made, [underway])
    assert (first.waiting, first.unjudged, first.judging, first.in_flight) == (1, 2, 1, 1)


def test_scores_order_what_people_have_not_compared() -> None:
    approved: dict[str, Any] = {"status": CandidateStatus.APPROVED, "judged_by": JudgedBy.JUDGE}
    made = tree(
        candidate(1, judge_score=0.8, **approved),
        candidate(2, judge_score=0.9, **approved),
        candidate(3, score=1016.0, judge_score=0.85, **approved),
        candidate(4, **approved),
    )
    order = [each.id.int for each in parents_in_order(TWO, made)]
    assert order == [3, 2, 1, 4]
    unclear = candidate(9, judge_score=0.5)
    pair = next_pair([*made.candidates.values(), unclear], [])
    assert pair
    assert pair[0].id == unclear.id


@dataclass
class JudgedWorld:
    """Plays people and machines to a run with judges, and checks after every act what must hold."""

    pipeline: PipelineDefinition
    run: StoredPipelineRun
    rng: Random
    tree: RunTree = field(default_factory=RunTree)
    in_flight: list[JobInFlight] = field(default_factory=list)
    number: int = 0
    paid: Counter[tuple[UUID | None, bool]] = field(default_factory=Counter)
    said: dict[UUID, list[tuple[CandidateStatus, JudgedBy]]] = field(default_factory=dict)

    def price(self, work: WorkKey) -> int:
        return 2 if work.is_judge else 7

    def pay(self, job: JobInFlight, sign: int) -> None:
        self.run = replace(
            self.run, tokens=self.run.tokens + sign * self.price(WorkKey(job.step, job.is_judge))
        )

    def submit(self) -> list[Any]:
        found = next_jobs(
            self.pipeline,
            self.run,
            self.tree,
            self.in_flight,
            now=NOW,
            prices={key: self.price(key) for key in self.pipeline.works},
        )
        for each in found:
            if isinstance(each, NoWork):
                continue
            if isinstance(each, ChildGeneration) and self.pipeline.steps[each.step - 1].judge:
                assert self.tree.candidates[each.parent].status in ("approved", "winner")
            self.number += 1
            job = JobInFlight(
                UUID(int=self.number),
                each.step,
                each.parent,
                is_queued=self.rng.random() < 0.5,
                is_judge=each.work.is_judge,
            )
            self.in_flight.append(job)
            self.pay(job, 1)
        return found

    def put(self, candidate_id: UUID, **changes: Any) -> None:
        changed = replace(self.tree.candidates[candidate_id], **changes)
        self.tree = RunTree({**self.tree.candidates, candidate_id: changed}, self.tree.failed)

    def end_one(self, failing: float) -> None:
        job = self.in_flight.pop(self.rng.randrange(len(self.in_flight)))
        if self.rng.random() < failing:
            failed = FailedJob(job.job_id, job.step, job.parent, job.is_judge)
            self.tree = RunTree(self.tree.candidates, (*self.tree.failed, failed))
            self.pay(job, -1)
            if job.is_judge and job.parent:
                self.put(job.parent, judge_error="failed")
        elif job.is_judge and job.parent:
            self.paid[job.parent, True] += 1
            self.write_score(job.parent, self.rng.choice([0.0, 0.3, 0.5, 0.8, 1.0]))
        else:
            self.write_candidates(job)

    def write_score(self, candidate_id: UUID, score: float) -> None:
        """As judgements.write_score does."""
        self.put(candidate_id, judge_score=score, judge_error=None)
        verdict = judged_verdict(self.pipeline, self.tree.candidates[candidate_id], score)
        if verdict:
            self.set_verdict(candidate_id, verdict, JudgedBy.JUDGE)

    def set_verdict(self, candidate_id: UUID, status: CandidateStatus, by: JudgedBy) -> None:
        if by == JudgedBy.JUDGE:
            assert not self.said.get(candidate_id), "a judge overwrites what was said"
        self.said.setdefault(candidate_id, []).append((status, by))
        self.put(candidate_id, status=status, judged_by=by)
        self.cancel_unneeded()

    def cancel_unneeded(self) -> None:
        for job in to_cancel(self.tree, self.in_flight):
            self.in_flight.remove(job)
            self.pay(job, -1)

    def write_candidates(self, job: JobInFlight) -> None:
        siblings = [
            each
            for each in self.tree.candidates.values()
            if (each.step, each.parent) == (job.step, job.parent)
        ]
        wanted = wanted_of(self.pipeline, self.run, job.step) - len(siblings)
        count = min(self.pipeline.steps[job.step].images_per_job, max(wanted, 0))
        made = dict(self.tree.candidates)
        for _ in range(count):
            self.number += 1
            new = candidate(self.number, job.step, job.parent.int if job.parent else None)
            made[new.id] = new
        self.tree = RunTree(made, self.tree.failed)
        if job.parent:
            self.put(job.parent, child_count=made[job.parent].child_count + count)

    def person_acts(self) -> None:
        if not self.tree.candidates:
            return
        chosen = self.rng.choice(sorted(self.tree.candidates))
        said = self.said.get(chosen, [])
        if said and self.rng.random() < 0.4:
            said.pop()
            status, by = said[-1] if said else (CandidateStatus.ACTIVE, None)
            self.put(chosen, status=status, judged_by=by)
            self.cancel_unneeded()
        else:
            verdict = self.rng.choice(["approved", "rejected", "winner"])
            self.set_verdict(chosen, CandidateStatus(verdict), JudgedBy.PERSON)

    def retry_all(self) -> None:
        judged = [each.parent for each in self.tree.failed if each.is_judge and each.parent]
        self.tree = RunTree(self.tree.candidates)
        for each in judged:
            self.put(each, judge_error=None)

    def check(self) -> None:
        limits = self.run.limits
        assert len(self.in_flight) <= limits.concurrent_jobs
        assert limits.tokens is None or self.run.tokens <= limits.tokens
        assert all(count == 1 for count in self.paid.values()), "a judge is paid twice"
        judging = Counter(each.parent for each in self.in_flight if each.is_judge)
        assert all(count == 1 for count in judging.values())
        for each in self.tree.candidates.values():
            said = self.said.get(each.id)
            expected = said[-1] if said else (CandidateStatus.ACTIVE, None)
            assert (each.status, each.judged_by) == expected

    def acts(self) -> Iterator[None]:
        for _ in range(60):
            act = self.rng.random()
            if act < 0.2:
                self.person_acts()
            elif act < 0.25:
                status = self.rng.choice([PipelineRunStatus.PAUSED, PipelineRunStatus.ACTIVE])
                self.run = replace(self.run, status=status)
            elif act < 0.3:
                self.retry_all()
            elif act < 0.65 and self.in_flight:
                self.end_one(failing=0.2)
            else:
                self.submit()
            yield


LIMITS = st.builds(
    RunLimits, tokens=st.none() | st.integers(0, 120), concurrent_jobs=st.integers(1, 4)
)
PIPELINES = st.builds(
    pipeline, st.booleans(), st.booleans(), st.booleans(), images=st.integers(1, 2)
)


@settings(max_examples=80, deadline=None)
@given(PIPELINES, LIMITS, st.integers(1, 4), st.integers(0, 2**32))
def test_each_judge_is_paid_once_and_a_persons_word_stands_whatever_happens(
    pipeline: PipelineDefinition, limits: RunLimits, base: int, seed: int
) -> None:
    start = StoredPipelineRun(UUID(int=1), base, limits=limits)
    world = JudgedWorld(pipeline, start, Random(seed))
    for _ in world.acts():
        world.check()
    world.run = replace(world.run, status=PipelineRunStatus.ACTIVE)
    for _ in range(500):
        found = world.submit()
        if world.in_flight:
            world.end_one(failing=0.1)
        elif isinstance(found[0], NoWork):
            break
        world.check()
    (last,) = found
    assert isinstance(last, NoWork)
    if last.reason != NoWorkReason.TOKENS_LIMIT:
        for each in world.tree.candidates.values():
            is_left = each.judged_by is None and each.id not in world.tree.stopped
            if is_left and pipeline.steps[each.step].judge:
                assert each.judge_score is not None or each.judge_error
