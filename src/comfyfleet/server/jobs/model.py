"""Defines jobs, attempts and batches as immutable data, and converts them from and to table rows.
Pure.
"""

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
    """The properties of a job that are fixed when it is submitted."""

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
    price_tokens: int = 0  # reserved when the job is submitted; never changes
    video_id: UUID | None = None  # the media item that the job processes
    batch_id: UUID | None = None
    batch_position: int | None = None
    # The kind of run that is notified when the job ends, "graph" or "pipeline".
    run_kind: str | None = None
    run_id: UUID | None = None
    # A held job waits in the tenant's database until it is admitted to the queue.
    is_held: bool = False
    # The number, client, extra data and outputs of a gateway prompt. None for other jobs.
    gateway: Mapping[str, Any] | None = None
    fingerprint: str | None = None  # set if the job may reuse a result or its result may be reused
    reused_from: UUID | None = None  # the job whose result was reused

    @property
    def lane(self) -> QueueLane:
        return QueueLane(self.workflow_id, self.stage, self.provider)

    @property
    def needs(self) -> WorkflowRequirements:
        """The requirements of the job's prompt. Node types are only included for gateway prompts,
        because those of other jobs are stored with the workflow version.
        """
        if self.gateway is not None:
            return prompt_needs(self.prompt)
        return WorkflowRequirements(models=models_of(self.prompt))

    @property
    def input_file_id(self) -> UUID | None:
        return next((asset.file_id for asset in self.assets if asset.is_primary_input), None)


class JobOutput(NamedTuple):
    """An output file of a completed job."""

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
    """The result of a completed job, stored in its row as `result_metadata`."""

    outputs: tuple[JobOutput, ...] = ()
    execution_seconds: float | None = None
    # Values that the job's nodes displayed. Values of the output node come first.
    values: tuple[ShownValue, ...] = ()

    @classmethod
    def from_row(cls, row: Mapping[str, Any] | None) -> "JobResult":
        values = row or {}
        return cls(
            tuple(map(JobOutput.from_row, values.get("outputs", ()))),
            values.get("execution_seconds"),
            tuple(map(ShownValue.model_validate, values.get("values", ()))),
        )

    @property
    def event_data(self) -> dict[str, Any]:
        """The data of the outputs event."""
        return {"outputs": [output.as_row() for output in self.outputs]}

    def as_row(self) -> dict[str, Any]:
        return {
            **self.event_data,
            "execution_seconds": self.execution_seconds,
            "values": [value.model_dump() for value in self.values],
        }


@dataclass(frozen=True, slots=True)
class Job:
    """A row of a tenant's jobs."""

    id: UUID
    tenant_id: UUID
    spec: JobSpec
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
        """The status that users see. A prefetched job is shown as queued until its worker starts
        it.
        """
        is_prefetched = self.status == JobStatus.PROCESSING and self.started_at is None
        return JobStatus.QUEUED if is_prefetched else self.status

    @property
    def reserved_tokens(self) -> int:
        return self.spec.price_tokens

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
        return self.status.is_active and not self.spec.is_held


class Shortage(NamedTuple):
    """The reason why no worker can run a job. `message` is for operators and may contain names of
    workers and fleets. `customer_message` is the text for customers.
    """

    message: str
    customer_message: str


# A position in a list of jobs: the submission time and the id of a job.
Place: TypeAlias = tuple[datetime, UUID]


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The filter of an operator's job list. Empty fields match every job."""

    statuses: tuple[JobStatus, ...] = ()
    tenant_id: UUID | None = None
    workflow_slug: str | None = None
    effect_id: UUID | None = None
    worker_id: str | None = None  # the last worker that held the job
    error: str | None = None  # a substring of the customer's or the operator's error message
    since: datetime | None = None
    until: datetime | None = None

    def matches(self, job: "ListedJob") -> bool:
        """Whether a job that was selected by its worker matches the other fields. The error text is
        checked by the database instead.
        """
        return (
            (not self.statuses or job.status in self.statuses)
            and self.workflow_slug in (None, job.workflow_slug)
            and self.effect_id in (None, job.effect_id)
            and (self.since is None or job.submitted_at >= self.since)
            and (self.until is None or job.submitted_at < self.until)
        )


