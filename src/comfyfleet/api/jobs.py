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


class ExampleMedia(Response):
    url: str = Field(description="Served by us, without a key; it never changes, so cache it.")
    content_type: str = Field(examples=["image/webp"])
    size: int = Field(description="In bytes.")
    width: int | None = Field(default=None, description="Of a picture, in pixels.")
    height: int | None = None


class Example(Response):
    """What an operator shows of an effect: what went in, and what came out."""

    before: ExampleMedia | None = None
    after: ExampleMedia | None = None


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
        description="The median of the latest runs; null before the first.",
        examples=[12.5],
    )
    last_processing_time_seconds: float | None = Field(
        default=None, description="Of the latest run; null before the first.", examples=[12.5]
    )
    takes: Takes | None = Field(
        default=None, description="null: it needs no media, and so no video_id."
    )
    properties: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "JSON Schema (2020-12) of what a job may send as properties, in the order of a form. x-kind of each says how "
            "people enter it: text, multiline, number, integer, boolean, choice, seed, colour, image, mask, video, audio."
        ),
        examples=[
            {
                "type": "object",
                "properties": {"prompt": {"type": "string", "title": "Prompt", "x-kind": "text"}},
            }
        ],
    )
    tags: tuple[str, ...] = Field(default=(), examples=[["portrait", "video"]])
    examples: tuple[Example, ...] = Field(default=(), description="The first is the one to show.")
    can_pay: bool = Field(
        default=True, description="Whether the balance of the key's user covers the price."
    )


class PublicEffects(Page):
    effects: tuple[EffectAnswer, ...] = Field(description="By slug.")
    tags: tuple[str, ...] = Field(
        default=(), description="Of all published effects, by name; on the first page only."
    )
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


SMALL_URL = Field(
    default=None,
    description=(
        "A picture of at most 512 pixels for lists, valid as long as the other URL; null if the file is no picture, or small "
        "as it is."
    ),
)


class Output(Response):
    """One file that a job made, with a URL to download it."""

    name: str
    filename: str = Field(examples=["made_00001_.png"])
    download_name: str | None = Field(
        default=None,
        description="The name under which a browser saves it, after what went in and the effect; null: `filename`.",
        examples=["cat-soften.png"],
    )
    content_type: str = Field(default="application/octet-stream", examples=["image/png"])
    size: int | None = Field(default=None, description="In bytes.", examples=[512_000])
    url: str = Field(description="Valid for 15 minutes; repeat the call for a new one.")
    small_url: str | None = SMALL_URL


class JobSummary(Response):
    id: UUID
    status: JobStatus
    effect_id: UUID | None = None
    video_id: UUID | None = None
    batch_id: UUID | None = None
    retry_of: UUID | None = None
    reused_from: UUID | None = Field(
        default=None, description="The job whose result it took instead of running, for nothing."
    )
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
        description="From the effect's history, without the wait in the queue; null: unknown, also once a run takes longer than usual.",
        examples=[8.5],
    )
    outputs: tuple[Output, ...] = ()
    original: Output | None = Field(
        default=None, description="Of a job that has ended: what went in, as long as it is kept."
    )
    processed_file_url: str | None = Field(default=None, description="The first output's.")
    values: tuple[Value, ...] = VALUES
    text: str | None = TEXT
    warnings: tuple[str, ...] = Field(
        default=(), description="At submit: that it will wait, because no worker can run it now."
    )


class AgainAnswer(Response):
    """A job's settings as they were, ready to be changed and submitted again."""

    effect_id: UUID | None = None
    effect_slug: str | None = None
    video_id: UUID | None = Field(
        default=None, description="null: none was taken, or it has expired."
    )
    properties: dict[str, Any] = Field(
        default_factory=dict,
        description="What a job may send as properties; files by the ids of their media.",
    )
    price_tokens: int | None = Field(default=None, description="As of today.")
    problems: tuple[str, ...] = Field(
        default=(), description="What can't be taken over, for people; empty: all can."
    )


class Jobs(Page):
    jobs: tuple[JobSummary, ...] = Field(description="The newest first.")
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


class JobWaitAnswer(Response):
    why: str = Field(description="One sentence.", examples=["3 jobs ahead, about 2 minutes."])
    person_needed_after: float | None = Field(
        default=None,
        description="Seconds after which only a person can help, because no worker can run the job; null: it needs no help.",
    )
    required_action: str | None = Field(
        default=None, description="What that person must do; null: the job needs no help."
    )


class StageName(StrEnum):
    CHECKED = "checked"  # accepted and paid for
    WAITING = "waiting"  # for a machine
    MAKING = "making"
    FINISHING = "finishing"  # the result is being stored


class StageState(StrEnum):
    DONE = "done"
    CURRENT = "current"
    TO_COME = "to_come"


class JobStage(Response):
    """One of the four parts of a job's way."""

    name: StageName
    state: StageState
    seconds: float | None = Field(
        default=None,
        description="How long it took; or, until it is done, how long it usually takes; null: unknown.",
    )


class FollowedJob(Response):
    """A job as a page that waits for it shows it."""

    id: UUID
    status: JobStatus
    effect_id: UUID | None = None
    effect_slug: str | None = None
    effect_title: str | None = None
    video_id: UUID | None = None
    stage: StageName | None = Field(default=None, description="null: it has ended.")
    stages: tuple[JobStage, ...] = Field(default=(), description="Always the same four, in order.")
    why: str | None = Field(
        default=None,
        description="While it waits: its place in the queue, in words.",
        examples=["3 jobs ahead, about 2 minutes."],
    )
    progress: float | None = Field(
        default=None, description="Percent, as its worker measures it; null until the first report."
    )
    expected_progress: float | None = Field(
        default=None,
        description="Percent by the effect's history, until there is a real one; null: unknown.",
    )
    seconds_left: float | None = Field(
        default=None,
        description="By the effect's history, without the wait in the queue; null: unknown, also once a run takes longer than usual.",
    )
    node: str | None = Field(default=None, description="The node that runs now.")
    node_title: str | None = Field(default=None, examples=["Sampler"])
    step: int | None = Field(default=None, description="Of the node that runs now.")
    steps: int | None = None
    error: str | None = Field(default=None, description="Why it failed, for people.")
    price_tokens: int = 0
    refunded_tokens: int = Field(default=0, description="What came back, if it has not succeeded.")
    submitted_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None


class FollowedJobs(Response):
    jobs: tuple[FollowedJob, ...] = Field(description="The newest first.")


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
