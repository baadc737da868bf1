"""Who may do what, and whose job is whose."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

JOBS_KEPT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the cloud, known by the key; without credits nothing is accepted."""

    user: str
    has_credits: bool = True


@dataclass(frozen=True, slots=True)
class CloudJob:
    """What the cloud knows of a job beside queue and history."""

    user: str
    created_ms: int
    prompt: Mapping[str, Any]
    # A waiting job that was cancelled leaves no trace in the engine; the cloud remembers it.
    cancelled_ms: int | None = None


class Jobs:
    """The jobs of all users. Only the event loop touches it."""

    def __init__(self) -> None:
        self._jobs: dict[str, CloudJob] = {}

    def add(self, job_id: str, job: CloudJob) -> None:
        self._jobs[job_id] = job
        while len(self._jobs) > JOBS_KEPT_MAX:
            del self._jobs[next(iter(self._jobs))]

    def get(self, job_id: str) -> CloudJob | None:
        return self._jobs.get(job_id)

    def of(self, user: str) -> dict[str, CloudJob]:
        return {job_id: job for job_id, job in self._jobs.items() if job.user == user}
