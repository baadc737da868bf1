"""Computes the state of a job for the page on which a user waits for it: its four stages, and its
progress as estimated from earlier runs of the effect. Pure.
"""

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from comfyfleet.api.jobs import JobStage, JobStatus, StageName, StageState
from comfyfleet.server.jobs.model import Job

# Progress in percent at which the last stage begins. The worker then fetches and uploads the
# outputs.
FINISHING_PERCENT = 99.5
# The fraction of a run's typical duration that the last stage takes.
FINISHING_SHARE = 0.05
# Upper limit in percent for estimated progress. A run that takes longer than usual stays at this
# value until its backend reports progress.
EXPECTED_PERCENT_MAX = 95.0


class WaitingJob(NamedTuple):
    """The columns of a job that matter to a user who is waiting for it."""

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
        """The status that users see. A prefetched job is shown as queued until its worker starts
        it.
        """
        is_prefetched = self.status == JobStatus.PROCESSING and self.started_at is None
        return JobStatus.QUEUED if is_prefetched else self.status

    @property
    def refunded_tokens(self) -> int:
        is_refunded = self.status in (JobStatus.FAILED, JobStatus.CANCELLED)
        return self.reserved_tokens if is_refunded else 0


def stage_of(job: WaitingJob, percent: float | None) -> StageName | None:
    """Returns the current stage, or None if the job has ended."""
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
    """Returns the four stages of a job. If the job failed or was cancelled, only the stages that it
    had completed are done.
    """
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
    """Estimates the progress in percent, assuming that the run takes as long as usual."""
    if job.shown_status != JobStatus.PROCESSING or not typical_seconds or job.started_at is None:
        return None
    elapsed = max(0.0, (now - job.started_at).total_seconds())
    return round(min(EXPECTED_PERCENT_MAX, 100 * elapsed / typical_seconds), 1)


def seconds_left(
    job: WaitingJob | Job, typical_seconds: float | None, now: datetime
) -> float | None:
    """Estimates the remaining time in seconds. Returns None if it is unknown, for example because
    the run takes longer than usual.
    """
    if typical_seconds is None or not job.status.is_active:
        return None
    elapsed = (now - job.started_at).total_seconds() if job.started_at else 0.0
    remaining = round(typical_seconds - elapsed, 1)
    return remaining if remaining > 0 else None


def _reached(job: WaitingJob, percent: float | None) -> int:
    """Returns the index of the last stage that the job reached. If the job is completed, returns
    the number of stages.
    """
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
