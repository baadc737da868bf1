"""The model of pipelines, runs, candidates and their paths. Frozen and pure."""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.api.expressions import Expression
from comfyfleet.api.pipelines import CandidateStatus as CandidateStatus
from comfyfleet.api.pipelines import JudgedBy as JudgedBy
from comfyfleet.api.pipelines import PipelineRunStatus as PipelineRunStatus
from comfyfleet.errors import InvalidInput

START_SCORE = 1000.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that generates candidates. The first step starts from nothing, any other from the
    candidates of the previous step."""

    name: str
    workflow: str = ""  # empty if the step uses an effect
    effect: str | None = None
    version: int | None = None  # version of the workflow; None means the latest
    properties: Mapping[str, Any] = field(default_factory=dict)  # may contain templates
    children_per_parent: int = 1  # candidates that this step makes from each parent
    keep: int | None = None  # only this many of the best candidates get children; None means all
    needs_approval: bool = False  # only approved candidates and winners get children
    images_per_job: int = 1  # each becomes a candidate
    seed: int | None = None  # None means a new random seed for each job
    timeout_seconds: int | None = None  # None means the default from the settings
    judge: "StepJudge | None" = None

    @property
    def work_field(self) -> str:
        """The field of the document that names the effect or workflow."""
        return "effect" if self.effect else "workflow"


@dataclass(frozen=True, slots=True)
class StepJudge:
    """A judge that scores each candidate of a step with a separate job.

    A candidate is approved if its score is at least `approve_above`, and rejected if its score is
    below `reject_below`. A person decides about the others."""

    work: Step  # the workflow or effect of its jobs
    picture_property: str  # the property that receives the candidate's image
    score: Expression  # extracts the score from the job's output
    approve_above: float | None = None
    reject_below: float | None = None
    measure: str = ""

    @property
    def name(self) -> str:
        return self.measure or self.work.effect or self.work.workflow

    def verdict(self, score: float) -> CandidateStatus | None:
        """Returns the verdict for a score. None means a person must decide."""
        if self.approve_above is not None and score >= self.approve_above:
            return CandidateStatus.APPROVED
        if self.reject_below is not None and score < self.reject_below:
            return CandidateStatus.REJECTED
        return None


class WorkKey(NamedTuple):
    """Identifies a kind of job in a run: jobs that generate a step's candidates, or jobs that judge
    them."""

    step: int
    is_judge: bool = False


@dataclass(frozen=True, slots=True)
class PipelineDefinition:
    name: str
    steps: tuple[Step, ...]

    @property
    def works(self) -> dict[WorkKey, Step]:
        """The steps and the judges' work, by kind of job."""
        own = {WorkKey(number): step for number, step in enumerate(self.steps)}
        judges = {
            WorkKey(number, is_judge=True): step.judge.work
            for number, step in enumerate(self.steps)
            if step.judge
        }
        return own | judges


@dataclass(frozen=True, slots=True)
class RunLimits:
    candidates: int | None = None
    tokens: int | None = None
    concurrent_jobs: int = 1
    until: datetime | None = None
    # limit for the candidates' files; the run is paused when it is reached
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StoredPipelineRun:
    id: UUID
    base_candidates: int
    target_folder: str = "candidates"
    variables: Mapping[str, Any] = field(default_factory=dict)
    status: PipelineRunStatus = PipelineRunStatus.ACTIVE
    limits: RunLimits = RunLimits()
    tokens: int = 0  # reserved and consumed tokens


@dataclass(frozen=True, slots=True)
class PipelineCandidate:
    id: UUID
    step: int  # number of its step; 0 is the base
    created_at: datetime
    parent: UUID | None = None
    status: CandidateStatus = CandidateStatus.ACTIVE
    score: float = START_SCORE
    child_count: int = 0
    file: Mapping[str, Any] | None = None  # a reference, never the file itself
    # the text output of its job, with or without an image
    text: str | None = None
    seed: int | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    job_id: UUID | None = None
    output_index: int = 0
    judged_by: JudgedBy | None = None  # None means it is not judged yet
    judge_score: float | None = None
    judge_error: str | None = None  # why its step's judge could not score it
    provider_job_id: str | None = None  # the backend's id of the run that produced it


class JobState(StrEnum):
    """The state of a job within its run. The job's own row has its status."""

    IN_FLIGHT = "in_flight"
    DONE = "done"  # its candidates have been written
    FAILED = "failed"  # it keeps its place in the tree
    RETRIED = "retried"  # failed, and its place was released
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PipelineJob:
    id: UUID
    run_id: UUID
    step: int
    parent: UUID | None
    number: int  # position among the jobs with the same step and parent
    seed: int | None
    state: JobState
    tokens: int
    timeout_seconds: int
    error: str | None
    created_at: datetime
    ended_at: datetime | None
    is_judge: bool = False  # if true, `parent` is the candidate to judge