class ListedJob(NamedTuple):
    """A job in an operator's list, without its prompt and files, which may be large."""

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
    """A list of jobs, the newest first. If `complete_to` is set, jobs that are older than that
    position may be missing.
    """

    jobs: Sequence[ListedJob]
    complete_to: Place | None = None


def merge_found(parts: Iterable[JobsFound], limit: int) -> JobsFound:
    """Merges lists that may end at different positions into a page. The page ends at the newest of
    these positions, because older jobs may be missing.
    """
    lists = list(parts)
    cut = max((part.complete_to for part in lists if part.complete_to), default=None)
    jobs = [job for part in lists for job in part.jobs if cut is None or job.place >= cut]
    page = sorted(jobs, key=lambda job: job.place, reverse=True)[:limit]
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
    # Input values that differ from the job's prompt, by node and input name. None means that they
    # were deleted together with the prompt.
    filled_in: Mapping[str, Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of a failed job. `message` is shown to the customer, and `raw` only to
    operators.
    """

    message: str
    raw: str | None = None


_DISPATCH_STATUS = {
    JobStatus.COMPLETED: DispatchStatus.COMPLETED,
    JobStatus.FAILED: DispatchStatus.FAILED,
    JobStatus.CANCELLED: DispatchStatus.CANCELLED,
}


def dispatch_status_of(job: Job) -> DispatchStatus:
    """Returns the final status for the dispatch of an ended job."""
    return _DISPATCH_STATUS[job.status]


class EndedPrompt(NamedTuple):
    """An ended prompt that was submitted through the gateway."""

    job_id: UUID
    model_key: str | None
    ended_at: datetime
    client_id: str | None  # None if the client sent no id or the prompt never ran


# Key in a gateway prompt's data. Set if the run needs its caller's key for paid services, which is
# only kept in memory.
NEEDS_KEY = "needs_key"
# Key in a gateway prompt's data. Its value is the worker for which the prompt is briefly reserved,
# because it ran an earlier prompt of the user or accepted the user's last upload.
PREFERRED_WORKER = "preferred_worker"


def needs_key(spec: JobSpec) -> bool:
    return bool((spec.gateway or {}).get(NEEDS_KEY))


def dispatch_for(job: Job, max_attempts: int) -> NewDispatch:
    return NewDispatch(
        tenant_id=job.tenant_id,
        job_id=job.id,
        lane=job.spec.lane,
        priority=job.spec.priority,
        max_attempts=max_attempts,
        model_key=job.spec.model_key,
        model_set=job.spec.model_set,
        backend_affinity=job.spec.backend_affinity,
        preferred_worker_id=(job.spec.gateway or {}).get(PREFERRED_WORKER),
    )


def output_folder_of(lease_token: UUID, job_id: UUID) -> UUID:
    """Returns an id of the lease for use in the keys of outputs. The id is as unique as the lease
    token but doesn't reveal it.
    """
    return uuid5(job_id, str(lease_token))


PREVIEW_METHOD = "preview_method"


def asks_for_previews(spec: JobSpec) -> bool:
    """Whether the gateway client has requested previews. The value `default` counts as a request:
    it selects the method with which the backend was started.
    """
    extra_data = (spec.gateway or {}).get("extra_data") or {}
    return extra_data.get(PREVIEW_METHOD) not in (None, "none")


def sees_in_order(gateway: Mapping[str, Any]) -> bool:
    """Whether the prompt's client sees its prompts run one after another, even if several run in
    parallel.
    """
    return bool(gateway.get(IN_ORDER)) and gateway.get("client_id") is not None


PRICE_PER_SECOND, MAX_TOKENS = "price_per_second", "max_tokens"
# Key for the minimum price of a metered prompt that succeeds. It is the price of the registered
# workflow that the prompt contains.
MIN_TOKENS = "min_tokens"
# Key that is set if, at submission, the fleet's settings required that clients see their prompts
# run one after another.
IN_ORDER = "in_order"
# Key that is set while the client waits for the backend to accept or refuse the prompt.
AWAITS_BACKEND = "awaits_backend"
# The worker's error code for a prompt that its backend refused, and the field that contains the
# backend's response.
PROMPT_REFUSED, REFUSAL = "prompt_refused", "refusal"


def tells_results_live(spec: JobSpec) -> bool:
    """Whether the results of a gateway run are shown while it is in progress.

    This is only the case for free prompts. A priced run that fails or is cancelled isn't charged
    its full price, so its results must not be revealed.
    """
    data = spec.gateway
    return data is not None and not spec.price_tokens and PRICE_PER_SECOND not in data


def cost_of(seconds: float, price_per_second: float) -> int:
    """Returns the cost in whole tokens, rounded up. Fractions of a second are charged
    proportionally.
    """
    return math.ceil(max(0.0, min(seconds, SECONDS_MAX)) * price_per_second)


def is_metered(spec: JobSpec) -> bool:
    """Whether the job is a prompt that is charged by the second."""
    return PRICE_PER_SECOND in (spec.gateway or {})


def charged_tokens(job: Job, seconds: float) -> int:
    """Returns the price of an ended metered job. This is the price of the seconds that it ran,
    limited to its reservation.

    A run is stopped when it has used up its reservation, so the limit only matters for rounding. A
    job that didn't succeed is charged for its seconds, but not the minimum price.
    """
    data = job.spec.gateway or {}
    cost = cost_of(seconds, data[PRICE_PER_SECOND])
    if job.status == JobStatus.COMPLETED:
        cost = max(cost, data.get(MIN_TOKENS, 0))
    return min(cost, job.reserved_tokens)


def paid_seconds(spec: JobSpec) -> float | None:
    """Returns the number of seconds that a metered job's reservation pays for, which is the maximum
    duration of its run. Returns None for other jobs.
    """
    price = (spec.gateway or {}).get(PRICE_PER_SECOND)
    return None if price is None else float(spec.price_tokens / price)


# Fields whose values are stored unchanged in the column with the same name. The excluded fields
# are converted.
SPEC_COLUMNS = tuple(
    column.name for column in fields(JobSpec) if column.name not in ("assets", "price_tokens")
)
STATE_COLUMNS = tuple(
    column.name for column in fields(Job) if column.name not in ("spec", "status")
)


def _asset_row(asset: AssetRef) -> dict[str, Any]:
    return {**asdict(asset), "file_id": str(asset.file_id)}


def _asset_from_row(row: Mapping[str, Any]) -> AssetRef:
    return AssetRef(**{**row, "file_id": UUID(row["file_id"])})


def job_from_row(row: Mapping[Any, Any]) -> Job:
    spec = JobSpec(
        assets=tuple(map(_asset_from_row, row["assets"])),
        price_tokens=row["reserved_tokens"],
        **{name: row[name] for name in SPEC_COLUMNS},
    )
    return Job(
        spec=spec, status=JobStatus(row["status"]), **{name: row[name] for name in STATE_COLUMNS}
    )


def added_job(tenant_id: UUID, job_id: UUID, spec: JobSpec, now: datetime) -> Job:
    """Returns a new job with the values that its row has right after the insert."""
    values: dict[str, Any] = dict.fromkeys(STATE_COLUMNS)
    values |= {"id": job_id, "tenant_id": tenant_id, "submitted_at": now}
    values |= {"attempt": 0, "lease_number": 0}
    return Job(spec=spec, status=JobStatus.QUEUED, **values)


def new_job_row(tenant_id: UUID, job_id: UUID, spec: JobSpec, now: datetime) -> dict[str, Any]:
    return {
        **{name: getattr(spec, name) for name in SPEC_COLUMNS},
        "prompt": dict(spec.prompt),
        "properties": dict(spec.properties),
        "assets": [_asset_row(asset) for asset in spec.assets],
        "input_file_id": spec.input_file_id,
        "reserved_tokens": spec.price_tokens,
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
    """The numbers of jobs and tokens of a batch by state."""

    total: int
    held: int  # jobs that are not yet admitted to the queue
    counts: Mapping[str, int]  # admitted jobs by status
    reserved_tokens: int  # tokens of jobs that haven't ended yet
    consumed_tokens: int
    refunded_tokens: int

    @property
    def ended(self) -> int:
        return sum(self.counts.get(status, 0) for status in ("completed", "failed", "cancelled"))

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
    all_jobs = list(jobs)
    held = sum(job.is_held and job.status in ACTIVE_STATUSES for job in all_jobs)
    counts = Counter(
        job.status for job in all_jobs if not (job.is_held and job.status in ACTIVE_STATUSES)
    )
    tokens: Counter[str] = Counter()
    for job in all_jobs:
        tokens[_token_state(job.status)] += job.reserved_tokens
    return BatchSummary(
        total=len(all_jobs),
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
