"""The events of a followed run, which are the same for every backend. They are frozen and intended
for `match`.

The order is: optionally Queued, then Started, Cached, any of NodeStarted, Progress, NodeDone,
NodeText, Preview and Blocked, and finally exactly one of Succeeded, Failed and Cancelled.
Reconnected may occur anywhere before the end. It means that events were lost, but the end is always
delivered.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Queued:
    """The run is waiting. `ahead` is the number of prompts before it, if the backend reports it."""

    run_id: str
    ahead: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    run_id: str


@dataclass(frozen=True, slots=True)
class Cached:
    """The nodes that don't run because their results are cached. There are often none."""

    run_id: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeStarted:
    """A node started. `display_id` is the node that the user sees. It differs from `node_id` if
    another node generated this one."""

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
    """A node finished. `output` is the output that the node displays, or None."""

    run_id: str
    node_id: str
    output: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class NodeText:
    """A line of text that a node shows while it runs."""

    run_id: str
    node_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Preview:
    run_id: str
    node_id: str | None
    content_type: str
    data: bytes
    # Metadata of the preview, such as the node that shows it.
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A node and all nodes that depend on it will not run. Other nodes continue, and the run may
    succeed."""

    run_id: str
    node_id: str
    node_type: str
    message: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    run_id: str


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The run succeeded. `reused` contains the nodes whose results came from an earlier run."""

    run_id: str
    reused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The run failed. `retryable` means that the backend is at fault, so another attempt may
    succeed."""

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
