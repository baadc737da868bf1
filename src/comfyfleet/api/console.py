"""The admin API's part for operators' pages: lists with their counts, acts on many jobs, whole jobs, the
overview, workflow files as they are drawn."""

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal
from uuid import UUID

from pydantic import Field

from comfyfleet.api.admin import AdminJobFacts, EntryAnswer, PropertyType
from comfyfleet.api.jobs import JobStatus
from comfyfleet.api.values import Message


class BulkAct(StrEnum):
    CANCEL = "cancel"
    RETRY = "retry"
    REPRIORITISE = "reprioritise"


class JobCountsAnswer(Message):
    counts: dict[JobStatus, int] = Field(description="By status.")
    counted_max: int = Field(description="A count that is as high stands for that many or more.")
    pools_left_out: list[str] = Field(description="Pools that are down: their jobs don't count.")


class JobPreview(Message):
    preview: str | None = Field(
        description="A picture as a data: URL; null: none came, or it does not run."
    )


class BulkFailureAnswer(Message):
    job_id: UUID
    code: str
    message: str


class BulkAnswer(Message):
    matched: int = Field(description="How many jobs were selected, in this call.")
    done: int = Field(description="How many of them were changed.")
    failed: list[BulkFailureAnswer] = Field(description="The others, and why not.")
    retries: dict[UUID, UUID] = Field(description="Of a retry: the new job of each.")
    next: str | None = Field(description="More match the filter: repeat with after=next.")
    pools_left_out: list[str] = Field(
        description="Pools that are down: their jobs are not changed."
    )


class FileSeen(Message):
    name: str = Field(description="The property or output.")
    filename: str
    url: str | None = Field(description="null: not asked for, or the file is gone.")
    size: int | None
    content_type: str | None


class AttemptLine(Message):
    """One lease on the job's axis of time."""

    attempt: int
    lease_number: int
    worker_id: str | None
    queued_at: datetime | None = Field(description="Since when it had waited for this lease.")
    leased_at: datetime
    started_at: datetime | None = Field(description="When the prompt went to the backend.")
    ended_at: datetime | None
    outcome: str | None = Field(
        description="completed, failed, requeued, expired or cancelled; null: it goes on."
    )
    message: str | None
    prompt: dict[str, Any] | None = Field(description="As sent; null: not reported, or deleted.")


class JobActs(Message):
    """What can be done with the job now."""

    cancel: bool
    retry: bool
    reprioritise: bool
    replay: bool


class JobDetails(AdminJobFacts):
    user_id: UUID | None
    effect: str | None = Field(description="The slug of its effect.")
    stage: str
    provider: str
    priority: int
    backend_affinity: str | None
    reserved_tokens: int
    retry_of: UUID | None
    reused_from: UUID | None = Field(
        default=None, description="The job whose result it took instead of running."
    )
    media_id: UUID | None
    batch_id: UUID | None
    run_kind: str | None = Field(description="graph or pipeline, if it is a part of a run.")
    run_id: UUID | None
    is_held: bool = Field(description="It waits outside of the queue, for others of its user.")
    prompt: dict[str, Any] | None = Field(description="As sent to workers; null: deleted.")
    output_node_id: str | None
    inputs: list[FileSeen]
    outputs: list[FileSeen]
    attempts: list[AttemptLine] = Field(description="In the order of leases.")
    audit: list[EntryAnswer] = Field(description="The oldest first.")
    can: JobActs


class ReplayedJob(Message):
    job_id: UUID


class OverviewSeries(Message):
    """Columns of equal length, one entry for each step; null: nothing is known of that step."""

    at: list[datetime] = Field(description="When each step begins; the last goes on.")
    queued: list[float] = Field(description="Jobs that waited, on average.")
    running: list[float] = Field(description="Jobs that workers held, on average.")
    completed: list[int]
    failed: list[int]
    cancelled: list[int]
    success_rate: list[float | None] = Field(description="Of those that completed or failed.")
    wait_p50_seconds: list[float | None]
    wait_p95_seconds: list[float | None]
    run_p50_seconds: list[float | None]
    run_p95_seconds: list[float | None]
    gpu_percent: list[float | None] = Field(description="Mean load of the GPUs of all workers.")
    busy_percent: list[float | None] = Field(description="Of the jobs that could run at once.")
    stayed: list[int] = Field(description="Runs without a switch of models before them.")
    switched: list[int]
    tokens: list[int] = Field(description="What completed jobs have cost.")


class OverviewTotals(Message):
    """The same for the whole range."""

    queued: float
    running: float
    completed: int
    failed: int
    cancelled: int
    success_rate: float | None
    wait_p50_seconds: float | None
    wait_p95_seconds: float | None
    run_p50_seconds: float | None
    run_p95_seconds: float | None
    gpu_percent: float | None
    busy_percent: float | None
    stayed: int
    switched: int
    tokens: int


class OverviewNow(Message):
    queued: int
    running: int = Field(description="Jobs that have begun at a worker.")
    held: int = Field(description="Jobs that workers have and that have not begun.")
    oldest_seconds: float = Field(description="How long the first in line has waited.")
    slots: int = Field(description="How many jobs the workers that are online run at once.")
    workers: dict[str, int] = Field(description="By state: idle, busy, draining, offline, revoked.")
    maintenance: bool
    waiting: dict[str, int] = Field(
        description="By fleet, as SLUG/STAGE: jobs in the queue that are of its workflows. One job may be of several."
    )


class WorkflowFigures(Message):
    workflow: str
    completed: int
    failed: int
    cancelled: int
    mean_run_seconds: float | None
    wait_p95_seconds: float | None = Field(description="95 of 100 jobs waited less.")
    run_p95_seconds: float | None
    ended: list[int] = Field(
        description="How many completed or failed in each step; as long as `series.at`."
    )
    queued: int = Field(description="Now.")
    running: int = Field(description="Now.")
    held: int = Field(description="Now: workers have them, and they have not begun.")


