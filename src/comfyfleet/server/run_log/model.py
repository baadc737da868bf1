"""Logged messages, and filenames in the form that ComfyUI would give them. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from comfyfleet.api.values import DeliveredOutput

Event: TypeAlias = tuple[str, dict[str, Any]]
FOLDERS = ("input", "output", "temp")
# Replaces the folder of an upload whose name was taken by another upload.
REPLACED = "replaced"
PATH_CHARACTERS_MAX = 500
# Splits ComfyUI_00001_.png or video_00012.mp4 into the part before the counter, the counter and the
# rest.
_COUNTED = re.compile(r"(?P<prefix>.*_)(?P<counter>\d{2,9})(?P<rest>_?(?:\.[^./]*)?)")


# Our own message types in addition to ComfyUI's: frames that are binary in ComfyUI, prompts that
# were cancelled while queued, and runs whose client wants previews.
TEXT, PICTURE, REMOVED = "comfyfleet_text", "comfyfleet_picture", "comfyfleet_removed"
PREVIEWS = "comfyfleet_previews"
START, CACHED = "execution_start", "execution_cached"
ENDS = ("execution_success", "execution_error", "execution_interrupted")
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
FAILED_TYPE = "comfyfleet.JobFailed"


class RunEnd(NamedTuple):
    """How a run ended, for messages that its backend has not sent. `status` is completed, failed or
    cancelled.
    """

    status: str
    prompt: Mapping[str, Any] = {}
    error: str | None = None


class RunFiles(NamedTuple):
    """Outputs that a worker has delivered. `aliases` maps an output's name to the name under which
    it is already known. `file_ids` contains their files, unless their job's result does.
    """

    outputs: Sequence[DeliveredOutput] = ()
    aliases: Mapping[str, str] = {}
    file_ids: Mapping[str, UUID] = {}


NO_FILES = RunFiles()


class LoggedRun(NamedTuple):
    """The run that messages belong to, and its lease. `start_id` is 0 if its client sees its
    prompts one at a time.
    """

    tenant_id: UUID
    user_id: UUID
    job_id: UUID
    lease_number: int
    client_id: str | None = None
    prompt_id: str = ""  # as the client knows it
    report: int | None = None  # the worker's number of the report
    start_id: int | None = None

    def in_attempt(self, state: "LoggedState") -> "LoggedRun":
        """Returns the run with the row that started its attempt, if its client sees one prompt at a time.

        A prompt that ends while no worker runs it isn't part of an attempt: that row stands for itself.
        """
        if self.start_id is None or not state.is_running:
            return self
        return self._replace(start_id=state.start_id or 0)


class LoggedState(NamedTuple):
    """A job's lease and the state of its log, read under the locks that every writer of the log
    takes.
    """

    lease_token: UUID | None
    lease_number: int
    is_running: bool
    start_lease: int | None  # the lease under which `execution_start` was logged
    has_end: bool
    is_reported: bool  # the report in question was logged before
    start_id: int | None = None  # the row that started the current attempt

    def holds(self, token: UUID) -> bool:
        """Whether the job runs under this lease. Reports of any other lease are dropped."""
        return self.is_running and self.lease_token == token


@dataclass(frozen=True, slots=True)
class LoggedEvents:
    """One report of a worker. `is_last` means that its job has ended with it. `start_id` is the row
    that started its attempt, or None if sockets show the row at once, regardless of their client's
    other prompts.
    """

    id: int
    job_id: UUID
    client_id: str | None
    prompt_id: str
    events: Sequence[Event]
    is_last: bool
    start_id: int | None = None


class StartedAttempt(NamedTuple):
    """An attempt of a prompt that has logged messages and is shown in order."""

    start_id: int
    job_id: UUID
    client_id: str | None


class Cursor(NamedTuple):
    """How much of a user's run log a client was sent.

    Of the rows that are shown in order, it was sent everything up to `floor`, all attempts that
    started before `start_id`, and everything up to `row` of that attempt. Of other rows, it was
    sent everything up to `seen`.
    """

    seen: int
    start_id: int
    row: int
    floor: int


def cursor_at(row_id: int) -> Cursor:
    """Returns the cursor of a client that was sent everything up to this row."""
    return Cursor(seen=row_id, start_id=0, row=0, floor=row_id)


class LogLook(NamedTuple):
    """The number of queued and running prompts, and the messages since the last read, at one
    moment.
    """

    active: int
    rows: list[LoggedEvents]
    has_more: bool = False


class LogPage(NamedTuple):
    """Rows of the log, limited to what a reader handles at once."""

    rows: list[LoggedEvents]
    has_more: bool


class UserFile(NamedTuple):
    """A file under its user's name for it: an upload or an output of a job."""

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
    """The location of a file on a backend, inside the job's own folder."""

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
    found = _COUNTED.fullmatch(path)
    if found is None:
        return None
    counter = found["counter"]
    return CountedName(found["prefix"], int(counter), len(counter), found["rest"])


