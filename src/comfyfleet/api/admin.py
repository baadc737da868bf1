"""The admin API: workflows, effects, fleets, workers, tenants, jobs, the queue and operators."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args
from uuid import UUID

from pydantic import Field, model_validator

from comfyfleet.api.account import Scope, TransactionType
from comfyfleet.api.jobs import Example, JobStatus
from comfyfleet.api.route_calls import RoutePrefixes
from comfyfleet.api.values import Message, Page, ShownValue
from comfyfleet.api.worker import BackendFacts, Progress, Reading

PropertyType: TypeAlias = Literal[
    "text", "number", "integer", "boolean", "choice", "seed", "image", "video", "audio"
]
PROPERTY_TYPES: tuple[PropertyType, ...] = get_args(PropertyType)
PropertyFormat: TypeAlias = Literal["multiline", "colour", "mask"]
PROPERTY_FORMATS: tuple[PropertyFormat, ...] = get_args(PropertyFormat)
SHOWN_DRIFTS_MAX = 1000


class DispatchStatus(StrEnum):
    QUEUED = "queued"
    LEASED = "leased"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Role(StrEnum):
    VIEWER = "viewer"  # can only read
    OPERATOR = "operator"  # can also perform actions
    # can also manage operators, tenants' money, quotas and retention, and erase tenants
    OWNER = "owner"

    def includes(self, other: "Role") -> bool:
        ranks = list(Role)
        return ranks.index(self) >= ranks.index(other)


class Fault(StrEnum):
    BALANCE = "balance"  # the balance differs from the sum of the wallet's transactions
    NEGATIVE = "negative"
    NO_WALLET = "no_wallet"
    SETTLED_TWICE = "settled_twice"
    NOT_RESERVED = "not_reserved"  # settled or marked as reserved, but has no reservation
    AMOUNT = "amount"  # refunded or consumed amount differs from the reserved one
    NOT_SETTLED = "not_settled"  # the job has ended, but its reservation is still open
    SETTLED_EARLY = "settled_early"  # settled although the job has not ended
    SETTLED_WRONGLY = "settled_wrongly"  # refunded after a success, or consumed after a failure


class PropertyAnswer(Message):
    name: str
    type: PropertyType
    binding: str | None
    placeholder: str | None
    default: Any
    minimum: int | float | None
    maximum: int | float | None
    step: int | float | None
    choices: list[Any] | None
    required: bool
    description: str
    label: str | None = None
    format: str | None = Field(default=None, description="Form field: multiline, colour or mask.")


# Whether a job may complete without a file and without a value.
OutputRule: TypeAlias = Literal["required", "optional"]
# How delivered files are marked as created by AI. `auto` decides based on the prompt.
AiMark: TypeAlias = Literal["auto", "generated", "edited", "none"]


class RegisteredVersion(Message):
    slug: str
    version: int
    warnings: list[str] = Field(
        description="Checks that were not possible, and parts that no worker can run."
    )
    notes: list[str] = Field(
        default_factory=list, description="Information that will be known later."
    )


class WorkflowAnswer(Message):
    slug: str
    version: int = Field(description="The version for new jobs.")
    is_active: bool
    is_paused: bool
    required_capabilities: list[str]
    run_limit_seconds: int
    price_tokens: int | None = Field(
        description="The price of a job in customers' graphs and pipelines. null if not offered there."
    )
    fleets: list[str] = Field(description="The fleets of the workflow, as SLUG/STAGE.")
    created_at: datetime
    output: OutputRule = Field(
        default="required", description="Whether a job may complete without a file and a value."
    )
    ai_mark: AiMark = Field(
        default="auto", description="How delivered files are marked as created by AI."
    )


class Workflows(Message):
    workflows: list[WorkflowAnswer]


class Model(Message):
    input: str = Field(description="Class.input. Empty if the node type is unknown.")
    file: str


class WorkflowDetail(WorkflowAnswer):
    kind: str = Field(description="The type of the document: workflow or prompt.")
    document_hash: str
    output_node_id: str | None
    properties: list[PropertyAnswer]
    node_types: list[str]
    models: list[Model]
    versions: list[int]
    registered_at: dict[int, datetime] = Field(description="The time of registration by version.")


class AbleWorker(Message):
    worker_id: str
    fleet: str
    can_run: bool
    missing: dict[str, list[str]] = Field(
        description="The node_types, models and capabilities that the worker lacks."
    )


class AbleWorkers(Message):
    workers: list[AbleWorker] = Field(
        description="Workers that have reported their backends' contents."
    )


class MadeEffect(Message):
    id: UUID
    slug: str


class AdminEffectAnswer(Message):
    id: UUID
    slug: str
    workflow_slug: str
    title: str
    description: str
    preview_url: str | None
    price_tokens: int
    overrides: dict[str, Any]
    locked: list[str]
    stage: str
    provider: str
    published: bool
    max_upload_bytes: int | None
    media_types: list[str]
    keep_metadata: bool
    reuse: bool = False
    tags: list[str] = Field(default_factory=list)
    examples: list[Example] = Field(default_factory=list)
    last_processing_time_seconds: float | None
    typical_seconds: float | None
    created_at: datetime


class AdminEffects(Message):
    effects: list[AdminEffectAnswer]


class WorkerAnswer(Message):
    worker_id: str
    fleet: str = Field(description="The worker's fleet, as SLUG/STAGE.")
    state: str = Field(description="online, faulty, offline, draining, pending or revoked")
    problem: str | None = Field(default=None, description="Why a faulty worker can't run jobs.")
    is_approved: bool
    is_draining: bool
    current_load: int = Field(
        description=(
            "Number of jobs that the worker currently holds. This can exceed "
            "`max_concurrency` by one job, which waits on the worker until another one ends."
        )
    )
    max_concurrency: int
    capabilities: list[str]
    providers: list[str]
    models_loaded: list[str]
    registration_source: str
    protocol_version: int
    last_seen_at: datetime
    silent_since: datetime | None = Field(
        default=None,
        description="When the worker last made contact, if it is overdue and may be offline.",
    )
    created_at: datetime


class WorkerJob(Message):
    """A job that a worker holds."""

    job_id: UUID
    dispatch_id: int
    tenant_id: UUID
    workflow: str
    attempt: int
    started_at: datetime | None = Field(description="null while the job is being prepared.")
    percent: float | None
    node: str | None = Field(description="The node that is running.")


class WorkerSeen(WorkerAnswer):
    backend_kind: str | None = Field(description="For example, ComfyUI. null if not reported yet.")
    backend_version: str | None
    gpu: str | None
    gpu_memory_bytes: int | None
    reading: Reading | None = Field(description="The latest metrics of the worker's machine.")
    read_at: datetime | None = Field(description="When the metrics were reported.")
    jobs: list[WorkerJob] = Field(description="The jobs that the worker currently holds.")


class Workers(Page):
    workers: list[WorkerSeen]
    next: str | None = Field(
        description="Pass this as `after` to get the next page. null on the last page."
    )


class WorkerDetail(WorkerAnswer):
    workflows: list[str] = Field(
        description="The workflows that the worker may run according to the fleet's assignments."
    )
    backend: BackendFacts | None = Field(
        description="The backend's version, node types and models."
    )
    reading: Reading | None = Field(description="The latest metrics of the worker's machine.")


class ReadingAnswer(Message):
    at: datetime
    reading: Reading


class Readings(Message):
    readings: list[ReadingAnswer] = Field(description="Newest first.")


class Revoked(WorkerAnswer):
    requeued: int = Field(description="Number of requeued jobs.")
    hint: str = Field(description="Further steps that may be needed to keep the worker out.")


class NewKey(Message):
    worker_id: str
    token: str = Field(description="The worker's new key, shown only once.")


class FleetSecret(Message):
    slug: str
    stage: str
    secret: str = Field(description="Workers use it to join. It is shown only once.")
    join: str = Field(
        default="",
        description="The commands for joining a worker next to its ComfyUI, including the secret.",
    )


class FleetAnswer(Message):
    slug: str
    stage: str
    max_workers: int | None
    approval: str
    starts_within_seconds: int | None = Field(
        default=None, description="How long the fleet's machines take to start on demand."
    )
    workers: int = Field(description="Number of workers that have joined.")
    workflows: list[str] = Field(description="Slugs of the workflows assigned to the fleet.")
    object_info_hash: str | None = Field(
        description="Hash of the object_info that the fleet's backends last reported."
    )
    created_at: datetime


class SwitchAnswer(Message):
    model: str = Field(description="A checkpoint or diffusion model.")
    seconds: float = Field(description="Maximum cost of a switch to this model, in seconds.")
    run_seconds: float = Field(description="Seconds of this model's runs without a switch.")
    runs: int = Field(description="Minimum number of compared runs with and without a switch.")
    is_free: bool = Field(
        description="Whether a switch is so fast that jobs run in the order of arrival."
    )


class FleetDetails(FleetAnswer):
    join: str = Field(
        default="", description="The commands for joining a worker, without the secret."
    )
    model_switches: list[SwitchAnswer] = Field(description="Measured costs of model switches.")


class Fleets(Message):
    fleets: list[FleetAnswer]


class AssignmentAnswer(Message):
    slug: str
    stage: str
    workflows: list[str]
    added: list[str]
    removed: list[str]
    warnings: list[str] = Field(description="Checks that were not possible.")


class MadeTenant(Message):
    id: UUID
    name: str
    pool: str = Field(description="The tenant database where the tenant is stored.")
    key: str = Field(description="The key of the tenant's first user, shown only once.")
    user_id: UUID = Field(description="The tenant's first user.")


class Storage(Message):
    used_bytes: int = Field(description="Including announced uploads.")
    max_storage_bytes: int
    unnamed_objects: int | None = Field(
        default=None,
        description=(
            "Number of objects without a database row, if requested. A sweep deletes them after a "
            "day."
        ),
    )
    is_complete: bool = Field(
        default=True, description="false if only the first 100,000 objects were examined."
    )


class TenantAnswer(Message):
    id: UUID
    name: str
    pool: str
    min_priority: int
    max_priority: int
    max_queued: int | None = Field(description="null means COMFYFLEET_MAX_QUEUED_PER_TENANT.")
    retention_days: int | None = Field(description="null means COMFYFLEET_RETENTION_DAYS.")
    max_storage_bytes: int | None = Field(
        description="null means COMFYFLEET_MAX_STORAGE_BYTES_PER_TENANT."
    )
    show_backends: bool | None = Field(description="null means COMFYFLEET_SHOW_BACKENDS.")
    erasing_at: datetime | None = Field(
        description="When the deletion of the tenant's private data started."
    )
    erased_at: datetime | None = Field(
        description="When all data except the ledger had been deleted."
    )
    created_at: datetime


class Tenants(Message):
    tenants: list[TenantAnswer]


class DriftAnswer(Message):
    fault: Fault
    tenant_id: UUID
    user_id: UUID | None
    job_id: UUID | None
    message: str


class Books(Message):
    is_sound: bool = Field(
        description="Whether everything was verified without finding a discrepancy."
    )
    found: int = Field(description="Number of discrepancies.")
    drifts: list[DriftAnswer] = Field(description=f"The first {SHOWN_DRIFTS_MAX:,} discrepancies.")
    pools_left_out: list[str] = Field(
        description="Pools that are down. Their ledgers were not verified."
    )


class UserAnswer(Message):
    id: UUID
    tenant_id: UUID
    email: str | None
    name: str | None
    is_active: bool
    created_at: datetime


class Users(Page):
    users: list[UserAnswer] = Field(description="Oldest first.")
    next: UUID | None = Field(
        description="Pass this as `after` to get the next page. null on the last page."
    )


class AdminKeyAnswer(Message):
    id: UUID
    user_id: UUID
    name: str
    prefix: str = Field(description="The first characters of the key.")
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class AdminMadeKey(AdminKeyAnswer):
    key: str = Field(description="Shown only once.")


class AdminKeys(Message):
    keys: list[AdminKeyAnswer] = Field(description="Newest first, including revoked ones.")


class Balance(Message):
    balance: int


class AdminWalletAnswer(Balance):
    tenant_id: UUID
    user_id: UUID


class AdminWallets(Page):
    wallets: list[AdminWalletAnswer] = Field(description="Sorted by user.")
    next: UUID | None = Field(
        description="Pass this as `after` to get the next page. null on the last page."
    )


class AdminTransactionAnswer(Message):
    id: int
    type: TransactionType
    amount: int = Field(description="The change of the balance.")
    job_id: UUID | None
    provider_transaction_id: str | None
    created_at: datetime


class AdminTransactions(Page):
    transactions: list[AdminTransactionAnswer] = Field(description="Newest first.")
    next: int | None = Field(
        description="Pass this as `before` to get the next page. null on the last page."
    )


class DispatchSeen(Message):
    id: int
    tenant_id: UUID
    job_id: UUID
    workflow: str
    stage: str
    provider: str
    status: DispatchStatus
    priority: int
    attempts: int
    max_attempts: int
    requeues: int
    worker_id: str | None
    lease_expires_at: datetime | None
    not_before: datetime | None
    backend_affinity: str | None
    model_key: str | None
    is_poisoned: bool
    cancel_requested: bool
    duration_seconds: float | None
    last_error: str | None
    created_at: datetime
    queued_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class DispatchPage(Page):
    dispatches: list[DispatchSeen]
    next: int | None = Field(description="Pass this as `before` to get older dispatches.")


class Attempt(Message):
    at: datetime
    actor: str
    action: str
    details: dict[str, Any]


class DispatchWhole(Message):
    dispatch: DispatchSeen
    why: str
    attempts: list[Attempt]


class RetriedDispatch(Message):
    job_id: UUID


class WhyDispatch(Message):
    why: str


class JobIds(Message):
    ids: list[UUID]
    warnings: list[str] = Field(default_factory=list, description="Why no worker can run them now.")


class OutputSeen(Message):
    name: str
    filename: str = Field(description="The backend's name for the file.")
    url: str
    size: int | None
    content_type: str


class AdminJobFacts(Message):
    id: UUID
    tenant_id: UUID
    workflow: str
    version: int
    status: JobStatus
    error: str | None
    raw_error: str | None
    attempt: int
    properties: dict[str, Any]
    prompt_id: str | None = Field(
        description="The id that the submitting ComfyUI client uses for the job."
    )
    provider_job_id: str | None = Field(
        description="The backend's id of the completed run, which is ComfyUI's `prompt_id`."
    )
    progress: Progress | None
    values: list[ShownValue]
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    dispatch: DispatchSeen | None
    why: str | None = Field(description="Why the job isn't running.")
    person_needed_after: float | None = Field(
        default=None,
        description="Seconds after which only a person can help. null if the job needs no help.",
    )
    required_action: str | None = Field(
        default=None, description="What a person must do. null if the job needs no help."
    )


class JobSeen(AdminJobFacts):
    outputs: list[OutputSeen]


class JobListed(Message):
    id: UUID
    tenant_id: UUID
    user_id: UUID | None
    workflow: str
    effect: str | None = Field(description="The slug of the job's effect.")
    status: JobStatus
    priority: int
    attempt: int
    worker_id: str | None = Field(description="The worker that has the job, or had it last.")
    percent: float | None = Field(
        description="Progress of a running job, if the backend reports it."
    )
    dispatch_id: int | None
    reserved_tokens: int
    retry_of: UUID | None
    error: str | None
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None


class JobPage(Page):
    jobs: list[JobListed] = Field(description="Newest first.")
    next: str | None = Field(
        description="Pass this as `after` to get the next page. null on the last page."
    )
    pools_left_out: list[str] = Field(description="Pools that are down. Their jobs are not listed.")


class AttemptSeen(Message):
    attempt: int
    lease_number: int
    worker_id: str
    started_at: datetime
    prompt: dict[str, Any] | None = Field(
        description="null if it was deleted after the retention time."
    )


class Attempts(Message):
    prompt: dict[str, Any] | None = Field(
        description="The prompt that workers receive. null if it was deleted."
    )
    attempts: list[AttemptSeen] = Field(
        description="The submitted prompts, in the order of leases."
    )


class AdminUploadSlot(Message):
    method: str
    url: str
    headers: dict[str, str]


class AdminUpload(Message):
    file_id: UUID
    upload: AdminUploadSlot


class EntryAnswer(Message):
    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    tenant_id: UUID | None
    details: dict[str, Any]


class Entries(Page):
    entries: list[EntryAnswer] = Field(description="Newest first.")
    next: int | None = Field(
        description="Pass this as `before` to get the next page. null on the last page."
    )


class OperatorAnswer(Message):
    id: UUID
    name: str
    role: Role
    prefix: str = Field(description="The first characters of the key.")
    created_at: datetime
    created_by: str
    revoked_at: datetime | None
    last_used_at: datetime | None


class MadeOperator(OperatorAnswer):
    key: str = Field(description="Shown only once.")


class Operators(Message):
    operators: list[OperatorAnswer]


class Repaired(Message):
    dispatches_ended: int
    dispatches_made: int
    pools_skipped: int
    rows_read: int
    next: str | None = Field(
        description="Pass this as `after` to continue. null if everything was read."
    )


# Limits for prompts of ComfyUI's clients, which operators set for each fleet and each tenant.
PATTERNS_MAX = 500
FLEETS_MAX = 1_000
NODES_MAX = 2_000
NODES_LIMIT_MAX = 100_000
PROMPT_BYTES_MAX = 4 * 1024**2
PROMPT_BYTES_LIMIT_MAX = 64 * 1024**2
PROMPT_RUN_SECONDS = 3_600
PROMPT_RUN_SECONDS_MAX = 7 * 24 * 3_600
PROMPT_PRICE_MAX = 1_000_000_000

# Shell patterns: * matches any characters, ? one character, and [abc] one of these. They are
# case-sensitive.
TypePattern: TypeAlias = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")]
TypePatterns: TypeAlias = Annotated[tuple[TypePattern, ...], Field(max_length=PATTERNS_MAX)]
FleetName: TypeAlias = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,59}/[a-z0-9][a-z0-9_-]{0,29}$")
]


class FleetPrompts(Message):
    """The conditions under which a fleet runs prompts without a registered workflow."""

    is_open: bool = Field(default=True, description="Whether the fleet accepts prompts of clients.")
    price_tokens: int = Field(
        default=0, ge=0, le=PROMPT_PRICE_MAX, description="The price of each prompt in tokens."
    )
    price_per_second: float | None = Field(
        default=None,
        gt=0,
        le=PROMPT_PRICE_MAX,
        allow_inf_nan=False,
        description="Tokens per second on the GPU, instead of a fixed price.",
    )
    allow: TypePatterns = Field(
        default=(), description="Node types that may run although they are denied by default."
    )
    deny: TypePatterns = Field(
        default=(), description="Node types that may not run. Overrides every `allow`."
    )
    allows_unknown: bool = Field(
        default=False,
        description=(
            "Whether node types that are not ComfyUI's own may run. This excludes node types with "
            "a path, a URL, code or a command as input."
        ),
    )
    nodes_max: int = Field(
        default=NODES_MAX,
        ge=1,
        le=NODES_LIMIT_MAX,
        description="Maximum number of nodes in a prompt.",
    )
    prompt_bytes_max: int = Field(
        default=PROMPT_BYTES_MAX,
        ge=1_000,
        le=PROMPT_BYTES_LIMIT_MAX,
        description="Maximum size of a prompt as JSON, in bytes.",
    )
    run_limit_seconds: int = Field(
        default=PROMPT_RUN_SECONDS,
        ge=1,
        le=PROMPT_RUN_SECONDS_MAX,
        description="A run that takes longer is stopped and fails.",
    )
    passthrough: RoutePrefixes = Field(
        default=(),
        description="Prefixes of routes that are passed to a worker's backend, such as /api/etn.",
    )
    in_order: bool = Field(
        default=True,
        description=(
            "Whether a client's WebSocket shows its prompts one after another, in the order in "
            "which they started, as with a single ComfyUI. If false, the messages of all prompts "
            "are shown as they arrive."
        ),
    )

    @model_validator(mode="after")
    def _require_one_price(self) -> Self:
        if self.price_tokens and self.price_per_second is not None:
            raise ValueError("set either price_tokens or price_per_second, not both")
        return self


class FleetPromptsAnswer(FleetPrompts):
    """The conditions, with a warning for the operator."""

    warning: str | None = Field(
        default=None,
        description="Set if prompts cost less than a registered workflow that the fleet runs.",
    )


class TenantPrompts(Message):
    """Limits for a tenant's prompts, in addition to the limits of the fleets."""

    fleets: Annotated[tuple[FleetName, ...], Field(max_length=FLEETS_MAX)] | None = Field(
        default=None,
        description=(
            "The fleets that the tenant may use, as SLUG/STAGE. null means all open fleets."
        ),
    )
    allow: TypePatterns = Field(
        default=(), description="Node types that prompts may use on all fleets of the tenant."
    )
    deny: TypePatterns = Field(default=(), description="Node types that the prompts may not use.")


class WorkKind(StrEnum):
    GRAPH_RUN = "graph_run"
    PIPELINE_RUN = "pipeline_run"
    TRIGGER = "trigger"


class WorkItemAnswer(Message):
    """A tenant's run or trigger in the operators' view."""

    kind: WorkKind
    id: UUID
    user_id: UUID
    status: str
    created_at: datetime


class TenantWork(Message):
    """Open graph runs and pipeline runs, and all triggers. At most the newest 200 of each kind."""

    items: list[WorkItemAnswer]


class StoppedWork(Message):
    graph_runs: int = 0
    pipeline_runs: int = 0
    triggers: int = Field(default=0, description="Number of paused triggers.")
    has_more: bool = Field(
        default=False, description="Whether there is more work to stop. If so, repeat the call."
    )
