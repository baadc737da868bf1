"""Defines the logged messages of runs, and derives output filenames in ComfyUI's format. This
module does no I/O."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from comfyfleet.api.values import DeliveredOutput

Event: TypeAlias = tuple[str, dict[str, Any]]
FOLDERS = ("input", "output", "temp")
# The folder of an upload whose name was reassigned to another upload.
REPLACED = "replaced"
PATH_CHARACTERS_MAX = 500
# Splits a filename such as ComfyUI_00001_.png or video_00012.mp4 into the part before the counter,
# the counter and the rest.
_COUNTED = re.compile(r"(?P<prefix>.*_)(?P<counter>\d{2,9})(?P<rest>_?(?:\.[^./]*)?)")


# Our own message types, in addition to ComfyUI's types. The first two represent frames that are
# binary in ComfyUI. The others represent prompts that were canceled while queued, and runs whose
# client requested previews.
TEXT, PICTURE, REMOVED = "comfyfleet_text", "comfyfleet_picture", "comfyfleet_removed"
PREVIEWS = "comfyfleet_previews"
START, CACHED = "execution_start", "execution_cached"
ENDS = ("execution_success", "execution_error", "execution_interrupted")
# The exception type of ComfyUI's `execution_error` about a blocked node. The run continues with
# other nodes.
BLOCKED_TYPE = "ExecutionBlocked"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
FAILED_TYPE = "comfyfleet.JobFailed"


class RunEnd(NamedTuple):
    """The end of a run. It is used to build messages that the backend hasn't sent. `status` is
    completed, failed or cancelled.
    """

    status: str
    prompt: Mapping[str, Any] = {}
    error: str | None = None


class RunFiles(NamedTuple):
    """Outputs that a worker has delivered. `aliases` maps an output's name to the name under which
    it was stored earlier. `file_ids` contains the ids of the outputs' files, unless the job's
    result contains them.
    """

    outputs: Sequence[DeliveredOutput] = ()
    aliases: Mapping[str, str] = {}
    file_ids: Mapping[str, UUID] = {}


NO_FILES = RunFiles()


class LoggedRun(NamedTuple):
    """The run that messages belong to, and its lease. `start_id` is 0 if the client sees its
    prompts run one after another.
    """

    tenant_id: UUID
    user_id: UUID
    job_id: UUID
    lease_number: int
    client_id: str | None = None
    prompt_id: str = ""  # the id that the client uses
    report: int | None = None  # the number that the worker gave to the report
    start_id: int | None = None

    def in_attempt(self, state: "LoggedState") -> "LoggedRun":
        """Adds the row that started the current attempt to the run if its client sees its prompts
        run one after another.

        A prompt that ends while no worker is running it doesn't belong to an attempt, so its row is
        separate.
        """
        if self.start_id is None or not state.is_running:
            return self
        return self._replace(start_id=state.start_id or 0)


class LoggedState(NamedTuple):
    """A job's lease and the state of its log. It is read while the log is locked, so no other
    writer can change it.
    """

    lease_token: UUID | None
    lease_number: int
    is_running: bool
    start_lease: int | None  # the lease under which `execution_start` was logged
    has_end: bool
    is_reported: bool  # whether the current report has already been logged
    start_id: int | None = None  # id of the row that started the current attempt

    def holds(self, token: UUID) -> bool:
        """Checks whether the job is running under this lease. Reports of other leases are
        dropped."""
        return self.is_running and self.lease_token == token


@dataclass(frozen=True, slots=True)
class LoggedEvents:
    """The events in a worker's report. `is_last` means that the job ended with this report.
    `start_id` is the row that started the attempt, or None if the events are sent to sockets
    immediately, regardless of the client's other prompts.
    """

    id: int
    job_id: UUID
    client_id: str | None
    prompt_id: str
    events: Sequence[Event]
    is_last: bool
    start_id: int | None = None


class StartedAttempt(NamedTuple):
    """An attempt that has logged messages and whose client sees its prompts run one after
    another.
    """

    start_id: int
    job_id: UUID
    client_id: str | None


class Cursor(NamedTuple):
    """The position up to which a client has been sent a user's run log.

    Of the rows that are sent in order, the client has received all rows up to `floor`, all attempts
    that started before `start_id`, and the rows up to `row` of the attempt `start_id`. Of the other
    rows, it has received all up to `seen`.
    """

    seen: int
    start_id: int
    row: int
    floor: int


def cursor_at(row_id: int) -> Cursor:
    """Returns the cursor of a client that has been sent all rows up to this one."""
    return Cursor(seen=row_id, start_id=0, row=0, floor=row_id)


class LogLook(NamedTuple):
    """A snapshot of a user's log: the number of queued and running prompts, and the messages since
    the last read.
    """

    active: int
    rows: list[LoggedEvents]
    has_more: bool = False


class LogPage(NamedTuple):
    """A page of log rows. If `has_more` is true, the reader must read again."""

    rows: list[LoggedEvents]
    has_more: bool


class UserFile(NamedTuple):
    """An upload or a job's output, with the folder and path under which its user sees it."""

    folder: str
    path: str
    file_id: UUID | None = None
    job_id: UUID | None = None
    output: str | None = None

    @property
    def subfolder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def filename(self) -> str:
        return self.path.rpartition("/")[2]


