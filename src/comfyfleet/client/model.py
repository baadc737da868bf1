"""What the API answers, as frozen values: jobs, media, graphs, pipelines. Fields that a newer control plane adds
are let through."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from pydantic import Field

from comfyfleet.api.values import Message, ShownValue

JobStatus: TypeAlias = Literal["queued", "processing", "completed", "failed", "cancelled"]
MediaStatus: TypeAlias = Literal[
    "uploaded", "queued", "processing", "completed", "failed", "expired", "cancelled"
]
ENDED = frozenset({"completed", "failed", "cancelled"})


class Page(Message):
    """A part of a list."""

    next: UUID | int | str | None = None  # where the next part begins


class EffectInput(Message):
    """The media that an effect is applied to."""

    kind: str  # image, video, audio
    media_types: tuple[str, ...] = ()  # none named: all of the kind
    max_bytes: int | None = None


class Effect(Message):
    """What a customer picks. `properties` is a JSON Schema of what `apply` takes."""

    id: UUID
    slug: str
    title: str = ""
    description: str = ""
    preview_url: str | None = None
    price_tokens: int
    takes: EffectInput | None = None  # none: it is applied without media
    properties: dict[str, Any] = Field(default_factory=dict)
    typical_seconds: float | None = None


class EffectList(Page):
    effects: tuple[Effect, ...]
    next: str | None = None


class UploadTarget(Message):
    """Where the bytes of a file go."""

    method: str = "PUT"
    url: str
    headers: dict[str, str] = Field(default_factory=dict)


class Announced(Message):
    file_id: UUID
    upload: UploadTarget


class MediaResult(Message):
    """One job of a media, and its first output if it has any."""

    job_id: UUID
    status: JobStatus
    effect_id: UUID | None = None
    url: str | None = None
    content_type: str | None = None
    submitted_at: datetime | None = None


class Media(Message):
    """What was uploaded, and what became of it: its status is that of its latest job."""

    id: UUID
    status: MediaStatus
    kind: str | None = None
    progress: float | None = None  # percent
    estimated_seconds_left: float | None = None
    original_file_url: str | None = None
    processed_file_url: str | None = None
    processed_content_type: str | None = None
    results: tuple[MediaResult, ...] = ()  # of all its jobs, the newest first
    values: tuple[ShownValue, ...] = ()
    text: str | None = None
    error: str | None = None
    job_id: UUID | None = None
    created_at: datetime | None = None
    expired_at: datetime | None = None


class MediaPage(Page):
    videos: tuple[Media, ...]
    next: UUID | None = None


class Output(Message):
    name: str
    filename: str
    url: str  # good for some minutes; ask again for a fresh one
    size: int | None = None
    content_type: str = "application/octet-stream"


class Job(Message):
    """`values`: what its nodes showed; `text`: the texts of the first node that showed any."""

    id: UUID
    status: JobStatus
    effect_id: UUID | None = None
    video_id: UUID | None = None
    retry_of: UUID | None = None
    idempotency_key: str | None = None
    batch_id: UUID | None = None
    properties: dict[str, Any] = Field(default_factory=dict)
    progress: float | None = None  # percent
    price_tokens: int = 0  # reserved at submit; consumed on success, else refunded
    estimated_seconds_left: float | None = None
    outputs: tuple[Output, ...] = ()
    processed_file_url: str | None = None
    values: tuple[ShownValue, ...] = ()
    text: str | None = None
    error: str | None = None
    submitted_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class JobList(Page):
    jobs: tuple[Job, ...]
    next: UUID | None = None


class JobDiagnosis(Message):
    why: str


class Batch(Message):
    """All jobs of a batch in a few figures."""

    id: UUID
    effect_id: UUID
    total: int
    held: int = 0  # not yet admitted to the queue
    counts: dict[str, int] = Field(default_factory=dict)  # by status
    progress: float = 0.0  # percent
    is_ended: bool = False
    reserved_tokens: int = 0
    consumed_tokens: int = 0
    refunded_tokens: int = 0
    jobs: tuple[Job, ...] = ()
    next: int | None = None


class JobEvent(Message):
    """One thing that happened; `id` is where a reader goes on (progress has that of what came before)."""

    id: int
    kind: str  # status, progress, outputs
    data: dict[str, Any]

    @property
    def percent(self) -> float | None:
        value = self.data.get("percent") if self.kind == "progress" else None
        return float(value) if isinstance(value, int | float) else None

    @property
    def ends_job(self) -> bool:
        return self.kind == "status" and self.data.get("status") in ENDED


class Wallet(Message):
    balance: int


class Transaction(Message):
    id: int
    type: Literal["PAYMENT_CREDIT", "JOB_RESERVE", "JOB_CONSUME", "JOB_REFUND"]
    amount: int
    job_id: UUID | None = None
    created_at: datetime


class TransactionPage(Page):
    transactions: tuple[Transaction, ...]
    next: int | None = None


class Key(Message):
    """`key` is there once: as it is made."""

    id: UUID
    name: str
    prefix: str
    scopes: tuple[str, ...]
    key: str | None = None
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class KeyList(Message):
    keys: tuple[Key, ...]


class Webhook(Message):
    """`secret` is there once: as it is made. `verify_signature` takes it."""

    id: UUID
    url: str
    events: tuple[str, ...]
    is_active: bool = True
    secret: str | None = None
    created_at: datetime


class WebhookList(Message):
    webhooks: tuple[Webhook, ...]


class Delivery(Message):
    id: UUID
    job_id: UUID
    event: str
    status: Literal["pending", "delivered", "failed"]
    tries: int
    last_status: int | None = None
    last_error: str | None = None
    created_at: datetime
    ended_at: datetime | None = None


class DeliveryList(Message):
    deliveries: tuple[Delivery, ...]
    next: UUID | None = None


GraphRunStatus: TypeAlias = Literal[
    "pending", "running", "waiting_for_user", "completed", "failed", "cancelled"
]
Choice: TypeAlias = Literal["backend", "retry", "skip", "fail"]


class OfferProperty(Message):
    """What a node may set or connect."""

    name: str
    type: str
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    required: bool = False
    description: str = ""


class OfferedWorkflow(Message):
    """What a node of a graph, or a step of a pipeline, may name."""

    kind: Literal["effect", "workflow"]  # the field that names it
    name: str
    version: int
    price_tokens: int
    typical_seconds: float | None = None
    properties: tuple[OfferProperty, ...] = ()


class OfferList(Message):
    workflows: tuple[OfferedWorkflow, ...]


class GraphEntry(Message):
    """A graph as lists have it."""

    id: UUID
    user_id: UUID | None = None  # who made it
    name: str
    version: int  # the newest
    created_at: datetime


class GraphList(Page):
    graphs: tuple[GraphEntry, ...]
    next: UUID | None = None


class Graph(Message):
    id: UUID
    name: str
    version: int
    document: dict[str, Any]
    mermaid: str = ""


class GraphProblem(Message):
    code: str
    message: str
    node: str = ""
    port: str = ""


class Verdict(Message):
    """What is wrong with a graph: all of it at once."""

    valid: bool
    problems: tuple[GraphProblem, ...] = ()
    warnings: tuple[GraphProblem, ...] = ()  # what nobody could run just now


class Quote(Message):
    """What a run would cost, and how long it would take."""

    tokens_min: int
    tokens_max: int
    jobs_min: int
    jobs_max: int
    seconds_min: float
    seconds_max: float
    unknown_durations: tuple[str, ...] = ()  # workflows that nobody has timed yet
    warnings: tuple[GraphProblem, ...] = ()  # what nobody could run just now


class RunningNode(Message):
    node_id: str
    index: tuple[int, ...] = ()
    backend_id: str | None = None
    progress: float = 0.0  # 0 to 1
    current_step: str | None = None


class GraphProgress(Message):
    overall_percent: float = 0.0
    weighted_percent: float = 0.0  # by how long each node typically takes
    completed_nodes: int = 0
    total_nodes: int = 0
    running_nodes: tuple[RunningNode, ...] = ()


class Question(Message):
    """A node's backend is offline: somebody must choose."""

    node: str
    index: tuple[int, ...] = ()
    message: str
    backends: tuple[str, ...] = ()  # that could take its place, the best first
    choices: tuple[Choice, ...] = ()


