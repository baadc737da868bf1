"""Graphs and graph runs in the public API, and the workflows that graphs and pipelines may name."""

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import Field

from comfyfleet.api.values import OPEN_ENUM, Message, Page, Response


class RunErrorCode(StrEnum):
    """Errors after which only a person can help."""

    NO_TOKENS = "no_tokens"
    NO_BACKEND = "no_backend"
    WITHDRAWN = "withdrawn"


class GraphRunStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    WAITING_FOR_USER = "waiting_for_user"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in (GraphRunStatus.COMPLETED, GraphRunStatus.FAILED, GraphRunStatus.CANCELLED)


class ExecutionStatus(StrEnum):
    PENDING = "pending"  # waits for its inputs to be decided
    HELD = "held"  # may start; enough jobs of the run are in the queue already
    QUEUED = "queued"
    RUNNING = "running"
    MOVING = "moving"  # its backend went away: its job is being cancelled, to start elsewhere
    ASKING = "asking"  # a person must choose
    STOPPING = "stopping"  # the run is over: its job was told to stop, and has not answered
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_ended(self) -> bool:
        return self in _ENDED

    @property
    def is_in_flight(self) -> bool:
        return self in _IN_FLIGHT


_ENDED = frozenset(
    {
        ExecutionStatus.DONE,
        ExecutionStatus.SKIPPED,
        ExecutionStatus.FAILED,
        ExecutionStatus.CANCELLED,
    }
)
_IN_FLIGHT = frozenset({ExecutionStatus.QUEUED, ExecutionStatus.RUNNING, ExecutionStatus.MOVING})


class Choice(StrEnum):
    """What a user may answer to a question."""

    BACKEND = "backend"
    RETRY = "retry"
    SKIP = "skip"
    FAIL = "fail"
    APPROVE = "approve"  # of a node that asks for approval, as is `reject`
    REJECT = "reject"


class OfferedProperty(Response):
    """A property that a node may set or connect."""

    name: str
    type: str = Field(examples=["image"])
    default: Any = Field(default=None, description="null: none is known.")
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    required: bool = Field(default=False, description="It must be set, or connected.")
    description: str = ""


class WorkflowOffer(Response):
    kind: Literal["effect", "workflow"] = Field(description="The field that names it.")
    name: str
    version: int = Field(description="The one that a node gets if it names none.")
    price_tokens: int
    typical_seconds: float | None = Field(default=None, description="null: not measured yet.")
    properties: tuple[OfferedProperty, ...] = ()


class WorkflowOffers(Response):
    workflows: tuple[WorkflowOffer, ...] = Field(description="Effects first, by name.")


class ProblemSeen(Response):
    code: str = Field(description="Stable.", examples=["unknown_workflow"])
    message: str
    node: str = ""
    port: str = ""


class QuoteAnswer(Response):
    """The estimated price and duration of a run."""

    tokens_min: int
    tokens_max: int
    jobs_min: int
    jobs_max: int
    seconds_min: float
    seconds_max: float
    executions_min: int = Field(
        default=0,
        description="Nodes that run or are skipped, each counted once per item and round.",
    )
    executions_max: int = 0
    executions_limit: int | None = Field(
        default=None, description="A run that would have more executions is refused, or fails."
    )
    unknown_durations: tuple[str, ...] = Field(
        default=(), description="Workflows without a measured duration."
    )
    warnings: tuple[ProblemSeen, ...] = Field(
        default=(), description="Nodes that no worker can run now."
    )


class Verdict(Response):
    """Whether a graph is valid, and all its problems."""

    valid: bool
    problems: tuple[ProblemSeen, ...] = Field(
        default=(), description="All of them, each with its node and port."
    )
    warnings: tuple[ProblemSeen, ...] = Field(
        default=(), description="Nodes that no worker can run now."
    )
    document: dict[str, Any] | None = Field(
        default=None, description="What was given as a text, as it was read."
    )
    quote: QuoteAnswer | None = Field(
        default=None, description="What a run would cost, of a graph without problems."
    )


class GraphAnswer(Response):
    """A stored graph: its document and version."""

    id: UUID
    name: str
    version: int
    document: dict[str, Any]
    mermaid: str = Field(default="", description="A Mermaid diagram of it.")


class GraphPort(Response):
    name: str
    type: str = Field(description="As in `image`, `text[]`, `result` or `any`.")
    required: bool = Field(default=False, description="Of an input.")


class GraphPorts(Response):
    """What a graph takes and gives, as ports of a node that has it inside."""

    inputs: tuple[GraphPort, ...]
    outputs: tuple[GraphPort, ...]


class GraphSummary(Response):
    id: UUID
    user_id: UUID = Field(description="Its creator, who alone may change it.")
    name: str
    version: int = Field(description="The newest.")
    created_at: datetime


class GraphPage(Page):
    graphs: tuple[GraphSummary, ...] = Field(description="The newest first.")
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


# Where backends aren't shown (COMFYFLEET_SHOW_BACKENDS), only what the graph, a retry or an answer asked for.
Bound = Annotated[
    str | None,
    Field(
        description="The backend that runs it, where backends are shown; otherwise the one that it is bound to."
    ),
]


