"""The timeline of a graph run, and the comparison of two, in the public API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from pydantic import Field

from comfyfleet.api.graphs import ExecutionStatus, GraphRunStatus
from comfyfleet.api.values import OPEN_ENUM, Response


class SpanKind(StrEnum):
    """What an execution did for a while, by the states of executions."""

    RUNNING = "running"
    ASKING = "asking"  # it waited for a person
    QUEUED = "queued"  # it waited for a worker
    HELD = "held"  # it waited for its turn: enough jobs of the run were in the queue
    RETRIED = "retried"  # earlier attempts, and what was between them


# Where executions of one node do several things at a time, the first of these is shown.
SPAN_KINDS = tuple(SpanKind)


class TimelineSpan(Response):
    kind: Annotated[SpanKind, OPEN_ENUM]
    start: float = Field(description="Seconds since the run was started.")
    end: float


class KindSeconds(Response):
    """Seconds by kind, of all executions of a node together."""

    running: float = 0.0
    asking: float = 0.0
    queued: float = 0.0
    held: float = 0.0
    retried: float = 0.0


class NodeTimeline(Response):
    """When a node waited, ran and ended: all its executions in one row."""

    id: str
    type: str
    name: str | None = Field(default=None, description="Its workflow or effect, if it has one.")
    status: Annotated[ExecutionStatus, OPEN_ENUM]
    executions: int = Field(default=0, description="That have begun to wait or to run.")
    expected: int = 0
    after: str | None = Field(
        default=None, description="The node that it waits for, or that it waited for the longest."
    )
    ready: float | None = Field(
        default=None, description="When all its inputs were decided, for the first time."
    )
    ended: float | None = Field(default=None, description="When its last execution ended.")
    spans: tuple[TimelineSpan, ...] = ()
    seconds: KindSeconds = KindSeconds()
    longest: tuple[int, ...] | None = Field(
        default=None, description="The index of the execution that took the longest."
    )
    is_critical: bool = Field(default=False, description="It is on the critical path.")


class CriticalStep(Response):
    """An execution on the critical path: from the end of the one before it to its own end."""

    node: str
    index: tuple[int, ...] = ()
    start: float
    end: float
    seconds: KindSeconds = KindSeconds()


class RunTimeline(Response):
    """Who waited for what in a run, and which executions its duration consists of."""

    run_id: UUID
    name: str = ""
    status: Annotated[GraphRunStatus, OPEN_ENUM]
    started_at: datetime
    seconds: float = Field(description="To the end of the run, or until now.")
    nodes: tuple[NodeTimeline, ...] = Field(description="In the order of the graph.")
    critical_path: tuple[CriticalStep, ...] = Field(
        default=(), description="Each waited for the one before it; the longest, if there are many."
    )
    critical_total: int = Field(default=0, description="How many steps the critical path has.")


class CompareSection(StrEnum):
    RUN = "run"
    INPUTS = "inputs"
    NODES = "nodes"  # fields and properties, as the graph says
    CONNECTIONS = "connections"
    WORKFLOWS = "workflows"  # with their versions
    STATES = "states"
    PRICES = "prices"
    TIMES = "times"
    OUTPUTS = "outputs"


class ComparedValue(Response):
    section: Annotated[CompareSection, OPEN_ENUM]
    name: str = Field(examples=["draw.properties.width"])
    a: str | None = Field(description="As a text, cut if it is long; null: there is none.")
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
        default=False, description="What went in, came out and was recorded is gone."
    )


class RunComparison(Response):
    """Two runs side by side. Files are compared by their content, where that is known."""

    a: ComparedRun
    b: ComparedRun
    values: tuple[ComparedValue, ...]
    same: int = Field(default=0, description="How many values are the same.")
    different: int = 0
    left_out: int = Field(default=0, description="Values that were too many to be listed.")
