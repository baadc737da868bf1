"""The timeline of a graph run and the comparison of two runs in the public API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from pydantic import Field

from comfyfleet.api.graphs import ExecutionStatus, GraphRunStatus
from comfyfleet.api.values import OPEN_ENUM, Response


class SpanKind(StrEnum):
    """The activity of an execution during a span, derived from its states."""

    RUNNING = "running"
    ASKING = "asking"  # waiting for a person
    QUEUED = "queued"  # waiting for a worker
    HELD = "held"  # waiting for its turn, because enough jobs of the run are queued already
    RETRIED = "retried"  # earlier attempts, and the time between them


# If executions of a node do several things at the same time, the first of these kinds is shown.
SPAN_KINDS = tuple(SpanKind)


class TimelineSpan(Response):
    kind: Annotated[SpanKind, OPEN_ENUM]
    start: float = Field(description="Seconds since the start of the run.")
    end: float


class KindSeconds(Response):
    """Seconds by kind, summed over all executions of a node."""

    running: float = 0.0
    asking: float = 0.0
    queued: float = 0.0
    held: float = 0.0
    retried: float = 0.0


class NodeTimeline(Response):
    """The times at which a node waited, ran and ended. All its executions are in one row."""

    id: str
    type: str
    name: str | None = Field(default=None, description="The node's workflow or effect, if any.")
    status: Annotated[ExecutionStatus, OPEN_ENUM]
    executions: int = Field(
        default=0, description="Number of executions that have started to wait or run."
    )
    expected: int = 0
    after: str | None = Field(
        default=None, description="The node that this node is waiting for, or waited for longest."
    )
    ready: float | None = Field(
        default=None, description="When all inputs of the node were decided for the first time."
    )
    ended: float | None = Field(default=None, description="When the node's last execution ended.")
    spans: tuple[TimelineSpan, ...] = ()
    seconds: KindSeconds = KindSeconds()
    longest: tuple[int, ...] | None = Field(
        default=None, description="The index of the execution that took longest."
    )
    is_critical: bool = Field(
        default=False, description="Whether the node is on the critical path."
    )


class CriticalStep(Response):
    """An execution on the critical path, from the end of the previous step to its own end."""

    node: str
    index: tuple[int, ...] = ()
    start: float
    end: float
    seconds: KindSeconds = KindSeconds()


class RunTimeline(Response):
    """The dependencies in a run, and the executions that determine its duration."""

    run_id: UUID
    name: str = ""
    status: Annotated[GraphRunStatus, OPEN_ENUM]
    started_at: datetime
    seconds: float = Field(description="Seconds until the end of the run, or until now.")
    nodes: tuple[NodeTimeline, ...] = Field(description="The nodes, in the order of the graph.")
    critical_path: tuple[CriticalStep, ...] = Field(
        default=(),
        description=(
            "Each step waited for the previous one. Only the longest steps are listed if there "
            "are many."
        ),
    )
    critical_total: int = Field(
        default=0, description="Total number of steps on the critical path."
    )


class CompareSection(StrEnum):
    RUN = "run"
    INPUTS = "inputs"
    NODES = "nodes"  # fields and properties in the graph
    CONNECTIONS = "connections"
    WORKFLOWS = "workflows"  # including versions
    STATES = "states"
    PRICES = "prices"
    TIMES = "times"
    OUTPUTS = "outputs"


class ComparedValue(Response):
    section: Annotated[CompareSection, OPEN_ENUM]
    name: str = Field(examples=["draw.properties.width"])
    a: str | None = Field(
        description="The value in the first run, as text. Long values are truncated. null if "
        "the run has no such value."
    )
    b: str | None
    is_same: bool


class ComparedRun(Response):
    id: UUID
    graph_id: UUID
    graph_version: int
    name: str = ""
    status: Annotated[GraphRunStatus, OPEN_ENUM]
    created_at: datetime
    is_expired: bool = Field(
        default=False,
        description="Whether the run's inputs, outputs and records have been deleted.",
    )


class RunComparison(Response):
    """Two runs side by side. Files are compared by content if it is known."""

    a: ComparedRun
    b: ComparedRun
    values: tuple[ComparedValue, ...]
    same: int = Field(default=0, description="Number of equal values.")
    different: int = 0
    left_out: int = Field(
        default=0, description="Number of values that are not listed because there are too many."
    )