class AlertKind(StrEnum):
    ERROR_RATE = "error_rate"
    WORKERS_LOST = "workers_lost"
    WORKERS_PENDING = "workers_pending"
    STUCK_JOBS = "stuck_jobs"
    POISONED_JOBS = "poisoned_jobs"
    DISK = "disk"
    MAINTENANCE = "maintenance"
    POOL_DOWN = "pool_down"


class Alert(Message):
    kind: AlertKind
    severity: Literal["warning", "error"]
    message: str = Field(description="What is wrong, in one sentence.")
    todo: str = Field(description="What to do about it.")
    subject: str | None = Field(description="Such as workflow:upscale or worker:gpu-7.")
    count: int = Field(description="How many jobs or workers it is about.")


class Alerts(Message):
    alerts: list[Alert] = Field(description="The worst first.")


class Overview(Message):
    range: str
    step_seconds: int
    now: OverviewNow
    series: OverviewSeries
    totals: OverviewTotals
    workflows: list[WorkflowFigures] = Field(description="The busiest first.")
    alerts: list[Alert] = Field(description="The worst first.")


class MatrixWorker(Message):
    worker_id: str
    fleet: str
    state: str
    can_run: list[str] = Field(description="Slugs of workflows.")
    missing: dict[str, dict[str, list[str]]] = Field(
        description="By workflow: node_types, models and capabilities that it lacks."
    )
    unknown: list[str] = Field(
        description="Workflows of which nobody knows, as it has not told what its backend has."
    )


class MatrixWorkflow(Message):
    workflow: str
    fleets: list[str] = Field(description="SLUG/STAGE of those that it is assigned to.")
    able: int = Field(description="How many workers that are online can run it.")
    online: int = Field(description="How many of its fleets' workers are online.")


class Matrix(Message):
    workflows: list[MatrixWorkflow]
    workers: list[MatrixWorker]
    is_whole: bool = Field(description="false: there are more workers or workflows than are shown.")


class FoundKind(StrEnum):
    JOB = "job"
    WORKER = "worker"
    TENANT = "tenant"
    EFFECT = "effect"
    WORKFLOW = "workflow"


class FoundThing(Message):
    kind: FoundKind
    id: str = Field(description="The id or slug by which its page is found.")
    name: str
    detail: str = Field(description="Its status, fleet or pool.")


class FoundThings(Message):
    found: list[FoundThing]
    pools_left_out: list[str] = Field(description="Pools that are down: their jobs are not found.")


class SettingAnswer(Message):
    name: str
    variable: str = Field(description="The environment variable that sets it.")
    value: str | int | float | bool = Field(description="Secrets and passwords are masked.")
    remark: str = Field(description="What it is.")
    is_default: bool


class SettingsAnswer(Message):
    version: str
    has_editor: bool = Field(description="Whether ComfyUI's editor is installed: `/editor/`.")
    settings: list[SettingAnswer] = Field(description="As they are in force; read only.")


class DrawnSlot(Message):
    name: str
    type: str = Field(description="Empty where it isn't known.")


class DrawnNode(Message):
    id: str
    type: str
    title: str
    is_subgraph: bool
    x: float
    y: float
    width: float
    height: float
    mode: Literal["always", "muted", "bypassed"]
    inputs: list[DrawnSlot]
    outputs: list[DrawnSlot]


class DrawnLink(Message):
    from_node: str
    from_slot: int
    to_node: str
    to_slot: int
    type: str


class DrawnGroup(Message):
    title: str
    x: float
    y: float
    width: float
    height: float


class Drawing(Message):
    nodes: list[DrawnNode]
    links: list[DrawnLink]
    groups: list[DrawnGroup]


class SuggestedProperty(Message):
    """An input that can be exposed; as it is, it is a property for a new version."""

    name: str
    type: PropertyType
    binding: str = Field(description='"<node id>.<input>"')
    node_id: str
    node_title: str
    path: list[str] = Field(description="Titles of the subgraphs around it, outermost first.")
    input: str
    value: Any = Field(description="As saved.")
    default: Any = Field(description="null for media and seeds.")
    minimum: float | None
    maximum: float | None
    step: float | None
    choices: list[Any] | None
    is_multiline: bool
    role: str | None = Field(description="file, text, seed, size, steps or model, if it matters.")


class WorkflowOutput(Message):
    node_id: str
    title: str
    media: str
    is_saved: bool


class MissingInFile(Message):
    node_types: list[str]
    files: list[str]


class WorkflowInspection(Message):
    file_kind: str = Field(description="json, png, webp, mp4 …")
    form: Literal["workflow", "prompt"]
    document: dict[str, Any] = Field(description="To register it.")
    drawing: Drawing
    properties: list[SuggestedProperty] = Field(description="Those that matter most first.")
    outputs: list[WorkflowOutput]
    node_types: list[str]
    files: list[str] = Field(description="Models and other files that it names.")
    missing: MissingInFile | None = Field(
        description="What the fleet that knows most lacks; null: none has told what it has."
    )
    notes: list[str]


class NamedNode(Message):
    id: str
    type: str
    title: str


class ChangedValue(Message):
    address: str
    title: str
    before: Any
    after: Any


class WorkflowDiff(Message):
    nodes_added: list[NamedNode]
    nodes_removed: list[NamedNode]
    links_added: int
    links_removed: int
    values_changed: list[ChangedValue] = Field(description="At most 500.")
    files_added: list[str]
    files_removed: list[str]
    properties_added: list[str]
    properties_removed: list[str]
    properties_changed: list[str]
