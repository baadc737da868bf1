"""A job: one prompt, run once, for one tenant. Pure: no clock, no database."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from comfyfleet.dispatch.model import Lane, NewDispatch, Status
from comfyfleet.effects.model import AssetRef
from comfyfleet.wire.values import ShownValue


class JobStatus(StrEnum):
    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_active(self) -> bool:
        return self in (JobStatus.QUEUED, JobStatus.PROCESSING)


@dataclass(frozen=True, slots=True)
class Submission:
    """All that is pinned when a job is submitted."""

    workflow_id: int
    workflow_slug: str
    workflow_version: int
    prompt: Mapping[str, Any]
    properties: Mapping[str, Any] = field(default_factory=dict)
    assets: tuple[AssetRef, ...] = ()
    output_node_id: str | None = None
    stage: str = "production"
    provider: str = "self_hosted"
    priority: int = 0
    backend_affinity: str | None = None
    model_key: str | None = None
    model_set: str | None = None
    user_id: UUID | None = None
    effect_id: UUID | None = None
    retry_of: UUID | None = None
    idempotency_key: str | None = None
    request_hash: str | None = None
    price_tokens: int = 0  # reserved with the submit, and never another amount after that
    video_id: UUID | None = None  # the media that it processes
    batch_id: UUID | None = None
    batch_position: int | None = None
    run_kind: str | None = None  # graph or pipeline: the run that is told when it ends
    run_id: UUID | None = None
    is_held: bool = False  # it waits on the tenant's side until its batch or run admits it

    @property
    def lane(self) -> Lane:
        return Lane(self.workflow_id, self.stage, self.provider)

    @property
    def input_file_id(self) -> UUID | None:
        return next((each.file_id for each in self.assets if each.is_primary_input), None)


@dataclass(frozen=True, slots=True)
class Job:
    """One row of a tenant's jobs."""

    id: UUID
    tenant_id: UUID
    asked: Submission
    status: JobStatus
    attempt: int
    lease_number: int
    lease_token: UUID | None
    output_file_id: UUID | None
    provider_job_id: str | None
    result_metadata: Mapping[str, Any] | None
    error_message: str | None
    raw_error: str | None
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None

    @property
    def shown_status(self) -> JobStatus:
        """As people see it: a worker that holds it behind another job has not begun with it."""
        is_prefetched = self.status == JobStatus.PROCESSING and self.started_at is None
        return JobStatus.QUEUED if is_prefetched else self.status

    @property
    def reserved_tokens(self) -> int:
        return self.asked.price_tokens

    @property
    def values(self) -> tuple[ShownValue, ...]:
        """What its nodes showed as text, number, boolean or JSON; the output node's first."""
        kept = (self.result_metadata or {}).get("values", ())
        return tuple(ShownValue.model_validate(each) for each in kept)

    @property
    def wants_dispatch(self) -> bool:
        return self.status.is_active and not self.asked.is_held


class Shortage(NamedTuple):
    """Why nobody can run a job. `message` names everything, for operators; `told` is for customers."""

    message: str
    told: str


class HeldJob(NamedTuple):
    """It waits on the tenant's side."""

    id: UUID
    batch_id: UUID | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One lease under which the prompt was sent to a backend."""

    job_id: UUID
    lease_number: int
    tenant_id: UUID
    attempt: int
    worker_id: str
    started_at: datetime
    # Other values than the job's prompt has, by node and input; None: removed with the prompt.
    filled_in: Mapping[str, Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Failure:
    """What a customer may read, and what an operator needs."""

    message: str
    raw: str | None = None


_DISPATCH_STATUS = {
    JobStatus.COMPLETED: Status.COMPLETED,
    JobStatus.FAILED: Status.FAILED,
    JobStatus.CANCELLED: Status.CANCELLED,
}


def ended_as(job: Job) -> Status:
    """How the dispatch of an ended job must end."""
    return _DISPATCH_STATUS[job.status]


def dispatch_for(job: Job, max_attempts: int) -> NewDispatch:
    return NewDispatch(
        tenant_id=job.tenant_id,
        job_id=job.id,
        lane=job.asked.lane,
        priority=job.asked.priority,
        max_attempts=max_attempts,
        model_key=job.asked.model_key,
        model_set=job.asked.model_set,
        backend_affinity=job.asked.backend_affinity,
    )


def delivery_of(lease_token: UUID, job_id: UUID) -> UUID:
    """Names a lease in keys of outputs: as unique as its token, and tells nobody the token."""
    return uuid5(job_id, str(lease_token))
