"""Graphs and graph runs in the public API, and the workflows that graphs and pipelines may use."""

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import Field

from comfyfleet.api.values import OPEN_ENUM, Message, Page, Response


class RunErrorCode(StrEnum):
    """Errors that only a person can resolve."""

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
    PENDING = "pending"  # waits until all its inputs are decided
    HELD = "held"  # may start, but enough jobs of the run are queued already
    QUEUED = "queued"
    RUNNING = "running"
    # the backend went offline; the job is being cancelled in order to start on a different one
    MOVING = "moving"
    ASKING = "asking"  # waiting for a user's choice
    STOPPING = "stopping"  # the run is over, but its job hasn't confirmed the stop request yet
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
    """The possible answers to a question."""

    BACKEND = "backend"
    RETRY = "retry"
    SKIP = "skip"
    FAIL = "fail"
    APPROVE = "approve"  # for an approval node, like `reject`
    REJECT = "reject"


class OfferedProperty(Response):
    """A property that a node can set or connect."""

    name: str
    type: str = Field(examples=["image"])
    default: Any = Field(default=None, description="null if no default is known.")
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    required: bool = Field(
        default=False, description="Whether the property must be set or connected."
    )
    description: str = ""


class WorkflowOffer(Response):
    kind: Literal["effect", "workflow"] = Field(
        description="The field of a graph's node in which the name is set."
    )
    name: str
    version: int = Field(description="The version that a node gets if it doesn't specify one.")
    price_tokens: int
    typical_seconds: float | None = Field(default=None, description="null if not measured yet.")
    properties: tuple[OfferedProperty, ...] = ()


class WorkflowOffers(Response):
    workflows: tuple[WorkflowOffer, ...] = Field(description="Effects first, sorted by name.")


class ProblemSeen(Response):
    code: str = Field(description="A stable code for programs.", examples=["unknown_workflow"])
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
        description="Nodes that run or are skipped, counted once per item and round.",
    )
    executions_max: int = 0
    executions_limit: int | None = Field(
        default=None, description="A run with more executions is refused or fails."
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
        default=(), description="All problems with their nodes and ports."
    )
    warnings: tuple[ProblemSeen, ...] = Field(
        default=(), description="Nodes that no worker can run now."
    )
    document: dict[str, Any] | None = Field(
        default=None, description="The parsed document, if a text was sent."
    )
    quote: QuoteAnswer | None = Field(
        default=None, description="The cost of a run, for a graph without problems."
    )


class GraphAnswer(Response):
    """A stored graph with its document and version."""

    id: UUID
    name: str
    version: int
    document: dict[str, Any]
    mermaid: str = Field(default="", description="The graph as a Mermaid diagram.")


class GraphPort(Response):
    name: str
    type: str = Field(description="For example `image`, `text[]`, `result` or `any`.")
    required: bool = Field(
        default=False, description="Whether a value is required. Only set for inputs."
    )


class GraphPorts(Response):
    """The inputs and outputs of a graph, which are ports when the graph is used as a node."""

    inputs: tuple[GraphPort, ...]
    outputs: tuple[GraphPort, ...]


class GraphSummary(Response):
    id: UUID
    user_id: UUID = Field(description="The graph's creator. Only this user can change the graph.")
    name: str
    version: int = Field(description="The newest version.")
    created_at: datetime


class GraphPage(Page):
    graphs: tuple[GraphSummary, ...] = Field(description="Newest first.")
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


# If backends aren't shown (COMFYFLEET_SHOW_BACKENDS), this is only the backend that the graph, a
# retry or an answer requested.
Bound = Annotated[
    str | None,
    Field(
        description=(
            "The backend that runs it, if backends are shown. Otherwise, the backend that it is "
            "bound to."
        )
    ),
]


class RunningNodeSeen(Response):
    node_id: str
    index: tuple[int, ...] = ()
    backend_id: Bound = None
    progress: float = Field(default=0.0, description="Progress from 0 to 1.")
    current_step: str | None = None


class ProgressSeen(Response):
    overall_percent: float = 0.0
    weighted_percent: float = Field(
        default=0.0,
        description="Progress in percent, weighted by the typical duration of each node.",
    )
    completed_nodes: int = 0
    total_nodes: int = 0
    running_nodes: tuple[RunningNodeSeen, ...] = Field(
        default=(), description="Nodes that are running on a backend."
    )