class GraphRunError(Message):
    node: str
    index: tuple[int, ...] = ()
    backend: str | None = None
    message: str
    alternatives: tuple[str, ...] = ()


class NodeState(Message):
    id: str
    type: str
    workflow: str | None = None
    effect: str | None = None
    status: str
    expected: int = 0  # how often it runs, as far as that is known
    done: int = 0
    skipped: int = 0
    failed: int = 0
    cancelled: int = 0


class Execution(Message):
    """The record of one node, or of one node for one item."""

    node: str
    index: tuple[int, ...] = ()
    status: str
    attempts: int = 0
    backend: str | None = None
    progress: float = 0.0
    current_step: str | None = None
    inputs: dict[str, Any] | None = None
    outputs: dict[str, Any] | None = None
    has_values: bool = True  # False: they were left out of the answer, as it was too large
    error: str | None = None
    notes: tuple[str, ...] = ()
    queued_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


class GraphRunEntry(Message):
    """A run as lists have it."""

    id: UUID
    graph_id: UUID
    graph_version: int
    name: str = ""
    status: GraphRunStatus
    tokens: int = 0
    max_tokens: int | None = None
    error: str | None = None
    created_at: datetime
    ended_at: datetime | None = None


class GraphRunPage(Page):
    runs: tuple[GraphRunEntry, ...]
    next: UUID | None = None