class RunningNodeSeen(Response):
    node_id: str
    index: tuple[int, ...] = ()
    backend_id: Bound = None
    progress: float = Field(default=0.0, description="0 to 1.")
    current_step: str | None = None


class ProgressSeen(Response):
    overall_percent: float = 0.0
    weighted_percent: float = Field(
        default=0.0, description="By how long each node typically takes."
    )
    completed_nodes: int = 0
    total_nodes: int = 0
    running_nodes: tuple[RunningNodeSeen, ...] = Field(
        default=(), description="Nodes that are running on a backend."
    )


class QuestionSeen(Response):
    """A question of a run: whose backend is offline, or whose node asks for approval."""

    node: str
    index: tuple[int, ...] = ()
    message: str = Field(examples=["Backend worker:gpu-7 is offline"])
    backends: tuple[str, ...] = Field(
        default=(), description="Backends that could replace it, the best first."
    )
    choices: tuple[Choice, ...] = ()
    deadline: datetime | None = Field(
        default=None, description="When it is answered without you, as the graph says."
    )
    pick_from: int | None = Field(
        default=None, description="Of how many some may be picked; null: nothing to pick."
    )
    price_tokens: int | None = Field(
        default=None, description="What the node costs on any backend; null: it runs no job."
    )


class ErrorSeen(Response):
    node: str
    index: tuple[int, ...] = ()
    backend: Bound = None
    message: str
    alternatives: tuple[str, ...] = Field(
        default=(), description="For one that is bound to a backend."
    )
    code: Annotated[RunErrorCode, OPEN_ENUM] | None = Field(
        default=None, description="Of an error that no retry solves; null for all others."
    )
    action: str | None = Field(
        default=None,
        description="What a person must do before a new run can succeed; null where that isn't known.",
    )


class NodeSeen(Response):
    id: str
    type: str
    workflow: str | None = Field(default=None, description="Of a node that names one.")
    effect: str | None = Field(default=None, description="Of a node that names one.")
    status: Annotated[ExecutionStatus, OPEN_ENUM]
    expected: int = Field(default=0, description="How often it runs, as far as that is known.")
    done: int = 0
    skipped: int = 0
    failed: int = 0
    cancelled: int = 0


class ReusedFrom(Response):
    """Where a result came from that was there already, and so was not run again."""

    job_id: UUID | None = Field(
        default=None, description="null: it was no job that made it, but a person's answer."
    )
    run_id: UUID | None = Field(default=None, description="The graph run that made it, if one did.")


class ExecutionSeen(Response):
    node: str
    index: tuple[int, ...] = ()
    status: Annotated[ExecutionStatus, OPEN_ENUM]
    attempts: int = 0
    job_id: UUID | None = Field(default=None, description="Of its last attempt.")
    why: str | None = Field(default=None, description="Why it waits, if no worker can run it now.")
    backend: Bound = None
    progress: float = 0.0
    current_step: str | None = None
    inputs: dict[str, Any] | None = None
    outputs: dict[str, Any] | None = None
    has_values: bool = Field(
        default=True,
        description="False: inputs and outputs were left out because the response would be too large.",
    )
    error: str | None = None
    traceback: str | None = Field(
        default=None, description="Of a failed node, where backends are shown."
    )
    notes: tuple[str, ...] = ()
    reused_from: ReusedFrom | None = Field(
        default=None, description="Its result was there already: it has no job, and cost nothing."
    )
    queued_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


class RerunOf(Response):
    """The run whose results were taken, and what is different from it."""

    run_id: UUID
    node: str | None = Field(
        default=None,
        description="From which on everything ran again; null: only what had no result, or changed.",
    )
    inputs: tuple[str, ...] = Field(default=(), description="The inputs that were given anew.")
    set: dict[str, Any] = Field(
        default_factory=dict, description="Properties that were set for this run, as node.property."
    )


class GraphRunSummary(Response):
    id: UUID
    graph_id: UUID
    graph_version: int
    name: str = Field(default="", description="Of its graph, as that is called now.")
    status: GraphRunStatus
    tokens: int = Field(default=0, description="Of jobs that are in flight or done.")
    max_tokens: int | None = None
    error: str | None = Field(default=None, description="Why it failed, for people.")
    created_at: datetime
    ended_at: datetime | None = None
    rerun_of: UUID | None = Field(default=None, description="The run whose results it has taken.")
    paused_at: datetime | None = Field(
        default=None, description="It starts no jobs until it is resumed; null: it isn't paused."
    )


class GraphRunSummaries(Page):
    runs: tuple[GraphRunSummary, ...] = Field(description="The newest first.")
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


class GraphFile(Message):
    """An output file of a run."""

    file_id: UUID
    filename: str
    mime_type: str = "application/octet-stream"
    url: str  # good for some minutes; ask again for a fresh one


