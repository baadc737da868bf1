"""What the API answers about graphs and their runs, as frozen values."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from pydantic import Field

from comfyfleet.client.model import ENDED, Page
from comfyfleet.wire.files import Message

GraphRunStatus: TypeAlias = Literal[
    "pending", "running", "waiting_for_user", "completed", "failed", "cancelled"
]
Choice: TypeAlias = Literal["backend", "retry", "skip", "fail"]


class OfferedProperty(Message):
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


class WorkflowOffer(Message):
    """What a node of a graph, or a step of a pipeline, may name."""

    kind: Literal["effect", "workflow"]  # the field that names it
    name: str
    version: int
    price_tokens: int
    typical_seconds: float | None = None
    properties: tuple[OfferedProperty, ...] = ()


class WorkflowOffers(Message):
    workflows: tuple[WorkflowOffer, ...]


class GraphEntry(Message):
    """A graph as lists have it."""

    id: UUID
    user_id: UUID | None = None  # who made it
    name: str
    version: int  # the newest
    created_at: datetime


class GraphPage(Page):
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
