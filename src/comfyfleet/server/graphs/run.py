"""The immutable model of a graph run: its executions, the events that it receives, and the actions
that it requests.

An execution is a node at an index. The index is `()` for most nodes. Otherwise, it has one number
for each fan-out around the node. Records are stored in a persistent map, so that a change doesn't
copy a run with ten thousand jobs. The size of all values is limited, because a few merges in a row
could otherwise exhaust the memory."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias, TypeVar
from uuid import NAMESPACE_URL, UUID, uuid5

from comfyfleet.api.graph_model import Fallback, WorkflowNode
from comfyfleet.api.graphs import Choice as Choice
from comfyfleet.api.graphs import ExecutionStatus as ExecutionStatus
from comfyfleet.api.graphs import GraphRunStatus as GraphRunStatus
from comfyfleet.api.graphs import RunErrorCode as RunErrorCode
from comfyfleet.server.graphs.catalogue import BackendNeed, BackendState, EffectTerms, WorkflowFacts

BUCKETS = 256
K = TypeVar("K")
V = TypeVar("V")


class PersistentMap(Mapping[K, V]):
    __slots__ = ("_buckets", "_count")

    def __init__(self, entries: Mapping[K, V] | None = None) -> None:
        self._buckets: tuple[dict[K, V], ...] = ({},) * BUCKETS
        self._count = 0
        if entries:
            filled = self.changed(entries)
            self._buckets, self._count = filled._buckets, filled._count

    def changed(self, entries: Mapping[K, V], gone: Iterable[K] = ()) -> "PersistentMap[K, V]":
        """Returns a map with these entries added or replaced, and without the keys in `gone`."""
        fresh: dict[int, dict[K, V]] = {}
        for key, value in entries.items():
            self._fresh(fresh, key)[key] = value
        for key in gone:
            self._fresh(fresh, key).pop(key, None)
        buckets = list(self._buckets)
        count = self._count
        for number, bucket in fresh.items():
            count += len(bucket) - len(buckets[number])
            buckets[number] = bucket
        result: PersistentMap[K, V] = PersistentMap()
        result._buckets, result._count = tuple(buckets), count
        return result

    def _fresh(self, fresh: dict[int, dict[K, V]], key: K) -> dict[K, V]:
        number = hash(key) % BUCKETS
        if number not in fresh:
            fresh[number] = dict(self._buckets[number])
        return fresh[number]

    def __getitem__(self, key: K) -> V:
        return self._buckets[hash(key) % BUCKETS][key]

    def get(self, key: K, default: Any = None) -> Any:
        return self._buckets[hash(key) % BUCKETS].get(key, default)

    def __iter__(self) -> Iterator[K]:
        """Iterates over the keys in no particular order."""
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return self._count

    def __hash__(self) -> int:
        raise TypeError("a PersistentMap isn't hashable, because its values may be lists")

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)!r})"


SCALAR_CHARACTERS = 8  # Assumed size in characters of a value that isn't a string.
NUMBERS = (int, float)


class ValueSize(NamedTuple):
    values: int = 0
    characters: int = 0

    def plus(self, other: "ValueSize") -> "ValueSize":
        return ValueSize(self.values + other.values, self.characters + other.characters)

    def fits(self, most: "ValueSize") -> bool:
        return self.values <= most.values and self.characters <= most.characters

    def within(self, most: "ValueSize") -> "ValueSize":
        """Returns how much of a limit remains after this size is subtracted from it."""
        return ValueSize(
            max(0, most.values - self.values), max(0, most.characters - self.characters)
        )


NO_SIZE = ValueSize()
# Maximum size of a node's inputs and outputs.
VALUE_SIZE_MAX = ValueSize(values=300_000, characters=8 * 1024**2)
# Maximum size of all inputs and outputs in a run. This is enough for 10,000 items with an image
# each that pass through an input, a fan-out, jobs, a merge and an output.
RUN_SIZE_MAX = ValueSize(values=1_200_000, characters=48 * 1024**2)
# Maximum size of all output nodes together, because a response contains all of their values.
OUTPUTS_SIZE_MAX = VALUE_SIZE_MAX
# Maximum size of the executions in one response.
ANSWER_SIZE_MAX = ValueSize(values=50_000, characters=2 * 1024**2)


def size_of(value: Any, most: ValueSize = VALUE_SIZE_MAX) -> ValueSize:
    """Measures a value. Stops as soon as it exceeds `most`."""
    values, characters, waiting = 0, 0, [value]
    while waiting and values <= most.values and characters <= most.characters:
        current = waiting.pop()
        values += 1
        if isinstance(current, str):
            characters += len(current)
        # This check comes before the slow check for Mapping.
        elif current is None or isinstance(current, NUMBERS):
            characters += SCALAR_CHARACTERS
        elif isinstance(current, dict | Mapping):
            characters += sum(len(str(name)) for name in current)
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)
        else:
            characters += SCALAR_CHARACTERS
    return ValueSize(values, characters)


def too_large_message(most: ValueSize) -> str:
    return f"more than {most.values:,} values or {most.characters:,} characters"


Index: TypeAlias = tuple[int, ...]
JOB_NAMES = uuid5(NAMESPACE_URL, "https://comfyfleet.dev/graph-jobs")


class ExecutionKey(NamedTuple):
    """Identifies one execution of a node."""

    node: str
    at: Index = ()  # One number for each fan-out around the node.

    def __str__(self) -> str:
        return self.node + "".join(f"[{number}]" for number in self.at)


BACKEND_CHOICES = (Choice.BACKEND, Choice.RETRY, Choice.SKIP, Choice.FAIL)
APPROVAL_CHOICES = (Choice.APPROVE, Choice.REJECT, Choice.FAIL)


class UserQuestion(NamedTuple):
    message: str
    backends: tuple[str, ...] = ()  # Possible replacements, best first.
    choices: tuple[Choice, ...] = BACKEND_CHOICES
    deadline: datetime | None = None
    pick_from: int | None = None  # Number of items to pick from. None means nothing to pick.


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """The state of an execution."""

    status: ExecutionStatus = ExecutionStatus.PENDING
    waiting: int = 0  # Number of sources that aren't decided yet.
    place: int = 0  # Position in its lane while the execution is held.
    attempt: int = 0  # Number of the last job. 0 means that no job was started.
    failures: int = 0  # Number of failures since the run was started or retried.
    moves: int = 0  # How often the execution was moved to another backend.
    chosen: str | None = None  # The backend that a person chose.
    affinity: str | None = None  # The backend that the job is bound to.
    backend: str | None = None  # The worker that runs or ran the job.
    progress: float = 0.0  # From 0 to 1.
    current_step: str | None = None
    inputs: Mapping[str, Any] | None = None
    outputs: Mapping[str, Any] | None = None  # Values by port. Ports that didn't fire are missing.
    error: str | None = None
    traceback: str | None = None
    notes: tuple[str, ...] = ()  # The reason for a skip, or missing data in a condition.
    question: UserQuestion | None = None
    reused_from: Mapping[str, Any] | None = None  # The job_id and, if known, the run_id.
    asked_at: datetime | None = None  # Time of the last question.
    answered_at: datetime | None = None
    queued_at: datetime | None = None  # When the last job was queued.
    started_at: datetime | None = None
    ended_at: datetime | None = None
    # For an ended execution, the position of its end in the order of notifications. For a waiting
    # execution, `waiting` already accounts for all ends with lower numbers.
    end_number: int = field(default=0, compare=False)


NEW_RECORD = ExecutionRecord()


class ExecutionCounts(NamedTuple):
    """The numbers of a node's executions by status. `expected` increases when fan-outs around the
    node are decided."""

    expected: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def ended(self) -> int:
        return self.done + self.skipped + self.failed + self.cancelled

    def counted(self, status: ExecutionStatus, by: int = 1) -> "ExecutionCounts":
        return self._replace(**{status.value: getattr(self, status.value) + by})


class RunError(NamedTuple):
    node: str
    at: Index
    backend: str | None
    message: str
    alternatives: tuple[str, ...] = ()  # Backends that could replace a lost one.
    code: RunErrorCode | None = None


class HeldRange(NamedTuple):
    """A range of held executions with the same priority and lane, from the number `first` up to,
    but not including, `end`.

    A lane is a map with a concurrency limit. All other executions share a lane with an empty
    name."""

    priority: int
    lane: str
    first: int
    end: int


HeldPlace: TypeAlias = tuple[int, str, int]  # Priority, lane and number.
START = ExecutionKey("")  # The start of a run. Its end starts all nodes without sources.


class Notifying(NamedTuple):
    """The progress of notifying the successors of an ended execution."""

    source: ExecutionKey
    number: int  # The `end_number` of the source.
    target: int = 0  # The position of the successor that is being notified.
    last: Index | None = None  # The last index of that successor that was notified.


@dataclass(frozen=True, slots=True)
class GraphRunState:
    id: UUID
    inputs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    status: GraphRunStatus = GraphRunStatus.PENDING
    records: PersistentMap[ExecutionKey, ExecutionRecord] = field(default_factory=PersistentMap)
    tallies: PersistentMap[str, ExecutionCounts] = field(default_factory=PersistentMap)
    held: PersistentMap[HeldPlace, ExecutionKey] = field(default_factory=PersistentMap)
    rows: tuple[HeldRange, ...] = ()
    in_flight: frozenset[ExecutionKey] = frozenset()
    asking: frozenset[ExecutionKey] = frozenset()
    open_count: int = 0  # Number of executions that haven't ended.
    tokens: int = 0  # Price of all jobs in flight and all completed jobs.
    error: RunError | None = None
    outputs: Mapping[str, Any] | None = None
    deadline_at: datetime | None = None  # The run fails if it hasn't ended by this time.
    paused_at: datetime | None = (
        None  # Set while the run is paused. No jobs start until it resumes.
    )
    # The size of the inputs and outputs of all executions. It is calculated when the run is read,
    # so it is never compared.
    size: ValueSize = field(default=NO_SIZE, compare=False)
    outputs_size: ValueSize = field(default=NO_SIZE, compare=False)
    # The point where a decision stopped early: ended executions whose successors weren't notified,
    # and an execution whose successors were only partly notified.
    unnotified: tuple[ExecutionKey, ...] = ()
    notifying: Notifying | None = None
    next_end: int = field(default=0, compare=False)  # The first `end_number` in `unnotified`.
    decision_steps: int = field(default=0, compare=False)  # Expression steps in this decision.

    @property
    def is_cut(self) -> bool:
        """Checks whether the last decision stopped early."""
        return bool(self.unnotified) or self.notifying is not None

    def record(self, key: ExecutionKey) -> ExecutionRecord:
        record: ExecutionRecord = self.records.get(key, NEW_RECORD)
        return record

    def tally(self, node: str) -> ExecutionCounts:
        tally: ExecutionCounts = self.tallies.get(node, ExecutionCounts())
        return tally


def job_id(run: UUID, key: ExecutionKey, attempt: int) -> UUID:
    """Returns the id of an attempt's job. The id is deterministic, so a repeated decision doesn't
    start a second job."""
    index = ",".join(map(str, key.at))
    return uuid5(JOB_NAMES, f"{run}/{key.node}/{index}/{attempt}")


class PlacedOn(NamedTuple):
    affinity: str | None  # None means that any worker may run the job.


class NoBackend(NamedTuple):
    message: str
    alternatives: tuple[str, ...] = ()


Placement: TypeAlias = PlacedOn | NoBackend | UserQuestion


def place_job(
    node: WorkflowNode,
    workflow: WorkflowFacts,
    need: BackendNeed,
    backends: Iterable[BackendState],
    chosen: str | None = None,
    *,
    is_unserved: bool = False,
) -> Placement:
    """Places a job on a backend. A job without affinity waits in the queue, because a worker that
    can run it may come online.

    `is_unserved` means that the job has already waited too long for such a worker."""
    affinity = chosen or node.backend_affinity
    backends = tuple(backends)
    if affinity is None and is_unserved:
        message = no_backend_message(workflow)
        asks = node.fallback_strategy == Fallback.ASK_USER
        return UserQuestion(message, ()) if asks else NoBackend(message)
    if affinity is None or is_online(affinity, need, backends):
        return PlacedOn(affinity)
    is_there = any(backend.is_online and backend.is_target_of(affinity) for backend in backends)
    message = f"Backend {affinity} is offline"
    if is_there:
        message = f"Backend {affinity} can't run {workflow.name}"
    others = alternatives(need, backends)
    if node.fallback_strategy == Fallback.ASK_USER:
        return UserQuestion(message, others)
    if node.fallback_strategy == Fallback.NONE:
        return NoBackend(message, others)
    if not others:
        missing = ", ".join(sorted(workflow.required_capabilities)) or workflow.slug
        return NoBackend(f"No online backend has these capabilities: {missing}")
    return PlacedOn(others[0])


def is_self_hosted(workflow: WorkflowFacts) -> bool:
    """Checks whether the workflow's jobs run on self-hosted workers. For a cloud, it is unknown
    which workflows it can run."""
    return workflow.effect is None or workflow.effect.provider == "self_hosted"


NO_BACKEND = "NoBackendAvailable"


def no_backend_message(workflow: WorkflowFacts) -> str:
    needed = ", ".join(sorted(workflow.required_capabilities))
    which = f" (it requires {needed})" if needed else ""
    return f"{NO_BACKEND}: no backend can run {workflow.name}{which} at the moment"


def is_online(affinity: str, need: BackendNeed, backends: Iterable[BackendState]) -> bool:
    return any(_can_run(backend, need) and backend.is_target_of(affinity) for backend in backends)


def alternatives(need: BackendNeed, backends: Iterable[BackendState]) -> tuple[str, ...]:
    """Returns the names of the online backends that can run a job. Backends with shorter queues
    come first, and then those with more free GPU memory."""
    able = [backend for backend in backends if _can_run(backend, need)]
    able.sort(
        key=lambda backend: (backend.queue_depth, -backend.free_gpu_memory_bytes, backend.worker_id)
    )
    return tuple(backend.name for backend in able)


def _can_run(backend: BackendState, need: BackendNeed) -> bool:
    return backend.is_online and backend.is_able(need)


# The revision of an expired run. Its plan and records were deleted, so it can't change again.
EXPIRED_REVISION = -1


@dataclass(frozen=True, slots=True)
class StoredGraph:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    name: str
    version: int
    document: Mapping[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class RunRow:
    """A stored run without its executions."""

    id: UUID
    tenant_id: UUID
    user_id: UUID
    graph_id: UUID
    graph_version: int
    snapshot: Mapping[str, Any]
    inputs: Mapping[str, Any]
    max_tokens: int | None
    created_at: datetime
    status: GraphRunStatus = GraphRunStatus.PENDING
    revision: int = 0
    tokens: int = 0
    error: RunError | None = None
    outputs: Mapping[str, Any] | None = None
    changed_at: datetime | None = None
    ended_at: datetime | None = None
    deadline_at: datetime | None = None
    paused_at: datetime | None = None
    rerun_of: UUID | None = None  # The run whose results were reused.
    rerun: Mapping[str, Any] | None = None  # The request for the rerun: start node and changes.
    cut: Mapping[str, Any] | None = None  # Set if the last decision stopped early.

    @property
    def is_expired(self) -> bool:
        return self.revision == EXPIRED_REVISION

    @property
    def run(self) -> GraphRunState:
        return GraphRunState(
            self.id,
            self.inputs,
            self.max_tokens,
            self.status,
            tokens=self.tokens,
            error=self.error,
            outputs=self.outputs,
            deadline_at=self.deadline_at,
            paused_at=self.paused_at,
        )


@dataclass(frozen=True, slots=True)
class GraphListItem:
    """A graph in a list, without its document."""

    id: UUID
    user_id: UUID
    name: str
    version: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class RunListItem:
    """A run in a list, without its snapshot, inputs, outputs and executions."""

    id: UUID
    graph_id: UUID
    graph_version: int
    name: str  # The current name of the graph.
    status: GraphRunStatus
    tokens: int
    max_tokens: int | None
    error: RunError | None
    created_at: datetime
    ended_at: datetime | None
    rerun_of: UUID | None = None
    paused_at: datetime | None = None


IN_QUEUE_MAX = 5
EXECUTIONS_MAX = 100_000  # Default maximum of executions per run.


@dataclass(frozen=True, slots=True)
class Environment:
    """The time, the backends and the limits on which a decision depends."""

    now: datetime
    backends: tuple[BackendState, ...] = ()
    in_queue_max: int = IN_QUEUE_MAX  # Maximum concurrent jobs of a run.
    priority_min: int = -1_000  # The lowest priority that the tenant may use.
    priority_max: int = 1_000
    # Recently online backends, each with the time when it was last online, and the time when this
    # recording began.
    lately_online: tuple[tuple[BackendState, datetime], ...] = ()
    watched_since: datetime | None = None
    no_backend_seconds: float | None = None  # None means that jobs wait without a limit.
    executions_max: int = EXECUTIONS_MAX  # Maximum number of executions per run.
    # Seconds to wait for a backend, by workflow, if a fleet starts machines on demand.
    starts_within: Mapping[str, int] = field(default_factory=dict)

    def is_unserved(self, slug: str, need: BackendNeed, since: datetime | None) -> bool:
        """Checks whether a job that has waited since `since` has been without a backend for too
        long."""
        if self.no_backend_seconds is None or self.watched_since is None or since is None:
            return False
        if any(backend.is_online and backend.is_able(need) for backend in self.backends):
            return False
        served = (at for backend, at in self.lately_online if backend.is_able(need))
        last = max(since, self.watched_since, *served)
        seconds = self.starts_within.get(slug, self.no_backend_seconds)
        return (self.now - last).total_seconds() >= seconds


class FailureCause(StrEnum):
    ERROR = "error"
    TIMEOUT = "timeout"
    BACKEND_LOST = "backend_lost"
    NO_TOKENS = "no_tokens"
    WITHDRAWN = "withdrawn"  # The workflow accepts no new jobs.
    REFUSED = "refused"  # The job was refused, and a retry would be refused as well.


@dataclass(frozen=True, slots=True)
class JobStarted:
    key: ExecutionKey
    attempt: int
    backend: str
    at: datetime | None = None  # None means the current time.


@dataclass(frozen=True, slots=True)
class JobWaiting:
    """The job is queued again, because its worker was lost or returned it."""

    key: ExecutionKey
    attempt: int


@dataclass(frozen=True, slots=True)
class JobProgressed:
    key: ExecutionKey
    attempt: int
    progress: float  # From 0 to 1.
    current_step: str | None = None


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job has completed. `output` is the result of `apply.job_output`."""

    key: ExecutionKey
    attempt: int
    output: Mapping[str, Any]
    backend: str | None = None
    # Set if an existing result was reused, so that no job is charged.
    reused_from: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class JobFailed:
    key: ExecutionKey
    attempt: int
    message: str
    cause: FailureCause = FailureCause.ERROR
    backend: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class JobCancelled:
    key: ExecutionKey
    attempt: int