def delivered_files(outputs: Iterable[DeliveredOutput]) -> dict[BackendFile, str]:
    """Returns the names of outputs by their location on the backend."""
    return {
        BackendFile(each.folder, each.subfolder or "", each.filename or each.name): each.name
        for each in outputs
        if each.folder in FOLDERS
    }


# The largest plausible number of images in a batch.
BATCH_MAX = 4_096
OUTPUT = "output"


class CounterRange(NamedTuple):
    """The numbers that a report's files of one prefix have on their backend."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def counters_used(
    files: Iterable[BackendFile], *, after: Iterable[UserFile] = ()
) -> dict[tuple[str, str], CounterRange]:
    """Returns the ranges by folder and prefix. `after` contains files that the same run has named
    before. A prefix without any begins with 1, as in the folder of a run, because each image of a
    batch may have its own prefix.
    """
    named = ((each.folder, split_counter(each.path)) for each in after)
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
    """Returns the file's path if this many numbers of its prefix were used before."""
    counted = split_counter(file.path)
    if counted is None:
        return file.path
    key = file.folder, counted.prefix
    return counted.at(before.get(key, 0) + counted.counter - ranges[key].first + 1)


def with_other_files(
    value: Any, renamed: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
) -> Any:
    """Returns the same JSON in which each object that names a file is replaced by the result of
    `renamed`.
    """
    if isinstance(value, Mapping):
        if "filename" in value and "type" in value:
            return renamed(value) or value
        return {key: with_other_files(each, renamed) for key, each in value.items()}
    return [with_other_files(each, renamed) for each in value] if isinstance(value, list) else value


def with_prompt_id(value: Any, prompt_id: str) -> Any:
    """Returns the same JSON in which each `prompt_id` is the client's."""
    if isinstance(value, Mapping):
        return {
            key: prompt_id if key == "prompt_id" else with_prompt_id(each, prompt_id)
            for key, each in value.items()
        }
    return [with_prompt_id(each, prompt_id) for each in value] if isinstance(value, list) else value


def file_named(value: Mapping[str, Any]) -> BackendFile:
    """Returns the file that a node's output names."""
    subfolder = str(value.get("subfolder") or "").replace("\\", "/").strip("/")
    return BackendFile(str(value.get("type")), subfolder, str(value.get("filename")))


