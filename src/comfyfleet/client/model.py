"""What the API answers, as frozen values. Fields that a newer control plane adds are let through."""

from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from pydantic import Field

from comfyfleet.wire.files import Message
from comfyfleet.wire.values import ShownValue

JobStatus: TypeAlias = Literal["queued", "processing", "completed", "failed", "cancelled"]
MediaStatus: TypeAlias = Literal[
    "uploaded", "queued", "processing", "completed", "failed", "expired", "cancelled"
]
ENDED = frozenset({"completed", "failed", "cancelled"})


class Page(Message):
    """A part of a list."""

    next: UUID | int | str | None = None  # where the next part begins


class Takes(Message):
    """The media that an effect is applied to."""

    kind: str  # image, video, audio
    media_types: tuple[str, ...] = ()  # none named: all of the kind
    max_bytes: int | None = None


class Effect(Message):
    """What a customer picks. `properties` is a JSON Schema of what `apply` takes."""

    id: UUID
    slug: str
    title: str = ""
    description: str = ""
    preview_url: str | None = None
    price_tokens: int
    takes: Takes | None = None  # none: it is applied without media
    properties: dict[str, Any] = Field(default_factory=dict)
    typical_seconds: float | None = None


class Effects(Page):
    effects: tuple[Effect, ...]
    next: str | None = None


class Slot(Message):
    """Where the bytes of a file go."""

    method: str = "PUT"
    url: str
    headers: dict[str, str] = Field(default_factory=dict)


class Announced(Message):
    file_id: UUID
    upload: Slot


class MediaResult(Message):
    """One job of a media, and its first output if it has any."""

    job_id: UUID
    status: JobStatus
    effect_id: UUID | None = None
    url: str | None = None
    content_type: str | None = None
    submitted_at: datetime | None = None


class Media(Message):
    """What was uploaded, and what became of it: its status is that of its latest job."""

    id: UUID
    status: MediaStatus
    kind: str | None = None
    progress: float | None = None  # percent
    estimated_seconds_left: float | None = None
    original_file_url: str | None = None
    processed_file_url: str | None = None
    processed_content_type: str | None = None
    results: tuple[MediaResult, ...] = ()  # of all its jobs, the newest first
    values: tuple[ShownValue, ...] = ()
    text: str | None = None
    error: str | None = None
    job_id: UUID | None = None
    created_at: datetime | None = None
    expired_at: datetime | None = None


class MediaPage(Page):
    videos: tuple[Media, ...]
    next: UUID | None = None


class Output(Message):
    name: str
    filename: str
    url: str  # good for some minutes; ask again for a fresh one
    size: int | None = None
    content_type: str = "application/octet-stream"


class Job(Message):
    """`values`: what its nodes showed; `text`: the texts of the first node that showed any."""

    id: UUID
    status: JobStatus
    effect_id: UUID | None = None
    video_id: UUID | None = None
    retry_of: UUID | None = None
    idempotency_key: str | None = None
    batch_id: UUID | None = None
    properties: dict[str, Any] = Field(default_factory=dict)
    progress: float | None = None  # percent
    price_tokens: int = 0  # reserved at submit; consumed on success, else refunded
    estimated_seconds_left: float | None = None
    outputs: tuple[Output, ...] = ()
    processed_file_url: str | None = None
    values: tuple[ShownValue, ...] = ()
    text: str | None = None
    error: str | None = None
    submitted_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class JobPage(Page):
    jobs: tuple[Job, ...]
    next: UUID | None = None


class Why(Message):
    why: str


class Batch(Message):
    """All jobs of a batch in a few figures."""

    id: UUID
    effect_id: UUID
    total: int
    held: int = 0  # not yet admitted to the queue
    counts: dict[str, int] = Field(default_factory=dict)  # by status
    progress: float = 0.0  # percent
    is_ended: bool = False
    reserved_tokens: int = 0
    consumed_tokens: int = 0
    refunded_tokens: int = 0
    jobs: tuple[Job, ...] = ()
    next: int | None = None


class JobEvent(Message):
    """One thing that happened; `id` is where a reader goes on (progress has that of what came before)."""

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


class Wallet(Message):
    balance: int


class Transaction(Message):
    id: int
    type: Literal["PAYMENT_CREDIT", "JOB_RESERVE", "JOB_CONSUME", "JOB_REFUND"]
    amount: int
    job_id: UUID | None = None
    created_at: datetime


class TransactionPage(Page):
    transactions: tuple[Transaction, ...]
    next: int | None = None


class Key(Message):
    """`key` is there once: as it is made."""

    id: UUID
    name: str
    prefix: str
    scopes: tuple[str, ...]
    key: str | None = None
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class Keys(Message):
    keys: tuple[Key, ...]


class Webhook(Message):
    """`secret` is there once: as it is made. `verify_signature` takes it."""

    id: UUID
    url: str
    events: tuple[str, ...]
    is_active: bool = True
    secret: str | None = None
    created_at: datetime


class WebhookList(Message):
    webhooks: tuple[Webhook, ...]


class Delivery(Message):
    id: UUID
    job_id: UUID
    event: str
    status: Literal["pending", "delivered", "failed"]
    tries: int
    last_status: int | None = None
    last_error: str | None = None
    created_at: datetime
    ended_at: datetime | None = None


class Deliveries(Message):
    deliveries: tuple[Delivery, ...]
    next: UUID | None = None
