"""The part of the admin API for operators' pages: lists with counts, bulk actions, job details, the
overview, and drawings of workflow files."""

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
    counts: dict[JobStatus, int] = Field(description="Number of jobs by status.")
    counted_max: int = Field(description="A count of this value means this number or more.")
    pools_left_out: list[str] = Field(
        description="Pools that are down. Their jobs are not counted."
    )


class JobPreview(Message):
    preview: str | None = Field(
        description="An image as a data: URL. null if there is none, or if the job isn't running."
    )


class BulkFailureAnswer(Message):
    job_id: UUID
    code: str
    message: str


class BulkAnswer(Message):
    matched: int = Field(description="Number of jobs that this call selected.")
    done: int = Field(description="Number of jobs that were changed.")
    failed: list[BulkFailureAnswer] = Field(
        description="The jobs that were not changed, with the reasons."
    )
    retries: dict[UUID, UUID] = Field(description="For a retry, the new job of each old one.")
    next: str | None = Field(
        description="Set if more jobs match the filter. Repeat the call with this as `after`."
    )
    pools_left_out: list[str] = Field(
        description="Pools that are down. Their jobs are not changed."
    )


class FileSeen(Message):
    name: str = Field(description="The name of the property or output.")
    filename: str
    url: str | None = Field(
        description="null if it was not requested, or if the file no longer exists."
    )
    size: int | None
    content_type: str | None


class AttemptLine(Message):
    """A lease in the timeline of a job."""

    attempt: int
    lease_number: int
    worker_id: str | None
    queued_at: datetime | None = Field(description="When the job started to wait for this lease.")
    leased_at: datetime
    started_at: datetime | None = Field(description="When the prompt was sent to the backend.")
    ended_at: datetime | None
    outcome: str | None = Field(
        description="completed, failed, requeued, expired or cancelled. null if the lease is "
        "active."
    )
    message: str | None
    prompt: dict[str, Any] | None = Field(
        description="The submitted prompt. null if it was not reported, or was deleted."
    )


class JobActs(Message):
    """The actions that are currently available for the job."""

    cancel: bool
    retry: bool
    reprioritise: bool
    replay: bool


class JobDetails(AdminJobFacts):
    user_id: UUID | None
    effect: str | None = Field(description="The slug of the job's effect.")
    stage: str
    provider: str
    priority: int
    backend_affinity: str | None
    reserved_tokens: int
    retry_of: UUID | None
    reused_from: UUID | None = Field(
        default=None, description="The job whose result was reused instead of running this job."
    )
    media_id: UUID | None
    batch_id: UUID | None
    run_kind: str | None = Field(description="`graph` or `pipeline`, if the job is part of a run.")
    run_id: UUID | None
    is_held: bool = Field(
        description="Whether the job waits outside the queue for other jobs of its user."
    )
    prompt: dict[str, Any] | None = Field(
        description="The prompt that workers receive. null if it was deleted."
    )
    output_node_id: str | None
    inputs: list[FileSeen]
    outputs: list[FileSeen]
    attempts: list[AttemptLine] = Field(description="In the order of leases.")
    audit: list[EntryAnswer] = Field(description="Oldest first.")
    can: JobActs


class ReplayedJob(Message):
    job_id: UUID


class OverviewSeries(Message):
    """Columns of equal length with one entry per step. null means that nothing is known about the
    step."""

    at: list[datetime] = Field(description="When each step begins. The last step isn't finished.")
    queued: list[float] = Field(description="Average number of waiting jobs.")
    running: list[float] = Field(description="Average number of jobs that workers held.")
    completed: list[int]
    failed: list[int]
    cancelled: list[int]
    success_rate: list[float | None] = Field(
        description="Share of completed jobs among completed and failed ones."
    )
    wait_p50_seconds: list[float | None]
    wait_p95_seconds: list[float | None]
    run_p50_seconds: list[float | None]
    run_p95_seconds: list[float | None]
    gpu_percent: list[float | None] = Field(description="Mean GPU load of all workers.")
    busy_percent: list[float | None] = Field(
        description="Usage of the workers' job slots in percent."
    )
    stayed: list[int] = Field(description="Number of runs without a model switch before them.")
    switched: list[int]
    tokens: list[int] = Field(description="Tokens that completed jobs cost.")


class OverviewTotals(Message):
    """The totals for the whole range."""

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
    running: int = Field(description="Jobs that have started on a worker.")
    held: int = Field(description="Jobs that workers hold but have not started.")
    oldest_seconds: float = Field(description="How long the first job in the queue has waited.")
    slots: int = Field(
        description="Number of jobs that the online workers can run at the same time."
    )
    workers: dict[str, int] = Field(
        description="Number of workers by state: idle, busy, draining, offline, revoked."
    )
    maintenance: bool
    waiting: dict[str, int] = Field(
        description="Number of queued jobs by fleet, as SLUG/STAGE. A job may count for several "
        "fleets."
    )


