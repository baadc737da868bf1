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
    VIEWER = "viewer"  # reads
    OPERATOR = "operator"  # also acts
    OWNER = "owner"  # also operators, tenants' money, quotas and retention, and erasing

    def includes(self, other: "Role") -> bool:
        ranks = list(Role)
        return ranks.index(self) >= ranks.index(other)


class Fault(StrEnum):
    BALANCE = "balance"  # not the sum of the wallet's transactions
    NEGATIVE = "negative"
    NO_WALLET = "no_wallet"
    SETTLED_TWICE = "settled_twice"
    NOT_RESERVED = "not_reserved"  # settled, or said to be reserved, without a reservation
    AMOUNT = "amount"  # refunded or kept by the job otherwise than reserved
    NOT_SETTLED = "not_settled"  # the job has ended
    SETTLED_EARLY = "settled_early"  # the job goes on
    SETTLED_WRONGLY = "settled_wrongly"  # a success refunded, or a failure consumed


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
    format: str | None = Field(default=None, description="multiline, colour or mask")


# Whether a job may complete without a file and without a value.
OutputRule: TypeAlias = Literal["required", "optional"]
# How delivered files are marked as made by AI; `auto` decides by the prompt.
AiMark: TypeAlias = Literal["auto", "generated", "edited", "none"]


class RegisteredVersion(Message):
    slug: str
    version: int
    warnings: list[str] = Field(
        description="What could not be checked, and what no worker can run."
    )
    notes: list[str] = Field(default_factory=list, description="What will be known later.")


class WorkflowAnswer(Message):
    slug: str
    version: int = Field(description="The version for new jobs.")
    is_active: bool
    is_paused: bool
    required_capabilities: list[str]
    run_limit_seconds: int
    price_tokens: int | None = Field(
        description="Of a job in customers' graphs and pipelines; null: it is not offered there."
    )
    fleets: list[str] = Field(description="SLUG/STAGE of those that it is assigned to.")
    created_at: datetime
    output: OutputRule = Field(
        default="required", description="Whether a job may complete without a file and a value."
    )
    ai_mark: AiMark = Field(
        default="auto", description="How delivered files are marked as made by AI."
    )


class Workflows(Message):
    workflows: list[WorkflowAnswer]


class Model(Message):
    input: str = Field(description="Class.input; empty where the node type isn't known.")
    file: str


class WorkflowDetail(WorkflowAnswer):
    kind: str = Field(description="workflow or prompt: what its document is.")
    document_hash: str
    output_node_id: str | None
    properties: list[PropertyAnswer]
    node_types: list[str]
    models: list[Model]
    versions: list[int]
    registered_at: dict[int, datetime] = Field(description="When, by version.")


class AbleWorker(Message):
    worker_id: str
    fleet: str
    can_run: bool
    missing: dict[str, list[str]] = Field(description="node_types, models and capabilities.")


class AbleWorkers(Message):
    workers: list[AbleWorker] = Field(description="Workers that have reported what they have.")


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
    fleet: str = Field(description="SLUG/STAGE")
    state: str = Field(description="online, faulty, offline, draining, pending or revoked")
    problem: str | None = Field(default=None, description="Why a faulty worker can't work.")
    is_approved: bool
    is_draining: bool
    current_load: int = Field(
        description="Jobs that it holds now, at most `max_concurrency`: a further one waits there for its turn."
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
        description="When it was heard last, if it should have been heard since: it may be gone.",
    )
    created_at: datetime


class WorkerJob(Message):
    """A job that a worker holds."""

    job_id: UUID
    dispatch_id: int
    tenant_id: UUID
    workflow: str
    attempt: int
    started_at: datetime | None = Field(description="null: it is prepared.")
    percent: float | None
    node: str | None = Field(description="The node that runs.")


class WorkerSeen(WorkerAnswer):
    backend_kind: str | None = Field(description="Such as ComfyUI; null: not reported yet.")
    backend_version: str | None
    gpu: str | None
    gpu_memory_bytes: int | None
    reading: Reading | None = Field(description="The last metrics of its machine.")
    read_at: datetime | None = Field(description="When it told them.")
    jobs: list[WorkerJob] = Field(description="That it holds now.")


