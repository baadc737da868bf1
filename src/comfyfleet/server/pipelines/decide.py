"""Decides what a run generates next, counts its progress by step, and scores candidates by Elo votes.

Pure: the same run and the same tree give the same answer, so that a sweep may be killed anywhere."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from comfyfleet.server.pipelines.model import (
    START_SCORE,
    CandidateStatus,
    JobInFlight,
    JudgedBy,
    PipelineCandidate,
    PipelineDefinition,
    PipelineRunStatus,
    RunTree,
    Step,
    StoredPipelineRun,
    WorkKey,
)


class ChildGeneration(NamedTuple):
    parent: UUID
    step: int

    @property
    def work(self) -> WorkKey:
        return WorkKey(self.step)


class BaseGeneration(NamedTuple):
    step: int = 0
    parent: None = None

    @property
    def work(self) -> WorkKey:
        return WorkKey(self.step)


@dataclass(frozen=True, slots=True)
class JudgeGeneration:
    """A score, of a candidate that its step's judge has not seen."""

    parent: UUID  # the candidate
    step: int  # the candidate's own

    @property
    def work(self) -> WorkKey:
        return WorkKey(self.step, is_judge=True)


class NoWorkReason(StrEnum):
    PAUSED = "paused"
    CANCELLED = "cancelled"
    TIME_UP = "time_up"
    BUSY = "busy"  # as many jobs as it may have are in flight
    CANDIDATES_LIMIT = "candidates_limit"
    TOKENS_LIMIT = "tokens_limit"
    IN_FLIGHT = "in_flight"  # what is left to be made depends on what is being made
    WAITING_FOR_JUDGEMENT = "waiting_for_judgement"
    FAILED = "failed"  # what is left has failed, and waits for somebody to retry it
    COMPLETE = "complete"


class NoWork(NamedTuple):
    reason: NoWorkReason


Generation: TypeAlias = ChildGeneration | BaseGeneration | JudgeGeneration
_RANKS = {CandidateStatus.WINNER: 0, CandidateStatus.APPROVED: 1, CandidateStatus.ACTIVE: 2}


def next_jobs(
    pipeline: PipelineDefinition,
    run: StoredPipelineRun,
    tree: RunTree,
    in_flight: Sequence[JobInFlight],
    *,
    now: datetime,
    prices: Mapping[WorkKey, int] | None = None,
    without: Collection[WorkKey] = (),
) -> list[Generation | NoWork]:
    """Returns the jobs that may be started now; `prices` are the tokens of a job of each kind.

    `without` are kinds of jobs that can't be submitted now.
    """
    stopped = _stopped(run, now)
    if stopped is not None:
        return [NoWork(stopped)]
    if len(in_flight) >= run.limits.concurrent_jobs:
        return [NoWork(NoWorkReason.BUSY)]
    demand = _Demand(pipeline, run, tree, in_flight, prices or {})
    found: list[Generation | NoWork] = []
    for generation in demand.generations(without):
        refusal = demand.refusal(generation)
        if refusal is not None:
            return found or [NoWork(refusal)]
        found.append(generation)
        demand.count(generation)
        if len(in_flight) + len(found) >= run.limits.concurrent_jobs:
            break
    return found or [NoWork(demand.why_nothing(in_flight))]


def _stopped(run: StoredPipelineRun, now: datetime) -> NoWorkReason | None:
    if run.status == PipelineRunStatus.PAUSED:
        return NoWorkReason.PAUSED
    if run.status == PipelineRunStatus.CANCELLED:
        return NoWorkReason.CANCELLED
    is_over = run.limits.until is not None and now >= run.limits.until
    return NoWorkReason.TIME_UP if is_over else None


