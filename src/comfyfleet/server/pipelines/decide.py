"""Decides which jobs a run submits next, counts its progress by step, and scores candidates by Elo
votes.

Pure: the same run and the same tree always give the same result, so a sweep can be interrupted at
any point."""

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
    """A judge's job for a candidate that has not been scored yet."""

    parent: UUID  # the candidate
    step: int  # the candidate's step

    @property
    def work(self) -> WorkKey:
        return WorkKey(self.step, is_judge=True)


class NoWorkReason(StrEnum):
    PAUSED = "paused"
    CANCELLED = "cancelled"
    TIME_UP = "time_up"
    BUSY = "busy"  # the limit of concurrent jobs is reached
    CANDIDATES_LIMIT = "candidates_limit"
    TOKENS_LIMIT = "tokens_limit"
    IN_FLIGHT = "in_flight"  # the remaining jobs depend on jobs in flight
    WAITING_FOR_JUDGEMENT = "waiting_for_judgement"
    FAILED = "failed"  # the remaining jobs have failed, and must be retried by a user
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
    """Returns the jobs that may be started now. `prices` has the price of a job of each kind, in
    tokens.

    `without` contains the kinds of jobs that can't be submitted now."""
    stopped = _stopped(run, now)
    if stopped is not None:
        return [NoWork(stopped)]
    if len(in_flight) >= run.limits.concurrent_jobs:
        return [NoWork(NoWorkReason.BUSY)]
    demand = _Demand(pipeline, run, tree, in_flight, prices or {})
    decided: list[Generation | NoWork] = []
    for generation in demand.generations(without):
        refusal = demand.refusal(generation)
        if refusal is not None:
            return decided or [NoWork(refusal)]
        decided.append(generation)
        demand.count(generation)
        if len(in_flight) + len(decided) >= run.limits.concurrent_jobs:
            break
    return decided or [NoWork(demand.why_nothing(in_flight))]


def _stopped(run: StoredPipelineRun, now: datetime) -> NoWorkReason | None:
    if run.status == PipelineRunStatus.PAUSED:
        return NoWorkReason.PAUSED
    if run.status == PipelineRunStatus.CANCELLED:
        return NoWorkReason.CANCELLED
    is_over = run.limits.until is not None and now >= run.limits.until
    return NoWorkReason.TIME_UP if is_over else None


class _Demand:
    """Counts candidates: needed, existing, in flight and failed."""

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
        # Existing, expected and failed children by parent. None stands for the first step, which
        # has no parent.
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
        """Yields the jobs to start, in order. Repeats a job that is needed several times.

        Judges come first, because their verdicts determine which other jobs are needed."""
        for candidate in self.to_judge:
            if WorkKey(candidate.step, is_judge=True) not in without:
                yield JudgeGeneration(candidate.id, candidate.step)
        for parent in parents_in_order(self.pipeline, self.tree):
            number = parent.step + 1
            while WorkKey(number) not in without and self.lacks(parent.id, number):
                yield ChildGeneration(parent.id, number)
        while WorkKey(0) not in without and self.lacks(None, 0):
            yield BaseGeneration()

    def lacks(self, parent: UUID | None, number: int) -> bool:
        return self.lacking(parent, number) > 0

    def lacking(self, parent: UUID | None, number: int) -> int:
        """Returns how many candidates are still needed. It can be negative, because a job may
        generate more images than needed."""
        return wanted_of(self.pipeline, self.run, number) - self.used[parent]

    def gain(self, generation: Generation) -> int:
        """Returns the maximum number of candidates that a job adds. Failed jobs keep their places
        but add no candidates, so a job's surplus may use these places."""
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
        if any(
            _awaits_judgement(self.pipeline, candidate, self.tree)
            for candidate in self._incomplete()
        ):
            return NoWorkReason.WAITING_FOR_JUDGEMENT
        has_failed = any(not job.is_judge for job in self.tree.failed)
        return NoWorkReason.FAILED if has_failed else NoWorkReason.COMPLETE

    def _incomplete(self) -> Iterator[PipelineCandidate]:
        """Yields the candidates that may have more children."""
        for candidate in self.tree.candidates.values():
            if candidate.step + 1 < len(self.pipeline.steps) and self.lacks(
                candidate.id, candidate.step + 1
            ):
                yield candidate


def wanted_of(pipeline: PipelineDefinition, run: StoredPipelineRun, step: int) -> int:
    """Returns the number of candidates that a step needs: in total for the first step, otherwise
    per parent."""
    return pipeline.steps[step].children_per_parent if step else run.base_candidates