class Workers(Page):
    workers: list[WorkerSeen]
    next: str | None = Field(description="The next page: after=next; null: no more.")


class WorkerDetail(WorkerAnswer):
    workflows: list[str] = Field(description="What it may run, by its fleet's assignments.")
    backend: BackendFacts | None = Field(
        description="The backend's version, node types and models."
    )
    reading: Reading | None = Field(description="The last metrics of its machine.")


class ReadingAnswer(Message):
    at: datetime
    reading: Reading


class Readings(Message):
    readings: list[ReadingAnswer] = Field(description="The newest first.")


class Revoked(WorkerAnswer):
    requeued: int = Field(description="How many jobs were requeued.")
    hint: str = Field(description="What else may be needed to keep it out.")


class NewKey(Message):
    worker_id: str
    token: str = Field(description="The worker's new key, shown only once.")


class FleetSecret(Message):
    slug: str
    stage: str
    secret: str = Field(description="Workers join with it. It is shown only once.")
    join: str = Field(
        default="",
        description="The commands that join a worker beside its ComfyUI, secret included.",
    )


class FleetAnswer(Message):
    slug: str
    stage: str
    max_workers: int | None
    approval: str
    starts_within_seconds: int | None = Field(
        default=None, description="How long its machines take to start on demand."
    )
    workers: int = Field(description="How many have joined.")
    workflows: list[str] = Field(description="Slugs of the workflows assigned to it.")
    object_info_hash: str | None = Field(description="Of what its backends last reported.")
    created_at: datetime


class SwitchAnswer(Message):
    model: str = Field(description="A checkpoint or diffusion model.")
    seconds: float = Field(description="What a switch to it costs, at most.")
    run_seconds: float = Field(description="How long its runs take without a switch.")
    runs: int = Field(description="As many of each kind were compared.")
    is_free: bool = Field(
        description="Whether a switch costs so little that the order of arrival is kept."
    )


class FleetDetails(FleetAnswer):
    join: str = Field(
        default="", description="The commands that join a worker, for those who know the secret."
    )
    model_switches: list[SwitchAnswer] = Field(description="Learned from finished runs.")


class Fleets(Message):
    fleets: list[FleetAnswer]


class AssignmentAnswer(Message):
    slug: str
    stage: str
    workflows: list[str]
    added: list[str]
    removed: list[str]
    warnings: list[str] = Field(description="What could not be checked.")


class MadeTenant(Message):
    id: UUID
    name: str
    pool: str = Field(description="The tenant database where it is stored.")
    key: str = Field(description="The key of its first user, shown only once.")
    user_id: UUID = Field(description="Its first user.")


class Storage(Message):
    used_bytes: int = Field(description="Including announced uploads.")
    max_storage_bytes: int
    unnamed_objects: int | None = Field(
        default=None,
        description="Objects that no row names, if they were asked for. A sweep deletes them after a day.",
    )
    is_complete: bool = Field(
        default=True, description="False: only the first 100,000 objects were looked at."
    )


class TenantAnswer(Message):
    id: UUID
    name: str
    pool: str
    min_priority: int
    max_priority: int
    max_queued: int | None = Field(description="null: COMFYFLEET_MAX_QUEUED_PER_TENANT.")
    retention_days: int | None = Field(description="null: COMFYFLEET_RETENTION_DAYS.")
    max_storage_bytes: int | None = Field(
        description="null: COMFYFLEET_MAX_STORAGE_BYTES_PER_TENANT."
    )
    show_backends: bool | None = Field(description="null: COMFYFLEET_SHOW_BACKENDS.")
    erasing_at: datetime | None = Field(description="When deleting its private data started.")
    erased_at: datetime | None = Field(description="When only its ledger was left.")
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
    is_sound: bool = Field(description="Everything was verified, and adds up.")
    found: int = Field(description="How many drifts there are.")
    drifts: list[DriftAnswer] = Field(description=f"The first {SHOWN_DRIFTS_MAX:,} of them.")
    pools_left_out: list[str] = Field(
        description="Pools that are down: their ledgers were not verified."
    )