class QuestionSeen(Response):
    """A question of a run, because a node's backend is offline or a node requires approval."""

    node: str
    index: tuple[int, ...] = ()
    message: str = Field(examples=["Backend worker:gpu-7 is offline"])
    backends: tuple[str, ...] = Field(
        default=(), description="Backends that could replace the offline one, best first."
    )
    choices: tuple[Choice, ...] = ()
    deadline: datetime | None = Field(
        default=None,
        description="When the question is answered automatically, according to the graph.",
    )
    pick_from: int | None = Field(
        default=None, description="Number of items to pick from. null if there is nothing to pick."
    )
    price_tokens: int | None = Field(
        default=None, description="The node's price on any backend. null if it runs no job."
    )


class ErrorSeen(Response):
    node: str
    index: tuple[int, ...] = ()
    backend: Bound = None
    message: str
    alternatives: tuple[str, ...] = Field(
        default=(), description="Alternative backends, for a node that is bound to a backend."
    )
    code: Annotated[RunErrorCode, OPEN_ENUM] | None = Field(
        default=None,
        description="Code of an error that a retry can't resolve. null for all other errors.",
    )
    action: str | None = Field(
        default=None,
        description="What a person must do before a new run can succeed. null if this is unknown.",
    )


class NodeSeen(Response):
    id: str
    type: str
    workflow: str | None = Field(default=None, description="The node's workflow, if it runs one.")
    effect: str | None = Field(default=None, description="The node's effect, if it runs one.")
    status: Annotated[ExecutionStatus, OPEN_ENUM]
    expected: int = Field(default=0, description="Number of executions, as far as it is known.")
    done: int = 0
    skipped: int = 0
    failed: int = 0
    cancelled: int = 0


class ReusedFrom(Response):
    """The origin of a result that was reused instead of running the node again."""

    job_id: UUID | None = Field(
        default=None, description="null if the result was a user's answer instead of a job's."
    )
    run_id: UUID | None = Field(
        default=None, description="The graph run that created the result, if any."
    )


class ExecutionSeen(Response):
    node: str
    index: tuple[int, ...] = ()
    status: Annotated[ExecutionStatus, OPEN_ENUM]
    attempts: int = 0
    job_id: UUID | None = Field(default=None, description="The job of the last attempt.")
    why: str | None = Field(
        default=None, description="Why the execution is waiting, if no worker can run it now."
    )
    backend: Bound = None
    progress: float = 0.0
    current_step: str | None = None
    inputs: dict[str, Any] | None = None
    outputs: dict[str, Any] | None = None
    has_values: bool = Field(
        default=True,
        description="false if inputs and outputs were omitted because the response would be too "
        "large.",
    )
    error: str | None = None
    traceback: str | None = Field(
        default=None, description="Traceback of a failed node, if backends are shown."
    )
    notes: tuple[str, ...] = ()
    reused_from: ReusedFrom | None = Field(
        default=None,
        description="Set if an existing result was reused. In this case, the execution has no job "
        "and cost nothing.",
    )
    queued_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


class RerunOf(Response):
    """The run whose results were reused, and the differences from it."""

    run_id: UUID
    node: str | None = Field(
        default=None,
        description=(
            "The node from which everything ran again. null if only changed nodes and nodes "
            "without a result ran again."
        ),
    )
    inputs: tuple[str, ...] = Field(default=(), description="The inputs with new values.")
    set: dict[str, Any] = Field(
        default_factory=dict, description="Properties that were set for this run, as node.property."
    )


class GraphRunSummary(Response):
    id: UUID
    graph_id: UUID
    graph_version: int
    name: str = Field(default="", description="The current name of the run's graph.")
    status: GraphRunStatus
    tokens: int = Field(default=0, description="Tokens of jobs that are in flight or done.")
    max_tokens: int | None = None
    error: str | None = Field(
        default=None, description="Why the run failed, as a message for users."
    )
    created_at: datetime
    ended_at: datetime | None = None
    rerun_of: UUID | None = Field(
        default=None,
        description="The earlier run whose results were reused, if this run is a rerun.",
    )
    paused_at: datetime | None = Field(
        default=None,
        description=(
            "When the run was paused. A paused run starts no jobs until it is resumed. "
            "null if the run isn't paused."
        ),
    )


class GraphRunSummaries(Page):
    runs: tuple[GraphRunSummary, ...] = Field(description="Newest first.")
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


class GraphFile(Message):
    """An output file of a run."""

    file_id: UUID
    filename: str
    mime_type: str = "application/octet-stream"
    url: str  # valid for a few minutes; repeat the call to get a new URL


