"""What a followed run tells, whichever backend runs it. Frozen, made for `match`.

Order: Queued?, Started, Cached, then any of NodeStarted, Progress, NodeDone, NodeText, Preview and
Blocked, at last exactly one of Succeeded, Failed, Cancelled. Reconnected may come anywhere before
the last: what happened in between was not heard, only the end is certain to be told.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Queued:
    """`ahead` is how many prompts run before ours, where the backend tells."""

    run_id: str
    ahead: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    run_id: str


@dataclass(frozen=True, slots=True)
class Cached:
    """Nodes that don't run because their results are kept; often none."""

    run_id: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeStarted:
    """`display_id` is the node that a user sees; a node made by another node has its own id."""

    run_id: str
    node_id: str
    display_id: str


@dataclass(frozen=True, slots=True)
class Progress:
    run_id: str
    node_id: str
    done: float
    total: float


@dataclass(frozen=True, slots=True)
class NodeDone:
    """`output` is what the node shows its user, if anything."""

    run_id: str
    node_id: str
    output: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class NodeText:
    """A line of text that a node shows while it works."""

    run_id: str
    node_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Preview:
    run_id: str
    node_id: str | None
    content_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Blocked:
    """A node and all that depends on it will not run; the rest goes on and may succeed."""

    run_id: str
    node_id: str
    node_type: str
    message: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    run_id: str


@dataclass(frozen=True, slots=True)
class Succeeded:
    """`reused` names the nodes whose results were kept from an earlier run."""

    run_id: str
    reused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """`retryable`: the backend's fault, another attempt may succeed."""

    run_id: str
    message: str
    node_id: str | None = None
    node_type: str | None = None
    exception_type: str | None = None
    traceback: tuple[str, ...] = ()
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Cancelled:
    run_id: str
    node_id: str | None = None


End: TypeAlias = Succeeded | Failed | Cancelled
Event: TypeAlias = (
    Queued
    | Started
    | Cached
    | NodeStarted
    | Progress
    | NodeDone
    | NodeText
    | Preview
    | Blocked
    | Reconnected
    | End
)