def record_from(
    events: Iterable[Event], history: Mapping[str, Any] | None, *, is_success: bool
) -> dict[str, Any]:
    """Returns the history record of a run: the backend's own if it was reported, and otherwise one
    built from the messages.
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
        elif kind.startswith("execution_"):
            messages.append([kind, data])
    status = "success" if is_success else "error"
    return {
        "outputs": outputs,
        "meta": meta,
        "status": {"status_str": status, "completed": is_success, "messages": messages},
    }


def told_by_run(events: Iterable[Event]) -> list[Event]:
    """Returns the events that a run may report. Only the control plane may log prompts that were
    removed.
    """
    return [(kind, data) for kind, data in events if kind != REMOVED]


def sound_record(history: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a backend's history entry without parts that don't have the format that clients and
    the control plane expect.
    """
    status = history["status"]
    messages = [
        [each[0], each[1]]
        for each in (status.get("messages") if isinstance(status.get("messages"), list) else ())
        if isinstance(each, list | tuple)
        and len(each) == 2
        and isinstance(each[0], str)
        and isinstance(each[1], Mapping)
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
    found = value.items() if isinstance(value, Mapping) else ()
    return {str(key): each for key, each in found if isinstance(each, Mapping)}


def names_files(row: LoggedEvents) -> bool:
    return any(kind == "executed" and data.get("output") for kind, data in row.events)


def without_results(events: Iterable[Event]) -> list[Event]:
    """Removes events that contain results of nodes. A failed run isn't paid for, so its results
    must not be given away.
    """
    return [
        (kind, data)
        for kind, data in events
        if kind != PICTURE and not (kind == "executed" and data.get("output"))
    ]


def is_ended(events: Iterable[Event]) -> bool:
    return any(kind in ENDS for kind, _ in events)


def starts(events: Iterable[Event]) -> bool:
    return any(kind == START for kind, _ in events)


def without_repeated_start(
    events: Iterable[Event], state: LoggedState, lease_number: int
) -> list[Event]:
    """Returns the events with `execution_start` only if the log has none.

    A later attempt also leaves out `execution_cached`: its client sees one run that continues.
    """
    is_later_attempt = state.start_lease is not None and state.start_lease < lease_number
    has_start = state.start_lease is not None
    kept: list[Event] = []
    for kind, data in events:
        if (kind == START and has_start) or (kind == CACHED and is_later_attempt):
            continue
        has_start = has_start or kind == START
        kept.append((kind, data))
    return kept


def without_ends(events: Iterable[Event]) -> list[Event]:
    """Removes ends, because only a run's last report ends it. Before that, another worker may still
    run it again.
    """
    return [(kind, data) for kind, data in events if kind not in ENDS]


def with_one_end(events: Iterable[Event]) -> list[Event]:
    """Returns the events without those that repeat the first end."""
    kept: list[Event] = []
    for kind, data in events:
        if kind not in ENDS or not is_ended(kept):
            kept.append((kind, data))
    return kept


def missing_events(
    prompt_id: str,
    end: RunEnd,
    heard: Sequence[Event],
    at: datetime,
    *,
    history: Mapping[str, Any] | None = None,
) -> list[Event]:
    """Returns the messages that ComfyUI would have sent but that were not reported: a start,
    results in the backend's history, and an end.
    """
    if is_ended(heard):
        return []
    opening = {"prompt_id": prompt_id, "timestamp": int(at.timestamp() * 1000)}
    first: list[Event] = [] if starts(heard) else [(START, opening)]
    results = results_unheard(prompt_id, history or {}, heard) if end.status == COMPLETED else []
    return [*first, *results, end_event(prompt_id, end, heard, at)]


def results_unheard(
    prompt_id: str, history: Mapping[str, Any], heard: Iterable[Event]
) -> list[Event]:
    outputs, meta = _mappings(history.get("outputs")), _mappings(history.get("meta"))
    known = _executed(heard)
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
        if node_id not in known
    ]


def end_event(prompt_id: str, end: RunEnd, heard: Iterable[Event], at: datetime) -> Event:
    heard = list(heard)
    node_id = current_node(heard)
    timestamp = int(at.timestamp() * 1000)
    if end.status == COMPLETED:
        return "execution_success", {"prompt_id": prompt_id, "timestamp": timestamp}
    data: dict[str, Any] = {
        "prompt_id": prompt_id,
        "node_id": node_id,
        "node_type": end.prompt.get(node_id or "", {}).get("class_type"),
        "executed": sorted(_executed(heard)),
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


def current_node(heard: Iterable[Event]) -> str | None:
    nodes = [data.get("node") for kind, data in heard if kind == "executing"]
    return str(nodes[-1]) if nodes and nodes[-1] is not None else None


def _executed(heard: Iterable[Event]) -> set[str]:
    return {str(data.get("node")) for kind, data in heard if kind == "executed"}


def _meta(node_id: str, data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "display_node": str(data.get("display_node") or node_id),
        "parent_node": None,
        "real_node_id": node_id,
    }