class BackendFile(NamedTuple):
    """The location of a file on a backend, relative to the job's folder."""

    folder: str
    subfolder: str
    filename: str

    @property
    def path(self) -> str:
        return f"{self.subfolder}/{self.filename}" if self.subfolder else self.filename


class CountedName(NamedTuple):
    prefix: str
    counter: int
    digits: int
    rest: str

    def at(self, counter: int) -> str:
        return f"{self.prefix}{counter:0{self.digits}}{self.rest}"


def split_counter(path: str) -> CountedName | None:
    """Splits a path at its counter. Returns None if it has no counter."""
    match = _COUNTED.fullmatch(path)
    if match is None:
        return None
    counter = match["counter"]
    return CountedName(match["prefix"], int(counter), len(counter), match["rest"])


def delivered_files(outputs: Iterable[DeliveredOutput]) -> dict[BackendFile, str]:
    """Returns the names of outputs by their locations on the backend."""
    return {
        BackendFile(
            output.folder, output.subfolder or "", output.filename or output.name
        ): output.name
        for output in outputs
        if output.folder in FOLDERS
    }


# Largest plausible number of images in a batch. A new range only starts at 1 if its first counter
# isn't larger.
BATCH_MAX = 4_096
OUTPUT = "output"


class CounterRange(NamedTuple):
    """The range of counters in a report's filenames that have the same prefix on the backend."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def counters_used(
    files: Iterable[BackendFile], *, after: Iterable[UserFile] = ()
) -> dict[tuple[str, str], CounterRange]:
    """Returns the ranges of counters by folder and prefix. `after` contains files that the same run
    has already named. The range of a new prefix starts at 1, as in an empty output folder, because
    each image of a batch may have a different prefix.
    """
    named = ((file.folder, split_counter(file.path)) for file in after)
    known = {(folder, counted.prefix) for folder, counted in named if counted}
    used: dict[tuple[str, str], CounterRange] = {}
    for file in files:
        if counted := split_counter(file.path):
            key, number = (file.folder, counted.prefix), counted.counter
            is_first = file.folder == OUTPUT and key not in known and number <= BATCH_MAX
            start = 1 if is_first else number
            first, last = used.get(key, CounterRange(start, number))
            used[key] = CounterRange(min(first, number), max(last, number))
    return used


def path_after(
    file: BackendFile,
    ranges: Mapping[tuple[str, str], CounterRange],
    before: Mapping[tuple[str, str], int],
) -> str:
    """Returns the path of a file. `before` contains the number of counters that are already in use
    for each prefix.
    """
    counted = split_counter(file.path)
    if counted is None:
        return file.path
    key = file.folder, counted.prefix
    return counted.at(before.get(key, 0) + counted.counter - ranges[key].first + 1)


def with_other_files(
    value: Any, renamed: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
) -> Any:
    """Returns a copy of the JSON value in which each object that names a file is replaced by the
    result of `renamed`.
    """
    if isinstance(value, Mapping):
        if "filename" in value and "type" in value:
            return renamed(value) or value
        return {key: with_other_files(item, renamed) for key, item in value.items()}
    return [with_other_files(item, renamed) for item in value] if isinstance(value, list) else value


def with_prompt_id(value: Any, prompt_id: str) -> Any:
    """Returns a copy of the JSON value in which each `prompt_id` is replaced by the client's prompt
    id.
    """
    if isinstance(value, Mapping):
        return {
            key: prompt_id if key == "prompt_id" else with_prompt_id(item, prompt_id)
            for key, item in value.items()
        }
    return [with_prompt_id(item, prompt_id) for item in value] if isinstance(value, list) else value


def file_named(value: Mapping[str, Any]) -> BackendFile:
    """Returns the location of the file that an entry of a node's output names."""
    subfolder = str(value.get("subfolder") or "").replace("\\", "/").strip("/")
    return BackendFile(str(value.get("type")), subfolder, str(value.get("filename")))


