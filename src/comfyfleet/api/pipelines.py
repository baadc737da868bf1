"""Pipelines and their runs, candidates and votes in the public API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field, PlainSerializer

from comfyfleet.api.jobs import SMALL_URL
from comfyfleet.api.values import Message, Page, Response

# Reasons that remain until a user acts.
_RESTING = frozenset(
    {
        *("complete", "failed", "waiting_for_judgement", "candidates_limit", "tokens_limit"),
        *("time_up", "cancelled", "paused"),
    }
)


class CandidateStatus(StrEnum):
    """The judgment of a candidate."""

    ACTIVE = "active"  # not judged yet
    APPROVED = "approved"
    REJECTED = "rejected"
    WINNER = "winner"


class JudgedBy(StrEnum):
    """The kind of judge that decided a candidate's status."""

    JUDGE = "judge"  # the judge of its step
    PERSON = "person"


class CandidateSort(StrEnum):
    """The order of a list of candidates."""

    OLDEST = "oldest"
    BEST = "best"  # winners first, then approved candidates, later steps and higher ratings
    SCORE = "score"  # the judge's score, highest first; candidates without a score come last


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
        description="Steps whose candidates would all be equal. Only set when the pipeline is "
        "created.",
    )


class PipelinePage(Page):
    pipelines: tuple[PipelineAnswer, ...]
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


class PipelineLimits(Response):
    """Limits of a run. null means no limit."""

    candidates: int | None = None
    tokens: int | None = None
    concurrent_jobs: int = 1
    until: Annotated[datetime, PlainSerializer(datetime.isoformat)] | None = None
    bytes: int | None = Field(
        default=None,
        description="Maximum total size of the run's files in bytes. When it is reached, the "
        "run is paused.",
    )


class StepJudgeAnswer(Response):
    """The judge of a step, and its thresholds."""

    name: str = Field(description="The measure, effect or workflow that judges the candidates.")
    approve_above: float | None = Field(
        default=None,
        description="Candidates with at least this score are approved. null if the judge "
        "approves none.",
    )
    reject_below: float | None = Field(
        default=None,
        description="Candidates with a lower score are rejected. null if the judge rejects none.",
    )


class StepAnswer(Response):
    name: str
    wanted: int = Field(description="Target number of candidates for the existing parents.")
    made: int
    approved: int
    rejected: int
    in_flight: int
    failed: int
    needs_approval: bool = False
    waiting: int = Field(
        default=0,
        description="Candidates that a person must judge. 0 if no approval is required.",
    )
    judge: StepJudgeAnswer | None = None
    judging: int = Field(
        default=0, description="How many of the jobs in flight belong to the judge."
    )
    unjudged: int = Field(default=0, description="Candidates that the judge hasn't judged yet.")


class PipelineRunSummary(Response):
    id: UUID
    pipeline_id: UUID
    pipeline: str = Field(default="", description="The pipeline's name.")
    status: PipelineRunStatus
    pause_reason: str | None = None
    reason: str | None = Field(
        default=None,
        description="Why nothing was submitted at the last check. null while the next check is "
        "due.",
    )
    trouble: str | None = Field(default=None, description="The problem that prevents the next job.")
    trouble_seconds: int | None = Field(
        default=None,
        description=(
            "Once the problem has lasted this many seconds, only a person can solve it. null if "
            "it may resolve itself."
        ),
    )
    target_folder: str
    base_candidates: int
    variables: dict[str, Any] = Field(default_factory=dict)
    limits: PipelineLimits = PipelineLimits()
    tokens: int = Field(default=0, description="Reserved and consumed tokens.")
    created_at: datetime
    changed_at: datetime
    files_removed_at: datetime | None = None


