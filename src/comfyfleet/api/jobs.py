"""Effects, jobs and batches in the public API, and the events of a job."""

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from pydantic import Field

from comfyfleet.api.values import Message, Page, Response

# Number of a batch's jobs that are queued at the same time. The others are held.
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


ENDED = frozenset(status for status in JobStatus if not status.is_active)


class Takes(Response):
    """The media that an effect is applied to."""

    kind: str = Field(description="The kind of media: image, video or audio.", examples=["image"])
    media_types: tuple[str, ...] = Field(
        default=(),
        description="Allowed media types. Empty if all types of the kind are allowed.",
        examples=[["image/png", "image/jpeg"]],
    )
    max_bytes: int = Field(examples=[50_000_000])


class ExampleMedia(Response):
    url: str = Field(
        description="Served by the control plane without a key. It never changes, so it can be "
        "cached."
    )
    content_type: str = Field(examples=["image/webp"])
    size: int = Field(description="The size in bytes.")
    width: int | None = Field(default=None, description="The width in pixels, for an image.")
    height: int | None = None


class Example(Response):
    """An example of an effect: the original and the result."""

    before: ExampleMedia | None = None
    after: ExampleMedia | None = None


class EffectAnswer(Response):
    """An effect in the customers' view. `properties` is a JSON Schema of a job's properties."""

    id: UUID = Field(description="Use this as `effect_id` of a job.")
    slug: str = Field(examples=["cartoon"])
    title: str = Field(default="", examples=["Cartoon"])
    description: str = ""
    preview_url: str | None = None
    price_tokens: int = Field(
        description="Tokens that are reserved at submission and charged on success.", examples=[5]
    )
    typical_seconds: float | None = Field(
        default=None,
        description="The median duration of the latest runs in seconds. null before the first run.",
        examples=[12.5],
    )
    last_processing_time_seconds: float | None = Field(
        default=None,
        description="The duration of the latest run in seconds. null before the first run.",
        examples=[12.5],
    )
    takes: Takes | None = Field(
        default=None, description="null if the effect needs no media, and therefore no `video_id`."
    )
    properties: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "JSON Schema (2020-12) of the properties that a job may send, in the order of a form. "
            "`x-kind` of each property specifies its form field: text, multiline, number, "
            "integer, boolean, choice, seed, colour, image, mask, video or audio."
        ),
        examples=[
            {
                "type": "object",
                "properties": {"prompt": {"type": "string", "title": "Prompt", "x-kind": "text"}},
            }
        ],
    )
    tags: tuple[str, ...] = Field(default=(), examples=[["portrait", "video"]])
    examples: tuple[Example, ...] = Field(
        default=(), description="The first one is the main example."
    )
    can_pay: bool = Field(
        default=True, description="Whether the balance of the key's user covers the price."
    )


class PublicEffects(Page):
    effects: tuple[EffectAnswer, ...] = Field(description="Sorted by slug.")
    tags: tuple[str, ...] = Field(
        default=(),
        description="Tags of all published effects, sorted by name. Only on the first page.",
    )
    next: str | None = Field(
        default=None,
        description="Pass this as `after` to get the next page. null on the last page.",
    )


class Value(Response):
    node_id: str = Field(examples=["7"])
    name: str = Field(description="The node's name for the value.", examples=["text"])
    value: Any = Field(
        default=None, description="A text, number, boolean or JSON value.", examples=["a cat"]
    )


VALUES = Field(
    default=(), description="Values that nodes showed: texts, numbers, booleans and JSON."
)
TEXT = Field(
    default=None, description="The texts of the first node that showed any. null if no node did."
)


SMALL_URL = Field(
    default=None,
    description=(
        "A thumbnail of at most 512 pixels, with the same validity as the other URL. null if "
        "the file is not an image, or already small."
    ),
)


class Output(Response):
    """A file that a job created, with a download URL."""

    name: str
    filename: str = Field(examples=["made_00001_.png"])
    download_name: str | None = Field(
        default=None,
        description=(
            "The file name for browsers, which combines the input's name and the effect. null "
            "means `filename`."
        ),
        examples=["cat-soften.png"],
    )
    content_type: str = Field(default="application/octet-stream", examples=["image/png"])
    size: int | None = Field(default=None, description="The size in bytes.", examples=[512_000])
    url: str = Field(
        description="The download URL, which is valid for 15 minutes. Repeat the call for a new "
        "one."
    )
    small_url: str | None = SMALL_URL


class JobSummary(Response):
    id: UUID
    status: JobStatus
    effect_id: UUID | None = None
    video_id: UUID | None = None
    batch_id: UUID | None = None
    retry_of: UUID | None = None
    reused_from: UUID | None = Field(
        default=None,
        description="The job whose result was reused free of charge instead of running this job.",
    )
    price_tokens: int = Field(
        default=0,
        description="Tokens that were reserved at submission. They are consumed on success and "
        "otherwise refunded.",
        examples=[5],
    )
    progress: float | None = Field(
        default=None, description="Progress in percent. null if unknown."
    )
    error: str | None = Field(
        default=None, description="Why the job failed, as a message for users."
    )
    submitted_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = Field(
        default=None, description="When the job ended, regardless of the result."
    )

    @property
    def has_ended(self) -> bool:
        return not self.status.is_active


