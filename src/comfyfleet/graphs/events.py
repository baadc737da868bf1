"""What a run is told, and what it wants done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeAlias
from uuid import UUID

from comfyfleet.graphs.catalogue import BackendState, EffectTerms, Need
from comfyfleet.graphs.runs import Choice, Key, Question, RunError

IN_QUEUE_MAX = 5


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The world as it is while a decision is made."""

    now: datetime
    backends: tuple[BackendState, ...] = ()
    in_queue_max: int = IN_QUEUE_MAX  # jobs of one run; the rest is held
    priority_min: int = -1_000  # the tenant's range
    priority_max: int = 1_000
    # Backends that were online lately, and when; since when that is watched at all.
    lately_online: tuple[tuple[BackendState, datetime], ...] = ()
    watched_since: datetime | None = None
    no_backend_seconds: float | None = None  # None: jobs wait for a backend as long as it takes

    def is_unserved(self, need: Need, since: datetime | None) -> bool:
        """Nobody could run it for too long, of the time that a job has waited."""
        if self.no_backend_seconds is None or self.watched_since is None or since is None:
            return False
        if any(each.is_online and each.is_able(need) for each in self.backends):
            return False
        served = (at for each, at in self.lately_online if each.is_able(need))
        last = max(since, self.watched_since, *served)
        return (self.now - last).total_seconds() >= self.no_backend_seconds


class Cause(StrEnum):
    ERROR = "error"
    TIMEOUT = "timeout"
    BACKEND_LOST = "backend_lost"
    NO_TOKENS = "no_tokens"
    REFUSED = "refused"  # the job was not taken: a retry would be refused too


@dataclass(frozen=True, slots=True)
class JobStarted:
    key: Key
    attempt: int
    backend: str
    at: datetime | None = None  # None: just now


@dataclass(frozen=True, slots=True)
class JobWaiting:
    """It is in the queue again: its worker was lost, or gave it back."""

    key: Key
    attempt: int


@dataclass(frozen=True, slots=True)
class JobProgressed:
    key: Key
    attempt: int
    progress: float  # 0 to 1
    current_step: str | None = None


@dataclass(frozen=True, slots=True)
class JobDone:
    """`output` is as `hearing.output_of` makes it: files, sizes, and what was shown as text."""

    key: Key
    attempt: int
    output: Mapping[str, Any]
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class JobFailed:
    key: Key
    attempt: int
    message: str
    cause: Cause = Cause.ERROR
    backend: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class JobCancelled:
    key: Key
    attempt: int


@dataclass(frozen=True, slots=True)
class Answer:
    key: Key
    choice: Choice
    backend: str | None = None


Event: TypeAlias = (
    JobStarted | JobWaiting | JobProgressed | JobDone | JobFailed | JobCancelled | Answer
)


@dataclass(frozen=True, slots=True)
class StartJob:
    key: Key
    job_id: UUID
    attempt: int
    workflow: str
    version: int
    properties: Mapping[str, Any]
    backend_affinity: str | None = None
    priority: int = 0
    timeout_seconds: int | None = None
    price_tokens: int = 0
    effect: EffectTerms | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The properties as a job takes them: files by their ids."""
        return {
            name: value["file_id"] if isinstance(value, Mapping) and "file_id" in value else value
            for name, value in self.properties.items()
        }


@dataclass(frozen=True, slots=True)
class CancelJob:
    key: Key
    job_id: UUID
    attempt: int


@dataclass(frozen=True, slots=True)
class SkipNode:
    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class FailNode:
    """The node failed for good, and the run goes on without it."""

    key: Key
    message: str


@dataclass(frozen=True, slots=True)
class AskUser:
    key: Key
    question: Question


@dataclass(frozen=True, slots=True)
class FinishRun:
    outputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailRun:
    error: RunError


@dataclass(frozen=True, slots=True)
class CancelRun:
    pass


Action: TypeAlias = (
    StartJob | CancelJob | SkipNode | FailNode | AskUser | FinishRun | FailRun | CancelRun
)
