"""A graph run: its executions, the events it receives and the actions it asks for. Frozen and pure.

An execution is one node at one index: `()` for most, one number for each fan-out around the node. Records lie
in a persistent map, so that a run of ten thousand jobs is not copied for each change; values are counted
against a budget, as a few merges in a row could stand for more than any memory holds."""

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
        """Returns a map with these entries added or replaced, and without those that are gone."""
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
        made: PersistentMap[K, V] = PersistentMap()
        made._buckets, made._count = tuple(buckets), count
        return made

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
        """Iterates in no particular order; callers that need one must sort."""
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return self._count

    def __hash__(self) -> int:
        raise TypeError("a mapping of values that may be lists has no hash")

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)!r})"


SCALAR_CHARACTERS = 8  # of what is no text
NUMBERS = (int, float)


class ValueSize(NamedTuple):
    values: int = 0
    characters: int = 0

    def plus(self, other: "ValueSize") -> "ValueSize":
        return ValueSize(self.values + other.values, self.characters + other.characters)

    def fits(self, most: "ValueSize") -> bool:
        return self.values <= most.values and self.characters <= most.characters

    def within(self, most: "ValueSize") -> "ValueSize":
        """Returns what is left of a limit when this much is used."""
        return ValueSize(
            max(0, most.values - self.values), max(0, most.characters - self.characters)
        )


NO_SIZE = ValueSize()
VALUE_SIZE_MAX = ValueSize(values=300_000, characters=8 * 1024**2)  # what one node takes and gives
# Enough for 10,000 items with a picture each: given, distributed, drawn, merged and put out.
RUN_SIZE_MAX = ValueSize(values=1_200_000, characters=48 * 1024**2)
OUTPUTS_SIZE_MAX = VALUE_SIZE_MAX  # of all output nodes together: the answer has them whole
ANSWER_SIZE_MAX = ValueSize(
    values=50_000, characters=2 * 1024**2
)  # of the executions in one answer


def size_of(value: Any, most: ValueSize = VALUE_SIZE_MAX) -> ValueSize:
    """Measures a value; stops as soon as it is larger than `most`."""
    values, characters, waiting = 0, 0, [value]
    while waiting and values <= most.values and characters <= most.characters:
        current = waiting.pop()
        values += 1
        if isinstance(current, str):
            characters += len(current)
        elif current is None or isinstance(current, NUMBERS):  # before Mapping, a slow check
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
    """One execution of a node."""

    node: str
    at: Index = ()  # one number for each fan-out around the node

    def __str__(self) -> str:
        return self.node + "".join(f"[{number}]" for number in self.at)


BACKEND_CHOICES = (Choice.BACKEND, Choice.RETRY, Choice.SKIP, Choice.FAIL)
APPROVAL_CHOICES = (Choice.APPROVE, Choice.REJECT, Choice.FAIL)


class UserQuestion(NamedTuple):
    message: str
    backends: tuple[str, ...] = ()  # that could take its place, the best first
    choices: tuple[Choice, ...] = BACKEND_CHOICES
    deadline: datetime | None = None
    pick_from: int | None = None  # of how many some may be picked


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """The record of one execution."""

    status: ExecutionStatus = ExecutionStatus.PENDING
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
    question: UserQuestion | None = None
    reused_from: Mapping[str, Any] | None = None  # job_id, and run_id if a run had made it
    asked_at: datetime | None = None  # of its last question, as is the next
    answered_at: datetime | None = None
    queued_at: datetime | None = None  # of its last job, as is the next
    started_at: datetime | None = None
    ended_at: datetime | None = None
    # Of an ended execution: the number under which its end is passed on. Of a waiting one: ends below
    # this number are not in `waiting` any more.
    end_number: int = field(default=0, compare=False)


NEW_RECORD = ExecutionRecord()


class ExecutionCounts(NamedTuple):
    """Counts of one node's executions by status; `expected` grows as fan-outs around it are
    decided.
    """

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
    alternatives: tuple[str, ...] = ()  # backends that could take the place of a lost one
    code: RunErrorCode | None = None


class HeldRange(NamedTuple):
    """Held executions of one priority and lane: the numbers of the first and of the one after the last.

    A lane is a map whose jobs run a few at a time; the rest of the run is the lane without a name.
    """

    priority: int
    lane: str
    first: int
    end: int


