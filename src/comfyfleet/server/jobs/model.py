"""Jobs, attempts and batches as frozen data, and a job as a row of its table. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID, uuid5

from comfyfleet.api.jobs import ADMITTED_AT_ONCE_MAX as ADMITTED_AT_ONCE_MAX
from comfyfleet.api.jobs import JobStatus as JobStatus
from comfyfleet.api.values import ShownValue
from comfyfleet.server.catalog.model import AssetRef, models_of, prompt_needs
from comfyfleet.server.fleets.model import WorkflowRequirements
from comfyfleet.server.queue.model import DispatchStatus, NewDispatch, QueueLane

SECONDS_MAX = 10_000_000.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything that is fixed when a job is submitted."""

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
    # Of a prompt that came through the gateway: its number, client, extra data and outputs.
    gateway: Mapping[str, Any] | None = None
    fingerprint: str | None = None  # of a job whose result may be taken again, or that takes one
    reused_from: UUID | None = None  # the job whose result it has taken

    @property
    def lane(self) -> QueueLane:
        return QueueLane(self.workflow_id, self.stage, self.provider)

    @property
    def needs(self) -> WorkflowRequirements:
        """What its prompt needs of a backend. The node types of a workflow are known by its version."""
        if self.gateway is not None:
            return prompt_needs(self.prompt)
        return WorkflowRequirements(models=models_of(self.prompt))

    @property
    def input_file_id(self) -> UUID | None:
        return next((each.file_id for each in self.assets if each.is_primary_input), None)


class JobOutput(NamedTuple):
    """A file that a completed job has made."""

    name: str
    file_id: UUID
    node_id: str | None = None
    kind: str | None = None
    width: int | None = None
    height: int | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "JobOutput":
        return cls(**{**row, "file_id": UUID(row["file_id"])})

    def as_row(self) -> dict[str, Any]:
        return {**self._asdict(), "file_id": str(self.file_id)}


class JobResult(NamedTuple):
    """What a completed job has made; its row has it as `result_metadata`."""

    outputs: tuple[JobOutput, ...] = ()
    execution_seconds: float | None = None
    values: tuple[ShownValue, ...] = ()  # what its nodes showed; the output node's first

    @classmethod
    def from_row(cls, row: Mapping[str, Any] | None) -> "JobResult":
        kept = row or {}
        return cls(
            tuple(map(JobOutput.from_row, kept.get("outputs", ()))),
            kept.get("execution_seconds"),
            tuple(map(ShownValue.model_validate, kept.get("values", ()))),
        )

    @property
    def event_data(self) -> dict[str, Any]:
        """The data of the outputs event."""
        return {"outputs": [each.as_row() for each in self.outputs]}

    def as_row(self) -> dict[str, Any]:
        return {
            **self.event_data,
            "execution_seconds": self.execution_seconds,
            "values": [each.model_dump() for each in self.values],
        }


@dataclass(frozen=True, slots=True)
class Job:
    """One row of a tenant's jobs."""

    id: UUID
    tenant_id: UUID
    asked: JobSpec
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
        """The status for people: a prefetched job, which its worker has not begun, is queued."""
        is_prefetched = self.status == JobStatus.PROCESSING and self.started_at is None
        return JobStatus.QUEUED if is_prefetched else self.status

    @property
    def reserved_tokens(self) -> int:
        return self.asked.price_tokens

    @property
    def result(self) -> JobResult:
        return JobResult.from_row(self.result_metadata)

    @property
    def outputs(self) -> tuple[JobOutput, ...]:
        return self.result.outputs

    @property
    def values(self) -> tuple[ShownValue, ...]:
        return self.result.values

    @property
    def wants_dispatch(self) -> bool:
        return self.status.is_active and not self.asked.is_held


class Shortage(NamedTuple):
    """Why nobody can run a job: `message` with all names, for operators; `told` for customers."""

    message: str
    told: str


Place: TypeAlias = tuple[datetime, UUID]  # in lists: when it was submitted, and its id


@dataclass(frozen=True, slots=True)
class JobFilter:
    """What an operator's list is filtered by; what is empty does not filter."""

    statuses: tuple[JobStatus, ...] = ()
    tenant_id: UUID | None = None
    workflow_slug: str | None = None
    effect_id: UUID | None = None
    worker_id: str | None = None  # the last that had it
    error: str | None = None  # a part of what the customer or the operator is told
    since: datetime | None = None
    until: datetime | None = None

    def matches(self, job: "ListedJob") -> bool:
        """Whether a job that was found by its worker fits the rest; all but the text of its error."""
        return (
            (not self.statuses or job.status in self.statuses)
            and self.workflow_slug in (None, job.workflow_slug)
            and self.effect_id in (None, job.effect_id)
            and (self.since is None or job.submitted_at >= self.since)
            and (self.until is None or job.submitted_at < self.until)
        )