class UserAnswer(Message):
    id: UUID
    tenant_id: UUID
    email: str | None
    name: str | None
    is_active: bool
    created_at: datetime


class Users(Page):
    users: list[UserAnswer] = Field(description="The oldest first.")
    next: UUID | None = Field(description="The next page: after=next; null: no more.")


class AdminKeyAnswer(Message):
    id: UUID
    user_id: UUID
    name: str
    prefix: str = Field(description="Its first characters.")
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class AdminMadeKey(AdminKeyAnswer):
    key: str = Field(description="Shown only once.")


class AdminKeys(Message):
    keys: list[AdminKeyAnswer] = Field(description="The newest first, including revoked ones.")


class Balance(Message):
    balance: int


class AdminWalletAnswer(Balance):
    tenant_id: UUID
    user_id: UUID


class AdminWallets(Page):
    wallets: list[AdminWalletAnswer] = Field(description="By user.")
    next: UUID | None = Field(description="The next page: after=next; null: no more.")


class AdminTransactionAnswer(Message):
    id: int
    type: TransactionType
    amount: int = Field(description="What it adds to the balance.")
    job_id: UUID | None
    provider_transaction_id: str | None
    created_at: datetime


class AdminTransactions(Page):
    transactions: list[AdminTransactionAnswer] = Field(description="The newest first.")
    next: int | None = Field(description="The next page: before=next; null: no more.")


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
    next: int | None = Field(
        description="For older ones, repeat the call with `before` set to this."
    )


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
    filename: str = Field(description="As the backend named it.")
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
    prompt_id: str | None = Field(description="By which the ComfyUI client that sent it knows it.")
    provider_job_id: str | None = Field(
        description="The backend's id of the completed run: ComfyUI's `prompt_id`."
    )
    progress: Progress | None
    values: list[ShownValue]
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    dispatch: DispatchSeen | None
    why: str | None = Field(description="Why it isn't running.")
    person_needed_after: float | None = Field(
        default=None,
        description="Seconds after which only a person can help; null: it needs no help.",
    )
    required_action: str | None = Field(
        default=None, description="What that person must do; null: the job needs no help."
    )


class JobSeen(AdminJobFacts):
    outputs: list[OutputSeen]


class JobListed(Message):
    id: UUID
    tenant_id: UUID
    user_id: UUID | None
    workflow: str
    effect: str | None = Field(description="The slug of its effect.")
    status: JobStatus
    priority: int
    attempt: int
    worker_id: str | None = Field(description="Who has it, or had it last.")
    percent: float | None = Field(description="Of a job that runs, if its backend tells it.")
    dispatch_id: int | None
    reserved_tokens: int
    retry_of: UUID | None
    error: str | None
    submitted_at: datetime
    started_at: datetime | None
    completed_at: datetime | None


class JobPage(Page):
    jobs: list[JobListed] = Field(description="The newest first.")
    next: str | None = Field(description="The next page: after=next; null: no more.")
    pools_left_out: list[str] = Field(description="Pools that are down: their jobs are not listed.")


class AttemptSeen(Message):
    attempt: int
    lease_number: int
    worker_id: str
    started_at: datetime
    prompt: dict[str, Any] | None = Field(description="null: deleted after the retention time.")


class Attempts(Message):
    prompt: dict[str, Any] | None = Field(description="As sent to workers; null: deleted.")
    attempts: list[AttemptSeen] = Field(description="As sent, in the order of leases.")


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
    entries: list[EntryAnswer] = Field(description="The newest first.")
    next: int | None = Field(description="The next page: before=next; null: no more.")


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
    next: str | None = Field(description="Continue with after=next; null: all was read.")


# What operators set for prompts of ComfyUI's clients, for each fleet and each tenant.
PATTERNS_MAX = 500
FLEETS_MAX = 1_000
NODES_MAX = 2_000
NODES_LIMIT_MAX = 100_000
PROMPT_BYTES_MAX = 4 * 1024**2
PROMPT_BYTES_LIMIT_MAX = 64 * 1024**2
PROMPT_RUN_SECONDS = 3_600
PROMPT_RUN_SECONDS_MAX = 7 * 24 * 3_600
PROMPT_PRICE_MAX = 1_000_000_000