HeldPlace: TypeAlias = tuple[int, str, int]  # priority, lane, number
START = ExecutionKey("")  # "ends" when a run begins, which starts the nodes that wait for nothing


class Notifying(NamedTuple):
    """How far the end of one execution has been passed on to the executions behind it."""

    source: ExecutionKey
    number: int  # its `end_number`
    target: int = 0  # which of the nodes behind it
    last: Index | None = None  # the last index of that node that was notified


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
    open_count: int = 0  # executions that have not ended
    tokens: int = 0  # of jobs that are in flight or done
    error: RunError | None = None
    outputs: Mapping[str, Any] | None = None
    deadline_at: datetime | None = None  # then it fails
    paused_at: datetime | None = None  # starts no jobs until it is resumed
    # Of all that its executions took and gave; counted anew when it is read, so never compared.
    size: ValueSize = field(default=NO_SIZE, compare=False)
    outputs_size: ValueSize = field(default=NO_SIZE, compare=False)
    # Where a decision stopped before everything was decided: ended executions whose successors aren't
    # notified yet, and the first of them if that has begun.
    unnotified: tuple[ExecutionKey, ...] = ()
    notifying: Notifying | None = None
    next_end: int = field(default=0, compare=False)  # the `end_number` of the first in `unnotified`
    decision_steps: int = field(default=0, compare=False)  # of its expressions so far

    @property
    def is_cut(self) -> bool:
        """Whether the last decision has stopped before everything was decided."""
        return bool(self.unnotified) or self.notifying is not None

    def record(self, key: ExecutionKey) -> ExecutionRecord:
        found: ExecutionRecord = self.records.get(key, NEW_RECORD)
        return found

    def tally(self, node: str) -> ExecutionCounts:
        found: ExecutionCounts = self.tallies.get(node, ExecutionCounts())
        return found


def job_id(run: UUID, key: ExecutionKey, attempt: int) -> UUID:
    """Returns the id of an attempt's job; deterministic, so repeating a decision starts no second
    job.
    """
    index = ",".join(map(str, key.at))
    return uuid5(JOB_NAMES, f"{run}/{key.node}/{index}/{attempt}")


class PlacedOn(NamedTuple):
    affinity: str | None  # None: any worker


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
    """Places a job. One without affinity waits in the queue, as a worker that can run it may come.

    `is_unserved`: it has waited for that long enough.
    """
    affinity = chosen or node.backend_affinity
    backends = tuple(backends)
    if affinity is None and is_unserved:
        message = no_backend_message(workflow)
        asks = node.fallback_strategy == Fallback.ASK_USER
        return UserQuestion(message, ()) if asks else NoBackend(message)
    if affinity is None or is_online(affinity, need, backends):
        return PlacedOn(affinity)
    is_there = any(each.is_online and each.is_target_of(affinity) for each in backends)
    message = f"Backend {affinity} is offline"
    if is_there:
        message = f"Backend {affinity} can't run {workflow.name}"
    others = alternatives(need, backends)
    if node.fallback_strategy == Fallback.ASK_USER:
        return UserQuestion(message, others)
    if node.fallback_strategy == Fallback.NONE:
        return NoBackend(message, others)
    if not others:
        wanted = ", ".join(sorted(workflow.required_capabilities)) or workflow.slug
        return NoBackend(f"No backends with capabilities: {wanted}")
    return PlacedOn(others[0])


def is_self_hosted(workflow: WorkflowFacts) -> bool:
    """Whether its jobs run on our workers; what a cloud can run is not known here."""
    return workflow.effect is None or workflow.effect.provider == "self_hosted"


NO_BACKEND = "NoBackendAvailable"


def no_backend_message(workflow: WorkflowFacts) -> str:
    needed = ", ".join(sorted(workflow.required_capabilities))
    which = f" (it needs {needed})" if needed else ""
    return f"{NO_BACKEND}: no backend can run {workflow.name}{which} at the moment"


def is_online(affinity: str, need: BackendNeed, backends: Iterable[BackendState]) -> bool:
    return any(_can_run(each, need) and each.is_target_of(affinity) for each in backends)