@dataclass(frozen=True, slots=True)
class StoredPipeline:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    pipeline: PipelineDefinition
    document: Mapping[str, Any]
    created_at: datetime
    deleted_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run with its owner, and the result of the last sweep."""

    run: StoredPipelineRun
    tenant_id: UUID
    user_id: UUID
    pipeline_id: UUID
    request_hash: str
    created_at: datetime
    changed_at: datetime
    pause_reason: str | None = None
    reason: str | None = None
    trouble: str | None = None
    # seconds until a person must help; None means the problem may resolve itself
    trouble_seconds: int | None = None
    idempotency_key: str | None = None
    look_at: datetime | None = None
    served_at: datetime | None = None
    alerted_at: datetime | None = None
    files_removed_at: datetime | None = None

    @property
    def id(self) -> UUID:
        return self.run.id

    def reason_at(self, now: datetime) -> str | None:
        """Returns why no job is submitted. Returns None while the run is due, because the reason
        may be outdated."""
        return None if self._is_due(now) else self.reason

    def trouble_seconds_at(self, now: datetime) -> int | None:
        """Returns the seconds until a person must help. Returns None while the run is due, because
        the problem may be over."""
        return None if self._is_due(now) else self.trouble_seconds

    def _is_due(self, now: datetime) -> bool:
        return self.look_at is not None and self.look_at <= now


@dataclass(frozen=True, slots=True)
class PipelineRunEvent:
    id: int
    tenant_id: UUID
    run_id: UUID
    kind: str
    actor: str
    data: Mapping[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class JobInFlight:
    """A job whose candidates are not written yet. The job itself may have ended."""

    job_id: UUID
    step: int
    parent: UUID | None = None
    is_queued: bool = False
    is_judge: bool = False  # if true, `parent` is the candidate to judge


@dataclass(frozen=True, slots=True)
class FailedJob:
    """A failed job. It keeps its place until a user retries it, because failed jobs are not retried
    automatically."""

    job_id: UUID
    step: int
    parent: UUID | None = None
    is_judge: bool = False  # if true, `parent` is the candidate to judge


@dataclass(frozen=True)
class RunTree:
    candidates: Mapping[UUID, PipelineCandidate] = field(default_factory=dict)
    failed: tuple[FailedJob, ...] = ()

    @cached_property
    def stopped(self) -> frozenset[UUID]:
        """The rejected candidates and all their descendants."""
        stopped: dict[UUID, bool] = {}
        for candidate in self.candidates:
            self._mark_branch(candidate, stopped)
        return frozenset(candidate_id for candidate_id, is_stopped in stopped.items() if is_stopped)

    def _mark_branch(self, candidate: UUID, stopped: dict[UUID, bool]) -> None:
        path: list[UUID] = []
        current: UUID | None = candidate
        while current is not None and current in self.candidates and current not in stopped:
            path.append(current)
            current = self.candidates[current].parent
        is_stopped = stopped.get(current, False) if current is not None else False
        for candidate_id in reversed(path):
            is_stopped = (
                is_stopped or self.candidates[candidate_id].status == CandidateStatus.REJECTED
            )
            stopped[candidate_id] = is_stopped


FOLDER_CHARACTERS_MAX = 200
NAME_BYTES_MAX = 240  # limit for one folder name; most file systems allow 255
_NOT_IN_A_NAME = re.compile(r"[\W_]+")
_EXTENSION = re.compile(r"[a-z0-9]{1,8}")
_FORBIDDEN = re.compile(r"[\\:*?\"<>|\x00-\x1f\x7f]")
# Device names on Windows, which can't open a file or folder with such a name, even with an
# extension.
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(?= *(\.|$))", re.I)


def candidate_path(
    *, target_folder: str, step: str, candidate_id: UUID, created_at: datetime, extension: str
) -> str:
    """Returns the path of a candidate's file. It is unique within the run, because it contains the
    candidate's id."""
    stamp = created_at.astimezone(UTC).strftime("%Y%m%d%H%M%S")
    ending = extension.lower().lstrip(".")
    if not _EXTENSION.fullmatch(ending):
        ending = "bin"
    return f"{clean_folder(target_folder)}/{step_folder(step)}/{candidate_id}_{stamp}.{ending}"


def step_folder(name: str) -> str:
    """Converts a step's name to a folder name: lower case, with hyphens. Letters of all scripts are
    kept."""
    folder = _portable(_NOT_IN_A_NAME.sub("-", name.lower()).strip("-"))
    if not folder:
        raise InvalidInput(
            f"a step's name must contain a letter or digit, not {name!r}", field="name"
        )
    return folder


def clean_folder(folder: str) -> str:
    """Checks and normalizes a relative folder. Rejects a folder that leads upward."""
    segments = [part for part in folder.split("/") if part not in ("", ".")]
    parts = [part for segment in segments if (part := _portable(segment))]
    if not parts or ".." in segments or _FORBIDDEN.search(folder) or folder.startswith("/"):
        raise InvalidInput(
            f"target_folder must be a relative folder such as 'cats/spring', not {folder!r}",
            field="target_folder",
            hint="To save files under a local folder, use --follow DIR --folder NAME.",
        )
    if max(len(folder), len("/".join(parts))) > FOLDER_CHARACTERS_MAX:
        raise InvalidInput(
            f"target_folder is longer than {FOLDER_CHARACTERS_MAX} characters",
            field="target_folder",
        )
    return "/".join(parts)


def _portable(part: str) -> str:
    """Makes a folder name portable. The result isn't a Windows device name, doesn't end in a dot or
    space, and isn't too long. Also removes control and formatting characters, such as those that
    reverse the following text."""
    shown = "".join(
        character for character in part if unicodedata.category(character) not in ("Cc", "Cf")
    )
    shown = shown.encode(errors="ignore")[:NAME_BYTES_MAX].decode(errors="ignore")
    return _DEVICE.sub(r"\1_", shown.rstrip(" ."))