class _Demand:
    """Counts candidates: wanted, existing, in flight and failed."""

    def __init__(
        self,
        pipeline: PipelineDefinition,
        run: StoredPipelineRun,
        tree: RunTree,
        in_flight: Sequence[JobInFlight],
        prices: Mapping[WorkKey, int],
    ) -> None:
        self.pipeline, self.run, self.tree, self.prices = pipeline, run, tree, prices
        self.to_judge = to_judge(pipeline, tree, in_flight)
        making = [job for job in in_flight if not job.is_judge]
        self.tokens = run.tokens
        self.total = len(tree.candidates)
        # By parent; None: the base. A failed job holds its place.
        self.used: Counter[UUID | None] = Counter()
        for candidate in tree.candidates.values():
            self.used[candidate.id] += candidate.child_count
            self.used[None] += candidate.step == 0
        self.failed: Counter[UUID | None] = Counter()
        for lost in tree.failed:
            if not lost.is_judge:
                self.failed[lost.parent] += pipeline.steps[lost.step].images_per_job
        for job in making:
            self.used[job.parent] += pipeline.steps[job.step].images_per_job
        self.used += self.failed
        self.total += sum(pipeline.steps[job.step].images_per_job for job in making)

    def generations(self, without: Collection[WorkKey] = ()) -> Iterator[Generation]:
        """Yields the jobs to be started, in order, each as often as it is wanted.

        Judges come first: what they say decides what else is made.
        """
        for each in self.to_judge:
            if WorkKey(each.step, is_judge=True) not in without:
                yield JudgeGeneration(each.id, each.step)
        for parent in parents_in_order(self.pipeline, self.tree):
            number = parent.step + 1
            while WorkKey(number) not in without and self.lacks(parent.id, number):
                yield ChildGeneration(parent.id, number)
        while WorkKey(0) not in without and self.lacks(None, 0):
            yield BaseGeneration()

    def lacks(self, parent: UUID | None, number: int) -> bool:
        return self.lacking(parent, number) > 0

    def lacking(self, parent: UUID | None, number: int) -> int:
        """Returns how many candidates are missing; what a job makes beyond that is dropped."""
        return wanted_of(self.pipeline, self.run, number) - self.used[parent]

    def gain(self, generation: Generation) -> int:
        """Returns how many candidates a job adds at most; failed jobs keep their places, and add
        none."""
        if isinstance(generation, JudgeGeneration):
            return 0
        parent, images = generation.parent, self.pipeline.steps[generation.step].images_per_job
        return min(images, self.lacking(parent, generation.step) + self.failed[parent])

    def refusal(self, generation: Generation) -> NoWorkReason | None:
        limits, gain = self.run.limits, self.gain(generation)
        if limits.candidates is not None and gain and self.total + gain > limits.candidates:
            return NoWorkReason.CANDIDATES_LIMIT
        price = self.prices.get(generation.work, 0)
        if limits.tokens is not None and self.tokens + price > limits.tokens:
            return NoWorkReason.TOKENS_LIMIT
        return None

    def count(self, generation: Generation) -> None:
        gain = self.gain(generation)
        self.used[generation.parent] += gain
        self.total += gain
        self.tokens += self.prices.get(generation.work, 0)

    def why_nothing(self, in_flight: Sequence[JobInFlight]) -> NoWorkReason:
        if in_flight:
            return NoWorkReason.IN_FLIGHT
        if any(_awaits_judgement(self.pipeline, each, self.tree) for each in self._incomplete()):
            return NoWorkReason.WAITING_FOR_JUDGEMENT
        has_failed = any(not each.is_judge for each in self.tree.failed)
        return NoWorkReason.FAILED if has_failed else NoWorkReason.COMPLETE

    def _incomplete(self) -> Iterator[PipelineCandidate]:
        """Yields candidates that may have more children."""
        for each in self.tree.candidates.values():
            if each.step + 1 < len(self.pipeline.steps) and self.lacks(each.id, each.step + 1):
                yield each


def wanted_of(pipeline: PipelineDefinition, run: StoredPipelineRun, step: int) -> int:
    """Returns how many candidates of a step are wanted: in all for the first step, else for each
    parent."""
    return pipeline.steps[step].children_per_parent if step else run.base_candidates


def _awaits_judgement(
    pipeline: PipelineDefinition, candidate: PipelineCandidate, tree: RunTree
) -> bool:
    step = pipeline.steps[candidate.step]
    is_open = candidate.status == CandidateStatus.ACTIVE and candidate.id not in tree.stopped
    return step.needs_approval and is_open


def is_unjudged(pipeline: PipelineDefinition, candidate: PipelineCandidate) -> bool:
    """Whether the judge of its step is to look at a candidate. What a person has judged, and what the judge could not
    judge, is left to people."""
    is_open = candidate.status == CandidateStatus.ACTIVE and candidate.judged_by is None
    is_new = candidate.judge_score is None and candidate.judge_error is None
    return pipeline.steps[candidate.step].judge is not None and is_open and is_new


