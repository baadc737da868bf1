"""Pipelines, their runs, candidates and votes in the public API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field, PlainSerializer

from comfyfleet.api.jobs import SMALL_URL
from comfyfleet.api.values import Message, Page, Response

# Reasons that time alone does not change.
_RESTING = frozenset(
    {
        *("complete", "failed", "waiting_for_judgement", "candidates_limit", "tokens_limit"),
        *("time_up", "cancelled", "paused"),
    }
)


class CandidateStatus(StrEnum):
    """How a candidate was judged."""

    ACTIVE = "active"  # nobody has said anything yet
    APPROVED = "approved"
    REJECTED = "rejected"
    WINNER = "winner"


class JudgedBy(StrEnum):
    """Whose judgement a candidate's status is."""

    JUDGE = "judge"  # of its step
    PERSON = "person"


class CandidateSort(StrEnum):
    """How candidates are listed."""

    OLDEST = "oldest"
    BEST = "best"  # winners, approved ones, later steps, high ratings
    SCORE = "score"  # of the judge, the highest first; those without one last


class PipelineRunStatus(StrEnum):
    ACTIVE = "active"
    PAUSED = "paused"
    CANCELLED = "cancelled"


class PipelineAnswer(Response):
    """A stored pipeline and its document."""

    id: UUID
    name: str
    document: dict[str, Any]
    created_at: datetime
    warnings: tuple[str, ...] = Field(
        default=(),
        description="Only when it is created: steps whose candidates would all be equal.",
    )


class PipelinePage(Page):
    pipelines: tuple[PipelineAnswer, ...]
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


class PipelineLimits(Response):
    """null is no limit."""

    candidates: int | None = None
    tokens: int | None = None
    concurrent_jobs: int = 1
    until: Annotated[datetime, PlainSerializer(datetime.isoformat)] | None = None
    bytes: int | None = Field(
        default=None, description="Maximum size of its files; then it is paused."
    )


class StepJudgeAnswer(Response):
    """The judge of a step, and from which score on it decides."""

    name: str = Field(description="Its measure, effect or workflow.")
    approve_above: float | None = Field(
        default=None, description="From here on it approves; null: it approves nothing."
    )
    reject_below: float | None = Field(
        default=None, description="Below this it rejects; null: it rejects nothing."
    )


class StepAnswer(Response):
    name: str
    wanted: int = Field(description="For the parents that exist now.")
    made: int
    approved: int
    rejected: int
    in_flight: int
    failed: int
    needs_approval: bool = False
    waiting: int = Field(
        default=0,
        description="Candidates that a person is to judge; 0 where no approval is needed.",
    )
    judge: StepJudgeAnswer | None = None
    judging: int = Field(default=0, description="Of the jobs in flight, those of the judge.")
    unjudged: int = Field(default=0, description="Candidates that the judge has still to look at.")


class PipelineRunSummary(Response):
    id: UUID
    pipeline_id: UUID
    pipeline: str = Field(default="", description="Its name.")
    status: PipelineRunStatus
    pause_reason: str | None = None
    reason: str | None = Field(
        default=None,
        description="Why nothing was submitted at the last check; null while the next check is due.",
    )
    trouble: str | None = Field(default=None, description="What prevents the next job.")
    trouble_seconds: int | None = Field(
        default=None,
        description="Only a person can help when the trouble has lasted for so long; null: it may pass by itself.",
    )
    target_folder: str
    base_candidates: int
    variables: dict[str, Any] = Field(default_factory=dict)
    limits: PipelineLimits = PipelineLimits()
    tokens: int = Field(default=0, description="Reserved and consumed.")
    created_at: datetime
    changed_at: datetime
    files_removed_at: datetime | None = None