class GraphRunAnswer(Response):
    """A graph run with its status, nodes and results."""

    id: UUID
    graph_id: UUID
    graph_version: int
    name: str = ""
    status: GraphRunStatus
    tokens: int = Field(default=0, description="Tokens of jobs that are in flight or done.")
    max_tokens: int | None = None
    inputs: dict[str, Any] = Field(default_factory=dict)
    outputs: dict[str, Any] | None = Field(
        default=None,
        description="The results by output node. Each response contains new URLs for the files.",
    )
    error: ErrorSeen | None = None
    paused_at: datetime | None = Field(
        default=None,
        description=(
            "When the run was paused. A paused run starts no jobs until it is resumed. "
            "null if the run isn't paused."
        ),
    )
    questions: tuple[QuestionSeen, ...] = ()
    progress: ProgressSeen = ProgressSeen()
    nodes: tuple[NodeSeen, ...] = ()
    executions: tuple[ExecutionSeen, ...] = ()
    executions_total: int = 0
    document: dict[str, Any] | None = Field(
        default=None, description="The graph that was run, if requested."
    )
    created_at: datetime
    ended_at: datetime | None = None
    is_expired: bool = Field(
        default=False,
        description=(
            "Whether the run's retention period is over, so that inputs, outputs and records were "
            "deleted."
        ),
    )
    rerun_of: RerunOf | None = Field(
        default=None,
        description="The earlier run whose results were reused, if this run is a rerun.",
    )

    @property
    def has_ended(self) -> bool:
        return self.status.is_over

    @property
    def files(self) -> tuple[GraphFile, ...]:
        """Returns all output files that still exist, without duplicates."""
        files = {file["file_id"]: file for file in _files_in(self.outputs)}
        return tuple(GraphFile.model_validate(file) for file in files.values())


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
    """The progress of a run. The last event has the kind `end`."""

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
    CATCH_UP = "catch_up"  # for the newest missed time
    WEBHOOK = "webhook"
    HAND = "hand"


class FiringStatus(StrEnum):
    STARTING = "starting"
    STARTED = "started"
    REFUSED = "refused"
    MISSED = "missed"  # scheduled times that passed while no control plane was running


class TriggerAnswer(Response):
    """A schedule or incoming webhook that starts runs of a graph or pipeline."""

    id: UUID
    name: str
    kind: Annotated[TriggerKind, OPEN_ENUM]
    graph_id: UUID | None = None
    version: int | None = Field(default=None, description="null means the newest version.")
    pipeline_id: UUID | None = None
    base_candidates: int | None = Field(
        default=None, description="Number of base candidates in each run of a pipeline."
    )
    inputs: dict[str, Any] = Field(default_factory=dict)
    cron: str | None = Field(default=None, examples=["30 7 * * MON-FRI"])
    timezone: str = Field(default="UTC", examples=["Europe/Berlin"])
    catch_up: bool = False
    tokens_per_day: int
    max_tokens: int | None = Field(default=None, description="Maximum tokens of one run.")
    used_tokens: int = Field(
        default=0,
        description="Tokens used today, in the trigger's time zone. Open runs count with their "
        "maximum.",
    )
    is_paused: bool = False
    is_spent: bool = Field(
        default=False,
        description="Whether the trigger's daily tokens are used up. If so, it starts no runs "
        "until the next day.",
    )
    next_at: datetime | None = Field(
        default=None, description="The next scheduled time, for a schedule that is not paused."
    )
    missed: int = Field(
        default=0, description="Number of scheduled times at which no control plane was running."
    )
    missed_at: datetime | None = Field(default=None, description="The newest missed time.")
    path: str | None = Field(
        default=None, description="The path for incoming webhooks.", examples=["/hooks/6a1f…"]
    )
    created_at: datetime


class MadeTrigger(TriggerAnswer):
    secret: str | None = Field(
        default=None, description="The secret of a webhook. Shown only once.", examples=["hook_5f…"]
    )


class ScheduleMoments(Response):
    """The next times of a schedule."""

    moments: tuple[datetime, ...]


class Triggers(Page):
    triggers: tuple[TriggerAnswer, ...] = Field(description="Newest first.")
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )


class FiringAnswer(Response):
    """A firing of a trigger, with its run or the reason why it started no run."""

    id: UUID
    trigger_id: UUID
    cause: Annotated[FiringCause, OPEN_ENUM]
    status: Annotated[FiringStatus, OPEN_ENUM]
    planned_at: datetime | None = Field(
        default=None, description="The scheduled time, for a schedule."
    )
    run_id: UUID | None = None
    run_status: str | None = Field(default=None, description="The status of the run.")
    max_tokens: int = Field(default=0, description="Maximum tokens of the run.")
    error_code: str | None = None
    error: str | None = None
    missed: int = Field(default=0, description="Number of missed times.")
    created_at: datetime
    ended_at: datetime | None = None


class Firings(Page):
    firings: tuple[FiringAnswer, ...] = Field(description="Newest first.")
    next: UUID | None = Field(
        default=None,
        description="Pass this as `before` to get the next page. null on the last page.",
    )