def to_judge(
    pipeline: PipelineDefinition, tree: RunTree, in_flight: Iterable[JobInFlight]
) -> list[PipelineCandidate]:
    """Returns the candidates that no judge's job is under way for: of the deepest step first, then the oldest."""
    underway = {each.parent for each in in_flight if each.is_judge}
    found = [
        each
        for each in tree.candidates.values()
        if is_unjudged(pipeline, each) and each.id not in underway and each.id not in tree.stopped
    ]
    return sorted(found, key=lambda each: (-each.step, each.created_at, each.id))


def judged_verdict(
    pipeline: PipelineDefinition, candidate: PipelineCandidate, score: float
) -> CandidateStatus | None:
    """Returns what a judge's score makes of a candidate; None if a person is asked, or has judged it meanwhile."""
    judge = pipeline.steps[candidate.step].judge
    if judge is None or candidate.judged_by or candidate.status != CandidateStatus.ACTIVE:
        return None
    return judge.verdict(score)


def parents_in_order(pipeline: PipelineDefinition, tree: RunTree) -> list[PipelineCandidate]:
    """Returns the candidates that get children: the deepest step first, then the best judged, then
    the oldest."""
    by_step: dict[int, list[PipelineCandidate]] = {}
    for each in tree.candidates.values():
        if each.step + 1 < len(pipeline.steps) and _may_have_children(pipeline, each, tree):
            by_step.setdefault(each.step, []).append(each)
    found: list[PipelineCandidate] = []
    for number in sorted(by_step, reverse=True):
        found += _best(pipeline.steps[number], by_step[number])
    return found


def _may_have_children(
    pipeline: PipelineDefinition, candidate: PipelineCandidate, tree: RunTree
) -> bool:
    if candidate.id in tree.stopped:
        return False
    is_judged = candidate.status in (CandidateStatus.APPROVED, CandidateStatus.WINNER)
    return is_judged or not pipeline.steps[candidate.step].needs_approval


def _best(step: Step, candidates: Iterable[PipelineCandidate]) -> list[PipelineCandidate]:
    def place(each: PipelineCandidate) -> tuple[Any, ...]:
        """What people have voted comes before what a judge has found."""
        judged = -math.inf if each.judge_score is None else each.judge_score
        return _RANKS[each.status], -each.score, -judged, each.created_at, each.id

    return sorted(candidates, key=place)[: step.keep]


def to_cancel(tree: RunTree, in_flight: Iterable[JobInFlight]) -> list[JobInFlight]:
    """Returns the queued jobs below rejected candidates, and of judges whose candidate a person has judged."""
    judged = {each.id for each in tree.candidates.values() if each.judged_by}
    return [
        each
        for each in in_flight
        if each.is_queued
        and (each.parent in tree.stopped or (each.is_judge and each.parent in judged))
    ]


def take_turns(
    work: Mapping[UUID, Sequence[Generation]], *, after: UUID | None, limit: int
) -> list[tuple[UUID, Generation]]:
    """Takes one job of each run in turn, beginning after the run that was served last."""
    order = sorted(work)
    first = sum(each <= after for each in order) if after is not None else 0
    order = order[first:] + order[:first]
    rounds = max((len(jobs) for jobs in work.values()), default=0)
    served = [
        (run, work[run][number])
        for number in range(rounds)
        for run in order
        if number < len(work[run])
    ]
    return served[:limit]


class StepProgress(NamedTuple):
    name: str
    wanted: int  # as things stand: for the parents that there are now
    made: int
    approved: int
    rejected: int
    in_flight: int
    failed: int
    needs_approval: bool
    waiting: int  # for a person's judgement, where one is needed
    judging: int  # of those in flight
    unjudged: int  # candidates that the judge has still to look at


def count_steps(
    pipeline: PipelineDefinition,
    run: StoredPipelineRun,
    tree: RunTree,
    in_flight: Sequence[JobInFlight],
) -> list[StepProgress]:
    parents = parents_in_order(pipeline, tree)
    rows: list[StepProgress] = []
    unjudged = to_judge(pipeline, tree, ())
    for number, step in enumerate(pipeline.steps):
        made = [each.status for each in tree.candidates.values() if each.step == number]
        to_come = sum(each.step == number for each in unjudged)
        parents_of_step = [each for each in parents if each.step == number - 1]
        wanted = len(parents_of_step) * step.children_per_parent if number else run.base_candidates
        row = StepProgress(
            step.name,
            wanted=wanted,
            made=len(made),
            approved=sum(
                each in (CandidateStatus.APPROVED, CandidateStatus.WINNER) for each in made
            ),
            rejected=made.count(CandidateStatus.REJECTED),
            in_flight=sum(each.step == number for each in in_flight),
            failed=sum(each.step == number for each in tree.failed),
            needs_approval=step.needs_approval,
            waiting=sum(
                each.step == number and _awaits_judgement(pipeline, each, tree)
                for each in tree.candidates.values()
            )
            - to_come,
            judging=sum(each.is_judge and each.step == number for each in in_flight),
            unjudged=to_come,
        )
        rows.append(row)
    return rows


