"""Pipelines, runs, candidates and their paths. Frozen and pure."""

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
    """A step that makes candidates: from nothing if it is the first, else from those of the step
    before."""

    name: str
    workflow: str = ""  # empty if it names an effect
    effect: str | None = None
    version: int | None = None  # of the workflow; None: the latest
    properties: Mapping[str, Any] = field(default_factory=dict)  # templates, see `templates`
    children_per_parent: int = 1  # how many this step makes out of each parent
    keep: int | None = None  # only so many of its candidates, the best, get children; None: all
    needs_approval: bool = False  # only approved candidates and winners get children
    images_per_job: int = 1  # each becomes a candidate
    seed: int | None = None  # None: a new one each time
    timeout_seconds: int | None = None  # None: as the settings say
    judge: "StepJudge | None" = None

    @property
    def work_field(self) -> str:
        """The field of the document that names the effect or workflow."""
        return "effect" if self.effect else "workflow"


@dataclass(frozen=True, slots=True)
class StepJudge:
    """Gives each candidate of a step a score, by a job of its own.

    From `approve_above` on a candidate is approved, below `reject_below` it is rejected; about the others a person is
    asked.
    """

    work: Step  # what its jobs run
    picture_property: str  # takes the candidate's picture
    score: Expression  # finds the number in what the job showed
    approve_above: float | None = None
    reject_below: float | None = None
    measure: str = ""

    @property
    def name(self) -> str:
        return self.measure or self.work.effect or self.work.workflow

    def verdict(self, score: float) -> CandidateStatus | None:
        """None: a person is asked."""
        if self.approve_above is not None and score >= self.approve_above:
            return CandidateStatus.APPROVED
        if self.reject_below is not None and score < self.reject_below:
            return CandidateStatus.REJECTED
        return None


class WorkKey(NamedTuple):
    """Names one kind of jobs of a run: those that make the candidates of a step, or those that judge them."""

    step: int
    is_judge: bool = False


@dataclass(frozen=True, slots=True)
class PipelineDefinition:
    name: str
    steps: tuple[Step, ...]

    @property
    def works(self) -> dict[WorkKey, Step]:
        """What the jobs of its steps and of their judges run."""
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
    bytes: int | None = None  # of its candidates' files; then it is paused


@dataclass(frozen=True, slots=True)
class StoredPipelineRun:
    id: UUID
    base_candidates: int
    target_folder: str = "candidates"
    variables: Mapping[str, Any] = field(default_factory=dict)
    status: PipelineRunStatus = PipelineRunStatus.ACTIVE
    limits: RunLimits = RunLimits()
    tokens: int = 0  # reserved and consumed


@dataclass(frozen=True, slots=True)
class PipelineCandidate:
    id: UUID
    step: int  # its number; 0 is the base
    created_at: datetime
    parent: UUID | None = None
    status: CandidateStatus = CandidateStatus.ACTIVE
    score: float = START_SCORE
    child_count: int = 0
    file: Mapping[str, Any] | None = None  # a reference, never the picture itself
    text: str | None = None  # what its job showed, beside the picture or in its place
    seed: int | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    job_id: UUID | None = None
    output_index: int = 0
    judged_by: JudgedBy | None = None  # None while nobody has judged it
    judge_score: float | None = None
    judge_error: str | None = None  # why its step's judge gave it no score
    provider_job_id: str | None = None  # the backend's id of the run that made it


class JobState(StrEnum):
    """The state of a job within its run; the job's own row has its status."""

    IN_FLIGHT = "in_flight"
    DONE = "done"  # its candidates are written
    FAILED = "failed"  # holds its place
    RETRIED = "retried"  # failed, and its place was freed
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PipelineJob:
    id: UUID
    run_id: UUID
    step: int
    parent: UUID | None
    number: int  # of those with this step and parent
    seed: int | None
    state: JobState
    tokens: int
    timeout_seconds: int
    error: str | None
    created_at: datetime
    ended_at: datetime | None
    is_judge: bool = False  # then `parent` is the candidate that it judges


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
    trouble_seconds: int | None = None  # until only a person can help; None: it may pass by itself
    idempotency_key: str | None = None
    look_at: datetime | None = None
    served_at: datetime | None = None
    alerted_at: datetime | None = None
    files_removed_at: datetime | None = None

    @property
    def id(self) -> UUID:
        return self.run.id

    def reason_at(self, now: datetime) -> str | None:
        """Returns why nothing is submitted; None while the run is due, as the reason may be
        outdated."""
        return None if self._is_due(now) else self.reason

    def trouble_seconds_at(self, now: datetime) -> int | None:
        """Returns after how long only a person can help; None while the run is due, as the trouble may
        have passed."""
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
    """A job whose candidates are not written yet, even if it has ended."""

    job_id: UUID
    step: int
    parent: UUID | None = None
    is_queued: bool = False
    is_judge: bool = False  # then `parent` is the candidate that it judges


