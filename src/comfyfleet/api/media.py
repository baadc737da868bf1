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
    number: int = Field(description="The number of the part, counted from 1.")
    start: int = Field(description="The position of the part's first byte in the file.")
    size: int = Field(
        description="The size of the part in bytes. The body of the PUT request must have "
        "exactly this size."
    )
    upload: UploadSlot | None = Field(
        default=None, description="null if the part has already been uploaded."
    )


class UploadState(Response):
    """The state of an announced upload."""

    file_id: UUID
    size: int = Field(description="The announced size in bytes.")
    received_bytes: int
    is_whole: bool = Field(
        description="Whether the file is complete. If so, link it with POST /api/videos."
    )
    parts: tuple[UploadPart, ...] = Field(
        default=(),
        description="The parts of a file that is uploaded in parts, as long as some are missing.",
    )
    expires_at: datetime = Field(description="When the URLs expire. Repeat the call for new ones.")


class UploadedFile(Response):
    """A file with its announced properties."""

    id: UUID
    filename: str
    content_type: str
    size: int


class Upload(Response):
    file_id: UUID = Field(
        description="The id of the file. Link it with POST /api/videos after the upload."
    )
    file: UploadedFile | None = None
    upload: UploadSlot = Field(description="For uploading the whole file at once.")
    parts: tuple[UploadPart, ...] = Field(
        default=(),
        description=(
            "Used instead of `upload` if in_parts was sent. The parts can be uploaded separately, "
            "in any order and concurrently."
        ),
    )
    expires_at: datetime = Field(description="When the URLs expire.")


class VideoSummary(Response):
    id: UUID
    kind: Annotated[MediaKind, OPEN_ENUM]
    status: MediaStatus = Field(description="The status of the media item's latest job.")
    progress: float | None = Field(
        default=None,
        description="Progress of the media item's latest job in percent. null if unknown.",
    )
    error: str | None = Field(default=None, description="Why the media item's latest job failed.")
    job_id: UUID | None = Field(default=None, description="The media item's latest job.")
    effect_id: UUID | None = Field(
        default=None, description="The effect of the media item's latest job."
    )
    filename: str | None = Field(
        default=None,
        description="The name of the uploaded file. null once it has expired.",
        examples=["cat.png"],
    )
    original_file_url: str | None = Field(
        default=None,
        description="The URL of the uploaded file, valid for 15 minutes. Lists contain it only "
        "with urls=true.",
    )
    processed_file_url: str | None = Field(
        default=None,
        description=(
            "The URL of the latest job's result, if any. It is valid for 15 minutes; "
            "repeat the call for a new one. Lists contain it only with urls=true."
        ),
    )
    original_small_url: str | None = SMALL_URL
    processed_small_url: str | None = SMALL_URL
    processed_content_type: str | None = Field(default=None, examples=["image/png"])
    created_at: datetime
    expired_at: datetime | None = None


class MediaResult(Response):
    """A job that was run on a media item, with its first output."""

    job_id: UUID
    effect_id: UUID | None = None
    status: JobStatus
    url: str | None = Field(
        default=None, description="The URL of the first output, valid for 15 minutes."
    )
    small_url: str | None = SMALL_URL
    content_type: str | None = Field(default=None, examples=["image/png"])
    submitted_at: datetime


class Video(VideoSummary):
    """An uploaded image, video or audio file, with the state of its latest job."""

    estimated_seconds_left: float | None = Field(
        default=None,
        description=(
            "Estimated seconds until the job ends, based on the effect's history and without the "
            "time in the queue. null if unknown, or if the run takes longer than usual."
        ),
        examples=[8.5],
    )
    results: tuple[MediaResult, ...] = Field(
        default=(),
        description=f"The media item's jobs, including unfinished ones, newest first. At most "
        f"{RESULTS_MAX}.",
    )
    values: tuple[Value, ...] = VALUES
    text: str | None = TEXT


class Videos(Page):
    videos: tuple[VideoSummary, ...] = Field(description="Newest first.")
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


class ShareAnswer(Response):
    """A link that shows a result to everyone who has the link."""

    id: UUID
    job_id: UUID
    video_id: UUID | None = None
    has_original: bool = Field(
        default=False,
        description="Whether the link also shows the original, for a before/after comparison.",
    )
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None = None


class MadeShare(ShareAnswer):
    """A newly created link, with its secret."""

    secret: str = Field(
        description="The link's secret, shown only once because only its hash is stored."
    )
    url: str = Field(
        description=(
            "The page that shows the result. GET /api/shared/SECRET returns the same information "
            "as data."
        )
    )


class Shares(Page):
    shares: tuple[ShareAnswer, ...] = Field(
        description="Newest first, including revoked and expired ones."
    )
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


class SharedState(StrEnum):
    READY = "ready"
    EXPIRED = "expired"  # the link or its contents have expired


class SharedFile(Response):
    filename: str = Field(examples=["cat-cartoon.png"])
    content_type: str = Field(examples=["image/png"])
    url: str = Field(description="Valid until the link expires or is revoked.")


class SharedAnswer(Response):
    """The contents of a link, without information about its owner."""

    state: SharedState
    effect_title: str | None = None
    original: SharedFile | None = None
    outputs: tuple[SharedFile, ...] = ()
    created_at: datetime
    expires_at: datetime