def _awaits_judgement(
    pipeline: PipelineDefinition, candidate: PipelineCandidate, tree: RunTree
) -> bool:
    step = pipeline.steps[candidate.step]
    is_open = candidate.status == CandidateStatus.ACTIVE and candidate.id not in tree.stopped
    return step.needs_approval and is_open


def is_unjudged(pipeline: PipelineDefinition, candidate: PipelineCandidate) -> bool:
    """Checks whether a candidate still needs its step's judge. Returns False for candidates that a
    person has judged, or that the judge could not score."""
    is_open = candidate.status == CandidateStatus.ACTIVE and candidate.judged_by is None
    is_new = candidate.judge_score is None and candidate.judge_error is None
    return pipeline.steps[candidate.step].judge is not None and is_open and is_new


def to_judge(
    pipeline: PipelineDefinition, tree: RunTree, in_flight: Iterable[JobInFlight]
) -> list[PipelineCandidate]:
    """Returns the unscored candidates without a judge's job in flight. Those of the deepest step
    come first, and within a step the oldest."""
    underway = {job.parent for job in in_flight if job.is_judge}
    unscored = [
        candidate
        for candidate in tree.candidates.values()
        if is_unjudged(pipeline, candidate)
        and candidate.id not in underway
        and candidate.id not in tree.stopped
    ]
    return sorted(
        unscored, key=lambda candidate: (-candidate.step, candidate.created_at, candidate.id)
    )


def judged_verdict(
    pipeline: PipelineDefinition, candidate: PipelineCandidate, score: float
) -> CandidateStatus | None:
    """Returns a judge's verdict for a score. Returns None if a person must decide, or has already
    judged the candidate."""
    judge = pipeline.steps[candidate.step].judge
    if judge is None or candidate.judged_by or candidate.status != CandidateStatus.ACTIVE:
        return None
    return judge.verdict(score)


def parents_in_order(pipeline: PipelineDefinition, tree: RunTree) -> list[PipelineCandidate]:
    """Returns the candidates that get children. Those of the deepest step come first, and within a
    step those with the best judgment, then the oldest."""
    by_step: dict[int, list[PipelineCandidate]] = {}
    for candidate in tree.candidates.values():
        if candidate.step + 1 < len(pipeline.steps) and _may_have_children(
            pipeline, candidate, tree
        ):
            by_step.setdefault(candidate.step, []).append(candidate)
    parents: list[PipelineCandidate] = []
    for number in sorted(by_step, reverse=True):
        parents += _best(pipeline.steps[number], by_step[number])
    return parents


def _may_have_children(
    pipeline: PipelineDefinition, candidate: PipelineCandidate, tree: RunTree
) -> bool:
    if candidate.id in tree.stopped:
        return False
    is_judged = candidate.status in (CandidateStatus.APPROVED, CandidateStatus.WINNER)
    return is_judged or not pipeline.steps[candidate.step].needs_approval


def _best(step: Step, candidates: Iterable[PipelineCandidate]) -> list[PipelineCandidate]:
    def place(candidate: PipelineCandidate) -> tuple[Any, ...]:
        """Ranks votes of people before the scores of a judge."""
        judged = -math.inf if candidate.judge_score is None else candidate.judge_score
        return (
            _RANKS[candidate.status],
            -candidate.score,
            -judged,
            candidate.created_at,
            candidate.id,
        )

    return sorted(candidates, key=place)[: step.keep]


def to_cancel(tree: RunTree, in_flight: Iterable[JobInFlight]) -> list[JobInFlight]:
    """Returns the queued jobs below rejected candidates, and the judges' jobs for candidates that
    are already judged."""
    judged = {candidate.id for candidate in tree.candidates.values() if candidate.judged_by}
    return [
        job
        for job in in_flight
        if job.is_queued and (job.parent in tree.stopped or (job.is_judge and job.parent in judged))
    ]