@dataclass(frozen=True, slots=True)
class QuestionAnswered:
    key: ExecutionKey
    choice: Choice
    backend: str | None = None
    picked: tuple[int, ...] | None = None  # The items picked in an approval. None means all items.


Event: TypeAlias = (
    JobStarted | JobWaiting | JobProgressed | JobDone | JobFailed | JobCancelled | QuestionAnswered
)


@dataclass(frozen=True, slots=True)
class StartJob:
    key: ExecutionKey
    job_id: UUID
    attempt: int
    workflow: str
    version: int
    properties: Mapping[str, Any]
    backend_affinity: str | None = None
    priority: int = 0
    timeout_seconds: int | None = None
    price_tokens: int = 0
    effect: EffectTerms | None = None
    reuse: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """The properties in the form that jobs accept, with file ids instead of file references."""
        return {
            name: value["file_id"] if isinstance(value, Mapping) and "file_id" in value else value
            for name, value in self.properties.items()
        }


@dataclass(frozen=True, slots=True)
class CancelJob:
    key: ExecutionKey
    job_id: UUID
    attempt: int


@dataclass(frozen=True, slots=True)
class SkipNode:
    key: ExecutionKey
    reason: str


@dataclass(frozen=True, slots=True)
class FailNode:
    """The node failed permanently, and the run continues without it."""

    key: ExecutionKey
    message: str


@dataclass(frozen=True, slots=True)
class AskUser:
    key: ExecutionKey
    question: UserQuestion


@dataclass(frozen=True, slots=True)
class FinishRun:
    outputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailRun:
    error: RunError


@dataclass(frozen=True, slots=True)
class CancelRun:
    pass


Action: TypeAlias = (
    StartJob | CancelJob | SkipNode | FailNode | AskUser | FinishRun | FailRun | CancelRun
)