class GraphFile(Message):
    """A file that a run gave out."""

    file_id: UUID
    filename: str
    mime_type: str = "application/octet-stream"
    url: str  # good for some minutes; ask again for a fresh one


class GraphRun(Message):
    id: UUID
    graph_id: UUID
    graph_version: int
    name: str = ""
    status: GraphRunStatus
    tokens: int = 0  # of jobs that are in flight or done
    max_tokens: int | None = None
    inputs: dict[str, Any] = Field(default_factory=dict)
    outputs: dict[str, Any] | None = None  # by output node
    error: GraphRunError | None = None
    questions: tuple[Question, ...] = ()
    progress: GraphProgress = GraphProgress()
    nodes: tuple[NodeState, ...] = ()
    executions: tuple[Execution, ...] = ()
    executions_total: int = 0
    created_at: datetime
    ended_at: datetime | None = None
    is_expired: bool = False  # what went in, came out and was recorded is gone

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def files(self) -> tuple[GraphFile, ...]:
        """All that it gave out and that is still there, each once."""
        found = {each["file_id"]: each for each in _files_in(self.outputs)}
        return tuple(GraphFile.model_validate(each) for each in found.values())


class GraphEvent(GraphProgress):
    """How a run stands; `end` is the last that is told of it."""

    kind: str  # progress, end
    run_id: UUID
    status: GraphRunStatus
    nodes: tuple[NodeState, ...] = ()
    questions: tuple[Question, ...] = ()
    error: str | None = None

    @property
    def ends_run(self) -> bool:
        return self.status in ENDED


def _files_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "file_id" in value and "url" in value:
            yield value
        for inner in value.values():
            yield from _files_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _files_in(inner)