class WorkflowFigures(Message):
    workflow: str
    completed: int
    failed: int
    cancelled: int
    mean_run_seconds: float | None
    wait_p95_seconds: float | None = Field(description="95 of 100 jobs waited less than this.")
    run_p95_seconds: float | None
    ended: list[int] = Field(
        description=(
            "Number of completed and failed jobs in each step. It has the same length as "
            "`series.at`."
        )
    )
    queued: int = Field(description="Currently queued jobs.")
    running: int = Field(description="Currently running jobs.")
    held: int = Field(description="Jobs that workers currently hold but have not started.")


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
    message: str = Field(description="The problem, as one sentence.")
    todo: str = Field(description="The action that solves the problem.")
    subject: str | None = Field(description="For example, workflow:upscale or worker:gpu-7.")
    count: int = Field(description="Number of affected jobs or workers.")


class Alerts(Message):
    alerts: list[Alert] = Field(description="Most severe first.")


class Overview(Message):
    range: str
    step_seconds: int
    now: OverviewNow
    series: OverviewSeries
    totals: OverviewTotals
    workflows: list[WorkflowFigures] = Field(description="Busiest first.")
    alerts: list[Alert] = Field(description="Most severe first.")


class MatrixWorker(Message):
    worker_id: str
    fleet: str
    state: str
    can_run: list[str] = Field(description="Slugs of the workflows that the worker can run.")
    missing: dict[str, dict[str, list[str]]] = Field(
        description="The node_types, models and capabilities that the worker lacks, by workflow."
    )
    unknown: list[str] = Field(
        description=(
            "Workflows that the worker may or may not be able to run, because the worker hasn't "
            "reported its backend's contents."
        )
    )


class MatrixWorkflow(Message):
    workflow: str
    fleets: list[str] = Field(
        description="The fleets that the workflow is assigned to, as SLUG/STAGE."
    )
    able: int = Field(description="Number of online workers that can run the workflow.")
    online: int = Field(description="Number of online workers in the workflow's fleets.")


class Matrix(Message):
    workflows: list[MatrixWorkflow]
    workers: list[MatrixWorker]
    is_whole: bool = Field(description="false if there are more workers or workflows than listed.")


class FoundKind(StrEnum):
    JOB = "job"
    WORKER = "worker"
    TENANT = "tenant"
    EFFECT = "effect"
    WORKFLOW = "workflow"


class FoundThing(Message):
    kind: FoundKind
    id: str = Field(description="The id or slug in the URL of the page for this result.")
    name: str
    detail: str = Field(description="The status, fleet or pool of this result.")


class FoundThings(Message):
    found: list[FoundThing]
    pools_left_out: list[str] = Field(description="Pools that are down. Their jobs can't be found.")


class SettingAnswer(Message):
    name: str
    variable: str = Field(description="The environment variable for the setting.")
    value: str | int | float | bool = Field(description="Secrets and passwords are masked.")
    remark: str = Field(description="A description of the setting.")
    is_default: bool


class SettingsAnswer(Message):
    version: str
    has_editor: bool = Field(description="Whether ComfyUI's editor is installed under `/editor/`.")
    settings: list[SettingAnswer] = Field(description="The current settings, read only.")


class DrawnSlot(Message):
    name: str
    type: str = Field(description="The slot's type. Empty if unknown.")


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
    """An input that can be exposed. It has the form of a property for a new version."""

    name: str
    type: PropertyType
    binding: str = Field(description='"<node id>.<input>"')
    node_id: str
    node_title: str
    path: list[str] = Field(description="Titles of the enclosing subgraphs, outermost first.")
    input: str
    value: Any = Field(description="The saved value.")
    default: Any = Field(description="The suggested default. null for media and seeds.")
    minimum: float | None
    maximum: float | None
    step: float | None
    choices: list[Any] | None
    is_multiline: bool
    role: str | None = Field(
        description="file, text, seed, size, steps or model, if the input has such a role."
    )


class WorkflowOutput(Message):
    node_id: str
    title: str
    media: str
    is_saved: bool


class MissingInFile(Message):
    node_types: list[str]
    files: list[str]


class WorkflowInspection(Message):
    file_kind: str = Field(description="The file format: json, png, webp, mp4 …")
    form: Literal["workflow", "prompt"]
    document: dict[str, Any] = Field(
        description="The document to send when the workflow is registered."
    )
    drawing: Drawing
    properties: list[SuggestedProperty] = Field(description="Most important first.")
    outputs: list[WorkflowOutput]
    node_types: list[str]
    files: list[str] = Field(description="Models and other files that the workflow refers to.")
    missing: MissingInFile | None = Field(
        description=(
            "The requirements that the best fleet doesn't meet. null if no fleet has reported its "
            "contents."
        )
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
    values_changed: list[ChangedValue] = Field(description="The changed values, at most 500.")
    files_added: list[str]
    files_removed: list[str]
    properties_added: list[str]
    properties_removed: list[str]
    properties_changed: list[str]
