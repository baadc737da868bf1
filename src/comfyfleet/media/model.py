"""A user's media item. Its status is that of its latest job. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from comfyfleet.media.kinds import MediaKind


class MediaStatus(StrEnum):
    UPLOADED = "uploaded"
    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Media:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    kind: MediaKind
    original_file_id: UUID | None  # none once it has expired
    created_at: datetime
    processed_file_id: UUID | None = None  # of the latest job
    job_id: UUID | None = None  # the latest
    active_job_id: UUID | None = None  # the same, until it ends
    processing_details: Mapping[str, Any] = field(default_factory=dict)
    expired_at: datetime | None = None

    @property
    def subject(self) -> str:
        return f"media:{self.id}"

    @property
    def file_ids(self) -> tuple[UUID, ...]:
        return tuple(each for each in (self.original_file_id, self.processed_file_id) if each)


def status_of(media: Media, job_status: str | None) -> MediaStatus:
    """`job_status` is that of the latest job; none if there never was one."""
    if media.expired_at is not None:
        return MediaStatus.EXPIRED
    if media.job_id is None or job_status is None:
        return MediaStatus.UPLOADED
    return MediaStatus(job_status)