PipelineRunStatus: TypeAlias = Literal["active", "paused", "cancelled"]
CandidateStatus: TypeAlias = Literal["active", "approved", "rejected", "winner"]
Judgement: TypeAlias = Literal["approve", "reject", "winner"]
# Reasons that time alone does not change.
_RESTING = frozenset(
    {
        *("complete", "failed", "waiting_for_judgement", "candidates_limit", "tokens_limit"),
        *("time_up", "cancelled", "paused"),
    }
)


class Pipeline(Message):
    id: UUID
    name: str
    document: dict[str, Any]
    created_at: datetime


class PipelineList(Page):
    pipelines: tuple[Pipeline, ...]
    next: UUID | None = None


class PipelineLimits(Message):
    """None is no limit."""

    candidates: int | None = None
    tokens: int | None = None
    concurrent_jobs: int = 1
    until: datetime | None = None
    bytes: int | None = None  # of its files; then it is paused


class StepBoard(Message):
    name: str
    wanted: int  # as things stand: for the parents that there are now
    made: int
    approved: int
    rejected: int
    in_flight: int
    failed: int


class PipelineRun(Message):
    """Its board; lists have it without the figures from `pipeline` on."""

    id: UUID
    pipeline_id: UUID
    status: PipelineRunStatus
    pause_reason: str | None = None
    reason: str | None = None  # why nothing was submitted at the last look
    trouble: str | None = None  # what stands in the way of the next job
    target_folder: str
    base_candidates: int
    variables: dict[str, Any] = Field(default_factory=dict)
    limits: PipelineLimits = PipelineLimits()
    tokens: int = 0  # reserved and consumed
    created_at: datetime
    changed_at: datetime
    files_removed_at: datetime | None = None
    pipeline: str = ""  # its name
    steps: tuple[StepBoard, ...] = ()
    jobs: dict[str, int] = Field(default_factory=dict)  # by state
    queued: int = 0
    success_rate: float | None = None
    bytes: int = 0
    seconds_left: float | None = None

    @property
    def is_resting(self) -> bool:
        """Nothing is left that it could do by itself, as things stand."""
        is_busy = any(each.in_flight for each in self.steps)
        return not is_busy and (self.status != "active" or self.reason in _RESTING)


class PipelineRunList(Page):
    runs: tuple[PipelineRun, ...]
    next: UUID | None = None


class Candidate(Message):
    id: UUID
    step: int  # its number; 0 is the base
    parent: UUID | None = None
    status: CandidateStatus
    score: float
    child_count: int = 0
    seed: int | None = None
    properties: dict[str, Any] = Field(default_factory=dict)  # what it was made with
    job_id: UUID | None = None
    output_index: int = 0
    path: str = ""  # its name in listings and exports
    content_type: str = ""
    size: int = 0
    url: str | None = None  # good for some minutes; none once the file was removed
    text: str | None = None  # what its job showed, beside a picture or in its place
    created_at: datetime


class CandidateList(Page):
    candidates: tuple[Candidate, ...]
    next: UUID | None = None


class CandidateBranch(Message):
    """A candidate with all that came of it."""

    id: UUID
    step: int
    status: CandidateStatus
    score: float
    children: tuple["CandidateBranch", ...] = ()


class CandidateTree(Message):
    tree: tuple[CandidateBranch, ...]


class Pair(Message):
    """Two candidates that are worth comparing; none where there are not two."""

    candidates: tuple[Candidate, ...] = ()


class Vote(Message):
    id: UUID  # to undo it by
    scores: dict[UUID, float] = Field(default_factory=dict)


class PipelineFailure(Message):
    job_id: UUID
    step: str
    parent: UUID | None = None
    error: str | None = None
    ended_at: datetime | None = None


class PipelineFailures(Message):
    failures: tuple[PipelineFailure, ...]


class RetriedJobIds(Message):
    jobs: tuple[UUID, ...]


class PipelineEvent(Message):
    """One thing that happened; `id` is where a reader goes on."""

    id: int
    kind: str  # started, submitted, candidates, job_failed, approved, voted, paused …
    data: dict[str, Any]