@dataclass(frozen=True, slots=True)
class FailedJob:
    """A failed job. It keeps its place until a user retries it, as failed jobs are not repeated
    automatically."""

    job_id: UUID
    step: int
    parent: UUID | None = None
    is_judge: bool = False  # then `parent` is the candidate that it should judge


@dataclass(frozen=True)
class RunTree:
    candidates: Mapping[UUID, PipelineCandidate] = field(default_factory=dict)
    failed: tuple[FailedJob, ...] = ()

    @cached_property
    def stopped(self) -> frozenset[UUID]:
        """Rejected candidates and all their descendants."""
        found: dict[UUID, bool] = {}
        for candidate in self.candidates:
            self._mark_branch(candidate, found)
        return frozenset(each for each, is_stopped in found.items() if is_stopped)

    def _mark_branch(self, candidate: UUID, found: dict[UUID, bool]) -> None:
        path: list[UUID] = []
        current: UUID | None = candidate
        while current is not None and current in self.candidates and current not in found:
            path.append(current)
            current = self.candidates[current].parent
        is_stopped = found.get(current, False) if current is not None else False
        for each in reversed(path):
            is_stopped = is_stopped or self.candidates[each].status == CandidateStatus.REJECTED
            found[each] = is_stopped


FOLDER_CHARACTERS_MAX = 200
NAME_BYTES_MAX = 240  # of one folder; file systems take 255
_NOT_IN_A_NAME = re.compile(r"[\W_]+")
_EXTENSION = re.compile(r"[a-z0-9]{1,8}")
_FORBIDDEN = re.compile(r"[\\:*?\"<>|\x00-\x1f\x7f]")
# Devices of Windows, which opens no file or folder of such a name, whatever stands behind a dot.
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(?= *(\.|$))", re.I)


def candidate_path(
    *, target_folder: str, step: str, candidate_id: UUID, created_at: datetime, extension: str
) -> str:
    """Returns the path of a candidate's file; unique within its run because of the id."""
    stamp = created_at.astimezone(UTC).strftime("%Y%m%d%H%M%S")
    ending = extension.lower().lstrip(".")
    if not _EXTENSION.fullmatch(ending):
        ending = "bin"
    return f"{clean_folder(target_folder)}/{step_folder(step)}/{candidate_id}_{stamp}.{ending}"


def step_folder(name: str) -> str:
    """Converts a step's name to a folder: lower case with hyphens; letters of all scripts are kept."""
    folder = _portable(_NOT_IN_A_NAME.sub("-", name.lower()).strip("-"))
    if not folder:
        raise InvalidInput(
            f"a step's name must have a letter or digit in it, not {name!r}", field="name"
        )
    return folder


def clean_folder(folder: str) -> str:
    """Checks and normalises a relative folder; refuses one that leads upwards."""
    asked = [part for part in folder.split("/") if part not in ("", ".")]
    parts = [part for each in asked if (part := _portable(each))]
    if not parts or ".." in asked or _FORBIDDEN.search(folder) or folder.startswith("/"):
        raise InvalidInput(
            f"target_folder must be a relative folder such as 'cats/spring', not {folder!r}",
            field="target_folder",
            hint="To write below a folder of this machine: --follow DIR --folder NAME",
        )
    if max(len(folder), len("/".join(parts))) > FOLDER_CHARACTERS_MAX:
        raise InvalidInput(
            f"target_folder is longer than {FOLDER_CHARACTERS_MAX} characters",
            field="target_folder",
        )
    return "/".join(parts)


def _portable(part: str) -> str:
    """A folder's name that every file system takes: no device of Windows, no dot or space at its end, not too long;
    nor signs that turn what follows them round."""
    shown = "".join(each for each in part if unicodedata.category(each) not in ("Cc", "Cf"))
    shown = shown.encode(errors="ignore")[:NAME_BYTES_MAX].decode(errors="ignore")
    return _DEVICE.sub(r"\1_", shown.rstrip(" ."))