class ListedJob(NamedTuple):
    """A job in an operator's list: without its prompt and files, which may be large."""

    id: UUID
    tenant_id: UUID
    user_id: UUID | None
    effect_id: UUID | None
    workflow_slug: str
    status: JobStatus
    priority: int
    attempt: int
    lease_token: UUID | None
    error_message: str | None
    reserved_tokens: int
    retry_of: UUID | None
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None

    @property
    def place(self) -> Place:
        return self.submitted_at, self.id


class JobsFound(NamedTuple):
    """Listed jobs, the newest first, of which none is missing down to `complete_to`; None: to the end."""

    jobs: Sequence[ListedJob]
    complete_to: Place | None = None


def merge_found(parts: Iterable[JobsFound], limit: int) -> JobsFound:
    """Merges lists of which each may end at another place: the page ends where the first of them does."""
    known = list(parts)
    cut = max((each.complete_to for each in known if each.complete_to), default=None)
    some = [job for each in known for job in each.jobs if cut is None or job.place >= cut]
    page = sorted(some, key=lambda job: job.place, reverse=True)[:limit]
    return JobsFound(page, page[-1].place if len(page) == limit else cut)


class HeldJob(NamedTuple):
    """A job that waits in the tenant's database until it is admitted to the queue."""

    id: UUID
    batch_id: UUID | None


@dataclass(frozen=True, slots=True)
class JobAttempt:
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
    """An error: `message` for the customer, `raw` for operators."""

    message: str
    raw: str | None = None


_DISPATCH_STATUS = {
    JobStatus.COMPLETED: DispatchStatus.COMPLETED,
    JobStatus.FAILED: DispatchStatus.FAILED,
    JobStatus.CANCELLED: DispatchStatus.CANCELLED,
}


def dispatch_status_of(job: Job) -> DispatchStatus:
    """Returns the status in which the dispatch of an ended job must end."""
    return _DISPATCH_STATUS[job.status]


class EndedPrompt(NamedTuple):
    """A prompt that came through the gateway and has ended."""

    job_id: UUID
    model_key: str | None
    ended_at: datetime
    client_id: str | None  # None, too, for a prompt that never ran


# Of a prompt that came through the gateway: it runs with its caller's key, which is in memory only.
NEEDS_KEY = "needs_key"
# Of a prompt that came through the gateway: the worker of its client's previous prompt.
PREFERRED_WORKER = "preferred_worker"


def needs_key(asked: JobSpec) -> bool:
    return bool((asked.gateway or {}).get(NEEDS_KEY))


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
        preferred_worker_id=(job.asked.gateway or {}).get(PREFERRED_WORKER),
    )


def output_folder_of(lease_token: UUID, job_id: UUID) -> UUID:
    """Names a lease in the keys of outputs: as unique as its token, without telling the token."""
    return uuid5(job_id, str(lease_token))


PREVIEW_METHOD = "preview_method"


def asks_for_previews(asked: JobSpec) -> bool:
    """Whether a client of the gateway wants previews; `default` is whatever the backend was started with."""
    extra_data = (asked.gateway or {}).get("extra_data") or {}
    return extra_data.get(PREVIEW_METHOD) not in (None, "none")


def sees_in_order(gateway: Mapping[str, Any]) -> bool:
    """Checks whether the prompt's client sees one of its prompts at a time, whatever runs in parallel."""
    return bool(gateway.get(IN_ORDER)) and gateway.get("client_id") is not None


PRICE_PER_SECOND, MAX_TOKENS = "price_per_second", "max_tokens"
# The least that a metered prompt costs if it succeeds: the price of a workflow that it contains.
MIN_TOKENS = "min_tokens"
# Set if the fleet's terms were such that clients see one of their prompts at a time.
IN_ORDER = "in_order"
# Set while the client of a prompt waits until its backend has accepted or refused it.
AWAITS_BACKEND = "awaits_backend"
# The worker's code for a prompt that its backend has refused, and the field with the backend's response.
PROMPT_REFUSED, REFUSAL = "prompt_refused", "refusal"


def tells_results_live(asked: JobSpec) -> bool:
    """Whether what a run of the gateway makes is shown before it has ended.

    Only where it costs nothing: a run that fails or is cancelled doesn't pay its full price, and
    gives nothing away.
    """
    data = asked.gateway
    return data is not None and not asked.price_tokens and PRICE_PER_SECOND not in data


def cost_of(seconds: float, price_per_second: float) -> int:
    """In whole tokens; a second that has begun is paid for in part."""
    return math.ceil(max(0.0, min(seconds, SECONDS_MAX)) * price_per_second)


def is_metered(asked: JobSpec) -> bool:
    """Checks whether the prompt is priced by the second."""
    return PRICE_PER_SECOND in (asked.gateway or {})


