"""Uploads and media in the public API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias
from uuid import UUID

from pydantic import Field

from comfyfleet.api.jobs import TEXT, VALUES, JobStatus, Value
from comfyfleet.api.values import OPEN_ENUM, Response

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
        description="To be sent as they are.",
        examples=[{"Content-Type": "image/png"}],
    )


class Upload(Response):
    file_id: UUID = Field(description="What POST /api/videos links once the bytes are there.")
    upload: UploadSlot
    expires_at: datetime = Field(description="Until when the URL can be used.")


class VideoSummary(Response):
    id: UUID
    kind: Annotated[MediaKind, OPEN_ENUM]
    status: MediaStatus = Field(description="That of its latest job.")
    progress: float | None = Field(
        default=None, description="Percent; null as long as nobody knows."
    )
    error: str | None = Field(default=None, description="Why its latest job failed.")
    job_id: UUID | None = Field(default=None, description="Its latest job.")
    created_at: datetime
    expired_at: datetime | None = None


class MediaResult(Response):
    """One job that was run on a media, with its first output."""

    job_id: UUID
    effect_id: UUID | None = None
    status: JobStatus
    url: str | None = Field(default=None, description="The first output's; lives for 15 minutes.")
    content_type: str | None = Field(default=None, examples=["image/png"])
    submitted_at: datetime


class Video(VideoSummary):
    """An uploaded picture, video or sound, with the state of its latest job."""

    estimated_seconds_left: float | None = Field(
        default=None,
        description="From the effect's history, without the wait in the queue.",
        examples=[8.5],
    )
    original_file_url: str | None = Field(default=None, description="Lives for 15 minutes.")
    processed_file_url: str | None = Field(
        default=None,
        description="The latest job's result, if it has one; lives for 15 minutes, ask again for a new one.",
    )
    processed_content_type: str | None = Field(default=None, examples=["image/png"])
    results: tuple[MediaResult, ...] = Field(
        default=(),
        description=f"All its jobs, also those under way; the newest first, {RESULTS_MAX} at most.",
    )
    values: tuple[Value, ...] = VALUES
    text: str | None = TEXT


class Videos(Response):
    videos: tuple[VideoSummary, ...] = Field(description="The newest first.")
    next: UUID | None = Field(
        default=None, description="Ask on with before=next; null: that was all."
    )