class JobAnswer(JobSummary):
    """A job with its status, its outputs, and the values that its nodes showed."""

    idempotency_key: str | None = None
    properties: dict[str, Any] = Field(
        default_factory=dict,
        description="The job's properties, including default values such as a random seed.",
    )
    estimated_seconds_left: float | None = Field(
        default=None,
        description=(
            "Estimated seconds until the job ends, based on the effect's history and without the "
            "time in the queue. null if unknown, or if the run takes longer than usual."
        ),
        examples=[8.5],
    )
    outputs: tuple[Output, ...] = ()
    original: Output | None = Field(
        default=None, description="The input of a job that has ended, as long as it is stored."
    )
    processed_file_url: str | None = Field(default=None, description="URL of the first output.")
    values: tuple[Value, ...] = VALUES
    text: str | None = TEXT
    warnings: tuple[str, ...] = Field(
        default=(),
        description="Only set at submission. Warns that the job will wait, because no worker "
        "can run it now.",
    )


class AgainAnswer(Response):
    """A job's settings, ready to be changed and submitted again."""

    effect_id: UUID | None = None
    effect_slug: str | None = None
    video_id: UUID | None = Field(
        default=None, description="null if the job had no media or if the media item has expired."
    )
    properties: dict[str, Any] = Field(
        default_factory=dict,
        description="Properties for a new job. Files are represented by the ids of their media.",
    )
    price_tokens: int | None = Field(default=None, description="The current price.")
    problems: tuple[str, ...] = Field(
        default=(),
        description="Settings that can't be reused, as messages for users. Empty if all can.",
    )


class Jobs(Page):
    jobs: tuple[JobSummary, ...] = Field(description="Newest first.")
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


class JobWaitAnswer(Response):
    why: str = Field(
        description="The reason why the job isn't running, as one sentence.",
        examples=["3 jobs ahead, about 2 minutes."],
    )
    person_needed_after: float | None = Field(
        default=None,
        description=(
            "Seconds after which only a person can help, because no worker can run the job. null "
            "if the job needs no help."
        ),
    )
    required_action: str | None = Field(
        default=None, description="What that person must do. null if the job needs no help."
    )


class StageName(StrEnum):
    CHECKED = "checked"  # accepted and paid for
    WAITING = "waiting"  # waiting for a machine
    MAKING = "making"
    FINISHING = "finishing"  # the result is being stored


class StageState(StrEnum):
    DONE = "done"
    CURRENT = "current"
    TO_COME = "to_come"


class JobStage(Response):
    """A stage of a job. Every job has the same four stages."""

    name: StageName
    state: StageState
    seconds: float | None = Field(
        default=None,
        description=(
            "How long the stage took in seconds. Before the stage is done, how long it "
            "usually takes. null if unknown."
        ),
    )


class FollowedJob(Response):
    """A job with the information for a page that waits for it."""

    id: UUID
    status: JobStatus
    effect_id: UUID | None = None
    effect_slug: str | None = None
    effect_title: str | None = None
    video_id: UUID | None = None
    stage: StageName | None = Field(
        default=None, description="The current stage. null if the job has ended."
    )
    stages: tuple[JobStage, ...] = Field(
        default=(), description="Always the same four stages, in order."
    )
    why: str | None = Field(
        default=None,
        description="The position in the queue, described in words, while the job is waiting.",
        examples=["3 jobs ahead, about 2 minutes."],
    )
    progress: float | None = Field(
        default=None,
        description="Progress in percent, as measured by the worker. null until the first report.",
    )
    expected_progress: float | None = Field(
        default=None,
        description=(
            "Estimated progress in percent, based on the effect's history, until the first "
            "report. null if unknown."
        ),
    )
    seconds_left: float | None = Field(
        default=None,
        description=(
            "Estimated seconds until the job ends, based on the effect's history and without the "
            "time in the queue. null if unknown, or if the run takes longer than usual."
        ),
    )
    node: str | None = Field(default=None, description="The node that is running now.")
    node_title: str | None = Field(default=None, examples=["Sampler"])
    step: int | None = Field(default=None, description="The step of the node that is running now.")
    steps: int | None = None
    error: str | None = Field(
        default=None, description="Why the job failed, as a message for users."
    )
    price_tokens: int = 0
    refunded_tokens: int = Field(
        default=0, description="Refunded tokens, if the job did not succeed."
    )
    submitted_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None


class FollowedJobs(Response):
    jobs: tuple[FollowedJob, ...] = Field(description="Newest first.")


class BatchAnswer(Response):
    """A batch with its costs and the number of its jobs by status."""

    id: UUID
    effect_id: UUID
    total: int
    held: int = Field(
        default=0,
        description=(
            f"Jobs that are not in the queue yet. Only {ADMITTED_AT_ONCE_MAX} of a batch are "
            f"queued at a time."
        ),
    )
    counts: dict[JobStatus, int] = Field(
        default_factory=dict, description="Number of jobs by status."
    )
    progress: float = Field(default=0.0, description="Percentage of the jobs that have ended.")
    is_ended: bool = False
    reserved_tokens: int = Field(default=0, description="Tokens of jobs that have not ended.")
    consumed_tokens: int = 0
    refunded_tokens: int = 0
    created_at: datetime
    cancelled_at: datetime | None = None
    jobs: tuple[JobSummary, ...] = Field(
        default=(), description="A page of the batch's jobs, in the order of the items."
    )
    next: int | None = Field(
        default=None,
        description="Pass this as `start` to get the next page. null on the last page.",
    )


class JobEvent(Message):
    """An event of a job. A reader reconnects with the last `id`. A progress event has the id of the
    event before it."""

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
