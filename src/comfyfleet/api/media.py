"""Uploads and media in the public API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias
from uuid import UUID

from pydantic import Field

from comfyfleet.api.jobs import SMALL_URL, TEXT, VALUES, JobStatus, Value
from comfyfleet.api.values import OPEN_ENUM, Page, Response

MediaKind: TypeAlias = Literal["image", "video", "audio"]
RESULTS_MAX = 100


class MediaStatus(StrEnum):
    UPLOADED = "uploaded"
    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class UploadSlot(Response):
    method: str = Field(default="PUT", examples=["PUT"])
    url: str
    headers: dict[str, str] = Field(
        default_factory=dict,
        description="Send these headers unchanged.",
        examples=[{"Content-Type": "image/png"}],
    )


class UploadPart(Response):
    number: int = Field(description="From 1.")
    start: int = Field(description="Its first byte in the file.")
    size: int = Field(description="In bytes; its PUT takes exactly so many.")
    upload: UploadSlot | None = Field(default=None, description="null: it is there already.")


class UploadState(Response):
    """What of an announced file has arrived."""

    file_id: UUID
    size: int = Field(description="As announced.")
    received_bytes: int
    is_whole: bool = Field(description="Nothing is missing: link it with POST /api/videos.")
    parts: tuple[UploadPart, ...] = Field(
        default=(), description="Of a file in parts, as long as some are missing."
    )
    expires_at: datetime = Field(description="When the URLs expire; repeat the call for new ones.")


class UploadedFile(Response):
    """A file as it was announced."""

    id: UUID
    filename: str
    content_type: str
    size: int


class Upload(Response):
    file_id: UUID = Field(description="Link it with POST /api/videos after the upload.")
    file: UploadedFile | None = None
    upload: UploadSlot = Field(description="For the whole file at once.")
    parts: tuple[UploadPart, ...] = Field(
        default=(),
        description="In place of it, if in_parts was sent: each by itself, in any order, several at once.",
    )
    expires_at: datetime = Field(description="When the URLs expire.")


class VideoSummary(Response):
    id: UUID
    kind: Annotated[MediaKind, OPEN_ENUM]
    status: MediaStatus = Field(description="The status of its latest job.")
    progress: float | None = Field(default=None, description="Percent; null if unknown.")
    error: str | None = Field(default=None, description="Why its latest job failed.")
    job_id: UUID | None = Field(default=None, description="Its latest job.")
    effect_id: UUID | None = Field(default=None, description="Of its latest job.")
    filename: str | None = Field(
        default=None, description="Of the upload; null once it has expired.", examples=["cat.png"]
    )
    original_file_url: str | None = Field(
        default=None, description="Valid for 15 minutes; in a list only with urls=true."
    )
    processed_file_url: str | None = Field(
        default=None,
        description=(
            "The latest job's result, if it has one; valid for 15 minutes, repeat the call for a new one. In a list only "
            "with urls=true."
        ),
    )
    original_small_url: str | None = SMALL_URL
    processed_small_url: str | None = SMALL_URL
    processed_content_type: str | None = Field(default=None, examples=["image/png"])
    created_at: datetime
    expired_at: datetime | None = None


class MediaResult(Response):
    """One job that was run on a media, with its first output."""

    job_id: UUID
    effect_id: UUID | None = None
    status: JobStatus
    url: str | None = Field(default=None, description="The first output; valid for 15 minutes.")
    small_url: str | None = SMALL_URL
    content_type: str | None = Field(default=None, examples=["image/png"])
    submitted_at: datetime


class Video(VideoSummary):
    """An uploaded picture, video or sound, with the state of its latest job."""

    estimated_seconds_left: float | None = Field(
        default=None,
        description="From the effect's history, without the wait in the queue; null: unknown, also once a run takes longer than usual.",
        examples=[8.5],
    )
    results: tuple[MediaResult, ...] = Field(
        default=(),
        description=f"All its jobs, also those under way; the newest first, {RESULTS_MAX} at most.",
    )
    values: tuple[Value, ...] = VALUES
    text: str | None = TEXT


class Videos(Page):
    videos: tuple[VideoSummary, ...] = Field(description="The newest first.")
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


class ShareAnswer(Response):
    """A link that shows one result to whoever has it."""

    id: UUID
    job_id: UUID
    video_id: UUID | None = None
    has_original: bool = Field(
        default=False, description="Whether it also shows what went in, for before and after."
    )
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None = None


class MadeShare(ShareAnswer):
    """A link that was just made, with its secret."""

    secret: str = Field(description="Shown only once: only its hash is stored.")
    url: str = Field(
        description="The page that shows it; GET /api/shared/SECRET has the same as data."
    )


class Shares(Page):
    shares: tuple[ShareAnswer, ...] = Field(
        description="The newest first, including revoked and expired ones."
    )
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


class SharedState(StrEnum):
    READY = "ready"
    EXPIRED = "expired"  # the link, or what it showed


class SharedFile(Response):
    filename: str = Field(examples=["cat-cartoon.png"])
    content_type: str = Field(examples=["image/png"])
    url: str = Field(description="Valid until the link expires or is revoked.")


class SharedAnswer(Response):
    """What a link shows. Nothing tells whose it is."""

    state: SharedState
    effect_title: str | None = None
    original: SharedFile | None = None
    outputs: tuple[SharedFile, ...] = ()
    created_at: datetime
    expires_at: datetime