class PipelineRunAnswer(PipelineRunSummary):
    """A run of a pipeline: its status, steps and costs."""

    steps: tuple[StepAnswer, ...] = ()
    jobs: dict[str, int] = Field(default_factory=dict, description="How many there were, by state.")
    queued: int = Field(default=0, description="Jobs that wait for a worker.")
    success_rate: float | None = Field(
        default=None, description="Of jobs that ended; null while none has."
    )
    bytes: int = Field(default=0, description="Size of its files.")
    seconds_left: float | None = Field(
        default=None,
        description="Estimated from the duration of the last jobs.",
    )
    last_event_id: int = Field(
        default=0, description="To follow what happens from now on: events?after=…"
    )

    @property
    def is_resting(self) -> bool:
        """Whether the run does nothing more unless a user acts."""
        is_busy = any(each.in_flight for each in self.steps)
        return not is_busy and (self.status != "active" or self.reason in _RESTING)


class PipelineRunSummaries(Page):
    runs: tuple[PipelineRunSummary, ...]
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


class RetriedJobs(Response):
    jobs: tuple[UUID, ...] = Field(description="The jobs that are retried.")


class FailureAnswer(Response):
    job_id: UUID
    step: str
    parent: UUID | None = None
    is_judge: bool = Field(
        default=False, description="It should have judged `parent`, which a person judges now."
    )
    error: str | None = None
    ended_at: datetime | None = None


class Failures(Response):
    failures: tuple[FailureAnswer, ...] = Field(description="The newest first.")


class CandidateAnswer(Response):
    """A candidate that a step of a pipeline made."""

    id: UUID
    step: int = Field(description="Its number; 0 is the base.")
    parent: UUID | None = None
    status: CandidateStatus
    judged_by: JudgedBy | None = Field(
        default=None, description="Whose judgement the status is; null while nobody has judged it."
    )
    score: float = Field(description="Its rating by votes.")
    judge_score: float | None = Field(
        default=None, description="What the judge of its step gave it; null if there is none."
    )
    judge_error: str | None = Field(
        default=None, description="Why the judge gave it none, so that a person is asked."
    )
    child_count: int = 0
    seed: int | None = None
    seed_text: str | None = Field(
        default=None,
        description="The same as a text: seeds are too large for JavaScript's numbers.",
    )
    properties: dict[str, Any] = Field(default_factory=dict, description="What it was made with.")
    job_id: UUID | None = None
    provider_job_id: str | None = Field(
        default=None, description="The backend's id of the run: ComfyUI's `prompt_id`."
    )
    output_index: int = 0
    path: str = Field(default="", description="Its name in listings and exports.")
    content_type: str = ""
    size: int = 0
    url: str | None = Field(
        default=None,
        description="Valid for 15 minutes; null for a text, and after the file was deleted.",
    )
    small_url: str | None = SMALL_URL
    text: str | None = Field(
        default=None, description="The text that its job showed, with or instead of a picture."
    )
    created_at: datetime


class CandidatePage(Page):
    candidates: tuple[CandidateAnswer, ...] = Field(
        description="The oldest first, unless `sort` says otherwise."
    )
    next: UUID | None = Field(default=None, description="The next page: after=next; null: no more.")


class LineageAnswer(Response):
    """Where a candidate comes from, and what votes say about it."""

    candidates: tuple[CandidateAnswer, ...] = Field(
        description="Itself first, then its parent, the base last."
    )
    won: int
    lost: int
    tied: int


class Branch(Response):
    id: UUID
    step: int
    status: CandidateStatus
    judged_by: JudgedBy | None = None
    score: float
    judge_score: float | None = None
    children: tuple["Branch", ...] = ()


class TreeAnswer(Response):
    tree: tuple[Branch, ...]


class PairAnswer(Response):
    candidates: tuple[CandidateAnswer, ...] = Field(
        default=(), description="Two of one step; empty if there are not two to compare."
    )
    votes: int = Field(default=0, description="That were given in their step.")
    votes_enough: int = Field(
        default=0, description="After so many each was compared with five others, or with all."
    )


class VoteAnswer(Response):
    """A vote, and the scores after it."""

    id: UUID = Field(description="Use it to undo the vote.")
    scores: dict[UUID, float] = Field(default_factory=dict)


class PipelineEvent(Message):
    """One event of a pipeline run. A reader reconnects with the last `id`."""

    id: int
    kind: str  # started, submitted, candidates, scored, job_failed, approved, voted, paused …
    data: dict[str, Any]
