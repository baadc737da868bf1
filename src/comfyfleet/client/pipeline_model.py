"""What the API answers about pipelines, their runs and candidates, as frozen values."""

from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from pydantic import Field

from comfyfleet.client.model import Page
from comfyfleet.wire.files import Message

PipelineRunStatus: TypeAlias = Literal["active", "paused", "cancelled"]
CandidateStatus: TypeAlias = Literal["active", "approved", "rejected", "winner"]
Judgement: TypeAlias = Literal["approve", "reject", "winner"]
# Reasons that time alone does not change.
_RESTING = frozenset(
    {
        *("complete", "failed", "waiting_for_judgement", "candidates_limit", "tokens_limit"),
        *("time_up", "cancelled", "paused"),
    }
)


class Pipeline(Message):
    id: UUID
    name: str
    document: dict[str, Any]
    created_at: datetime


class PipelinePage(Page):
    pipelines: tuple[Pipeline, ...]
    next: UUID | None = None


class PipelineLimits(Message):
    """None is no limit."""

    candidates: int | None = None
    tokens: int | None = None
    concurrent_jobs: int = 1
    until: datetime | None = None
    bytes: int | None = None  # of its files; then it is paused


class StepBoard(Message):
    name: str
    wanted: int  # as things stand: for the parents that there are now
    made: int
    approved: int
    rejected: int
    in_flight: int
    failed: int


class PipelineRun(Message):
    """Its board; lists have it without the figures from `pipeline` on."""

    id: UUID
    pipeline_id: UUID
    status: PipelineRunStatus
    pause_reason: str | None = None
    reason: str | None = None  # why nothing was submitted at the last look
    trouble: str | None = None  # what stands in the way of the next job
    target_folder: str
    base_candidates: int
    variables: dict[str, Any] = Field(default_factory=dict)
    limits: PipelineLimits = PipelineLimits()
    tokens: int = 0  # reserved and consumed
    created_at: datetime
    changed_at: datetime
    files_removed_at: datetime | None = None
    pipeline: str = ""  # its name
    steps: tuple[StepBoard, ...] = ()
    jobs: dict[str, int] = Field(default_factory=dict)  # by state
    queued: int = 0
    success_rate: float | None = None
    bytes: int = 0
    seconds_left: float | None = None

    @property
    def is_resting(self) -> bool:
        """Nothing is left that it could do by itself, as things stand."""
        is_busy = any(each.in_flight for each in self.steps)
        return not is_busy and (self.status != "active" or self.reason in _RESTING)


class PipelineRunPage(Page):
    runs: tuple[PipelineRun, ...]
    next: UUID | None = None


class Candidate(Message):
    id: UUID
    step: int  # its number; 0 is the base
    parent: UUID | None = None
    status: CandidateStatus
    score: float
    child_count: int = 0
    seed: int | None = None
    properties: dict[str, Any] = Field(default_factory=dict)  # what it was made with
    job_id: UUID | None = None
    output_index: int = 0
    path: str = ""  # its name in listings and exports
    content_type: str = ""
    size: int = 0
    url: str | None = None  # good for some minutes; none once the file was removed
    text: str | None = None  # what its job showed, beside a picture or in its place
    created_at: datetime


class CandidatePage(Page):
    candidates: tuple[Candidate, ...]
    next: UUID | None = None


class Branch(Message):
    """A candidate with all that came of it."""

    id: UUID
    step: int
    status: CandidateStatus
    score: float
    children: tuple["Branch", ...] = ()


class CandidateTree(Message):
    tree: tuple[Branch, ...]


class Pair(Message):
    """Two candidates that are worth comparing; none where there are not two."""

    candidates: tuple[Candidate, ...] = ()


class Vote(Message):
    id: UUID  # to undo it by
    scores: dict[UUID, float] = Field(default_factory=dict)


class PipelineFailure(Message):
    job_id: UUID
    step: str
    parent: UUID | None = None
    error: str | None = None
    ended_at: datetime | None = None


class PipelineFailures(Message):
    failures: tuple[PipelineFailure, ...]


class Retried(Message):
    jobs: tuple[UUID, ...]


class PipelineEvent(Message):
    """One thing that happened; `id` is where a reader goes on."""

    id: int
    kind: str  # started, submitted, candidates, job_failed, approved, voted, paused …
    data: dict[str, Any]