def alternatives(need: BackendNeed, backends: Iterable[BackendState]) -> tuple[str, ...]:
    """Returns other backends: the shortest queue first, then the most free GPU memory."""
    able = [each for each in backends if _can_run(each, need)]
    able.sort(key=lambda each: (each.queue_depth, -each.free_gpu_memory_bytes, each.worker_id))
    return tuple(each.name for each in able)


def _can_run(backend: BackendState, need: BackendNeed) -> bool:
    return backend.is_online and backend.is_able(need)


# Status of an expired run. Its plan and records were removed, so nothing changes it any more.
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
    rerun_of: UUID | None = None  # the run whose results it has taken
    rerun: Mapping[str, Any] | None = None  # from which node, and what was changed
    cut: Mapping[str, Any] | None = None  # where the last decision stopped; None if it did not

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
    """A graph in a list: without its document."""

    id: UUID
    user_id: UUID
    name: str
    version: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class RunListItem:
    """A run in a list: without its snapshot, inputs, outputs and executions."""

    id: UUID
    graph_id: UUID
    graph_version: int
    name: str  # of its graph, as that is called now
    status: GraphRunStatus
    tokens: int
    max_tokens: int | None
    error: RunError | None
    created_at: datetime
    ended_at: datetime | None
    rerun_of: UUID | None = None
    paused_at: datetime | None = None


IN_QUEUE_MAX = 5
EXECUTIONS_MAX = 100_000  # of one run, where the control plane's settings don't say otherwise


@dataclass(frozen=True, slots=True)
class Environment:
    """Backends, clock and limits on which a decision depends."""

    now: datetime
    backends: tuple[BackendState, ...] = ()
    in_queue_max: int = IN_QUEUE_MAX  # jobs of one run; the rest is held
    priority_min: int = -1_000  # the tenant's range
    priority_max: int = 1_000
    # Backends that were online lately, and when; since when that is watched at all.
    lately_online: tuple[tuple[BackendState, datetime], ...] = ()
    watched_since: datetime | None = None
    no_backend_seconds: float | None = None  # None: jobs wait for a backend as long as it takes
    executions_max: int = EXECUTIONS_MAX  # of one run
    # Seconds by workflow, where machines of its fleets start on demand.
    starts_within: Mapping[str, int] = field(default_factory=dict)

    def is_unserved(self, slug: str, need: BackendNeed, since: datetime | None) -> bool:
        """Whether no backend could run a workflow for too long, within the time that the job has waited."""
        if self.no_backend_seconds is None or self.watched_since is None or since is None:
            return False
        if any(each.is_online and each.is_able(need) for each in self.backends):
            return False
        served = (at for each, at in self.lately_online if each.is_able(need))
        last = max(since, self.watched_since, *served)
        seconds = self.starts_within.get(slug, self.no_backend_seconds)
        return (self.now - last).total_seconds() >= seconds


class FailureCause(StrEnum):
    ERROR = "error"
    TIMEOUT = "timeout"
    BACKEND_LOST = "backend_lost"
    NO_TOKENS = "no_tokens"
    WITHDRAWN = "withdrawn"  # its workflow accepts no new jobs
    REFUSED = "refused"  # the job was refused: a retry would be refused too


@dataclass(frozen=True, slots=True)
class JobStarted:
    key: ExecutionKey
    attempt: int
    backend: str
    at: datetime | None = None  # None: just now


@dataclass(frozen=True, slots=True)
class JobWaiting:
    """The job is queued again: its worker was lost, or gave it back."""

    key: ExecutionKey
    attempt: int


@dataclass(frozen=True, slots=True)
class JobProgressed:
    key: ExecutionKey
    attempt: int
    progress: float  # 0 to 1
    current_step: str | None = None


@dataclass(frozen=True, slots=True)
class JobDone:
    """`output` is as `apply.job_output` makes it: files, sizes, and what was shown as text."""

    key: ExecutionKey
    attempt: int
    output: Mapping[str, Any]
    backend: str | None = None
    reused_from: Mapping[str, Any] | None = None  # the result was there: there is no job to pay for


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
    picked: tuple[int, ...] | None = None  # of an approval; None: all of it


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
        """The properties as a job takes them: files by their ids."""
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
    """The node failed for good, and the run goes on without it."""

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
