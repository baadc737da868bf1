"""A graph run: where each node stands. Frozen; `decide` makes the next one.

An execution is one node at one index: `()` for most, one number for each fan-out around the node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias
from uuid import NAMESPACE_URL, UUID, uuid5

from comfyfleet.graphs.buckets import Buckets
from comfyfleet.graphs.budget import NOTHING, Size

Index: TypeAlias = tuple[int, ...]
JOB_NAMES = uuid5(NAMESPACE_URL, "https://comfyfleet.dev/graph-jobs")


class Key(NamedTuple):
    """One execution of a node."""

    node: str
    at: Index = ()  # one number for each fan-out around the node

    def __str__(self) -> str:
        return self.node + "".join(f"[{number}]" for number in self.at)


class RunStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    WAITING_FOR_USER = "waiting_for_user"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)


class Status(StrEnum):
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


_ENDED = frozenset({Status.DONE, Status.SKIPPED, Status.FAILED, Status.CANCELLED})
_IN_FLIGHT = frozenset({Status.QUEUED, Status.RUNNING, Status.MOVING})


class Choice(StrEnum):
    """What a person may answer."""

    BACKEND = "backend"
    RETRY = "retry"
    SKIP = "skip"
    FAIL = "fail"


class Question(NamedTuple):
    message: str
    backends: tuple[str, ...] = ()  # that could take its place, the best first
    choices: tuple[Choice, ...] = tuple(Choice)


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one execution."""

    status: Status = Status.PENDING
    waiting: int = 0  # inputs that are not decided yet
    place: int = 0  # in its row, while it is held
    attempt: int = 0  # number of the last job; 0: none was started
    failures: int = 0  # since the run was started or retried
    moves: int = 0  # to other backends, or back
    chosen: str | None = None  # a backend that a person chose
    affinity: str | None = None  # what the job is bound to
    backend: str | None = None  # the worker that has it, or had it
    progress: float = 0.0  # 0 to 1
    current_step: str | None = None
    inputs: Mapping[str, Any] | None = None
    outputs: Mapping[str, Any] | None = None  # by port; a port that did not fire is absent
    error: str | None = None
    traceback: str | None = None
    notes: tuple[str, ...] = ()  # why it was skipped; what a condition missed
    question: Question | None = None
    queued_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


FRESH = Record()


class Tally(NamedTuple):
    """How the executions of one node stand; `expected` grows as fan-outs around it are decided."""

    expected: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def ended(self) -> int:
        return self.done + self.skipped + self.failed + self.cancelled

    def counted(self, status: Status, by: int = 1) -> "Tally":
        return self._replace(**{status.value: getattr(self, status.value) + by})


class RunError(NamedTuple):
    node: str
    at: Index
    backend: str | None
    message: str
    alternatives: tuple[str, ...] = ()  # backends that could take the place of a lost one


class Row(NamedTuple):
    """Of held executions with one priority: the numbers of the first and of the one after the last."""

    priority: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Run:
    id: UUID
    inputs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    status: RunStatus = RunStatus.PENDING
    records: Buckets[Key, Record] = field(default_factory=Buckets)
    tallies: Buckets[str, Tally] = field(default_factory=Buckets)
    held: Buckets[tuple[int, int], Key] = field(default_factory=Buckets)
    rows: tuple[Row, ...] = ()
    in_flight: frozenset[Key] = frozenset()
    asking: frozenset[Key] = frozenset()
    open_count: int = 0  # executions that have not ended
    tokens: int = 0  # of jobs that are in flight or done
    error: RunError | None = None
    outputs: Mapping[str, Any] | None = None
    # Of all that its executions took and gave; counted anew when it is read, so never compared.
    size: Size = field(default=NOTHING, compare=False)
    outputs_size: Size = field(default=NOTHING, compare=False)

    def record(self, key: Key) -> Record:
        found: Record = self.records.get(key, FRESH)
        return found

    def tally(self, node: str) -> Tally:
        found: Tally = self.tallies.get(node, Tally())
        return found


def job_id(run: UUID, key: Key, attempt: int) -> UUID:
    """The same job is never started twice, however often the same decision is carried out."""
    index = ",".join(map(str, key.at))
    return uuid5(JOB_NAMES, f"{run}/{key.node}/{index}/{attempt}")
