"""Effects, jobs and batches in the public API, and the events of a job."""

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from pydantic import Field

from comfyfleet.api.values import Message, Page, Response

# Of a batch; the others are held.
ADMITTED_AT_ONCE_MAX = 5


class JobStatus(StrEnum):
    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_active(self) -> bool:
        return self in (JobStatus.QUEUED, JobStatus.PROCESSING)


ENDED = frozenset(each for each in JobStatus if not each.is_active)


class Takes(Response):
    """The media that an effect is applied to."""

    kind: str = Field(description="image, video or audio", examples=["image"])
    media_types: tuple[str, ...] = Field(
        default=(),
        description="Empty: all types of the kind.",
        examples=[["image/png", "image/jpeg"]],
    )
    max_bytes: int = Field(examples=[50_000_000])


class EffectAnswer(Response):
    """An effect as customers see it. `properties` is a JSON Schema of what a job may set."""

    id: UUID = Field(description="The effect_id for a job.")
    slug: str = Field(examples=["cartoon"])
    title: str = Field(default="", examples=["Cartoon"])
    description: str = ""
    preview_url: str | None = None
    price_tokens: int = Field(description="Reserved at submit, and due on success.", examples=[5])
    typical_seconds: float | None = Field(
        default=None,
        description="Duration of the latest jobs; null before the first.",
        examples=[12.5],
    )
    takes: Takes | None = Field(
        default=None, description="null: it needs no media, and so no video_id."
    )
    properties: dict[str, Any] = Field(
        default_factory=dict,
        description="JSON Schema (2020-12) of what a job may send as properties.",
        examples=[{"type": "object", "properties": {"prompt": {"type": "string"}}}],
    )


class PublicEffects(Page):
    effects: tuple[EffectAnswer, ...] = Field(description="By slug.")
    next: str | None = Field(default=None, description="The next page: after=next; null: no more.")


class Value(Response):
    node_id: str = Field(examples=["7"])
    name: str = Field(description="The name that the node gives it.", examples=["text"])
    value: Any = Field(
        default=None, description="A text, number, boolean or JSON.", examples=["a cat"]
    )


VALUES = Field(default=(), description="What nodes showed: texts, numbers, booleans, JSON.")
TEXT = Field(
    default=None, description="The texts of the first node that showed any; null: none did."
)


class Output(Response):
    """One file that a job made, with a URL to download it."""

    name: str
    filename: str = Field(examples=["made_00001_.png"])
    content_type: str = Field(default="application/octet-stream", examples=["image/png"])
    size: int | None = Field(default=None, description="In bytes.", examples=[512_000])
    url: str = Field(description="Valid for 15 minutes; repeat the call for a new one.")


class JobSummary(Response):
    id: UUID
    status: JobStatus
    effect_id: UUID | None = None
    video_id: UUID | None = None
    batch_id: UUID | None = None
    retry_of: UUID | None = None
    price_tokens: int = Field(
        default=0,
        description="Reserved at submit; consumed on success, else refunded.",
        examples=[5],
    )
    progress: float | None = Field(default=None, description="Percent; null if unknown.")
    error: str | None = Field(default=None, description="Why it failed, for people.")
    submitted_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = Field(
        default=None, description="When it ended, however it ended."
    )

    @property
    def has_ended(self) -> bool:
        return not self.status.is_active


class JobAnswer(JobSummary):
    """A job: its status, its outputs, and the values that its nodes showed."""

    idempotency_key: str | None = None
    properties: dict[str, Any] = Field(
        default_factory=dict, description="Including default values, such as a seed."
    )
    estimated_seconds_left: float | None = Field(
        default=None,
        description="From the effect's history, without the wait in the queue.",
        examples=[8.5],
    )
    outputs: tuple[Output, ...] = ()
    processed_file_url: str | None = Field(default=None, description="The first output's.")
    values: tuple[Value, ...] = VALUES
    text: str | None = TEXT
    warnings: tuple[str, ...] = Field(
        default=(), description="At submit: that it will wait, because no worker can run it now."
    )


class Jobs(Page):
    jobs: tuple[JobSummary, ...] = Field(description="The newest first.")
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


class JobWaitAnswer(Response):
    why: str = Field(description="One sentence.", examples=["3 jobs ahead, about 2 minutes."])


class BatchAnswer(Response):
    """A batch: its jobs counted by status, and what they cost."""

    id: UUID
    effect_id: UUID
    total: int
    held: int = Field(
        default=0,
        description=f"Not in the queue yet: {ADMITTED_AT_ONCE_MAX} of a batch are at a time.",
    )
    counts: dict[JobStatus, int] = Field(
        default_factory=dict, description="Number of jobs by status."
    )
    progress: float = Field(default=0.0, description="Percent of the jobs that have ended.")
    is_ended: bool = False
    reserved_tokens: int = Field(default=0, description="Of jobs that have not ended.")
    consumed_tokens: int = 0
    refunded_tokens: int = 0
    created_at: datetime
    cancelled_at: datetime | None = None
    jobs: tuple[JobSummary, ...] = Field(
        default=(), description="In the order of the items, a page of them."
    )
    next: int | None = Field(default=None, description="The next page: start=next; null: no more.")


class JobEvent(Message):
    """One event of a job. A reader reconnects with the last `id`; a progress event has the id of
    the event before it."""

    id: int
    kind: str  # status, progress, outputs
    data: dict[str, Any]

    @property
    def percent(self) -> float | None:
        value = self.data.get("percent") if self.kind == "progress" else None
        return float(value) if isinstance(value, int | float) else None

    @property
    def ends_job(self) -> bool:
        return self.kind == "status" and self.data.get("status") in ENDED