def charged_tokens(job: Job, seconds: float) -> int:
    """Returns what an ended metered job costs: the seconds of its run, at most what was reserved.

    A run is stopped when it has used its reservation, so the maximum only matters for rounding.
    A job that did not succeed pays its seconds, but not the price of a workflow that it contains.
    """
    data = job.asked.gateway or {}
    cost = cost_of(seconds, data[PRICE_PER_SECOND])
    if job.status == JobStatus.COMPLETED:
        cost = max(cost, data.get(MIN_TOKENS, 0))
    return min(cost, job.reserved_tokens)


def paid_seconds(asked: JobSpec) -> float | None:
    """Returns how long a metered run may take: as long as its reservation pays for. None means that
    it has no price by the second."""
    price = (asked.gateway or {}).get(PRICE_PER_SECOND)
    return None if price is None else float(asked.price_tokens / price)


# The columns of a job's row are named as the fields: but for these, which are converted.
SPEC_COLUMNS = tuple(
    each.name for each in fields(JobSpec) if each.name not in ("assets", "price_tokens")
)
STATE_COLUMNS = tuple(each.name for each in fields(Job) if each.name not in ("asked", "status"))


def _asset_row(asset: AssetRef) -> dict[str, Any]:
    return {**asdict(asset), "file_id": str(asset.file_id)}


def _asset_from_row(row: Mapping[str, Any]) -> AssetRef:
    return AssetRef(**{**row, "file_id": UUID(row["file_id"])})


def job_from_row(row: Mapping[Any, Any]) -> Job:
    asked = JobSpec(
        assets=tuple(map(_asset_from_row, row["assets"])),
        price_tokens=row["reserved_tokens"],
        **{name: row[name] for name in SPEC_COLUMNS},
    )
    return Job(
        asked=asked, status=JobStatus(row["status"]), **{name: row[name] for name in STATE_COLUMNS}
    )


def added_job(tenant_id: UUID, job_id: UUID, asked: JobSpec, now: datetime) -> Job:
    """Returns the job as its row is right after the insert."""
    kept: dict[str, Any] = dict.fromkeys(STATE_COLUMNS)
    kept |= {"id": job_id, "tenant_id": tenant_id, "submitted_at": now}
    kept |= {"attempt": 0, "lease_number": 0}
    return Job(asked=asked, status=JobStatus.QUEUED, **kept)


def new_job_row(tenant_id: UUID, job_id: UUID, asked: JobSpec, now: datetime) -> dict[str, Any]:
    return {
        **{name: getattr(asked, name) for name in SPEC_COLUMNS},
        "prompt": dict(asked.prompt),
        "properties": dict(asked.properties),
        "assets": [_asset_row(each) for each in asked.assets],
        "input_file_id": asked.input_file_id,
        "reserved_tokens": asked.price_tokens,
        "id": job_id,
        "tenant_id": tenant_id,
        "status": JobStatus.QUEUED,
        "submitted_at": now,
    }


JOBS_PER_BATCH_MAX = 1000


@dataclass(frozen=True, slots=True)
class JobBatch:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    effect_id: UUID
    total: int
    idempotency_key: str | None
    request_hash: str
    created_at: datetime
    cancelled_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The jobs of a batch as counts and tokens."""

    total: int
    held: int  # not yet admitted to the queue
    counts: Mapping[str, int]  # by status, of those that were admitted
    reserved_tokens: int  # not settled yet
    consumed_tokens: int
    refunded_tokens: int

    @property
    def ended(self) -> int:
        return sum(self.counts.get(each, 0) for each in ("completed", "failed", "cancelled"))

    @property
    def progress(self) -> float:
        return self.ended / self.total

    @property
    def is_ended(self) -> bool:
        return self.ended == self.total


ACTIVE_STATUSES = frozenset({"queued", "processing"})


class BatchJob(NamedTuple):
    status: str
    is_held: bool
    reserved_tokens: int


def summarize_batch(jobs: Iterable[BatchJob]) -> BatchSummary:
    found = list(jobs)
    held = sum(each.is_held and each.status in ACTIVE_STATUSES for each in found)
    counts = Counter(
        each.status for each in found if not (each.is_held and each.status in ACTIVE_STATUSES)
    )
    tokens: Counter[str] = Counter()
    for each in found:
        tokens[_token_state(each.status)] += each.reserved_tokens
    return BatchSummary(
        total=len(found),
        held=held,
        counts=dict(counts),
        reserved_tokens=tokens["reserved"],
        consumed_tokens=tokens["consumed"],
        refunded_tokens=tokens["refunded"],
    )


def _token_state(status: str) -> str:
    if status in ACTIVE_STATUSES:
        return "reserved"
    return "consumed" if status == "completed" else "refunded"