def take_turns(
    work: Mapping[UUID, Sequence[Generation]], *, after: UUID | None, limit: int
) -> list[tuple[UUID, Generation]]:
    """Takes one job from each run in turn. Starts after the run that was served last."""
    order = sorted(work)
    first = sum(run_id <= after for run_id in order) if after is not None else 0
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
    wanted: int  # number of candidates needed for the current parents
    made: int
    approved: int
    rejected: int
    in_flight: int
    failed: int
    needs_approval: bool
    waiting: int  # candidates without a person's judgment, if the step needs approval
    judging: int  # judges' jobs among those in flight
    unjudged: int  # candidates that the judge still has to score


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
        statuses = [
            candidate.status for candidate in tree.candidates.values() if candidate.step == number
        ]
        to_come = sum(candidate.step == number for candidate in unjudged)
        parents_of_step = [parent for parent in parents if parent.step == number - 1]
        required = (
            len(parents_of_step) * step.children_per_parent if number else run.base_candidates
        )
        row = StepProgress(
            step.name,
            wanted=required,
            made=len(statuses),
            approved=sum(
                status in (CandidateStatus.APPROVED, CandidateStatus.WINNER) for status in statuses
            ),
            rejected=statuses.count(CandidateStatus.REJECTED),
            in_flight=sum(job.step == number for job in in_flight),
            failed=sum(job.step == number for job in tree.failed),
            needs_approval=step.needs_approval,
            waiting=sum(
                candidate.step == number and _awaits_judgement(pipeline, candidate, tree)
                for candidate in tree.candidates.values()
            )
            - to_come,
            judging=sum(job.is_judge and job.step == number for job in in_flight),
            unjudged=to_come,
        )
        rows.append(row)
    return rows


def success_rate(tree: RunTree) -> float | None:
    """Returns the share of ended jobs that succeeded, or None if no job has ended."""
    done = len({candidate.job_id for candidate in tree.candidates.values()})
    ended = done + len(tree.failed)
    return done / ended if ended else None


ELO_K = 32.0  # the maximum amount by which a single vote can change a score
ELO_SPREAD = 400.0  # a candidate with a lead of this size is expected to win 10 of 11 times


class PairVote(NamedTuple):
    id: UUID
    winner: UUID
    loser: UUID
    is_tie: bool = False  # both are equally good, and the order of winner and loser has no meaning


def win_probability(one: float, other: float) -> float:
    """Returns the probability that the first candidate wins."""
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
    """Applies a vote. The winner gains what the loser loses. A tie moves both scores closer
    together."""
    winner, loser = scores.get(vote.winner, START_SCORE), scores.get(vote.loser, START_SCORE)
    moved = ELO_K * ((0.5 if vote.is_tie else 1) - win_probability(winner, loser))
    scores[vote.winner] = winner + moved
    scores[vote.loser] = loser - moved if vote.loser != vote.winner else winner


def next_pair(
    candidates: Sequence[PipelineCandidate], votes: Sequence[PairVote]
) -> tuple[PipelineCandidate, PipelineCandidate] | None:
    """Picks the candidate with the fewest comparisons, and the opponent it has met least often,
    with the closest score.

    Both must belong to the same step, and neither may be rejected. Close scores make a comparison
    more informative."""
    able = [candidate for candidate in candidates if candidate.status != CandidateStatus.REJECTED]
    if len(able) < 2:
        return None
    times = Counter(side for vote in votes for side in (vote.winner, vote.loser))
    first = min(
        able,
        key=lambda candidate: (
            times[candidate.id],
            _is_clear(candidate),
            candidate.created_at,
            candidate.id,
        ),
    )
    met = Counter(
        vote.loser if vote.winner == first.id else vote.winner
        for vote in votes
        if first.id in (vote.winner, vote.loser)
    )
    others = [
        candidate for candidate in able if candidate.id != first.id and candidate.step == first.step
    ]
    second = min(
        others,
        key=lambda candidate: (
            met[candidate.id],
            abs(candidate.score - first.score),
            times[candidate.id],
            candidate.id,
        ),
        default=None,
    )
    return None if second is None else (first, second)


def _is_clear(candidate: PipelineCandidate) -> bool:
    """Checks whether a judge has decided about a candidate. Users compare the other candidates
    first."""
    return candidate.judged_by == JudgedBy.JUDGE


COMPARISONS_EACH = 5


def votes_enough(candidates: Collection[PipelineCandidate]) -> int:
    """Returns the number of votes after which each candidate has been compared with five others, or
    with all others if there are fewer."""
    able = sum(candidate.status != CandidateStatus.REJECTED for candidate in candidates)
    return math.ceil(able * min(able - 1, COMPARISONS_EACH) / 2)


class VoteTally(NamedTuple):
    won: int
    lost: int
    tied: int


def tally_votes(candidate_id: UUID, votes: Iterable[PairVote]) -> VoteTally:
    own = [vote for vote in votes if candidate_id in (vote.winner, vote.loser)]
    tied = sum(vote.is_tie for vote in own)
    won = sum(vote.winner == candidate_id and not vote.is_tie for vote in own)
    return VoteTally(won=won, lost=len(own) - won - tied, tied=tied)