# As in a shell: * any characters, ? one, [abc] one of these. Case counts.
TypePattern: TypeAlias = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")]
TypePatterns: TypeAlias = Annotated[tuple[TypePattern, ...], Field(max_length=PATTERNS_MAX)]
FleetName: TypeAlias = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,59}/[a-z0-9][a-z0-9_-]{0,29}$")
]


class FleetPrompts(Message):
    """The terms on which a fleet runs prompts of no registered workflow."""

    is_open: bool = Field(default=True, description="Whether it takes such prompts.")
    price_tokens: int = Field(
        default=0, ge=0, le=PROMPT_PRICE_MAX, description="The price of each prompt, in tokens."
    )
    price_per_second: float | None = Field(
        default=None,
        gt=0,
        le=PROMPT_PRICE_MAX,
        allow_inf_nan=False,
        description="Instead of a fixed price: tokens for each second on the GPU.",
    )
    allow: TypePatterns = Field(
        default=(), description="Node types that may run although they are denied by default."
    )
    deny: TypePatterns = Field(
        default=(), description="Node types that may not run; stronger than any `allow`."
    )
    allows_unknown: bool = Field(
        default=False,
        description="Whether node types that are not ComfyUI's own may run, unless they take a path, "
        "a URL, code or a command.",
    )
    nodes_max: int = Field(
        default=NODES_MAX, ge=1, le=NODES_LIMIT_MAX, description="Most nodes of a prompt."
    )
    prompt_bytes_max: int = Field(
        default=PROMPT_BYTES_MAX,
        ge=1_000,
        le=PROMPT_BYTES_LIMIT_MAX,
        description="Most bytes of a prompt, as JSON.",
    )
    run_limit_seconds: int = Field(
        default=PROMPT_RUN_SECONDS,
        ge=1,
        le=PROMPT_RUN_SECONDS_MAX,
        description="A run that takes longer is stopped, and failed.",
    )
    passthrough: RoutePrefixes = Field(
        default=(),
        description="Prefixes of routes that are passed on to a worker's backend, such as /api/etn.",
    )
    in_order: bool = Field(
        default=True,
        description="Whether a client's WebSocket shows its prompts one after another, in the order in which "
        "they started, as with a single ComfyUI. If false, it shows all messages at once.",
    )

    @model_validator(mode="after")
    def _require_one_price(self) -> Self:
        if self.price_tokens and self.price_per_second is not None:
            raise ValueError("a price is fixed (price_tokens) or per second, not both")
        return self


class FleetPromptsAnswer(FleetPrompts):
    """The terms, with what the operator should know about them."""

    warning: str | None = Field(
        default=None,
        description="Set if prompts cost less than a registered workflow that the fleet runs.",
    )


class TenantPrompts(Message):
    """What a tenant's prompts may use, of what the fleets allow."""

    fleets: Annotated[tuple[FleetName, ...], Field(max_length=FLEETS_MAX)] | None = Field(
        default=None, description="As SLUG/STAGE; null: all fleets that take prompts."
    )
    allow: TypePatterns = Field(
        default=(), description="Node types that its prompts may use on any of its fleets."
    )
    deny: TypePatterns = Field(default=(), description="Node types that they may not use.")


class WorkKind(StrEnum):
    GRAPH_RUN = "graph_run"
    PIPELINE_RUN = "pipeline_run"
    TRIGGER = "trigger"


class WorkItemAnswer(Message):
    """A run or trigger of a tenant, as operators see it."""

    kind: WorkKind
    id: UUID
    user_id: UUID
    status: str
    created_at: datetime


class TenantWork(Message):
    """Open graph runs and pipeline runs, and all triggers; of each kind the newest 200."""

    items: list[WorkItemAnswer]


class StoppedWork(Message):
    graph_runs: int = 0
    pipeline_runs: int = 0
    triggers: int = Field(default=0, description="Triggers that were paused.")
    has_more: bool = Field(default=False, description="Repeat the call for the rest.")