def success_rate(tree: RunTree) -> float | None:
    """Returns the share of ended jobs that succeeded; None if none has ended."""
    done = len({each.job_id for each in tree.candidates.values()})
    ended = done + len(tree.failed)
    return done / ended if ended else None


ELO_K = 32.0  # the most that one vote moves a score
ELO_SPREAD = 400.0  # a lead of so much is expected to win ten times in eleven


class PairVote(NamedTuple):
    id: UUID
    winner: UUID
    loser: UUID
    is_tie: bool = False  # both are equally good; then neither name means anything


def win_probability(one: float, other: float) -> float:
    """Returns how likely the first is to win."""
    return float(1 / (1 + 10 ** ((other - one) / ELO_SPREAD)))


def apply_vote(scores: Mapping[UUID, float], vote: PairVote) -> dict[UUID, float]:
    """Returns the scores after one more vote."""
    changed = dict(scores)
    _move_scores(changed, vote)
    return changed


def replay_votes(votes: Iterable[PairVote]) -> dict[UUID, float]:
    """Computes scores from votes, in the order in which they were given."""
    scores: dict[UUID, float] = {}
    for vote in votes:
        _move_scores(scores, vote)
    return scores


def _move_scores(scores: dict[UUID, float], vote: PairVote) -> None:
    """Applies a vote: the winner gains what the loser loses; a tie brings both closer."""
    winner, loser = scores.get(vote.winner, START_SCORE), scores.get(vote.loser, START_SCORE)
    moved = ELO_K * ((0.5 if vote.is_tie else 1) - win_probability(winner, loser))
    scores[vote.winner] = winner + moved
    scores[vote.loser] = loser - moved if vote.loser != vote.winner else winner


def next_pair(
    candidates: Sequence[PipelineCandidate], votes: Sequence[PairVote]
) -> tuple[PipelineCandidate, PipelineCandidate] | None:
    """Picks the candidate with the fewest comparisons, and the one closest in score that it met
    least.

    Both are of one step and not rejected. Close scores make a comparison more informative.
    """
    able = [each for each in candidates if each.status != CandidateStatus.REJECTED]
    if len(able) < 2:
        return None
    times = Counter(side for vote in votes for side in (vote.winner, vote.loser))
    first = min(able, key=lambda each: (times[each.id], _is_clear(each), each.created_at, each.id))
    met = Counter(
        vote.loser if vote.winner == first.id else vote.winner
        for vote in votes
        if first.id in (vote.winner, vote.loser)
    )
    others = [each for each in able if each.id != first.id and each.step == first.step]
    second = min(
        others,
        key=lambda each: (met[each.id], abs(each.score - first.score), times[each.id], each.id),
        default=None,
    )
    return None if second is None else (first, second)


def _is_clear(candidate: PipelineCandidate) -> bool:
    """Whether a judge was sure of it: people are asked about the others first."""
    return candidate.judged_by == JudgedBy.JUDGE


COMPARISONS_EACH = 5


def votes_enough(candidates: Collection[PipelineCandidate]) -> int:
    """Returns after how many votes each was compared with five others, or with all there are."""
    able = sum(each.status != CandidateStatus.REJECTED for each in candidates)
    return math.ceil(able * min(able - 1, COMPARISONS_EACH) / 2)


class VoteTally(NamedTuple):
    won: int
    lost: int
    tied: int


def tally_votes(candidate_id: UUID, votes: Iterable[PairVote]) -> VoteTally:
    own = [each for each in votes if candidate_id in (each.winner, each.loser)]
    tied = sum(each.is_tie for each in own)
    won = sum(each.winner == candidate_id and not each.is_tie for each in own)
    return VoteTally(won=won, lost=len(own) - won - tied, tied=tied)
