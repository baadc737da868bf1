"""A job as a waiting page shows it: four stages, and how far it is by its effect's history. Pure."""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from comfyfleet.api.jobs import JobStage, JobStatus, StageName, StageState
from comfyfleet.server.jobs.model import Job

# From here on the worker fetches and uploads what was made.
FINISHING_PERCENT = 99.5
# Of the typical time of a run.
FINISHING_SHARE = 0.05
# A run that takes longer than usual stands still here until there is real progress.
EXPECTED_PERCENT_MAX = 95.0


class WaitingJob(NamedTuple):
    """The columns of a job that change while somebody waits for it, and those that are shown."""

    id: UUID
    tenant_id: UUID
    status: JobStatus
    effect_id: UUID | None
    video_id: UUID | None
    lease_token: UUID | None
    is_held: bool
    reserved_tokens: int
    error_message: str | None
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None

    @property
    def shown_status(self) -> JobStatus:
        """A prefetched job, which its worker has not begun, is queued."""
        is_prefetched = self.status == JobStatus.PROCESSING and self.started_at is None
        return JobStatus.QUEUED if is_prefetched else self.status

    @property
    def refunded_tokens(self) -> int:
        is_refunded = self.status in (JobStatus.FAILED, JobStatus.CANCELLED)
        return self.reserved_tokens if is_refunded else 0


def stage_of(job: WaitingJob, percent: float | None) -> StageName | None:
    """The current stage; None once the job has ended."""
    match job.shown_status:
        case JobStatus.QUEUED:
            return StageName.WAITING
        case JobStatus.PROCESSING:
            is_made = percent is not None and percent >= FINISHING_PERCENT
            return StageName.FINISHING if is_made else StageName.MAKING
    return None


def stages_of(
    job: WaitingJob, percent: float | None, typical_seconds: float | None
) -> tuple[JobStage, ...]:
    """The four stages. Those of a job that failed or was cancelled are done as far as it came."""
    names, reached = list(StageName), _reached(job, percent)
    current = stage_of(job, percent)
    return tuple(
        JobStage(
            name=name,
            state=_state(place, reached, is_over=current is None),
            seconds=_seconds(name, job, typical_seconds),
        )
        for place, name in enumerate(names)
    )


def expected_percent(job: WaitingJob, typical_seconds: float | None, now: datetime) -> float | None:
    """How far the run is if it takes as long as usual."""
    if job.shown_status != JobStatus.PROCESSING or not typical_seconds or job.started_at is None:
        return None
    gone = max(0.0, (now - job.started_at).total_seconds())
    return round(min(EXPECTED_PERCENT_MAX, 100 * gone / typical_seconds), 1)


def seconds_left(
    job: WaitingJob | Job, typical_seconds: float | None, now: datetime
) -> float | None:
    """Estimates the remaining time. None means unknown, also once a run takes longer than usual."""
    if typical_seconds is None or not job.status.is_active:
        return None
    gone = (now - job.started_at).total_seconds() if job.started_at else 0.0
    left = round(typical_seconds - gone, 1)
    return left if left > 0 else None


def _reached(job: WaitingJob, percent: float | None) -> int:
    """The place of the last stage that the job came to."""
    names = list(StageName)
    current = stage_of(job, percent)
    if current is not None:
        return names.index(current)
    if job.status == JobStatus.COMPLETED:
        return len(names)
    return names.index(StageName.MAKING if job.started_at else StageName.WAITING)


def _state(place: int, reached: int, *, is_over: bool) -> StageState:
    if place < reached:
        return StageState.DONE
    return StageState.CURRENT if place == reached and not is_over else StageState.TO_COME


def _seconds(name: StageName, job: WaitingJob, typical_seconds: float | None) -> float | None:
    if name == StageName.CHECKED:
        return 0.0
    if name == StageName.WAITING:
        return _between(job.submitted_at, job.started_at)
    if typical_seconds is None:
        return None
    share = FINISHING_SHARE if name == StageName.FINISHING else 1 - FINISHING_SHARE
    took = _between(job.started_at, job.completed_at) if job.started_at else None
    return round(share * (typical_seconds if took is None else took), 1)


def _between(start: datetime | None, end: datetime | None) -> float | None:
    if start is None or end is None:
        return None
    return round(max(0.0, (end - start).total_seconds()), 1)
