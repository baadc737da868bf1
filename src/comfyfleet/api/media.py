"""Uploads and media in the public API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias
from uuid import UUID

from pydantic import Field

from comfyfleet.api.jobs import TEXT, VALUES, JobStatus, Value
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


class Upload(Response):
    file_id: UUID = Field(description="Link it with POST /api/videos after the upload.")
    upload: UploadSlot
    expires_at: datetime = Field(description="When the URL expires.")


class VideoSummary(Response):
    id: UUID
    kind: Annotated[MediaKind, OPEN_ENUM]
    status: MediaStatus = Field(description="The status of its latest job.")
    progress: float | None = Field(default=None, description="Percent; null if unknown.")
    error: str | None = Field(default=None, description="Why its latest job failed.")
    job_id: UUID | None = Field(default=None, description="Its latest job.")
    created_at: datetime
    expired_at: datetime | None = None


class MediaResult(Response):
    """One job that was run on a media, with its first output."""

    job_id: UUID
    effect_id: UUID | None = None
    status: JobStatus
    url: str | None = Field(default=None, description="The first output; valid for 15 minutes.")
    content_type: str | None = Field(default=None, examples=["image/png"])
    submitted_at: datetime


class Video(VideoSummary):
    """An uploaded picture, video or sound, with the state of its latest job."""

    estimated_seconds_left: float | None = Field(
        default=None,
        description="From the effect's history, without the wait in the queue.",
        examples=[8.5],
    )
    original_file_url: str | None = Field(default=None, description="Valid for 15 minutes.")
    processed_file_url: str | None = Field(
        default=None,
        description="The latest job's result, if it has one; valid for 15 minutes, repeat the call for a new one.",
    )
    processed_content_type: str | None = Field(default=None, examples=["image/png"])
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