def record_from(
    events: Iterable[Event], history: Mapping[str, Any] | None, *, is_success: bool
) -> dict[str, Any]:
    """Returns the history record of a run. Uses the backend's record if it was reported, and
    otherwise builds one from the messages.
    """
    if history and isinstance(history.get("status"), Mapping):
        return sound_record(history)
    outputs: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    messages: list[list[Any]] = []
    for kind, data in events:
        if kind == "executed" and data.get("output") is not None:
            node_id = str(data.get("node"))
            outputs[node_id] = data["output"]
            meta[node_id] = _meta(node_id, data)
        elif kind.startswith("execution_") and data.get("exception_type") != BLOCKED_TYPE:
            messages.append([kind, data])
    status = "success" if is_success else "error"
    return {
        "outputs": outputs,
        "meta": meta,
        "status": {"status_str": status, "completed": is_success, "messages": messages},
    }


def reportable_events(events: Iterable[Event]) -> list[Event]:
    """Returns the events that a run may report. The event for removed prompts is dropped, because
    only the control plane may log it.
    """
    return [(kind, data) for kind, data in events if kind != REMOVED]


def sound_record(history: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a backend's history entry without the parts that don't have the expected format."""
    status = history["status"]
    messages = [
        [entry[0], entry[1]]
        for entry in (status.get("messages") if isinstance(status.get("messages"), list) else ())
        if isinstance(entry, list | tuple)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and isinstance(entry[1], Mapping)
    ]
    return {
        "outputs": _mappings(history.get("outputs")),
        "meta": _mappings(history.get("meta")),
        "status": {
            **status,
            "status_str": str(status.get("status_str", "")),
            "completed": bool(status.get("completed")),
            "messages": messages,
        },
    }


def _mappings(value: object) -> dict[str, Any]:
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(key): item for key, item in items if isinstance(item, Mapping)}


def names_files(row: LoggedEvents) -> bool:
    return any(kind == "executed" and data.get("output") for kind, data in row.events)


def without_results(events: Iterable[Event]) -> list[Event]:
    """Removes events that contain results of nodes. A failed run isn't paid for, so its results
    must not be revealed.
    """
    return [
        (kind, data)
        for kind, data in events
        if kind != PICTURE and not (kind == "executed" and data.get("output"))
    ]


def is_ended(events: Iterable[Event]) -> bool:
    return any(is_end(event) for event in events)


def is_end(event: Event) -> bool:
    """Checks whether an event ends its run. The message about a blocked node has the type of an
    error, but doesn't end the run.
    """
    kind, data = event
    return kind in ENDS and data.get("exception_type") != BLOCKED_TYPE


def starts(events: Iterable[Event]) -> bool:
    return any(kind == START for kind, _ in events)


def without_repeated_start(
    events: Iterable[Event], state: LoggedState, lease_number: int
) -> list[Event]:
    """Removes `execution_start` from the events if the log already contains one.

    For a later attempt, also removes `execution_cached`, so that the client sees a single run that
    continues.
    """
    is_later_attempt = state.start_lease is not None and state.start_lease < lease_number
    has_start = state.start_lease is not None
    remaining: list[Event] = []
    for kind, data in events:
        if (kind == START and has_start) or (kind == CACHED and is_later_attempt):
            continue
        has_start = has_start or kind == START
        remaining.append((kind, data))
    return remaining


def without_ends(events: Iterable[Event]) -> list[Event]:
    """Removes events that end the run. Only its final report may contain one, because until then
    another worker may run the job again.
    """
    return [event for event in events if not is_end(event)]


def with_one_end(events: Iterable[Event]) -> list[Event]:
    """Removes all events that end the run except for the first one."""
    remaining: list[Event] = []
    has_end = False
    for event in events:
        if not is_end(event) or not has_end:
            remaining.append(event)
        has_end = has_end or is_end(event)
    return remaining


def missing_events(
    prompt_id: str,
    end: RunEnd,
    reported: Sequence[Event],
    at: datetime,
    *,
    history: Mapping[str, Any] | None = None,
) -> list[Event]:
    """Returns the messages that ComfyUI would have sent but the worker didn't report: a start,
    results that are only in the backend's history, and an end.
    """
    if is_ended(reported):
        return []
    opening = {"prompt_id": prompt_id, "timestamp": int(at.timestamp() * 1000)}
    first: list[Event] = [] if starts(reported) else [(START, opening)]
    results = (
        unreported_results(prompt_id, history or {}, reported) if end.status == COMPLETED else []
    )
    return [*first, *results, end_event(prompt_id, end, reported, at)]


def unreported_results(
    prompt_id: str, history: Mapping[str, Any], reported: Iterable[Event]
) -> list[Event]:
    outputs, meta = _mappings(history.get("outputs")), _mappings(history.get("meta"))
    reported_nodes = _executed(reported)
    return [
        (
            "executed",
            {
                "node": node_id,
                "display_node": str(meta.get(node_id, {}).get("display_node") or node_id),
                "output": output,
                "prompt_id": prompt_id,
            },
        )
        for node_id, output in outputs.items()
        if node_id not in reported_nodes
    ]


def end_event(prompt_id: str, end: RunEnd, reported: Iterable[Event], at: datetime) -> Event:
    reported = list(reported)
    node_id = current_node(reported)
    timestamp = int(at.timestamp() * 1000)
    if end.status == COMPLETED:
        return "execution_success", {"prompt_id": prompt_id, "timestamp": timestamp}
    data: dict[str, Any] = {
        "prompt_id": prompt_id,
        "node_id": node_id,
        "node_type": end.prompt.get(node_id or "", {}).get("class_type"),
        "executed": sorted(_executed(reported)),
    }
    if end.status == CANCELLED:
        return "execution_interrupted", {**data, "timestamp": timestamp}
    failure = {
        "exception_message": end.error or "The prompt failed.",
        "exception_type": FAILED_TYPE,
        "traceback": [],
        "current_inputs": {},
        "current_outputs": [],
        "timestamp": timestamp,
    }
    return "execution_error", {**data, **failure}


def current_node(reported: Iterable[Event]) -> str | None:
    nodes = [data.get("node") for kind, data in reported if kind == "executing"]
    return str(nodes[-1]) if nodes and nodes[-1] is not None else None


def _executed(reported: Iterable[Event]) -> set[str]:
    return {str(data.get("node")) for kind, data in reported if kind == "executed"}


def _meta(node_id: str, data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "display_node": str(data.get("display_node") or node_id),
        "parent_node": None,
        "real_node_id": node_id,
    }