class PipelineRunAnswer(PipelineRunSummary):
    """A pipeline run with its status, steps and costs."""

    steps: tuple[StepAnswer, ...] = ()
    jobs: dict[str, int] = Field(default_factory=dict, description="Number of jobs by status.")
    queued: int = Field(default=0, description="Jobs that are waiting for a worker.")
    success_rate: float | None = Field(
        default=None,
        description="Share of successful jobs among those that ended. null if none has ended.",
    )
    bytes: int = Field(default=0, description="Total size of the run's files in bytes.")
    seconds_left: float | None = Field(
        default=None,
        description="Estimated seconds left, based on the duration of the last jobs.",
    )
    last_event_id: int = Field(
        default=0, description="Use `events?after=…` with this id to receive subsequent events."
    )

    @property
    def is_resting(self) -> bool:
        """Checks whether the run does nothing more unless a user acts."""
        is_busy = any(step.in_flight for step in self.steps)
        return not is_busy and (self.status != "active" or self.reason in _RESTING)


class PipelineRunSummaries(Page):
    runs: tuple[PipelineRunSummary, ...]
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


class RetriedJobs(Response):
    jobs: tuple[UUID, ...] = Field(description="The jobs that are retried.")


class FailureAnswer(Response):
    job_id: UUID
    step: str
    parent: UUID | None = None
    is_judge: bool = Field(
        default=False,
        description="Whether it was a job to judge `parent`, which a person must judge now.",
    )
    error: str | None = None
    ended_at: datetime | None = None


class Failures(Response):
    failures: tuple[FailureAnswer, ...] = Field(description="Newest first.")


class CandidateAnswer(Response):
    """A candidate that a step of a pipeline created."""

    id: UUID
    step: int = Field(description="The step's number. 0 is the base.")
    parent: UUID | None = None
    status: CandidateStatus
    judged_by: JudgedBy | None = Field(
        default=None,
        description="Who decided the status. null if the candidate hasn't been judged yet.",
    )
    score: float = Field(description="The candidate's rating by votes.")
    judge_score: float | None = Field(
        default=None, description="The score from the step's judge. null if there is none."
    )
    judge_error: str | None = Field(
        default=None, description="Why the judge gave no score, so that a person must judge it."
    )
    child_count: int = 0
    seed: int | None = None
    seed_text: str | None = Field(
        default=None,
        description="The seed as a string, because seeds are too large for JavaScript's numbers.",
    )
    properties: dict[str, Any] = Field(
        default_factory=dict, description="The properties that were used to create the candidate."
    )
    job_id: UUID | None = None
    provider_job_id: str | None = Field(
        default=None, description="The backend's id of the run, which is ComfyUI's `prompt_id`."
    )
    output_index: int = 0
    path: str = Field(default="", description="The candidate's name in listings and exports.")
    content_type: str = ""
    size: int = 0
    url: str | None = Field(
        default=None,
        description="The URL of the file, valid for 15 minutes. null for a text, and after the "
        "file was deleted.",
    )
    small_url: str | None = SMALL_URL
    text: str | None = Field(
        default=None,
        description="The text that the candidate's job showed, together with or instead of an "
        "image.",
    )
    created_at: datetime


class CandidatePage(Page):
    candidates: tuple[CandidateAnswer, ...] = Field(
        description="Oldest first, unless `sort` specifies a different order."
    )
    next: UUID | None = Field(
        default=None,
        description="Pass this as `after` to get the next page. null on the last page.",
    )


class LineageAnswer(Response):
    """A candidate's origin and its votes."""

    candidates: tuple[CandidateAnswer, ...] = Field(
        description="The candidate itself, then its parent, and so on. The base is last."
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
        default=(),
        description="Two candidates of the same step. Empty if there aren't two to compare.",
    )
    votes: int = Field(default=0, description="Number of votes in the candidates' step.")
    votes_enough: int = Field(
        default=0,
        description=(
            "Number of votes after which each candidate has been compared with five "
            "others, or with all others if there are fewer."
        ),
    )


class VoteAnswer(Response):
    """A vote and the resulting scores."""

    id: UUID = Field(description="Use this id to undo the vote.")
    scores: dict[UUID, float] = Field(default_factory=dict)


class PipelineEvent(Message):
    """An event of a pipeline run. A reader reconnects with the last `id`."""

    id: int
    kind: str  # started, submitted, candidates, scored, job_failed, approved, voted, paused …
    data: dict[str, Any]