class GraphRunAnswer(Response):
    """A run of a graph: its status, nodes and results."""

    id: UUID
    graph_id: UUID
    graph_version: int
    name: str = ""
    status: GraphRunStatus
    tokens: int = Field(default=0, description="Of jobs that are in flight or done.")
    max_tokens: int | None = None
    inputs: dict[str, Any] = Field(default_factory=dict)
    outputs: dict[str, Any] | None = Field(
        default=None, description="By output node; files with fresh URLs."
    )
    error: ErrorSeen | None = None
    paused_at: datetime | None = Field(
        default=None, description="It starts no jobs until it is resumed; null: it isn't paused."
    )
    questions: tuple[QuestionSeen, ...] = ()
    progress: ProgressSeen = ProgressSeen()
    nodes: tuple[NodeSeen, ...] = ()
    executions: tuple[ExecutionSeen, ...] = ()
    executions_total: int = 0
    document: dict[str, Any] | None = Field(
        default=None, description="The graph as it was run, where it was asked for."
    )
    created_at: datetime
    ended_at: datetime | None = None
    is_expired: bool = Field(
        default=False,
        description="Its retention time is over: inputs, outputs and records were deleted.",
    )
    rerun_of: RerunOf | None = Field(
        default=None, description="The run whose results it has taken, if it is a rerun."
    )

    @property
    def has_ended(self) -> bool:
        return self.status.is_over

    @property
    def files(self) -> tuple[GraphFile, ...]:
        """All output files that still exist, without duplicates."""
        found = {each["file_id"]: each for each in _files_in(self.outputs)}
        return tuple(GraphFile.model_validate(each) for each in found.values())


def _files_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "file_id" in value and "url" in value:
            yield value
        for inner in value.values():
            yield from _files_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _files_in(inner)


class GraphEvent(ProgressSeen):
    """The progress of a run; the last event has the kind `end`."""

    kind: str  # progress, end
    run_id: UUID
    status: GraphRunStatus
    nodes: tuple[NodeSeen, ...] = ()
    questions: tuple[QuestionSeen, ...] = ()
    error: str | None = None
    paused_at: datetime | None = None

    @property
    def ends_run(self) -> bool:
        return self.status.is_over


class TriggerKind(StrEnum):
    SCHEDULE = "schedule"
    WEBHOOK = "webhook"


class FiringCause(StrEnum):
    SCHEDULE = "schedule"
    CATCH_UP = "catch_up"  # the newest moment that was missed
    WEBHOOK = "webhook"
    HAND = "hand"


class FiringStatus(StrEnum):
    STARTING = "starting"
    STARTED = "started"
    REFUSED = "refused"
    MISSED = "missed"  # moments of a schedule at which no control plane ran


class TriggerAnswer(Response):
    """What starts runs of a graph or pipeline by itself."""

    id: UUID
    name: str
    kind: Annotated[TriggerKind, OPEN_ENUM]
    graph_id: UUID | None = None
    version: int | None = Field(default=None, description="null: the newest.")
    pipeline_id: UUID | None = None
    base_candidates: int | None = Field(default=None, description="Of a pipeline's runs.")
    inputs: dict[str, Any] = Field(default_factory=dict)
    cron: str | None = Field(default=None, examples=["30 7 * * MON-FRI"])
    timezone: str = Field(default="UTC", examples=["Europe/Berlin"])
    catch_up: bool = False
    tokens_per_day: int
    max_tokens: int | None = Field(default=None, description="Of one run.")
    used_tokens: int = Field(
        default=0, description="Today, in its time zone; open runs count with all they may spend."
    )
    is_paused: bool = False
    is_spent: bool = Field(
        default=False,
        description="The tokens of its day are used up; it starts nothing until the next.",
    )
    next_at: datetime | None = Field(default=None, description="Of a schedule that is not paused.")
    missed: int = Field(default=0, description="Moments at which no control plane ran.")
    missed_at: datetime | None = Field(default=None, description="The newest of them.")
    path: str | None = Field(
        default=None, description="Where webhooks are sent to.", examples=["/hooks/6a1f…"]
    )
    created_at: datetime


class MadeTrigger(TriggerAnswer):
    secret: str | None = Field(
        default=None, description="Of a webhook. Shown only once.", examples=["hook_5f…"]
    )


class ScheduleMoments(Response):
    """When a schedule would fire next."""

    moments: tuple[datetime, ...]


class Triggers(Page):
    triggers: tuple[TriggerAnswer, ...] = Field(description="The newest first.")
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )


class FiringAnswer(Response):
    """One firing of a trigger: the run that it started, or why there is none."""

    id: UUID
    trigger_id: UUID
    cause: Annotated[FiringCause, OPEN_ENUM]
    status: Annotated[FiringStatus, OPEN_ENUM]
    planned_at: datetime | None = Field(default=None, description="Of a schedule.")
    run_id: UUID | None = None
    run_status: str | None = Field(default=None, description="How the run stands.")
    max_tokens: int = Field(default=0, description="What the run may spend.")
    error_code: str | None = None
    error: str | None = None
    missed: int = Field(default=0, description="How many moments were missed.")
    created_at: datetime
    ended_at: datetime | None = None


class Firings(Page):
    firings: tuple[FiringAnswer, ...] = Field(description="The newest first.")
    next: UUID | None = Field(
        default=None, description="The next page: before=next; null: no more."
    )
